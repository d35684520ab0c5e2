"""The table of a GGUF file: read as the gguf package reads it, and refused wherever it was cut."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmopt.errors import ModelError
from llmopt.testing import tiny_model
from llmopt_plugins.kernel.native.gguf_file import GgufFile
from tests.plugins.kernel.native.gguf_files import write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, tiny_model(), Type.Q4_1)
    return file


def test_the_table_is_that_of_the_gguf_package(path: Path) -> None:
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for wanted in reader.tensors:
        found = file.tensors[wanted.name]
        assert found.type_name == wanted.tensor_type.name
        assert found.shape == tuple(int(n) for n in reversed(wanted.shape))
        assert np.array_equal(file.bytes_of(found), wanted.data.view(np.uint8).reshape(-1))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.embedding_length"] == 64
    assert file.metadata["tokenizer.ggml.tokens"] == 512  # an array: its length


@pytest.mark.parametrize("kept", [0, 3, 10, 24, 30, 200, 5000, 0.3, 0.6, 0.9, -1])
def test_a_file_that_was_cut_off_anywhere_is_refused(path: Path, tmp_path: Path, kept: float) -> None:
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ModelError, match=r"cut\.gguf (is cut off|is not a GGUF file|cannot be read)"):
        GgufFile(cut)


def test_damaged_lengths_are_refused_and_not_followed(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    bad = tmp_path / "bad.gguf"
    data[24:32] = (1 << 62).to_bytes(8, "little")  # the length of the first key
    bad.write_bytes(data)
    with pytest.raises(ModelError, match="cut off or damaged"):
        GgufFile(bad)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelError, match=r"not a GGUF file: it begins with b'PK"):
        GgufFile(other)
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(ModelError, match="GGUF version 1; versions 2 and 3 are read"):
        GgufFile(old)


def test_types_that_are_not_read_are_named_with_those_that_are(tmp_path: Path) -> None:
    file = tmp_path / "five.gguf"
    write_gguf(file, tiny_model(), Type.Q5_0)
    with pytest.raises(
        ModelError, match=r"Q5_0 \(\S+\.weight\)\. It reads F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16"
    ):
        GgufFile(file)


def test_released_pages_come_back_from_the_file(path: Path) -> None:
    file = GgufFile(path)
    tensor = next(iter(file.tensors.values()))
    before = file.bytes_of(tensor).copy()
    file.release()
    assert np.array_equal(file.bytes_of(tensor), before)
