"""Options of ``mode="process"``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What the user may choose about the processes."""

    workers: int = 1  # prefill processes
    cpus: int | None = None  # CPUs of all workers together; None: half of those allowed
    min_tokens: int = 128  # shorter prompts are computed by the decode process
    chunk_tokens: int = 512  # tokens of a worker's forward
    timeout_s: float = 60.0  # a chunk that takes longer: the worker hangs
    start_timeout_s: float = 300.0  # until the workers have loaded the model
    source: str | None = None  # where the workers load the model from; None: from where the pipeline did
    listen: str | None = None  # "host:port" at which workers of other machines report; None: workers of this machine

    def check(self) -> None:
        """Raise ValueError for values out of range."""
        for name, least in (("workers", 1), ("min_tokens", 2), ("chunk_tokens", 1), ("cpus", 1)):
            value = getattr(self, name)
            if name == "cpus" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number, at least {least}, found {value!r}")
        if self.chunk_tokens > 2048:
            raise ValueError(f"chunk_tokens is at most 2048, found {self.chunk_tokens!r}")
        if self.listen is not None:
            parse_address(self.listen)
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is a number of seconds above 0, found {value!r}")

    def changed(self) -> list[str]:
        """Names of the options that are not the default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` as its parts.

    :raises ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'an address is "host:port", found {text!r}')
    return host.strip("[]"), int(port)
