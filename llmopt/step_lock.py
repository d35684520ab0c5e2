"""The lock under which a pipeline steps. Its holder can tell whether others want it."""

from __future__ import annotations

import threading


class StepLock:
    """A re-entrant lock with a condition and a count of the threads that wait for it.

    A thread that steps in a loop would take the lock again before anybody else wakes up. Sleeping after each step, to
    give way, costs more than a step of a small model; so it does that only when `is_wanted`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._counting = threading.Lock()
        self._num_waiting = 0  # in __enter__
        self._num_sleeping = 0  # in `wait`; changed under the lock

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits for the lock right now."""
        return self._num_waiting > 0

    def __enter__(self) -> StepLock:
        if not self._changed.acquire(blocking=False):
            with self._counting:
                self._num_waiting += 1
            try:
                self._changed.acquire()
            finally:
                with self._counting:
                    self._num_waiting -= 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._changed.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Let go of the lock until `notify_all`, or until the time is over; then hold it again."""
        self._num_sleeping += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._num_sleeping -= 1

    def notify_all(self) -> None:
        """Wake every thread in `wait`. The lock must be held."""
        if self._num_sleeping:
            self._changed.notify_all()
