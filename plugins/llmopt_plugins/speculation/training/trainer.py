"""The training loop: within a time budget, with checkpoints that a later run goes on from."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from llmopt.errors import ConfigError
from llmopt_plugins.speculation.training.corpus import Corpus, TrainingBatch

Head = TypeVar("Head", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is trained."""

    budget_s: float  # of training alone; the learning rate falls towards its end
    depth: int = 3  # levels of the training-time test; heads of Medusa
    max_epochs: int = 20  # passes over the corpus at most
    learning_rate: float = 2e-3
    tokens_per_batch: int = 1024  # small: with little text, more steps teach more than steadier ones
    level_decay: float = 0.8  # weight of each level's loss relative to the one before
    weight_decay: float = 0.01
    clip: float = 0.5  # largest norm of a gradient
    warm_up: float = 0.02  # share of the budget
    average: float = 0.995  # of the weights from step to step; the mean is what is exported
    checkpoint_s: float = 180.0  # time between checkpoints


@dataclass(slots=True)
class Progress:
    """How far training is."""

    step: int = 0
    epoch: int = 0
    seconds: float = 0.0  # of training, over all runs
    loss: float = math.nan  # moving means of the last batches
    first_right: float = math.nan  # how often level 0 was right


class Trainer(Generic[Head]):
    """Trains one drafter on a corpus.

    :param head: float32, changed in place; its frozen parameters stay as they are.
    :param loss: of a batch: what is to become small, and how often the first guess was right.
    :param checkpoint: where the state is kept, and read from when it is there.
    """

    def __init__(
        self, head: Head, loss: Callable[[Head, TrainingBatch], tuple[Tensor, float]], recipe: Recipe, checkpoint: Path
    ) -> None:
        self.head = head
        self.mean = copy.deepcopy(head)
        self.recipe = recipe
        self.progress = Progress()
        self.history: list[float] = []  # the moving mean of the loss, once per 5 steps
        self._loss = loss
        self._checkpoint = checkpoint
        self._learning = [p for p in head.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._learning, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        if checkpoint.is_file():
            self._load()

    def run(self, corpus: Callable[[], Corpus], show: Callable[[Progress], None] = lambda progress: None) -> Progress:
        """Train until the budget or the epochs are used up. The mean of the weights is in `mean`.

        :param corpus: asked at the start of each epoch, so that it may grow.
        """
        recipe, progress = self.recipe, self.progress
        saved = time.monotonic()
        while progress.epoch < recipe.max_epochs and progress.seconds < recipe.budget_s:
            for batch in corpus().batches(recipe.tokens_per_batch, seed=progress.epoch):
                started = time.monotonic()
                self._step(batch)
                progress.seconds += time.monotonic() - started
                show(progress)
                if progress.seconds >= recipe.budget_s:
                    break
                if time.monotonic() - saved >= recipe.checkpoint_s:
                    self.save()
                    saved = time.monotonic()
            progress.epoch += 1
        self.save()
        return progress

    def _step(self, batch: TrainingBatch) -> None:
        recipe, progress = self.recipe, self.progress
        if not bool(batch.asks(0).any()):
            return
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * self._rate()
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = self._loss(self.head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._learning, recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        keep = min(recipe.average, (1 + progress.step) / (10 + progress.step))
        with torch.no_grad():
            for mean, value in zip(self.mean.parameters(), self.head.parameters(), strict=True):
                if value.requires_grad:
                    mean.lerp_(value, 1 - keep)
        fresh = 1.0 if progress.step == 0 else 0.05
        progress.step += 1
        progress.loss = _blend(progress.loss, float(loss.detach()), fresh)
        progress.first_right = _blend(progress.first_right, right, fresh)
        if progress.step % 5 == 0:
            self.history.append(progress.loss)

    def _rate(self) -> float:
        """Share of the learning rate: up in a line, then down along a cosine to a twentieth."""
        done = self._done()
        if done < self.recipe.warm_up:
            return max(0.05, done / self.recipe.warm_up)
        rest = (done - self.recipe.warm_up) / (1 - self.recipe.warm_up)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))

    def _done(self) -> float:
        """How much of the run is over: by time, or by epochs when they end first."""
        return max(self.progress.seconds / self.recipe.budget_s, self.progress.epoch / self.recipe.max_epochs)

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the whole state; a run that is cut short afterwards goes on from here."""
        partial = self._checkpoint.with_suffix(".partial")
        state = {
            "head": self.head.state_dict(),
            "mean": self.mean.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
            "history": self.history,
        }
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _load(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.mean.load_state_dict(state["mean"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, ValueError, EOFError) as error:
            raise ConfigError(
                f"{self._checkpoint} is of another head or damaged: {error} Remove it, or choose another --work-folder."
            ) from error
        self.progress = Progress(**state["progress"])
        self.history = state["history"]


def _blend(old: float, new: float, share: float) -> float:
    return new if math.isnan(old) else old + share * (new - old)
