"""What a drafter is: it guesses the next tokens of some requests, and is told what became of its guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.request import Request


@dataclass(slots=True)
class Draft:
    """A guess for one request: a chain, or a tree whose nodes stand in the order of their chances.

    The first ``n`` tokens are a chain or a tree as well, for every ``n``: the controller keeps as many as pay.
    """

    token_ids: list[int]
    parents: list[int] | None = None  # of each token: -1 the newest token, else an earlier index; None: a chain
    kind: int = 0  # class of confidence, below `Drafter.num_kinds`; acceptance is counted for each class apart


class Drafter(Protocol):
    """Guesses tokens. Called between steps of the pipeline, under its lock.

    Two attributes are optional. ``wants_all_steps = True``: `observe` is also called after steps for which nothing was
    drafted because the controller is off. ``skip(batch)`` is called instead of `draft` while it is off, before the
    forward.
    """

    num_kinds: int  # classes of confidence; 1 when there is but one
    is_cheap: bool  # drafting costs next to nothing: it is asked for the longest draft, which is then cut
    has_trees: bool  # whether drafts have parents

    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        """Guess at most ``limits[i]`` (at least 1) tokens that follow ``requests[i].token_ids[:num_tokens]``.

        None where it could not be asked. A draft without tokens where it is sure of none, or a shorter one: what it
        left out counts as asked for and not accepted.
        """

    def draft_s(self, num_rows: int, num_draft: int) -> float:
        """Seconds that `draft` is expected to take for so many rows, with at most ``num_draft`` tokens each.

        A first estimate: the controller corrects it by what it measures.
        """

    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        """Look at a step that was committed: requests have their new tokens, ``batch`` is still valid."""

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended or begins again. Harmless when nothing is."""

    def stats(self) -> dict[str, Any]:
        """Figures of its own, shown beside those of the controller."""
