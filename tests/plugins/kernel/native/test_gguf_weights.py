"""Weights out of GGUF files: those that transformers dequantizes, packed without another rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from llmopt.errors import ModelError
from llmopt.hub import load
from llmopt.testing import tiny_model
from llmopt_plugins.kernel.native.gguf_file import GgufFile
from llmopt_plugins.kernel.native.gguf_weights import GgufWeights
from llmopt_plugins.kernel.native.packing import Arena, MatrixPlan, MatrixShape, Rows, extension, pack_matrix
from tests.plugins.kernel.native.gguf_files import write_gguf

pytestmark = pytest.mark.native

QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K]
# hidden and intermediate sizes are multiples of 256, the block of the K formats
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def wide_model(kind: str = "llama", **changes: Any) -> Any:
    return tiny_model(kind, **{**WIDE, **changes})


def unpacked(source: GgufWeights, plan: MatrixPlan, shape: MatrixShape) -> np.ndarray:
    memory = Arena(shape.num_bytes)
    pack_matrix(plan, shape, source, memory.address, num_threads=2)
    out = np.empty((shape.num_outputs, shape.num_inputs), dtype=np.float32)
    matrix = extension().PackedMatrix(shape.native(), memory.address)
    extension().unpack_rows(matrix, np.arange(shape.num_outputs), out.ctypes.data)
    return out


def bound(weight: np.ndarray, dequantized: np.ndarray, source: GgufWeights, name: str) -> np.ndarray:
    """What float16 may change: scale and minimum are rounded to 11 bits, or to steps of 2^-24 when they are tiny.

    Formats whose parameters are float16 in the file change nothing.
    """
    if source.type_name(name) not in ("Q4_K", "Q6_K"):
        return np.zeros_like(dequantized)
    group = 32 if source.type_name(name) == "Q4_K" else 16
    grouped = np.abs(dequantized).reshape(dequantized.shape[0], -1, group)
    # scale * q and the minimum are each at most the range of the group away from zero
    largest = 2 * np.repeat(grouped.max(axis=2), group, axis=1)
    return 2 * largest * 2.0**-11 + 64 * 2.0**-25


@pytest.mark.parametrize("kind", [*QUANTIZED, Type.F16, Type.F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_weights_are_those_that_transformers_dequantizes(model_type: str, kind: Type, tmp_path: Path) -> None:
    model = wide_model(model_type)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, kind)
    wanted, _ = load(file, dtype="float32")
    source = GgufWeights(GgufFile(file), model)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(source.dense(name).float(), parameter), name
    assert source.type_name("model.layers.0.mlp.up_proj.weight") == kind.name


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_packed_rows_are_the_dequantized_ones_within_the_rounding_of_float16(kind: Type, tmp_path: Path) -> None:
    model = wide_model()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, kind)
    source = GgufWeights(GgufFile(file), model)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    counts = [source.dense(name).shape[0] for name in names]
    plan = MatrixPlan(256, tuple(Rows(name, 0, count) for name, count in zip(names, counts, strict=True)))
    stored = source.quantized(names[0])
    assert stored is not None
    shape = stored.shape
    shape = MatrixShape(shape.format, sum(counts), 256, shape.group_size, shape.has_minimum)
    wanted = np.concatenate([source.dense(name).numpy() for name in names])
    found = unpacked(source, plan, shape)
    limit = bound(found, wanted, source, names[0])
    assert np.all(np.abs(found - wanted) <= limit)
    assert np.any(wanted != 0)


def test_gate_and_up_alternate_in_panels(tmp_path: Path) -> None:
    model = wide_model()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, Type.Q8_0)
    source = GgufWeights(GgufFile(file), model)
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    plan = MatrixPlan(256, (Rows(gate, 0, 512), Rows(up, 0, 512)), is_gated=True)
    found = unpacked(source, plan, MatrixShape("int8_group", 1024, 256, 32)).reshape(-1, 2, 16, 256)
    assert np.array_equal(found[:, 0].reshape(512, 256), source.dense(gate).numpy())
    assert np.array_equal(found[:, 1].reshape(512, 256), source.dense(up).numpy())


def test_tied_embeddings_are_found_under_both_names(tmp_path: Path) -> None:
    model = wide_model(tie_word_embeddings=True)
    file = tmp_path / "tied.gguf"
    write_gguf(file, model, Type.Q8_0)
    source = GgufWeights(GgufFile(file), model)
    assert torch.equal(source.dense("lm_head.weight"), source.dense("model.embed_tokens.weight"))


def test_a_file_and_a_model_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = wide_model()
    lacking, extra, narrow = tmp_path / "lacking.gguf", tmp_path / "extra.gguf", tmp_path / "narrow.gguf"
    write_gguf(lacking, model, Type.Q8_0, changed={"blk.0.ffn_up.weight": None})
    with pytest.raises(ModelError, match=r"the file lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        GgufWeights(GgufFile(lacking), model)
    write_gguf(extra, model, Type.Q8_0, changed={"blk.0.ffn_gate_exps.weight": np.zeros((4, 256), np.float32)})
    with pytest.raises(ModelError, match=r"no place for blk\.0\.ffn_gate_exps\.weight"):
        GgufWeights(GgufFile(extra), model)
    write_gguf(narrow, model, Type.Q8_0, changed={"blk.0.ffn_up.weight": np.zeros((512, 128), np.float32)})
    with pytest.raises(ModelError, match=r"ffn_up\.weight has shape \(512, 128\), and .*up_proj\.weight \(512, 256\)"):
        GgufWeights(GgufFile(narrow), model)


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    file = tmp_path / "falcon.gguf"
    writer = gguf.GGUFWriter(file, "falcon")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'falcon'.* it reads llama, qwen2"):
        GgufWeights(GgufFile(file), wide_model())
