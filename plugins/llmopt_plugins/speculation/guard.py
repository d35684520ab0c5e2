"""Notices when rounds with drafts are slower than plain steps would have been, whatever was predicted."""

from __future__ import annotations

import math

_ROUNDS = 32
_LEAST = 0.98  # of the plain tokens/s: less is too slow, if it is so by
_DEVIATIONS = 1.5  # standard deviations
_WAIT = 64  # steps without drafts after that
_MAX_BACK_OFF = 16  # the wait grows up to this factor while it happens again


class Guard:
    """Compares, over some 32 rounds, the plain time of the tokens that they gave with their own time."""

    def __init__(self) -> None:
        self.num_alarms = 0
        self.total_gained_s = self.total_spent_s = 0.0
        self._gained_s = self._spent_s = 0.0  # of late
        self._squares = 0.0  # of what each round lacks to the limit, in seconds
        self._num_rounds = 0
        self._back_off = 1

    @property
    def speedup(self) -> float:
        """Of all rounds, over plain steps; 0 when there were none."""
        return self.total_gained_s / self.total_spent_s if self.total_spent_s else 0.0

    def observe(self, gained_s: float, spent_s: float) -> int:
        """Count a round; returns the steps for which drafts should be off, 0 when all is well.

        :param gained_s: the time that plain steps would have taken for its tokens.
        :param spent_s: its own time.
        """
        self.total_gained_s += gained_s
        self.total_spent_s += spent_s
        keep = 1.0 - 1.0 / _ROUNDS
        self._gained_s = keep * self._gained_s + gained_s
        self._spent_s = keep * self._spent_s + spent_s
        self._squares = keep * self._squares + (gained_s - _LEAST * spent_s) ** 2
        self._num_rounds += 1
        if self._num_rounds < _ROUNDS:
            return 0
        excess = self._gained_s - _LEAST * self._spent_s
        variance = max(0.0, self._squares - excess * excess * (1.0 - keep))
        deviation = _DEVIATIONS * math.sqrt(variance)
        if excess >= -deviation:
            if excess > deviation:
                self._back_off = 1
            return 0
        self.num_alarms += 1
        wait = _WAIT * self._back_off
        self._back_off = min(2 * self._back_off, _MAX_BACK_OFF)
        self._num_rounds = _ROUNDS // 2  # half as many show whether it has become better
        self._gained_s = self._spent_s = self._squares = 0.0
        return wait
