"""Results of shapes, memory and quality as tables for people and JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llmopt.bench.memory import Footprint, executor_format, executor_weights
from llmopt.bench.quality import Quality
from llmopt.bench.report import token_text
from llmopt.bench.rivals import Rival, bits_of, rivals_of
from llmopt.bench.shapes import Shape, ShapeTiming

if TYPE_CHECKING:
    from rich.table import Table

    from llmopt.bench.comparison import Verdict
    from llmopt.bench.contenders import Contender
    from llmopt.machine_limits import MachineLimits
    from llmopt.roofline import ModelCost, StepCost

_OVERHEAD_BYTES = 250 << 20  # what a process may hold beside weights and KV


@dataclass(frozen=True, slots=True)
class Bound:
    """What a shape costs a contender, and the shortest time that the machine allows for it."""

    cost: StepCost
    limit_s: float


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """One shape: verdicts, timings and bounds of all contenders in the same order."""

    shape: Shape
    dtype: str
    verdicts: list[Verdict]
    timings: list[ShapeTiming]
    weights: list[str]  # type of each contender's weights
    bounds: list[Bound]

    @property
    def passed(self) -> bool:
        """Whether every contender kept its promise."""
        return all(verdict.passed for verdict in self.verdicts)

    def fraction(self, index: int) -> float:
        """The limit over the measured time: 1 is as fast as the machine allows."""
        return self.bounds[index].limit_s / self.timings[index].step_s


def bound(cost: ModelCost, shape: Shape, limits: MachineLimits) -> Bound:
    """The cost of a mean decode step of the shape, or of its prefill."""
    step = (
        cost.decode(shape.batch, shape.prompt + 2, shape.num_new)
        if shape.is_decode
        else cost.prefill(shape.batch, shape.prompt)
    )
    return Bound(step, limits.seconds(step.num_bytes, step.num_ops, cost.dtype))


def costs_of(contenders: Sequence[Contender]) -> list[ModelCost]:
    """What a step costs each contender: from the model's parameters, or from the packed weights of its executor."""
    from llmopt.bench.contenders import HuggingFace, Pipeline
    from llmopt.roofline import model_cost

    first = contenders[0]
    assert isinstance(first, HuggingFace)
    pipes = [c.pipe for c in contenders if isinstance(c, Pipeline) and c.pipe.why_not is None]
    shapes = pipes[0].kv_cache.shapes if pipes else {}
    types = pipes[0].capabilities.layer_types if pipes else ()
    plain = model_cost(first.model, shapes, types)
    costs = []
    for contender in contenders:
        own, dtype = executor_weights(contender.pipe) if isinstance(contender, Pipeline) else (None, None)
        costs.append(plain if own is None else plain.with_weight_bytes(own, dtype))
    return costs


def weights_of(contenders: Sequence[Contender], costs: Sequence[ModelCost]) -> list[str]:
    """The type of each contender's weights: as its executor packed them, or that of the model."""
    from llmopt.bench.contenders import Pipeline

    packed = [executor_format(one.pipe) if isinstance(one, Pipeline) else None for one in contenders]
    return [own or cost.dtype for own, cost in zip(packed, costs, strict=True)]


def shape_table(result: ShapeResult, rivals: Sequence[Rival] = ()) -> Table:
    """One row per contender: time, speed, what had to be moved and computed, and how near the limit it came."""
    from rich.table import Table

    shape = result.shape
    rounds = len(result.timings[0].first_s)
    made = Table(title=f"{shape.name}: {shape.summary}, {result.dtype}, best of {rounds}")
    made.add_column("")
    headings = ["ms/step" if shape.is_decode else "ms", "tokens/s", "vs HF", "vs llmopt", "MB", "GFLOP", "limit ms"]
    beside = rivals_of(shape, rivals, result.weights)
    for heading in [*headings, "of limit", *(f"vs {rival.label}" for rival in beside)]:
        made.add_column(heading, justify="right")
    made.add_column("tokens")
    plain = next((timing for timing in result.timings if timing.name == "llmopt"), None)
    for index, (verdict, timing) in enumerate(zip(result.verdicts, result.timings, strict=True)):
        cost = result.bounds[index]
        ratios = [rival.ratio(timing) if _same_bits(rival, result.weights[index]) else None for rival in beside]
        made.add_row(
            timing.name,
            f"{1e3 * timing.step_s:.2f} +{timing.spread_percent:.0f}%",
            f"{timing.tokens_per_s:.0f}",
            f"{result.timings[0].step_s / timing.step_s:.2f}",
            f"{plain.step_s / timing.step_s:.2f}" if plain is not None else "",
            f"{cost.cost.num_bytes / 1e6:.1f}",
            f"{cost.cost.num_ops / 1e9:.2f}",
            f"{1e3 * cost.limit_s:.2f}",
            f"{result.fraction(index):.2f}",
            *(f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios),
            token_text(verdict),
        )
        if verdict.note:
            made.caption = f"{made.caption or ''}{timing.name} fell back to model.generate: {verdict.note}\n"
    return made


def shape_lines(
    result: ShapeResult, model: str, environment: dict[str, Any], rivals: Sequence[Rival] = ()
) -> Iterator[dict[str, Any]]:
    """One record per contender; `llmopt.bench.rivals` reads them as well."""
    shape = result.shape
    plain = next((timing for timing in result.timings if timing.name == "llmopt"), None)
    for index, (verdict, timing) in enumerate(zip(result.verdicts, result.timings, strict=True)):
        cost = result.bounds[index]
        decode_s = timing.step_s if shape.is_decode else None
        yield {
            "workload": shape.name,
            "engine": "hf" if verdict.promise == "reference" else "llmopt",
            "contender": timing.name,
            "model": model,
            "dtype": result.dtype,
            "weights": result.weights[index],
            "batch": shape.batch,
            "prompt": shape.prompt,
            "num_new": shape.num_new,
            "rounds": len(timing.first_s),
            "prefill_tokens_per_s": timing.prefill_tokens_per_s,
            "decode_ms_per_step": None if decode_s is None else 1e3 * decode_s,
            "decode_tokens_per_s": None if decode_s is None else timing.tokens_per_s,
            "ms_per_step": 1e3 * timing.step_s,
            "tokens_per_s": timing.tokens_per_s,
            "mb_per_step": cost.cost.num_bytes / 1e6,
            "gflop_per_step": cost.cost.num_ops / 1e9,
            "limit_ms": 1e3 * cost.limit_s,
            "fraction_of_limit": result.fraction(index),
            "speedup_over_hf": result.timings[0].step_s / timing.step_s,
            "speedup_over_llmopt": None if plain is None else plain.step_s / timing.step_s,
            "rivals": {
                rival.label: rival.ratio(timing)
                for rival in rivals_of(shape, rivals)
                if _same_bits(rival, result.weights[index])
            },
            "first_s": timing.first_s,
            "full_s": timing.full_s,
            "promise": verdict.promise,
            "note": verdict.note,
            "tokens_ok": verdict.passed,
            "tokens_identical": verdict.difference is None,
            "agreement": verdict.agreement,
            "mean_kl": verdict.mean_kl,
            "replay_max_gap": None if verdict.replay is None else verdict.replay.max_gap,
            "replay_not_best": None if verdict.replay is None else verdict.replay.num_not_best,
            **environment,
        }


def _same_bits(rival: Rival, weights: str) -> bool:
    """Whether it makes sense to compare; unknown types are compared with everything."""
    ours = bits_of(weights)
    return rival.bits is None or ours is None or rival.bits == ours


def memory_table(found: Sequence[Footprint]) -> Table:
    """One row per process. ``allowed`` is weights + KV + 250 MiB, what a lean process needs."""
    from rich.table import Table

    made = Table(title="memory and load time, a fresh process each (MB are 10⁶ bytes)")
    made.add_column("")
    headings = ("imports s", "load s", "first answer s", "imports MB", "resident MB", "of it files", "peak MB")
    for heading in (*headings, "weights MB", "KV MB", "allowed MB"):
        made.add_column(heading, justify="right")
    for one in found:
        sizes = (one.imports_bytes, one.resident_bytes, one.file_bytes, one.peak_bytes, one.weight_bytes, one.kv_bytes)
        made.add_row(
            one.name,
            *(f"{seconds:.2f}" for seconds in (one.import_s, one.load_s, one.first_s)),
            *(f"{size / 1e6:.0f}" for size in (*sizes, one.weight_bytes + one.kv_bytes + _OVERHEAD_BYTES)),
        )
    return made


def memory_lines(found: Sequence[Footprint], model: str, environment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One record per process."""
    for one in found:
        yield {"workload": "memory", "contender": one.name, "model": model, **asdict(one), **environment}


def quality_table(names: Sequence[str], found: Sequence[Quality], dtype: str) -> Table:
    """One row per contender."""
    from rich.table import Table

    made = Table(title=f"quality, {dtype} model: distance from float32 over {found[0].num_positions} positions of text")
    made.add_column("")
    for heading in ("mean KL", "same best", "perplexity", "float32", "shift"):
        made.add_column(heading, justify="right")
    for name, one in zip(names, found, strict=True):
        made.add_row(
            name,
            f"{one.mean_kl:.6f}",
            f"{100 * one.same_best:.2f} %",
            f"{one.perplexity:.4f}",
            f"{one.reference_perplexity:.4f}",
            f"{100 * one.perplexity_shift:+.3f} %",
        )
    return made


def quality_lines(
    names: Sequence[str], found: Sequence[Quality], model: str, dtype: str, environment: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One record per contender."""
    for name, one in zip(names, found, strict=True):
        yield {
            "workload": "quality",
            "contender": name,
            "model": model,
            "dtype": dtype,
            "num_positions": one.num_positions,
            "mean_kl": one.mean_kl,
            "same_best": one.same_best,
            "perplexity": one.perplexity,
            "reference_perplexity": one.reference_perplexity,
            "perplexity_shift": one.perplexity_shift,
            **environment,
        }
