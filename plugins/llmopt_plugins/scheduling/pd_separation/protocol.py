"""What the decode process and a worker say to each other.

The decode process sends a `Setup` and then one `Chunk` after the other; the worker answers the first with `Ready` or
`Broken`, and each chunk with `Done`, in order. A worker knows nothing of requests: which blocks a chunk reads and
writes stands in its batch. So a chunk that was sent and not answered is all that must be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from llmopt.config import PipelineConfig


@dataclass(slots=True)
class Setup:
    """What a worker needs to build the same model on the same pool."""

    source: str  # folder, .gguf file or hub id
    load_options: dict[str, Any]
    plugins: list[Any]  # objects, or names
    config: PipelineConfig
    num_blocks: int
    block_size: int
    shapes: dict[int, str]  # layer -> what it stores, as text, to compare
    sample: list[float]  # numbers out of the weights, to compare
    num_threads: int
    transfer: tuple[int, str] | None = None  # port and name of the group over which KV is sent; None: shared memory


@dataclass(slots=True)
class Chunk:
    """Tokens to compute."""

    number: int
    batch: bytes  # `Batch.to_bytes`
    blocks: list[int] = field(default_factory=list)  # blocks that are written to


@dataclass(slots=True)
class Ready:
    """The worker waits for chunks."""


@dataclass(slots=True)
class Broken:
    """The worker cannot be set up."""

    reason: str


@dataclass(slots=True)
class Done:
    """A chunk is in the pool, or failed and is no longer touched."""

    number: int
    seconds: float
    error: str | None = None
    logits: np.ndarray | None = None  # [vocab] float32, of the last token of a prompt: where the batch wants them


class Channel(Protocol):
    """Messages in both directions, as `multiprocessing.connection.Connection` has them."""

    def send(self, obj: Any) -> None: ...

    def recv(self) -> Any: ...

    def poll(self, timeout: float = 0.0) -> bool: ...

    def close(self) -> None: ...
