"""Workloads of the speculation layer: what drafts save, what wrong ones cost, and whether their number is well chosen.

    drafts_edit     texts to be repeated with a small change, with ``ngram``
    drafts_chat     short questions, with ``ngram``
    head1, 8, 32    short questions with the head of ``eagle``, so many at a time
    head_tokens     tokens per round of the same head with trees
    wrong_drafts    every draft is made wrong: what is lost after the first 100 tokens
    fixed_k         the controller against every fixed number of drafts
    draft_host      what a round costs beside its forwards

The drafters stand beside the other plugins of the command. All contenders take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
_TREES = ((2, 4, 4), (4, 4, 4), (8, 4, 4), (12, 4, 4), (16, 5, 6), (24, 6, 8))  # tokens, depth, width
_TREE_QUESTIONS = 24
_HOST_DRAFTS = 8
_MAX_MODEL_LEN = 2048
_MOST_ROUNDS = 40
_WAVES = 3  # requests of a full batch's round, in batches


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


def _batches(setting: Setting, name: str, number: int, size: int) -> list[list[tuple[list[int], int]]]:
    """The texts of a round, ``size`` at a time."""
    found: list[tuple[list[int], int]] = []
    while len(found) < size:
        found += _requests(setting, name, number + 1000 * len(found))
    return [found[start : start + size] for start in range(0, len(found) - size + 1, size)]


def _decode_s(
    pipe: InferencePipeline, prompts: list[tuple[list[int], int]], skip: int = 0, *, may_end: bool = False
) -> tuple[float, int]:
    """Seconds, and tokens, of some requests once each of them has its first ``1 + skip`` tokens.

    :param may_end: answers end where the model ends them; else they go on, with text that no training has seen.
    """
    from llmopt.bench.reuse import _request

    made = [_request(pipe, ids, new, ignore_eos=not may_end) for ids, new in prompts]
    start, before = 0.0, 0

    def on_progress(_: Any) -> None:
        nonlocal start, before
        if not start and all(one.num_output_tokens > skip or one.is_finished for one in made):
            start, before = time.perf_counter(), sum(one.num_output_tokens for one in made)

    for one in made:
        pipe.add(one, on_progress)
    pipe.wait(lambda: all(one.is_finished for one in made))
    return time.perf_counter() - start, sum(one.num_output_tokens for one in made) - before


def _full_batch_s(pipe: InferencePipeline, prompts: list[tuple[list[int], int]], size: int) -> tuple[float, int]:
    """Seconds, and tokens, while ``size`` requests run: as one ends the next begins.

    From the first token of all of the first ones until fewer are left. What comes after says how much longer one answer
    is than the others, and not how fast a batch of this size is.

    :param pipe: runs ``size`` requests at a time.
    """
    from llmopt.bench.reuse import _request

    made = [_request(pipe, ids, new, ignore_eos=False) for ids, new in prompts]
    start, before, end, after = 0.0, 0, 0.0, 0

    def on_progress(_: Any) -> None:
        nonlocal start, before, end, after
        if not start and all(one.num_output_tokens or one.is_finished for one in made[:size]):
            start, before = time.perf_counter(), sum(one.num_output_tokens for one in made)
        if not end and sum(not one.is_finished for one in made) < size:
            end, after = time.perf_counter(), sum(one.num_output_tokens for one in made)

    for one in made:
        pipe.add(one, on_progress)
    pipe.wait(lambda: all(one.is_finished for one in made))
    return end - start, after - before


def _compare(
    setting: Setting,
    name: str,
    pipes: dict[str, InferencePipeline],
    new: int | None = None,
    skip: int = 0,
    run: Callable[[InferencePipeline, list[tuple[list[int], int]]], tuple[float, int]] | None = None,
    batch: int = 1,
) -> dict[str, float]:
    """Tokens per second of each contender, prompts left out; the first round warms up and does not count.

    :param run: seconds and tokens of ``batch`` prompts; None: `_decode_s` of each by itself.
    """
    spent = dict.fromkeys(pipes, 0.0)
    tokens = dict.fromkeys(pipes, 0)
    end, number = time.monotonic() + setting.seconds, 0
    while number < 3 or (time.monotonic() < end and number < _MOST_ROUNDS):
        setting.on_progress(f"{name} {number}")
        order = list(pipes.items())
        for contender, pipe in order if number % 2 else reversed(order):
            for prompts in _batches(setting, name, number, batch):
                prompts = [(ids, new or length) for ids, length in prompts]
                seconds, count = run(pipe, prompts) if run is not None else _decode_s(pipe, prompts, skip)
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
    return ReuseResult(name, title, setting.judge(text, f"{ratio:.3f}", ratio >= wanted), _rows(rates, base))


def _drafts(setting: Setting, name: str, text: str, wanted: float) -> ReuseResult:
    pipes = {"plain": _plain(setting), "ngram": _with(setting, "ngram")}
    rates = _compare(setting, text, pipes)
    title = f"{TEXTS[text].summary}, decode only"
    return _result(setting, name, title, rates, wanted, "plain", "ngram", f"ngram at least {wanted:g} times as fast")


def drafts_edit(setting: Setting) -> ReuseResult:
    """Texts to be repeated with a small change."""
    return _drafts(setting, "drafts_edit", "edit", 1.8)


def drafts_chat(setting: Setting) -> ReuseResult:
    """Short questions."""
    return _drafts(setting, "drafts_chat", "chat", 0.98)


def _head(setting: Setting, size: int, wanted: float) -> ReuseResult:
    if size == 1:
        pipes = {"plain": _plain(setting), "eagle": _with(setting, "eagle")}
        rates = _compare(setting, "chat", pipes, run=lambda pipe, prompts: _decode_s(pipe, prompts, may_end=True))
        title = f"{TEXTS['chat'].summary}, decode only"
    else:
        pipes = {"plain": _plain(setting, max_num_requests=size)}
        pipes["eagle"] = _with(setting, "eagle", config={"max_num_requests": size})
        rates = _compare(
            setting, "chat", pipes, run=lambda pipe, prompts: _full_batch_s(pipe, prompts, size), batch=_WAVES * size
        )
        title = f"{TEXTS['chat'].summary}, {size} at a time: as one ends the next begins"
    text = f"eagle at least {wanted:g} times as fast"
    return _result(setting, f"head{size}", title, rates, wanted, "plain", "eagle", text)


def head1(setting: Setting) -> ReuseResult:
    """A head, one request at a time."""
    return _head(setting, 1, 1.3)


def head8(setting: Setting) -> ReuseResult:
    """A head, eight requests at a time."""
    return _head(setting, 8, 1.1)


def head32(setting: Setting) -> ReuseResult:
    """A head, 32 requests at a time."""
    return _head(setting, 32, 0.98)


def head_tokens(setting: Setting) -> ReuseResult:
    """Tokens per round of a head, by the size of its trees."""
    from llmopt.bench.reuse import ReuseResult

    rows: list[tuple[str, dict[str, float | str]]] = []
    best = 0.0
    for count, depth, width in _TREES:
        pipe = _with(setting, "eagle", num_draft=count, depth=depth, width=width, fixed=count)
        for number in range(1 if setting.quick else _TREE_QUESTIONS):
            setting.on_progress(f"trees of {count} {number}")
            for prompts in _batches(setting, "chat", number, 1):
                _decode_s(pipe, prompts, may_end=True)
        found = pipe.stats()["propose.eagle"]["tokens_per_round"]
        best = max(best, found)
        title = f"trees of {count}, {depth} deep, {width} wide"
        rows.append((title, {"tokens per round": round(found, 2)}))
    target = setting.judge("at least 1.9 tokens per round with a tree", f"{best:.2f}", best >= 1.9, at_any_size=True)
    return ReuseResult("head_tokens", f"{TEXTS['chat'].summary}: tokens per round", target, rows)


def wrong_drafts(setting: Setting) -> ReuseResult:
    """What is lost when every draft is wrong, with each drafter that needs nothing of its own."""
    from llmopt.bench.reuse import ReuseResult

    pipes = {"plain": _plain(setting), **{name: _with(setting, name, Spoiled()) for name in _drafters(setting)}}
    skip, new = (20, 60) if setting.quick else (100, 300)
    rates = _compare(setting, "edit", pipes, new, skip)
    worst = min((name for name in rates if name != "plain"), key=rates.__getitem__)
    share = rates[worst] / rates["plain"]
    target = setting.judge("at least 0.97 times as fast", f"{share:.3f} with {worst}", share >= 0.97)
    return ReuseResult("wrong_drafts", f"drafts that are wrong, after {skip} tokens", target, _rows(rates, "plain"))


def fixed_k(setting: Setting) -> ReuseResult:
    """The controller against every fixed number of drafts."""
    from llmopt.bench.reuse import ReuseResult

    rows: list[tuple[str, dict[str, float | str]]] = []
    worst, found = float("inf"), []
    for drafter, text in (("ngram", "edit"), ("ngram", "chat"), *[("eagle", "chat")] * ("eagle" in _drafters(setting))):
        always = {"ngram": ("num_draft",), "eagle": ("num_draft", "fixed")}[drafter]
        pipes = {"auto": _with(setting, drafter), "off": _plain(setting)}
        for k in _FIXED:
            options: dict[str, Any] = dict.fromkeys(always, k)
            pipes[f"k={k}"] = _with(setting, drafter, **options)
        rates = _compare(setting, text, pipes)
        best = max((name for name in rates if name != "auto"), key=rates.__getitem__)
        share = rates["auto"] / rates[best]
        worst = min(worst, share)
        found.append(f"{drafter} on {text}: {share:.3f} of {best}")
        rows += [(f"{drafter}, {text}, {name}", row) for name, row in _rows(rates, "off")]
    target = setting.judge("at least 0.97 of the best fixed number of drafts", ", ".join(found), worst >= 0.97)
    return ReuseResult("fixed_k", "drafts by the controller, and fixed numbers of them", target, rows)


def draft_host(setting: Setting) -> ReuseResult:
    """What a round costs beside the forwards, over what a step without drafts costs there."""
    from llmopt.bench.host_clock import HostClock
    from llmopt.bench.reuse import ReuseResult
    from llmopt.testing.drafters import ScriptedDrafter, trees

    rows: list[tuple[str, dict[str, float | str]]] = []
    alone = 0.0
    for batch in (1, 8):
        (prompts,) = _batches(setting, "chat", 0, batch)[:1]
        plain = _plain(setting)
        answers = {tuple(ids): out for (ids, _), out in zip(prompts, _outputs(plain, prompts), strict=True)}
        drafted = setting.build(
            ScriptedDrafter(trees(answers, setting.vocab_size), _HOST_DRAFTS), max_model_len=_MAX_MODEL_LEN
        )
        own = {}
        for name, pipe in (("plain", plain), ("trees", drafted)):
            setting.on_progress(f"{batch} rows, {name}")
            clock = HostClock(pipe)  # guesses are given, so what remains is what every drafter meets
            for _ in range(3):
                _decode_s(pipe, prompts)
            own[name], _ = clock.close()
            rows.append((f"{batch} at a time, {name}", {"host ms": round(1e3 * own[name], 3)}))
        over = own["trees"] - own["plain"]
        alone = alone or over
        rows.append((f"{batch} at a time, over plain", {"host ms": round(1e3 * over, 3)}))
    target = setting.judge("under 0.3 ms for one request", f"{1e3 * alone:.2f} ms", alone < 3e-4, at_any_size=True)
    return ReuseResult(
        "draft_host", f"median host time of a step, without forwards; trees of {_HOST_DRAFTS}", target, rows
    )


def _outputs(pipe: InferencePipeline, prompts: list[tuple[list[int], int]]) -> list[list[int]]:
    from llmopt.bench.reuse import _request

    made = [_request(pipe, ids, new) for ids, new in prompts]
    pipe.run(made)
    return [list(one.output_ids) for one in made]


def _rows(rates: dict[str, float], base: str) -> list[tuple[str, dict[str, float | str]]]:
    return [
        (name, {"tokens/s": round(rate, 1), f"x {base}": round(rate / rates[base], 3)}) for name, rate in rates.items()
    ]


def _drafters(setting: Setting) -> list[str]:
    """Drafters that need nothing but the model."""
    from llmopt.errors import PluginUnavailableError

    try:
        _with(setting, "eagle").close()
    except PluginUnavailableError:
        return ["ngram"]
    return ["ngram", "eagle"]


def _plain(setting: Setting, **config: Any) -> InferencePipeline:
    return setting.build(max_model_len=_MAX_MODEL_LEN, **config)


def _with(
    setting: Setting, drafter: str, *others: Any, config: dict[str, Any] | None = None, **options: Any
) -> InferencePipeline:
    from llmopt.plugin_search import make_plugin

    plugin = make_plugin(drafter, {**setting.plugins.get(drafter, {}), **options})
    return setting.build(plugin, *others, max_model_len=_MAX_MODEL_LEN, **(config or {}))


WORKLOADS: dict[str, Callable[[Setting], ReuseResult]] = {
    work.__name__: work
    for work in (
        drafts_edit, drafts_chat, head1, head8, head32, head_tokens, wrong_drafts, fixed_k, draft_host,
    )
}  # fmt: skip
