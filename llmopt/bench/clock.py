"""Time inside the model's forward, so that the rest of a run can be called host time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ForwardClock:
    """Adds up the time that a module spends in ``__call__``, and counts the calls.

    Outermost calls only. On an accelerator launches are asynchronous and the time is that of the launches.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0
        self._depth = 0
        self._started = 0.0

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.seconds, self.num_calls = 0.0, 0

    @contextmanager
    def attached(self, module: torch.nn.Module) -> Iterator[ForwardClock]:
        """Measure ``module`` while the context is open; the module is left as it was."""
        # An instance attribute is not looked up for `module(...)`, so hooks are the one way that changes no class.
        before = module.register_forward_pre_hook(self._before, prepend=False)
        after = module.register_forward_hook(self._after, prepend=True, always_call=True)
        try:
            yield self
        finally:
            before.remove()
            after.remove()

    def timed(self, call: Any) -> Any:
        """A function that calls ``call`` and is measured like a forward."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            self._before()
            try:
                return call(*args, **kwargs)
            finally:
                self._after()

        return measured

    def _before(self, *_: Any) -> None:
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started
            self.num_calls += 1
