"""What stages that wrap another one have in common."""

from __future__ import annotations

from typing import Any

_OWN = ("stats", "describe", "close")  # asked of every stage of a chain, so nobody answers for another one


class Wrapping:
    """A stage around another one; what it does not have is looked up there.

    :param inner: the stage as the plugins before left it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
