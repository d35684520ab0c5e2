"""Blocks as they are needed, instead of the longest form of every request ahead.

Stage: allocate (replaces).   Promise: exact, only the place of KV changes.
Helps: many requests whose outputs end early; far more of them run at once.   Hurts: when the pool runs out, the request
that came last is computed again from its first token.
Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmopt.block_pool import BlockPool
    from llmopt.config import PipelineConfig
    from llmopt.registry import BuildContext
    from llmopt.request import Request
    from llmopt.stages import Allocate


class PagedAllocate:
    """Cover the known tokens of a request and its drafts, and nothing more.

    :param watermark: blocks that stay free when a request starts, so that running ones can grow for a while.
    """

    def __init__(self, pool: BlockPool, watermark: int) -> None:
        self.pool = pool
        self.watermark = watermark

    def __call__(self, request: Request, num_tokens: int) -> bool:
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

    def free(self, request: Request) -> None:
        blocks, request.block_table = request.block_table, []  # a new list: the batch builder sees that blocks moved
        self.pool.free(blocks)

    def num_blocks_ever(self, request: Request) -> int:
        return self.pool.num_blocks_for(max(request.max_len - 1, request.num_prompt_tokens))


class PagedKv:
    """Allocate KV block by block."""

    info = PluginInfo(
        name="paged_kv",
        layer="memory",
        promise="exact",
        summary="KV blocks as they are needed; pre-empts the youngest request when they run out",
        auto=True,
    )

    def __init__(self, watermark: float = 0.01) -> None:
        """:param watermark: share of the pool that stays free when a request starts."""
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is a share of the pool, 0 <= watermark < 1, found {watermark!r}")
        self.watermark = watermark

    @hookimpl
    def llmopt_replace_allocate(self, config: PipelineConfig, context: BuildContext) -> Allocate | None:
        pool = context.block_pool
        assert pool is not None
        return PagedAllocate(pool, int(self.watermark * pool.num_blocks))
