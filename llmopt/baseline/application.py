"""Layer 1, plain: one tokenizer call on the caller's thread, text piece by piece, no constraints."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from llmopt.errors import InvalidPromptError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmopt.batch import Batch, DraftTokens
    from llmopt.request import Request
    from llmopt.stages import LogitsMask, Message, Prompt

_ROLES = ("system", "user", "assistant", "tool", "developer")
_REPLACEMENT = "�"  # what a decoder writes for bytes that are not UTF-8
_MAX_PENDING = 3  # tokens that can belong to an unfinished character: UTF-8 takes at most 4 bytes
_MOST_WAITING = 9  # the same, with tokens between them that have no text


class BaselineTokenize:
    """Text through the tokenizer, messages through its chat template, ids as they are.

    Text is encoded by a copy of the tokenizer, made for the first text: padding and truncation are settings of the
    tokenizer object, and another thread that pads a batch with it would cut or pad the prompts of this one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._own: PreTrainedTokenizerBase | None = None
        self._lock = threading.Lock()

    def __call__(self, prompt: Prompt) -> list[int]:
        ids: list[int]
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
            if hasattr(prompt, "tolist"):  # an array or tensor of ids
                return self(prompt.tolist())
            raise InvalidPromptError(
                f"a prompt is a text, a list of messages or a list of token ids, found {type(prompt).__name__}."
            )
        elif len(prompt) and isinstance(prompt[0], Mapping):
            messages = [_checked_message(m, place) for place, m in enumerate(prompt)]
            ids = self._encode(self._render(messages), add_special_tokens=False)  # the template writes them
        else:
            wrong = [i for i in prompt if not isinstance(i, Integral) or isinstance(i, bool)]
            if wrong:
                raise InvalidPromptError(
                    f"a prompt given as a list holds messages or ints, found {type(wrong[0]).__name__}."
                )
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        if not ids:
            raise InvalidPromptError("the prompt is empty: it gives no token. Give at least one.")
        return ids

    def _render(self, messages: list[Message]) -> str:
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise InvalidPromptError("the tokenizer has no chat template. Give a text instead of messages.")
        try:
            text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except ImportError:
            raise
        except Exception as error:  # a template has rules of its own: turns that alternate, a first role, ...
            raise InvalidPromptError(f"the chat template refuses the messages: {error}") from error
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            if self._own is None:
                self._own = copy.deepcopy(self._tokenizer())
            ids: list[int] = self._own(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ModelError(
                "text was given, and the pipeline has no tokenizer. Build from a folder or hub id, pass tokenizer=..., "
                "or give token ids."
            )
        return self.tokenizer


def _checked_message(message: Any, place: int) -> Message:
    """Return a message whose content is one string.

    :raises InvalidPromptError: names the message and the field.
    """
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"messages[{place}] must be a dict, found {type(message).__name__}.")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidPromptError(f"messages[{place}].role is {role!r}; it must be one of {', '.join(_ROLES)}.")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        if any(not isinstance(t, str) for t in texts):
            raise InvalidPromptError(f"messages[{place}].content holds a part that is not text.")
        content = "".join(texts)  # type: ignore[arg-type]
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InvalidPromptError(f"messages[{place}].content must be a text, found {type(content).__name__}.")
    return {**message, "content": content}


class BaselineEncodeMedia:
    """Requests carry nothing but ids."""

    def __call__(self, request: Request) -> None:
        return None


class BaselineConstrain:
    """Every token is allowed."""

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> LogitsMask | None:
        return None


@dataclass(slots=True)
class TextState:
    """How far a request's ids have become text."""

    start: int  # ids before are forgotten; decoding from here keeps spaces right
    read: int  # ids before have become text
    window_text: str  # the text of ids[start:read]
    held: str = ""  # text that may turn out to begin a stop string


class BaselineDetokenize:
    """Decode a short window of ids per token; hold back half characters and possible stop strings.

    The window begins a few tokens before the new ones, because the text of a token can depend on the one before it.
    Work per token is constant.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> str:
        if self.tokenizer is None:
            return ""
        state = request.text_state
        if state is None:
            state = request.text_state = self._start(request)
        end = request.num_tokens
        if request.finish_reason == "stop" and isinstance(request.stop_reason, int):
            end -= 1  # the id that ended the output is not text
        new = self._advance(request, state, end, flush=request.is_finished)
        return self._cut(request, state, new)

    def _start(self, request: Request) -> TextState:
        """Begin after the prompt, with its last ids as context; half a character at its end belongs to the output."""
        read = request.num_prompt_tokens
        start = max(0, read - 2 * (_MAX_PENDING + 1))
        params = request.sampling
        for pending in range(_MAX_PENDING + 1):
            text = self._decode(request.token_ids[start : read - pending].tolist(), params.skip_special_tokens)
            if read - pending <= start or not text.endswith(_REPLACEMENT):
                return TextState(start, read - pending, text)
        text = self._decode(request.token_ids[start:read].tolist(), params.skip_special_tokens)
        return TextState(start, read, text)  # the prompt really ends in bytes that are no text

    def _advance(self, request: Request, state: TextState, end: int, flush: bool) -> str:
        """Text of the ids up to ``end`` that can no longer change."""
        if end <= state.read:
            return ""
        skip = request.sampling.skip_special_tokens
        ids = request.token_ids[state.start : end].tolist()
        text = self._decode(ids, skip)
        stop = end
        if text.endswith(_REPLACEMENT) and not flush:
            # an unfinished character, unless more tokens wait than one can have, not counting a few without text
            pending = 0
            while pending < _MAX_PENDING and end - stop < _MOST_WAITING and text.endswith(_REPLACEMENT):
                stop -= 1
                if stop <= state.read:
                    return ""
                pending += self._decode(ids[stop - state.start : stop - state.start + 1], skip) != ""
                text = self._decode(ids[: stop - state.start], skip)
        new = text[len(state.window_text) :]
        state.start = max(state.start, min(state.read, stop - 2))
        state.read = stop
        state.window_text = self._decode(request.token_ids[state.start : stop].tolist(), skip)
        return new

    def _cut(self, request: Request, state: TextState, new: str) -> str:
        """Release text that cannot become part of a stop string; end at a completed one."""
        stops = request.sampling.stop
        if not stops:
            return new
        text = state.held + new
        if request.num_output_tokens >= request.sampling.min_new_tokens:
            places = [(text.find(s), s) for s in stops if s in text]
            if places:
                place, request.stop_reason = min(places, key=lambda found: found[0])
                state.held = ""
                return text[:place]
        keep = 0 if request.is_finished else max(_overlap(text, s) for s in stops)
        state.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert self.tokenizer is not None
        with self._lock:
            text: str = self.tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` and is shorter than it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
