"""What a workload was to show, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A target, and the figure that was found."""

    text: str  # what was to be reached
    figure: str  # what was found, in the same terms
    reached: bool | None  # None: not judged, the sizes of ``--quick`` say nothing about it

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return "not judged with --quick" if self.reached is None else "reached" if self.reached else "missed"

    def __str__(self) -> str:
        return f"target: {self.text}\nfound:  {self.figure}\n        {self.verdict}"

    def record(self) -> dict[str, Any]:
        """Keys of a JSON line."""
        return {"target": self.text, "figure": self.figure, "reached": self.reached}
