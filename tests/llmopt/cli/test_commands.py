from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from llmopt.bench.comparison import Result
from llmopt.bench.measurement import Timing
from llmopt.cli.app import app
from llmopt.errors import ConfigError, ModelError, PluginConflictError, PluginNotFoundError, PluginOptionError
from llmopt.testing import tiny_model, tiny_tokenizer
from llmopt.version import __version__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(max_position_embeddings=1024).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def run(*arguments: Any, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the same packages as this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m llmopt`` in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "llmopt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def expected_text(prompt: str, count: int) -> str:
    model, tokenizer = tiny_model(max_position_embeddings=1024), tiny_tokenizer()
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_help_and_version_come_without_torch() -> None:
    for option, text in (("--help", "generate"), ("--version", __version__)):
        code = f"import sys; sys.argv = ['llmopt', '{option}']\nfrom llmopt.cli import main\n"
        code += "try: main()\nexcept SystemExit as end: assert not end.code\n"
        code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        done = python(code)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_an_expected_error_is_one_message_and_exit_status_1() -> None:
    done = module("describe", "./no/such/folder")
    assert done.returncode == 1
    assert done.stderr.startswith("ModelError: no model at ./no/such/folder")
    assert "Traceback" not in done.stderr


def test_raw_text_continues_the_prompt_as_the_model_does(folder: Path) -> None:
    text = run("generate", folder, "Once upon", "--raw", "--max-new-tokens", 12)
    assert text == expected_text("Once upon", 12) + "\n"


def test_the_chat_template_is_used_when_there_is_one(folder: Path) -> None:
    text = run("generate", folder, "Hello", "--system", "Be brief.", "--max-new-tokens", 12)
    assert text == expected_text("system: Be brief.\nuser: Hello\nassistant: ", 12) + "\n"


def test_the_prompt_can_come_from_standard_input(folder: Path) -> None:
    text = run("generate", folder, "-", "--raw", "--max-new-tokens", 6, stdin="Once upon")
    assert text == expected_text("Once upon", 6) + "\n"


def test_generate_as_json_holds_text_and_times(folder: Path) -> None:
    answer = json.loads(run("generate", folder, "Hi", "--raw", "--max-new-tokens", 6, "--json", "-p", "paged_kv"))
    assert answer["text"] == expected_text("Hi", 6)
    assert answer["plugins"] == ["paged_kv"]
    assert 0 < answer["first_text_seconds"] <= answer["seconds"]


def test_a_seed_makes_sampling_repeatable(folder: Path) -> None:
    texts = [
        run("generate", folder, "Hi", "--raw", "--temperature", 2, "--seed", seed, "--max-new-tokens", 20)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_needs_a_template_and_a_system_message_needs_a_chat(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        run("generate", tmp_path, "Hi")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        run("generate", tmp_path, "Hi", "--chat")
    with pytest.raises(ConfigError, match="--system needs a chat template"):
        run("generate", tmp_path, "Hi", "--system", "Be brief.")


def test_plugins_are_listed_with_their_layers() -> None:
    table, listed = run("plugins"), json.loads(run("plugins", "--json"))
    assert {"name", "layer", "promise", "requires", "conflicts", "summary"} <= listed[0].keys()
    assert "paged_kv" in [plugin["name"] for plugin in listed]
    assert all(plugin["name"] in table for plugin in listed)


def test_describe_shows_where_a_plugin_stands(folder: Path) -> None:
    assert "paged_kv" in run("describe", folder, "-p", "paged_kv")
    description = json.loads(run("describe", folder, "-p", "paged_kv", "--json"))
    assert [plugin["name"] for plugin in description["plugins"]] == ["paged_kv"]


@pytest.mark.parametrize(
    ("plugin", "error"),
    [
        ("no_such_plugin", PluginNotFoundError),
        ("paged_kv:no_such_option=1", PluginOptionError),
        ("paged_kv:broken", PluginOptionError),
    ],
)
def test_a_wrong_plugin_is_refused_before_the_model_is_loaded(plugin: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run("generate", "./no/such/folder", "Hi", "-p", plugin)


def test_bench_checks_times_and_writes_json_lines(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    command = ("bench", folder, "--quick", "--rounds", 1, "-w", "chat", "-w", "ragged", "-p", "paged_kv")
    shown = run(*command, "--json", file)
    assert "HF generate" in shown
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["workload"], record["contender"]) for record in records] == [
        (workload, contender)
        for workload in ("chat", "ragged")
        for contender in ("HF generate", "llmopt", "+ paged_kv")
    ]
    assert all(record["tokens_ok"] and record["tokens_identical"] for record in records)
    assert all(record["dtype"] == "float32" and record["replay_max_gap"] is None for record in records)


def test_bench_prints_json_lines_and_replays_half_precision(folder: Path) -> None:
    lines = run("bench", folder, "--quick", "--rounds", 1, "-w", "chat", "--dtype", "bfloat16", "--json", "-")
    records = [json.loads(line) for line in lines.splitlines()]
    assert [record["contender"] for record in records] == ["HF generate", "llmopt"]
    assert all(record["dtype"] == "bfloat16" and record["replay_max_gap"] is not None for record in records)


def test_bench_reports_a_broken_promise_with_exit_status_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.bench.contenders import Pipeline

    monkeypatch.setattr(Pipeline, "generate", lambda self, requests: [[0] * r.max_new_tokens for r in requests])
    result = CliRunner().invoke(app, ["bench", str(folder), "--quick", "--rounds", "1", "-w", "chat"])
    assert result.exit_code == 1
    assert "BROKEN" in result.stdout


def test_bench_refuses_an_unknown_workload_and_a_plugin_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"'poetry'.*chat.*host"):
        run("bench", "./no/such/folder", "-w", "poetry")
    with pytest.raises(PluginConflictError, match="given twice"):
        run("bench", "./no/such/folder", "-p", "paged_kv", "-p", "paged_kv")


def test_bench_of_a_model_without_tokenizer_says_what_can_be_measured(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="--workload host"):
        run("bench", tmp_path, "-w", "chat")


def test_bench_measures_shapes_quality_and_memory_and_shows_rivals(folder: Path, tmp_path: Path) -> None:
    rival = {"engine": "other", "weights": "f32", "batch": 4, "prompt": 32, "decode_tokens_per_s": 10.0}
    smaller = rival | {"weights": "Q8_0"}  # of other bits than all of ours: no column
    (tmp_path / "rivals.jsonl").write_text(f"{json.dumps(rival)}\n{json.dumps(smaller)}")
    out = tmp_path / "out.jsonl"
    command = ("bench", folder, "--quick", "--rounds", 1, "-w", "shapes", "-w", "quality", "-p", "paged_kv")
    text = run(*command, "--rivals", tmp_path / "rivals.jsonl", "--json", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["decode1", "decode8", "decode32", "prefill1024", "decode4096", "quality"]
    assert [record["workload"] for record in records] == [name for name in names for _ in range(3)]
    assert [record["contender"] for record in records[:3]] == ["HF generate", "llmopt", "+ paged_kv"]
    assert "vs other f32" in text
    assert "Q8_0" not in text
    for record in records[:-3]:
        assert record["tokens_identical"]
        assert record["fraction_of_limit"] == pytest.approx(record["limit_ms"] / record["ms_per_step"])
        assert min(record["mb_per_step"], record["gflop_per_step"], record["tokens_per_s"]) > 0
        assert record["rivals"].keys() == ({"other f32"} if record["workload"] in ("decode8", "decode32") else set())
    assert all(record["mean_kl"] < 1e-5 for record in records[-3:])


def test_bench_needs_no_tokenizer_for_shapes(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    records = [
        json.loads(line)
        for line in run("bench", tmp_path, "--quick", "--rounds", 1, "-w", "decode1", "--json", "-").splitlines()
    ]
    assert [record["batch"] for record in records] == [1, 1]


def test_bench_refuses_rivals_that_it_cannot_read_before_it_loads_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rivals"):
        run("bench", "./no/such/folder", "--rivals", tmp_path / "none.jsonl")


@pytest.mark.slow
def test_bench_measures_memory_in_fresh_processes(folder: Path) -> None:
    records = [json.loads(line) for line in run("bench", folder, "-w", "memory", "--json", "-").splitlines()]
    assert [record["contender"] for record in records] == ["HF generate", "llmopt"]
    assert all(record["resident_bytes"] > record["weight_bytes"] > 0 for record in records)


@pytest.mark.slow
def test_bench_measures_host_time() -> None:
    records = [
        json.loads(line) for line in run("bench", "-w", "host", "--quick", "--rounds", 1, "--json", "-").splitlines()
    ]
    assert all(record["tokens_identical"] for record in records)
    assert all(0 < record["host_us_per_step"]["median"] < 1e6 for record in records)


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_speaks_and_its_tokens_are_those_of_generate(demo_folder: Path) -> None:
    assert torch.get_num_threads() == 1
    answer = json.loads(run("demo", "--json", "-p", "paged_kv"))
    assert answer["tokens_identical"]
    assert "blue" in answer["text"]
    assert list(answer["tokens_per_s"]) == ["HF generate", "llmopt", "+ paged_kv"]
    assert all(speed > 0 for speed in answer["tokens_per_s"].values())


def test_the_ratio_that_the_demo_shows_is_that_of_the_speeds_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle one of the ratios of each round is another number, here 2.4."""
    timings = [Timing("HF generate", [1.0, 3.0, 6.0], num_tokens=60), Timing("llmopt", [4.0, 1.0, 2.5], num_tokens=60)]
    monkeypatch.setattr("llmopt.cli.demo.load_model", lambda *_, **__: (tiny_model(), tiny_tokenizer()))
    monkeypatch.setattr(
        "llmopt.cli.bench.compare_with_progress", lambda *_, **__: Result("demo", "float32", 3, [], timings)
    )
    lines = [line.split() for line in run("demo").splitlines() if "tokens/s" in line]
    assert lines == [
        ["HF", "generate", "20.0", "tokens/s", "(1.00x)"],
        ["llmopt", "24.0", "tokens/s", "(1.20x)"],
    ]


@pytest.mark.native
def test_generate_and_describe_let_a_plugin_load_the_model(folder: Path) -> None:
    """Packed weights are saved by the first command and read by the second, which is a matter of loading."""
    words = ("generate", folder, "one two", "--max-new-tokens", "6", "--dtype", "float32")
    assert run(*words, "--plugin", "native:save=true") == run(*words)
    saved = list(folder.glob("native-*.packed"))
    assert saved
    assert saved[0].name in run("describe", folder, "--dtype", "float32", "--plugin", "native")


def test_python_minus_m_is_the_same_as_the_script() -> None:
    done = module("--version")
    assert (done.returncode, done.stdout) == (0, f"llmopt {__version__}\n")


@pytest.mark.native
def test_bench_loads_a_model_once_and_lets_a_plugin_use_the_form_that_it_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmopt import hub
    from llmopt_plugins.kernel.native import packed_file

    path = tmp_path / "tiny.packed"
    loaded: list[str] = []
    read: list[Path] = []
    load, load_packed = hub.load, packed_file.load
    monkeypatch.setattr(hub, "load", lambda name, **options: loaded.append(str(name)) or load(name, **options))
    monkeypatch.setattr(packed_file, "load", lambda file, *others: read.append(file) or load_packed(file, *others))
    command = ("bench", folder, "--quick", "--rounds", 1, "-w", "decode1", "--json", "-", "-p", f"native:save={path}")
    for runs in (1, 2):
        records = [json.loads(line) for line in run(*command).splitlines()]
        assert [record["contender"] for record in records] == ["HF generate", "llmopt", "+ native"]
        assert all(record["tokens_identical"] for record in records)
        # the first run saves what it packed; in the second one the plugin maps a model of its own, and does not read it
        assert (len(loaded), read) == ((1, []) if runs == 1 else (3, [path]))
