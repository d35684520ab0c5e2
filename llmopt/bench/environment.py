"""What a measurement depends on beside the code: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Commit (None outside a git checkout), versions, processor and device names, thread counts."""
    import torch
    import transformers

    from llmopt.version import __version__

    cuda = torch.cuda.is_available()
    return {
        "commit": _commit(),
        "llmopt": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """The short commit of the checkout this file lies in, with a plus when files differ from it."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
