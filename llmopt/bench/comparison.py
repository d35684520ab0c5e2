"""One comparison: build the contenders, check their tokens, time them, hand over the results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmopt.bench.budget import Budget
from llmopt.bench.contenders import Contender, HuggingFace, Pipeline, SharedModel
from llmopt.bench.measurement import Timing, measure
from llmopt.bench.quality import WINDOW, measure_quality
from llmopt.bench.tokens import Difference, Replay, agreement, first_difference, replay
from llmopt.bench.workloads import BenchRequest
from llmopt.plugin_search import make_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.pipeline import InferencePipeline

_CHECK_ROUND = 1_000_000  # a batch number that no timed round uses
_WORST_FIRST = ("lossy", "distribution", "exact")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the token check found for one contender."""

    name: str
    promise: str  # "reference", "exact", "distribution" or "lossy"
    passed: bool  # lossy contenders always pass: their loss is reported, not judged
    difference: Difference | None  # from `model.generate`; in half precision near-ties may differ
    replay: Replay | None  # half precision only
    note: str = ""  # what a reader of the figures has to know
    agreement: float = 1.0  # share of the tokens that are the reference's, place by place
    mean_kl: float | None = None  # lossy only: divergence from the float32 model over the same ids, nats per position

    def __str__(self) -> str:
        if self.mean_kl is not None:
            return f"{100 * self.agreement:.0f} % agree, mean KL {self.mean_kl:.5f}"
        if self.replay is not None:
            return f"max gap {self.replay.max_gap:.3f}, {self.replay.num_not_best}/{self.replay.num_tokens} not best"
        if self.difference is None:
            return "identical"
        return f"differs at row {self.difference.row}, token {self.difference.position}"


@dataclass(frozen=True, slots=True)
class Result:
    """Verdicts and timings of all contenders on one workload, in the same order; the first is ``model.generate``."""

    workload: str
    dtype: str
    rounds: int
    verdicts: list[Verdict]
    timings: list[Timing]

    @property
    def passed(self) -> bool:
        """Whether every contender kept its promise."""
        return all(verdict.passed for verdict in self.verdicts)


@contextmanager
def contenders_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    plugins: dict[str, dict[str, Any]],
    *,
    max_model_len: int,
    source: str | None = None,
    load_options: dict[str, Any] | None = None,
    sets: dict[str, dict[str, dict[str, Any]]] | None = None,
) -> Iterator[list[Contender]]:
    """``model.generate``, the plain pipeline, the pipeline with each plugin, and with all when there are several.

    :param model: loaded from ``source`` with ``load_options``, where these are given. Plugins that load models may then
        load their own form of it (packed weights that were saved); all others use this one.
    :param plugins: plugin name to options. A plugin that requires others is built together with them.
    :param sets: the pipelines, in place of those that follow from ``plugins``.
    """
    pad_token_id = pad_id(model, tokenizer)
    sets = plugin_sets(plugins) if sets is None else sets
    contenders: list[Contender] = [HuggingFace(model, pad_token_id)]
    eos_before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # every contender generates as many tokens as it is asked for
    try:
        for label, chosen in sets.items():
            pipe, promise = build_pipeline(
                model,
                tokenizer,
                [make_plugin(name, options) for name, options in chosen.items()],
                source=source,
                load_options=load_options,
                max_model_len=max_model_len,
                memory_fraction=0.5 / len(sets),
            )
            contenders.append(Pipeline(label, promise, pipe, pad_token_id))
            pipe.model.generation_config.eos_token_id = None  # a plugin may have loaded a model of its own
        yield contenders
    finally:
        for contender in contenders:
            contender.close()
        model.generation_config.eos_token_id = eos_before


def plugin_sets(plugins: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The pipelines that are compared, by the name of their row: no plugin, each with what it requires, and all."""
    sets: dict[str, dict[str, dict[str, Any]]] = {"llmopt": {}}
    for name in plugins:
        sets[f"+ {name}"] = _with_required(name, plugins)
    if len(plugins) > 1 and all(set(chosen) != set(plugins) for chosen in sets.values()):
        sets["+ all"] = dict(plugins)
    return sets


def serving_sets(plugins: dict[str, dict[str, Any]], default: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """The pipelines of a workload about scheduling: without any plugin of that layer, with each, and with all.

    Plugins of other layers stand in all of them.

    :param default: plugins of that layer, when none is listed.
    """
    from llmopt.plugin_info import info_of
    from llmopt.plugin_search import find_plugin

    mine = {n: o for n, o in plugins.items() if info_of(find_plugin(n)).layer == "scheduling"}
    base = {n: o for n, o in plugins.items() if n not in mine}
    mine = mine or {name: {} for name in default}
    sets = {"llmopt" if not base else f"llmopt with {', '.join(base)}": base}
    for name, options in mine.items():
        sets[f"+ {name}"] = base | {name: options}
    if len(mine) > 1:
        sets["+ all"] = base | mine
    return sets


def build_pipeline(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    plugins: Sequence[Any],
    *,
    source: str | None,
    load_options: dict[str, Any] | None,
    **options: Any,
) -> tuple[InferencePipeline, str]:
    """A pipeline around a loaded model or a plugin's own form of it, and the weakest promise of the plugins.

    :param source: what the model was loaded from; None: plugins load nothing.
    """
    import llmopt
    from llmopt.plugin_info import info_of

    promises = [info_of(plugin).promise for plugin in plugins]
    promise = next((word for word in _WORST_FIRST if word in promises), "exact")
    if source is None or not plugins:
        return llmopt.build(model, plugins, tokenizer=tokenizer, **options), promise
    shared = [*plugins, SharedModel(model, tokenizer)]
    return llmopt.build(source, shared, tokenizer=tokenizer, load_options=load_options, **options), promise


def _with_required(name: str, plugins: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    from llmopt.plugin_info import info_of
    from llmopt.plugin_search import find_plugin

    chosen: dict[str, dict[str, Any]] = {}
    for required in info_of(find_plugin(name)).requires:
        chosen |= _with_required(required, plugins)
    return chosen | {name: plugins.get(name, {})}


def pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """An id to fill rows with: the tokenizer's, the model's, its end token, or 0."""
    for owner in (tokenizer, model.generation_config, model.config):
        for attribute in ("pad_token_id", "eos_token_id"):
            found = getattr(owner, attribute, None)
            if isinstance(found, list):
                found = found[0] if found else None
            if found is not None:
                return int(found)
    return 0


def float32_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """A float32 copy for the replay; None when the model computes in float32 itself."""
    if model.dtype == torch.float32:
        return None
    return copy.deepcopy(model).to(torch.float32)


def check(
    contenders: Sequence[Contender],
    batch: Sequence[BenchRequest],
    reference: PreTrainedModel | None,
    max_gap: float,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[Verdict]:
    """Compare the tokens of every contender with the first one's; this also warms everything up.

    :param reference: a float32 copy for the replay; None demands identical tokens.
    :param max_gap: the gap that a replayed token may have, in float32 logits. When ``model.generate`` itself needs
        more, twice its own gap is allowed.
    """
    verdicts: list[Verdict] = []
    expected: list[list[int]] = []
    replays: dict[str, Replay] = {}  # outputs that came before need no second replay: it is the slow part
    for contender in contenders:
        on_progress(contender.name)
        found = contender.generate(batch)
        expected = expected or found
        difference = first_difference(expected, found)
        played = replays.get(str(found)) if reference is not None else None
        if reference is not None and played is None:
            played = replays[str(found)] = replay(reference, batch, found)
        if not verdicts or contender.promise == "lossy":
            passed = True
        elif played is not None and verdicts[0].replay is not None:
            passed = played.max_gap <= max(max_gap, 2 * verdicts[0].replay.max_gap)
        else:
            passed = difference is None
        mean_kl = _mean_kl(contenders[0], contender, reference, batch, expected)
        same = agreement(expected, found)
        verdicts.append(
            Verdict(contender.name, contender.promise, passed, difference, played, contender.note, same, mean_kl)
        )
    return verdicts


def _mean_kl(
    first: Contender,
    contender: Contender,
    reference: PreTrainedModel | None,
    batch: Sequence[BenchRequest],
    outputs: Sequence[Sequence[int]],
) -> float | None:
    """The divergence of a lossy pipeline from the float32 model, over the first row with its expected output."""
    if contender.promise != "lossy" or not isinstance(contender, Pipeline) or contender.pipe.why_not is not None:
        return None
    assert isinstance(first, HuggingFace)
    ids = [*batch[0].prompt_ids, *outputs[0]][-WINDOW:]
    (found,) = measure_quality(reference or first.model, first.model, [contender], ids)
    return found.mean_kl


def compare(
    contenders: Sequence[Contender],
    workload: str,
    make_batch: Callable[[int], list[BenchRequest]],
    *,
    dtype: str,
    rounds: int,
    reference: PreTrainedModel | None = None,
    max_gap: float = 0.5,
    seconds: float | None = None,
    on_progress: Callable[[str], None] = lambda step: None,
) -> Result:
    """Check, then time.

    :param rounds: at most; fewer when ``seconds`` are over, one at least.
    :param seconds: time for the check and the rounds; None: all rounds.
    :param on_progress: called with the contender's name before each of its turns, the check being one.
    """
    budget = Budget(seconds) if seconds is not None else None
    verdicts = check(
        contenders, make_batch(_CHECK_ROUND), reference, max_gap, lambda name: on_progress(f"check {name}")
    )
    timings = measure(contenders, make_batch, rounds, on_progress, None if budget is None else budget.left_s)
    return Result(workload, dtype, len(timings[0].total_s), verdicts, timings)
