from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmopt import hub
from llmopt.errors import ModelError


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]])).logits


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain", model


def test_a_folder_loads_with_the_weights_it_holds(saved: tuple[Path, LlamaForCausalLM]) -> None:
    folder, original = saved
    model, tokenizer = hub.load(folder)
    assert torch.equal(logits_of(model), logits_of(original))
    assert not model.training
    assert tokenizer is None


def test_the_dtype_of_the_checkpoint_is_kept_and_a_named_dtype_wins(tmp_path: Path) -> None:
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path)
    assert hub.load(tmp_path)[0].dtype == torch.bfloat16
    assert hub.load(tmp_path, dtype="float32")[0].dtype == torch.float32
    assert hub.load(tmp_path, dtype=torch.float16)[0].dtype == torch.float16


def test_an_unknown_dtype_is_refused_with_the_choices(saved: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelError, match="'float31'.*\n.*bfloat16"):
        hub.load(saved[0], dtype="float31")


def test_one_weight_file_with_an_odd_name_loads(saved: tuple[Path, LlamaForCausalLM]) -> None:
    folder, original = saved
    (folder / "model.safetensors").rename(folder / "weights-final.safetensors")
    model, _ = hub.load(folder)
    assert torch.equal(logits_of(model), logits_of(original))
    assert model.name_or_path == str(folder)


@pytest.mark.parametrize("index_name", ["model.safetensors.index.json", "checkpoint.safetensors.index.json", None])
def test_shards_with_odd_names_load(tmp_path: Path, index_name: str | None) -> None:
    original = tiny_llama()
    original.save_pretrained(tmp_path, max_shard_size="6KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index_file.unlink()
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    renamed = {name: f"part_{count}_of_all.safetensors" for count, name in enumerate(names)}
    for old, new in renamed.items():
        (tmp_path / old).rename(tmp_path / new)
    if index_name:
        index["weight_map"] = {key: renamed[name] for key, name in index["weight_map"].items()}
        (tmp_path / index_name).write_text(json.dumps(index))
    assert torch.equal(logits_of(hub.load(tmp_path)[0]), logits_of(original))


def test_device_map_and_max_memory_are_understood(saved: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    folder, original = saved
    model, _ = hub.load(folder, device_map="auto", max_memory={"cpu": "1GiB"}, offload_folder=tmp_path / "offload")
    assert torch.equal(logits_of(model), logits_of(original))


def test_the_tokenizer_pads_on_the_left(saved: tuple[Path, LlamaForCausalLM]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder, _ = saved
    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>").save_pretrained(folder)
    _, tokenizer = hub.load(folder)
    assert tokenizer is not None
    assert tokenizer.padding_side == "left"
    assert hub.load_tokenizer(folder) is not None


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "a/b/c"])
def test_a_missing_path_is_reported_without_asking_a_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        hub.resolve(name)


def test_a_hub_id_is_handed_on_unchanged() -> None:
    assert hub.resolve("some-org/some.model-1B") == "some-org/some.model-1B"


def test_an_unreachable_hub_is_reported_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'no-such-org/no-such-model'.*\n.*demo"):
        hub.load("no-such-org/no-such-model")


def test_a_folder_without_a_model_is_reported_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(ModelError, match=r"neither config.json nor a .gguf file. It holds: notes.txt"):
        hub.resolve(tmp_path)


def test_a_folder_without_weights_is_reported(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        hub.load(tmp_path)


def test_a_config_that_is_not_json_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(ModelError, match="not valid JSON"):
        hub.load(tmp_path)


def test_an_architecture_that_transformers_does_not_know_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    with pytest.raises(ModelError, match="does not know"):
        hub.load(tmp_path)


def test_a_model_that_cannot_generate_is_refused(tmp_path: Path) -> None:
    class NotATextModel:
        model_type = "vit"
        architectures = ("ViTModel",)

    with pytest.raises(ModelError, match="does not generate text"):
        hub._auto_class(NotATextModel())
    assert BertConfig().model_type == "bert"  # bert has a causal head and is therefore not refused
    assert hub._auto_class(BertConfig()).__name__ == "AutoModelForCausalLM"


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        ("llama", "LlamaForCausalLM", "AutoModelForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("gemma3_text", "Gemma3ForCausalLM", "AutoModelForCausalLM"),
        ("llava", "LlavaForConditionalGeneration", "AutoModelForImageTextToText"),
        ("t5", "T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ],
)
def test_the_config_chooses_the_auto_class(kind: str, architecture: str, expected: str) -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(model_type=kind, architectures=[architecture])
    assert hub._auto_class(config).__name__ == expected


def test_damaged_weights_are_reported(saved: tuple[Path, LlamaForCausalLM]) -> None:
    weights = saved[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelError, match="damaged|could not be loaded"):
        hub.load(saved[0])


def test_several_gguf_files_are_a_question_for_the_user(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"a.gguf, b.gguf"):
        hub.resolve(tmp_path)
    assert hub.resolve(tmp_path / "a.gguf") == str(tmp_path / "a.gguf")


def test_a_folder_with_only_a_gguf_resolves_to_it(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").touch()
    assert hub.resolve(tmp_path) == str(tmp_path / "only.gguf")


@pytest.mark.model
def test_the_demo_model_speaks(demo_fp32: tuple[Any, Any]) -> None:
    model, tokenizer = demo_fp32
    message = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
