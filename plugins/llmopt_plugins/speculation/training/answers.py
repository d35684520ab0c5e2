"""What a drafter learns from: the target's own answers, and its hidden states while it gave them.

Both come from one run: the answers are generated through the pipeline, and a plugin keeps the residual stream of every
token as it passes. So the features are those that drafts will be made from later, whatever executor computed them.

A shard is one safetensors file with the conversations of some prompts, one after the other::

    ids    | 1 9690 ... 2 | 1 9690 ... 2 |     [N] int32, prompt and answer
    starts   0             57             118  [C+1] int64
    asked    41            38                  [C] int32, how many ids of each are the prompt
    taps   [N, num_taps, h] bf16;  last [N, h] bf16, after the final norm; zero for an id that was never fed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.speculation.training.prompts import Messages
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch, BestTokens, DraftTokens
    from llmopt.build_context import BuildContext
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import LogitsMask, Verify

_NGRAM = 4
_WINDOW, _MAX_REPEATED = 32, 20  # so many of 32 4-grams in a row that were there before are a loop
_LOOP_TOKENS = 16  # of a loop that are kept: served models run in circles too
_MIN_ANSWER = 8


class FeatureRecorder:
    """A plugin that keeps the hidden states of requests, until `take` asks for them.

    :param layers: as in `llmopt_hidden_states`; the last one is what the head of the target reads.
    """

    info = PluginInfo(
        name="feature_recorder", layer="speculation", promise="exact", summary="keeps hidden states for training"
    )

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._places: list[int] = []  # of the layers among those that all plugins asked for
        self._parts: dict[str, list[Tensor]] = {}

    @hookimpl
    def llmopt_hidden_states(self) -> Sequence[int]:
        return self.layers

    @hookimpl
    def llmopt_wrap_verify(self, verify: Verify, context: BuildContext) -> Verify:
        self._places = [context.hidden_layers.index(layer) for layer in self.layers]
        return _Recorded(verify, self._keep)

    def take(self, request_id: str) -> Tensor:
        """``[T, len(layers), h]`` bf16 of the tokens that a request fed, and forget them."""
        return torch.cat(self._parts.pop(request_id))

    def _keep(self, batch: Batch) -> None:
        assert batch.hidden is not None
        hidden = batch.hidden[:, self._places].to(device="cpu", dtype=torch.bfloat16)  # a copy: the batch is reused
        ends = batch.cu_seqlens_q.tolist()
        for row, name in enumerate(batch.request_ids):
            parts = self._parts.setdefault(name, [])
            if batch.positions[ends[row]] == 0:
                parts.clear()  # pre-empted, and computed again from its start
            parts.append(hidden[ends[row] : ends[row + 1]])


class _Recorded(Wrapping):
    """A verify that shows the batch to somebody first."""

    accepts_best = True  # nothing is done with logits here
    takes_trees = True

    def __init__(self, inner: Verify, keep: Callable[[Batch], None]) -> None:
        super().__init__(inner)
        self._keep = keep

    def __call__(
        self, batch: Batch, drafts: DraftTokens | None, logits: Tensor | BestTokens, mask: LogitsMask | None
    ) -> AcceptedTokens:
        self._keep(batch)
        accepted: AcceptedTokens = self.inner(batch, drafts, logits, mask)
        return accepted


@dataclass(slots=True)
class Conversation:
    """One prompt and its answer."""

    ids: Tensor  # [n] int64
    num_prompt: int  # how many of the ids are the prompt
    taps: Tensor  # [n, num_taps, h] bf16
    last: Tensor  # [n, h] bf16

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.num_prompt


def generate_shard(
    pipe: InferencePipeline,
    recorder: FeatureRecorder,
    prompts: Sequence[Messages | str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Conversation]:
    """Answers to some prompts. Those that run in circles are cut off there; very short ones are left out.

    :param seed: of the first prompt; the others count on.
    """
    wanted = [
        {"prompt": prompt, "request_id": f"training-{seed + number}", "temperature": temperature, "seed": seed + number}
        for number, prompt in enumerate(prompts)
    ]
    made: list[Conversation] = []
    for output in pipe.batch(wanted, max_new_tokens=max_new_tokens, progress=False):
        hidden = recorder.take(output.request_id)
        if output.error is not None:
            raise output.error  # of the model, a plugin or the memory: the next prompt would have it too
        answer = output.token_ids[: loop_start(output.token_ids) + _LOOP_TOKENS]
        if len(answer) < _MIN_ANSWER:
            continue
        ids = torch.tensor(output.prompt_ids + answer)
        rows = torch.zeros(len(ids), *hidden.shape[1:], dtype=torch.bfloat16)
        rows[: len(hidden)] = hidden[: len(ids)]
        made.append(Conversation(ids, len(output.prompt_ids), rows[:, :-1], rows[:, -1]))
    return made


def loop_start(ids: Sequence[int]) -> int:
    """Where an answer begins to run in circles; its length when it does not."""
    seen: set[tuple[int, ...]] = set()
    repeated: list[bool] = []
    for i in range(len(ids) - _NGRAM + 1):
        gram = tuple(ids[i : i + _NGRAM])
        repeated.append(gram in seen)
        seen.add(gram)
        if sum(repeated[-_WINDOW:]) >= _MAX_REPEATED:
            return max(0, i + 1 - _WINDOW) + repeated[-_WINDOW:].index(True)
    return len(ids)


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a shard; the file is there as a whole or not at all."""
    lengths = torch.tensor([0, *(len(c.ids) for c in conversations)])
    tensors = {
        "ids": torch.cat([c.ids for c in conversations]).int(),
        "starts": lengths.cumsum(0),
        "asked": torch.tensor([c.num_prompt for c in conversations], dtype=torch.int32),
        "taps": torch.cat([c.taps for c in conversations]),
        "last": torch.cat([c.last for c in conversations]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def read_shard(path: Path) -> Iterator[Conversation]:
    """The conversations of a shard; the big tensors stay in the file until they are used."""
    with safe_open(path, framework="pt") as file:
        ids, starts, asked = (file.get_tensor(name) for name in ("ids", "starts", "asked"))
        taps, last = file.get_tensor("taps"), file.get_tensor("last")
    for row, (start, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        yield Conversation(ids[start:end].long(), int(asked[row]), taps[start:end], last[start:end])


def generate(
    pipe: InferencePipeline,
    recorder: FeatureRecorder,
    prompts: Sequence[Messages | str],
    folder: Path,
    *,
    max_new_tokens: int,
    shard_size: int = 128,
    seed: int = 0,
    sampled: Collection[int] = (2, 5, 8),
    is_time_over: Callable[[], bool] = lambda: False,
    show: Callable[[int, int], None] = lambda shards, tokens: None,
) -> list[Path]:
    """All shards of a prompt list that there is time for; those that are there already are kept.

    :param sampled: of ten shards, those at temperature 0.7; the others are greedy.
    :param show: called with the number of shards and of answer tokens so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    num_tokens = 0
    for number, start in enumerate(range(0, len(prompts), shard_size)):
        path = folder / f"shard-{number:04d}.safetensors"
        if not path.is_file():
            if paths and is_time_over():
                break
            temperature = 0.7 if number % 10 in sampled else 0.0
            shard = prompts[start : start + shard_size]
            answers = generate_shard(
                pipe, recorder, shard, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + start
            )
            if not answers:
                continue
            save_shard(path, answers)
        paths.append(path)
        num_tokens += sum(c.num_answer for c in read_shard(path))
        show(len(paths), num_tokens)
    return paths
