"""How the engine serves each field of `GenerationConfig` and each argument of `generate`.

The table is data: `llmopt.hf.generate` reads from it which values go to the model's own loop, documentation is
generated from it, and a test compares its names with those of the installed transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Way = Literal["native", "lockstep", "falls back", "no effect"]


@dataclass(frozen=True, slots=True)
class Served:
    """How one field or argument is served."""

    way: Way  # native: rows are independent; lockstep: rows choose together; falls back: the model's own loop
    note: str  # one line for the reader
    falls_back: Callable[[Any], bool] | None = None  # values that go to the model's own loop; None: no value does


def _is_set(value: Any) -> bool:
    return value is not None


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _native(note: str, falls_back: Callable[[Any], bool] | None = None) -> Served:
    return Served("native", note, falls_back)


def _lockstep(note: str) -> Served:
    return Served("lockstep", note)


def _falls_back(note: str, falls_back: Callable[[Any], bool] = _is_set) -> Served:
    return Served("falls back", note, falls_back)


def _no_effect(note: str) -> Served:
    return Served("no effect", note)


_ASSISTED = "only read in assisted decoding, which falls back"
_REMOVED = "removed from transformers; raises transformers' own error"
_WARPER = "with do_sample"

FIELDS: dict[str, Served] = {
    # length
    "max_length": _native("limits prompt and output together"),
    "max_new_tokens": _native("limits the output; wins over max_length"),
    "min_length": _native("end tokens are masked until prompt and output have this length"),
    "min_new_tokens": _native("end tokens are masked until the output has this length"),
    "early_stopping": _no_effect("only read in beam search, which falls back"),
    "max_time": _lockstep("checked after each step; ends all rows"),
    "stop_strings": _lockstep("needs tokenizer="),
    # strategy
    "do_sample": _lockstep("draws from torch's global generator, the same numbers as transformers"),
    "num_beams": _falls_back("above 1", _above_one),
    "use_mtp": _falls_back("True", bool),
    # cache
    "use_cache": _native("False falls back", lambda v: v is False),
    "cache_implementation": _native(
        "dynamic and static use the block pool, and a returned cache is dynamic; other values fall back",
        lambda v: v not in (None, "dynamic", "static", "hybrid"),
    ),
    "cache_config": _no_effect("only read with a quantized cache, which falls back"),
    "max_cache_len": _no_effect("the block pool is sized when the pipeline is built"),
    # logits
    "temperature": _lockstep(_WARPER),
    "top_k": _lockstep(_WARPER),
    "top_p": _lockstep(_WARPER),
    "min_p": _lockstep(_WARPER),
    "top_h": _lockstep(_WARPER),
    "typical_p": _lockstep(_WARPER),
    "epsilon_cutoff": _lockstep(_WARPER),
    "eta_cutoff": _lockstep(_WARPER),
    "repetition_penalty": _lockstep("over prompt and output; left padding is left out"),
    "encoder_repetition_penalty": _lockstep("the prompt plays the encoder's part"),
    "length_penalty": _no_effect("only read in beam search, which falls back"),
    "no_repeat_ngram_size": _lockstep("over prompt and output"),
    "bad_words_ids": _lockstep("sequences that may not appear"),
    "renormalize_logits": _lockstep("applied last"),
    "forced_bos_token_id": _lockstep("when the prompt has one token"),
    "forced_eos_token_id": _lockstep("as the last token before max_length"),
    "remove_invalid_values": _lockstep("replaces NaN and infinity; without it NaN raises NonFiniteLogitsError"),
    "exponential_decay_length_penalty": _lockstep("raises the end token's score with the length"),
    "suppress_tokens": _lockstep("tokens that may not appear"),
    "begin_suppress_tokens": _lockstep("tokens that may not come first"),
    "sequence_bias": _lockstep("adds to the score of sequences"),
    "token_healing": _falls_back("True", bool),
    "guidance_scale": _falls_back("other than 1: a second forward per step", lambda v: v is not None and v != 1),
    "watermarking_config": _lockstep("applied after all other processors"),
    # output
    "num_return_sequences": _lockstep("rows of one prompt share its prefill"),
    "output_attentions": _falls_back("True", bool),
    "output_hidden_states": _falls_back("True", bool),
    "output_scores": _lockstep("with return_dict_in_generate"),
    "output_logits": _lockstep("with return_dict_in_generate"),
    "return_dict_in_generate": _lockstep("the returned cache is a DynamicCache"),
    # special tokens
    "pad_token_id": _native("fills rows that end early"),
    "bos_token_id": _native("the prompt when none is given"),
    "eos_token_id": _native("one id or several"),
    # encoder-decoder models
    "encoder_no_repeat_ngram_size": _lockstep("the prompt plays the encoder's part"),
    "decoder_start_token_id": _no_effect("only read for encoder-decoder models, which fall back"),
    # assisted decoding
    "is_assistant": _falls_back("True: set by transformers on the assistant of an assisted call", bool),
    "num_assistant_tokens": _no_effect(_ASSISTED),
    "num_assistant_tokens_schedule": _no_effect(_ASSISTED),
    "assistant_confidence_threshold": _no_effect(_ASSISTED),
    "prompt_lookup_num_tokens": _falls_back("any number"),
    "max_matching_ngram_size": _no_effect(_ASSISTED),
    "assistant_early_exit": _falls_back("any number"),
    "assistant_lookbehind": _no_effect(_ASSISTED),
    "target_lookbehind": _no_effect(_ASSISTED),
    "assistant_ensemble_weight": _no_effect(_ASSISTED),
    "speculation_type": _falls_back("any value"),
    # performance
    "compile_config": _falls_back("any value"),
    "disable_compile": _no_effect("the engine does not compile a static cache's forward"),
    "prefill_chunk_size": _no_effect("the scheduler computes long prompts in chunks, see max_tokens_per_step"),
    "continuous_batching_config": _no_effect("read by generate_batch, not by generate"),
    # strategies that transformers moved out of its tree
    "low_memory": _no_effect("only read in contrastive search"),
    "penalty_alpha": _falls_back(_REMOVED),
    "dola_layers": _falls_back(_REMOVED),
    "diversity_penalty": _no_effect("only read in group beam search"),
    "num_beam_groups": _no_effect("only read in beam search, which falls back"),
    "constraints": _falls_back(_REMOVED),
    "force_words_ids": _falls_back(_REMOVED),
    # metadata
    "transformers_version": _no_effect("says who wrote the file"),
}

ARGUMENTS: dict[str, Served] = {
    "inputs": _native("the prompt, same as input_ids"),
    "input_ids": _native("with left padding and a mask, or without a mask as transformers infers it"),
    "attention_mask": _native("holes and right padding fall back"),
    "position_ids": _native("other than 0, 1, 2, ... per row: all rows are prefilled by one padded forward"),
    "inputs_embeds": _native("with or without input_ids; one padded forward prefills all rows"),
    "token_type_ids": _native("one padded forward prefills all rows"),
    "pixel_values": _native("and other inputs of images and sound that the model takes: one padded forward"),
    "generation_config": _native("wins over the model's own, field by field"),
    "logits_processor": _lockstep("called in each step with all rows, pads included"),
    "stopping_criteria": _lockstep("called in each step with all rows"),
    "prefix_allowed_tokens_fn": _lockstep("called per row and step"),
    "streamer": _lockstep("put in each step, end once"),
    "tokenizer": _native("for stop_strings and token_healing"),
    "synced_gpus": _falls_back("True", bool),
    "assistant_model": _falls_back("any model"),
    "assistant_tokenizer": _falls_back("any tokenizer"),
    "negative_prompt_ids": _falls_back("read with guidance_scale"),
    "negative_prompt_attention_mask": _falls_back("read with guidance_scale"),
    "custom_generate": _falls_back("a callable or a repository"),
    "cache": _falls_back("any cache; it is extended in place"),
    "past_key_values": _falls_back("the old name of cache"),
    "cache_params": _falls_back("the old name of cache"),
    "decoder_input_ids": _falls_back("encoder-decoder models"),
    "encoder_outputs": _falls_back("encoder-decoder models"),
    "trust_remote_code": _no_effect("only read with custom_generate"),
}
