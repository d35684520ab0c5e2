#!/usr/bin/env python3
"""Gaps between tokens of running streams while long prompts arrive, with prompts computed here and elsewhere.

    python tests/benchmarks/pd_processes.py MODEL [--plugin NAME]... [--streams N] [--prompt TOKENS] [--seconds S]

For each way of scheduling, streams decode for a while alone, and then while one long prompt after the other is
computed. Prints median and P99 of the gaps in both parts, the time to the first token of the long prompts, and tokens
per second of the streams. ``pd_separation`` in processes keeps half of the CPUs for prompts, also when there are none;
the others have all of them. The tokens of the streams are compared with those of the first way.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import llmopt
from llmopt.request import Request, SamplingParams

WAYS: dict[str, list[str]] = {
    "baseline": [],
    "chunked_prefill": ["chunked_prefill"],
    "pd_separation": ["pd_separation"],
    "pd_separation:mode=process": ["pd_separation:mode=process,min_tokens=256"],
}


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def run(pipe: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Streams alone, then beside long prompts."""
    chooser = random.Random(0)
    vocab_size = pipe.capabilities.vocab_size
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    first_s: list[float] = []
    last: dict[Request, float] = {}
    part = "warm"

    def listen(request: Request) -> None:
        now = time.perf_counter()
        if request in last and part in gaps:
            gaps[part].append(now - last[request])
        last[request] = now

    def ids(count: int) -> list[int]:
        return [chooser.randrange(3, vocab_size) for _ in range(count)]

    def listen_long(request: Request) -> None:
        if request.num_output_tokens == 1:
            first_s.append(time.perf_counter() - request.arrival_s)

    streams = []
    for number in range(options.streams):
        params = SamplingParams(max_new_tokens=1800, ignore_eos=True)
        streams.append(Request(f"stream-{number}", ids(32), params, 32 + 1800, wants_text=False))
        pipe.add(streams[-1], listen)
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end or any(s.num_output_tokens < 2 for s in streams):
        pipe.advance()
    rates = []
    for part in gaps:  # which `listen` reads
        last.clear()
        long: Request | None = None
        number = 0
        start, before = time.perf_counter(), sum(s.num_output_tokens for s in streams)
        while time.perf_counter() < start + options.seconds:
            if part == "beside" and (long is None or long.is_finished):
                number += 1
                params = SamplingParams(max_new_tokens=2, ignore_eos=True)
                long = Request(f"long-{number}", ids(options.prompt), params, options.prompt + 2, wants_text=False)
                pipe.add(long, listen_long)
            pipe.advance()
        rates.append((sum(s.num_output_tokens for s in streams) - before) / (time.perf_counter() - start))
        if long is not None:
            pipe.abort(long)
    kept = [s.output_ids[:60] for s in streams]
    for stream in streams:
        pipe.abort(stream)
    return {"gaps": gaps, "first_s": first_s, "rates": rates, "tokens": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only these; all are run when left out")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print(f"{options.streams} streams, prompts of {options.prompt} tokens, {os.cpu_count()} CPUs, {options.dtype}\n")
    print(f"{'':<28} {'gaps alone (ms)':>20} {'gaps beside prompts (ms)':>26} {'first token':>12} {'tokens/s':>16}")
    print(f"{'':<28} {'P50':>10} {'P99':>9} {'P50':>12} {'P99':>13} {'P50 (s)':>12} {'alone/beside':>16}")
    expected: list[list[int]] | None = None
    for way in options.way or WAYS:
        with llmopt.build(
            options.model,
            [*options.plugin, *WAYS[way]],
            load_options={"dtype": options.dtype},
            max_model_len=max(4096, options.prompt + 64),
            pool_bytes=1 << 30,
        ) as pipe:
            found = run(pipe, options)
        ms = {part: [1e3 * percentile(values, q) for q in (0.5, 0.99)] for part, values in found["gaps"].items()}
        rates = "/".join(f"{rate:.0f}" for rate in found["rates"])
        print(
            f"{way:<28} {ms['alone'][0]:>10.1f} {ms['alone'][1]:>9.1f} {ms['beside'][0]:>12.1f} "
            f"{ms['beside'][1]:>13.1f} {percentile(found['first_s'], 0.5):>12.2f} {rates:>16}"
        )
        count = min(len(t) for t in found["tokens"])
        expected = expected or found["tokens"]
        if any(a[:count] != b[:count] for a, b in zip(expected, found["tokens"], strict=True)):
            print(f"{'':<28} other tokens than the first line")


if __name__ == "__main__":
    main()
