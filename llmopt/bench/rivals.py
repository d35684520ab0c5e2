"""Figures of other engines, beside ours of the same shape.

A file of JSON lines, one per engine and shape::

    {"engine": "llamacpp", "weights": "Q8_0", "batch": 8, "prompt": 32,
     "prefill_tokens_per_s": 505.0, "decode_ms_per_step": 34.1, "decode_tokens_per_s": 235.0}

``dtype`` is read where ``weights`` is missing. Lines that `llmopt bench --json` wrote can be read as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt.errors import ConfigError

if TYPE_CHECKING:
    from llmopt.bench.shapes import Shape, ShapeTiming


@dataclass(frozen=True, slots=True)
class Rival:
    """One engine on one shape."""

    engine: str
    weights: str  # bits or type of its weights, for the heading
    batch: int
    prompt: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None

    @property
    def label(self) -> str:
        """Engine and weights."""
        return f"{self.engine} {self.weights}".strip()

    @property
    def bits(self) -> int | None:
        """Of its weights; None when their name does not say."""
        return bits_of(self.weights)

    def ratio(self, timing: ShapeTiming) -> float | None:
        """Our tokens per second over the rival's; None when the rival was not measured."""
        theirs = self.decode_tokens_per_s if timing.shape.is_decode else self.prefill_tokens_per_s
        return timing.tokens_per_s / theirs if theirs else None


def bits_of(weights: str) -> int | None:
    """Bits of a type of weights: ``bfloat16``, ``f16``, ``int8``, ``Q4_K_M``, ``fp8`` and the like; None for others."""
    found = re.search(r"(?:float|bf|fp|f|int|iq|q)_?(\d+)", weights.lower())
    return int(found.group(1)) if found else None


def read_rivals(path: Path) -> list[Rival]:
    """Read a file of JSON lines; lines about something else than a shape are passed over.

    :raises ConfigError: the file cannot be read, or a line is no JSON object or holds figures that are no numbers.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rivals {path} cannot be read: {error}") from error
    found: list[Rival] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            rival = _rival(record)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"--rivals {path}, line {number}: {error}. A line is a JSON object with engine, batch, "
                              "prompt, and decode_tokens_per_s or prefill_tokens_per_s.") from error  # fmt: skip
        if rival is not None:
            found.append(rival)
    return found


def _rival(record: dict[str, Any]) -> Rival | None:
    if record.get("batch") is None or record.get("prompt") is None or not record.get("engine"):
        return None
    return Rival(
        engine=str(record["engine"]),
        weights=str(record.get("weights") or record.get("dtype") or ""),
        batch=int(record["batch"]),
        prompt=int(record["prompt"]),
        prefill_tokens_per_s=_positive(record, "prefill_tokens_per_s"),
        decode_tokens_per_s=_positive(record, "decode_tokens_per_s"),
    )


def _positive(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, no positive number")
    return float(value)


def rivals_of(shape: Shape, rivals: Sequence[Rival], weights: Sequence[str] | None = None) -> list[Rival]:
    """The rivals that were measured on this shape; of several lines with one label the fastest.

    :param weights: types of our weights; rivals with other bits than all of these are left out. None: nobody is.
    """
    ours = None if weights is None else {bits_of(one) for one in weights}
    best: dict[str, Rival] = {}
    for rival in rivals:
        rate = rival.decode_tokens_per_s if shape.is_decode else rival.prefill_tokens_per_s
        if (rival.batch, rival.prompt) != (shape.batch, shape.prompt) or rate is None:
            continue
        if ours is not None and rival.bits is not None and rival.bits not in ours:
            continue
        before = best.get(rival.label)
        known = (
            None if before is None else before.decode_tokens_per_s if shape.is_decode else before.prefill_tokens_per_s
        )
        if known is None or rate > known:
            best[rival.label] = rival
    return list(best.values())
