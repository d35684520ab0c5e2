"""Requests through all plugins of memory and scheduling: aborts, pre-emptions, evictions, salts and windows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llmopt.pipeline import InferencePipeline
from llmopt_plugins.memory.kv_offload import KvOffload
from llmopt_plugins.memory.paged_kv import PagedKv
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, request

BLOCK = 4
NUM_BLOCKS = 60
STEMS = [list(range(100 + 30 * stem, 118 + 30 * stem)) for stem in range(4)]  # shared beginnings, of 18 tokens


def company() -> list[Any]:
    bytes_per_block = pool_bytes(1, BLOCK)
    return [
        "prefix_cache",
        PagedKv(watermark=0, swap_bytes=6 * bytes_per_block),
        KvOffload(host_bytes=10 * bytes_per_block),
        "request_order:fair=true",
        "batch_window:min_batch=2,max_wait_ms=1",
        "pd_separation:slice_ms=0.05",
        "chunked_prefill:chunk_size=11",
    ]


def asked(chooser: random.Random) -> tuple[list[int], int]:
    """A prompt out of few, so that prefixes and whole prompts come again, and how many tokens it wants."""
    stem = chooser.choice(STEMS)
    prompt = stem[: chooser.choice((5, 12, 18))] + [7 + chooser.randrange(6)] * chooser.randrange(1, 12)
    return prompt, chooser.choice((2, 9, 25))


def check(pipe: InferencePipeline) -> None:
    """Every block has as many holders as tables that it stands in, and those that nobody holds are not in any."""
    pipe.block_pool.check()
    counts = [0] * NUM_BLOCKS
    for running in pipe.queue.running:
        for block in running.block_table:
            if block >= 0:
                counts[block] += 1
    assert counts == pipe.block_pool.ref_counts.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_thousands_of_requests_have_their_own_tokens_and_leave_the_pool_as_it_was(kind: str) -> None:
    soak(kind, num_requests=3000)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_requests_that_share_beginnings_have_their_own_tokens(kind: str) -> None:
    soak(kind, num_requests=150)


def soak(kind: str, num_requests: int) -> None:
    chooser = random.Random(7)
    changes = {} if kind == "llama" else {"sliding_window": 8}
    wanted: dict[tuple[int, ...], list[int]] = {}
    with (
        build_tiny(kind, changes=changes, max_model_len=80) as plain,
        build_tiny(
            kind, company(), changes, block_size=BLOCK, max_model_len=80, max_num_requests=8,
            pool_bytes=pool_bytes(NUM_BLOCKS, BLOCK),
        ) as pipe,
    ):  # fmt: skip
        pipe.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 1e9  # type: ignore[method-assign]
        live: dict[str, tuple[Any, list[int]]] = {}
        num_made = num_aborted = num_steps = 0
        while num_made < num_requests or live:
            while num_made < num_requests and len(live) < chooser.choice((2, 12, 20)):
                prompt, count = asked(chooser)
                key = tuple(prompt)
                if key not in wanted:
                    wanted[key] = alone(plain, prompt, max_new_tokens=25, ignore_eos=True)
                made = request(
                    prompt, f"r{num_made}", max_new_tokens=count, cache_salt=chooser.choice((None, None, "a", "b")),
                    tenant=chooser.choice((None, "x", "y")), priority=chooser.randrange(3),
                )  # fmt: skip
                live[made.request_id] = made, wanted[key][:count]
                pipe.add(made)
                num_made += 1
            pipe.advance()
            num_steps += 1
            check(pipe)
            if chooser.random() < 0.04:
                pipe.abort(chooser.choice(list(live)))
                num_aborted += 1
            for name, (made, tokens) in list(live.items()):
                if made.is_finished:
                    if made.finish_reason != "abort":
                        assert made.output_ids == tokens, f"{name} after {num_steps} steps"
                    del live[name]
        stats = pipe.stats()
        assert num_aborted > 0
        assert stats["lookup.prefix_cache"]["num_cached_tokens"] > 0
        assert pipe.block_pool.num_evicted > 0
        if kind == "mistral":  # blocks that leave the windows come back before they run out
            assert stats["allocate.paged_kv"]["num_left_blocks"] > 0
        elif num_requests > 1000:
            assert stats["schedule.baseline"]["num_preemptions"] > 0
        assert_idle(pipe)
