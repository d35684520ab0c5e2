"""Device settings that cost nothing, and a report of those that only the machine's owner can change.

Stage: place (wraps).   Promise: exact; with `tf32=True` lossy, on CUDA float32 products keep 10 bits of the mantissa.
Helps: containers whose CPU quota is smaller than the machine (torch counts the CPUs, not the quota), several ranks on
one machine, and with `tf32=True` float32 models on CUDA.   Hurts: a program that needs torch's threads for itself.
Source: NVIDIA, "TensorFloat-32"; Linux kernel documentation, "Transparent Hugepage Support", "CFS Bandwidth Control".
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt.threads import num_local_ranks, num_native_threads
from llmopt_plugins.option_checks import check_flag, check_int

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.stages import Machine, Place

logger = logging.getLogger(__name__)

_SMI_FIELDS = {  # what nvidia-smi calls it -> what the report does
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "pcie.link.gen.current": "link_generation",
    "pcie.link.gen.max": "max_link_generation",
    "pcie.link.width.current": "link_width",
    "pcie.link.width.max": "max_link_width",
}


def cpu_report(sys: Path = Path("/sys")) -> dict[str, Any]:
    """State of huge pages and clock, as far as the system shows them: ``{"huge_pages": "madvise", ...}``."""
    report: dict[str, Any] = {}
    if (text := _read(sys / "kernel/mm/transparent_hugepage/enabled")) and (chosen := re.search(r"\[(\w+)\]", text)):
        report["huge_pages"] = chosen.group(1)
    if governor := _read(sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor"):
        report["governor"] = governor
    return report


def cuda_report(index: int) -> dict[str, Any]:
    """Clocks and link of a CUDA device, as nvidia-smi tells; empty where it is missing or does not answer.

    :param index: of the device as torch counts, `CUDA_VISIBLE_DEVICES` included.
    """
    import torch

    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    device = f"GPU-{uuid}" if uuid else str(index)
    command = [program, f"--id={device}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return {name: int(value) for name, value in zip(_SMI_FIELDS.values(), values, strict=False) if value.isdigit()}


def advice(report: dict[str, Any]) -> list[str]:
    """What the owner of the machine could change."""
    found = []
    if report.get("huge_pages") == "never":
        found.append("huge pages are off: set /sys/kernel/mm/transparent_hugepage/enabled to madvise")
    if report.get("governor") == "powersave":
        found.append("the clock governor is powersave: set it to performance")
    for what in ("link_generation", "link_width"):
        if report.get(what, 0) < report.get(f"max_{what}", 0):
            found.append(
                f"{what.replace('_', ' ')} is {report[what]} of {report[f'max_{what}']} (idle links may sleep)"
            )
    return found


class TunedPlace:
    """Place the model, then set the device up for it.

    :param threads: torch's threads on the CPU; None: from affinity, quota, and the ranks that share them.
    """

    def __init__(self, inner: Place, threads: int | None, tf32: bool) -> None:
        self.inner = inner
        self.threads = threads
        self.tf32 = tf32
        self.report: dict[str, Any] = {}
        self._threads_before: int | None = None
        self._precision_before: str | None = None

    def __call__(self, model: PreTrainedModel, machine: Machine) -> PreTrainedModel:
        import torch

        placed = self.inner(model, machine)
        self.report = {"cpus": len(machine.cpus), "usable_cpus": machine.num_threads}
        device = placed.device
        if device.type == "cuda":
            if self.tf32:
                self._precision_before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")
            self.report |= {"float32_products": torch.get_float32_matmul_precision(), **cuda_report(device.index or 0)}
        else:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self._num_torch_threads(machine.num_threads))
            native = num_native_threads(self.threads, machine.num_threads)
            self.report |= {"torch_threads": torch.get_num_threads(), "native_threads": native, **cpu_report()}
        for each in advice(self.report):
            logger.info("device_tuning: %s.", each)
        return placed

    def _num_torch_threads(self, num_cpus: int) -> int:
        """All of this rank's CPUs: unlike the native pool, torch's threads work while the caller waits."""
        if self.threads is not None or os.environ.get("LLMOPT_NUM_THREADS"):
            return num_native_threads(self.threads)
        return max(1, num_cpus // num_local_ranks())

    def stats(self) -> dict[str, Any]:
        """Settings and state of the device, by name."""
        return dict(self.report)

    def describe(self) -> str:
        """The same as text, and what the owner of the machine could change."""
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.report.items())
        return "; ".join([told, *advice(self.report)])

    def close(self) -> None:
        """Put torch's settings back."""
        import torch

        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._precision_before is not None:
            torch.set_float32_matmul_precision(self._precision_before)
            self._precision_before = None


class DeviceTuning:
    """Thread counts and float32 products that fit the device, and a report."""

    info = PluginInfo(
        name="device_tuning",
        layer="hardware",
        promise="exact",
        summary="torch's threads from affinity and quota, TF32 on CUDA when asked for, a report of the device",
    )

    def __init__(self, threads: int | None = None, tf32: bool = False) -> None:
        """:param threads: torch's threads on the CPU; None: what affinity, cpuset and cgroup quota allow.

        :param tf32: on CUDA, take float32 products in TF32.
        """
        if threads is not None:
            check_int("threads", threads, 1, other=", or None", of="threads")
        check_flag("tf32", tf32)
        self.threads = threads
        self.tf32 = tf32
        if tf32:
            self.info = dataclasses.replace(
                self.info, promise="lossy", loss="on CUDA, float32 products round their operands to 10 bits"
            )

    @hookimpl
    def llmopt_wrap_place(self, place: Place, config: PipelineConfig, context: BuildContext) -> Place:
        return TunedPlace(place, self.threads, self.tf32)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
