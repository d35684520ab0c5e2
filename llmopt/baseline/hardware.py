"""Layer 7, plain: look at the machine, and leave the model where it is."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmopt import container
from llmopt.stages import Machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BaselineProbe:
    """Ask the operating system, the container and torch.

    :param device: where the model is; the accelerator to report on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> Machine:
        cpus, num_threads = container.num_cpus()
        available, total = container.memory()
        name, device_available = cpu_name(), available
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            device_available = torch.cuda.mem_get_info(self.device)[0]
        return Machine(
            cpus=cpus,
            num_threads=num_threads,
            available_bytes=available,
            total_bytes=total,
            device=self.device.type,
            device_name=name,
            device_available_bytes=device_available,
        )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model name of the processor."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class BaselinePlace:
    """Leave the model where the user put it."""

    def __call__(self, model: PreTrainedModel, machine: Machine) -> PreTrainedModel:
        return model
