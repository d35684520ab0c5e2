"""Workloads of the speculation layer: what drafts save, what wrong ones cost, and whether their number is well chosen.

    drafts_edit     texts to be repeated with a small change
    drafts_chat     short questions
    wrong_drafts    every draft is made wrong: what is lost after the first 100 tokens
    fixed_k         the controller against every fixed number of drafts

The drafter is ``ngram``, beside the other plugins of the command. Requests run one at a time, all contenders in turn.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llmopt.bench.workloads import WORKLOADS as TEXTS
from llmopt.errors import ModelError
from llmopt.hookspecs import hookimpl
from llmopt.plugin_info import PluginInfo

if TYPE_CHECKING:
    from llmopt.batch import Batch, DraftTokens
    from llmopt.bench.reuse import ReuseResult, Setting
    from llmopt.build_context import BuildContext
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Propose

_FIXED = (1, 2, 4, 8, 16)
_MAX_MODEL_LEN = 2048


class Spoiled:
    """A plugin that makes every draft wrong, mostly: it adds 1 to each id."""

    info = PluginInfo(name="spoiled", layer="speculation", promise="exact", summary="wrong drafts, for benchmarks")

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, context: BuildContext) -> Propose:
        assert context.capabilities is not None
        vocab_size = context.capabilities.vocab_size

        def spoil(batch: Batch) -> DraftTokens | None:
            drafts = propose(batch)
            if drafts is not None:
                real = drafts.token_ids >= 0
                drafts.token_ids[real] = (drafts.token_ids[real] + 1) % vocab_size
            return drafts

        return spoil


def _requests(setting: Setting, name: str, number: int) -> list[tuple[list[int], int]]:
    if setting.tokenizer is None:
        raise ModelError("this workload is text, and the model has no tokenizer.")
    batch = TEXTS[name].batch(setting.tokenizer, number, _MAX_MODEL_LEN, quick=setting.quick)
    return [(made.prompt_ids, made.max_new_tokens) for made in batch]


def _decode_s(pipe: InferencePipeline, ids: list[int], new: int, skip: int = 0) -> tuple[float, int]:
    """Seconds, and tokens, of one request after its first ``1 + skip`` tokens."""
    from llmopt.bench.reuse import _request

    made = _request(pipe, ids, new)
    start, before = 0.0, 0

    def on_progress(_: Any) -> None:
        nonlocal start, before
        if not start and made.num_output_tokens > skip:
            start, before = time.perf_counter(), made.num_output_tokens

    pipe.add(made, on_progress)
    pipe.wait(lambda: made.is_finished)
    return time.perf_counter() - start, made.num_output_tokens - before


def _compare(
    setting: Setting, name: str, pipes: dict[str, InferencePipeline], new: int | None = None, skip: int = 0
) -> dict[str, float]:
    """Tokens per second of each contender, prompts left out; the first round warms up and does not count."""
    spent = dict.fromkeys(pipes, 0.0)
    tokens = dict.fromkeys(pipes, 0)
    end, number = time.monotonic() + setting.seconds, 0
    while number < 3 or (time.monotonic() < end and number < 9):
        setting.on_progress(f"{name} {number}")
        order = list(pipes.items())
        for contender, pipe in order if number % 2 else reversed(order):
            for ids, length in _requests(setting, name, number):
                seconds, count = _decode_s(pipe, ids, new or length, skip)
                if number:
                    spent[contender] += seconds
                    tokens[contender] += count
        number += 1
    return {contender: tokens[contender] / spent[contender] for contender in pipes}


def _result(
    setting: Setting, name: str, title: str, rates: dict[str, float], wanted: float, base: str, of: str, text: str
) -> ReuseResult:
    from llmopt.bench.reuse import ReuseResult

    ratio = rates[of] / rates[base]
    rows: list[tuple[str, dict[str, float | str]]] = [
        (contender, {"tokens/s": round(rate, 1), f"x {base}": round(rate / rates[base], 3)})
        for contender, rate in rates.items()
    ]
    return ReuseResult(name, title, setting.judge(text, f"{ratio:.3f}", ratio >= wanted), rows)


def _drafts(setting: Setting, name: str, text: str, wanted: float) -> ReuseResult:
    pipes = {"plain": _plain(setting), "ngram": _with(setting)}
    rates = _compare(setting, text, pipes)
    title = f"{TEXTS[text].summary}, decode only"
    return _result(setting, name, title, rates, wanted, "plain", "ngram", f"ngram at least {wanted:g} times as fast")


def drafts_edit(setting: Setting) -> ReuseResult:
    """Texts to be repeated with a small change."""
    return _drafts(setting, "drafts_edit", "edit", 1.8)


def drafts_chat(setting: Setting) -> ReuseResult:
    """Short questions."""
    return _drafts(setting, "drafts_chat", "chat", 0.98)


def wrong_drafts(setting: Setting) -> ReuseResult:
    """What is lost when every draft is wrong."""
    pipes = {"plain": _plain(setting), "wrong": _with(setting, Spoiled())}
    skip, new = (20, 60) if setting.quick else (100, 300)
    rates = _compare(setting, "edit", pipes, new, skip)
    title = f"drafts that are wrong, after {skip} tokens"
    return _result(setting, "wrong_drafts", title, rates, 0.97, "plain", "wrong", "at least 0.97 times as fast")


def fixed_k(setting: Setting) -> ReuseResult:
    """The controller against every fixed number of drafts."""
    from llmopt.bench.reuse import ReuseResult

    rows: list[tuple[str, dict[str, float | str]]] = []
    pipes = {"auto": _with(setting), **{f"k={k}": _with(setting, num_draft=k) for k in _FIXED}, "off": _plain(setting)}
    worst, found = float("inf"), []
    for text in ("edit", "chat"):
        rates = _compare(setting, text, pipes)
        best = max((name for name in rates if name != "auto"), key=lambda name: rates[name])
        share = rates["auto"] / rates[best]
        worst = min(worst, share)
        found.append(f"{text}: {share:.3f} of {best}")
        rows += [(f"{text}, {name}", {"tokens/s": round(rate, 1)}) for name, rate in rates.items()]
    target = setting.judge("at least 0.97 of the best fixed number of drafts", ", ".join(found), worst >= 0.97)
    return ReuseResult("fixed_k", "drafts by the controller, and fixed numbers of them", target, rows)


def _plain(setting: Setting) -> InferencePipeline:
    return setting.build(max_model_len=_MAX_MODEL_LEN)


def _with(setting: Setting, *others: Any, **options: Any) -> InferencePipeline:
    from llmopt.plugin_search import make_plugin

    plugin = make_plugin("ngram", {**setting.plugins.get("ngram", {}), **options})
    return setting.build(plugin, *others, max_model_len=_MAX_MODEL_LEN)
