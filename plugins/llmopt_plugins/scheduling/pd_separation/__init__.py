"""Prefill and decode apart: as two lines of one engine, or in processes of their own.

Stage: budget (wraps) in slices; probe, lookup, allocate, execute (wraps), and the memory of the pool, with processes.
Promise: exact, only where and in which step a prompt is computed changes.
Helps: streams under a steady flow of prompts. In slices most steps carry no prompt at all, and prompts come in slices
large enough to be efficient; with processes no step carries a long prompt, and decodes keep CPUs of their own.
Hurts: the first token of a prompt comes later, by the pauses between slices, or because a part of the CPUs computes it.
Processes load the model once more each.
Source: own work; the idea is that of Y. Zhong et al., "DistServe: Disaggregating Prefill and Decoding for
Goodput-optimized Large Language Model Serving", 2024.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.option_checks import check_choice, check_number, check_use
from llmopt_plugins.scheduling.pd_separation.options import ProcessOptions
from llmopt_plugins.scheduling.pd_separation.slices import SlicedBudget

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.kv_cache import KVStorage
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Allocate, Budget, Execute, Lookup, Probe
    from llmopt_plugins.scheduling.pd_separation.process_mode import ProcessMode

_DECODE_SHARE, _PATIENCE_MS = 0.25, 300.0


class PdSeparation:
    """Give prefill and decode turns, or processes, of their own."""

    info = PluginInfo(
        name="pd_separation",
        layer="scheduling",
        promise="exact",
        summary="prompts in slices between steps of decodes, or in processes of their own",
    )

    def __init__(
        self,
        mode: str = "slices",
        slice_ms: float | str = "auto",
        decode_share: float = _DECODE_SHARE,
        patience_ms: float = _PATIENCE_MS,
        workers: int = 1,
        cpus: int | None = None,
        min_tokens: int = 128,
        chunk_tokens: int = 512,
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        source: str | None = None,
        listen: str | None = None,
    ) -> None:
        """:param mode: "slices": two lines in this engine; "process": prompts in processes of their own.
        :param slice_ms: milliseconds of prompt work that a step may carry beside decodes; "auto": as much as lets the
            step take five times as long as the step of a lone decode.
        :param decode_share: share of the time for steps without prompts, when both lines have work; 0 to below 1.
        :param patience_ms: age of the oldest prompt, in milliseconds, at which pauses between slices are gone.
        :param workers: prefill processes. From here on with "process" only.
        :param cpus: CPUs of all workers together, taken from those of this process; None: half of them.
        :param min_tokens: shorter prompts are computed by this process.
        :param chunk_tokens: tokens of a worker's forward, at most 2048.
        :param timeout_s: seconds for a chunk; a worker that takes longer is taken for dead.
        :param start_timeout_s: seconds until the workers are ready.
        :param source: folder or name that the workers load the model from; None: what `build` was given.
        :param listen: "host:port" at which workers of other machines report; None: workers of this machine.
        """
        check_choice("mode", mode, ("slices", "process"))
        if slice_ms != "auto":
            check_number("slice_ms", slice_ms, 'a number of milliseconds above 0, or "auto"', lambda x: x > 0)
        check_number("decode_share", decode_share, "a share of the time, 0 <= decode_share < 1", lambda x: 0 <= x < 1)
        check_number("patience_ms", patience_ms, "a number of milliseconds above 0", lambda x: 0 < x < math.inf)
        if mode == "process":
            slices = {
                "slice_ms": (slice_ms, "auto"),
                "decode_share": (decode_share, _DECODE_SHARE),
                "patience_ms": (patience_ms, _PATIENCE_MS),
            }
            check_use('mode="slices"', slices)
        self.mode = mode
        self.slice_s = None if isinstance(slice_ms, str) else 1e-3 * slice_ms
        self.decode_share = float(decode_share)
        self.patience_s = 1e-3 * patience_ms
        self.options = ProcessOptions(
            workers, cpus, min_tokens, chunk_tokens, timeout_s, start_timeout_s, source, listen
        )
        self.options.check()
        if mode == "slices":
            check_use('mode="process"', self.options.beside_defaults())
        self._process: ProcessMode | None = None  # of the pipeline that is being built

    @hookimpl
    def llmopt_wrap_probe(self, probe: Probe) -> Probe | None:
        self._process = None
        if self.mode == "slices":
            return None
        from llmopt_plugins.scheduling.pd_separation.process_mode import ProcessMode

        self._process = ProcessMode(self.options, self)
        return self._process.wrap_probe(probe)

    @hookimpl
    def llmopt_reserve(self, context: BuildContext) -> int | None:
        return None if self._process is None else self._process.reserve(context)

    @hookimpl
    def llmopt_kv_storage(self, context: BuildContext) -> KVStorage | None:
        return None if self._process is None else self._process.kv_storage(context)

    @hookimpl
    def llmopt_wrap_lookup(self, lookup: Lookup, context: BuildContext) -> Lookup | None:
        return None if self._process is None else self._process.wrap_lookup(lookup, context)

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate) -> Allocate | None:
        return None if self._process is None else self._process.wrap_allocate(allocate)

    @hookimpl
    def llmopt_wrap_execute(self, execute: Execute, context: BuildContext) -> Execute | None:
        return None if self._process is None else self._process.wrap_execute(execute, context)

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.finish(pipeline)

    @hookimpl
    def llmopt_wrap_budget(self, budget: Budget, config: PipelineConfig, context: BuildContext) -> Budget | None:
        if self.mode != "slices":
            return None
        return SlicedBudget(budget, context.cost_model.wanted(), self.slice_s, self.decode_share, self.patience_s)
