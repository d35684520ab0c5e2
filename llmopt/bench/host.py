"""The ``host`` workload: a model so small that what is measured is the code around its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmopt.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A Llama of two layers and hidden size 64 with random weights; the global random state is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(config).to(dtype).eval()
    return model


def host_batch(number: int, *, quick: bool) -> list[BenchRequest]:
    """One request of 16 random ids; most of the time goes to decode steps."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCAB_SIZE, (16,), generator=generator).tolist()
    return [BenchRequest(ids, 64 if quick else 256)]
