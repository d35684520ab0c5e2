"""How close each step comes to what this machine can do.

Stage: execute (wraps, only to look at the clock).   Promise: exact, nothing is changed.
Helps: to see whether a step is bound by memory, by arithmetic or by neither.   Hurts: the first build on a machine
measures it for some seconds; a step costs some ten microseconds more.
Source: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", 2009.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt.machine_limits import machine_limits
from llmopt.roofline import Kind, StepCost, Tally, kind_of, model_cost
from llmopt_plugins.option_checks import check_flag, check_number

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import Batch, BestTokens, DraftTokens
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Execute


class RooflineExecute:
    """Run the inner stage and count its step.

    :param on_cuda: launches return at once there, so steps are timed with events, which are read when somebody asks.
    """

    accepts_best = True  # it does not look at logits

    def __init__(self, inner: Execute, tally: Tally, *, on_cuda: bool = False) -> None:
        self.inner = inner
        self.tally = tally
        self.on_cuda = on_cuda
        self._pending: list[tuple[Kind, StepCost, int, Any, Any]] = []  # kind, cost, tokens, start and end events

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        kind, num_tokens = kind_of(batch), batch.num_tokens
        cost = self.tally.cost.step(batch.seq_lens, batch.num_scheduled, int(batch.logits_indices.size))
        if self.on_cuda:
            import torch

            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = self.inner(batch, drafts)
            end.record()
            self._pending.append((kind, cost, num_tokens, start, end))
            if len(self._pending) >= 1024:
                self._collect()
            return result
        begin = time.perf_counter()
        result = self.inner(batch, drafts)
        self.tally.add(kind, cost, num_tokens, time.perf_counter() - begin)
        return result

    def __getattr__(self, name: str) -> Any:
        """What else the inner stage offers."""
        if name == "inner":  # not set yet: an unpickled or half-made object
            raise AttributeError(name)
        return getattr(self.inner, name)

    def reset(self) -> None:
        """Forget the steps so far."""
        self._pending.clear()
        for totals in self.tally.totals.values():
            totals.__init__()  # type: ignore[misc]

    def stats(self) -> dict[str, Any]:
        """Figures per kind of step, see `llmopt.roofline.Totals.report`."""
        self._collect()
        return dict(self.tally.report())

    def describe(self) -> str:
        """The same as text."""
        self._collect()
        return "; ".join(self.tally.lines()) or "no step has run yet"

    def close(self) -> None:
        """Nothing is held; the inner stage is closed by the pipeline itself."""

    def _collect(self) -> None:
        """Read the events of the steps that are over."""
        for kind, cost, num_tokens, start, end in self._pending:
            end.synchronize()
            self.tally.add(kind, cost, num_tokens, start.elapsed_time(end) / 1e3)
        self._pending.clear()


class Roofline:
    """Report bytes, operations and the fraction of this machine's limit."""

    info = PluginInfo(
        name="roofline",
        layer="hardware",
        promise="exact",
        summary="bytes, operations and the fraction of the machine's limit, in stats() and describe()",
    )

    def __init__(self, refresh: bool = False, seconds: float = 4.0) -> None:
        """:param refresh: measure the machine again.

        :param seconds: about how long that may take.
        """
        check_flag("refresh", refresh)
        check_number("seconds", seconds, "a number of seconds above 0", lambda x: 0 < x < math.inf)
        self.refresh = refresh
        self.seconds = float(seconds)
        self._stage: RooflineExecute | None = None

    @hookimpl
    def llmopt_wrap_execute(self, execute: Execute, config: PipelineConfig, context: BuildContext) -> Execute:
        assert context.kv_cache is not None
        assert context.capabilities is not None
        device = context.model.device
        cost = model_cost(context.model, context.kv_cache.shapes, context.capabilities.layer_types)
        weight_bytes = getattr(execute, "weight_bytes", None)
        if weight_bytes is not None:
            cost = cost.with_weight_bytes(weight_bytes, getattr(execute, "weight_dtype", None))
        limits = machine_limits(device, refresh=self.refresh, seconds=self.seconds)
        self._stage = RooflineExecute(execute, Tally(cost, limits), on_cuda=device.type == "cuda")
        return self._stage

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        if self._stage is not None:
            self._stage.reset()  # the steps of the self-test are not the user's
            self._stage = None
