"""Making somebody else's code raise, to see who is blamed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class RaisedOnEntry(RuntimeError):
    """Raised by `raise_on_entry` inside the called code."""


def raise_on_entry(call: Any, num_arguments: int) -> BaseException:
    """Call something, let the first Python function it enters raise, and return the exception with its traceback.

    The function's own code does not run, so the arguments do not matter; they are None.

    :raises AssertionError: nothing was raised, because no Python code was entered.
    """

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        sys.settrace(None)
        raise RaisedOnEntry(f"raised on entry to {frame.f_code.co_qualname}")

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call(*[None] * num_arguments)
    except Exception as error:
        return error
    finally:
        sys.settrace(before)
    raise AssertionError(f"{call!r} runs no Python code that could be blamed for an error")
