"""The prompts that a drafter is trained and judged on: the user's file, or the built-in set."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmopt.errors import ConfigError

Messages = list[dict[str, str]]

_HELD_OUT_SHARE = 0.05  # of a user's prompts, when no file of held-out prompts is given
_MAX_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to learn from, and others to judge by; both in random order."""

    training: list[Messages | str]  # a str is given to the model as it is, without a chat template
    held_out: list[Messages | str]


def builtin_prompts(count: int = 4000, seed: int = 0) -> PromptSet:
    """The built-in chat prompts: templates and topics, the held-out ones with topics that training never sees."""
    training: list[Messages | str] = []
    held_out: list[Messages | str] = []
    for templates, topics, kept in _sections(
        files(__package__).joinpath("builtin_prompts.txt").read_text(encoding="utf-8")
    ):
        training += [_question(template, topic) for template in templates for topic in topics]
        held_out += [_question(template, topic) for template in templates for topic in kept]
    shuffled = random.Random(seed)
    shuffled.shuffle(training)
    shuffled.shuffle(held_out)
    return PromptSet(training[:count], held_out)


def read_prompts(path: str | Path, seed: int = 0) -> PromptSet:
    """The user's prompts, split at random.

    ``.jsonl``: a line is a text (given to the model as it is), a list of chat messages, or an object with ``messages``
    or ``prompt``. Any other file: each line is a question of a user, ``\\n`` stands for a line break.

    :raises ConfigError: the file cannot be read, a line is none of these, or there are fewer than 20 prompts.
    """
    path = Path(path).expanduser()
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts in {path} cannot be read: {error}.") from error
    is_json = path.suffix in (".jsonl", ".json")
    prompts = [
        _read_line(line, f"{path}:{number}") if is_json else _user(line.replace("\\n", "\n"))
        for number, line in enumerate(lines, start=1)
    ]
    if len(prompts) < 20:
        raise ConfigError(f"{path} has {len(prompts)} prompts; a drafter needs at least 20, better some thousands.")
    random.Random(seed).shuffle(prompts)
    kept = min(_MAX_HELD_OUT, max(4, round(_HELD_OUT_SHARE * len(prompts))))
    return PromptSet(prompts[kept:], prompts[:kept])


def _read_line(line: str, where: str) -> Messages | str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from error
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, str) and value:
        return value
    is_chat = (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )
    if not is_chat:
        raise ConfigError(f"{where} is neither a text nor chat messages: {line[:60]!r}.")
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in value]


def _sections(text: str) -> list[tuple[list[str], list[str], list[str]]]:
    """``(templates, topics, held-out topics)`` of each section."""
    found: list[tuple[list[str], list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("["):
            found.append(([], [], []))
        elif line.startswith("> "):
            found[-1][0].append(line[2:])
        elif line.startswith(("- ", "= ")):
            found[-1][1 if line[0] == "-" else 2].extend(topic.strip() for topic in line[2:].split(";"))
    return found


def _question(template: str, topic: str) -> Messages:
    return _user(template.replace("{}", topic))


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
