"""How much time is left, and how it is shared among what is still to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """A number of seconds that begins to run when it is made.

    :param clock: seconds, for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the end; 0 afterwards."""
        return max(0.0, self._end - self._clock())

    def share_s(self, num_left: int) -> float:
        """An equal share of the time that is left for each of ``num_left`` measurements; what one saves, others get."""
        return self.left_s / max(1, num_left)


class Rounds:
    """Decides after every round whether another one fits.

    :param seconds: time for all rounds.
    :param most: rounds at most; one is always run.
    """

    def __init__(self, seconds: float, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_done = 0
        self._most, self._clock = most, clock
        self._started = self._begin = clock()
        self._seconds = seconds
        self._longest = 0.0

    def goes_on(self) -> bool:
        """Call before every round. True for the first; then while the longest round so far would still fit."""
        now = self._clock()
        if self.num_done:
            self._longest = max(self._longest, now - self._begin)
            if self.num_done >= self._most or now - self._started + self._longest > self._seconds:
                return False
        self.num_done += 1
        self._begin = now
        return True
