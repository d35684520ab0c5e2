#!/usr/bin/env python3
"""What the host does in a round with drafts beside the forward: packing, choosing tokens, moving KV.

    python tests/benchmarks/draft_overhead.py MODEL [--plugin NAME]... [--drafts N] [--tokens N] [--rows N]...

Requests run twice, in float32: without drafts, and with trees in which the next three tokens of that answer are hidden
(from a list, so that drafting costs nothing). Prints the median time of each part of a step, greedy and sampled, and
the overhead of a round: packing the drafts, choosing and moving KV, less what it takes to choose as many tokens one by
one. That is to stay within 0.3 ms.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import llmopt
from llmopt.pipeline import InferencePipeline
from llmopt.testing import Guess, ScriptedDrafter

BOUND_MS, PATH = 0.3, 3
PARTS = ("schedule", "drafts", "verify", "move", "commit")
PROMPT = "The history of the lighthouse begins with a fire on a hill"


class Clock:
    """Seconds of the parts of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if part == "schedule":
                self.steps.append({})
            start = time.perf_counter()
            result = call(*arguments)
            self.steps[-1][part] = time.perf_counter() - start
            return result

        return run

    def watch(self, pipe: InferencePipeline) -> None:
        """Time the stages of a pipeline."""
        self.steps.clear()
        for part, owner, name in (("schedule", pipe, "schedule"), ("drafts", pipe.batch_builder, "with_drafts"),
                                  ("verify", pipe, "verify"), ("move", pipe.kv_cache, "keep_paths"),
                                  ("commit", pipe, "commit")):  # fmt: skip
            setattr(owner, name, self.timed(part, getattr(owner, name)))

    def medians_us(self) -> dict[str, float]:
        """Of the steps that had all rows, first and last ones left out."""
        steps = self.steps[3:-6]
        return {part: statistics.median(step.get(part, 0.0) for step in steps) * 1e6 for part in PARTS}


def hidden_trees(answers: dict[str, list[int]], num_draft: int, vocab_size: int) -> Callable[[Any, int], Guess]:
    """Trees whose path to the next tokens is not the first one."""

    def guess(request: Any, room: int) -> Guess:
        chooser = random.Random(request.num_tokens)
        rest = answers[tuple(request.prompt_ids)][request.num_output_tokens :][:PATH]
        ids, parents, node = [chooser.randrange(vocab_size)], [-1], -1
        for token in rest:
            if token == ids[0] and node < 0:
                return Guess([])
            ids.append(token)
            parents.append(node)
            node = len(ids) - 1
        while len(ids) < num_draft:
            ids.append((ids[-1] + 7) % vocab_size)
            parents.append(0 if len(ids) % 2 else len(ids) - 2)
        return Guess(ids[:room], parents[:room])

    return guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--drafts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rows", type=int, action="append")
    options = parser.parse_args()
    model, tokenizer = llmopt.load(options.model, dtype="float32")
    clock = Clock()
    print(f"microseconds, {options.drafts} drafts per request\n")
    print(f"{'rows':>4} {'choice':<8} {'drafts':>6} {'tokens':>7} " + " ".join(f"{p:>8}" for p in PARTS)
          + f" {'overhead':>8}")  # fmt: skip
    is_within = True
    answers: dict[Any, list[int]] = {}
    drafter = ScriptedDrafter(hidden_trees(answers, options.drafts, model.config.vocab_size), options.drafts)
    for num_rows in options.rows or (1, 8):
        for choice, sampling in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_p": 0.95, "seed": 7})):
            prompts = [tokenizer(f"{PROMPT} {number}")["input_ids"] for number in range(num_rows)]
            plain_us = 0.0
            for plugins in (options.plugin, [*options.plugin, drafter]):
                is_drafting = len(plugins) > len(options.plugin)
                with llmopt.build(model, plugins, tokenizer=tokenizer, max_model_len=512) as pipe:
                    clock.watch(pipe)
                    outputs = pipe.batch(
                        prompts, max_new_tokens=options.tokens, ignore_eos=True, progress=False, **sampling
                    )
                    answers.update({tuple(p): o.token_ids for p, o in zip(prompts, outputs, strict=True)})
                per_round = num_rows * options.tokens / len(clock.steps) / num_rows
                medians = clock.medians_us()
                overhead = 0.0
                if is_drafting:
                    overhead = medians["drafts"] + medians["move"] + medians["verify"] - per_round * plain_us
                plain_us = medians["verify"]
                print(f"{num_rows:>4} {choice:<8} {options.drafts * is_drafting:>6} {per_round:>7.2f} "
                      + " ".join(f"{medians[p]:>8.1f}" for p in PARTS) + f" {overhead:>8.1f}")  # fmt: skip
            is_within &= overhead < BOUND_MS * 1e3
    print(f"\nwithin {BOUND_MS} ms: {'yes' if is_within else 'NO'}")


if __name__ == "__main__":
    main()
