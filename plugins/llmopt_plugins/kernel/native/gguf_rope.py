"""Rotary frequencies that a GGUF file changes, turned into the parameters that transformers knows them by.

llama.cpp writes the scaling of Llama 3 as a tensor of factors, by which frequencies are divided, and other scalings as
metadata. transformers reads neither, so a model made from its config alone would be another one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmopt.errors import ModelError

if TYPE_CHECKING:
    from llmopt_plugins.kernel.native.gguf_file import GgufFile

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that hold factors of frequencies and no weights."""

# What Llama 3.1, 3.2 and 3.3 have beside the largest factor; a file does not say.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_TOLERANCE = 1e-3  # relative, of a factor


def read_rope(file: GgufFile, config: Any) -> None:
    """Write the scaling of a file into a config that transformers made from it.

    :raises ModelError: a scaling that cannot be written there; says which.
    """
    architecture = file.metadata.get("general.architecture")
    kind = str(file.metadata.get(f"{architecture}.rope.scaling.type", "none"))
    factors = {name: _values(file, name) for name in ROPE_TENSORS if name in file.tensors}
    factors = {name: values for name, values in factors.items() if not np.all(values == 1.0)}
    if kind == "linear":
        factor = float(file.metadata.get(f"{architecture}.rope.scaling.factor", 1.0))
        if factor != 1.0:
            _set(config, {"rope_type": "linear", "factor": factor})
    elif kind != "none":
        raise _refusal(file, f"scales rotary embeddings by {kind!r}")
    if not factors:
        return
    name, values = next(iter(factors.items()))
    if name != ROPE_TENSORS[0] or len(factors) > 1 or kind != "none":
        raise _refusal(file, f"scales rotary embeddings by {' and '.join(factors)}")
    _set(config, {"rope_type": "llama3", "factor": round(float(values.max()), 3), **_LLAMA3})
    wanted = _llama3_factors(config)
    if wanted.shape != values.shape or not np.allclose(wanted, values, rtol=_TOLERANCE, atol=0.0):
        raise _refusal(file, f"scales rotary embeddings by {name}, whose values are not those of Llama 3.1 to 3.3")


def _values(file: GgufFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    if tensor.type_name != "F32":
        raise _refusal(file, f"holds {name} as {tensor.type_name} instead of F32")
    return file.bytes_of(tensor).view(np.float32)


def _set(config: Any, parameters: dict[str, Any]) -> None:
    config.rope_parameters = {**(config.rope_parameters or {}), **parameters}


def _llama3_factors(config: Any) -> np.ndarray:
    """By what the config's frequencies are divided, ``[rotary_dim / 2]`` float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = copy.deepcopy(config)
    plain.rope_parameters = {**config.rope_parameters, "factor": 1.0}
    unscaled, _ = ROPE_INIT_FUNCTIONS["llama3"](plain, torch.device("cpu"))
    factors: np.ndarray = (unscaled / scaled).numpy()
    return factors


def _refusal(file: GgufFile, what: str) -> ModelError:
    return ModelError(
        f"{file.path} {what}, which plugin 'native' does not read.\nPass the model's folder with config.json and "
        "safetensors instead; transformers leaves this scaling of a .gguf file out."
    )
