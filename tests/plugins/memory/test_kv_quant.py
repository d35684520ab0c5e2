"""kv_quant: twice the tokens in the same bytes, a small loss, and every plugin that moves blocks moves them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmopt
from llmopt.bench.quality import Quality, pipeline_logits, plain_logits, text_ids, windows
from llmopt.errors import ConfigError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model
from llmopt_plugins.memory.kv_offload import KvOffload
from llmopt_plugins.memory.paged_kv import PagedKv
from llmopt_plugins.memory.prefix_cache import PrefixCache, PrefixFileError
from llmopt_plugins.scheduling.pd_separation import PdSeparation
from tests.equivalence.packed_configs import tiny_packed_model
from tests.llmopt.helpers import assert_idle, build_tiny
from tests.plugins.memory.test_kv_offload import flood, store_of

BLOCK = 4
PREFIX = list(range(100, 140))  # ten blocks
PROMPTS = [PREFIX, list(range(7, 30)), [5, 6], list(range(60, 125))]
BYTES_PER_TOKEN = 2 * 2 * 2 * (16 + 2)  # of the tiny Llama: layers, key and value, heads, a row
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "progress": False}


def tokens(pipe: InferencePipeline, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    outputs = pipe.batch(prompts, **{**OPTIONS, **options})
    assert not any(o.error for o in outputs)
    return [o.token_ids for o in outputs]


def build(*plugins: Any, num_blocks: int = 120, **options: Any) -> InferencePipeline:
    options = {"block_size": BLOCK, "max_model_len": 100, **options}
    return build_tiny(plugins=["kv_quant", *plugins], pool_bytes=num_blocks * BLOCK * BYTES_PER_TOKEN, **options)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with build() as pipe:
        return tokens(pipe)


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.93), (torch.float32, 3.87)])
def test_the_same_bytes_hold_twice_the_tokens_of_bfloat16(dtype: torch.dtype, least: float) -> None:
    model = tiny_model(head_dim=64).to(dtype)
    counts = []
    for plugins in ([], ["kv_quant"]):
        with llmopt.build(model, plugins, pool_bytes=1 << 20, block_size=4, max_model_len=64) as pipe:
            counts.append(pipe.block_pool.num_blocks)
            held = sum(t.nbytes for layer in pipe.kv_cache.layers.values() for t in (layer.key, layer.value))
            assert pipe.describe().pool_bytes == held <= 1 << 20
    assert counts[1] / counts[0] >= least


def test_the_pipeline_says_that_keys_and_values_are_in_8_bits() -> None:
    with build() as pipe:
        assert pipe.describe().attention.endswith("keys and values in 8 bits")
    with build_tiny() as pipe:
        assert "8 bits" not in pipe.describe().attention


def test_models_whose_attention_changes_keys_after_the_cache_keep_them_and_say_so() -> None:
    with llmopt.build(tiny_packed_model("deepseek_v3"), ["kv_quant"]) as pipe:
        assert any("keep their dtype: its attention changes them" in note for note in pipe.describe().notes)
        assert not any(shape.is_quantized for shape in pipe.kv_cache.shapes.values())


@pytest.mark.parametrize("bits", [4, 16])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="kv_bits 8 or None"):
        build_tiny(kv_bits=bits)


# -- the loss ---------------------------------------------------------------------------------------------------------
def _error(model: Any, plugins: list[str]) -> float:
    ids = [(7 * i * i + 3 * i) % 90 + 4 for i in range(60)]
    with llmopt.build(model, plugins, block_size=16) as pipe:
        found = pipeline_logits(pipe, ids, chunk=25)
        assert any(shape.is_quantized for shape in pipe.kv_cache.shapes.values())
    expected = plain_logits(model, ids)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "qwen3", "gpt_oss", "lfm2"])
def test_logits_stay_close_to_the_model(model_type: str) -> None:
    model = tiny_model("lfm2") if model_type == "lfm2" else tiny_packed_model(model_type)
    assert 0 < _error(model, ["kv_quant"]) < 0.03


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "gpt2"])
def test_the_native_decoder_loses_as_little(model_type: str, dtype: torch.dtype) -> None:
    model = tiny_packed_model(model_type).to(dtype)
    assert 0 < _error(model, ["native", "kv_quant"]) < (0.03 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("native_mode", ["off", pytest.param("require", marks=pytest.mark.native)])
def test_reference_and_native_attention_read_the_same_blocks(native_mode: str, monkeypatch: Any, wanted: Any) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", native_mode)
    with build() as pipe:
        assert tokens(pipe) == wanted


# -- the same tokens, however they are computed -----------------------------------------------------------------------
@pytest.mark.parametrize("max_tokens_per_step", [5, 16, 33])
def test_prompts_in_chunks_give_the_tokens_of_whole_ones(max_tokens_per_step: int, wanted: Any) -> None:
    with build(max_tokens_per_step=max_tokens_per_step) as pipe:
        assert tokens(pipe) == wanted
        assert_idle(pipe)


def test_preempted_and_swapped_requests_give_the_same_tokens() -> None:
    prompts = [list(range(first, first + 8)) for first in range(50, 450, 50)]  # each grows from 2 to 8 blocks
    with build() as pipe:
        wanted = tokens(pipe, prompts, max_new_tokens=24)
    with build(PagedKv(watermark=0, swap_bytes=1 << 20), num_blocks=26) as pipe:
        cost_model = pipe.cost_model
        cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 1e9  # type: ignore[method-assign]
        assert tokens(pipe, prompts, max_new_tokens=24) == wanted
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0
        assert pipe.stats()["allocate.paged_kv"]["num_swapped_in"] > 0
        assert_idle(pipe)


def test_found_prefixes_and_copied_parts_of_blocks_give_the_same_tokens(wanted: Any) -> None:
    with build("prefix_cache") as pipe:
        assert tokens(pipe) == wanted
        outputs = pipe.batch(PROMPTS, **OPTIONS)
        assert [o.token_ids for o in outputs] == wanted
        assert outputs[0].num_cached_tokens >= 36
        (part,) = pipe.batch([[*PREFIX[:38], 9]], **OPTIONS)  # the tenth block in part
        assert part.num_cached_tokens >= 37
    with build() as pipe:
        assert tokens(pipe, [[*PREFIX[:38], 9]]) == [part.token_ids]


def test_saved_prefixes_come_back_and_are_refused_in_full_precision(tmp_path: Path, wanted: Any) -> None:
    file = tmp_path / "greeting.safetensors"
    cache = PrefixCache()
    with build(cache):
        cache.add("greeting", PREFIX)
        cache.save(file, "greeting")
    cache = PrefixCache()
    with build(cache) as pipe:
        assert cache.load(file) == "greeting"
        (made,) = pipe.batch([PREFIX], **OPTIONS)
        assert made.token_ids == wanted[0]
        assert made.num_cached_tokens >= 36
    cache = PrefixCache()
    with build_tiny(plugins=[cache], block_size=BLOCK, max_model_len=100), pytest.raises(PrefixFileError):
        cache.load(file)


@pytest.mark.parametrize("with_file", [False, True])
def test_blocks_come_back_whole_from_host_memory_and_from_a_file(with_file: bool, tmp_path: Path, wanted: Any) -> None:
    folder = str(tmp_path) if with_file else None
    host = (8 if with_file else 200) * BLOCK * BYTES_PER_TOKEN
    with build("prefix_cache", "paged_kv", KvOffload(host_bytes=host, folder=folder), num_blocks=30) as pipe:
        store = store_of(pipe)
        store.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 1e9  # type: ignore[method-assign]
        assert tokens(pipe) == wanted
        flood(pipe)
        (made,) = pipe.batch([PREFIX], **OPTIONS)
        assert made.token_ids == wanted[0]
        assert pipe.stats()["lookup.kv_offload"]["num_file_restored" if with_file else "num_memory_restored"] > 0


def test_continuations_share_blocks_and_copy_the_last_one() -> None:
    ids = torch.tensor([PREFIX[:38]])
    with build() as pipe:
        made = pipe.generate(ids, do_sample=False, num_return_sequences=1, max_new_tokens=8)
        torch.manual_seed(0)
        several = pipe.generate(
            ids, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=8, return_dict_in_generate=True
        )
        assert all(torch.equal(row, made[0]) for row in several.sequences)
        keys = several.past_key_values.layers[0].keys
        assert keys.dtype == torch.float32
        assert keys.shape[-1] == 16
        assert keys.isfinite().all()


@pytest.mark.slow
def test_a_prefill_process_writes_to_the_same_blocks(tmp_path: Path, wanted: Any) -> None:
    tiny_model().save_pretrained(tmp_path)
    plugins = ["kv_quant", "paged_kv", PdSeparation(mode="process", min_tokens=20)]
    options = {"block_size": BLOCK, "max_model_len": 100, "pool_bytes": 120 * BLOCK * BYTES_PER_TOKEN}
    with llmopt.build(str(tmp_path), plugins, **options) as pipe:
        assert tokens(pipe) == wanted
        assert pipe.stats()["lookup.pd_separation"]["num_handed_over"] > 0


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_stays_within_a_thousandth_of_a_nat(demo_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    ids = text_ids(AutoTokenizer.from_pretrained(demo_folder), 1024)
    quality = Quality()
    with llmopt.build(model, ["native", "kv_quant"], pool_bytes=1 << 27, max_model_len=1024) as pipe:
        for piece in windows(ids):
            quality.add(plain_logits(model, piece), pipeline_logits(pipe, piece), piece)
    assert 0 < quality.mean_kl < 0.001
    assert abs(quality.perplexity_shift) < 0.01
