#!/usr/bin/env python3
"""The cost model's predictions against the steps as they ran.

    python tests/benchmarks/cost_model.py MODEL [--plugin NAME]... [--requests N] [--seed N]

Requests of many lengths arrive in random order. Every step is predicted twice before it runs: by the model as it was
measured in `build`, and by the one that learns from every step. Prints the errors by kind of step, and whether the
corrected ones are within the bound that docs/cost_model.md states: half of the steps of each kind within 15 %, nine of
ten within 30 %. The first 20 steps are for learning and are not judged.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.cost_model import CostModel, StepShape
from llmopt.request import Request, SamplingParams

MEDIAN_BOUND, NINTH_BOUND, NUM_WARM = 0.15, 0.30, 20


class Predicting:
    """Keeps the shape of every scheduled batch and what both models say of it."""

    info = PluginInfo(name="predicting", layer="scheduling", promise="exact", summary="predicts every step")

    def __init__(self) -> None:
        self.first = CostModel()  # as measured, never corrected
        self.last: tuple[StepShape, float, float] | None = None

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any, context: Any) -> Any:
        cost = context.cost_model.wanted()

        def predict(queue: Any) -> Any:
            batch = schedule(queue)
            self.last = None
            if batch is not None:
                if self.first.measured is None:
                    self.first.fit(cost.measured)
                self.last = StepShape.of(batch), self.first.batch_s(batch), cost.batch_s(batch)
            return batch

        return predict


def kind_of(shape: StepShape) -> str:
    """Which steps are reported together."""
    if shape.num_tokens == shape.num_rows:
        rows = "1-4" if shape.num_rows <= 4 else "5-16" if shape.num_rows <= 16 else "17+"
        return f"decode, {rows} rows"
    tokens = "up to 64" if shape.num_tokens <= 64 else "up to 256" if shape.num_tokens <= 256 else "257+"
    return f"with prefill, {tokens} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    predicting = Predicting()
    pipe = llmopt.build(options.model, [*options.plugin, predicting], max_model_len=2048, max_tokens_per_step=512)
    chooser = random.Random(options.seed)
    vocab_size = pipe.capabilities.vocab_size
    errors: dict[str, list[tuple[float, float]]] = {}
    num_steps, num_left = 0, options.requests
    print(pipe.cost_model.table(), "\n")
    while num_left or len(pipe.queue):
        if num_left and (not len(pipe.queue) or chooser.random() < 0.25):
            length, new = int(chooser.lognormvariate(4.5, 1.0)) % 1500 + 1, chooser.randint(2, 60)
            prompt = [chooser.randrange(3, vocab_size) for _ in range(length)]
            params = SamplingParams(max_new_tokens=new, ignore_eos=True)
            pipe.add(Request(f"r{num_left}", prompt, params, length + new, wants_text=False))
            num_left -= 1
        start = time.perf_counter()
        output = pipe.advance()
        seconds = time.perf_counter() - start
        num_steps += 1
        if output.num_tokens and predicting.last is not None and num_steps > NUM_WARM:
            shape, first_s, now_s = predicting.last
            errors.setdefault(kind_of(shape), []).append((first_s / seconds - 1, now_s / seconds - 1))
    print(
        f"{'kind of step':<32} {'steps':>6} {'as measured in build':>24} {'corrected: median':>20} {'nine of ten':>12}"
    )
    is_within = True
    for kind, pairs in sorted(errors.items()):
        first = statistics.median(abs(a) for a, _ in pairs)
        now = sorted(abs(b) for _, b in pairs)
        half, ninth = statistics.median(now), now[min(len(now) - 1, int(0.9 * len(now)))]
        if len(pairs) >= 10:
            is_within &= half <= MEDIAN_BOUND and ninth <= NINTH_BOUND
        print(f"{kind:<32} {len(pairs):>6} {first:>23.1%} {half:>20.1%} {ninth:>12.1%}")
    print(f"\n{pipe.cost_model.table()}\n\nwithin the stated bound: {'yes' if is_within else 'NO'}")
    pipe.close()


if __name__ == "__main__":
    main()
