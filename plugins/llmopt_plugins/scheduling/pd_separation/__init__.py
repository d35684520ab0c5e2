"""Prefill and decode as two lines of one engine, each with its own share of the time.

Stage: budget (wraps).   Promise: exact, only the step in which a prompt is computed changes.
Helps: streams under a steady flow of prompts: most steps carry no prompt at all, and prompts come in slices large
enough to be efficient.   Hurts: the first token of a prompt comes later, by the pauses between slices.
Source: own work; the two lines are those of Y. Zhong et al., "DistServe: Disaggregating Prefill and Decoding for
Goodput-optimized Large Language Model Serving", 2024, in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.scheduling.pd_separation.slices import SlicedBudget

if TYPE_CHECKING:
    from llmopt.config import PipelineConfig
    from llmopt.registry import BuildContext
    from llmopt.stages import Budget


class PdSeparation:
    """Give prefill and decode turns of their own."""

    info = PluginInfo(
        name="pd_separation",
        layer="scheduling",
        promise="exact",
        summary="prompts in slices of their own between steps of decodes",
    )

    def __init__(
        self,
        mode: str = "slices",
        slice_ms: float = 50.0,
        decode_share: float = 0.5,
        patience_ms: float = 1000.0,
    ) -> None:
        """:param mode: "slices": two lines in this engine.
        :param slice_ms: milliseconds of prompt work that a step may carry beside decodes.
        :param decode_share: share of the time for steps without prompts, when both lines have work; 0 to below 1.
        :param patience_ms: age of the oldest prompt, in milliseconds, at which pauses between slices are gone.
        """
        if mode != "slices":
            raise ValueError(f'mode is "slices", found {mode!r}')
        for name, value in (("slice_ms", slice_ms), ("patience_ms", patience_ms), ("decode_share", decode_share)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} is a number, at least 0, found {value!r}")
        if not slice_ms or not patience_ms:
            raise ValueError(f"slice_ms and patience_ms are above 0, found {slice_ms!r} and {patience_ms!r}")
        if decode_share >= 1:
            raise ValueError(f"decode_share is a share of the time, 0 <= decode_share < 1, found {decode_share!r}")
        self.mode = mode
        self.slice_s = 1e-3 * slice_ms
        self.decode_share = float(decode_share)
        self.patience_s = 1e-3 * patience_ms

    @hookimpl
    def llmopt_wrap_budget(self, budget: Budget, config: PipelineConfig, context: BuildContext) -> Budget:
        return SlicedBudget(budget, context.cost_model.wanted(), self.slice_s, self.decode_share, self.patience_s)
