"""``llmopt tune-spec``: every drafter on the user's prompts, in turns, and the fastest setting as a file.

The file is read where plugins are named: ``plugins=["@speculation.json"]``, ``--plugin @speculation.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import llmopt
from llmopt.errors import ConfigError, LlmoptError, PluginUnavailableError
from llmopt.hub import load
from llmopt.plugin_options import parse_plugin
from llmopt.plugin_search import available_plugins, make_plugin
from llmopt_plugins.speculation.training.checks import check_drafters, check_file, check_plugins
from llmopt_plugins.speculation.training.prompts import Messages, builtin_prompts, read_prompts

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline

_MIN_GAIN = 1.03  # a drafter that gains less is not worth its memory
_DRAFTERS = ("ngram", "eagle", "medusa", "draft_model")  # those that work without options are tried by themselves


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How drafters are measured."""

    num_prompts: int
    max_new_tokens: int
    batch_size: int
    rounds: int


@dataclass(slots=True)
class Candidate:
    """A drafter and what was measured with it."""

    name: str  # its text form; "off" for none
    speeds: list[float] = field(default_factory=list)  # tokens/s, one per round
    speculation: dict[str, Any] = field(default_factory=dict)  # the drafter's own numbers
    refused: str | None = None  # why it cannot run

    @property
    def speed(self) -> float:
        """Median of the rounds; 0 when it did not run."""
        return statistics.median(self.speeds) if self.speeds else 0.0


def run(
    model_name: str,
    prompts: str,
    candidates: Sequence[str] | None,
    plugins: Sequence[str],
    options: TuneOptions,
    out: Path,
    *,
    dtype: str,
    device_map: str | None,
) -> None:
    """Measure, print a table, write the file.

    :raises ConfigError: the model has no tokenizer, there are no such prompts, plugins or drafters, or the file cannot
        be written; before anything is measured.
    :raises PluginUnavailableError: no drafter can run with the model.
    """
    check_file(out, "--out")
    plugins = check_plugins(plugins, "--plugin")
    drafters = known_drafters() if candidates is None else check_drafters(candidates, "--candidate")
    found = builtin_prompts() if prompts == "builtin" else read_prompts(prompts)
    model, tokenizer = load(model_name, dtype=dtype, device_map=device_map)
    if tokenizer is None:
        raise ConfigError(f"{model_name} has no tokenizer, and prompts are text. Save one into its folder.")
    texts = (found.held_out + found.training)[: options.num_prompts]
    tried = measure(model, tokenizer, drafters, plugins, texts, options)
    best = recommend(tried)
    Console().print(_table(tried, best, options))
    write_setting(out, best, tried, plugins, options)
    print(f"{'no drafter pays' if best.name == 'off' else best.name}; written to {out}: use it as --plugin @{out}")


def known_drafters() -> list[str]:
    """Every drafter that needs no options."""
    known = {info.name for info in available_plugins()}
    return [name for name in _DRAFTERS if name in known]


def measure(
    model: Any,
    tokenizer: Any,
    candidates: Sequence[str],
    plugins: Sequence[str],
    prompts: Sequence[Messages | str],
    options: TuneOptions,
) -> list[Candidate]:
    """Tokens per second of each candidate, measured in turns so that a slow minute hits all of them.

    :param candidates: text forms.
    :raises PluginUnavailableError: none of them can run with the model; with the reason of each.
    """
    tried = [Candidate("off"), *(Candidate(text) for text in candidates)]
    pipes: dict[str, InferencePipeline] = {}
    try:
        for candidate in tried:
            names = [*plugins, *([] if candidate.name == "off" else [candidate.name])]
            try:
                made = [make_plugin(spec.name, spec.options) for spec in map(parse_plugin, names)]
                pipe = llmopt.build(model, made, tokenizer=tokenizer, memory_fraction=0.5 / len(tried))
                pipes[candidate.name] = pipe
                _tokens_per_s(pipe, prompts[:1], options)  # first use of everything
            except LlmoptError as error:
                if candidate.name == "off":
                    raise
                candidate.refused = str(error)
        if all(candidate.refused is not None for candidate in tried[1:]):
            reasons = "\n".join(f"  {candidate.name}: {candidate.refused}" for candidate in tried[1:])
            raise PluginUnavailableError(f"none of the drafters can run with this model:\n{reasons}")
        for _ in range(options.rounds):
            for candidate in tried:
                if candidate.refused is None:
                    candidate.speeds.append(_tokens_per_s(pipes[candidate.name], prompts, options))
        for candidate in tried:
            if candidate.name in pipes:
                candidate.speculation = _numbers(pipes[candidate.name])
    finally:
        for pipe in pipes.values():
            pipe.close()
    return tried


def recommend(tried: Sequence[Candidate]) -> Candidate:
    """The fastest, or "off" when none gains enough."""
    off = tried[0]
    best = max(tried, key=lambda candidate: candidate.speed)
    return best if best.speed >= _MIN_GAIN * off.speed else off


def write_setting(
    out: Path, best: Candidate, tried: Sequence[Candidate], plugins: Sequence[str], options: TuneOptions
) -> None:
    """The file: ``plugins`` to use, and what was measured."""
    off = tried[0].speed
    setting = {
        "plugins": [*plugins, *([] if best.name == "off" else [best.name])],
        "speculation": best.name,
        "measured": {
            candidate.name: {"refused": candidate.refused}
            if candidate.refused is not None
            else {
                "tokens_per_s": round(candidate.speed, 1),
                "speedup": round(candidate.speed / off, 3) if off else None,
                **candidate.speculation,
            }
            for candidate in tried
        },
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(setting, indent=2) + "\n", encoding="utf-8")


def _tokens_per_s(pipe: InferencePipeline, prompts: Sequence[Messages | str], options: TuneOptions) -> float:
    num_tokens, started = 0, time.perf_counter()
    for start in range(0, len(prompts), options.batch_size):
        part = prompts[start : start + options.batch_size]
        outputs = pipe.batch(list(part), max_new_tokens=options.max_new_tokens, progress=False)
        num_tokens += sum(len(output.token_ids) for output in outputs)
    return num_tokens / (time.perf_counter() - started)


def _numbers(pipe: InferencePipeline) -> dict[str, Any]:
    """What the drafter says of itself."""
    wanted = ("rounds", "drafted", "accepted", "tokens_per_round")
    for name, numbers in pipe.stats().items():
        if name.startswith("propose.") and isinstance(numbers, dict):
            return {key: numbers[key] for key in wanted if key in numbers}
    return {}


def _table(tried: Sequence[Candidate], best: Candidate, options: TuneOptions) -> Table:
    made = Table(title=f"{options.batch_size} request(s) at a time, {options.max_new_tokens} tokens each")
    for name in ("drafter", "tokens/s", "speed-up", "tokens per round", ""):
        made.add_column(name, justify="left" if name in ("drafter", "") else "right")
    off = tried[0].speed
    for candidate in tried:
        if candidate.refused is not None:
            made.add_row(candidate.name, "-", "-", "-", candidate.refused.split(". ")[0])
            continue
        per_round = candidate.speculation.get("tokens_per_round")
        made.add_row(
            candidate.name,
            f"{candidate.speed:.1f}",
            f"{candidate.speed / off:.2f}x",
            "" if per_round is None else f"{per_round:.2f}",
            "recommended" if candidate is best else "",
        )
    return made
