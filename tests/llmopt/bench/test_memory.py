"""Load time and memory, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmopt.bench.memory import measure_footprint, status_bytes
from llmopt.bench.shape_report import memory_lines
from llmopt.errors import ModelError
from llmopt.testing import tiny_model, tiny_tokenizer


@pytest.mark.slow
def test_a_fresh_process_reports_its_memory_and_times(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    weights = sum(p.numel() * 4 for p in model.parameters())
    plain = measure_footprint("HF generate", str(tmp_path), None, dtype="auto")
    paged = measure_footprint("+ paged_kv", str(tmp_path), {"paged_kv": {"watermark": 0.1}}, dtype="auto")
    for found in (plain, paged):
        assert 0 < found.imports_bytes <= found.peak_bytes
        assert 0 < found.resident_bytes <= found.peak_bytes
        assert min(found.import_s, found.load_s, found.first_s) > 0
        assert found.weight_bytes == weights
    assert plain.kv_bytes == 0 < paged.kv_bytes
    (line,) = memory_lines([paged], "tiny", {"cpu": "x"})
    assert (line["contender"], line["workload"], line["cpu"]) == ("+ paged_kv", "memory", "x")


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ModelError, match=r"failed: .*no model at \./no/such/folder"):
        measure_footprint("llmopt", "./no/such/folder", {}, dtype="auto")


def test_sizes_are_read_from_the_status_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    12 kB\nThreads:\t1\n")
    assert status_bytes(["VmRSS", "VmHWM"], tmp_path / "status") == [12 * 1024, 0]
    assert status_bytes(["VmRSS"], tmp_path / "none") == [0]
