"""How often drafts are accepted, by their place in the draft."""

from __future__ import annotations

from collections.abc import Iterable

_MEMORY = 0.99  # what a round keeps of the weight of those before it: some hundred rounds count
_PRIOR_WEIGHT = 3.0  # tokens that the prior is worth
_POOL_WEIGHT = 2.0  # tokens that the ratio of the places before is worth to the next one
_POOL_KEEP = 0.5  # weight of a place's tokens in what is guessed of the place after the next one, and so on
_LEAST_ASKED = 0.5  # drafts from which on a place speaks for itself


class Acceptance:
    """Moving windows, one per place: the chance that a token is made there, and that it lies on the accepted path.

    A drafter that is asked for so many tokens may make fewer, and those that it is sure of. So chances are those of
    places that it was asked for, made or not: they say what asking brings, and `made` what that costs.

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
        self._asked = [0.0] * size
        self._made = [0.0] * size
        self._is_choosy = False  # it has made fewer than it was asked for
        self._chances: list[float] | None = None
        self.num_rounds = 0

    @property
    def size(self) -> int:
        """Places that are counted."""
        return len(self._hits)

    def observe(
        self, num_asked: int, accepted: Iterable[int], memory: float = _MEMORY, *, num_made: int | None = None
    ) -> None:
        """Count one draft.

        :param num_asked: tokens that the drafter was asked for.
        :param accepted: the indices of those that were accepted.
        :param memory: the share of the old weight that stays.
        :param num_made: its tokens; None: as many as it was asked for.
        """
        size = len(self._hits)
        num_asked = min(num_asked, size)
        self._hits = hits = [memory * count for count in self._hits]
        self._before = before = [memory * count for count in self._before]
        before[0] += 1.0
        for place in accepted:
            if place < size:
                hits[place] += 1.0
            if place + 1 < num_asked:
                before[place + 1] += 1.0
        num_made = num_asked if num_made is None else min(num_made, num_asked)
        if num_made < num_asked or self._is_choosy:
            self._is_choosy = True
            self._asked = [memory * n + (place < num_asked) for place, n in enumerate(self._asked)]
            self._made = [memory * n + (place < num_made) for place, n in enumerate(self._made)]
        self.num_rounds += 1
        self._chances = None

    def made(self) -> list[float]:
        """``[size]``, from 0 to 1: the chance that a token is made at a place that is asked for."""
        found: list[float] = []
        share = 1.0  # of places that nobody asked for yet: what is known of the one before
        for made, asked in zip(self._made, self._asked, strict=True):
            if asked >= _LEAST_ASKED:
                share = made / asked
            found.append(share)
        return found

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
