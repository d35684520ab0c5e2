"""The ``host`` workload: a model so small that what is measured is the code around its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmopt.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_MODEL_LEN = 512


def host_model() -> PreTrainedModel:
    """A Llama of two layers and hidden size 64 with random float32 weights."""
    from llmopt.testing import tiny_model

    return tiny_model("llama", max_position_embeddings=MAX_MODEL_LEN)


def host_batch(number: int, vocab_size: int, *, quick: bool) -> list[BenchRequest]:
    """One request of 16 random ids; nearly all of its time goes to decode steps."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, vocab_size, (16,), generator=generator).tolist()  # the first three ids are special
    return [BenchRequest(ids, 64 if quick else 256)]
