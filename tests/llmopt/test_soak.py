"""Thousands of requests of every kind through a small pool: each equals its run alone, and nothing is left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from llmopt.pipeline import InferencePipeline
from llmopt.request import Request
from llmopt.text import make_requests
from tests.llmopt.helpers import Drafts, assert_idle, build_tiny, pool_bytes

NUM_REQUESTS = 5000
NUM_TEMPLATES = 150
BLOCK = 4


def template(chooser: random.Random) -> dict[str, Any]:
    """A prompt of 1 to 40 tokens and the options of a request of 1 to 24 new ones."""
    made: dict[str, Any] = {
        "prompt": [chooser.randrange(3, 512) for _ in range(chooser.randint(1, 40))],
        "max_new_tokens": chooser.randint(1, 24),
    }
    if chooser.random() < 0.5:
        made |= {"temperature": chooser.choice([0.5, 1.0, 1.5]), "seed": chooser.randrange(1000)}
        made |= chooser.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}])
    made |= chooser.choice([{}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "presence_penalty": 0.2}])
    made |= chooser.choice([{}, {}, {"stop_token_ids": chooser.sample(range(3, 512), 60)}, {"stop": ["e", "q"]}])
    made |= chooser.choice([{}, {}, {"min_new_tokens": made["max_new_tokens"] // 2}, {"ignore_eos": True}])
    if chooser.random() < 0.15:
        made["n"] = chooser.randint(2, 4)
    return made


@pytest.fixture(scope="module")
def templates() -> list[tuple[dict[str, Any], list[Any]]]:
    """Templates with the outputs of their runs alone, one for each continuation.

    The shape of a batch changes logits by rounding, so greedy runs that come close to a tie are left out.
    """
    chooser = random.Random(0)
    found = []
    gaps: list[float] = []

    def measure(ids: np.ndarray, line: Tensor) -> Tensor:
        best, second = line.topk(2).values.tolist()
        gaps.append(best - second)
        return line

    with build_tiny() as pipe:
        while len(found) < NUM_TEMPLATES:
            made = template(chooser)
            gaps.clear()
            outputs = pipe.batch([{**made, "logits_processors": [measure]}], progress=False)
            if "temperature" in made or min(gaps) > 1e-3:
                found.append((made, outputs))
    assert sum(len(outputs) > 1 for _, outputs in found) > 10
    assert sum(o.finish_reason == "stop" for _, outputs in found for o in outputs) > 20
    return found


def drafter(made: Request) -> list[int]:
    """Guesses that are sometimes right: the script is not known here, so a cheap repetition."""
    return made.output_ids[-3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["baseline", "paged_kv", "paged_kv and drafts", "prefix_cache", "prefix_cache, paged_kv and drafts"]
)
def test_a_long_run_of_random_requests_equals_their_single_runs_and_leaves_nothing(
    kind: str, templates: list[tuple[dict[str, Any], list[Any]]]
) -> None:
    plugins: list[Any] = [name for name in ("prefix_cache", "paged_kv") if name in kind]
    plugins += [Drafts(drafter, 3)] if "drafts" in kind else []
    num_requests = NUM_REQUESTS if "drafts" not in kind else NUM_REQUESTS // 5
    with build_tiny(plugins=plugins, block_size=BLOCK, pool_bytes=pool_bytes(56, BLOCK), max_model_len=72,
                    max_num_requests=12, max_tokens_per_step=48) as pipe:  # fmt: skip
        counts = soak(pipe, templates, num_requests)
        assert counts["compared"] > 0.8 * num_requests
        assert counts["aborted"] > 0.03 * num_requests
        assert (pipe.stats()["schedule.baseline"]["num_preemptions"] > 20) == ("paged_kv" in plugins)
        assert pipe.stats()["num_errors"] == 0
        assert_idle(pipe)
        if "prefix_cache" in plugins:
            report = pipe.stats()["lookup.prefix_cache"]
            assert report["num_hits"] > 0.1 * num_requests
            assert report["num_evicted_blocks"] > num_requests


def soak(
    pipe: InferencePipeline, templates: list[tuple[dict[str, Any], list[Any]]], num_requests: int
) -> dict[str, int]:
    """Add, step, abort and compare until ``num_requests`` have come and gone."""
    chooser = random.Random(1)
    live: dict[Request, Any] = {}
    counts = {"compared": 0, "aborted": 0}
    num_added = num_steps = 0
    while num_added < num_requests or live:
        while num_added < num_requests and len(live) < 24 and chooser.random() < 0.7:
            made, outputs = chooser.choice(templates)
            options = {k: v for k, v in made.items() if k != "prompt"}
            options["cache_salt"] = chooser.choice([None, None, None, "a", "b"])
            for request, output in zip(make_requests(pipe, made["prompt"], options), outputs, strict=True):
                pipe.add(request)
                live[request] = output
                num_added += 1
        pipe.advance()
        num_steps += 1
        assert num_steps < 40 * num_requests
        if live and chooser.random() < 0.06:
            pipe.abort(chooser.choice(list(live)))
        for request in [r for r in live if r.is_finished]:
            output = live.pop(request)
            if request.finish_reason == "abort":
                counts["aborted"] += 1
                assert request.output_ids == output.token_ids[: request.num_output_tokens]
                assert output.text.startswith(request.text)
            else:
                counts["compared"] += 1
                assert request.output_ids == output.token_ids
                assert (request.text, request.finish_reason) == (output.text, output.finish_reason)
        if num_steps % 50 == 0:
            pool = pipe.block_pool
            pool.check()
            held = {b for r in pipe.queue for b in r.block_table}
            assert pool.num_used == len(held)
    return counts
