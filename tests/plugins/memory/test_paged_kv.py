"""paged_kv: blocks come as they are needed, more requests run at once, and the output stays what it was."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.block_pool import BlockPool
from llmopt.errors import PluginOptionError, RequestTooLargeError
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams
from llmopt.stages import Probe
from llmopt.testing import assert_same_tokens, scripted_model, tiny_model, tiny_prompts
from llmopt.text import make_requests
from llmopt_plugins.memory.paged_kv import PagedAllocate, PagedKv, nearness
from tests.equivalence.test_hybrid_models import hybrid_model
from tests.llmopt.helpers import assert_idle, build_tiny, wrap
from tests.plugins.memory.test_prefix_cache import poison

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


@pytest.mark.parametrize("sized", [{}, {"pool_bytes": 1 << 16}])
def test_swap_space_below_a_block_or_beyond_the_memory_is_refused(sized: dict[str, int]) -> None:
    with pytest.raises(PluginOptionError, match=r"paged_kv has 1 swap_bytes, and a KV block .* takes \d+"):
        llmopt.build(MODEL, [PagedKv(swap_bytes=1)], max_model_len=64, **sized)
    with pytest.raises(PluginOptionError, match=r"paged_kv has \d+ swap_bytes, and this process may take \d+ bytes"):
        llmopt.build(MODEL, [PagedKv(swap_bytes=1 << 60)], max_model_len=64, **sized)


def test_the_pool_leaves_the_swap_space_free() -> None:
    swap = 1 << 20
    options: dict[str, Any] = {"max_model_len": 64, "memory_fraction": 1.0}

    class Small:
        """A machine with a few MiB."""

        info = PluginInfo(name="small", layer="hardware", promise="exact")

        @hookimpl
        def llmopt_wrap_probe(self, probe: Probe) -> Probe:
            return lambda: replace(probe(), available_bytes=3 << 20, device_available_bytes=3 << 20)

    sizes = []
    for plugin in (PagedKv(), PagedKv(swap_bytes=swap)):
        with llmopt.build(MODEL, [Small(), plugin], max_num_requests=10_000, **options) as pipe:
            sizes.append(pipe.describe().pool_bytes)
    assert swap - sizes[0] // 100 < sizes[0] - sizes[1] < swap + sizes[0] // 100


def test_describe_says_where_pre_empted_requests_go() -> None:
    states = hybrid_model("mamba2")
    for model, plugin, told in (
        (MODEL, PagedKv(), "pre-empted requests are computed again"),
        (MODEL, PagedKv(swap_bytes=1 << 20), "pre-empted requests are swapped to at most 1 MiB of host memory"),
        (states, PagedKv(swap_bytes=1 << 20), "pre-empted requests are computed again, without swap space: recurrent "
         "states are not in blocks"),
    ):  # fmt: skip
        with llmopt.build(model, [plugin], max_model_len=64) as pipe:
            assert pipe.describe().details["paged_kv"] == told


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


def test_block_and_pool_size_are_options_of_the_plugin() -> None:
    with llmopt.build(MODEL, ["paged_kv:block_size=8,pool_bytes=65536"], max_model_len=64) as pipe:
        assert pipe.block_pool.block_size == 8
        assert pipe.block_pool.num_blocks == 65536 // (8 * BYTES_PER_TOKEN)


@pytest.mark.parametrize("option", [{"block_size": 0}, {"pool_bytes": 0}, {"swap_bytes": -1}])
def test_sizes_below_their_least_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        PagedKv(**option)


def test_stats_tell_free_blocks_empty_places_and_how_scattered_tables_are() -> None:
    with llmopt.build(MODEL, ["paged_kv"], max_model_len=40, **pool(20)) as pipe:
        rows = [request(5, name="a"), request(6, name="b")]
        for row in rows:
            pipe.add(row)
        for _ in range(5):
            pipe.advance()
        stats = pipe.stats()["allocate.paged_kv"]
        # 10 and 11 tokens in three blocks each; the third ones came alternately
        assert stats["num_free_blocks"] == 14
        assert stats["num_unused_tokens"] == 2 + 1
        assert 0.0 < stats["contiguity"] < 1.0
        assert [r.num_tokens for r in rows] == [10, 11]
        pipe.abort(rows[0])
        pipe.abort(rows[1])
        assert pipe.stats()["allocate.paged_kv"] == {
            "num_free_blocks": 20, "num_unused_tokens": 0, "contiguity": 1.0, "nearness": 1.0, "num_sorted": 1,
        }  # fmt: skip


def test_a_pool_at_rest_hands_out_neighbours_again() -> None:
    pool = BlockPool(12, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    rows = [request(4, name=str(i)) for i in range(4)]
    for _ in range(3):
        for row in rows:
            assert allocate(row, 1)
            advance(row, 4)
    assert [b - a for a, b in zip(rows[0].block_table, rows[0].block_table[1:], strict=False)] == [4, 4]
    for row in rows:
        allocate.free(row)
    assert allocate(long := request(40), 40)
    assert long.block_table == list(range(10))


@pytest.mark.parametrize("option", ["watermark", "block_size", "pool_bytes", "swap_bytes"])
@pytest.mark.parametrize("value", ["16", True, float("nan"), [1]])
def test_what_is_no_number_is_refused_by_its_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is a .*, found"):
        PagedKv(**{option: value})


# -- swap space -------------------------------------------------------------------------------------------------------
def swapping(pipe: Any, copy_s: float) -> None:
    """Make copies of KV cost this much, and computing a token a second."""
    pipe.cost_model.copy_s = lambda num_bytes: copy_s
    pipe.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: float(num_tokens)


@pytest.mark.parametrize(("copy_s", "num_out"), [(0.0, 1), (1e9, 0)])
@pytest.mark.parametrize("company", [[], ["prefix_cache"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_preempted_request_is_copied_out_and_back_when_that_is_quicker_than_computing_it(
    copy_s: float, num_out: int, company: list[str], is_first: bool
) -> None:
    prompts = tiny_prompts(4, min_length=6, max_length=6)
    with llmopt.build(MODEL) as plain:
        wanted = [o.token_ids for o in plain.batch(prompts, max_new_tokens=30, ignore_eos=True, progress=False)]
    plugins = [PagedKv(swap_bytes=1 << 20), *company][:: 1 if is_first else -1]
    with llmopt.build(MODEL, plugins, max_model_len=40, **pool(14)) as pipe:
        swapping(pipe, copy_s)
        outputs = pipe.batch(prompts, max_new_tokens=30, ignore_eos=True, progress=False)
        stats = pipe.stats()["allocate.paged_kv"]
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert (stats["num_swapped_out"] > 0) == num_out
        assert (stats["num_swapped_in"] > 0) == num_out
        assert stats["num_swapped_bytes"] == 0
        assert pipe.block_pool.num_used == 0
        if num_out and not company:
            assert pipe.stats()["num_step_tokens"] == 4 * (6 + 29)  # nothing was computed twice
    assert [o.token_ids for o in outputs] == wanted


def test_the_swap_space_is_never_larger_than_asked_for_and_empty_at_the_end() -> None:
    block_bytes = BLOCK * BYTES_PER_TOKEN
    prompts = tiny_prompts(8, min_length=6, max_length=12)
    with llmopt.build(MODEL, [PagedKv(swap_bytes=6 * block_bytes)], max_model_len=40, **pool(16)) as pipe:
        swapping(pipe, 0.0)
        most = 0
        rows = [request(len(p), max_new_tokens=28, name=str(i)) for i, p in enumerate(prompts)]
        for row in rows:
            pipe.add(row)
        while len(pipe.queue):
            pipe.advance()
            most = max(most, int(pipe.stats()["allocate.paged_kv"]["num_swapped_bytes"]))
            if most and pipe.queue.waiting and pipe.stats()["num_steps"] % 9 == 0:
                pipe.abort(pipe.queue.waiting[0])
        assert 0 < most <= 6 * block_bytes
        assert pipe.stats()["allocate.paged_kv"]["num_swapped_bytes"] == 0
        pipe.block_pool.check()
        assert pipe.block_pool.num_used == 0


def test_what_is_freed_because_a_step_failed_is_computed_again_and_not_swapped() -> None:
    calls = []

    def failing(inner: Any) -> Any:
        def commit(batch: Any, accepted: Any) -> Any:
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("once")
            return inner(batch, accepted)

        return commit

    with llmopt.build(MODEL, [PagedKv(swap_bytes=1 << 20), wrap("commit", failing)], **pool(40)) as pipe:
        swapping(pipe, 0.0)
        outputs = pipe.batch(tiny_prompts(3), max_new_tokens=12, ignore_eos=True, progress=False)
        assert not any(o.error for o in outputs)
        assert pipe.stats()["allocate.paged_kv"]["num_swapped_out"] == 0


# -- sliding windows --------------------------------------------------------------------------------------------------
WINDOW = 8
LONG = {"max_new_tokens": 40, "ignore_eos": True, "progress": False}


def windowed(kind: str = "mistral", *plugins: Any, **options: Any) -> InferencePipeline:
    options = {"block_size": BLOCK, "max_model_len": 120, **options}
    changes = {} if kind == "llama" else {"sliding_window": WINDOW}
    return build_tiny(kind, [*plugins], changes=changes, **options)


@pytest.fixture(scope="module")
def windowed_tokens() -> tuple[list[list[int]], list[list[int]]]:
    prompts = tiny_prompts(4, min_length=3, max_length=50)
    with windowed() as plain:
        return prompts, [o.token_ids for o in plain.batch(prompts, **LONG)]


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("native_mode", ["off", pytest.param("require", marks=pytest.mark.native)])
def test_blocks_that_left_every_window_are_given_back_and_the_tokens_are_the_same(
    native_mode: str, chunk: int, monkeypatch: Any, windowed_tokens: Any
) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", native_mode)
    prompts, wanted = windowed_tokens
    with windowed("mistral", "paged_kv", max_tokens_per_step=chunk) as pipe:
        poison(pipe)
        assert [o.token_ids for o in pipe.batch(prompts, **LONG)] == wanted
        assert pipe.stats()["allocate.paged_kv"]["num_left_blocks"] > 40
        assert_idle(pipe)


def test_a_long_output_in_a_window_never_holds_more_than_the_window() -> None:
    held = []
    with windowed("mistral", "paged_kv") as pipe:
        for number, _ in enumerate(pipe.stream([5, 6, 7], max_new_tokens=100, ignore_eos=True)):
            held.append(pipe.block_pool.num_used)
            if number == 50:
                stats = pipe.stats()["allocate.paged_kv"]
                assert stats["num_unused_tokens"] < BLOCK
                assert stats["contiguity"] <= 1
        assert_idle(pipe)
    assert max(held) <= WINDOW // BLOCK + 1


@pytest.mark.native
def test_the_native_decoder_does_not_miss_what_was_given_back(windowed_tokens: Any) -> None:
    prompts, wanted = windowed_tokens
    with windowed("mistral", "native", "paged_kv") as pipe:
        poison(pipe)
        assert [o.token_ids for o in pipe.batch(prompts, **LONG)] == wanted
        assert pipe.stats()["allocate.paged_kv"]["num_left_blocks"] > 40


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_where_a_layer_sees_everything_nothing_is_given_back(kind: str) -> None:
    with windowed(kind, "paged_kv") as pipe:
        for _ in pipe.stream([5, 6, 7], max_new_tokens=60, ignore_eos=True):
            pass
        assert "num_left_blocks" not in pipe.stats()["allocate.paged_kv"]
        most: list[int] = []
        (made,) = make_requests(pipe, [5, 6, 7], {"max_new_tokens": 60, "ignore_eos": True})
        pipe.add(made, lambda _: most.append(pipe.block_pool.num_used))  # after every step
        pipe.wait(lambda: made.is_finished)
        assert max(most) >= 15  # of about 60 tokens


def test_a_prefix_cache_keeps_what_left_the_window_until_its_memory_is_needed(windowed_tokens: Any) -> None:
    prompts, wanted = windowed_tokens
    with windowed("mistral", "prefix_cache", "paged_kv") as pipe:
        poison(pipe)
        assert [o.token_ids for o in pipe.batch(prompts, **LONG)] == wanted
        again = pipe.batch(prompts, **LONG)
        assert [o.token_ids for o in again] == wanted
        assert sum(o.num_cached_tokens for o in again) > 0
        assert pipe.stats()["allocate.paged_kv"]["num_left_blocks"] > 40
        pipe.between_steps(lambda: pipe.block_pool.evict(2 * len(prompts)))  # some that stand first are gone
        assert [o.token_ids for o in pipe.batch(prompts, **LONG)] == wanted
        assert_idle(pipe)


def test_continuations_find_the_prompt_although_the_first_one_goes_on() -> None:
    (prompt,) = tiny_prompts(1, min_length=40, max_length=40)
    options = {**LONG, "n": 5, "seed": 1, "temperature": 1.0}
    with windowed() as plain:
        wanted = [o.token_ids for o in plain.batch([prompt], **options)]
    for most in (2, 8):  # with two at once, later ones start when the first has long left the prompt
        with windowed("mistral", "paged_kv", max_num_requests=most) as pipe:
            poison(pipe)
            assert [o.token_ids for o in pipe.batch([prompt], **options)] == wanted
            assert_idle(pipe)


def test_a_swapped_request_comes_back_with_its_window_alone(windowed_tokens: Any) -> None:
    prompts = tiny_prompts(6, min_length=20, max_length=24)
    with windowed() as plain:
        wanted = [o.token_ids for o in plain.batch(prompts, **LONG)]
    with windowed("mistral", PagedKv(watermark=0, swap_bytes=1 << 20), max_model_len=66, **pool(17)) as pipe:
        poison(pipe)
        pipe.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 1e9  # type: ignore[method-assign]
        assert [o.token_ids for o in pipe.batch(prompts, **LONG)] == wanted
        assert pipe.stats()["allocate.paged_kv"]["num_swapped_in"] > 0
        assert_idle(pipe)


# -- scattered tables -------------------------------------------------------------------------------------------------
def serve_many(sort_below: float) -> tuple[float, int]:
    """Requests of all lengths come and go, 16 at a time; how near the blocks of the last tables lie, and the sorts."""
    chooser = random.Random(0)
    pool = BlockPool(1600, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    allocate.sort_below = sort_below
    rows: list[Request] = []
    found: list[float] = []
    for number in range(1000):
        while len(rows) < 16:
            row = request(chooser.randint(2, 60) * BLOCK, chooser.randint(1, 40) * BLOCK)
            assert allocate(row, row.num_tokens)
            rows.append(row)
        for row in rows:
            row.num_computed_tokens = row.num_tokens + BLOCK - 1
            for _ in range(BLOCK):
                row.append(9)
            assert allocate(row, 1)
        for row in [r for r in rows if r.num_tokens >= r.max_len]:
            rows.remove(row)
            allocate.free(row)
        if number >= 500:
            found += [nearness(r.block_table) for r in rows]
    pool.check()
    return sum(found) / len(found), allocate.num_sorted


def test_scattered_tables_make_the_free_list_be_sorted_and_later_ones_lie_closer_together() -> None:
    before, num_sorted = serve_many(sort_below=0.0)
    assert before < 0.2
    assert num_sorted == 0
    after, num_sorted = serve_many(PagedAllocate.sort_below)
    assert after > 2 * before
    assert num_sorted > 0


def test_tables_that_grow_in_turn_count_as_near_and_are_left_alone() -> None:
    pool = BlockPool(64, BLOCK)
    allocate = PagedAllocate(pool, watermark=0)
    rows = [request(BLOCK, 10 * BLOCK) for _ in range(4)]
    for _ in range(8):
        for row in rows:
            assert allocate(row, row.num_tokens - row.num_computed_tokens)
            advance(row, BLOCK)
    assert nearness(rows[0].block_table) == 1
    allocate.free(rows[0])
    assert allocate.num_sorted == 0
