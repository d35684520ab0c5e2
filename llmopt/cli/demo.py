"""``llmopt demo``: a real model speaks, its tokens are checked, two speeds are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmopt.cli.output import load_model, make_plugins, print_json

_QUESTION = "Why does the sea look blue? Answer in three sentences."
_NUM_TOKENS = 48
_ROUNDS = 3


def run(plugin_texts: Sequence[str], *, as_json: bool) -> None:
    """Stream an answer of the demo model, compare with ``model.generate`` in float32, time both.

    With plugins, the answer comes from a pipeline with all of them, and each is timed.

    Exit status 1 when the tokens differ.
    """
    from llmopt.bench.comparison import build_pipeline, contenders_for
    from llmopt.bench.workloads import BenchRequest
    from llmopt.cli.bench import compare_with_progress, read_plugins

    plugins = read_plugins(plugin_texts)
    made = make_plugins(plugin_texts)
    load_options: dict[str, Any] = {"dtype": "float32", "device_map": None}
    model, tokenizer = load_model("demo", **load_options)
    assert tokenizer is not None  # the demo folder has one

    pieces: list[str] = []
    messages = [{"role": "user", "content": _QUESTION}]
    pipe, _ = build_pipeline(model, tokenizer, made, source="demo", load_options=load_options, memory_fraction=0.1)
    try:
        if not as_json:
            print(f"> {_QUESTION}\n")
        for piece in pipe.stream(messages, max_new_tokens=_NUM_TOKENS):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
        if not as_json:
            print("\n")
    finally:
        pipe.close()

    def batch(number: int) -> list[BenchRequest]:
        text = _QUESTION if number > 2 * _ROUNDS else f"{_QUESTION} ({number})"
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        return [BenchRequest(list(encoded["input_ids"]), _NUM_TOKENS)]

    with contenders_for(
        model, tokenizer, plugins, max_model_len=1024, source="demo", load_options=load_options
    ) as contenders:
        result = compare_with_progress(contenders, "demo", batch, dtype="float32", rounds=_ROUNDS)
    speeds = {timing.name: timing.tokens_per_s.median for timing in result.timings}
    broken = [verdict for verdict in result.verdicts if not verdict.passed]
    if as_json:
        print_json(
            {
                "text": "".join(pieces),
                "dtype": "float32",
                "tokens_identical": all(verdict.difference is None for verdict in result.verdicts),
                "tokens_per_s": speeds,
            }
        )
    else:
        differing = [verdict for verdict in result.verdicts if verdict.difference is not None]
        if not differing:
            print(f"Its tokens equal model.generate's ({_NUM_TOKENS} of {_NUM_TOKENS}, float32).")
        for verdict in differing:
            print(f"{verdict.name} ({verdict.promise}): its tokens are NOT model.generate's: {verdict}.")
        print("\n".join(speed_lines(speeds)))
    if broken:
        raise SystemExit(1)


def speed_lines(speeds: dict[str, float]) -> list[str]:
    """A line for each contender: its speed, and how many times that of the first it is.

    The ratio is that of the two speeds shown. Medians of ratios round by round are what `llmopt bench` prints.

    :param speeds: tokens per second, by name.
    """
    first = next(iter(speeds.values()))
    return [f"{name:<16}{speed:6.1f} tokens/s  ({speed / first:.2f}x)" for name, speed in speeds.items()]
