"""KV blocks: sized from what there is, given back whatever happens, never read after they were freed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import llmopt
from llmopt.errors import MemoryBudgetError
from llmopt.kv_cache import KVCache
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model, tiny_prompts
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, request, wrap


def poison(pipe: InferencePipeline) -> None:
    """From now on freed blocks, and those that are free already, hold NaN."""
    inner = pipe.block_pool.free

    def fill() -> None:
        for layer in pipe.kv_cache.layers.values():
            free = torch.tensor(pipe.block_pool.free_blocks(), dtype=torch.long)
            layer.key[free] = torch.nan
            layer.value[free] = torch.nan

    def free(blocks: Any) -> None:
        inner(blocks)
        fill()

    pipe.block_pool.free = free  # type: ignore[method-assign]
    fill()


def truth(model: Any, prompt: list[int], new: int) -> list[int]:
    """The ids of the model's own loop."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=new, eos_token_id=-1, do_sample=False)
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


# -- nothing is lost ------------------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_lengths_stops_aborts_and_preemptions_leave_every_block_free(
    plugins: tuple[str, ...], block_size: int
) -> None:
    chooser = random.Random(block_size)
    blocks = 96 // block_size
    with build_tiny(plugins=plugins, block_size=block_size, max_model_len=90, max_num_requests=6,
                    pool_bytes=pool_bytes(blocks, block_size), max_tokens_per_step=24) as pipe:  # fmt: skip
        live: list[Any] = []
        for number in range(100):
            new = chooser.randint(1, 24)
            made = request([chooser.randrange(3, 512) for _ in range(chooser.randint(1, 40))], str(number),
                           max_new_tokens=new, stop_token_ids=range(3, chooser.choice([3, 40])))  # fmt: skip
            pipe.add(made)
            live.append(made)
            for _ in range(chooser.randint(0, 3)):
                pipe.advance()
                pool = pipe.block_pool
                pool.check()
                assert 0 <= pool.num_used <= pool.num_blocks
                held = [b for r in pipe.queue for b in r.block_table]
                assert len(held) == len(set(held)) == pool.num_used  # nobody shares here
            if chooser.random() < 0.25:
                pipe.abort(chooser.choice(live))
        while len(pipe.queue):
            pipe.advance()
        assert_idle(pipe)
        if plugins:
            assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert len(alone(pipe, [5, 6], max_new_tokens=88, ignore_eos=True)) == 88
        assert_idle(pipe)


# -- continuations of one prompt ------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 20])
def test_continuations_share_the_prompt_and_equal_their_single_runs(plugins: tuple[str, ...], length: int) -> None:
    (prompt,) = tiny_prompts(1, min_length=length, max_length=length)
    with build_tiny(plugins=plugins, block_size=4, max_tokens_per_step=6) as pipe:
        options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 10, "seed": 42, "ignore_eos": True}
        first = pipe.batch([prompt], n=4, progress=False, **options)
        shared = pipe.stats()["num_step_tokens"]
        assert_idle(pipe)
        for place, output in enumerate(first):
            made = request(prompt, temperature=1.0, max_new_tokens=10, seed=42 + place * 0x5851F42D4C957F2D)
            pipe.run([made])
            assert made.output_ids == output.token_ids
        assert len({tuple(o.token_ids) for o in first}) > 1
        assert shared == length + 9 + 3 * 10  # the others compute the last prompt token and their own


def test_a_continuation_does_not_see_what_its_parent_wrote_into_the_shared_block() -> None:
    with build_tiny(block_size=8) as pipe:
        poison(pipe)
        outputs = pipe.batch([[5, 6, 7, 8, 9]], n=3, temperature=1.5, seed=1, max_new_tokens=12, progress=False)
        assert not any(o.error for o in outputs)
        again = pipe.batch([[5, 6, 7, 8, 9]], n=3, temperature=1.5, seed=1, max_new_tokens=12, progress=False)
        assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
        assert_idle(pipe)


@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
def test_continuations_run_on_when_their_parent_is_aborted_or_never_starts(plugins: tuple[str, ...]) -> None:
    with build_tiny(plugins=plugins, block_size=4, max_tokens_per_step=8) as pipe:
        wanted = alone(pipe, range(5, 25), temperature=1.0, seed=9, max_new_tokens=8, ignore_eos=True)
        for steps in range(6):
            parent = request(range(5, 25), "parent", temperature=1.0, seed=1)
            child = request(range(5, 25), "child", temperature=1.0, seed=9, parent=parent)
            pipe.add(parent)
            pipe.add(child)
            for _ in range(steps):
                pipe.advance()
            pipe.abort(parent)
            while len(pipe.queue):
                pipe.advance()
            assert child.output_ids == wanted
            assert_idle(pipe)


# -- freed blocks ---------------------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"sliding_window": 8}),
        ("gpt2", {}),
    ],
)
def test_freed_and_unwritten_blocks_are_never_read(
    plugins: tuple[str, ...], kind: str, changes: dict[str, Any]
) -> None:
    model = tiny_model(kind, **changes)
    prompts = tiny_prompts(4, min_length=3, max_length=40)
    size = pool_bytes(24, 4, 1024 if kind == "gpt2" else 512)
    with llmopt.build(model, plugins, block_size=4, max_model_len=64, pool_bytes=size, max_tokens_per_step=6) as pipe:
        poison(pipe)
        for _ in range(2):
            outputs = pipe.batch(prompts, max_new_tokens=12, ignore_eos=True, progress=False)
            assert not any(o.error for o in outputs)
            assert [o.token_ids for o in outputs] == [truth(model, p, 12) for p in prompts]
        assert_idle(pipe)


# -- the size of the pool -------------------------------------------------------------------------
def told(error: BaseException) -> tuple[int, int, int]:
    """Bytes needed, bytes available and the longest sequence that fits, from the message."""
    found = re.search(r"needs (\d+) bytes.* and (-?\d+) bytes are available.* fits is (\d+)", str(error))
    assert found, error
    return int(found[1]), int(found[2]), int(found[3])


@pytest.mark.parametrize("budget", [65536, 20000, 5000, 1100])
def test_too_little_memory_is_refused_with_numbers_that_can_be_built_with(budget: int) -> None:
    model = tiny_model()
    with pytest.raises(MemoryBudgetError) as caught:
        llmopt.build(model, pool_bytes=budget, max_model_len=200)
    needed, available, fitting = told(caught.value)
    assert available == budget
    assert needed >= 200 * 512
    with llmopt.build(model, pool_bytes=budget, max_model_len=fitting) as pipe:
        assert pipe.max_model_len == fitting >= 2
        assert len(alone(pipe, [5], max_new_tokens=fitting - 1, ignore_eos=True)) == fitting - 1
    with llmopt.build(model, pool_bytes=needed, max_model_len=200) as pipe:
        assert len(alone(pipe, [5] * 100, max_new_tokens=100, ignore_eos=True)) == 100


@pytest.mark.parametrize("budget", [0, -5, 100])
def test_no_memory_at_all_is_refused(budget: int) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        llmopt.build(tiny_model(), pool_bytes=budget)
    assert told(caught.value)[1:] == (budget, 0)


def test_a_pool_that_the_memory_does_not_hold_is_refused_and_one_for_all_requests_is_as_large_as_they_need() -> None:
    model = tiny_model()
    with pytest.raises(MemoryBudgetError, match=r"pool_bytes=1\d+ makes a KV pool of \d+ bytes, .* may take \d+"):
        llmopt.build(model, pool_bytes=1 << 60, max_num_requests=1 << 40)
    with llmopt.build(model, pool_bytes=1 << 60, max_num_requests=2) as pipe:  # as much as two requests can fill
        assert pipe.describe().pool_bytes == 2 * 256 * 512


@pytest.mark.parametrize(("budget", "length"), [(65536, 128), (5000, 9)])
def test_without_a_wanted_length_the_pool_decides_and_says_so(budget: int, length: int) -> None:
    with llmopt.build(tiny_model(), pool_bytes=budget) as pipe:
        assert pipe.max_model_len == length
        assert f"max_model_len is cut from 256 to {length}" in str(pipe.describe())
        assert len(alone(pipe, [5], max_new_tokens=length - 1, ignore_eos=True)) == length - 1


@pytest.mark.parametrize(
    ("kind", "changes", "heads", "dim"),
    [
        ("llama", {}, 2, 16),
        ("llama", {"head_dim": 32}, 2, 32),
        ("llama", {"head_dim": 8}, 2, 8),
        ("mistral", {"head_dim": 32}, 2, 32),
        ("gemma2", {"head_dim": 32}, 2, 32),
        ("gpt2", {}, 4, 16),
    ],
)
def test_bytes_of_the_pool_follow_heads_and_head_dim_of_the_model(
    kind: str, changes: dict[str, Any], heads: int, dim: int
) -> None:
    model = tiny_model(kind, **changes)
    with llmopt.build(model, block_size=8, max_num_requests=4) as pipe:
        per_token = KVCache.bytes_per_token(pipe.kv_cache.shapes)
        assert per_token == 2 * 2 * heads * dim * 4  # key and value, layers, float32
        assert pipe.describe().pool_bytes == pipe.block_pool.num_blocks * 8 * per_token
        for layer in pipe.kv_cache.layers.values():
            assert layer.key.shape[1:] == (heads, 8, dim)
        assert alone(pipe, [5, 6, 7], max_new_tokens=10, ignore_eos=True) == truth(model, [5, 6, 7], 10)


def test_the_lookup_is_asked_again_when_a_request_could_not_start() -> None:
    """What it found may be gone by then."""
    calls: list[str] = []

    def record(inner: Any) -> Any:
        def lookup(made: Any) -> Any:
            calls.append(made.request_id)
            assert made.block_table == []
            assert made.num_computed_tokens == 0
            return inner(made)

        return lookup

    with build_tiny(plugins=[wrap("lookup", record)], block_size=4, pool_bytes=pool_bytes(8, 4)) as pipe:
        calls.clear()
        first, second = (
            request(range(5, 15), "first", max_new_tokens=20),
            request(range(5, 15), "second", max_new_tokens=20),
        )
        pipe.run([first, second])
        assert calls.count("first") == 1
        assert calls.count("second") > 1
        assert second.num_cached_tokens == 0
        assert first.output_ids == second.output_ids
