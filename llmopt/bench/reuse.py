"""Workloads of the memory layer: what KV that is kept, paged or brought back saves, with the plain pipeline beside it.

    shared      2,000 tokens that many prompts begin with: time to the first token
    no_hits     prompts that never repeat: what keeping KV costs
    turns       a conversation of ten turns: time to the first token of each
    crowd       requests of all lengths in a pool of 512 MB: how many run at once
    churn       thousands of random requests, aborts among them: is the memory what it was?
    kv_bytes    KV in fewer bits: bytes per token, and the distance from the float32 model over a text
    offload     more prefixes than the pool holds: time to the first token

Each compares in one interleaved run, and says whether the target of the workload was reached.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from llmopt.bench import drafting, host_clock, no_hits
from llmopt.bench.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request

OWN_PLUGINS = (
    "prefix_cache",
    "paged_kv",
    "kv_offload",
    "kv_quant",
    "ngram",
    "eagle",
)  # compared here; others stand in all pipelines


@dataclass(frozen=True, slots=True)
class ReuseResult:
    """One workload, measured."""

    workload: str
    title: str
    target: Target
    rows: list[tuple[str, dict[str, float | str]]]  # contender, and its figures by heading


@dataclass(slots=True)
class Setting:
    """What all workloads of a run share."""

    model: PreTrainedModel
    plugins: dict[str, dict[str, Any]]  # of every contender, with their options
    seconds: float  # for one workload, about
    quick: bool = False
    on_progress: Callable[[str], None] = lambda step: None
    tokenizer: PreTrainedTokenizerBase | None = None  # `kv_bytes` reads a text with it; random ids without one
    _stack: ExitStack = field(default_factory=ExitStack)

    def build(self, *own: Any, model: PreTrainedModel | None = None, **options: Any) -> InferencePipeline:
        """A pipeline with the common plugins and some of `OWN_PLUGINS`; closed by `close`."""
        import llmopt
        from llmopt.plugin_search import make_plugin

        common = [make_plugin(name, chosen) for name, chosen in self.plugins.items() if name not in OWN_PLUGINS]
        chosen = [make_plugin(one, self.plugins.get(one, {})) if isinstance(one, str) else one for one in own]
        options = {"max_model_len": 4096, "pool_bytes": 1 << 30, **options}
        pipe = llmopt.build(model or self.model, [*common, *chosen], **options)
        return self._stack.enter_context(pipe)

    def judge(self, text: str, figure: str, reached: bool, *, at_any_size: bool = False) -> Target:
        """The target; with ``quick`` it is judged only when it can be told at any size."""
        return Target(text, figure, reached if at_any_size or not self.quick else None)

    def close(self) -> None:
        """Close the pipelines."""
        self._stack.close()

    @property
    def vocab_size(self) -> int:
        """Ids that prompts are made of."""
        return int(self.model.config.get_text_config().vocab_size)


def measure(name: str, setting: Setting) -> ReuseResult:
    """Run one workload."""
    try:
        return WORKLOADS[name](setting)
    finally:
        setting.close()


def _ids(chooser: random.Random, count: int, vocab_size: int) -> list[int]:
    return [chooser.randrange(3, vocab_size) for _ in range(count)]


def _request(pipe: InferencePipeline, ids: Sequence[int], new: int, **options: Any) -> Request:
    from llmopt.text import make_requests

    (made,) = make_requests(pipe, list(ids), {"max_new_tokens": new, "ignore_eos": True, **options})
    made.wants_text = False
    return made


def _ttft(pipe: InferencePipeline, ids: Sequence[int], new: int = 1) -> tuple[float, list[int]]:
    """Seconds from the call to the first token, and the tokens."""
    made = _request(pipe, ids, new)
    start = time.perf_counter()
    pipe.run([made])
    assert made.first_token_s is not None
    return made.first_token_s - start, made.output_ids


def _ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.median(values)


def _shared(setting: Setting) -> ReuseResult:
    shared = 400 if setting.quick else 2000
    chooser = random.Random(1)
    prefix = _ids(chooser, shared, setting.vocab_size)
    plain, kept = setting.build(), setting.build("prefix_cache")
    _ttft(kept, [*prefix, 5])
    _ttft(kept, [*prefix, 6])
    _ttft(plain, prefix[:64])
    without: list[float] = []
    hits: list[float] = []
    same = 0
    end = time.monotonic() + setting.seconds
    while len(without) < 2 or (time.monotonic() < end and len(without) < 7):
        setting.on_progress(f"round {len(without)}")
        prompt = [*prefix, *_ids(chooser, 8, setting.vocab_size)]
        seconds, wanted = _ttft(plain, prompt)
        without.append(seconds)
        for _ in range(2):
            hits.append(_ttft(kept, prompt[:-1] + _ids(chooser, 1, setting.vocab_size))[0])
        same += _ttft(kept, prompt)[1] == wanted
    ratio = statistics.median(without) / statistics.median(hits)
    return ReuseResult(
        "shared",
        f"{shared:,} shared tokens and 8 others, time to the first token",
        setting.judge("at least 20 times lower on a hit", f"{ratio:.1f} times", ratio >= 20),
        [
            ("llmopt", {"TTFT ms": _ms(without), "ratio": 1.0}),
            ("+ prefix_cache", {"TTFT ms": _ms(hits), "ratio": ratio, "same token": f"{same}/{len(without)}"}),
        ],
    )


def _turns(setting: Setting) -> ReuseResult:
    first, question, answer = (128, 16, 8) if setting.quick else (512, 64, 32)
    chooser = random.Random(3)
    pipes = {"llmopt": setting.build(), "+ prefix_cache": setting.build("prefix_cache")}
    for pipe in pipes.values():
        _ttft(pipe, _ids(chooser, 32, setting.vocab_size))
    histories = {name: _ids(random.Random(4), first, setting.vocab_size) for name in pipes}
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(10):
        asked = _ids(chooser, question, setting.vocab_size)
        for name, pipe in pipes.items():
            setting.on_progress(f"turn {turn + 1} of {name}")
            histories[name] += asked
            seconds, found = _ttft(pipe, histories[name], answer)
            times[name].append(seconds)
            histories[name] += found
    growth = {name: statistics.median(t[7:]) / statistics.median(t[1:4]) for name, t in times.items()}
    rows: list[tuple[str, dict[str, float | str]]] = []
    for name in pipes:
        figures: dict[str, float | str] = {f"turn {n} ms": 1e3 * times[name][n - 1] for n in (1, 2, 4, 6, 8, 10)}
        rows.append((name, {**figures, "growth": growth[name]}))
    return ReuseResult(
        "turns",
        f"ten turns of {question} tokens and {answer} in answer, after {first}: time to the first token",
        setting.judge(
            "flat: turns 8 to 10 at most 1.5 times turns 2 to 4",
            f"{growth['+ prefix_cache']:.2f} times, without {growth['llmopt']:.2f} times",
            growth["+ prefix_cache"] <= 1.5,
        ),
        rows,
    )


def _crowd(setting: Setting) -> ReuseResult:
    """Requests that may have 1,024 new tokens and end, as if by their end token, after 16 to 256."""
    from llmopt.testing import tiny_model

    config = setting.model.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    # the KV of the model and next to none of its work: what counts here is memory
    model = tiny_model(
        "llama",
        dtype=torch.bfloat16,
        num_hidden_layers=int(config.num_hidden_layers),
        num_key_value_heads=heads,
        num_attention_heads=heads,
        head_dim=dim,
        hidden_size=heads * dim,
        max_position_embeddings=4096,
    )
    count = 64 if setting.quick else 128
    rows = []
    for name, own in (("llmopt", []), ("+ paged_kv", ["paged_kv"])):
        pipe = setting.build(*own, model=model, pool_bytes=512 << 20, max_model_len=2048, self_test=False)
        chooser = random.Random(5)
        ends: dict[Request, int] = {}
        for _ in range(count):
            made = _request(pipe, _ids(chooser, chooser.randint(16, 512), 512), 1024)
            ends[made] = chooser.randint(16, 256)
            pipe.add(made)
        most, total, steps = 0, 0, 0
        start = time.perf_counter()
        while len(pipe.queue):
            pipe.advance()
            running = len(pipe.queue.running)
            most = max(most, running)
            if pipe.queue.waiting:
                total, steps = total + running, steps + 1
            for made in [r for r in pipe.queue.running if r.num_output_tokens >= ends[r]]:
                pipe.abort(made)
            if steps % 50 == 0:
                setting.on_progress(f"{name}: {len(pipe.queue)} left")
        rows.append((name, {
            "most at once": most, "mean while some wait": total / max(1, steps), "steps": pipe.stats()["num_steps"],
            "pre-empted": pipe.stats()["schedule.baseline"]["num_preemptions"], "s": time.perf_counter() - start,
        }))  # fmt: skip
    ratio = float(rows[1][1]["most at once"]) / float(rows[0][1]["most at once"])
    return ReuseResult(
        "crowd",
        f"{count} requests of 16 to 512 tokens, at most 1,024 new, 16 to 256 in truth, 512 MB of KV",
        setting.judge("at least 3 times as many at once", f"{ratio:.1f} times", ratio >= 3),
        list(rows),
    )


def _churn(setting: Setting) -> ReuseResult:
    from llmopt.testing import tiny_model

    count = 2000 if setting.quick else 20_000
    rows: list[tuple[str, dict[str, float | str]]] = []
    is_whole = True
    for name, own in (
        ("llmopt", []),
        ("+ paged_kv", ["paged_kv"]),
        ("+ paged_kv, prefix_cache", ["paged_kv", "prefix_cache"]),
    ):
        pipe = setting.build(*own, model=tiny_model(), block_size=8, pool_bytes=512 * 8 * 160, max_model_len=120)
        chooser = random.Random(6)
        prefixes = [_ids(chooser, 40, 512) for _ in range(8)]
        before, added, aborted = pipe.block_pool.num_free, 0, 0
        start = time.perf_counter()
        live: list[Request] = []
        while added < count or len(pipe.queue):
            while added < count and len(pipe.queue) < 64:
                prompt = [
                    *chooser.choice(prefixes)[: chooser.randint(0, 40)],
                    *_ids(chooser, chooser.randint(1, 20), 512),
                ]
                made = _request(pipe, prompt, chooser.randint(1, 8), cache_salt=chooser.choice([None, None, "a"]))
                pipe.add(made)
                live.append(made)
                added += 1
            pipe.advance()
            if chooser.random() < 0.2:
                victim = chooser.choice(live[-64:])
                aborted += not victim.is_finished
                pipe.abort(victim)
            if added % 500 == 0:
                setting.on_progress(f"{name}: {added} requests")
        seconds = time.perf_counter() - start
        pipe.block_pool.check()
        longest = _request(pipe, [5], 119)
        pipe.run([longest])
        after = pipe.block_pool.num_free
        is_whole &= before == after == pipe.block_pool.num_blocks and longest.num_output_tokens == 119
        rows.append((name, {
            "requests": added, "aborted": aborted, "free blocks before": before, "after": after,
            "evicted": pipe.block_pool.num_evicted, "requests/s": added / seconds,
        }))  # fmt: skip
    return ReuseResult(
        "churn",
        f"{count:,} random requests, a pool of 160 blocks",
        setting.judge(
            f"after {count:,} random requests usable memory is what it was",
            "all of it, and the longest request runs" if is_whole else "less than before",
            is_whole,
            at_any_size=True,
        ),
        rows,
    )


def _kv_bytes(setting: Setting) -> ReuseResult:
    from llmopt.bench.comparison import float32_copy
    from llmopt.bench.contenders import Pipeline
    from llmopt.bench.quality import WINDOW, measure_quality, text_ids

    contenders = [
        Pipeline(name, promise, setting.build(*own), 0)
        for name, promise, own in (("llmopt", "exact", ()), ("+ kv_quant", "lossy", ("kv_quant",)))
    ]
    number = 256 if setting.quick else None
    if setting.tokenizer is not None:
        ids = text_ids(setting.tokenizer, number)
    else:
        ids = _ids(random.Random(8), number or 2048, setting.vocab_size)
    reference = float32_copy(setting.model) or setting.model
    window = min(WINDOW, contenders[0].pipe.max_model_len - 1)
    found = measure_quality(reference, setting.model, contenders, ids, window, setting.on_progress)
    sizes = [sum(s.bytes_per_token for s in one.pipe.kv_cache.shapes.values()) for one in contenders]
    share, loss = sizes[1] / sizes[0], found[1].mean_kl
    return ReuseResult(
        "kv_bytes",
        f"KV per token, and the distance from the float32 model over {found[0].num_positions:,} positions",
        setting.judge(
            "half the bytes (52 % with scales), mean KL below 0.01",
            f"{100 * share:.1f} %, mean KL {loss:.5f} (without the plugin {found[0].mean_kl:.5f})",
            share <= 0.52 and loss < 0.01,
            at_any_size=True,
        ),
        [
            (one.name, {
                "bytes per token": size, "tokens per GB": 10**9 / size, "mean KL": quality.mean_kl,
                "same best %": 100 * quality.same_best, "perplexity": quality.perplexity,
            })
            for one, size, quality in zip(contenders, sizes, found, strict=True)
        ],
    )  # fmt: skip


def _offload(setting: Setting) -> ReuseResult:
    """Prefixes in turn, more than the pool holds: each is gone from it when it comes again."""
    from llmopt.plugin_search import make_plugin

    length, number = (256, 4) if setting.quick else (1024, 6)
    per_token = _kv_bytes_per_token(setting.model)
    options = {"pool_bytes": int(2.5 * length * per_token), "max_model_len": 2 * length}
    folder = setting._stack.enter_context(tempfile.TemporaryDirectory())
    whole = number * length * per_token * 2
    pipes = {
        "+ prefix_cache": setting.build("prefix_cache", **options),
        "+ kv_offload": setting.build("prefix_cache", make_plugin("kv_offload", {"host_bytes": whole}), **options),
        "+ kv_offload, file": setting.build(
            "prefix_cache",
            make_plugin("kv_offload", {"host_bytes": length * per_token, "folder": folder, "file_bytes": 2 * whole}),
            **options,
        ),
    }
    chooser = random.Random(7)
    prefixes = [_ids(chooser, length, setting.vocab_size) for _ in range(number)]
    again: dict[str, list[float]] = {name: [] for name in pipes}
    fresh: dict[str, list[float]] = {name: [] for name in pipes}
    for pipe in pipes.values():
        for prefix in prefixes[:3]:
            _ttft(pipe, prefix)
    end = time.monotonic() + setting.seconds
    turn = 0
    while turn < number or (time.monotonic() < end and turn < 4 * number):
        unknown = _ids(chooser, length, setting.vocab_size)
        for name, pipe in pipes.items():
            setting.on_progress(f"prefix {turn} of {name}")
            again[name].append(_ttft(pipe, prefixes[turn % number])[0])
            fresh[name].append(_ttft(pipe, unknown)[0])
        turn += 1
    again = {name: times[number:] or times for name, times in again.items()}
    base_again, base_fresh = again["+ prefix_cache"], fresh["+ prefix_cache"]
    rows: list[tuple[str, dict[str, float | str]]] = []
    worst, best = 0.0, 1.0
    for name, pipe in pipes.items():
        seen = statistics.median(t / b for t, b in zip(fresh[name], base_fresh, strict=True))
        back = statistics.median(t / b for t, b in zip(again[name], base_again, strict=True))
        worst, best = max(worst, seen, back), max(best, 1.0 / back)
        stats = pipe.stats().get("lookup.kv_offload", {})
        rows.append((name, {
            "evicted before, TTFT ms": _ms(again[name]), "/ recompute": back,
            "never seen, TTFT ms": _ms(fresh[name]), "/ plain": seen,
            "restored": stats.get("num_memory_restored", 0) + stats.get("num_file_restored", 0),
            "skipped": stats.get("num_memory_skipped", 0) + stats.get("num_file_skipped", 0),
        }))  # fmt: skip
    return ReuseResult(
        "offload",
        f"{number} prefixes of {length:,} tokens in turn, the pool holds two",
        setting.judge(
            "TTFT at most 5 % above computing it again, whether it was seen before or not",
            f"{100 * (worst - 1):+.1f} % at worst; {best:.1f} times sooner where it was restored",
            worst <= 1.05,
        ),
        rows,
    )


def _kv_bytes_per_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * heads * dim * int(config.num_hidden_layers) * int(model.dtype.itemsize)


WORKLOADS: dict[str, Callable[[Setting], ReuseResult]] = {
    "shared": _shared,
    **no_hits.WORKLOADS,
    "turns": _turns,
    "crowd": _crowd,
    "churn": _churn,
    "kv_bytes": _kv_bytes,
    "offload": _offload,
    **drafting.WORKLOADS,
    **host_clock.WORKLOADS,
}
