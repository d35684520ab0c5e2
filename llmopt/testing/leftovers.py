"""After requests came and went: does everything end, and is everything given back?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmopt.request import Request, SamplingParams
from llmopt.testing.tiny import tiny_prompts

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline

MAX_STEPS = 5000  # more than any check needs; beyond, something waits for ever


def drain(pipeline: InferencePipeline) -> None:
    """Step until the queue is empty."""
    for _ in range(MAX_STEPS):
        if not len(pipeline.queue):
            return
        output = pipeline.advance()
        if not output.num_tokens and not output.finished:
            time.sleep(0.002)  # what it waits for may come from another process
    raise AssertionError(f"requests are not finished after {MAX_STEPS} steps; something waits for ever")


def run_alone(pipeline: InferencePipeline, requests: Sequence[Request]) -> dict[str, list[int]]:
    """The tokens of each request when it runs alone in a pipeline, which is closed afterwards."""
    found = {}
    with pipeline:
        for request in requests:
            twin = Request(request.request_id, request.prompt_ids, request.sampling, request.max_len, wants_text=False)
            pipeline.run([twin])
            found[request.request_id] = twin.output_ids
    return found


def assert_whole(pipeline: InferencePipeline) -> None:
    """Nothing runs any more: every slot is free, and a request that takes the whole pool can run.

    A plugin may keep blocks of finished requests for reuse, as long as it gives them up when they are wanted.

    :param pipeline: built with a pool that holds one sequence of full length and no more.
    """
    pipeline.block_pool.check()
    limit = pipeline.max_num_requests
    free = len(pipeline.queue.free_slots)
    assert free == limit, f"{limit - free} slots are not given back"
    length = pipeline.max_model_len
    (prompt,) = tiny_prompts(1, seed=77, min_length=length - 4, max_length=length - 4)
    request = Request("full", prompt, SamplingParams(ignore_eos=True, max_new_tokens=4), length, wants_text=False)
    pipeline.add(request)
    try:
        drain(pipeline)
    except AssertionError:
        free, all_blocks = pipeline.block_pool.num_free, pipeline.block_pool.num_blocks
        raise AssertionError(
            f"a request that takes the whole pool never runs: {free} of {all_blocks} blocks are free, "
            "and no other request is left"
        ) from None
    got = request.num_output_tokens
    assert got == 4, f"a request that takes the whole pool got {got} of 4 tokens ({request.error!r})"
