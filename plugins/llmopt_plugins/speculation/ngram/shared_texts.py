"""Outputs of earlier requests, kept for each tenant apart, so that they can be guessed again."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmopt.request import Request

_SEPARATOR = np.array([-1], dtype=np.int64)


@dataclass(slots=True)
class _Shelf:
    """The texts of one tenant."""

    automaton: Any
    texts: deque[np.ndarray] = field(default_factory=deque)  # oldest first
    num_tokens: int = 0  # of all texts, separators included


class SharedTexts:
    """What a tenant's requests have answered, as far as it fits.

    Texts are shared between requests that have tenant, adapter and ``cache_salt`` in common. When a tenant's texts
    exceed their share, the older half goes; when there are too many tenants, the one that was idle longest.

    :param max_tokens: for each tenant.
    :param max_tenants: that are kept.
    :param new_automaton: makes an empty one.
    """

    def __init__(self, max_tokens: int, max_tenants: int, new_automaton: Callable[[], Any]) -> None:
        self.max_tokens, self.max_tenants, self._new = max_tokens, max_tenants, new_automaton
        self._shelves: OrderedDict[tuple[str | None, ...], _Shelf] = OrderedDict()  # idle longest first
        self.num_evicted = 0  # texts

    def draft(self, request: Request, limit: int, min_length: int, max_length: int) -> tuple[int, list[int]] | None:
        """What followed the last tokens of a request in another output: how many of them agree, and the guess."""
        shelf = self._shelves.get(_key_of(request))
        if shelf is None:
            return None
        length, tokens = shelf.automaton.draft_for(request.token_ids, request.num_tokens, limit, min_length, max_length)
        return (length, tokens) if tokens else None

    def add(self, request: Request) -> None:
        """Keep the output of a request that has finished."""
        text = request.token_ids[request.num_prompt_tokens : request.num_tokens][-self.max_tokens + 1 :].copy()
        if not text.size:
            return
        key = _key_of(request)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(self._new())
        self._shelves.move_to_end(key)
        self._put(shelf, text)
        if shelf.num_tokens > self.max_tokens:
            texts = shelf.texts
            shelf.automaton, shelf.texts, shelf.num_tokens = self._new(), deque(), 0
            left = sum(text.size + 1 for text in texts)
            while len(texts) > 1 and left > self.max_tokens // 2:
                left -= texts.popleft().size + 1
                self.num_evicted += 1
            for kept in texts:
                self._put(shelf, kept)
        while len(self._shelves) > self.max_tenants:
            self.num_evicted += len(self._shelves.popitem(last=False)[1].texts)

    @staticmethod
    def _put(shelf: _Shelf, text: np.ndarray) -> None:
        shelf.automaton.extend(text)
        shelf.automaton.extend(_SEPARATOR)
        shelf.texts.append(text)
        shelf.num_tokens += text.size + 1

    def stats(self) -> dict[str, int]:
        """Sizes, over all tenants."""
        shelves = self._shelves.values()
        return {
            "shared_tenants": len(shelves),
            "shared_texts": sum(len(shelf.texts) for shelf in shelves),
            "shared_tokens": sum(shelf.num_tokens for shelf in shelves),
            "shared_bytes": sum(shelf.automaton.num_bytes + 8 * shelf.num_tokens for shelf in shelves),
            "shared_evicted": self.num_evicted,
        }


def _key_of(request: Request) -> tuple[str | None, ...]:
    return request.tenant, request.adapter, request.cache_salt
