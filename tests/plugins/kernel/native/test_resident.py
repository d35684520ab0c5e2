"""Pages of mapped files are given back, and never those that somebody wrote to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmopt_plugins.kernel.native.resident import Mapping, give_back_mapped, mappings

needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")


def mapped(tmp_path: Path) -> tuple[torch.Tensor, Path]:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(1 << 20, dtype=torch.float32)}, file)
    return load_file(file)["weight"], file


def mapping_of(file: Path) -> Mapping:
    (found,) = [m for m in mappings() if m.file == str(file)]
    return found


@needs_smaps
def test_pages_of_a_mapped_tensor_are_given_back_and_come_again(tmp_path: Path) -> None:
    weight, file = mapped(tmp_path)
    total = float(weight.double().sum())
    assert mapping_of(file).resident_bytes >= 4 << 20
    assert give_back_mapped([weight]) >= 4 << 20
    assert mapping_of(file).resident_bytes == 0
    assert float(weight.double().sum()) == total


@needs_smaps
def test_a_map_that_was_written_to_is_left_alone(tmp_path: Path) -> None:
    weight, file = mapped(tmp_path)
    weight[7] = -1.0
    assert mapping_of(file).own_bytes > 0
    assert give_back_mapped([weight]) == 0
    assert weight[7] == -1.0


@needs_smaps
def test_tensors_in_ordinary_memory_are_left_alone() -> None:
    weight = torch.ones(1 << 20)
    assert give_back_mapped([weight, torch.empty(3, device="meta")]) == 0
    assert bool((weight == 1.0).all())


def test_ranges_are_read_from_the_systems_list(tmp_path: Path) -> None:
    text = (
        "7f00-7f20 r--p 00000000 fe:00 12  /a folder/with spaces.so\nSize: 8 kB\nRss: 4 kB\nAnonymous: 0 kB\n"
        "VmFlags: rd mr\n7f20-7f40 rw-p 00000000 00:00 0\nRss: 8 kB\nAnonymous: 8 kB\n"
        "8f20-8f40 rw-p 00000000 00:00 0 [heap]\nRss: 1 kB\n"
    )
    (tmp_path / "smaps").write_text(text)
    assert mappings(tmp_path / "smaps") == [
        Mapping(0x7F00, 0x7F20, "/a folder/with spaces.so", 4096, 0),
        Mapping(0x7F20, 0x7F40, "", 8192, 8192),
        Mapping(0x8F20, 0x8F40, "", 1024, 0),
    ]
    assert mappings(tmp_path / "nothing") == []
