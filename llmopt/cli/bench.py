"""``llmopt bench``: run the comparison, show it, write it down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt.cli.bench_run import BenchOptions, BenchRun, Section, dtype_name, progress
from llmopt.cli.output import console, load_model
from llmopt.errors import ConfigError, ModelError, PluginConflictError
from llmopt.plugin_options import parse_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.bench.comparison import Result
    from llmopt.bench.contenders import Contender

GROUPS = {  # short names for several workloads
    "shapes": ("decode1", "decode8", "decode32", "prefill1024", "decode4096"),
    "text": ("chat", "chat8", "document", "prefix", "edit", "ragged"),
    "arrivals": ("arrivals50", "arrivals80", "arrivals95"),
    "reuse": ("shared", "no_hits", "turns", "crowd", "churn", "kv_bytes", "offload"),
    "head": ("head1", "head8", "head32", "head_tokens"),
}
GROUPS["drafts"] = ("drafts_edit", "drafts_chat", *GROUPS["head"], "wrong_drafts", "fixed_k", "draft_host")
GROUPS["targets"] = (
    "stall",
    *GROUPS["arrivals"],
    "separation",
    "host256",
    *GROUPS["reuse"],
    *GROUPS["drafts"],
)  # each says whether it was reached
DEFAULT_WORKLOADS = (*GROUPS["shapes"], "memory", "host")
_QUICK_QUALITY_TOKENS = 256


def run(
    model_name: str,
    plugin_texts: Sequence[str],
    workload_names: Sequence[str],
    options: BenchOptions,
    *,
    rivals_path: Path | None,
    json_path: Path | None,
    json_to_stdout: bool,
) -> None:
    """Compare on every workload; exit status 1 when a contender broke its promise about the tokens."""
    plugins = read_plugins(plugin_texts)
    names = _expand(workload_names)

    from llmopt.bench.budget import Budget
    from llmopt.bench.environment import environment
    from llmopt.bench.rivals import read_rivals

    budget = Budget(options.budget_s)
    rivals = read_rivals(rivals_path) if rivals_path is not None else []
    if not workload_names and _any_lossy(plugins):
        names.insert(len(GROUPS["shapes"]), "quality")
    bench = _Bench(model_name, plugins, names, options, budget, environment(), rivals)
    passed = True
    for section in bench.sections():
        passed &= section.passed
        records = [json.dumps(record) for record in section.records]
        if json_to_stdout:
            print("\n".join(records), flush=True)
        else:
            console().print(section.table)
            if section.target is not None:
                console().print(f"{section.target}\n", soft_wrap=True, markup=False)
        if json_path is not None:
            with json_path.open("a", encoding="utf-8") as file:
                file.write("\n".join(records) + "\n")
    if not passed:
        console(stderr=True).print(
            "At least one contender did not keep its promise about the tokens.", style="bold red"
        )
        raise SystemExit(1)


def read_plugins(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Plugin name to options, in the order of the command line.

    :raises PluginError: a text that cannot be read, or a plugin given twice.
    """
    plugins: dict[str, dict[str, Any]] = {}
    for spec in map(parse_plugin, texts):
        if spec.name in plugins:
            raise PluginConflictError(f"--plugin {spec.name} is given twice. Keep one of them.")
        plugins[spec.name] = spec.options
    return plugins


def _expand(names: Sequence[str]) -> list[str]:
    """The workloads that are meant, groups taken apart, each once.

    :raises ConfigError: a name that is neither a workload nor a group.
    """
    from llmopt.bench.shapes import SHAPES
    from llmopt.bench.workloads import WORKLOADS

    known = [*SHAPES, *WORKLOADS, *GROUPS["targets"], "host", "memory", "quality"]
    found: dict[str, None] = {}
    for name in names or DEFAULT_WORKLOADS:
        if name not in known and name not in GROUPS:
            raise ConfigError(
                f"no workload is called {name!r}. Workloads: {', '.join(known)}; groups: {', '.join(GROUPS)}."
            )
        found |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(found)


def _any_lossy(plugins: dict[str, dict[str, Any]]) -> bool:
    from llmopt.plugin_info import info_of
    from llmopt.plugin_search import find_plugin

    return any(info_of(find_plugin(name)).promise == "lossy" for name in plugins)


class _Bench(BenchRun):
    """One run of the command."""

    def sections(self) -> Iterator[Section]:
        """Measure one workload after the other: those with the model, then those that need none loaded."""
        from llmopt.cli import target_sections

        special = ("host", "memory", *GROUPS["targets"])
        ordinary = [name for name in self.names if name not in special]
        if ordinary:
            yield from self._with_model(ordinary)
        yield from target_sections.serving(self, [name for name in self.names if name == "stall"])
        yield from target_sections.serving(self, [name for name in self.names if name in GROUPS["arrivals"]])
        if "separation" in self.names:
            yield target_sections.separation(self)
        compared = ("host256", *GROUPS["reuse"], *GROUPS["drafts"])
        yield from target_sections.reuse(self, [name for name in self.names if name in compared])
        if "memory" in self.names:
            yield self._memory()
            self.num_left -= 1
        if "host" in self.names:
            yield self._host()

    def _with_model(self, names: list[str]) -> Iterator[Section]:
        from llmopt.bench.comparison import contenders_for, float32_copy
        from llmopt.bench.shapes import SHAPES

        options = self.options
        load_options: dict[str, Any] = {"dtype": options.dtype, "device_map": options.device_map}
        model, tokenizer = load_model(self.model_name, **load_options)
        texts = [name for name in names if name not in SHAPES]
        if tokenizer is None and texts:
            raise ModelError(
                f"{self.model_name} has no tokenizer, and {', '.join(texts)} is text. Use --workload shapes, "
                "--workload memory or --workload host."
            )
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
        max_model_len = min(int(context), 8192)
        reference = float32_copy(model)
        with contenders_for(
            model,
            tokenizer,
            self.plugins,
            max_model_len=max_model_len,
            source=self.model_name,
            load_options=load_options,
        ) as contenders:
            for name in names:
                if name in SHAPES:
                    yield self._shape(name, model, contenders, reference, max_model_len)
                elif name == "quality":
                    assert tokenizer is not None
                    yield self._quality(model, tokenizer, contenders, reference, max_model_len)
                else:
                    assert tokenizer is not None
                    yield self._text(name, model, tokenizer, contenders, reference, max_model_len)
                self.num_left -= 1

    def _shape(
        self,
        name: str,
        model: PreTrainedModel,
        contenders: list[Contender],
        reference: PreTrainedModel | None,
        max_model_len: int,
    ) -> Section:
        from llmopt.bench.budget import Budget
        from llmopt.bench.comparison import check
        from llmopt.bench.shape_report import ShapeResult, bound, costs_of, shape_lines, shape_table, weights_of
        from llmopt.bench.shapes import SHAPES, measure_shape
        from llmopt.machine_limits import machine_limits

        limits = machine_limits(model.device)
        mine = Budget(self.budget.share_s(self.num_left))
        shape = SHAPES[name].fitted(max_model_len, quick=self.options.quick)
        vocab_size = int(model.config.get_text_config().vocab_size)
        with progress(name) as advance:
            verdicts = check(
                contenders, shape.check_requests(vocab_size), reference, self.options.max_gap, _prefixed(advance)
            )
            timings = measure_shape(
                contenders,
                shape,
                vocab_size,
                seconds=mine.left_s,
                max_rounds=self.options.rounds,
                on_progress=advance,
            )
        costs = costs_of(contenders)
        result = ShapeResult(
            timings[0].shape,
            dtype_name(model),
            verdicts,
            timings,
            weights_of(contenders, costs),
            [bound(cost, timings[0].shape, limits) for cost in costs],
        )
        records = list(shape_lines(result, self.model_name, self.where, self.rivals))
        return Section(shape_table(result, self.rivals), records, result.passed)

    def _text(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        contenders: list[Contender],
        reference: PreTrainedModel | None,
        max_model_len: int,
    ) -> Section:
        from llmopt.bench.workloads import WORKLOADS

        workload, quick = WORKLOADS[name], self.options.quick
        result = compare_with_progress(
            contenders,
            name,
            lambda number: workload.batch(tokenizer, number, max_model_len, quick=quick),
            dtype=dtype_name(model),
            rounds=self.options.rounds,
            seconds=self.budget.share_s(self.num_left),
            reference=reference,
            max_gap=self.options.max_gap,
        )
        return self._compared(result)

    def _host(self) -> Section:
        from llmopt.bench.comparison import contenders_for
        from llmopt.bench.host import MAX_MODEL_LEN, host_batch, host_model

        small, quick = host_model(), self.options.quick
        with contenders_for(small, None, self.plugins, max_model_len=MAX_MODEL_LEN) as contenders:
            result = compare_with_progress(
                contenders,
                "host",
                lambda number: host_batch(number, small.config.vocab_size, quick=quick),
                dtype=dtype_name(small),
                rounds=self.options.rounds,
                seconds=self.budget.share_s(self.num_left),
            )
        return self._compared(result)

    def _compared(self, result: Result) -> Section:
        from llmopt.bench.report import json_lines, table

        return Section(table(result), list(json_lines(result, self.model_name, self.where)), result.passed)

    def _quality(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        contenders: list[Contender],
        reference: PreTrainedModel | None,
        max_model_len: int,
    ) -> Section:
        from llmopt.bench.quality import WINDOW, measure_quality, text_ids
        from llmopt.bench.shape_report import quality_lines, quality_table

        window = min(WINDOW, max_model_len - 1)
        ids = text_ids(tokenizer, _QUICK_QUALITY_TOKENS if self.options.quick else None)
        with progress("quality") as advance:
            found = measure_quality(reference or model, model, contenders, ids, window, advance)
        names, dtype = [contender.name for contender in contenders], dtype_name(model)
        records = list(quality_lines(names, found, self.model_name, dtype, self.where))
        return Section(quality_table(names, found, dtype), records, True)

    def _memory(self) -> Section:
        from llmopt.bench.comparison import plugin_sets
        from llmopt.bench.memory import measure_footprint
        from llmopt.bench.shape_report import memory_lines, memory_table

        wishes: dict[str, dict[str, dict[str, Any]] | None] = {"HF generate": None, **plugin_sets(self.plugins)}
        found = []
        with progress("memory") as advance:
            for name, plugins in wishes.items():
                advance(name)
                found.append(
                    measure_footprint(
                        name,
                        self.model_name,
                        plugins,
                        dtype=self.options.dtype,
                        device_map=self.options.device_map,
                    )
                )
        return Section(memory_table(found), list(memory_lines(found, self.model_name, self.where)), True)


def _prefixed(advance: Callable[[str], None]) -> Callable[[str], None]:
    return lambda name: advance(f"check {name}")


def compare_with_progress(contenders: Any, name: str, make_batch: Any, *, rounds: int, **options: Any) -> Result:
    """`llmopt.bench.comparison.compare` behind a progress line on stderr."""
    from llmopt.bench.comparison import compare

    with progress(name) as advance:
        return compare(contenders, name, make_batch, rounds=rounds, on_progress=advance, **options)
