"""Checkpoints as people save them: the index says where weights are, and names of files say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import llmopt
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def saved(folder: Path, form: str) -> Path:
    """A tiny model in one file without an index, or in two files with unusual names and an index."""
    tiny_model().save_pretrained(folder)
    if form == "single":
        assert not (folder / INDEX).exists()
        return folder
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(weights)
    places = {name: f"{SINGLE}-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: weights[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("plugins", [[], pytest.param(["native"], marks=pytest.mark.native)], ids=["plain", "native"])
@pytest.mark.parametrize("form", ["single", "shards"])
def test_a_checkpoint_is_loaded_whatever_its_files_are_called(form: str, plugins: list[str], tmp_path: Path) -> None:
    folder = saved(tmp_path, form)
    with llmopt.build(str(folder), plugins, load_options={"dtype": "float32"}, max_model_len=96) as pipe:
        assert pipe.why_not is None
        assert_same_tokens(pipe, tiny_model(), tiny_prompts(3), max_new_tokens=12)
