"""The suffix automaton in plain Python: the reference of ``llmopt._core.SuffixAutomaton``, and its stand-in."""

from __future__ import annotations

import numpy as np

_MAX_UPDATES = 64  # suffixes of each prefix that learn its place


class PlainAutomaton:
    """All substrings of a text that grows at its end. The interface is that of ``llmopt._core.SuffixAutomaton``."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._lengths = [0]  # of each state's longest substring
        self._links = [-1]  # the state of the longest suffix that occurs in more places
        self._ends = [-1]  # where its substrings ended last
        self._edges: list[dict[int, int]] = [{}]
        self._last = 0  # the state of the whole text
        self._match = (0, -1)  # of the longest suffix that occurred before: length, and place of its last token

    def __len__(self) -> int:
        return len(self._text)

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        return 300 * len(self._edges)

    def extend(self, tokens: np.ndarray) -> None:
        """Add tokens, ``[n]`` int64, to the end of the text. A token below 0 separates texts."""
        for token in tokens.tolist():
            self._push(token)

    def draft(self, tokens: np.ndarray, num_tokens: int, count: int, min_length: int) -> tuple[int, list[int]]:
        """Bring the text up to ``tokens[:num_tokens]``, and guess what follows.

        :param count: tokens to guess; there are fewer only before a separator.
        :param min_length: of the suffix that must have occurred before.
        :returns: the length of that suffix, and what followed its latest earlier place; ``(0, [])`` when there is none.
        :raises IndexError: the text has become shorter.
        """
        if not len(self._text) <= num_tokens <= tokens.size:
            raise IndexError("the text has become shorter, or there are not so many tokens")
        self.extend(tokens[len(self._text) : num_tokens])
        return self._follow(self._match, count, min_length)

    def draft_for(
        self, tokens: np.ndarray, num_tokens: int, count: int, min_length: int, max_length: int
    ) -> tuple[int, list[int]]:
        """Guess what follows another text, ``tokens[:num_tokens]``, of which the last ``max_length`` are looked at."""
        state = length = 0
        for token in tokens[max(0, num_tokens - max_length) : num_tokens].tolist():
            while state and token not in self._edges[state]:
                state = self._links[state]
                length = self._lengths[state]
            if token in self._edges[state]:
                state = self._edges[state][token]
                length += 1
        return self._follow((length, self._ends[state] if length else -1), count, min_length)

    def _follow(self, match: tuple[int, int], count: int, min_length: int) -> tuple[int, list[int]]:
        length, end = match
        if length < min_length:
            return 0, []
        found: list[int] = []
        period = len(self._text) - 1 - end
        if length <= 0 or period <= 0:
            return length, found
        for index in range(count):
            token = self._text[end + 1 + index] if index < period else found[index - period]
            if token < 0:
                break
            found.append(token)
        return length, found

    def _push(self, token: int) -> None:
        lengths, links, ends, edges = self._lengths, self._links, self._ends, self._edges
        place = len(self._text)
        self._text.append(token)
        current = self._add(place + 1, 0, place, {})
        state = self._last
        while state >= 0 and token not in edges[state]:
            edges[state][token] = current
            state = links[state]
        if state >= 0:
            target = edges[state][token]
            if lengths[target] == lengths[state] + 1:
                links[current] = target
            else:
                clone = self._add(lengths[state] + 1, links[target], ends[target], dict(edges[target]))
                while state >= 0 and edges[state].get(token) == target:
                    edges[state][token] = clone
                    state = links[state]
                links[target] = links[current] = clone
        self._last = current
        suffix = links[current]
        self._match = (lengths[suffix], ends[suffix])
        for _ in range(_MAX_UPDATES):
            if suffix <= 0:
                break
            ends[suffix] = place
            suffix = links[suffix]

    def _add(self, length: int, link: int, end: int, edges: dict[int, int]) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._ends.append(end)
        self._edges.append(edges)
        return len(self._lengths) - 1
