"""A causal language model that says what it is told, through the real engine.

Its only attention layer gives every query the mean of the values behind it. Value ``s`` of a token says whether the
token is what script ``s`` has in its prompt at this position, so the sum counts how much of the prompt was seen. When
that is all of it, the position says which output token comes next::

    script 0: prompt 7 8 9, output 4 5        tokens   7  8  9  4  x  ...
                                              value 0  1  1  1  0  0       0 after the prompt, whatever stands there
                                              count 0  1  2  3  3  3
                                              next     -  -  4  5  eos

The count comes out of keys and values in the cache, so a wrong block, mask or position shows as wrong text. Output
tokens are not compared: a token that a sampler or a grammar chose instead does not derail the script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from llmopt.errors import ModelError
from llmopt.testing.tiny import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORCED = 30.0  # logit of the token to say; all others have 0
_HEAD_DIM = 16  # value dimensions come in steps of this


class ScriptedConfig(PreTrainedConfig):
    """Sizes and scripts of a `ScriptedModel`."""

    model_type = "llmopt_scripted"

    vocab_size: int = VOCAB_SIZE
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    max_position_embeddings: int = 1024
    prompts: list[list[int]] | None = None  # per script
    outputs: list[list[int]] | None = None  # per script; after the last token comes the end-of-sequence id


class ScriptedModel(PreTrainedModel, GenerationMixin):
    """See `scripted_model`, which makes one."""

    config_class = ScriptedConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_attention_backend = True

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, 1)  # never read; generate asks where and how large it is
        self.attention = _MatchCounter(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return forced logits ``[B, T, vocab]``; the signature is that of other models."""
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
        position_ids = position_ids.expand_as(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=self.embed_tokens.weight.new_empty((*input_ids.shape, 1)),
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        counts = self.attention(input_ids, position_ids, mask, cache, **kwargs)  # [B, T, num_scripts]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        tokens = self.attention.next_tokens(counts, position_ids)[:, keep]
        logits = nn.functional.one_hot(tokens, self.config.vocab_size).to(self.dtype) * _FORCED
        return CausalLMOutputWithPast(logits=logits, cache=cache)


class _MatchCounter(nn.Module):
    """Counts, for every position and script, the prompt tokens seen so far."""

    layer_idx = 0
    num_key_value_groups = 1
    is_causal = True

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__()
        self.config = config
        self.prompts = config.prompts or [[BOS_ID]]
        self.outputs = config.outputs or [[]]
        self.value_dim = -(-len(self.prompts) // _HEAD_DIM) * _HEAD_DIM
        # longest first: of the scripts that match, the longest prompt speaks
        self.order = sorted(range(len(self.prompts)), key=lambda s: -len(self.prompts[s]))

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Any, cache: Any, **kwargs: Any) -> Tensor:
        value = self._values(input_ids, position_ids)[:, None]  # [B, 1, T, value_dim]
        key, query = torch.zeros_like(value), torch.zeros_like(value)  # all scores equal: attention is the mean
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=1.0, **kwargs)  # [B, T, 1, value_dim]
        sums: Tensor = out[:, :, 0].float() * (position_ids + 1)[..., None]
        return sums.round().long()

    def _values(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        value = torch.zeros((*input_ids.shape, self.value_dim), device=input_ids.device)
        for script, prompt in enumerate(self.prompts):
            ids = torch.tensor(prompt, device=input_ids.device)
            inside = position_ids < len(prompt)
            value[..., script] = inside & (ids[position_ids.clamp(0, len(prompt) - 1)] == input_ids)
        return value

    def next_tokens(self, counts: Tensor, position_ids: Tensor) -> Tensor:
        """The token that each position forces, ``[B, T]``; end of sequence where no script matches."""
        tokens = torch.full_like(position_ids, EOS_ID)
        undecided = torch.ones_like(position_ids, dtype=torch.bool)
        for script in self.order:
            length, output = len(self.prompts[script]), self.outputs[script]
            step = position_ids - (length - 1)
            here = undecided & (counts[..., script] == length) & (step >= 0)
            ids = torch.tensor([*output, EOS_ID], device=position_ids.device)
            tokens = torch.where(here, ids[step.clamp(0, len(output))], tokens)
            undecided &= ~here
        return tokens


def scripted_model(
    scripts: Iterable[tuple[str | Sequence[int], str | Sequence[int]]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    vocab_size: int | None = None,
    max_position_embeddings: int = 1024,
) -> ScriptedModel:
    """Make a model that answers each prompt with a fixed output, token by token, and then ends the sequence.

    It runs through the engine like any other model: packed batches, blocks, masks and positions must be right for the
    text to come out. Prompts without a script end at once. Computes in float32.

    :param scripts: ``(prompt, output)`` pairs. Ids are taken as they are; texts go through ``tokenizer``.
    :param vocab_size: the tokenizer's, and at least 512, when it is not given.
    :raises ModelError: a text without a tokenizer, or an empty prompt.
    """

    def ids(given: str | Sequence[int]) -> list[int]:
        if not isinstance(given, str):
            return [int(i) for i in given]
        if tokenizer is None:
            raise ModelError(f"the script {given!r} is a text. Pass a tokenizer, for example tiny_tokenizer(), or ids.")
        return list(tokenizer(given, add_special_tokens=False)["input_ids"])

    pairs = [(ids(prompt), ids(output)) for prompt, output in scripts]
    if any(not prompt for prompt, _ in pairs):
        raise ModelError("a script has an empty prompt; the engine computes at least one token. Give it one.")
    config = ScriptedConfig(
        vocab_size=vocab_size or max(VOCAB_SIZE, len(tokenizer) if tokenizer is not None else 0),
        max_position_embeddings=max_position_embeddings,
        prompts=[prompt for prompt, _ in pairs],
        outputs=[output for _, output in pairs],
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = ScriptedModel(config)
    model.eval()
    return model
