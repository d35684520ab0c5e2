"""How many threads the native pool takes, and torch beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmopt import container
from llmopt.errors import ConfigError

_ALWAYS_ALLOWED = 64  # threads, however few CPUs there are


def num_native_threads(
    option: int | None = None,
    num_cpus: int | None = None,
    *,
    cgroup: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
) -> int:
    """Threads for the native pool, at least 1.

    The first that is given: `option`, ``LLMOPT_NUM_THREADS``, the CPUs that this process may use. These are the
    affinity mask, which contains the cpuset, and the cgroup's quota rounded down. When they are more than two, one
    stays free for the host program. Processes that a launcher started side by side (``LOCAL_WORLD_SIZE``) share them.

    :param option: what the user of a plugin asked for.
    :param num_cpus: CPUs this process may use, when somebody has counted them (`Machine.num_threads`).
    :raises ConfigError: `option` or the variable is not a whole number of at least 1, or is one of many times the CPUs
        of the machine: at each barrier such threads would wait for CPUs that others spin on.
    """
    if option is not None:
        return _number_of_threads("the number of threads", option)
    if (given := os.environ.get("LLMOPT_NUM_THREADS", "").strip()) != "":
        return _number_of_threads("LLMOPT_NUM_THREADS", given)
    count = container.num_cpus(cgroup, proc)[1] if num_cpus is None else num_cpus
    count = max(1, count // num_local_ranks())
    return count - 1 if count > 2 else count


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch's operators on the calling thread alone.

    After a parallel one, torch's threads spin for the next for milliseconds, on the CPUs of the native pool. The number
    belongs to the calling thread; others are not affected. Setting it takes a fraction of a microsecond.
    """
    import torch

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def num_local_ranks() -> int:
    """Processes that a launcher started on this machine for one job; 1 when it does not say."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _number_of_threads(name: str, value: object) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1, or leave it out.")
    num_cpus = os.cpu_count() or 1
    most = max(_ALWAYS_ALLOWED, num_cpus)
    if count > most:
        raise ConfigError(
            f"{name} is {count}, and this machine has {num_cpus} CPUs. Give at most {most}, or leave it out."
        )
    return count
