"""The suffix automaton against a search through the text, native and plain."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from llmopt import native
from llmopt_plugins.speculation.ngram.plain_automaton import PlainAutomaton

KINDS = ["plain", pytest.param("native", marks=pytest.mark.skipif(native.core() is None, reason="no compiled core"))]


def automaton(kind: str) -> Any:
    core = native.core()
    return core.SuffixAutomaton() if kind == "native" and core is not None else PlainAutomaton()


def longest_earlier(text: list[int]) -> tuple[int, int]:
    """Length of the longest suffix that occurred before, and the latest place where it ended."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix:
                return length, end
    return 0, -1


def following(text: list[int], end: int, count: int) -> list[int]:
    longer = list(text)
    for index in range(count):
        longer.append(longer[end + 1 + index])
    return longer[len(text) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alphabet", [1, 2, 3, 20, 50_000])
def test_it_finds_the_longest_earlier_suffix_and_what_followed_it_last(kind: str, alphabet: int) -> None:
    chooser = random.Random(alphabet)
    for _ in range(8):
        text: list[int] = []
        made = automaton(kind)
        for _ in range(60):
            if text and chooser.random() < 0.3:  # repeat a part
                start = chooser.randrange(len(text))
                text += text[start : start + chooser.randrange(1, 6)]
            else:
                text.append(chooser.randrange(alphabet))
            text = text[:60]
            ids = np.array(text + [0, 0], dtype=np.int64)
            length, end = longest_earlier(text)
            found, tokens = made.draft(ids, len(text), 7, 1)
            assert len(made) == len(text)
            assert found == length
            assert tokens == (following(text, end, 7) if length else [])


@pytest.mark.parametrize("kind", KINDS)
def test_matches_shorter_than_the_minimum_draft_nothing(kind: str) -> None:
    ids = np.array([1, 2, 3, 9, 2, 3], dtype=np.int64)
    assert automaton(kind).draft(ids, 6, 4, 2) == (2, [9, 2, 3, 9])
    assert automaton(kind).draft(ids, 6, 4, 3) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_another_text_is_found_by_its_longest_suffix_up_to_a_separator(kind: str) -> None:
    made = automaton(kind)
    made.extend(np.array([5, 6, 7, 8, -1, 6, 7, 9, -1], dtype=np.int64))
    assert made.draft_for(np.array([1, 5, 6, 7], dtype=np.int64), 4, 9, 2, 32) == (3, [8])
    assert made.draft_for(np.array([1, 6, 7], dtype=np.int64), 3, 9, 2, 32) == (2, [9])
    assert made.draft_for(np.array([5, 6, 7], dtype=np.int64), 3, 9, 2, 2) == (2, [9])
    assert made.draft_for(np.array([5, 6, 7, 3], dtype=np.int64), 4, 9, 1, 32) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_became_shorter_is_refused(kind: str) -> None:
    made = automaton(kind)
    ids = np.arange(4, dtype=np.int64)
    made.draft(ids, 4, 1, 1)
    with pytest.raises(IndexError):
        made.draft(ids, 3, 1, 1)
    with pytest.raises(IndexError):
        made.draft(ids, 5, 1, 1)


@pytest.mark.skipif(native.core() is None, reason="no compiled core")
@pytest.mark.parametrize("alphabet", [1, 2, 40_000])
def test_memory_is_bounded_by_the_length_of_the_text(alphabet: int) -> None:
    made = automaton("native")
    chooser = random.Random(3)
    made.extend(np.array([chooser.randrange(alphabet) for _ in range(20_000)], dtype=np.int64))
    assert made.num_bytes < 300 * 20_000
    plain = PlainAutomaton()
    plain.extend(np.array([chooser.randrange(alphabet) for _ in range(500)], dtype=np.int64))
    assert len(plain._edges) <= 1000
