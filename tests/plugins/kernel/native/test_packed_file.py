"""Saved packed forms: used when everything fits, refused with the reason when anything does not, never torn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import llmopt
from llmopt.errors import ModelError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins import Native, WeightQuant
from llmopt_plugins.kernel.native import packed_file, packed_store

pytestmark = pytest.mark.native
PROMPTS = tiny_prompts(3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a saved packed form."""
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "model"
    tiny_model().save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    with llmopt.build(made, [Native(save=True)]) as pipe:
        assert note(pipe).startswith("the packed weights were saved to ")
    return made


def saved(folder: Path) -> Path:
    (file,) = folder.glob("native-*.packed")
    return file


def note(pipe: InferencePipeline) -> str:
    return "; ".join(text for text in pipe.describe().notes if "packed" in text)


def tokens(pipe: InferencePipeline) -> list[list[int]]:
    return [o.token_ids for o in pipe.batch(PROMPTS, max_new_tokens=12, ignore_eos=True, progress=False)]


def test_a_saved_form_gives_the_same_tokens_and_the_build_runs_no_forward(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llmopt.build(tiny_model(), [Native()]) as pipe:
        wanted = tokens(pipe)
    read: list[int] = []
    original = torch.nn.Linear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        read.extend([1] * (not x.is_meta))
        return original(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    with llmopt.build(folder, [Native()]) as pipe:
        assert note(pipe).startswith(f"packed weights were read from {saved(folder)} in ")
        assert tokens(pipe) == wanted
    assert not read


def test_the_file_is_in_safetensors_format_with_tensors_at_multiples_of_64_bytes(folder: Path) -> None:
    with safe_open(saved(folder), framework="np") as file:
        names = list(file.keys())
        assert "matrix.layers.0.qkv" in names
        assert file.metadata()["format"] == "llmopt-packed"
        norm = file.get_tensor("vector.final_norm.weight")
    assert np.array_equal(norm[:64], tiny_model().model.norm.weight.detach().numpy())
    data = saved(folder).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(data[8 : 8 + length])
    assert all(entry["data_offsets"][0] % 64 == 0 for name, entry in header.items() if name != "__metadata__")


def test_options_that_differ_have_files_that_differ(folder: Path) -> None:
    with llmopt.build(folder, [Native(save=True), WeightQuant(bits=8)]) as pipe:
        assert "saved to" in note(pipe)
        wanted = tokens(pipe)
    assert len(list(folder.glob("native-*.packed"))) == 2
    with llmopt.build(folder, [Native(), WeightQuant(bits=8)]) as pipe:
        assert "int8" in note(pipe)
        assert "were read from" in note(pipe)
        assert tokens(pipe) == wanted
    with llmopt.build(folder, [Native()], load_options={"dtype": "bfloat16"}) as pipe:
        assert "read from" not in note(pipe)  # the float32 form is for another dtype


@pytest.mark.parametrize("kept", [0, 4, 8, 1000, 4096, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_not_used_and_the_reason_is_told(folder: Path, kept: float) -> None:
    with llmopt.build(folder, [Native()]) as pipe:
        wanted = tokens(pipe)
    data = saved(folder).read_bytes()
    saved(folder).write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with llmopt.build(folder, [Native()]) as pipe:
        assert f"the saved packed form {saved(folder)} is not used: it " in note(pipe)
        assert "cut off" in note(pipe)
        assert tokens(pipe) == wanted


def other_weights(folder: Path) -> None:
    tiny_model(seed=5).save_pretrained(folder)


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))


def other_metadata(key: str, value: str) -> Any:
    def change(folder: Path) -> None:
        data = saved(folder).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"][key] = value
        text = json.dumps(header, separators=(",", ":")).encode()
        saved(folder).write_bytes(data[:8] + text.ljust(length) + data[8 + length :])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_weights, "is stale: model.safetensors was changed after it was made"),
        (other_config, "is stale: the model's config is another one now"),
        (lambda folder: (folder / "more.safetensors").write_bytes(b"x"), "more.safetensors was not there"),
        (lambda folder: saved(folder).write_bytes(b"\x10" + bytes(7) + b"not json at all."), "cut off or changed"),
        (lambda folder: shutil.copy(folder / "model.safetensors", saved(folder)), "holds no packed form of llmopt"),
        (other_metadata("version", "7"), "has format version 7, this build reads 1"),
        (other_metadata("layout", "0123456789abcdef"), "whose kernels read another layout"),
        (other_metadata("options", "bfloat16"), "was packed as bfloat16, asked for is float32"),
        (other_metadata("matrices", "{}"), "holds other matrices"),
        (other_metadata("matrices", "[1"), "has damaged metadata"),
    ],
)
def test_a_file_for_something_else_is_refused_with_the_reason(folder: Path, change: Any, reason: str) -> None:
    change(folder)
    if (folder / "more.safetensors").exists():  # transformers reads the index of two shards; here only the names count
        identity = packed_file.identity_of(folder, tiny_model().config, "float32")
        with pytest.raises(packed_file.PackedFileError, match=reason):
            packed_file.load(saved(folder), identity, {}, {})
        return
    with llmopt.build(folder, [Native()]) as pipe:
        assert reason in note(pipe)
        model = pipe.model
        with llmopt.build(model) as plain:
            assert tokens(pipe) == tokens(plain)  # packed from what the folder holds now
    with pytest.raises(ModelError, match=rf"{saved(folder)} cannot be used for {folder}: it "):
        llmopt.build(folder, [Native(save=str(saved(folder)))])


def test_asking_to_save_replaces_a_stale_file(folder: Path) -> None:
    other_weights(folder)
    with llmopt.build(folder, [Native(save=True)]) as pipe:
        assert "is not used" in note(pipe)
        assert "were saved to" in note(pipe)
        wanted = tokens(pipe)
    with llmopt.build(folder, [Native()]) as pipe:
        assert "were read from" in note(pipe)
        assert tokens(pipe) == wanted


def test_a_path_of_ones_own_is_written_and_then_read(folder: Path, tmp_path: Path) -> None:
    saved(folder).unlink()
    path = tmp_path / "elsewhere" / "my.packed"
    for wanted in ("saved to", "read from"):
        with llmopt.build(folder, [Native(save=str(path))]) as pipe:
            assert f"{wanted} {path}" in note(pipe)
    assert not list(folder.glob("native-*.packed"))


def test_without_a_place_beside_the_model_the_cache_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder).unlink()
    original = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and original(path, mode))
    for wanted in ("saved to", "read from"):
        with llmopt.build(folder, [Native(save=True)]) as pipe:
            assert f"{wanted} {tmp_path / 'cache' / 'packed'}" in note(pipe)


def test_a_full_disk_is_told_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(folder).unlink()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with llmopt.build(folder, [Native(save=True)]) as pipe:
        assert "could not be saved" in note(pipe)
        assert "No space left" in note(pipe)
        assert tokens(pipe)
    assert not [file for file in folder.iterdir() if ".packed" in file.name]


def test_a_process_that_is_killed_while_it_writes_leaves_no_file_under_the_name(folder: Path) -> None:
    saved(folder).unlink()
    code = (
        "import os, sys; import llmopt; from llmopt_plugins import Native\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), 9)\n"
        "llmopt.build(sys.argv[1], [Native(save=True)])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert not list(folder.glob("native-*.packed"))


def test_a_model_that_was_changed_after_loading_is_packed_again_from_its_weights(folder: Path) -> None:
    with llmopt.build(folder, [Native()]) as pipe:
        before = tokens(pipe)
        with torch.no_grad():
            pipe.model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
        with llmopt.build(pipe.model) as plain:
            wanted = tokens(plain)
        assert wanted != before
        assert tokens(pipe) == wanted


def test_options_name_everything_that_decides_about_the_form() -> None:
    from llmopt.config import KernelConfig

    plain = packed_store.options_of(torch.bfloat16, KernelConfig(), is_gguf=False)
    assert plain == "bfloat16"
    kinds = [
        KernelConfig(weight_bits=8),
        KernelConfig(weight_bits=8, weight_group_size=32),
        KernelConfig(weight_bits=8, weight_group_size=64),
        KernelConfig(weight_bits=4, head_bits=8),
        KernelConfig(weight_bits=4, head_bits=4),
        KernelConfig(weight_bits=4, head_bits=8, weight_group_size=64),
        KernelConfig(weight_bits=4, head_bits=8, weight_minimum=True),
        KernelConfig(weight_bits=4, head_bits=8, weight_minimum=False),
    ]
    names = {packed_store.options_of(torch.bfloat16, kind, is_gguf=gguf) for kind in kinds for gguf in (True, False)}
    assert len(names) == 16


@pytest.mark.parametrize("metadata", [[1], "text", 5])
def test_a_file_whose_metadata_is_no_table_is_not_used(folder: Path, metadata: Any) -> None:
    file = saved(folder)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = metadata
    file.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    with llmopt.build(folder, ["native"]) as pipe:
        assert "no readable header" in note(pipe)


def test_asking_to_save_a_model_given_as_an_object_is_told_to_have_no_effect(tmp_path: Path) -> None:
    for save in (True, str(tmp_path / "own.packed")):
        with llmopt.build(tiny_model(), [Native(save=save)]) as pipe:
            assert note(pipe).startswith("the packed weights were not saved")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="save is True, False or a path"):
        Native(save="")
