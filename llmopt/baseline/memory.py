"""Layer 6, plain: every request reserves its longest form in one piece; forks share their prompt's KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt.block_pool import GIVEN_BACK
from llmopt.errors import RequestError
from llmopt.request import RequestStatus

if TYPE_CHECKING:
    from llmopt.batch import Batch
    from llmopt.block_pool import BlockPool
    from llmopt.kv_cache import KVCache
    from llmopt.request import Request


class BaselineLookup:
    """Share the prompt's KV between the continuations of one prompt (n > 1).

    Full blocks are held by both. The block in which the prompt ends is copied, since both will write to it. The last
    prompt token is computed again: its logits are where the continuations begin to differ.

    :param can_share: False for models with recurrent states, whose state at the end of the prompt is gone.
    """

    def __init__(self, pool: BlockPool, kv_cache: KVCache, can_share: bool) -> None:
        self.pool = pool
        self.kv_cache = kv_cache
        self.can_share = can_share

    def __call__(self, request: Request) -> int | None:
        parent = request.parent
        if parent is None or parent.is_finished or not self.can_share or request.block_table:
            return 0
        num_shared = parent.num_prompt_tokens - 1
        if parent.status is RequestStatus.WAITING or parent.num_computed_tokens < num_shared:
            return None
        num_full, rest = divmod(num_shared, self.pool.block_size)
        if GIVEN_BACK in parent.block_table[: num_full + 1]:
            return 0  # the parent has gone on, and no longer holds what this one would see
        shared = parent.block_table[:num_full]
        self.pool.share(shared)
        request.block_table.extend(shared)
        if rest == 0 or self.pool.num_free == 0:
            return num_full * self.pool.block_size
        (copy,) = self.pool.allocate(1)
        self.kv_cache.copy_block(parent.block_table[num_full], copy)
        request.block_table.append(copy)
        return num_shared


class BaselineAllocate:
    """Reserve blocks for the longest form of a request when it starts, so that nothing can run out later."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def __call__(self, request: Request, num_tokens: int) -> bool:
        if len(request.block_table) * self.pool.block_size >= request.max_len:
            return True  # asked for every row in every step
        missing = self.num_blocks_ever(request) - len(request.block_table)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_table.extend(self.pool.allocate(missing))
        return True

    def free(self, request: Request) -> None:
        blocks, request.block_table = request.block_table, []  # a new list: the batch builder sees that blocks moved
        self.pool.free(blocks)

    def num_blocks_ever(self, request: Request) -> int:
        # the last token is chosen and never computed
        return self.pool.num_blocks_for(max(request.max_len - 1, request.num_prompt_tokens))


class BaselineAdapt:
    """There are no adapters."""

    def __call__(self, batch: Batch) -> None:
        for name in batch.adapters:
            if name is not None:
                raise RequestError(f"a request asks for adapter {name!r}, and no plugin that loads adapters is listed.")
