"""How often drafts are accepted, by their place in the draft."""

from __future__ import annotations

from collections.abc import Iterable

_MEMORY = 0.98  # what a round keeps of the weight of those before it: some fifty rounds count
_PRIOR_WEIGHT = 2.0  # rounds that a guess from the place before is worth


class Acceptance:
    """Moving windows, one per place: the chance that the token there lies on the accepted path.

    Place ``i`` is the ``i``-th token of a draft; of a tree, the node that is the ``i``-th by its chances. Places that
    no draft has reached follow from those before them, as if the ratio of two neighbours went on.

    :param prior: the chance that is assumed of a token whose predecessor was accepted, before any was seen.
    :param size: places.
    """

    def __init__(self, prior: float, size: int) -> None:
        self.prior = prior
        self._hits = [0.0] * size
        self._seen = [0.0] * size
        self._chances: list[float] | None = None
        self.num_rounds = 0

    @property
    def size(self) -> int:
        """Places that are counted."""
        return len(self._hits)

    def observe(self, num_draft: int, accepted: Iterable[int], memory: float = _MEMORY) -> None:
        """Count one draft.

        :param num_draft: its tokens.
        :param accepted: the indices of those that were accepted.
        :param memory: the share of the old weight that stays.
        """
        hits, seen = self._hits, self._seen
        for place in range(min(num_draft, len(seen))):
            hits[place] *= memory
            seen[place] = seen[place] * memory + 1.0
        for place in accepted:
            if place < len(hits):
                hits[place] += 1.0
        self.num_rounds += 1
        self._chances = None

    def chances(self) -> list[float]:
        """``[size]``, from 0 to 1, never rising: that a token at each place is accepted."""
        if self._chances is None:
            found: list[float] = []
            before, ratio = 1.0, self.prior
            for hits, seen in zip(self._hits, self._seen, strict=True):
                chance = min(before, (hits + _PRIOR_WEIGHT * before * ratio) / (seen + _PRIOR_WEIGHT))
                ratio = chance / before if before > 0.0 else 0.0
                before = chance
                found.append(chance)
            self._chances = found
        return self._chances

    def expected(self, num_draft: int) -> float:
        """Accepted tokens of a draft of so many."""
        return sum(self.chances()[:num_draft])
