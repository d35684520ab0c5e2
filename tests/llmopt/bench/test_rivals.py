from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmopt.bench.rivals import bits_of, read_rivals, rivals_of
from llmopt.bench.shapes import Shape, ShapeTiming
from llmopt.errors import ConfigError

LINE = {"engine": "openvino", "plugins": None, "dtype": "int8", "batch": 8, "prompt": 32,
        "prefill_tokens_per_s": 3000.0, "decode_ms_per_step": 40.0, "decode_tokens_per_s": 200.0}  # fmt: skip
DECODE, PREFILL = Shape("decode8", 8, 32, 64), Shape("prefill", 8, 32, 0)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_of_other_engines_are_read_and_matched_by_shape(tmp_path: Path) -> None:
    other = LINE | {"batch": 1}
    path = write(tmp_path / "r.jsonl", LINE, "", other, LINE | {"weights": "Q8_0", "engine": "llamacpp"})
    rivals = read_rivals(path)
    assert len(rivals) == 3
    assert [rival.label for rival in rivals_of(DECODE, rivals)] == ["openvino int8", "llamacpp Q8_0"]


def test_a_ratio_is_our_tokens_per_second_over_theirs(tmp_path: Path) -> None:
    (rival,) = read_rivals(write(tmp_path / "r.jsonl", LINE))
    timing = ShapeTiming("ours", DECODE, [0.256 / 3], [0.256 / 3 + 64 * 0.02])
    assert rival.ratio(timing) == pytest.approx(2.0)
    assert rival.ratio(ShapeTiming("ours", PREFILL, [0.256 / 3])) == pytest.approx(1.0)


def test_of_several_lines_with_one_label_the_fastest_counts(tmp_path: Path) -> None:
    lines = [LINE, LINE | {"decode_tokens_per_s": 300.0}, LINE | {"decode_tokens_per_s": 100.0}]
    (rival,) = rivals_of(DECODE, read_rivals(write(tmp_path / "r.jsonl", *lines)))
    assert rival.decode_tokens_per_s == 300.0


def test_rivals_whose_weights_have_other_bits_than_all_of_ours_are_left_out(tmp_path: Path) -> None:
    lines = [LINE | {"weights": name} for name in ("bf16", "Q8_0", "Q4_K_M", "ternary")]
    rivals = read_rivals(write(tmp_path / "r.jsonl", *lines))
    kept = [rival.weights for rival in rivals_of(DECODE, rivals, ["bfloat16", "int4_group"])]
    assert kept == ["bf16", "Q4_K_M", "ternary"]  # what does not say its bits stays


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("bfloat16", 16), ("BF16", 16), ("f16", 16), ("int8", 8), ("int8_group", 8), ("Q4_0", 4),
     ("IQ2_XS", 2), ("fp8", 8), ("", None), ("ternary", None)],
)  # fmt: skip
def test_the_bits_of_weights_follow_from_the_name_of_their_type(name: str, bits: int | None) -> None:
    assert bits_of(name) == bits


def test_a_line_without_the_figure_of_a_shape_is_no_rival_there(tmp_path: Path) -> None:
    rivals = read_rivals(write(tmp_path / "r.jsonl", LINE | {"decode_tokens_per_s": None}))
    assert rivals_of(DECODE, rivals) == []
    assert len(rivals_of(PREFILL, rivals)) == 1


def test_lines_about_something_else_are_passed_over(tmp_path: Path) -> None:
    assert read_rivals(write(tmp_path / "r.jsonl", {"workload": "memory", "load_s": 1.0})) == []


BROKEN = [LINE | {"decode_tokens_per_s": "fast"}, LINE | {"decode_tokens_per_s": 0}, LINE | {"batch": "x"}]


@pytest.mark.parametrize("line", ["{", "[1]", "7", *map(json.dumps, BROKEN)])
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.jsonl, line 2: "):
        read_rivals(write(tmp_path / "r.jsonl", LINE, line))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rivals(tmp_path / "none")
