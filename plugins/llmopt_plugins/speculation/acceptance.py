"""How often drafts are accepted, by their place in the draft."""

from __future__ import annotations

from collections.abc import Iterable

_MEMORY = 0.99  # what a round keeps of the weight of those before it: some hundred rounds count
_PRIOR_WEIGHT = 3.0  # tokens that the prior is worth
_POOL_WEIGHT = 2.0  # tokens that the ratio of the places before is worth to the next one
_POOL_KEEP = 0.5  # weight of a place's tokens in what is guessed of the place after the next one, and so on


class Acceptance:
    """Moving windows, one per place: the chance that the token there lies on the accepted path.

    Place ``i`` is the ``i``-th token of a draft; of a tree, the node that is the ``i``-th by its chances. What is
    counted is the ratio of a place to the one before: of a chain, how often a token is accepted whose predecessor was.
    Ratios of neighbours are alike, so each is drawn towards those before it. Places that no draft has reached have
    nothing else; those that none has reached of late come back to it.

    :param prior: the chance that is assumed of a token whose predecessor was accepted, before any was seen.
    :param size: places.
    """

    def __init__(self, prior: float, size: int) -> None:
        self.prior = prior
        self._hits = [0.0] * size
        self._before = [0.0] * size  # hits of the place before, in drafts that had this place
        self._hits[0], self._before[0] = _PRIOR_WEIGHT * prior, _PRIOR_WEIGHT  # forgotten like all else
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
        size = len(self._hits)
        self._hits = hits = [memory * count for count in self._hits]
        self._before = before = [memory * count for count in self._before]
        before[0] += 1.0
        for place in accepted:
            if place < size:
                hits[place] += 1.0
            if place + 1 < min(num_draft, size):
                before[place + 1] += 1.0
        self.num_rounds += 1
        self._chances = None

    def chances(self) -> list[float]:
        """``[size]``, from 0 to 1, never rising: that a token at each place is accepted."""
        if self._chances is None:
            found: list[float] = []
            chance = 1.0
            pool_hits = pool_tokens = 0.0
            for hits, before in zip(self._hits, self._before, strict=True):
                weight = min(1.0, _POOL_WEIGHT / pool_tokens) if pool_tokens else 0.0
                ratio = (hits + weight * pool_hits) / (before + weight * pool_tokens)
                chance *= min(1.0, ratio)
                pool_hits, pool_tokens = _POOL_KEEP * pool_hits + hits, _POOL_KEEP * pool_tokens + before
                found.append(chance)
            self._chances = found
        return self._chances

    def expected(self, num_draft: int) -> float:
        """Accepted tokens of a draft of so many."""
        return sum(self.chances()[:num_draft])
