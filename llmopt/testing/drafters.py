"""Drafters that test the rest of the pipeline: always right, always wrong, random, ends only, and random trees.

Whatever they draft, the output must be that of a pipeline without them::

    answers = {tuple(prompt): ids_without_drafts for ...}
    for name, drafter in adversaries(answers, vocab_size).items():
        with llmopt.build(model, [drafter]) as pipe:
            ...

One that is right most of the time shows that drafts are accepted at all: a broken verifier still writes correct text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmopt.batch import DraftTokens
from llmopt.hookspecs import hookimpl
from llmopt.plugin_info import PluginInfo

if TYPE_CHECKING:
    from llmopt.batch import Batch
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.request import Request
    from llmopt.stages import Propose

Answers = Mapping[tuple[int, ...], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafts of one request."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None = None  # as in `DraftTokens`; None: a chain


class ScriptedDrafter:
    """A plugin whose drafts come from a function. Cuts them to what is allowed.

    :param guess: is given a request and the number of drafts that it may have.
    """

    def __init__(self, guess: Callable[[Request, int], Guess], num_draft: int, name: str = "scripted_drafter") -> None:
        self.info = PluginInfo(name=name, layer="speculation", promise="exact", summary="drafts for tests")
        self.guess, self.num_draft = guess, num_draft
        self.num_drafted = 0  # tokens
        self.num_rounds = 0  # rows that had drafts

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_draft=self.num_draft)

    @hookimpl
    def llmopt_replace_propose(self, context: BuildContext) -> Propose:
        self.allows_trees = context.allows_trees
        return self.propose

    def propose(self, batch: Batch) -> DraftTokens | None:
        """The stage."""
        guesses: list[Guess] = []
        for request, num_new in zip(batch.requests, batch.num_scheduled.tolist(), strict=True):
            is_last = request.num_computed_tokens + num_new == request.num_tokens
            room = min(self.num_draft, request.max_len - request.num_tokens - 1)
            can_draft = is_last and request.lockstep is None and room > 0
            guesses.append(self._cut(self.guess(request, room), room) if can_draft else Guess(()))
        return draft_tokens(guesses)

    def _cut(self, guess: Guess, room: int) -> Guess:
        cut = Guess(list(guess.token_ids)[:room], None if guess.parents is None else list(guess.parents)[:room])
        self.num_drafted += len(cut.token_ids)
        self.num_rounds += len(cut.token_ids) > 0
        return cut


def draft_tokens(guesses: Sequence[Guess]) -> DraftTokens | None:
    """Pack the drafts of all rows of a batch; None when there are none."""
    width = max((len(guess.token_ids) for guess in guesses), default=0)
    if width == 0:
        return None
    ids = np.full((len(guesses), width), -1, dtype=np.int64)
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(guesses), 1))
    for row, guess in enumerate(guesses):
        ids[row, : len(guess.token_ids)] = guess.token_ids
        if guess.parents is not None:
            parents[row, : len(guess.parents)] = guess.parents
    has_trees = any(guess.parents is not None for guess in guesses)
    counts = np.array([len(guess.token_ids) for guess in guesses], dtype=np.int32)
    return DraftTokens(ids, counts, parents if has_trees else None)


def right(answers: Answers) -> Callable[[Request, int], Guess]:
    """Knows what comes."""
    return lambda request, room: Guess(_rest(answers, request)[:room])


def wrong(answers: Answers, vocab_size: int) -> Callable[[Request, int], Guess]:
    """Knows what comes, and says something else."""
    return lambda request, room: Guess([(t + 1) % vocab_size for t in _rest(answers, request)[:room]])


def noise(vocab_size: int, seed: int = 0) -> Callable[[Request, int], Guess]:
    """Any tokens, as many as it likes."""

    def guess(request: Request, room: int) -> Guess:
        chooser = _chooser(request, seed)
        return Guess([chooser.randrange(vocab_size) for _ in range(chooser.randint(0, room))])

    return guess


def ends(end_ids: Sequence[int]) -> Callable[[Request, int], Guess]:
    """Says that the output ends now, again and again."""
    return lambda request, room: Guess([end_ids[i % len(end_ids)] for i in range(room)])


def mostly_right(
    answers: Answers, vocab_size: int, share: float = 0.7, seed: int = 0
) -> Callable[[Request, int], Guess]:
    """A chain in which each token is right at a rate of ``share``."""

    def guess(request: Request, room: int) -> Guess:
        chooser = _chooser(request, seed)
        rest = _rest(answers, request)[:room]
        return Guess([t if chooser.random() < share else chooser.randrange(vocab_size) for t in rest])

    return guess


def trees(answers: Answers, vocab_size: int, share: float = 0.7, seed: int = 0) -> Callable[[Request, int], Guess]:
    """Trees of any shape, with what comes hidden in them.

    :param share: how often the next token of the answer is among the drafts that follow the path to it.
    """

    def guess(request: Request, room: int) -> Guess:
        chooser = _chooser(request, seed)
        rest = _rest(answers, request)
        ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        is_true: list[bool] = []  # the path to the draft is what comes
        taken: set[tuple[int, int]] = set()
        deepening = chooser.random()
        while len(ids) < room:
            parent = len(ids) - 1 if chooser.random() < deepening else chooser.randint(-1, len(ids) - 1)
            depth = depths[parent] + 1 if parent >= 0 else 0
            on_path = (parent < 0 or is_true[parent]) and depth < len(rest)
            token = rest[depth] if on_path and chooser.random() < share else chooser.randrange(vocab_size)
            while (parent, token) in taken:
                token = chooser.randrange(vocab_size)
            taken.add((parent, token))
            ids.append(token)
            parents.append(parent)
            depths.append(depth)
            is_true.append(on_path and token == rest[depth])
        return Guess(ids, parents)

    return guess


def adversaries(
    answers: Answers, vocab_size: int, num_draft: int = 5, end_ids: Iterable[int] = (2,)
) -> dict[str, ScriptedDrafter]:
    """One drafter of each kind, by name.

    :param answers: prompt -> the output without drafts.
    """
    guesses = {
        "right": right(answers),
        "wrong": wrong(answers, vocab_size),
        "noise": noise(vocab_size),
        "ends": ends(list(end_ids)),
        "mostly_right": mostly_right(answers, vocab_size),
        "trees": trees(answers, vocab_size),
        "wrong_trees": trees({}, vocab_size),
    }
    return {name: ScriptedDrafter(guess, num_draft, name) for name, guess in guesses.items()}


def _rest(answers: Answers, request: Request) -> list[int]:
    """What comes, as far as it is known."""
    return list(answers.get(tuple(request.prompt_ids), ()))[request.num_output_tokens :]


def _chooser(request: Request, seed: int) -> random.Random:
    """The same choices for the same place of the same sequence, whoever is in the batch."""
    return random.Random(f"{seed} {request.prompt_ids} {request.num_tokens}")
