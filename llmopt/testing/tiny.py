"""Small seeded models and a byte tokenizer, made in memory."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from llmopt.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB_SIZE = 512
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
_NUM_SPECIAL = 3  # ids below are special tokens; id 3 + b is byte b in `tiny_tokenizer`

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large, so that greedy output is varied
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

# What a kind names differently, or has beside the common sizes.
TINY_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_inner": 128},
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    # tied embeddings, scaled by the root of the hidden size, would make the model repeat its input
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "tie_word_embeddings": False},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.3},
    "gpt_neox": {},
    "phi3": {},
}
"""Kinds that are tested, and what their configurations need beside the common sizes."""


def tiny_model(
    kind: str = "llama", seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Make a decoder-only model with random weights: 2 layers, hidden size 64, vocabulary 512, 256 positions.

    The same kind, seed and changes give the same weights. The global random state is left as it was.

    :param kind: a key of `TINY_KINDS`, or any other ``model_type`` whose configuration takes the common names.
    :param changes: fields of the configuration, for example ``num_hidden_layers=4``.
    :raises ModelError: transformers has no causal language model of this kind.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(kind, **{**_COMMON, **TINY_KINDS.get(kind, {}), **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(
            f"no tiny model of kind {kind!r} can be made ({error}). Tested kinds: {', '.join(TINY_KINDS)}."
        ) from error
    return model.to(dtype).eval()


def tiny_prompts(count: int = 3, *, seed: int = 0, min_length: int = 1, max_length: int = 24) -> list[list[int]]:
    """Prompts of random ids for a tiny model, of different lengths where the range allows. No special ids."""
    chooser = random.Random(seed)
    lengths = [min_length + (max_length - min_length) * i // max(1, count - 1) for i in range(count)]
    chooser.shuffle(lengths)
    return [[chooser.randrange(_NUM_SPECIAL, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer with one token per byte of UTF-8 and a chat template, without any file.

    Id ``3 + b`` is byte ``b``; 0, 1 and 2 are ``<pad>``, ``<bos>`` and ``<eos>``. No token is added by itself.
    Characters beyond ASCII take several tokens, which is what tests of streaming want.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    vocab |= {char: _NUM_SPECIAL + byte for byte, char in enumerate(_byte_alphabet())}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: its own where that is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
