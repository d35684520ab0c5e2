"""Conversations from shards, mixed and padded to batches of about equal numbers of tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmopt_plugins.speculation.training.answers import Conversation, read_shard

_SHARDS_AT_ONCE = 6  # read into memory and mixed together


@dataclass(slots=True)
class TrainingBatch:
    """Some conversations of similar length. Feature ``t`` is followed by token ``t+1`` and predicts token ``t+2``."""

    ids: Tensor  # [B, M+1] int64, 0 pads
    num_tokens: Tensor  # [B] int64, ids that are real
    num_prompt: Tensor  # [B] int64, how many of them the prompt has
    taps: Tensor  # [B, M, num_taps * h] bf16
    last: Tensor  # [B, M, h] bf16, what the target's head reads

    def asks(self, depth: int) -> Tensor:
        """``[B, M]`` bool: features whose token ``t + 2 + depth`` is one of the answer's."""
        guessed = torch.arange(self.taps.shape[1])[None] + 2 + depth
        return (guessed >= self.num_prompt[:, None]) & (guessed < self.num_tokens[:, None])

    def shifted(self, by: int) -> Tensor:
        """``[B, M]`` int64: token ``t + by`` of each feature; 0 behind the end."""
        size = self.taps.shape[1]
        rest = self.ids[:, by : by + size]
        return torch.nn.functional.pad(rest, (0, size - rest.shape[1]))


class Corpus:
    """The shards of a folder, or some of them.

    :param max_length: longer conversations are cut.
    """

    def __init__(self, paths: Sequence[Path], *, max_length: int = 512) -> None:
        self.paths = list(paths)
        self._max_length = max_length

    def count_answers(self, vocab_size: int) -> Tensor:
        """``[vocab_size]`` int64: how often each token stands in an answer."""
        counts: Counter[int] = Counter()
        for path in self.paths:
            for conversation in read_shard(path):
                counts.update(conversation.ids[conversation.num_prompt :].tolist())
        found = torch.zeros(vocab_size, dtype=torch.int64)
        found[list(counts)] = torch.tensor(list(counts.values()))
        return found

    def batches(self, tokens_per_batch: int, *, seed: int | None = None) -> Iterator[TrainingBatch]:
        """All conversations once. Similar lengths come together, so little is padding; the order is random.

        :param seed: None: as they lie in the shards.
        """
        chance = random.Random(seed)
        paths = list(self.paths)
        if seed is not None:
            chance.shuffle(paths)
        for start in range(0, len(paths), _SHARDS_AT_ONCE):
            found = [c for path in paths[start : start + _SHARDS_AT_ONCE] for c in read_shard(path)]
            found.sort(key=lambda c: len(c.ids))
            groups: list[list[Conversation]] = [[]]
            for conversation in found:
                longest = min(len(conversation.ids), self._max_length)
                if groups[-1] and longest * (len(groups[-1]) + 1) > tokens_per_batch:
                    groups.append([])
                groups[-1].append(conversation)
            if seed is not None:
                chance.shuffle(groups)
            for group in groups:
                yield self._pad(group)

    def _pad(self, group: Sequence[Conversation]) -> TrainingBatch:
        lengths = [min(len(c.ids), self._max_length) for c in group]
        size = max(lengths)
        ids = torch.zeros(len(group), size, dtype=torch.int64)
        tap_size = group[0].taps[0].numel()
        taps = torch.zeros(len(group), size - 1, tap_size, dtype=torch.bfloat16)
        last = torch.zeros(len(group), size - 1, group[0].last.shape[1], dtype=torch.bfloat16)
        for row, (conversation, length) in enumerate(zip(group, lengths, strict=True)):
            ids[row, :length] = conversation.ids[:length]
            taps[row, : length - 1] = conversation.taps[: length - 1].flatten(1)
            last[row, : length - 1] = conversation.last[: length - 1]
        return TrainingBatch(ids, torch.tensor(lengths), torch.tensor([c.num_prompt for c in group]), taps, last)
