"""``llmopt generate``: text from a prompt, printed as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmopt.cli.output import build_pipeline, make_plugins, print_json
from llmopt.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the command line says about one generation."""

    max_new_tokens: int
    temperature: float  # 0: greedy
    top_p: float  # 1: off
    top_k: int  # 0: off
    seed: int | None
    chat: bool | None  # None: when the tokenizer has a chat template
    system: str | None  # a system message, with chat only


def run(
    model_name: str,
    prompt: str,
    plugin_texts: Sequence[str],
    options: GenerateOptions,
    *,
    dtype: str,
    device_map: str | None,
    as_json: bool,
) -> None:
    """Load, build, stream; with ``as_json`` one object with text, times and the pipeline's numbers."""
    plugins = make_plugins(plugin_texts)
    text = sys.stdin.read() if prompt == "-" else prompt
    pipe = build_pipeline(model_name, plugins, dtype=dtype, device_map=device_map)
    try:
        spoken = as_prompt(text, options, pipe.tokenizer, model_name)
        pieces: list[str] = []
        first_s: float | None = None
        started = time.perf_counter()
        for piece in pipe.stream(
            spoken,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
        ):
            first_s = first_s or time.perf_counter() - started
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
        seconds = time.perf_counter() - started
        if as_json:
            print_json(
                {
                    "model": model_name,
                    "text": "".join(pieces),
                    "seconds": seconds,
                    "first_text_seconds": first_s,
                    "plugins": list(plugin_texts),
                    "stats": pipe.stats(),
                }
            )
        else:
            print()
    finally:
        pipe.close()


def as_prompt(
    text: str, options: GenerateOptions, tokenizer: PreTrainedTokenizerBase | None, model_name: str
) -> str | list[dict[str, Any]]:
    """The text as it is, or as chat messages.

    :raises ConfigError: a chat was asked for and cannot be had, or a system message was given without one.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if tokenizer is None:
        raise ConfigError(f"{model_name} has no tokenizer, so it cannot read a prompt. Save one into its folder.")
    if options.chat and not has_template:
        raise ConfigError(f"{model_name} has no chat template. Use --raw, or a model made for chat.")
    if not (has_template if options.chat is None else options.chat):
        if options.system is not None:
            raise ConfigError("--system needs a chat template; put the instruction into the prompt instead.")
        return text
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    return [*messages, {"role": "user", "content": text}]
