"""How far off predicted times of steps are: with drafts and without, by the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RATE = 0.1
_FIRST_RATE = 0.34
_LIMIT = 2.0  # a step that took longer or shorter than this factor says counts as one that did just that
_PLAIN_SHARE = 0.003  # of the time may be lost to plain steps that are taken to be measured
_FIRST_SHARE = 0.01  # while fewer than this many were seen
_FIRST = 2
_LEAST_WAIT, _FIRST_WAIT = 32, 8  # rounds between two of them, at least


@dataclass(slots=True)
class _Load:
    """What was seen with about so many rows."""

    plain: float = 1.0  # measured over predicted time
    drafted: float = 1.0
    num_plain: int = 0  # steps seen
    num_drafted: int = 0
    num_rounds: int = 0  # with drafts, since the last plain step


class StepRatios:
    """Measured over predicted time of steps, and when a plain one is due.

    While every step has drafts nobody sees what the plain one takes now, and drafts are judged by a prediction. So once
    in a while a step goes without, at each load: what that loses is a fixed share of the time.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._last = _Load()

    def of(self, num_rows: int) -> tuple[float, float]:
        """Ratios of plain steps and of those with drafts. What was not seen yet is as far off as what was."""
        load = self._loads.get(_place(num_rows))
        if load is None:
            load = self._last
        plain = load.plain if load.num_plain else load.drafted
        return plain, load.drafted if load.num_drafted else plain

    def observe(self, num_rows: int, ratio: float, *, is_plain: bool) -> None:
        """A step took ``ratio`` times as long as predicted."""
        place = _place(num_rows)
        load = self._loads.get(place)
        if load is None:
            plain, drafted = self.of(num_rows)
            load = self._loads[place] = _Load(plain, drafted)
        self._last = load
        ratio = min(max(ratio, 1.0 / _LIMIT), _LIMIT)
        if is_plain:
            load.num_plain += 1
            load.num_rounds = 0
            load.plain += max(_RATE, _FIRST_RATE / load.num_plain) * (ratio - load.plain)
        else:
            load.num_drafted += 1
            load.num_rounds += 1
            load.drafted += max(_RATE, _FIRST_RATE / load.num_drafted) * (ratio - load.drafted)

    def is_plain_due(self, num_rows: int, speedup: float) -> bool:
        """Whether the next step should go without drafts that would make it faster by ``speedup``."""
        load = self._loads.get(_place(num_rows))
        if load is None:
            return False
        share, least = (_PLAIN_SHARE, _LEAST_WAIT) if load.num_plain >= _FIRST else (_FIRST_SHARE, _FIRST_WAIT)
        return load.num_rounds >= max(least, (speedup - 1.0) / share)


def _place(num_rows: int) -> int:
    """Half octaves."""
    return round(2.0 * math.log2(num_rows)) if num_rows > 1 else 0
