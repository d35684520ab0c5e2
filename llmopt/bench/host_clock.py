"""What the host does in a step beside the forward.

host256     256 requests that decode: the host's share of a step
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmopt.bench.reuse import ReuseResult, Setting
    from llmopt.pipeline import InferencePipeline

_ROWS, _PROMPT_TOKENS, _NEW_TOKENS = 256, 16, 48
_COMPANY = ("paged_kv", "prefix_cache")


class HostClock:
    """Takes the time of a pipeline's decode steps outside of `execute` and `propose`."""

    def __init__(self, pipe: InferencePipeline) -> None:
        self.pipe = pipe
        self._kept = {name: getattr(pipe, name) for name in ("step", "execute", "propose")}
        self._inside = 0.0
        self._steps: list[tuple[float, float]] = []  # outside, and in all
        pipe.step = self._step  # type: ignore[method-assign]
        pipe.execute = self._outside("execute")
        pipe.propose = self._outside("propose")

    def _outside(self, name: str) -> Any:
        stage = self._kept[name]

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return stage(*arguments)
            finally:
                self._inside += time.perf_counter() - start

        return timed

    def _step(self) -> Any:
        start, self._inside = time.perf_counter(), 0.0
        output = self._kept["step"]()
        seconds = time.perf_counter() - start
        if not output.finished:
            self._steps.append((seconds - self._inside, seconds))
        return output

    def close(self) -> tuple[float, float]:
        """Put everything back; seconds outside and of the whole step, medians over the steps."""
        del self.pipe.step
        self.pipe.execute, self.pipe.propose = self._kept["execute"], self._kept["propose"]
        outside, steps = zip(*self._steps, strict=True)
        return statistics.median(outside), statistics.median(steps)


def host256(setting: Setting) -> ReuseResult:
    """256 requests that decode."""
    from llmopt.bench.reuse import ReuseResult, _ids, _request

    options = {"max_num_requests": _ROWS, "max_model_len": 2 * (_PROMPT_TOKENS + _NEW_TOKENS)}
    pipes = {"llmopt": setting.build(**options), f"+ {', '.join(_COMPANY)}": setting.build(*_COMPANY, **options)}
    rows: list[tuple[str, dict[str, float | str]]] = []
    worst = 0.0
    for name, pipe in pipes.items():
        setting.on_progress(name)
        chooser = random.Random(3)
        new = 8 if setting.quick else _NEW_TOKENS
        pipe.run([_request(pipe, _ids(chooser, _PROMPT_TOKENS, setting.vocab_size), 2) for _ in range(_ROWS)])
        made = [_request(pipe, _ids(chooser, _PROMPT_TOKENS, setting.vocab_size), new) for _ in range(_ROWS)]
        pipe.add_all(made)
        while not all(one.num_output_tokens for one in made):
            pipe.advance()
        clock = HostClock(pipe)
        while len(pipe.queue):
            pipe.advance()
        host_s, step_s = clock.close()
        worst = max(worst, host_s / step_s)
        rows.append(
            (name, {"step ms": 1e3 * step_s, "host ms": round(1e3 * host_s, 3), "host %": 100 * host_s / step_s})
        )
    target = setting.judge("the host takes less than 5 % of a step", f"{100 * worst:.1f} %", worst < 0.05)
    return ReuseResult("host256", f"{_ROWS} requests that decode, median step", target, rows)


WORKLOADS: dict[str, Callable[[Setting], ReuseResult]] = {"host256": host256}
