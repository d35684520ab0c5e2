"""Blocks as they are needed, instead of the longest form of every request ahead.

Stage: allocate (replaces); lookup, schedule (wraps, with swap space).   Promise: exact, only the place of KV changes.
Helps: many requests whose outputs end early; far more of them run at once.   Hurts: when the pool runs out, the request
that came last is computed again from its first token, or its KV is copied to host memory and back.
Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt.block_pool import GIVEN_BACK
from llmopt.request import RequestStatus
from llmopt_plugins.option_checks import check_host_memory, check_int, check_number
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import Batch
    from llmopt.block_pool import BlockPool
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.cost_model import CostModel
    from llmopt.kv_cache import KVCache
    from llmopt.queue import RequestQueue
    from llmopt.request import Request
    from llmopt.stages import Allocate, Lookup, Schedule


_NEAR = 64  # blocks: the next one of a table costs nothing extra when it lies at most so far ahead, by measurement


def nearness(table: list[int]) -> float:
    """The share of neighbours in a block table of which the second lies ahead of the first in memory, and near it."""
    pairs = [b - a for a, b in pairwise(table) if a != GIVEN_BACK]
    return sum(0 < step <= _NEAR for step in pairs) / len(pairs) if pairs else 1.0


@dataclass(slots=True)
class Swapped:
    """The KV of a request that was pre-empted."""

    num_tokens: int  # tokens that it covers
    num_bytes: int
    num_left: int  # blocks at the beginning that had been given back
    tensors: list[tuple[Tensor, Tensor]]  # per layer: keys and values of its blocks, on the CPU


class SwapSpace:
    """Host memory for the KV of pre-empted requests, of bounded size.

    :param cost_model: says whether copying out and in is quicker than computing again.
    """

    def __init__(self, kv_cache: KVCache, max_bytes: int, cost_model: CostModel) -> None:
        self.kv_cache = kv_cache
        self.max_bytes = max_bytes
        self.cost_model = cost_model
        self.entries: dict[Request, Swapped] = {}
        self.is_scheduling = False  # inside of `schedule`: a running request that gives its blocks back is pre-empted
        self.num_bytes = self.num_out = self.num_in = 0
        self._bytes_per_block = kv_cache.block_size * kv_cache.bytes_per_token(kv_cache.shapes)

    def put(self, request: Request) -> None:
        """Copy the KV of a running request, if there is room and it pays."""
        import torch

        self.drop(request)
        num_tokens = request.num_computed_tokens
        blocks = request.block_table[: -(-num_tokens // self.kv_cache.block_size)]
        num_left = blocks.count(GIVEN_BACK)  # they stand first
        blocks = blocks[num_left:]
        num_bytes = len(blocks) * self._bytes_per_block
        if request.media is not None:
            return  # ids do not tell its KV, so nobody looks it up
        if not blocks or self.num_bytes + num_bytes > self.max_bytes or self.cost_model.measured is None:
            return
        if 2 * self.cost_model.copy_s(num_bytes) >= self.cost_model.recompute_s(num_tokens):
            return
        tensors = []
        for layer in self.kv_cache.layers.values():
            table = torch.tensor(blocks, device=layer.key.device)
            tensors.append((layer.key[table].cpu(), layer.value[table].cpu()))
        self.entries[request] = Swapped(num_tokens, num_bytes, num_left, tensors)
        self.num_bytes += num_bytes
        self.num_out += 1

    def get(self, request: Request, blocks: list[int]) -> None:
        """Copy the KV of a request into these blocks. It stays here until `drop`."""
        import torch

        for layer, (key, value) in zip(self.kv_cache.layers.values(), self.entries[request].tensors, strict=True):
            table = torch.tensor(blocks, device=layer.key.device)
            layer.key[table] = key.to(layer.key.device)
            layer.value[table] = value.to(layer.value.device)

    def drop(self, request: Request) -> None:
        """Forget the copy of a request, if there is one."""
        entry = self.entries.pop(request, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes


class PagedAllocate:
    """Cover the known tokens of a request and its drafts, and nothing more.

    :param watermark: blocks that stay free when a request starts, so that running ones can grow for a while.
    :param queue: whose running requests `stats` looks at, and who waits for continuations.
    :param reach: last keys that any layer sees, the query's own included; None: all. What lies before is given back.
    :param why_no_swap: why swap space that was asked for is not used, for `describe`.
    """

    sort_below = 0.5  # `nearness` of a table that is given back, below which the free list is put in order

    def __init__(
        self,
        pool: BlockPool,
        watermark: int,
        queue: RequestQueue | None = None,
        swap: SwapSpace | None = None,
        reach: int | None = None,
        why_no_swap: str | None = None,
    ) -> None:
        self.pool = pool
        self.watermark = watermark
        self.queue = queue
        self.swap = swap
        self.reach = reach
        self.why_no_swap = why_no_swap
        self.num_sorted = 0  # times that the free list was put in order
        self.num_left = 0  # blocks that were given back because they had left every window

    def __call__(self, request: Request, num_tokens: int) -> bool:
        if self.reach is not None:
            self._leave(request, request.num_computed_tokens - self.reach + 1)
        # All known tokens, so that a prompt in chunks cannot run out of blocks half-way and start again; drafts as far
        # as they can be kept: the last token is chosen and never computed.
        end = request.num_computed_tokens + num_tokens
        end = max(min(end, request.max_len - 1), request.num_tokens)
        missing = self.pool.num_blocks_for(end) - len(request.block_table)
        if missing <= 0:
            return True
        is_starting = request.slot < 0
        reserve = self.watermark if is_starting and self.pool.num_used > len(request.block_table) else 0
        if missing + reserve > self.pool.num_free:
            return False
        request.block_table.extend(self.pool.allocate(missing))
        return True

    def _leave(self, request: Request, first_seen: int) -> None:
        """Give back the blocks before the first token that the next one sees.

        A cache that knows their content keeps it until somebody needs the memory. While continuations of this prompt
        wait, they stay: those see more of it.
        """
        table = request.block_table
        end = min(first_seen // self.pool.block_size, len(table))
        if end <= 0 or table[end - 1] == GIVEN_BACK:
            return
        if self.queue is not None and any(r.parent is request for r in self.queue.waiting):
            return
        start = table.count(GIVEN_BACK)  # they stand first
        self.pool.free(table[start:end])
        request.block_table = [GIVEN_BACK] * end + table[end:]  # a new list: the batch builder sees that blocks moved
        self.num_left += end - start

    def free(self, request: Request) -> None:
        swap = self.swap
        if swap is not None:
            if request.is_finished:
                swap.drop(request)
            elif swap.is_scheduling and request.status is RequestStatus.RUNNING:
                swap.put(request)
        blocks, request.block_table = request.block_table, []  # a new list: the batch builder sees that blocks moved
        self.pool.free([block for block in blocks if block != GIVEN_BACK] if self.reach is not None else blocks)
        if blocks and (self.pool.num_used == 0 or nearness(blocks) < self.sort_below):
            self.pool.sort_free()  # the next tables are less scattered, without a copy
            self.num_sorted += 1

    def num_blocks_ever(self, request: Request) -> int:
        return self.pool.num_blocks_for(max(request.max_len - 1, request.num_prompt_tokens))

    def describe(self) -> str:
        if self.swap is not None:
            return f"pre-empted requests are swapped to at most {self.swap.max_bytes / 2**20:.0f} MiB of host memory"
        told = "pre-empted requests are computed again"
        return told if self.why_no_swap is None else f"{told}, without swap space: {self.why_no_swap}"

    def stats(self) -> dict[str, float]:
        running = [] if self.queue is None else self.queue.running
        pairs = [(a, b) for r in running for a, b in zip(r.block_table, r.block_table[1:], strict=False)]
        pairs = [(a, b) for a, b in pairs if a != GIVEN_BACK]
        num_tokens = 0  # places in held blocks that are in use
        for r in running:
            num_tokens += r.num_tokens - r.block_table.count(GIVEN_BACK) * self.pool.block_size
        held = sum(len(r.block_table) - r.block_table.count(GIVEN_BACK) for r in running) * self.pool.block_size
        found: dict[str, float] = {
            "num_free_blocks": self.pool.num_free,
            "num_unused_tokens": held - num_tokens,  # places in held blocks without a token
            "nearness": sum(nearness(r.block_table) for r in running) / len(running) if running else 1.0,
            "num_sorted": self.num_sorted,
            "contiguity": sum(b == a + 1 for a, b in pairs) / len(pairs) if pairs else 1.0,  # of neighbours in tables
        }
        if self.reach is not None:
            found["num_left_blocks"] = self.num_left
        if self.swap is not None:
            found["num_swapped_out"], found["num_swapped_in"] = self.swap.num_out, self.swap.num_in
            found["num_swapped_bytes"] = self.swap.num_bytes
        return found


class SwappedLookup(Wrapping):
    """A request that was swapped out comes back with its KV."""

    inner: Lookup

    def __init__(self, inner: Lookup, swap: SwapSpace, pool: BlockPool, watermark: int) -> None:
        super().__init__(inner)
        self.swap = swap
        self.pool = pool
        self.watermark = watermark

    def __call__(self, request: Request) -> int | None:
        entry = self.swap.entries.get(request)
        if entry is None:
            return self.inner(request)
        needed = self.pool.num_blocks_for(request.num_tokens + 1) - entry.num_left
        if needed + (self.watermark if self.pool.num_used else 0) > self.pool.num_free:
            # to compute it again would take as many blocks; one that needs the whole pool starts in an empty one
            return None if self.pool.num_used else self.inner(request)
        blocks = self.pool.allocate(self.pool.num_blocks_for(entry.num_tokens) - entry.num_left)
        self.swap.get(request, blocks)
        request.block_table.extend([GIVEN_BACK] * entry.num_left + blocks)
        self.inner(request)  # sees the blocks and adds none, but may follow the request from here
        return min(entry.num_tokens, request.num_tokens - 1)


class SwappingSchedule(Wrapping):
    """Tell pre-emption from other reasons to give blocks back, and count who came back."""

    inner: Schedule

    def __init__(self, inner: Schedule, swap: SwapSpace) -> None:
        super().__init__(inner)
        self.swap = swap

    def __call__(self, queue: RequestQueue) -> Batch | None:
        swap = self.swap
        swap.is_scheduling = True
        try:
            batch = self.inner(queue)
        finally:
            swap.is_scheduling = False
        if swap.entries:
            for request in [r for r in swap.entries if r.status is RequestStatus.RUNNING]:
                swap.num_in += request.num_computed_tokens > 0
                swap.drop(request)
        return batch


class PagedKv:
    """Allocate KV block by block."""

    info = PluginInfo(
        name="paged_kv",
        layer="memory",
        promise="exact",
        summary="KV blocks as they are needed; pre-empts the youngest request when they run out",
        auto=True,
    )

    def __init__(
        self,
        watermark: float = 0.01,
        block_size: int | None = None,
        pool_bytes: int | None = None,
        swap_bytes: int = 0,
    ) -> None:
        """:param watermark: share of the pool that stays free when a request starts.
        :param block_size: tokens per block; None: as configured.
        :param pool_bytes: size of the pool; None: as configured.
        :param swap_bytes: host memory for the KV of pre-empted requests; 0: they are computed again.
        """
        check_number("watermark", watermark, "a share of the pool, 0 <= watermark < 1", lambda x: 0 <= x < 1)
        if block_size is not None:
            check_int("block_size", block_size, 1, other=", or None")
        if pool_bytes is not None:
            check_int("pool_bytes", pool_bytes, 1, other=", or None", of="bytes")
        check_int("swap_bytes", swap_bytes, 0, of="bytes")
        self.watermark = watermark
        self.swap_bytes = swap_bytes
        self.settings = {"block_size": block_size, "pool_bytes": pool_bytes}
        self._swap: SwapSpace | None = None

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig | None:
        given = {name: value for name, value in self.settings.items() if value is not None}
        return config.with_options(**given) if given else None

    @hookimpl
    def llmopt_reserve(self, context: BuildContext) -> int | None:
        if not self._can_swap(context) or context.model.device.type != "cpu":
            return None
        assert context.machine is not None
        check_host_memory("paged_kv", "swap_bytes", self.swap_bytes, context.machine)
        return self.swap_bytes

    @hookimpl
    def llmopt_wrap_lookup(self, lookup: Lookup, context: BuildContext) -> Lookup | None:
        self._swap = None
        if not self._can_swap(context):
            return None
        assert context.kv_cache is not None
        assert context.machine is not None
        check_host_memory("paged_kv", "swap_bytes", self.swap_bytes, context.machine, context.kv_cache)
        assert context.block_pool is not None
        self._swap = SwapSpace(context.kv_cache, self.swap_bytes, context.cost_model.wanted())
        watermark = int(self.watermark * context.block_pool.num_blocks)
        return SwappedLookup(lookup, self._swap, context.block_pool, watermark)

    @hookimpl
    def llmopt_replace_allocate(self, config: PipelineConfig, context: BuildContext) -> Allocate | None:
        pool = context.block_pool
        assert pool is not None
        assert context.capabilities is not None
        reach = context.capabilities.kv_reach
        swap = self._swap
        why_no_swap = "recurrent states are not in blocks" if self.swap_bytes and swap is None else None
        return PagedAllocate(pool, int(self.watermark * pool.num_blocks), context.queue, swap, reach, why_no_swap)

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Schedule) -> Schedule | None:
        return None if self._swap is None else SwappingSchedule(schedule, self._swap)

    def _can_swap(self, context: BuildContext) -> bool:
        """Whether KV is swapped: recurrent states are not in blocks, so their requests have to be computed again."""
        assert context.capabilities is not None
        return bool(self.swap_bytes) and not context.capabilities.has_states
