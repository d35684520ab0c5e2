"""Rotary frequencies that a GGUF file scales are those of the model that it was made from, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import llmopt
from llmopt.errors import ModelError
from llmopt.testing import tiny_model, tiny_prompts
from tests.plugins.kernel.native.gguf_files import write_gguf
from tests.plugins.kernel.native.logits import model_logits, pipeline_logits, relative_error

pytestmark = pytest.mark.native

# with this base the slower half of the frequencies of so small a head is scaled, one of them in part
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
HEAD = 16  # of a tiny model


def factors_of(parameters: dict[str, Any]) -> np.ndarray:
    """As llama.cpp's converter computes them from the parameters of Llama 3."""
    theta, factor, old = parameters["rope_theta"], parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    found = []
    for i in range(0, HEAD, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD)
        share = (old / wavelength - low) / (high - low)
        found.append(1 / ((1 - share) / factor + share) if 0 <= share <= 1 else 1.0 if share > 1 else factor)
    return np.array(found, dtype=np.float32)


def logits(file: Path, ids: list[int]) -> torch.Tensor:
    with llmopt.build(file, ["native"], load_options={"dtype": "float32"}) as pipe:
        return pipeline_logits(pipe, ids, 40)


@pytest.mark.parametrize("way", ["llama3", "linear"])
def test_a_scaling_that_the_file_tells_is_the_models(way: str, tmp_path: Path) -> None:
    parameters = LLAMA3 if way == "llama3" else LINEAR
    model, file = tiny_model(rope_parameters=parameters, initializer_range=0.2).eval(), tmp_path / "scaled.gguf"
    if way == "llama3":
        write_gguf(file, model, Type.F32, changed={"rope_freqs.weight": factors_of(LLAMA3)})
    else:
        write_gguf(
            file, model, Type.F32, metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        )
    ids = tiny_prompts(1, min_length=40, max_length=40)[0]
    wanted = model_logits(model, ids)
    assert relative_error(wanted, logits(file, ids)) < 1e-4
    plain = tmp_path / "plain.gguf"
    write_gguf(plain, model, Type.F32)
    assert relative_error(wanted, logits(plain, ids)) > 1e-3  # the scaling can be seen
    with llmopt.build(file, ["native"], load_options={"dtype": "float32"}) as pipe, torch.no_grad():
        assert pipe.model.config.rope_parameters["rope_type"] == way  # so a saved copy has it as well
        found = pipe.model(torch.tensor([ids])).logits[0]
        assert relative_error(wanted, found) < 1e-4


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ones.gguf"
    ones = {"rope_freqs.weight": np.ones(HEAD // 2), "rope_factors_short.weight": np.ones(HEAD // 2)}
    write_gguf(file, tiny_model(), Type.F32, changed=ones)
    ids = tiny_prompts(1, min_length=20, max_length=20)[0]
    assert relative_error(model_logits(tiny_model().eval(), ids), logits(file, ids)) < 1e-4


@pytest.mark.parametrize(
    ("changed", "metadata", "told"),
    [
        ({"rope_freqs.weight": np.linspace(1, 3, HEAD // 2)}, {}, "rope_freqs.weight, whose values are not those of"),
        ({"rope_freqs.weight": np.full(HEAD, 8.0)}, {}, "rope_freqs.weight, whose values are not those of"),
        ({"rope_factors_long.weight": np.full(HEAD // 2, 2.0)}, {}, "by rope_factors_long.weight"),
        ({}, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "by 'yarn'"),
    ],
)
def test_a_scaling_that_cannot_be_read_is_refused(
    changed: dict[str, Any], metadata: dict[str, Any], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "scaled.gguf"
    write_gguf(file, tiny_model(), Type.F32, changed=changed, metadata=metadata)
    with pytest.raises(ModelError, match=f"scaled.gguf scales rotary embeddings {'' if 'by' in told else 'by '}{told}"):
        llmopt.build(file, ["native"])
