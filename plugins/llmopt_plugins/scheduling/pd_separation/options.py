"""Options of ``mode="process"``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from llmopt_plugins.option_checks import check_int, check_number, check_path

_MAX_CHUNK = 2048


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
        check_int("workers", self.workers, 1)
        if self.cpus is not None:
            check_int("cpus", self.cpus, 1, other=", or None")
        check_int("min_tokens", self.min_tokens, 2, of="tokens")
        check_int("chunk_tokens", self.chunk_tokens, 1, _MAX_CHUNK, of="tokens")
        for name in ("timeout_s", "start_timeout_s"):
            check_number(name, getattr(self, name), "a number of seconds above 0", lambda x: 0 < x < math.inf)
        if self.source is not None:
            check_path("source", self.source, "a folder or the name of a model, or None")
        if self.listen is not None:
            try:
                parse_address(self.listen)
            except (ValueError, AttributeError):
                raise ValueError(f'listen is "host:port", or None, found {self.listen!r}') from None

    def beside_defaults(self) -> dict[str, tuple[Any, Any]]:
        """Name of an option -> its value and its default."""
        return {f.name: (getattr(self, f.name), f.default) for f in fields(self)}


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` as its parts.

    :raises ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'an address is "host:port", found {text!r}')
    return host.strip("[]"), int(port)
