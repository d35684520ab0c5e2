"""Long prompts in chunks beside the decodes of others, so that no stream stands still.

Stage: budget (wraps).   Promise: exact, a prompt in chunks gives the same KV.
Helps: streams that run while long prompts arrive; short prompts behind long ones.   Hurts: the long prompt itself waits
longer for its first token; very small chunks read the weights more often. Offline batches gain nothing.
Source: A. Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt.cost_model import num_pairs
from llmopt_plugins.option_checks import check_int, check_number, check_use

if TYPE_CHECKING:
    from llmopt.batch import StepBudget
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.cost_model import CostModel
    from llmopt.queue import QueueLoad, RequestQueue
    from llmopt.stages import Budget

_STEPS_PER_TOKEN = 2.5  # without a target, a step with a chunk takes so many times a step of decodes alone
_SMALLEST_CHUNK = 16  # a prompt goes on, whatever the target
_TILE = 16  # kernels compute so many rows of a matrix at once: a tile that is not full takes as long
_LARGEST_SURPRISE = 1.5  # steps that take longer than predicted shrink the next ones by this factor at most
_LONE_CHUNK = 1024  # when nobody decodes: a prompt that arrives meanwhile waits for so many tokens at most


class ChunkedBudget:
    """Narrow the prompt tokens of a step to a chunk.

    Half of the chunk goes to the first prompt in line, which therefore never starves; the other half to the shortest
    of the others first, so that a small prompt does not wait for a huge one.

    :param chunk_size: tokens of a step, decodes included; None: what the cost model allows.
    :param max_itl_s: seconds that a step may take beside decodes; None: a multiple of a step of decodes alone.
    :param cost: needed when ``chunk_size`` is None. Steps that take longer than it says make the next ones smaller.
    """

    def __init__(
        self,
        inner: Budget,
        chunk_size: int | None,
        max_itl_s: float | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner = inner
        self.chunk_size = chunk_size
        self.max_itl_s = max_itl_s
        self.cost = cost
        self.clock = clock
        self.surprise = 1.0  # seen over predicted time of steps with a chunk, of late
        self._began_s = self._predicted_s = 0.0  # of the last step, when it had a chunk
        self.num_chunks = 0
        self.last_chunk = 0

    def __call__(self, queue: RequestQueue) -> StepBudget:
        budget = self.inner(queue)
        if self._predicted_s:
            self._learn((self.clock() - self._began_s) / self._predicted_s)
        load = queue.load()
        if not load.prompts and not queue.waiting:
            return budget
        chunk = self._chunk(queue, load)
        if chunk < budget.num_prefill_tokens:
            budget.num_prefill_tokens = chunk
        first = -(-budget.num_prefill_tokens // 2)
        if budget.num_first_tokens is None or first < budget.num_first_tokens:
            budget.num_first_tokens = first
        self.num_chunks += 1
        self.last_chunk = budget.num_prefill_tokens
        return budget

    def _chunk(self, queue: RequestQueue, load: QueueLoad) -> int:
        if self.chunk_size is not None:
            return max(self.chunk_size - load.num_decodes, -(-self.chunk_size // 8))  # decodes do not starve prompts
        cost = self.cost
        if not load.num_decodes or cost is None or cost.measured is None:  # the last: while the pipeline is built
            return _LONE_CHUNK
        decodes, context = load.num_decodes, load.num_context_tokens
        target_s = self.max_itl_s
        if target_s is None:
            target_s = _STEPS_PER_TOKEN * cost.step_s(decodes, decodes, context)
        computed = load.prompts[0].num_computed_tokens if load.prompts else 0
        chunk = cost.largest_prefill(target_s / self.surprise, decodes, context, num_computed_tokens=computed)
        chunk = max((decodes + chunk) // _TILE * _TILE - decodes, _SMALLEST_CHUNK)
        missing = load.num_prompt_tokens + sum(r.num_tokens for r in itertools.islice(queue.waiting, 8))
        if missing >= chunk:
            shape = (decodes + chunk, decodes + 1, context + computed, num_pairs(chunk, computed))
            self._began_s, self._predicted_s = self.clock(), cost.step_s(*shape)
        return chunk

    def _learn(self, ratio: float) -> None:
        """Believe in a slow step sooner than in a fast one: the target is an upper limit."""
        rate = 0.3 if ratio > self.surprise else 0.05
        self.surprise += rate * (min(ratio, _LARGEST_SURPRISE) - self.surprise)
        self.surprise = max(1.0, self.surprise)
        self._predicted_s = 0.0

    def stats(self) -> dict[str, float]:
        return {"num_chunks": self.num_chunks, "last_chunk": self.last_chunk, "surprise": round(self.surprise, 3)}

    def describe(self) -> str:
        if self.chunk_size is not None:
            return f"steps of {self.chunk_size} tokens"
        if self.max_itl_s is not None:
            return f"chunks that fit a step of {1e3 * self.max_itl_s:g} ms"
        return f"chunks that fit {_STEPS_PER_TOKEN:g} times a step of decodes"


class ChunkedPrefill:
    """Compute long prompts in chunks beside decodes."""

    info = PluginInfo(
        name="chunked_prefill",
        layer="scheduling",
        promise="exact",
        summary="long prompts in chunks beside decodes; holds a target between two tokens",
    )

    def __init__(self, chunk_size: int | str = "auto", max_itl_ms: float | None = None) -> None:
        """:param chunk_size: tokens of a step, decodes included, or "auto": what the measured cost of a step allows.
        :param max_itl_ms: with "auto": milliseconds between two tokens of a stream. None: 2.5 times one without chunk.
        """
        if chunk_size != "auto":
            check_int("chunk_size", chunk_size, 1, other=', or "auto"', of="tokens")
            check_use("chunk_size=auto", {"max_itl_ms": (max_itl_ms, None)})
        if max_itl_ms is not None:
            check_number("max_itl_ms", max_itl_ms, "a number of milliseconds above 0", lambda x: 0 < x < math.inf)
        self.chunk_size = None if isinstance(chunk_size, str) else chunk_size
        self.max_itl_s = None if max_itl_ms is None else 1e-3 * max_itl_ms

    @hookimpl
    def llmopt_wrap_budget(self, budget: Budget, config: PipelineConfig, context: BuildContext) -> Budget:
        if self.chunk_size is not None:
            return ChunkedBudget(budget, self.chunk_size)
        return ChunkedBudget(budget, None, self.max_itl_s, context.cost_model.wanted())
