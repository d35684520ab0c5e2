"""One native call for each norm, rotation, gated activation, and product with few rows of a model's own forward.

Stage: execute (wraps).   Promise: exact, the same operations with the same rounding points in half precision.
Helps: decode on the CPU with models that `native` does not know, where calls of small operations and products with one
row take most of a step.   Hurts: nothing known; long prompts gain little.
Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019; J. Su et al., "RoFormer", 2021;
N. Shazeer, "GLU Variants Improve Transformer", 2020: the operations. Fusing them is common practice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.option_checks import check_int

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import Batch, BestTokens, DraftTokens
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.hf.module_switch import ModuleSwitch
    from llmopt.stages import Execute


class FusedExecute:
    """The executor it found, with fused forwards in the model while it runs.

    :param counts: what was replaced: kind -> number of modules.
    """

    accepts_best = True  # logits pass through unseen

    def __init__(self, inner: Execute, switch: ModuleSwitch, counts: dict[str, int]) -> None:
        import torch

        self.inner = inner
        self.switch = switch
        self.counts = counts
        self._is_autocast = torch.is_autocast_enabled

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        if self._is_autocast("cpu"):  # it would have its say between the operations
            return self.inner(batch, drafts)
        with self.switch:
            return self.inner(batch, drafts)

    def stats(self) -> dict[str, Any]:
        return {f"num_{kind}": count for kind, count in self.counts.items()}

    def describe(self) -> str:
        return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in self.counts.items())

    def close(self) -> None:
        self.switch.close()


class FusedOps:
    """Replace small operations of the model's forward by native ones."""

    info = PluginInfo(
        name="fused_ops",
        layer="kernel",
        promise="exact",
        summary="norm, rotation, gated activation and few-row products of the model's own forward as native calls",
        conflicts=("native",),  # which runs no module of the model
        devices=("cpu",),
    )

    def __init__(self, max_linear_rows: int = 6) -> None:
        """:param max_linear_rows: products with so many rows at most are native; 0 leaves linear modules alone."""
        check_int("max_linear_rows", max_linear_rows, 0, of="rows")
        self.max_linear_rows = max_linear_rows

    def why_unavailable(self, context: BuildContext) -> str | None:
        from llmopt.ops import fused

        return fused.why_not(context.model.device, context.model.dtype)

    @hookimpl
    def llmopt_wrap_execute(self, execute: Execute, config: PipelineConfig, context: BuildContext) -> Execute | None:
        from llmopt.hf import fusable
        from llmopt.hf.module_switch import ModuleSwitch
        from llmopt.ops.fused import FusedOps as Ops

        model, ops = context.model, Ops()
        dtype = model.dtype
        found = {
            "norms": dict(fusable.find_norms(model, ops, dtype)),
            "rotations": dict(fusable.find_rotations(model, ops, dtype)),
            "gated_mlps": dict(fusable.find_gated_mlps(model, ops, dtype)),
        }
        if self.max_linear_rows:
            found["linears"] = dict(fusable.find_linears(model, ops, dtype, self.max_linear_rows))
        switch = ModuleSwitch({module: forward for kind in found.values() for module, forward in kind.items()})
        return FusedExecute(execute, switch, {kind: len(modules) for kind, modules in found.items()})
