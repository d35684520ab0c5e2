"""The draft model's view of the target's requests: a twin of each, with KV blocks of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt.request import Request

if TYPE_CHECKING:
    from llmopt.block_pool import BlockPool


class Twins:
    """Twins by request. Blocks are taken as tokens come; those of twins that wait longest go first.

    Invariant: the first ``num_computed_tokens`` ids of a twin are those whose KV lies in its blocks. They follow the
    target's request as far as it is known, and behind that what was drafted.

    :param max_len: tokens that the draft model can hold.
    :param vocab_size: ids from here on mean nothing to the draft model.
    """

    def __init__(self, pool: BlockPool, max_len: int, vocab_size: int, max_num_draft: int) -> None:
        self.pool, self.max_len, self.vocab_size = pool, max_len, vocab_size
        self.max_num_draft = max_num_draft
        self._twins: dict[Request, Request] = {}  # those that drafted last stand last
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._twins)

    def follow(self, request: Request) -> Request | None:
        """The twin of a request, with its tokens; KV of drafts that were not accepted is no longer counted.

        None when the draft model cannot follow: the sequence is longer than its context, or holds ids that it lacks.
        """
        count = request.num_tokens
        if count > self.max_len:
            self.forget(request)
            return None
        twin = self._twins.pop(request, None)
        if twin is None:
            twin = self._make(request)
        known = twin.num_computed_tokens
        ids = request.token_ids[:count]
        same = twin.token_ids[: min(known, count)] == ids[: min(known, count)]
        agreed = int(same.size if same.all() else same.argmin())
        fresh = ids[agreed:]
        if fresh.size and int(fresh.max()) >= self.vocab_size:
            self._twins[request] = twin
            return None
        twin.token_ids[agreed:count] = fresh
        twin.num_tokens = count
        twin.num_computed_tokens = min(agreed, count - 1)  # its newest token is always computed: its logits are needed
        self._twins[request] = twin
        return twin

    def drafted(self, request: Request, count: int) -> Request | None:
        """The twin, to go on behind its first ``count`` tokens, some of which it drafted; None when there is none."""
        twin = self._twins.get(request)
        if twin is not None:
            twin.num_tokens = count
            twin.num_computed_tokens = min(twin.num_computed_tokens, count - 1)
        return twin

    def _make(self, request: Request) -> Request:
        twin = Request(
            request_id=request.request_id,
            prompt_ids=[],
            sampling=request.sampling,
            max_len=min(request.max_len, self.max_len) + self.max_num_draft + 1,
            eos_token_ids=request.eos_token_ids,
            seed=request.seed,
            slot=0,
            wants_text=False,
        )
        twin.prompt_ids = request.prompt_ids  # penalties tell prompt and output apart; ids are copied by `follow`
        return twin

    def reserve(self, twins: list[Request], limits: list[int]) -> list[bool]:
        """Take blocks for the drafts of these twins; False for those that found none.

        :param limits: drafts of each; the last one is never computed.
        """
        busy = set(map(id, twins))
        found = []
        for twin, limit in zip(twins, limits, strict=True):
            missing = self.pool.num_blocks_for(twin.num_tokens + limit - 1) - len(twin.block_table)
            if missing > self.pool.num_free:
                self._evict(missing, busy)
            found.append(missing <= self.pool.num_free)
            if found[-1] and missing > 0:
                twin.block_table.extend(self.pool.allocate(missing))
        return found

    def _evict(self, num_blocks: int, busy: set[int]) -> None:
        for request, twin in list(self._twins.items()):
            if self.pool.num_free >= num_blocks:
                return
            if id(twin) not in busy and twin.block_table:
                self.num_evicted += 1
                self.forget(request)

    def forget(self, request: Request) -> None:
        """Give back the blocks of a request's twin. Harmless when there is none."""
        twin = self._twins.pop(request, None)
        if twin is not None:
            self.pool.free(twin.block_table)
            twin.block_table = []

    def clear(self) -> None:
        """Forget all of them."""
        for request in list(self._twins):
            self.forget(request)

    def check(self) -> None:
        """Raise `AssertionError` when the KV of a twin is not covered by its blocks."""
        for twin in self._twins.values():
            assert twin.num_computed_tokens < max(1, twin.num_tokens)
            assert len(twin.block_table) * self.pool.block_size >= twin.num_computed_tokens
