"""The workloads of ``llmopt bench`` that say whether a target was reached: scheduling and memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmopt.cli.bench_run import BenchRun, Section, context_length, dtype_name, progress, vocab_size
from llmopt.cli.output import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.bench.contenders import Pipeline

_TURNS = 2  # of every contender under one load, there and back: a machine that changes its pace favours nobody


def serving(run: BenchRun, names: list[str]) -> Iterator[Section]:
    """Workloads whose requests arrive while others run; the contenders differ in plugins of scheduling."""
    if not names:
        return
    from llmopt.bench.comparison import contenders_for, serving_sets
    from llmopt.bench.contenders import Pipeline
    from llmopt.bench.serving import DEFAULT_PLUGINS

    model, tokenizer = load_model(run.model_name, **run.load_options)
    is_stall = names == ["stall"]
    with contenders_for(
        model,
        tokenizer,
        {},
        max_model_len=context_length(model),
        source=run.model_name,
        load_options=run.load_options,
        sets=serving_sets(run.plugins, DEFAULT_PLUGINS["stall" if is_stall else "arrivals"]),
    ) as contenders:
        pipelines = [contender for contender in contenders if isinstance(contender, Pipeline)]
        if is_stall:
            yield _stall(run, model, pipelines)
        else:
            yield from _arrivals(run, names, model, pipelines)


def _stall(run: BenchRun, model: PreTrainedModel, pipelines: list[Pipeline]) -> Section:
    from llmopt.bench.budget import Rounds
    from llmopt.bench.serving import Stall, StallTiming, run_stall
    from llmopt.bench.serving_report import stall_lines, stall_table, stall_target

    stall = Stall().fitted(context_length(model), quick=run.options.quick)
    timings = [StallTiming(pipeline.name) for pipeline in pipelines]
    rounds = Rounds(run.share_s, run.options.rounds)
    with progress("stall") as advance:
        while rounds.goes_on():
            for pipeline, timing in zip(pipelines, timings, strict=True):
                advance(pipeline.name)
                run_stall(pipeline, stall, vocab_size(model), rounds.num_done, timing)
    run.num_left -= 1
    dtype, target = dtype_name(model), stall_target(timings, quick=run.options.quick)
    records = list(stall_lines(stall, timings, target, run.model_name, dtype, run.where))
    return Section(stall_table(stall, timings, dtype), records, True, target)


def _arrivals(run: BenchRun, names: list[str], model: PreTrainedModel, pipelines: list[Pipeline]) -> Iterator[Section]:
    from llmopt.bench.serving import LOADS, LoadTiming, Mix, measure_capacity, run_load, warm_up
    from llmopt.bench.serving_report import load_lines, load_table, load_target

    mix, quick, dtype = Mix().fitted(context_length(model)), run.options.quick, dtype_name(model)
    with progress("capacity") as advance:
        for pipeline in pipelines:
            advance(f"warm-up of {pipeline.name}")
            warm_up(pipeline, mix, vocab_size(model))
        advance(pipelines[0].name)
        capacity = measure_capacity(pipelines[0], mix, vocab_size(model), quick=quick)
    for name in names:
        seconds = (
            3.0 if quick else min(60.0, max(3.0, 0.7 * run.share_s / len(pipelines)))
        )  # the last ones take a while
        rate = LOADS[name] * capacity.requests_per_s
        timings = [LoadTiming(pipeline.name, 0.0, [], capacity) for pipeline in pipelines]
        turns = list(zip(pipelines, timings, strict=True))
        with progress(name) as advance:
            for number in range(_TURNS):
                part = random.Random(f"{name} {number}")
                arrivals = mix.arrivals(part, rate, seconds / _TURNS, vocab_size(model))
                for pipeline, timing in turns[:: -1 if number % 2 else 1]:
                    advance(pipeline.name)
                    run_load(pipeline, arrivals, timing)
        run.num_left -= 1
        target = load_target(name, timings, quick=quick)
        records = list(load_lines(name, LOADS[name], rate, timings, target, run.model_name, dtype, run.where))
        yield Section(load_table(name, LOADS[name], rate, timings, dtype), records, True, target)


def separation(run: BenchRun) -> Section:
    """Streams beside prompts that other processes compute. Pipelines are built one after the other."""
    from functools import cache, partial

    from llmopt.bench.comparison import build_pipeline, float32_copy, serving_sets
    from llmopt.bench.separation import Separation, compare_tokens, run_separation, separation_target
    from llmopt.bench.separation_report import separation_lines, separation_table
    from llmopt.plugin_search import make_plugin

    model, tokenizer = load_model(run.model_name, **run.load_options)
    setting = Separation().fitted(context_length(model), quick=run.options.quick)
    plugins = {name: options for name, options in run.plugins.items() if name != "pd_separation"}
    plugins["pd_separation"] = {**run.plugins.get("pd_separation", {}), "mode": "process"}  # the last row
    sets = serving_sets(plugins, ())
    sets.pop("+ all", None)

    def build(chosen: dict[str, dict[str, Any]]) -> Any:
        made = [make_plugin(name, options) for name, options in chosen.items()]
        pipe, _ = build_pipeline(
            model,
            tokenizer,
            made,
            source=run.model_name,
            load_options=run.load_options,
            max_model_len=setting.max_model_len,
            pool_bytes=1 << 30,
        )
        return pipe

    with progress("separation") as advance:
        builders = [(name, partial(build, chosen)) for name, chosen in sets.items()]
        timings = run_separation(builders, setting, run.share_s, advance)
        advance("replay")
        reference = cache(lambda: float32_copy(model))
        agreements = [compare_tokens(timings[0], timing, reference, run.options.max_gap) for timing in timings]
    run.num_left -= 1
    target, dtype = separation_target(timings, agreements[-1], quick=run.options.quick), dtype_name(model)
    records = list(separation_lines(setting, timings, agreements, target, run.model_name, dtype, run.where))
    passed = all(agreement.passed for agreement in agreements)
    return Section(separation_table(setting, timings, agreements, dtype), records, passed, target)


def reuse(run: BenchRun, names: list[str]) -> Iterator[Section]:
    """Workloads of the memory layer: each builds its own pipelines around one model."""
    if not names:
        return
    from llmopt.bench.reuse import Setting, measure
    from llmopt.bench.reuse_report import reuse_lines, reuse_table

    model, tokenizer = load_model(run.model_name, **run.load_options)
    for name in names:
        with progress(name) as advance:
            setting = Setting(model, run.plugins, run.share_s, run.options.quick, advance, tokenizer)
            result = measure(name, setting)
        run.num_left -= 1
        records = list(reuse_lines(result, run.model_name, dtype_name(model), run.where))
        yield Section(reuse_table(result, dtype_name(model)), records, True, result.target)
