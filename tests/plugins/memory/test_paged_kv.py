"""paged_kv: blocks come as they are needed, more requests run at once, and the output stays what it was."""

from __future__ import annotations

from typing import Any

import pytest

import llmopt
from llmopt.block_pool import BlockPool
from llmopt.errors import RequestTooLargeError
from llmopt.request import Request, SamplingParams
from llmopt.testing import assert_same_tokens, scripted_model, tiny_model, tiny_prompts
from llmopt_plugins.memory.paged_kv import PagedAllocate, PagedKv

BLOCK = 4


def request(num_prompt: int = 5, max_new_tokens: int = 20, name: str = "r") -> Request:
    prompt = list(range(3, 3 + num_prompt))
    return Request(name, prompt, SamplingParams(max_new_tokens=max_new_tokens), max_len=num_prompt + max_new_tokens)


def advance(row: Request, num_tokens: int) -> None:
    """Compute everything known, then append tokens."""
    for _ in range(num_tokens):
        row.num_computed_tokens = row.num_tokens
        row.append(9)


# -- its own logic ---------------------------------------------------------------------------------------------------
def test_a_request_starts_with_the_blocks_of_its_prompt_and_not_of_its_longest_form() -> None:
    pool = BlockPool(10, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    row = request(num_prompt=5)
    assert allocate(row, 5)
    assert len(row.block_table) == pool.num_used == 2
    assert allocate.num_blocks_ever(row) == 6


def test_a_block_is_added_when_a_token_needs_it_and_not_before() -> None:
    pool = BlockPool(10, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    row = request(num_prompt=5)
    sizes = []
    for _ in range(8):
        assert allocate(row, row.num_tokens - row.num_computed_tokens)
        sizes.append(len(row.block_table))
        advance(row, 1)
    assert sizes == [2, 2, 2, 2, 3, 3, 3, 3]


def test_a_whole_prompt_is_covered_although_a_chunk_of_it_is_computed() -> None:
    pool = BlockPool(10, BLOCK)
    row = request(num_prompt=13)
    assert PagedAllocate(pool, watermark=0)(row, 4)
    assert len(row.block_table) == 4


def test_drafts_are_covered_as_far_as_they_can_be_kept() -> None:
    pool = BlockPool(10, BLOCK)
    row = request(num_prompt=5, max_new_tokens=4)
    assert PagedAllocate(pool, watermark=0)(row, 5 + 100)
    assert len(row.block_table) == 2  # 9 tokens at most, the last is chosen and never computed


def test_when_blocks_are_short_nothing_changes() -> None:
    pool = BlockPool(3, BLOCK)
    pool.allocate(2)
    row = request(num_prompt=5)
    assert not PagedAllocate(pool, watermark=0)(row, 5)
    assert row.block_table == []
    assert pool.num_free == 1
    pool.check()


def test_the_watermark_holds_back_a_start_but_not_the_growth_of_a_running_request() -> None:
    pool = BlockPool(4, BLOCK)
    allocate = PagedAllocate(pool, watermark=2)
    running, waiting = request(4, name="running"), request(4, name="waiting")
    assert allocate(running, 4)  # alone, it starts whatever the watermark says
    running.slot = 0
    assert allocate(waiting, 4)
    allocate.free(waiting)
    pool.allocate(1)
    assert not allocate(waiting, 4)
    advance(running, 1)
    assert allocate(running, 1)


def test_freeing_twice_is_harmless_and_gives_everything_back() -> None:
    pool = BlockPool(4, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    row = request()
    allocate(row, 5)
    allocate.free(row)
    allocate.free(row)
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize("watermark", [-0.1, 1.0, 2])
def test_a_watermark_outside_of_the_pool_is_refused(watermark: float) -> None:
    with pytest.raises(ValueError, match="0 <= watermark < 1"):
        PagedKv(watermark=watermark)


# -- in a pipeline ---------------------------------------------------------------------------------------------------
MODEL = tiny_model()
BYTES_PER_TOKEN = 2 * 2 * 16 * 2 * 4  # key and value, 2 heads of 16, 2 layers, float32


def pool(num_blocks: int) -> dict[str, Any]:
    return {"block_size": BLOCK, "pool_bytes": num_blocks * BLOCK * BYTES_PER_TOKEN}


def most_at_once(plugins: list[Any], num_blocks: int) -> int:
    """The largest number of requests in one step, of 8 that may have 40 tokens each and end after 2."""
    scripts = [([10 + number] * 3, [7, 8]) for number in range(8)]
    model = scripted_model(scripts)
    most = 0
    bytes_per_token = 2 * 16 * 4  # key and value, one head of 16, float32
    with llmopt.build(model, plugins, block_size=BLOCK, max_model_len=48,
                      pool_bytes=num_blocks * BLOCK * bytes_per_token) as pipe:  # fmt: skip
        for number, (prompt, _) in enumerate(scripts):
            options = SamplingParams(max_new_tokens=40)
            pipe.add(Request(str(number), prompt, options, max_len=43, eos_token_ids=frozenset({2}), wants_text=False))
        while len(pipe.queue):
            most = max(most, len(pipe.advance().advanced))
    return most


def test_more_requests_run_at_once_than_with_reserved_blocks() -> None:
    assert most_at_once([], num_blocks=24) == 2
    assert most_at_once(["paged_kv"], num_blocks=24) == 8


def test_when_the_pool_runs_out_the_youngest_starts_again_and_the_output_is_the_same() -> None:
    prompts = tiny_prompts(4, min_length=6, max_length=6)
    with llmopt.build(MODEL) as plain:
        wanted = [o.token_ids for o in plain.batch(prompts, max_new_tokens=30, ignore_eos=True, progress=False)]
    with llmopt.build(MODEL, ["paged_kv"], max_model_len=40, **pool(14)) as pipe:
        outputs = pipe.batch(prompts, max_new_tokens=30, ignore_eos=True, progress=False)
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert pipe.block_pool.num_used == 0
    assert [o.token_ids for o in outputs] == wanted


def test_generate_is_the_same_with_a_pool_that_is_too_small_for_all_rows() -> None:
    with llmopt.build(MODEL, ["paged_kv"], max_model_len=48, **pool(16)) as pipe:
        assert_same_tokens(pipe, MODEL, tiny_prompts(5, max_length=16))


def test_continuations_of_one_prompt_share_its_blocks() -> None:
    (prompt,) = tiny_prompts(1, min_length=16, max_length=16)
    options = {"n": 4, "seed": 1, "temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, "progress": False}
    with llmopt.build(MODEL) as plain:
        wanted = [o.token_ids for o in plain.batch([prompt], **options)]
    with llmopt.build(MODEL, ["paged_kv"], max_model_len=48, **pool(14)) as pipe:
        outputs = pipe.batch([prompt], **options)
        assert pipe.block_pool.num_used == 0
    assert [o.token_ids for o in outputs] == wanted


def test_a_request_that_the_pool_could_never_hold_is_refused_at_the_door() -> None:
    with llmopt.build(MODEL, ["paged_kv"], **pool(4)) as pipe:
        assert pipe.max_model_len == 16
        pipe.allocate.num_blocks_ever = lambda request: 5  # type: ignore[method-assign]
        with pytest.raises(RequestTooLargeError, match="needs 5 KV blocks of 4 tokens, the pool has 4"):
            pipe.batch([[5, 6]], max_new_tokens=4, progress=False)


def test_its_option_is_reachable_by_name() -> None:
    with llmopt.build(MODEL, [PagedKv(watermark=0.5)], **pool(20)) as pipe:
        assert pipe.allocate.watermark == 10  # type: ignore[attr-defined]
