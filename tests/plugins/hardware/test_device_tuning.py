"""device_tuning: thread counts that follow the container, settings given back, a report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmopt
from llmopt import container
from llmopt.errors import PluginOptionError
from llmopt.registry import info_of, make_plugin
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.hardware import device_tuning
from llmopt_plugins.hardware.device_tuning import DeviceTuning, advice, cpu_report, cuda_report

MODEL = tiny_model()
GIB = 1 << 30


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMOPT_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def fake_container(patch: pytest.MonkeyPatch, folder: Path, cpu_max: str, memory_max: int) -> None:
    """Eight CPUs and 64 GiB, and a cgroup around this process."""
    cgroup, proc = folder / "cgroup", folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n")
    cgroup.mkdir()
    for name, text in {"cpu.max": cpu_max, "memory.max": memory_max, "memory.current": 0}.items():
        (cgroup / name).write_text(f"{text}\n")
    memory, num_cpus = container.memory, container.num_cpus
    patch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    patch.setattr(container, "memory", lambda *_: memory(cgroup, proc))
    patch.setattr(container, "num_cpus", lambda *_: num_cpus(cgroup, proc))


def test_threads_and_pool_follow_a_container_of_one_cpu_and_two_gigabytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_container(monkeypatch, tmp_path, "100000 100000", 2 * GIB)
    with llmopt.build(MODEL, ["device_tuning"], memory_fraction=0.5) as pipe:
        figures = pipe.stats()["place.device_tuning"]
        assert (figures["cpus"], figures["usable_cpus"]) == (8, 1)
        assert (figures["torch_threads"], figures["native_threads"]) == (1, 1)
        pool = pipe.block_pool
        num_bytes = pool.num_blocks * pool.block_size * sum(s.bytes_per_token for s in pipe.kv_cache.shapes.values())
        assert num_bytes <= GIB
        assert_same_tokens(pipe, MODEL, tiny_prompts(2))


def test_torch_gets_the_cpus_that_the_quota_pays_for_and_its_own_number_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_container(monkeypatch, tmp_path, "300000 100000", 8 * GIB)
    before = torch.get_num_threads()
    with llmopt.build(MODEL, ["device_tuning"]) as pipe:
        assert torch.get_num_threads() == 3
        assert pipe.stats()["place.device_tuning"]["native_threads"] == 2
        assert "torch threads 3" in str(pipe.describe())
    assert torch.get_num_threads() == before


def test_ranks_share_the_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_container(monkeypatch, tmp_path, "max 100000", 8 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with llmopt.build(MODEL, ["device_tuning"]):
        assert torch.get_num_threads() == 2


def test_the_option_overrides_the_variable_and_that_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "3")
    for plugin, threads in ((DeviceTuning(), 3), (DeviceTuning(threads=2), 2)):
        with llmopt.build(MODEL, [plugin]) as pipe:
            assert torch.get_num_threads() == threads
            assert pipe.stats()["place.device_tuning"]["native_threads"] == threads


def test_huge_pages_and_governor_are_read_where_the_system_shows_them(tmp_path: Path) -> None:
    assert cpu_report(tmp_path) == {}
    pages, governor = tmp_path / "kernel/mm/transparent_hugepage", tmp_path / "devices/system/cpu/cpu0/cpufreq"
    pages.mkdir(parents=True)
    governor.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    (governor / "scaling_governor").write_text("powersave\n")
    report = cpu_report(tmp_path)
    assert report == {"huge_pages": "never", "governor": "powersave"}
    assert [text.split(":")[0] for text in advice(report)] == [
        "huge pages are off",
        "the clock governor is powersave",
    ]


def test_nothing_is_advised_where_all_is_well() -> None:
    assert advice({"huge_pages": "madvise", "governor": "performance", "link_width": 16, "max_link_width": 16}) == []


# -- CUDA, with a made-up nvidia-smi ---------------------------------------------------------------------------------
def fake_smi(patch: pytest.MonkeyPatch, answer: str | Exception) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    patch.setattr(device_tuning.shutil, "which", lambda name: f"/usr/bin/{name}")
    patch.setattr(device_tuning.subprocess, "run", run)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc-1"))
    return asked


def test_clocks_and_link_of_the_device_that_torch_uses_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_smi(monkeypatch, "1980, 1980, 4, 5, 8, 16\n")
    report = cuda_report(0)
    assert report == {
        "clock_mhz": 1980,
        "max_clock_mhz": 1980,
        "link_generation": 4,
        "max_link_generation": 5,
        "link_width": 8,
        "max_link_width": 16,
    }
    assert "--id=GPU-abc-1" in asked[0]
    assert [text.split(" of")[0] for text in advice(report)] == ["link generation is 4", "link width is 8"]


@pytest.mark.parametrize(
    "answer",
    [
        FileNotFoundError(2, "gone"),
        subprocess.TimeoutExpired("nvidia-smi", 10),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        "",
        "[N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\n",
    ],
)
def test_an_nvidia_smi_that_does_not_answer_is_no_report(
    monkeypatch: pytest.MonkeyPatch, answer: str | Exception
) -> None:
    fake_smi(monkeypatch, answer)
    assert cuda_report(0) == {}


def test_a_machine_without_nvidia_smi_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tuning.shutil, "which", lambda name: None)
    assert cuda_report(0) == {}


def test_tf32_is_set_on_cuda_for_the_life_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tuning, "cuda_report", lambda index: {"clock_mhz": 1500})
    machine: Any = SimpleNamespace(cpus=(0, 1), num_threads=2)
    model: Any = SimpleNamespace(device=torch.device("cuda", 0))
    before = torch.get_float32_matmul_precision()
    for tf32, expected in ((False, before), (True, "high")):
        place = device_tuning.TunedPlace(lambda model, machine: model, None, tf32)
        assert place(model, machine) is model
        assert torch.get_float32_matmul_precision() == expected
        assert place.stats()["float32_products"] == expected
        assert "clock mhz 1500" in place.describe()
        place.close()
        assert torch.get_float32_matmul_precision() == before


def test_with_tf32_the_promise_is_lossy_and_says_what_is_lost() -> None:
    assert info_of(DeviceTuning()).promise == "exact"
    lossy = info_of(DeviceTuning(tf32=True))
    assert lossy.promise == "lossy"
    assert "10 bits" in lossy.loss


@pytest.mark.parametrize(("option", "value"), [("threads", 0), ("threads", "many"), ("threads", True), ("tf32", 3)])
def test_options_that_make_no_sense_are_refused(option: str, value: Any) -> None:
    with pytest.raises(PluginOptionError, match=option):
        make_plugin("device_tuning", {option: value})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_cuda_device_tokens_stay_and_the_report_has_its_setting() -> None:
    model = tiny_model().to("cuda")
    with llmopt.build(model, ["device_tuning"]) as pipe:
        assert_same_tokens(pipe, model, tiny_prompts(2))
        assert "float32_products" in pipe.stats()["place.device_tuning"]
