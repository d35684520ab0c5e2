"""The first look of the cost model: a few forwards through the built stages, on free blocks of the pool.

Nothing is left behind: blocks go back in their order, no request enters the queue, no counter of the pipeline moves. An
executor counts these forwards among its own, as it does those of the self-test.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmopt.batch_builder import BatchBuilder
from llmopt.cost_model import Measurements, num_pairs
from llmopt.request import Request, SamplingParams
from llmopt.threads import one_torch_thread

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline

_BUDGET_S = 2.0
_SHARE_OF_PROMPTS, _SHARE_OF_ROWS = 0.65, 0.8  # of the budget that is over after them
_PROMPTS = (1, 16, 128, 512, 64, 4, 32, 256, 8, 2, 1024, 2048)  # lengths, in the order in which they are run
_MAX_BYTES, _MAX_TOKENS = 64 << 20, 640  # of the pool that are written to; whichever is more
_GREEDY = SamplingParams(ignore_eos=True)
_MAX_ROWS_WITH_STATES = 4  # each needs a prompt of its own before


def measure(pipeline: InferencePipeline, budget_s: float = _BUDGET_S) -> None:
    """Fit the pipeline's cost model to this machine and model.

    Slow models are measured at fewer points; two prompts are run in any case. Leaves the model unmeasured when the pool
    has no room for one token.

    :param budget_s: seconds that it should take.
    """
    start = time.perf_counter()
    pool = pipeline.block_pool
    per_token = sum(shape.bytes_per_token for shape in pipeline.kv_cache.shapes.values())
    room = min(pool.num_free - pool.num_kept, max(1, pool.num_blocks // 4, min(pool.num_blocks, 8)))
    if per_token:
        most = max(_MAX_BYTES // per_token, _MAX_TOKENS)
        room = min(room, max(2, most // pool.block_size))
    if room == 0 or not pipeline.queue.free_slots or pipeline.max_model_len < 2:
        return
    model = pipeline.model
    was_training = model.training
    blocks = pool.allocate(room)
    try:
        if was_training:
            model.eval()
        with torch.no_grad():
            found = _Measuring(pipeline, blocks, start + budget_s).run(start)
    finally:
        pool.free(blocks[::-1])  # the order in which they were taken
        if was_training:
            model.train()
    pipeline.cost_model.fit(found)


class _Measuring:
    """Forwards of invented requests.

    :param blocks: of the pool, for their KV.
    :param deadline: time of time.perf_counter() at which it should be over.
    """

    def __init__(self, pipeline: InferencePipeline, blocks: list[int], deadline: float) -> None:
        self.pipeline, self.blocks = pipeline, blocks
        self.begin, self.deadline = time.perf_counter(), deadline
        self.block_size = pipeline.block_pool.block_size
        per_block = self.block_size * sum(shape.bytes_per_token for shape in pipeline.kv_cache.shapes.values())
        self.written = blocks[: max(4, _MAX_BYTES // per_block)] if per_block else blocks  # by `_clear`
        self.builder = BatchBuilder(self.block_size)  # the pipeline's own goes on with the rows of its last batch
        self.builder.may_want_best = pipeline.batch_builder.may_want_best
        self.has_states = pipeline.capabilities.has_states
        self.room = min(len(blocks) * self.block_size, pipeline.max_model_len - 1)
        self.max_tokens = pipeline.config.scheduling.max_tokens_per_step
        self.ids = np.random.default_rng(0).integers(0, pipeline.capabilities.vocab_size, self.room + 1)

    def run(self, start: float) -> Measurements:
        self._clear()
        prompts = self._prompts()
        rows = self._rows(prompts[0][1])
        fixed_s, byte_s = self._copy()
        # What a decode reads at least, when there was no time to look or noise was larger: a term that is 0 stays 0.
        least_s = byte_s * sum(shape.bytes_per_token for shape in self.pipeline.kv_cache.shapes.values())
        context_s = self._context_token_s(rows)
        context_s = least_s if context_s is None else max(context_s, least_s / 16)
        pair_s = 0.0  # prompts that are never cut: what attention costs is in their own points
        if not self.has_states:
            pair_s = max(self._prefill_pair_s(prompts[-1][1] / prompts[-1][0], context_s), context_s / 64)
        return Measurements(
            prompts=tuple(prompts),
            rows=tuple(rows),
            context_token_s=context_s,
            prefill_pair_s=pair_s,
            copy_fixed_s=fixed_s,
            copy_byte_s=byte_s,
            max_tokens=self.max_tokens,
            took_s=time.perf_counter() - start,
        )

    def _prompts(self) -> list[tuple[int, float]]:
        """Prompts of several lengths, as many as the time allows: first few that lie far apart, then those between."""
        longest = min(self.room, self.max_tokens)
        found: dict[int, float] = {}
        end = self._share_ends(_SHARE_OF_PROMPTS)
        for count in _PROMPTS:
            if count > longest or count in found:
                continue
            if len(found) >= 2 and 2 * self._expect(found, count) > end - time.perf_counter():
                continue
            found[count] = self._time([self._request(0, count, self.blocks)], [count])
        return sorted(found.items())

    @staticmethod
    def _expect(found: dict[int, float], count: int) -> float:
        """Seconds of a prompt of ``count`` tokens, from shorter ones; rather too many, since attention grows faster."""
        shorter = sorted(n for n in found if n < count)
        if len(shorter) < 2:
            return found[shorter[0]] * count
        before, last = shorter[-2:]
        slope = max(0.0, found[last] - found[before]) / (last - before)
        return found[last] + 1.5 * slope * (count - last)

    def _rows(self, one_s: float) -> list[tuple[int, float]]:
        """Rows of one token that have read one. ``one_s``: a single row of one token."""
        most = min(len(self.blocks), self.pipeline.max_num_requests, self.max_tokens)
        if self.has_states:
            most = min(most, _MAX_ROWS_WITH_STATES)
        if self.room < 2 or self.block_size < 2:
            return [(1, one_s)]
        points = [(1, one_s)]
        end = self._share_ends(_SHARE_OF_ROWS)
        count, seconds = 4, one_s
        while count <= most and 4 * seconds <= end - time.perf_counter():
            requests = [self._request(1, 2, self.blocks[row : row + 1], row) for row in range(count)]
            if self.has_states:
                self._prefill(requests)
            seconds = self._time(requests, [1] * count)
            points.append((count, seconds))
            count *= 4
        return points

    def _context_token_s(self, rows: Sequence[tuple[int, float]]) -> float | None:
        """Seconds per KV token that a decode reads: rows with long contexts against the same rows with short ones.

        None when there is no time or no room to look.
        """
        count, seconds = [(n, s) for n, s in rows if n <= 4][-1]
        if 4 * seconds > self.deadline - time.perf_counter():
            return None
        share = self.written[: len(self.written) // count * count]
        width = len(share) // count
        length = min(width * self.block_size, self.room)
        if length < 4:
            return None
        tables = [share[row * width : (row + 1) * width] for row in range(count)]
        long = [self._request(length - 1, length, table, row) for row, table in enumerate(tables)]
        short = [self._request(1, 2, table, row) for row, table in enumerate(tables)]
        if self.has_states:
            self._prefill(short)
        seconds = min(self._time(long, [1] * count) for _ in range(2)) - self._time(short, [1] * count)
        return max(0.0, seconds / (count * (length - 2)))

    def _prefill_pair_s(self, token_s: float, context_s: float) -> float:
        """Seconds per token and context token: a chunk at the end of a long prompt against one at its start.

        :param context_s: what reading a KV token takes, which is no part of this.
        """
        left = self.deadline - time.perf_counter()
        count = 64
        while count > 8 and (count * token_s * 4 > left or 2 * count > self.room):
            count //= 2
        start = self.room - count
        if start < count or (count * token_s * 8 > left and count == 8):
            return 0.0
        late = self._time([self._request(start, start + count, self.blocks)], [count])
        early = self._time([self._request(0, count, self.blocks)], [count])
        return max(0.0, (late - early - start * context_s) / (num_pairs(count, start) - num_pairs(count, 0)))

    def _copy(self) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte, of copying blocks out of the pool."""
        layers = self.pipeline.kv_cache.layers
        if not layers:
            return 0.0, 0.0
        sizes: list[tuple[int, float]] = []
        layer = next(iter(layers.values()))
        with torch.inference_mode(False), one_torch_thread():
            for blocks in (self.blocks[:1], self.blocks):
                index = torch.tensor(blocks, device=layer.key.device)
                target = torch.empty((len(blocks), *layer.key.shape[1:]), dtype=layer.key.dtype)
                best = float("inf")
                for _ in range(4):
                    start = time.perf_counter()
                    target.copy_(layer.key[index])
                    best = min(best, time.perf_counter() - start)
                sizes.append((target.numel() * target.element_size(), best))
        (few, fixed_s), (many, seconds) = sizes
        if many <= few:
            return 0.0, seconds / many
        byte_s = max(0.0, (seconds - fixed_s) / (many - few)) or seconds / many
        return max(0.0, fixed_s - byte_s * few), byte_s

    # -- forwards -----------------------------------------------------------------------------------------------------
    def _request(self, num_computed: int, num_tokens: int, blocks: list[int], row: int = 0) -> Request:
        """A request that has ``num_computed`` of ``num_tokens`` tokens in the pool."""
        name = f"cost-{row}"
        request = Request(name, self.ids[:num_tokens].tolist(), _GREEDY, max_len=num_tokens + 1, wants_text=False)
        request.num_computed_tokens = num_computed
        request.block_table = blocks[: -(-num_tokens // self.block_size)]
        request.slot = self.pipeline.queue.free_slots[-1 - row]
        return request

    def _prefill(self, requests: list[Request]) -> None:
        """Give recurrent states to the slots of requests, whose KV is in the pool already."""
        for row, request in enumerate(requests):
            self._execute([self._request(0, 1, request.block_table, row)], [1], 1)

    def _time(self, requests: list[Request], counts: list[int]) -> float:
        """Seconds of a step, the best of several; one that takes long is run once."""
        first = self._execute(requests, counts, 1)
        if first > 0.1 * (self.deadline - self.begin):
            return first
        num_runs = int(min(8, max(1, 0.02 / max(first, 1e-6))))
        return min(first, self._execute(requests, counts, num_runs))

    def _execute(self, requests: list[Request], counts: list[int], num_runs: int) -> float:
        best = float("inf")
        for _ in range(num_runs):
            start = time.perf_counter()
            batch = self.builder.build(requests, counts)
            logits = self.pipeline.execute(batch, None)
            if isinstance(logits, torch.Tensor) and logits.numel() and logits.device.type != "cpu":
                logits[0, 0].item()  # waits for the device
            best = min(best, time.perf_counter() - start)
        return best

    def _clear(self) -> None:
        """Write to blocks that are read: pages that were never written to are all read from one page, too fast."""
        with torch.inference_mode(False):
            for layer in self.pipeline.kv_cache.layers.values():
                index = torch.tensor(self.written, device=layer.key.device)
                layer.key[index] = 0
                layer.value[index] = 0

    def _share_ends(self, share: float) -> float:
        return self.begin + share * (self.deadline - self.begin)
