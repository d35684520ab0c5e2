"""The whole model in one C++ call per step, on packed weights and the same KV blocks.

Stage: execute (replaces).   Promise: exact, the same sums in another order; in bfloat16 up to near-ties.
Helps: everything on a CPU; most where the forward of transformers spends its time beside the weights (small batches).
Hurts: memory, because the packed weights stand beside those of a loaded model; building takes the time to pack.
Source: own work. Tiles and dot products after Intel's Architecture Instruction Set Extensions reference; attention in
blocks after T. Dao, "FlashAttention-2", 2023; paged KV after W. Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl, native

if TYPE_CHECKING:
    from llmopt.config import PipelineConfig
    from llmopt.registry import BuildContext
    from llmopt.stages import Execute


class Native:
    """Run the model on the native decoder."""

    info = PluginInfo(
        name="native",
        layer="kernel",
        promise="exact",
        summary="the whole forward as one C++ call on packed weights (CPU, known model families)",
        devices=("cpu",),
        auto=True,
    )

    def __init__(self, threads: int | None = None) -> None:
        """:param threads: of the decoder; None: what the machine and the container allow."""
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is a number of threads, at least 1, found {threads!r}")
        self.threads = threads

    def why_unavailable(self, context: BuildContext) -> str | None:
        reason = native.why_not()
        if reason is not None:
            return f"needs the compiled extension: {reason}"
        from llmopt_plugins.kernel.native.decoder_spec import why_not_native

        reason = why_not_native(context.model)
        return None if reason is None else f"cannot run this model: it {reason}"

    @hookimpl
    def llmopt_replace_execute(self, config: PipelineConfig, context: BuildContext) -> Execute | None:
        from llmopt_plugins.kernel.native.builder import make_executor

        assert context.machine is not None
        return make_executor(config, context, self.threads or context.machine.num_threads)
