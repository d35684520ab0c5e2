"""prefix_cache: what was computed once is found again, and never where it does not belong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmopt
from llmopt.errors import LlmoptError, PipelineClosedError, RequestError
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.memory.prefix_cache import PrefixCache, PrefixFileError
from llmopt_plugins.memory.prefix_cache.index import BlockIndex
from tests.llmopt.helpers import Drafts, assert_idle, build_tiny, pool_bytes, request, wrap

BLOCK = 4
PREFIX = list(range(100, 140))  # ten blocks
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "progress": False}


def build(*plugins: Any, num_blocks: int = 120, kind: str = "llama", **options: Any) -> InferencePipeline:
    made = list(plugins) if any(isinstance(p, PrefixCache) for p in plugins) else ["prefix_cache", *plugins]
    options = {"block_size": BLOCK, "max_model_len": 120, **options}
    size = pool_bytes(num_blocks, options["block_size"], 1024 if kind == "gpt2" else 512)
    return build_tiny(kind, made, pool_bytes=size, **options)


def index_of(pipe: InferencePipeline) -> BlockIndex:
    index: BlockIndex = pipe.lookup.index  # type: ignore[attr-defined]
    return index


def tokens(pipe: InferencePipeline, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    outputs = pipe.batch(prompts, **{**OPTIONS, **options})
    assert not any(o.error for o in outputs)
    return [o.token_ids for o in outputs]


def cached(pipe: InferencePipeline, prompts: list[list[int]], **options: Any) -> list[int]:
    return [o.num_cached_tokens for o in pipe.batch(prompts, **{**OPTIONS, **options})]


@pytest.fixture(scope="module")
def plain() -> Any:
    with build_tiny(max_model_len=120) as pipe:
        yield pipe


def assert_index_is_true(pipe: InferencePipeline) -> None:
    """The pool and what the plugin notes of its blocks agree."""
    pool, index = pipe.block_pool, index_of(pipe)
    pool.check()
    entered = np.flatnonzero(index.serials).tolist()
    assert len(entered) == pool.num_keys == int((index.serials > 0).sum())
    assert len({int(index.serials[b]) for b in entered}) == len(entered)
    for block in entered:
        assert pool.find(pool.key_of(block) or b"") == [block]
        assert block in index.followers(int(index.parents[block]))
    parents = {int(index.parents[b]) for b in entered}
    assert sum(len(index.followers(p)) for p in parents) == len(entered)


def assert_at_rest(pipe: InferencePipeline) -> None:
    assert_idle(pipe)
    assert_index_is_true(pipe)
    assert index_of(pipe).chains == {}
    assert pipe.lookup.pending == {}  # type: ignore[attr-defined]


# -- hits -------------------------------------------------------------------------------------------------------------
def test_the_same_prompt_is_found_but_for_its_last_token_and_gives_the_same_output(plain: InferencePipeline) -> None:
    prompts = [PREFIX[:length] for length in (1, 3, 4, 5, 8, 9, 40)]
    wanted = tokens(plain, prompts)
    with build() as pipe:
        for prompt, output in zip(prompts, wanted, strict=True):
            index_of(pipe).clear()
            for expected in (0, len(prompt) - 1, len(prompt) - 1):
                (made,) = pipe.batch([prompt], **OPTIONS)
                assert made.token_ids == output
                # outputs count as well: a prompt that ends inside of a block finds the block that its output filled
                assert made.num_cached_tokens == expected
        assert_at_rest(pipe)


def test_a_shared_beginning_is_computed_once(plain: InferencePipeline) -> None:
    prompts = [[*PREFIX, 5 + number, 6] for number in range(6)]
    with build() as pipe:
        tokens(pipe, [PREFIX], max_new_tokens=1)
        before = pipe.stats()["num_step_tokens"]
        assert tokens(pipe, prompts, max_new_tokens=1) == tokens(plain, prompts, max_new_tokens=1)
        assert pipe.stats()["num_step_tokens"] - before == 6 * 2
        report = pipe.stats()["lookup.prefix_cache"]
        assert (report["num_lookups"], report["num_hits"], report["num_cached_tokens"]) == (7, 6, 240)
        assert_at_rest(pipe)


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it(plain: InferencePipeline) -> None:
    with build() as pipe:
        history = list(PREFIX[:10])
        for turn in range(5):
            (made,) = pipe.batch([history], **OPTIONS)
            assert [made.token_ids] == tokens(plain, [history])
            # of the turn before, all but the last chosen token was computed
            assert made.num_cached_tokens == (0 if turn == 0 else len(history) - 4)
            history += [*made.token_ids, 7, 8, 9]
        assert_at_rest(pipe)


@pytest.mark.parametrize("same", range(BLOCK))
def test_the_part_of_a_block_that_is_the_same_is_copied(same: int, plain: InferencePipeline) -> None:
    other = [*PREFIX[: 8 + same], *range(300, 320)]
    with build() as pipe:
        tokens(pipe, [PREFIX])
        (made,) = pipe.batch([other], **OPTIONS)
        assert made.num_cached_tokens == 8 + same
        assert [made.token_ids] == tokens(plain, [other])
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])  # the block that was copied is what it was
        assert pipe.stats()["lookup.prefix_cache"]["num_copies"] == (same > 0) + 1
        assert_at_rest(pipe)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize("chunk", [6, 4096])
def test_windows_and_chunks_do_not_change_what_is_found_to_be_right(kind: str, chunk: int) -> None:
    changes = {"sliding_window": 8} if kind in ("mistral", "gemma2") else {}
    with (
        build_tiny(kind, changes=changes, max_model_len=120) as reference,
        build(kind=kind, changes=changes, max_tokens_per_step=chunk) as pipe,
    ):
        poison(pipe)
        for prompt in (PREFIX, PREFIX, [*PREFIX[:30], 5, 6, 7], [*PREFIX, 8, 9]):
            assert tokens(pipe, [prompt]) == tokens(reference, [prompt])
        assert pipe.stats()["lookup.prefix_cache"]["num_hits"] == 3
        assert_at_rest(pipe)


def poison(pipe: InferencePipeline) -> None:
    """Blocks that hold nothing hold NaN from now on."""
    inner = pipe.block_pool.free

    def free(blocks: Any) -> None:
        inner(blocks)
        empty = torch.tensor(pipe.block_pool.free_blocks(), dtype=torch.long)
        for layer in pipe.kv_cache.layers.values():
            layer.key[empty] = torch.nan
            layer.value[empty] = torch.nan

    pipe.block_pool.free = free  # type: ignore[method-assign]
    free([])


def test_generate_and_its_samples_are_the_same_the_first_time_and_the_second() -> None:
    model = tiny_model()
    prompts = tiny_prompts(5, min_length=9, max_length=30)
    with llmopt.build(model, ["prefix_cache"], block_size=BLOCK) as pipe:
        for _ in range(2):
            assert_same_tokens(pipe, model, prompts, max_new_tokens=16)
            assert_same_tokens(pipe, model, prompts, max_new_tokens=16, do_sample=True, top_k=20)
        assert pipe.stats()["lookup.prefix_cache"]["num_hits"] >= 10
        assert_at_rest(pipe)


def test_a_scheduler_can_ask_how_much_is_cached_without_changing_anything() -> None:
    with build() as pipe:
        tokens(pipe, [PREFIX])
        made = request([*PREFIX[:22], 5, 5, 5])
        used, kept = pipe.block_pool.num_used, pipe.block_pool.kept_blocks()
        assert pipe.lookup.num_cached(made) == 20  # type: ignore[attr-defined]
        assert pipe.lookup.num_cached(request(PREFIX, cache_salt="other")) == 0  # type: ignore[attr-defined]
        assert (pipe.block_pool.num_used, pipe.block_pool.kept_blocks()) == (used, kept)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    with build("paged_kv", num_blocks=40) as pipe:
        made = request(PREFIX, max_new_tokens=20)
        pipe.add(made)
        for _ in range(6):
            pipe.advance()
        pipe.allocate.free(made)
        pipe.queue.preempt(made)
        pipe.advance()
        assert made.num_cached_tokens >= len(PREFIX) + 4 - BLOCK + 1
        pipe.abort(made)
        assert_at_rest(pipe)


# -- continuations and drafts -----------------------------------------------------------------------------------------
def test_continuations_share_their_prompt_and_find_it_when_it_comes_again() -> None:
    options = {**OPTIONS, "n": 4, "temperature": 1.0, "seed": 3}
    with build_tiny(max_model_len=120) as plain:
        wanted = [o.token_ids for o in plain.batch([PREFIX[:18]], **options)]
    with build() as pipe:
        for _ in range(3):
            assert [o.token_ids for o in pipe.batch([PREFIX[:18]], **options)] == wanted
        assert_at_rest(pipe)


def test_rejected_drafts_are_never_found() -> None:
    chooser = random.Random(0)

    def drafter(made: Request) -> list[int]:
        return [chooser.randrange(3, 512) for _ in range(3)]

    with build(Drafts(drafter, 3)) as pipe, build_tiny(max_model_len=120) as plain:
        sequences = []
        for number in range(6):
            prompt = [*PREFIX[: 5 + number], number]
            wanted = tokens(plain, [prompt], max_new_tokens=40)
            assert tokens(pipe, [prompt], max_new_tokens=40) == wanted
            sequences.append([*prompt, *wanted[0]])
        index = index_of(pipe)
        real = {tuple(s[start : start + BLOCK]) for s in sequences for start in range(0, len(s) - 1, BLOCK)}
        real |= {tuple(s[len(s) // BLOCK * BLOCK : -1]) for s in sequences}  # the last token is never computed
        real |= {tuple(s[(len(s) - 1) // BLOCK * BLOCK : -1]) for s in sequences}
        entered = [index.tokens[b] for b in np.flatnonzero(index.serials)]
        assert {tuple(ids[ids >= 0].tolist()) for ids in entered} <= real
        assert_at_rest(pipe)


# -- whom it belongs to -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ["cache_salt", "tenant"])
def test_requests_with_another_salt_or_tenant_find_nothing_of_each_other(field: str) -> None:
    with build() as pipe:
        assert cached(pipe, [PREFIX], **{field: "a"}) == [0]
        assert cached(pipe, [PREFIX], **{field: "b"}) == [0]
        assert cached(pipe, [PREFIX]) == [0]
        assert cached(pipe, [PREFIX], **{field: "a"}) == [39]
        assert_at_rest(pipe)


def test_a_salt_that_is_no_text_is_refused() -> None:
    with build() as pipe, pytest.raises(RequestError, match="cache_salt must be a text, found 5"):
        pipe.batch([PREFIX], cache_salt=5, progress=False)


def test_an_adapter_loaded_again_under_its_name_finds_nothing_of_the_old_one() -> None:
    class Adapters:
        loads = {"x": 1}

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, batch: Any) -> None:
            return None

        def adapter_key(self, name: str) -> str:
            return f"{name} {self.loads[name]}"

    with build(wrap("adapt", Adapters)) as pipe:
        assert cached(pipe, [PREFIX], adapter="x") == [0]
        assert cached(pipe, [PREFIX], adapter="x") == [39]
        assert cached(pipe, [PREFIX]) == [0]
        Adapters.loads["x"] = 2
        assert cached(pipe, [PREFIX], adapter="x") == [0]


def test_keys_that_collide_are_noticed_by_the_tokens(plain: InferencePipeline) -> None:
    chooser = random.Random(2)
    prompts = [[chooser.choice([5, 6]) for _ in range(chooser.randint(8, 30))] for _ in range(40)]
    with build() as pipe:
        index_of(pipe).make_key = lambda digest: bytes([digest[0] % 8]) + bytes(15)
        for prompt in prompts:
            assert tokens(pipe, [prompt], max_new_tokens=4) == tokens(plain, [prompt], max_new_tokens=4)
        report = pipe.stats()["lookup.prefix_cache"]
        assert report["num_collisions"] > 10
        assert report["num_hits"] > 0
        assert_at_rest(pipe)


def test_equal_tokens_after_different_ones_are_different_even_when_all_keys_are_the_same() -> None:
    """The second block has the same tokens and the same key in both; only what comes before differs."""
    first, second = [5] * BLOCK + [7] * BLOCK + [9], [6] * BLOCK + [7] * BLOCK + [9]
    with build() as pipe, build_tiny(max_model_len=120) as plain:
        index_of(pipe).make_key = lambda digest: b"k" * 16
        for prompt in (first, second, first, second):
            assert tokens(pipe, [prompt]) == tokens(plain, [prompt])
        assert_at_rest(pipe)


def test_a_request_that_failed_leaves_nothing_to_be_found() -> None:
    def failing(inner: Any) -> Any:
        def commit(batch: Any, accepted: Any) -> Any:
            if any(r.request_id == "bad" and r.num_output_tokens == 6 for r in batch.requests):
                raise RuntimeError("on purpose")
            return inner(batch, accepted)

        return commit

    with build(wrap("commit", failing)) as pipe:
        tokens(pipe, [PREFIX[:20]], max_new_tokens=1)
        bad = request(PREFIX, "bad", max_new_tokens=20)
        pipe.add(bad)
        while not bad.is_finished:
            pipe.advance()
        assert bad.finish_reason == "error"
        assert pipe.block_pool.num_keys == 5  # found by it, not computed
        assert cached(pipe, [PREFIX]) == [20]
        assert_at_rest(pipe)


def test_a_model_whose_weights_were_changed_forgets_what_it_computed() -> None:
    model = tiny_model(seed=5)
    with llmopt.build(model, ["prefix_cache"], block_size=BLOCK) as pipe:
        assert cached(pipe, [PREFIX]) == [0]
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        assert cached(pipe, [PREFIX]) == [0]
        assert cached(pipe, [PREFIX]) == [39]
        with llmopt.build(model, block_size=BLOCK) as plain:
            assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])


# -- at the same time -------------------------------------------------------------------------------------------------
def test_of_two_requests_with_the_same_new_beginning_one_computes_it() -> None:
    with build(max_tokens_per_step=60) as pipe, build_tiny(max_model_len=120) as plain:
        prompts = [[*PREFIX, number] for number in range(5, 9)]
        assert tokens(pipe, prompts, max_new_tokens=4) == tokens(plain, prompts, max_new_tokens=4)
        report = pipe.stats()["lookup.prefix_cache"]
        assert report["num_waits"] > 0
        assert pipe.stats()["num_step_tokens"] == 41 + 3 * 1 + 4 * 3
        assert_at_rest(pipe)


def test_what_is_shorter_than_a_step_is_computed_rather_than_waited_for() -> None:
    with build() as pipe:
        cached(pipe, [[*PREFIX[:12], number] for number in range(5, 9)])
        assert pipe.stats()["lookup.prefix_cache"]["num_waits"] == 0


@pytest.mark.parametrize("steps", range(6))
def test_when_the_one_that_computes_is_aborted_the_waiting_one_goes_on(steps: int) -> None:
    with build(max_tokens_per_step=12) as pipe, build_tiny(max_model_len=120) as plain:
        first, second = request([*PREFIX, 5], "first"), request([*PREFIX, 6], "second")
        pipe.add(first)
        pipe.add(second)
        for _ in range(steps):
            pipe.advance()
        pipe.abort(first)
        for _ in range(30):
            pipe.advance()
        assert [second.output_ids] == tokens(plain, [[*PREFIX, 6]], max_new_tokens=8)
        assert_at_rest(pipe)


def test_nobody_waits_for_ever_for_one_that_makes_no_progress() -> None:
    with build(max_tokens_per_step=12) as pipe:
        first, second = request([*PREFIX, 5], "first"), request([*PREFIX, 6], "second")
        pipe.add(first)
        pipe.advance()
        found = [pipe.lookup(second) for _ in range(12)]
        assert found[0] is None
        assert found[-1] is not None
        pipe.allocate.free(second)
        pipe.abort(first)


@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
def test_in_a_pool_too_small_for_two_all_finish_with_the_same_tokens(
    plugins: tuple[str, ...], plain: InferencePipeline
) -> None:
    prompts = [[*PREFIX[:20], number, number] for number in range(5, 11)]
    with build(*plugins, num_blocks=10, max_model_len=40) as pipe:
        for _ in range(2):
            assert tokens(pipe, prompts) == tokens(plain, prompts)
        assert_at_rest(pipe)


# -- eviction ---------------------------------------------------------------------------------------------------------
def test_only_blocks_that_nobody_holds_are_evicted_and_then_not_found_any_more() -> None:
    with build("paged_kv", num_blocks=20, max_model_len=60) as pipe, build_tiny(max_model_len=120) as plain:
        tokens(pipe, [PREFIX[:16]], max_new_tokens=1)
        live = request([*PREFIX[:16], 5], "live", max_new_tokens=30)
        pipe.add(live)
        pipe.advance()
        assert live.num_cached_tokens == 16
        chooser = random.Random(1)
        for _ in range(8):
            flood = [chooser.randrange(200, 400) for _ in range(20)]
            assert tokens(pipe, [flood], max_new_tokens=2) == tokens(plain, [flood], max_new_tokens=2)
            assert_index_is_true(pipe)
        assert pipe.block_pool.num_evicted > 0
        pipe.wait(lambda: live.is_finished)
        assert [live.output_ids] == tokens(plain, [[*PREFIX[:16], 5]], max_new_tokens=30)
        assert tokens(pipe, [PREFIX[:16]]) == tokens(plain, [PREFIX[:16]])
        assert_at_rest(pipe)


def test_what_was_found_for_a_request_that_could_not_start_is_looked_up_again(plain: InferencePipeline) -> None:
    with build(num_blocks=8, max_model_len=32) as pipe:
        tokens(pipe, [PREFIX[:13]], max_new_tokens=1)
        runs = request(list(range(300, 308)), "runs", max_new_tokens=12)  # 5 of 8 blocks
        late = request(PREFIX[:13], "late", max_new_tokens=8)  # finds the other 3, and lacks 2
        other = request(list(range(400, 409)), "other", max_new_tokens=2)  # takes them
        for made in (runs, late, other):
            pipe.add(made)
        pipe.advance()
        assert (late.num_cached_tokens, late.block_table) == (0, [])
        assert other.block_table
        while len(pipe.queue):
            pipe.advance()
        assert late.num_cached_tokens == 0
        assert [late.output_ids] == tokens(plain, [PREFIX[:13]], max_new_tokens=8)
        assert_at_rest(pipe)


def test_prompts_given_as_embeddings_are_never_taken_for_each_other() -> None:
    with build() as pipe:
        for seed in (0, 1, 0):
            embeds = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(seed))
            options: dict[str, Any] = {"inputs_embeds": embeds, "max_new_tokens": 6, "do_sample": False}
            assert torch.equal(pipe.generate(**options), pipe.model.generate(**options))
        assert not pipe.stats()["fall_backs"]
        assert pipe.stats()["lookup.prefix_cache"]["num_hits"] == 0
        assert_at_rest(pipe)


def test_long_prompts_that_come_once_do_not_drive_out_a_system_prompt() -> None:
    chooser = random.Random(1)
    with build("paged_kv", num_blocks=30, max_model_len=100) as pipe:
        for number in range(12):
            found = cached(pipe, [[*PREFIX, 5, number]], max_new_tokens=2)
            assert found[0] >= (40 if number else 0)
            cached(pipe, [[chooser.randrange(200, 400) for _ in range(70)]], max_new_tokens=2)


def test_an_abort_at_any_age_leaves_earlier_turns_to_be_found(plain: InferencePipeline) -> None:
    with build("paged_kv", max_tokens_per_step=8) as pipe:
        first = [*PREFIX[:20]]
        turn = [*first, *tokens(pipe, [first])[0], 7, 8, 9]
        for age in range(12):
            third = request([*turn, *range(200, 220)], f"third-{age}")
            pipe.add(third)
            for _ in range(age):
                pipe.advance()
            pipe.abort(third)
            assert_index_is_true(pipe)
            (made,) = pipe.batch([turn], **OPTIONS)
            assert made.num_cached_tokens >= 28
            assert [made.token_ids] == tokens(plain, [turn])
        assert_at_rest(pipe)


# -- models that it leaves alone --------------------------------------------------------------------------------------
def test_a_model_with_recurrent_states_is_left_alone_and_told_why() -> None:
    from tests.equivalence.test_hybrid_models import hybrid_model

    model = hybrid_model("falcon_h1")
    cache = PrefixCache()
    with llmopt.build(model, [cache]) as pipe:
        assert "keeps nothing: the recurrent states" in str(pipe.describe())
        assert cached(pipe, [list(range(5, 25))] * 2) == [0, 0]
        with pytest.raises(LlmoptError, match="cannot be kept"):
            cache.add("x", PREFIX)


# -- named prefixes ---------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = PrefixCache()
    with build(cache) as pipe:
        assert cache.add("system", [*PREFIX, 5]) == 40
        assert cache.names == ["system"]
        cache.save(tmp_path / "system.safetensors", "system")
        assert_at_rest(pipe)
    return tmp_path / "system.safetensors"


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_a_saved_prefix_is_found_by_another_pipeline_whatever_its_blocks(
    saved: Path, block_size: int, plain: InferencePipeline
) -> None:
    cache = PrefixCache()
    with build(cache, block_size=block_size) as pipe:
        assert cache.load(saved) == "system"
        assert cache.load(saved) == "system"
        prompt = [*PREFIX, 9, 9]
        (made,) = pipe.batch([prompt], **OPTIONS)
        assert made.num_cached_tokens == 40 // block_size * block_size
        assert [made.token_ids] == tokens(plain, [prompt])
        cache.save(saved, "system")
        assert_at_rest(pipe)


def test_a_prefix_of_one_salt_is_loaded_for_that_salt(tmp_path: Path) -> None:
    cache = PrefixCache()
    with build(cache) as pipe:
        cache.add("mine", PREFIX, cache_salt="me")
        cache.save(tmp_path / "mine", "mine")
        cache.clear()
        assert pipe.block_pool.num_keys == 0
        cache.load(tmp_path / "mine")
        assert cached(pipe, [PREFIX]) == [0]
        assert cached(pipe, [PREFIX], cache_salt="me") == [39]


@pytest.mark.parametrize("place", [0, 9, 200, -500, -1])
def test_a_damaged_file_is_refused(saved: Path, place: int) -> None:
    data = bytearray(saved.read_bytes())
    data[place] ^= 0x10
    saved.write_bytes(data)
    cache = PrefixCache()
    with build(cache) as pipe:
        with pytest.raises(PrefixFileError, match="damaged|is no prefix file|holds KV of another"):
            cache.load(saved)
        assert pipe.block_pool.num_keys == 0
        assert_at_rest(pipe)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_torn_file_is_refused(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    cache = PrefixCache()
    with build(cache), pytest.raises(PrefixFileError, match="damaged"):
        cache.load(saved)


def test_files_of_other_models_and_dtypes_and_other_things_are_refused(saved: Path, tmp_path: Path) -> None:
    others = [tiny_model(seed=7), tiny_model().to(torch.bfloat16), tiny_model("mistral")]
    for model in others:
        cache = PrefixCache()
        with llmopt.build(model, [cache]), pytest.raises(PrefixFileError, match="KV of another model"):
            cache.load(saved)
    cache = PrefixCache()
    with build(cache):
        with pytest.raises(FileNotFoundError, match="there is no prefix file"):
            cache.load(tmp_path / "nothing")
        (tmp_path / "text").write_text("no tensors at all")
        with pytest.raises(PrefixFileError, match="damaged"):
            cache.load(tmp_path / "text")
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, tmp_path / "other")
        with pytest.raises(PrefixFileError, match="is no prefix file"):
            cache.load(tmp_path / "other")
        with pytest.raises(KeyError, match="no prefix is called 'x'; names are: none"):
            cache.save(tmp_path / "x", "x")


def test_without_room_a_prefix_is_not_loaded_and_nothing_changes(saved: Path) -> None:
    cache = PrefixCache()
    with build(cache, num_blocks=12, max_model_len=40) as pipe:
        made = request(range(5, 25), max_new_tokens=10)
        pipe.add(made)
        pipe.advance()
        used = pipe.block_pool.num_used
        with pytest.raises(LlmoptError, match="needs 10 free KV blocks"):
            cache.load(saved)
        assert pipe.block_pool.num_used == used
        assert_index_is_true(pipe)
        pipe.abort(made)


def test_a_prefix_without_a_full_block_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    cache = PrefixCache()
    with llmopt.build(tiny_model(), [cache], block_size=4) as pipe:
        assert cache.add("short", [5, 6, 7]) == 0
        with pytest.raises(LlmoptError, match="'short' has 3 tokens, and only full blocks, of 4"):
            cache.save(tmp_path / "short", "short")
        cache.add("long", list(range(10, 18)))
        cache.save(tmp_path / "long", "long")
        assert pipe.block_pool.num_used == 0
    with llmopt.build(tiny_model(), [cache], block_size=16):
        with pytest.raises(LlmoptError, match="has 8 tokens, and only full blocks, of 16 here"):
            cache.load(tmp_path / "long")
        assert cache.names == []


def test_without_a_pipeline_the_methods_say_so() -> None:
    with pytest.raises(LlmoptError, match="belongs to no pipeline"):
        PrefixCache().load("x")
    cache = PrefixCache()
    build(cache).close()
    with pytest.raises(PipelineClosedError):
        cache.clear()
