"""What keeping KV costs when no prompt ever comes again, told apart from where memory happens to lie.

no_hits     prompts that never repeat: what keeping KV costs
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmopt.bench.reuse import ReuseResult, Setting
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request


def _no_hits(setting: Setting) -> ReuseResult:
    """Prompts that never repeat, in the steady state: all memory was written before, and old blocks are evicted.

    Where weights and KV happen to lie makes more of a difference than what is looked for: two plain pipelines with
    weights of their own were found 2 % apart, and 3 % with the same weights and other blocks of one pool. So both run
    with one executor on the same memory: the plain one is given the blocks that the other used last, as if it had freed
    them itself, and writes over what was kept there, which nobody will ask for.
    """
    from llmopt.bench.reuse import ReuseResult, _ids, _kv_bytes_per_token, _request

    rows, length, new, warm_up = 8, 128, 32, 4
    chooser = random.Random(2)
    # three rounds: a prompt in the fourth one evicts the oldest
    size = 3 * rows * (length + new) * _kv_bytes_per_token(setting.model)
    plain, kept = (setting.build(*own, pool_bytes=size, max_model_len=512) for own in ((), ("prefix_cache",)))
    plain.execute = kept.execute
    each = kept.block_pool.num_blocks_for(length + new)  # of a request
    pipes = {"llmopt": plain, "+ prefix_cache": kept}
    steps: dict[str, list[list[float]]] = {name: [] for name in pipes}
    end = time.monotonic() + setting.seconds
    turn = 0
    while turn < warm_up + 3 or (time.monotonic() < end and turn < 200):
        setting.on_progress(f"round {turn}")
        for name in list(pipes)[:: 1 if turn % 2 else -1]:
            if name == "llmopt":
                _leave(plain, kept.block_pool.kept_blocks()[-rows * each :] or list(range(rows * each)), each)
            made = [_request(pipes[name], _ids(chooser, length, setting.vocab_size), new) for _ in range(rows)]
            seconds = _step_s(pipes[name], made)
            if turn >= warm_up:
                steps[name].append(seconds)
        turn += 1
    count = turn - warm_up
    usual = {name: _usual_s(rounds) for name, rounds in steps.items()}
    cost = usual["+ prefix_cache"] / usual["llmopt"] - 1
    parts = [
        _usual_s(steps["+ prefix_cache"][part::4]) / _usual_s(steps["llmopt"][part::4]) - 1
        for part in range(min(4, count))
    ]
    return ReuseResult(
        "no_hits",
        f"{rows} new prompts of {length} tokens, {new} new tokens each; {count} rounds",
        setting.judge(
            "costs less than 1 % of throughput",
            f"{100 * cost:+.2f} %, from {100 * min(parts):+.1f} to {100 * max(parts):+.1f} in quarters of the rounds",
            cost < 0.01,
        ),
        [
            ("llmopt", {"tokens/s": rows * new / usual["llmopt"]}),
            (
                "+ prefix_cache",
                {
                    "tokens/s": rows * new / usual["+ prefix_cache"],
                    "cost %": 100 * cost,
                    "hits": kept.stats()["lookup.prefix_cache"]["num_hits"],
                    "evicted": kept.block_pool.num_evicted,
                },
            ),
        ],
    )


def _leave(pipe: InferencePipeline, blocks: list[int], each: int) -> None:
    """Leave these blocks to an idle pipeline, empty, and no others.

    Every ``each`` of them go to one request, in the order in which the other pipeline took them: sequences that ascend
    in memory are read faster than those that descend.

    :param blocks: in the order in which they would be evicted.
    """
    pool = pipe.block_pool
    pool.allocate(pool.num_free)
    for end in range(len(blocks), 0, -each):
        pool.free(blocks[end - each : end])


def _step_s(pipe: InferencePipeline, requests: Sequence[Request]) -> list[float]:
    """Run requests; seconds of each step that computed something, with what came before it."""
    seconds: list[float] = []
    start = time.perf_counter()
    pipe.add_all(requests)
    while len(pipe.queue):
        output = pipe.advance()
        if output.num_tokens:
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
    return seconds


def _usual_s(rounds: Sequence[Sequence[float]]) -> float:
    """Seconds of a round: of its first step, its second and so on the median over the rounds.

    Other programs disturb some step of nearly every round, and only a few of all rounds' first, second, ... steps.
    """
    count = min(map(len, rounds))  # schedulers may take more steps; those are counted with the last one
    equal = [[*seconds[: count - 1], sum(seconds[count - 1 :])] for seconds in rounds]
    return sum(statistics.median(seconds[step] for seconds in equal) for step in range(count))


WORKLOADS: dict[str, Callable[[Setting], ReuseResult]] = {"no_hits": _no_hits}
