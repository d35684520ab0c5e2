"""Who is compared: Hugging Face's own ``generate``, and pipelines with and without plugins.

They share one loaded model, except where a plugin loads the model in a form of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from llmopt.bench.clock import ForwardClock
from llmopt.hookspecs import hookimpl
from llmopt.loaded_model import LoadedModel
from llmopt.plugin_info import PluginInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.bench.workloads import BenchRequest
    from llmopt.pipeline import InferencePipeline


class Contender(Protocol):
    """Something that answers a batch of requests greedily."""

    name: str  # the row in the table
    promise: str  # "reference", "exact", "distribution" or "lossy": what its tokens must be

    @property
    def note(self) -> str:
        """What a reader of the figures has to know; empty when nothing."""

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """The new tokens of each request: exactly ``max_new_tokens`` of them, whatever the model's end token says."""

    def timed_forward(self, clock: ForwardClock) -> Any:
        """A context manager in which ``clock`` measures the time inside the model."""

    def close(self) -> None:
        """Give back what the contender holds."""


class SharedModel:
    """Plugin, listed last: hands out the model that is loaded already, unless a plugin before it loads its own form."""

    info = PluginInfo(
        name="shared_model", layer="hardware", promise="exact", summary="one loaded model for everybody compared"
    )

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.model, self.tokenizer = model, tokenizer

    @hookimpl
    def llmopt_load(self) -> LoadedModel:
        return LoadedModel(self.model, self.tokenizer)


class HuggingFace:
    """``model.generate`` as its users call it: one left-padded batch, as many steps as the longest output needs."""

    name = "HF generate"
    promise = "reference"
    note = ""

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self.model = model
        self.pad_token_id = pad_token_id

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """The new tokens of each request, cut to what the request wants."""
        return _generate(self.model, requests, self.pad_token_id, self.model.device)

    def timed_forward(self, clock: ForwardClock) -> Any:
        """Measures the model's forward."""
        return clock.attached(self.model)

    def close(self) -> None:
        """Nothing is held."""


class Pipeline:
    """The pipeline through the same ``generate`` call; through ``batch`` when the requests want different lengths."""

    def __init__(self, name: str, promise: str, pipe: InferencePipeline, pad_token_id: int) -> None:
        self.name = name
        self.promise = promise
        self.pipe = pipe
        self.pad_token_id = pad_token_id

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """The new tokens of each request."""
        if len({request.max_new_tokens for request in requests}) == 1:
            return _generate(self.pipe, requests, self.pad_token_id, self.pipe.model.device)
        outputs = self.pipe.batch(
            [{"prompt": request.prompt_ids, "max_new_tokens": request.max_new_tokens} for request in requests],
            temperature=0.0,
            ignore_eos=True,
            progress=False,
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [list(output.token_ids) for output in outputs]

    @property
    def note(self) -> str:
        """Why calls of ``generate`` went to the model's own loop, if any did."""
        return "; ".join(self.pipe.stats()["fall_backs"])

    @contextmanager
    def timed_forward(self, clock: ForwardClock) -> Iterator[None]:
        """Measures the model's forward; the stage ``execute`` where a plugin runs the model in its own way."""
        owners = self.pipe.registry.chains["execute"].owners if self.pipe.why_not is None else ("baseline",)
        if owners[0] == "baseline":
            with clock.attached(self.pipe.model):
                yield
            return
        execute = self.pipe.execute
        self.pipe.execute = clock.timed(execute)
        try:
            yield
        finally:
            self.pipe.execute = execute

    def close(self) -> None:
        """Close the pipeline."""
        self.pipe.close()


def _generate(
    target: Any, requests: Sequence[BenchRequest], pad_token_id: int, device: torch.device
) -> list[list[int]]:
    """One ``generate`` call on a left-padded batch."""
    width = max(len(request.prompt_ids) for request in requests)
    ids = torch.full((len(requests), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        start = width - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(request.prompt_ids)
        mask[row, start:] = 1
    output = target.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max(request.max_new_tokens for request in requests),
        do_sample=False,
        pad_token_id=pad_token_id,
    )
    rows = output[:, width:].tolist()
    return [row[: request.max_new_tokens] for row, request in zip(rows, requests, strict=True)]
