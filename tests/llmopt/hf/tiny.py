"""Tiny seeded models with varied output, a character tokenizer, and the comparison of a call with `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Cache,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import llmopt

VOCAB = 128
PAD, BOS, EOS = 0, 1, 2
MERGES = [("t", "h"), ("h", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("th", "e"), ("o", "n"), ("x", "y"), ("s", "t")]


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """Two layers, grouped heads; large weights, so that greedy output does not repeat itself."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def tiny_gpt2(seed: int = 0, **changes: Any) -> Any:
    """Two layers, learned positions."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes})).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character and a few longer ones; `VOCAB` in all."""
    tokens = ["<pad>", "<s>", "</s>", *map(chr, range(32, 127)), *("".join(pair) for pair in MERGES)]
    tokens += [f"{i}q" for i in range(len(tokens), VOCAB)]  # text never gives these, models do
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def prompts(rows: int = 3, width: int = 7, seed: int = 0) -> Tensor:
    """Random ids ``[rows, width]`` without special tokens."""
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: int = 3, width: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Ids and mask; row ``r`` has ``2 * r`` pads, so the first row is full."""
    ids = prompts(rows, width, seed)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@dataclass(slots=True)
class Outcome:
    """What a call of `generate` did."""

    value: Any  # what it returned
    error: BaseException | None  # or raised
    rng_state: Tensor  # of torch's global generator afterwards


def outcome(call: Callable[[], Any], seed: int = 0) -> Outcome:
    """Run a call from a seeded generator."""
    torch.manual_seed(seed)
    try:
        value, error = call(), None
    except Exception as caught:
        value, error = None, caught
    return Outcome(value, error, torch.get_rng_state())


class Pair:
    """A model and its pipeline. A call with the same arguments goes through both and must do the same."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.pipe = llmopt.build(model, block_size=4, **options)
        assert self.pipe.why_not is None

    def same(self, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, str]:
        """Call both with the same arguments; return the pipeline's result and how it was served."""
        return self.same_from(lambda: (args, kwargs), seed)

    def same_from(self, make: Callable[[], tuple[Any, Any]], seed: int = 0) -> tuple[Any, str]:
        """As `same`, for arguments that a call uses up: ``make()`` returns fresh ones, ``(args, kwargs)``."""
        args, kwargs = make()
        expected = outcome(lambda: GenerationMixin.generate(self.model, *args, **kwargs), seed)
        args, kwargs = make()
        actual, way = self.serve(*args, seed=seed, **kwargs)
        assert_same_outcome(expected, actual)
        return actual.value if actual.error is None else actual.error, way

    def serve(self, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[Outcome, str]:
        """Call the pipeline; return the outcome and ``"native"``, ``"lockstep"``, the fall-back's reason or ``""``."""
        before = self.pipe.stats()
        result = outcome(lambda: self.pipe.generate(*args, **kwargs), seed)
        after = self.pipe.stats()
        ways = [
            way
            for counts in ("generate_calls", "fall_backs")
            for way, count in after[counts].items()
            if count > before[counts].get(way, 0)
        ]
        assert len(ways) <= 1
        assert after["num_blocks_used"] == 0
        assert not len(self.pipe.queue)
        self.pipe.block_pool.check()
        return result, ways[0] if ways else ""


def assert_same_outcome(expected: Outcome, actual: Outcome) -> None:
    """Same result, or same error with the same words; same random numbers used."""
    if expected.error is not None or actual.error is not None:
        assert (type(actual.error), str(actual.error)) == (type(expected.error), str(expected.error))
        return
    assert_same(expected.value, actual.value)
    assert torch.equal(expected.rng_state, actual.rng_state)


def assert_same(expected: Any, actual: Any) -> None:
    """Integers are equal, floats close; containers have the same type and length."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
        if expected.is_floating_point():
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3, equal_nan=True)
        else:
            assert torch.equal(actual, expected)
    elif isinstance(expected, Cache):
        assert isinstance(actual, Cache)
        assert actual.get_seq_length() == expected.get_seq_length()
    elif isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert list(actual) == list(expected)
        for name in expected:
            assert_same(expected[name], actual[name])
    elif isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(expected, actual, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected
