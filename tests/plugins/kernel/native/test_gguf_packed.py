"""GGUF files run packed: the dequantized model's logits but for 8-bit inputs, and no dense weight in memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

import llmopt
from llmopt.demo_models import cache_folder, demo_gguf
from llmopt.errors import ModelError
from llmopt.hub import load
from llmopt.testing import tiny_model, tiny_prompts
from llmopt_plugins import Native
from llmopt_plugins.kernel.native import gguf_model
from tests.plugins.kernel.native.gguf_files import write_gguf
from tests.plugins.kernel.native.logits import mean_kl, model_logits, pipeline_logits, relative_error

pytestmark = pytest.mark.native

QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
FLOAT32 = {"dtype": "float32"}
TEXT = (
    "A pipeline is a list of stages. Each stage takes what the one before it made and hands on something new. Most of "
    "them are short, and nobody has to know all of them in order to change one. The capital of France is Paris."
)


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(**WIDE), Type.Q4_1)
    return file


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct: matrices in Q4_1, embeddings in Q8_0."""
    try:
        return demo_gguf("demo")
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_logits_are_those_of_the_dequantized_model_but_for_8_bit_inputs(kind: Type, chunk: int, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(**WIDE), kind)
    model, _ = load(file, **FLOAT32)
    ids = tiny_prompts(1, min_length=40, max_length=40)[0]
    exact, rounded = model_logits(model, ids), model_logits(model, ids, int8_inputs=True)
    with llmopt.build(file, [Native()], load_options=FLOAT32) as pipe:
        found = pipeline_logits(pipe, ids, chunk)
    assert 0 < relative_error(exact, found) < 1.5 * relative_error(exact, rounded) + 1e-3 < 0.1


@pytest.mark.parametrize("kind", [Type.F32, Type.F16], ids=lambda kind: kind.name)
def test_files_without_quantized_tensors_give_the_tokens_of_the_model(kind: Type, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(**WIDE), kind)
    prompts = tiny_prompts(3)
    model, _ = load(file, **FLOAT32)
    with llmopt.build(model) as plain, llmopt.build(file, [Native()], load_options=FLOAT32) as pipe:
        options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "progress": False}
        wanted, found = plain.batch(prompts, **options), pipe.batch(prompts, **options)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]


def test_a_folder_with_nothing_but_a_file_runs_packed_too(tiny_file: Path) -> None:
    with llmopt.build(tiny_file.parent, [Native()]) as pipe:
        assert "int4_group (groups of 32, with minimum)" in str(pipe.describe())
        assert str(pipe.model.dtype) == "torch.bfloat16"
        assert pipe.tokenizer is not None


def test_the_models_own_forward_fills_its_weights_once_with_a_warning_and_the_decoder_goes_on(
    tiny_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, _ = load(tiny_file)
    ids = torch.tensor([tiny_prompts(1, min_length=9, max_length=9)[0]])
    with llmopt.build(tiny_file, [Native()]) as pipe:
        before = pipe.generate(ids, max_new_tokens=8)
        owners = [module for module in pipe.model.modules() if list(module.parameters(recurse=False))]
        assert all(module._forward_pre_hooks for module in owners)  # nothing was filled in yet
        with caplog.at_level(logging.WARNING, "llmopt"), torch.no_grad():
            for _ in range(2):
                assert torch.equal(pipe.model(ids).logits, wanted(ids).logits)
        assert not any(module._forward_pre_hooks for module in owners)
        warnings = [r.getMessage() for r in caplog.records if "become dense" in r.getMessage()]
        assert len(warnings) == 1
        assert "tiny.gguf" in warnings[0]
        assert "MiB" in warnings[0]
        assert torch.equal(pipe.generate(ids, max_new_tokens=8), before)
        stats = pipe.stats()
    assert stats["execute.native"]["num_fallback_rows"] == 0


def test_a_part_of_the_model_can_be_called_and_saving_writes_real_weights(tiny_file: Path, tmp_path: Path) -> None:
    wanted, _ = load(tiny_file)
    ids = torch.tensor([[5, 6, 7]])
    with llmopt.build(tiny_file, [Native()]) as pipe, torch.no_grad():
        inner = pipe.model.model(ids).last_hidden_state
        assert torch.equal(inner, wanted.model(ids).last_hidden_state)
        pipe.model.save_pretrained(tmp_path / "dense")
    again, _ = load(tmp_path / "dense")
    for name, parameter in wanted.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    file = tmp_path / "tied.gguf"
    write_gguf(file, tiny_model(tie_word_embeddings=True, **WIDE), Type.Q8_0, changed={"output.weight": None})
    with llmopt.build(file, [Native()]) as pipe:
        assert pipe.model.lm_head.weight is pipe.model.model.embed_tokens.weight
        assert pipe.execute.packed.matrices.keys() >= {"head"}
        assert "embedding" not in pipe.execute.packed.matrices


def test_a_torn_file_is_a_model_error_that_says_so(tiny_file: Path) -> None:
    data = tiny_file.read_bytes()
    tiny_file.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ModelError, match=r"tiny\.gguf is cut off: tensor .* ends at byte"):
        llmopt.build(tiny_file, [Native()])


def test_auto_leaves_native_out_for_a_file_that_it_does_not_read(tmp_path: Path) -> None:
    file = tmp_path / "five.gguf"
    write_gguf(file, tiny_model(**WIDE), Type.Q5_0)
    with pytest.raises(ModelError, match="Q5_0"):
        llmopt.build(file, [Native()])
    with llmopt.build(file, "auto") as pipe:
        assert "Q5_0" in pipe.describe().left_out["native"]
        assert pipe.batch([[5, 6, 7]], max_new_tokens=3, progress=False)[0].token_ids


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"max_memory": {"cpu": "1GiB"}}, {"revision": "main"}])
def test_options_without_meaning_for_a_packed_file_are_refused(tiny_file: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"has no use for .*{next(iter(options))}"):
        llmopt.build(tiny_file, [Native()], load_options=options)


def test_without_native_a_file_loads_as_before(tiny_file: Path) -> None:
    wanted, _ = load(tiny_file)
    with llmopt.build(tiny_file) as pipe:
        for name, parameter in wanted.named_parameters():
            assert torch.equal(pipe.model.get_parameter(name), parameter), name


def test_a_saved_packed_form_of_a_file_is_used_and_stale_after_a_change(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "cache"))
    with llmopt.build(tiny_file, [Native(save=True)]) as pipe:
        wanted = pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8)
    with llmopt.build(tiny_file, [Native()]) as pipe:
        assert any("were read from" in note for note in pipe.describe().notes)
        assert torch.equal(pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8), wanted)
    write_gguf(tiny_file, tiny_model(seed=3, **WIDE), Type.Q4_1)
    with llmopt.build(tiny_file, [Native()]) as pipe:
        assert any("is stale: tiny.gguf was changed" in note for note in pipe.describe().notes)


def test_config_and_tokenizer_are_kept_with_a_saved_form_and_not_read_again(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "cache"))
    with llmopt.build(tiny_file, [Native()]) as pipe:
        plain, config = pipe.tokenizer, pipe.model.config.to_dict()
    assert plain is not None
    assert not (tmp_path / "cache").exists()  # only when it was asked for
    llmopt.build(tiny_file, [Native(save=True)]).close()
    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "read_gguf_config", lambda path: pytest.fail("the config was read again"))
        with llmopt.build(tiny_file, [Native()]) as pipe:
            assert pipe.tokenizer is not None
            assert pipe.tokenizer("!!! abc")["input_ids"] == plain("!!! abc")["input_ids"]
            assert pipe.tokenizer.padding_side == "left"
            assert pipe.model.config.to_dict() == config
            assert any("were read from" in note for note in pipe.describe().notes)
    write_gguf(tiny_file, tiny_model(**WIDE, rms_norm_eps=0.5), Type.Q4_1)
    with llmopt.build(tiny_file, [Native()]) as pipe:
        assert pipe.model.config.rms_norm_eps == 0.5  # another file


# -- real files -------------------------------------------------------------------------------------------------------
def check_real(file: Path, count: int, max_kl: float) -> None:
    """A bound on the loss, and that rounding the inputs explains it."""
    model, tokenizer = load(file, **FLOAT32)
    assert tokenizer is not None
    ids = tokenizer(TEXT).input_ids[:count]
    exact, rounded = model_logits(model, ids), model_logits(model, ids, int8_inputs=True)
    del model
    with llmopt.build(file, [Native()], load_options=FLOAT32, max_model_len=256) as pipe:
        found = pipeline_logits(pipe, ids, chunk=1)
    kl, kl_of_rounding = mean_kl(exact, found), mean_kl(exact, rounded)
    print(f"{file.name}: mean KL {kl:.5f}, of 8-bit inputs alone {kl_of_rounding:.5f}")
    assert kl < max_kl
    assert kl < 2.0 * kl_of_rounding
    assert relative_error(exact, found) < 0.05


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_gives_the_dequantized_models_logits_within_the_bound(smollm2_file: Path) -> None:
    check_real(smollm2_file, count=64, max_kl=0.01)


@pytest.mark.model
@pytest.mark.slow
def test_qwen_in_q4_k_and_q6_k_gives_the_dequantized_models_logits_within_the_bound() -> None:
    file = cache_folder() / "models" / "qwen2.5-coder-1.5b-instruct.gguf"
    if not file.is_file():
        pytest.skip('not there; llmopt.hub.resolve("demo:1.5b.gguf") fetches it (1.1 GB)')
    check_real(file, count=24, max_kl=0.03)  # inputs of Qwen have outliers, the first token's above all


MEASURE = """
import gc, json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import llmopt, llmopt.builder, llmopt.hub
from llmopt_plugins import Native
from llmopt_plugins.kernel.native import gguf_model
def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("VmRSS", "RssAnon")))
    return {name: int(value.split()[0]) / 1024 for name, value in fields.items()}
before = resident()
pipe = llmopt.build(sys.argv[1], [Native()], max_model_len=512)
pipe.batch(["The capital of France is"], max_new_tokens=8, progress=False)
after = resident()
print(json.dumps({"before": before, "after": after, "packed": pipe.execute.packed.memory.num_bytes / 2**20,
                  "dense": sum(p.numel() * p.element_size() for p in pipe.model.parameters()) / 2**20}))
"""


def measure(source: Path) -> dict[str, Any]:
    """MiB of a fresh process, before it builds and after its first tokens."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
@pytest.mark.parametrize("source", ["file", "folder"])
def test_only_the_packed_weights_are_resident(source: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("smollm2_file" if source == "file" else "demo_folder")
    found = measure(path)
    grown = found["after"]["VmRSS"] - found["before"]["VmRSS"]
    # the tokenizer takes 45 MiB, code and buffers that are used for the first time the rest
    assert found["packed"] < grown < found["packed"] + 150
    assert found["packed"] < found["after"]["RssAnon"] - found["before"]["RssAnon"] < found["packed"] + 100
    if source == "file":
        assert found["packed"] < 0.4 * found["dense"]
