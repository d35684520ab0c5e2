"""What memory management may not change: pre-empted, shared and recycled blocks give the tokens of a request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmopt import build
from llmopt.kv_cache import KVCache
from llmopt.pipeline import InferencePipeline
from tests.equivalence.media_models import media_model
from tests.equivalence.packed_configs import tiny_packed_model
from tests.equivalence.test_packed_models import IDS, MASK, PROMPTS, assert_engine_ran, generate, sample

# full attention, windows, softcap and windows, sinks, compressed keys, shared keys, layers of different sizes
TYPES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gemma3n_text", "gemma4_text"]
BLOCK = 4
NUM_NEW = 24
# where every layer has a window, blocks behind it are given back while a request runs, so that it stops growing
ALL_SLIDING = ["mistral"]
GROWING = [name for name in TYPES if name not in ALL_SLIDING]


def small_pool(model: Any, num_blocks: int, plugins: Any = (), **options: Any) -> InferencePipeline:
    """A pipeline with blocks of 4 tokens, and so many of them."""
    with build(model) as pipe:
        per_token = KVCache.bytes_per_token(pipe.capabilities.layer_shapes)
    options = {"max_model_len": num_blocks * BLOCK, **options}
    return build(model, plugins, block_size=BLOCK, pool_bytes=num_blocks * BLOCK * per_token, **options)


def alone(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """Greedy tokens of one prompt from transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def assert_idle(pipe: InferencePipeline) -> None:
    pipe.block_pool.check()
    assert pipe.block_pool.num_used == 0


@pytest.mark.parametrize("model_type", TYPES)
def test_preempted_requests_give_the_tokens_of_requests_alone(model_type: str) -> None:
    model = tiny_packed_model(model_type)
    prompts = PROMPTS + [[p + 1 for p in prompt] for prompt in PROMPTS]
    wanted = [alone(model, prompt, NUM_NEW) for prompt in prompts]
    # eight requests grow to 64 blocks, or hold 3 each
    num_blocks = 10 if model_type in ALL_SLIDING else 20
    with small_pool(model, num_blocks, ["paged_kv"], max_tokens_per_step=7) as pipe:
        outputs = pipe.batch([list(p) for p in prompts], progress=False, max_new_tokens=NUM_NEW)
        assert [o.token_ids for o in outputs] == wanted
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert_idle(pipe)


@pytest.mark.parametrize("model_type", GROWING)
def test_generate_gives_the_same_tokens_when_rows_are_preempted(model_type: str) -> None:
    model = tiny_packed_model(model_type)
    with small_pool(model, 16, ["paged_kv"]) as pipe:
        assert torch.equal(generate(pipe, max_new_tokens=NUM_NEW), generate(model, max_new_tokens=NUM_NEW))
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert_engine_ran(pipe)
        assert_idle(pipe)


@pytest.mark.parametrize("plugins", [(), ("paged_kv",)], ids=["baseline", "paged_kv"])
@pytest.mark.parametrize("model_type", TYPES)
def test_continuations_of_one_prompt_share_its_blocks_and_give_the_tokens_of_generate(
    model_type: str, plugins: tuple[str, ...]
) -> None:
    model = tiny_packed_model(model_type)
    options = {"temperature": 1.1, "top_p": 0.9, "num_return_sequences": 3}
    with build(model, plugins, block_size=BLOCK, max_tokens_per_step=9) as pipe:
        for seed in (0, 1):
            assert torch.equal(sample(pipe, seed, options), sample(model, seed, options))
        assert_engine_ran(pipe)
        assert_idle(pipe)


def test_a_shared_prompt_is_computed_once() -> None:
    model = tiny_packed_model("llama")
    with build(model, block_size=BLOCK) as pipe:
        before = pipe.stats()["num_step_tokens"]
        pipe.generate(torch.tensor([PROMPTS[0]]), do_sample=True, num_return_sequences=4, max_new_tokens=1)
        # each continuation computes the last token of the prompt again, whose logits it needs
        assert pipe.stats()["num_step_tokens"] - before == len(PROMPTS[0]) + 3


def poison(pipe: InferencePipeline) -> None:
    """Fill the pool with NaN, and every block again when nobody holds it any more: NaN read once is NaN for ever."""
    pool = pipe.block_pool
    for layer in pipe.kv_cache.layers.values():
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    free = pool.free

    def free_and_fill(blocks: Any) -> None:
        blocks = list(blocks)
        free(blocks)
        gone = [block for block in blocks if pool.ref_counts[block] == 0]
        for layer in pipe.kv_cache.layers.values():
            layer.key[gone] = torch.nan
            layer.value[gone] = torch.nan

    pool.free = free_and_fill  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["off", pytest.param("require", marks=pytest.mark.native)])
@pytest.mark.parametrize("model_type", TYPES)
def test_blocks_that_are_free_or_not_yet_written_are_never_read(
    model_type: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", mode)
    model = tiny_packed_model(model_type)
    wanted = generate(model)
    for plugins in ((), ("paged_kv",)):
        with build(model, plugins, max_tokens_per_step=5, block_size=BLOCK, pool_bytes=1 << 21) as pipe:
            poison(pipe)
            for _ in range(2):  # the second time in blocks that were used and freed
                assert torch.equal(generate(pipe), wanted)
            options = {"temperature": 0.9, "num_return_sequences": 2}
            assert torch.equal(sample(pipe, 0, options), sample(model, 0, options))
            assert_engine_ran(pipe)


@pytest.mark.parametrize("model_type", GROWING)
def test_preemption_reads_no_freed_block(model_type: str) -> None:
    model = tiny_packed_model(model_type)
    with small_pool(model, 16, ["paged_kv"], max_tokens_per_step=6) as pipe:
        poison(pipe)
        assert torch.equal(generate(pipe, max_new_tokens=NUM_NEW), generate(model, max_new_tokens=NUM_NEW))
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert_engine_ran(pipe)


def test_the_poison_is_seen_when_it_is_read() -> None:
    model = tiny_packed_model("llama")
    with build(model, block_size=BLOCK, pool_bytes=1 << 20) as pipe:
        poison(pipe)
        attend = pipe.execute.step.attend  # type: ignore[attr-defined]
        plan = attend.plan

        def plan_too_long(batch: Any) -> None:
            batch.seq_lens += 1  # attention reads one token that nobody wrote
            plan(batch)

        attend.plan = plan_too_long
        with pytest.raises(Exception, match="nan"):
            pipe.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, do_sample=False)


def test_rows_of_a_call_do_not_read_each_other() -> None:
    model = tiny_packed_model("llama")
    rows = torch.cat([IDS, IDS.flip(0)])
    mask = torch.cat([MASK, MASK.flip(0)])
    with build(model, block_size=BLOCK, max_tokens_per_step=5) as pipe:
        together = pipe.generate(rows, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(together[: len(IDS)], together[len(IDS) :].flip(0))


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_a_picture_is_never_answered_with_the_keys_and_values_of_another(model_type: str) -> None:
    """The ids of all pictures are the same; only their pixels differ."""
    model, inputs = media_model(model_type)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) * 2}
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    wanted = {id(call): model.generate(**call, **settings) for call in (inputs, others)}
    assert not torch.equal(wanted[id(inputs)], wanted[id(others)]), "nobody looks"
    with build(model, ["paged_kv", "prefix_cache"], block_size=4) as pipe:
        for call in (inputs, others, inputs, others):
            assert torch.equal(pipe.generate(**call, **settings), wanted[id(call)])
        assert not pipe.generate.fall_backs
