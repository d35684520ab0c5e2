"""Drafts from what was said before: in the request itself, and, when asked for, in outputs of the same tenant."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmopt import native
from llmopt_plugins.speculation.drafter import Draft
from llmopt_plugins.speculation.ngram.plain_automaton import PlainAutomaton

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.request import Request
    from llmopt_plugins.speculation.ngram.shared_texts import SharedTexts

_LENGTHS = (3, 4, 6, 10, 18)  # of matches: kinds of drafts are those below 3, below 4 and so on
PRIORS = (0.4, 0.6, 0.75, 0.88, 0.94, 0.97)  # for each kind: the chance that a token is right when those before it were
_MAX_SHARED_LENGTH = 32  # tokens of a request that are looked for in shared texts


def new_automaton() -> Any:
    """A suffix automaton, native where there is a compiled core."""
    core = native.core()
    return PlainAutomaton() if core is None else core.SuffixAutomaton()


class NgramDrafter:
    """What followed the longest suffix of a request's tokens where that occurred before, the last time.

    :param min_match: tokens of the suffix.
    :param shared: outputs of earlier requests; None: every request only knows itself.
    """

    is_cheap, has_trees = True, False

    def __init__(self, min_match: int, shared: SharedTexts | None) -> None:
        self.min_match = min_match
        self.shared = shared
        self.num_kinds = len(PRIORS) * (1 if shared is None else 2)
        self._automata: dict[Request, Any] = {}

    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        automata, least = self._automata, self.min_match
        found: list[Draft | None] = []
        for request, limit in zip(requests, limits, strict=True):
            automaton = automata.get(request)
            if automaton is None or len(automaton) > request.num_tokens:
                automaton = automata[request] = new_automaton()
            length, tokens = automaton.draft(request.token_ids, request.num_tokens, limit, least)
            kind = bisect_right(_LENGTHS, length)
            if self.shared is not None and length < _MAX_SHARED_LENGTH:
                other = self.shared.draft(request, limit, max(least, length + 1), _MAX_SHARED_LENGTH)
                if other is not None:
                    length, tokens = other
                    kind = len(PRIORS) + bisect_right(_LENGTHS, length)
            found.append(Draft(tokens, kind=kind) if tokens else None)
        return found

    def draft_s(self, num_rows: int, num_draft: int) -> float:
        return 5e-6 * num_rows

    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        return None

    def forget(self, request: Request) -> None:
        automaton = self._automata.pop(request, None)
        if automaton is not None and self.shared is not None and request.finish_reason in ("stop", "length"):
            self.shared.add(request)

    def stats(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {"automata_bytes": sum(a.num_bytes for a in self._automata.values())}
        if self.shared is not None:
            numbers |= self.shared.stats()
        return numbers
