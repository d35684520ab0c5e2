"""The seven layers and their stages, by name."""

from __future__ import annotations

STAGES: tuple[str, ...] = (
    "probe",
    "place",
    "shard",
    "lookup",
    "allocate",
    "adapt",
    "attend",
    "execute",
    "tokenize",
    "encode_media",
    "constrain",
    "detokenize",
    "admit",
    "order",
    "budget",
    "schedule",
    "commit",
    "verify",
    "propose",
    "exchange",
)
"""Every stage, in the order in which a pipeline is built."""

LAYERS: dict[str, tuple[str, ...]] = {
    "application": ("tokenize", "encode_media", "constrain", "detokenize"),
    "scheduling": ("admit", "order", "budget", "schedule", "commit"),
    "speculation": ("propose", "verify"),
    "parallelism": ("shard", "exchange"),
    "kernel": ("execute", "attend"),
    "memory": ("lookup", "allocate", "adapt"),
    "hardware": ("probe", "place"),
}
"""The stages of each layer, top-down."""


def layer_of(stage: str) -> str:
    """Return the layer that a stage belongs to."""
    return next(layer for layer, names in LAYERS.items() if stage in names)
