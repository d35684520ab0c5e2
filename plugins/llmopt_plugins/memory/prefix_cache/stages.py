"""The stages of the prefix cache: blocks are found in `lookup`, entered in `commit`, let go in `allocate.free`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from llmopt.request import RequestStatus
from llmopt_plugins.memory.prefix_cache.chain import KEY_BYTES
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch, StepOutput
    from llmopt.build_context import BuildContext
    from llmopt.kv_cache import KVCache
    from llmopt.request import Request
    from llmopt.stages import Allocate, Commit, Lookup
    from llmopt_plugins.memory.prefix_cache.chain import Chain
    from llmopt_plugins.memory.prefix_cache.index import BlockIndex
    from llmopt_plugins.memory.prefix_cache.model_watch import ModelWatch

_MIN_AWAITED_TOKENS = 16  # fewer are computed again rather than waited for
_MAX_VAIN_WAITS = 8  # lookups without progress of the other request, after which nobody waits for it


class Source(Protocol):
    """Somewhere else where KV of blocks may be."""

    def __call__(self, request: Request, chain: Chain, start: int, end: int) -> list[int]:
        """Bring blocks number ``start`` to at most ``end`` of a request back to the pool, as many as there are.

        Called when the blocks before are held. Returns blocks of the pool, held once, with their content.
        """


class CachedLookup(Wrapping):
    """Look for the tokens of a request among the blocks of earlier and of running ones.

    :param inner: the stage before this one; what it finds goes first.
    """

    inner: Lookup

    def __init__(
        self, inner: Lookup, index: BlockIndex, kv_cache: KVCache, context: BuildContext, watch: ModelWatch
    ) -> None:
        super().__init__(inner)
        self.index = index
        self.kv_cache = kv_cache
        self.context = context
        self.watch = watch
        self.sources: list[Source] = []  # asked for blocks that are not in the pool
        self.pending: dict[bytes, Request] = {}  # key -> who is about to compute the block
        self.num_lookups = self.num_hits = self.num_waits = self.num_copies = 0
        self.num_tokens = self.num_cached_tokens = 0

    def __call__(self, request: Request) -> int | None:
        found = self.inner(request)
        if found is None:
            return None
        index = self.index
        queue = self.context.queue
        if queue is not None and not queue.running and self.watch.has_changed():
            index.clear()
        chain = self.chain_of(request)
        chain.reset()
        if found == 0 and not request.block_table:
            blocks = index.match(chain, request, request.num_tokens - 1)
            if self._should_wait(request, chain, len(blocks)):
                self.num_waits += 1
                return None
            found = self._take(request, chain, blocks)
        chain.next_end = (chain.num_entered + 1) * index.pool.block_size
        chain.num_found = found
        chain.num_foreign = min(chain.num_foreign, chain.num_entered)
        self._announce(request, chain)
        self.num_lookups += 1
        self.num_hits += found > 0
        self.num_tokens += request.num_tokens
        self.num_cached_tokens += found
        return found

    def chain_of(self, request: Request) -> Chain:
        """The chain of a request, made when it is first asked for."""
        chains = self.index.chains
        chain = chains.get(request)
        if chain is None:
            salt = self.salt_of(request.adapter, request.tenant, request.cache_salt)
            chain = chains[request] = self.index.new_chain(salt)
            chain.is_durable = request.adapter is None
        return chain

    def salt_of(self, adapter: str | None, tenant: str | None, cache_salt: str | None) -> bytes:
        """What must be equal, beside the tokens, for two requests to share KV."""
        # a plugin that loads adapters names each loading, so that another one under the same name is another
        key = None if adapter is None else getattr(self.context.stages.adapt, "adapter_key", str)(adapter)
        return repr((key, tenant, cache_salt)).encode()

    def num_cached(self, request: Request) -> int:
        """How many leading tokens of a waiting request are in full blocks of the pool. Changes nothing."""
        if request.media is not None:
            return 0
        blocks = self.index.match(self.chain_of(request), request, request.num_tokens - 1)
        return len(blocks) * self.index.pool.block_size

    def _take(self, request: Request, chain: Chain, blocks: list[int]) -> int:
        """Hold what was found, and copy the part of the block after it that is the same. Returns the tokens."""
        index, pool, size = self.index, self.index.pool, self.index.pool.block_size
        pool.share(blocks)
        request.block_table.extend(blocks)
        chain.num_entered = len(blocks)
        if blocks:
            chain.serial = int(index.serials[blocks[-1]])
        for source in self.sources:
            for block in source(request, chain, len(request.block_table), (request.num_tokens - 1) // size):
                place = len(request.block_table)
                request.block_table.append(block)
                if place == chain.num_entered:
                    index.enter_blocks(chain, [block], request.token_ids[place * size : (place + 1) * size])
        found = len(request.block_table) * size
        if chain.num_entered * size < found:
            return found  # an equal key of another content: nothing is known of what follows
        rest = request.token_ids[found : min(found + size, request.num_tokens - 1)]
        origin, count = index.match_part(chain.serial, rest)
        if count == 0 or chain.has_failed:  # a request that lacks blocks asks again in every step
            return found
        pool.share([origin])  # so that the next line cannot evict it
        if pool.num_free:
            (copy,) = pool.allocate(1)
            self.kv_cache.copy_block(origin, copy)
            request.block_table.append(copy)
            found += count
            self.num_copies += 1
        pool.free([origin])
        return found

    def _should_wait(self, request: Request, chain: Chain, num_blocks: int) -> bool:
        """Whether another request is computing what this one needs next, and waiting for it is cheaper.

        Both would compute the same tokens in the same steps otherwise, so waiting costs at most a step without this
        request. For less than that it is not worth it.
        """
        size = self.index.pool.block_size
        end = (request.num_tokens - 1) // size
        if num_blocks >= end:
            return False
        other = self.pending.get(bytes(chain.keys[num_blocks * KEY_BYTES : (num_blocks + 1) * KEY_BYTES]))
        if other is None or other is request or other.status is not RequestStatus.RUNNING:
            return False
        keys = self.index.chains[other].keys
        count = num_blocks
        while count < end and keys[: (count + 1) * KEY_BYTES] == chain.keys[: (count + 1) * KEY_BYTES]:
            count += 1
        if not self._is_worth_a_step((count - num_blocks) * size):
            return False
        awaited, progress, times = chain.awaited or (None, 0, 0)
        if awaited is other and progress == other.num_computed_tokens:
            if times >= _MAX_VAIN_WAITS:
                return False
            chain.awaited = (other, progress, times + 1)
        else:
            chain.awaited = (other, other.num_computed_tokens, 0)
        return True

    def _is_worth_a_step(self, num_tokens: int) -> bool:
        cost = self.context.cost_model
        if cost.measured is None:
            return num_tokens >= _MIN_AWAITED_TOKENS
        return cost.step_s(num_tokens) > 2 * cost.step_s(1)

    def _announce(self, request: Request, chain: Chain) -> None:
        for place in range(chain.num_entered * KEY_BYTES, len(chain.keys), KEY_BYTES):
            self.pending.setdefault(bytes(chain.keys[place : place + KEY_BYTES]), request)

    def release(self, request: Request) -> None:
        """A request gives back its blocks."""
        chain = self.index.chains.get(request)
        if chain is None:
            return
        for place in range(0, len(chain.keys), KEY_BYTES):
            key = bytes(chain.keys[place : place + KEY_BYTES])
            if self.pending.get(key) is request:
                del self.pending[key]
        if request.status is RequestStatus.WAITING and chain.num_found >= 0:
            self._take_back(request, chain)
        if request.is_finished:
            del self.index.chains[request]
        else:
            chain.reset()

    def _take_back(self, request: Request, chain: Chain) -> None:
        """It could not start: this lookup does not count."""
        chain.has_failed = True
        self.num_lookups -= 1
        self.num_hits -= chain.num_found > 0
        self.num_tokens -= request.num_tokens
        self.num_cached_tokens -= chain.num_found

    def stats(self) -> dict[str, float]:
        pool = self.index.pool
        return {
            "num_lookups": self.num_lookups,  # of requests that started
            "num_hits": self.num_hits,
            "num_tokens": self.num_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "hit_rate": self.num_cached_tokens / max(1, self.num_tokens),
            "num_copies": self.num_copies,  # blocks of which a part was used
            "num_waits": self.num_waits,  # lookups that waited for another request
            "num_cached_blocks": pool.num_keys,
            "num_evicted_blocks": pool.num_evicted,
            "num_collisions": self.index.num_collisions,
        }

    def describe(self) -> str:
        return f"blocks of {self.index.pool.block_size} tokens, kept until their memory is needed"


class CachedAllocate(Wrapping):
    """Enter the blocks of a request that ends, before they are given back."""

    inner: Allocate

    def __init__(self, inner: Allocate, lookup: CachedLookup) -> None:
        super().__init__(inner)
        self.lookup = lookup
        self.is_committing = False  # inside of `commit`: what is computed is known, and right

    def __call__(self, request: Request, num_tokens: int) -> bool:
        return self.inner(request, num_tokens)

    def free(self, request: Request) -> None:
        index = self.lookup.index
        chain = index.chains.get(request)
        if chain is not None:
            if request.finish_reason == "error":
                self._forget(chain)
            elif self.is_committing:
                if request.num_computed_tokens >= chain.next_end:
                    index.enter(request, chain)
                index.enter_part(request, chain)
            self.lookup.release(request)
        self.inner.free(request)

    def _forget(self, chain: Chain) -> None:
        """What a failed request has computed may be wrong; what it found was there before it."""
        index = self.lookup.index
        for block in index.pool.find(bytes(chain.keys))[chain.num_foreign :]:
            if index.pool.ref_counts[block] <= 1:
                index.forget(block)

    def num_blocks_ever(self, request: Request) -> int:
        return self.inner.num_blocks_ever(request)


class CachedCommit(Wrapping):
    """Enter the blocks that a step has filled: tokens that were chosen, never rejected drafts."""

    inner: Commit

    def __init__(self, inner: Commit, index: BlockIndex, allocate: CachedAllocate) -> None:
        super().__init__(inner)
        self.index = index
        self.allocate = allocate

    def __call__(self, batch: Batch, accepted: AcceptedTokens) -> StepOutput:
        allocate, chains = self.allocate, self.index.chains
        allocate.is_committing = True
        try:
            output = self.inner(batch, accepted)
        finally:
            allocate.is_committing = False
        for request in batch.requests:
            chain = chains.get(request)
            if chain is not None and request.num_computed_tokens >= chain.next_end:
                self.index.enter(request, chain)
        return output


class IdleLookup(Wrapping):
    """The lookup of a model whose KV alone does not tell how it goes on: nothing is kept."""

    inner: Lookup

    def __init__(self, inner: Lookup, reason: str) -> None:
        super().__init__(inner)
        self.reason = reason

    def __call__(self, request: Request) -> int | None:
        return self.inner(request)

    def describe(self) -> str:
        return f"keeps nothing: {self.reason}"
