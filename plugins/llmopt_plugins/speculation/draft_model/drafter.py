"""The drafter: a second, smaller model decodes a few tokens ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from llmopt.batch import BestTokens
from llmopt.threads import one_torch_thread
from llmopt_plugins.speculation.draft_model.twins import Twins
from llmopt_plugins.speculation.drafter import Draft

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request


class ModelDrafter:
    """Drafts chains with a pipeline of its own, of which it uses executor, blocks and sampler.

    A draft of a sampled request is sampled as well, with the parameters and the random numbers of the target: a token
    depends on seed and place only, so two models that agree draw the same one.

    :param pipeline: of the draft model.
    :param max_num_draft: tokens of a draft at most.
    :param ahead: draft on while the target verifies, as if every draft were accepted. For devices of their own.
    """

    num_kinds = 1
    is_cheap = False
    has_trees = False

    def __init__(self, pipeline: InferencePipeline, max_num_draft: int, ahead: bool = False) -> None:
        self.pipeline = pipeline
        pool, size = pipeline.block_pool, pipeline.capabilities.vocab_size
        self.twins = Twins(pool, pipeline.max_model_len, size, 2 * max_num_draft + 1)
        self.max_num_draft = max_num_draft
        self._chunk = pipeline.config.scheduling.max_tokens_per_step
        self._thread = ThreadPoolExecutor(1, "llmopt-draft") if ahead else None
        self._running: Future[None] | None = None
        self._ahead: dict[Request, list[int]] = {}  # all ids of a twin, those drafted ahead included
        self._counts = {"draft_steps": 0, "draft_tokens_computed": 0, "draft_hits_ahead": 0}

    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        self._wait()
        drafts: list[Draft | None] = [None] * len(requests)
        twins: list[Request] = []
        wanted: list[int] = []
        places: list[int] = []
        for place, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            found = self._found_ahead(request, limit)
            if found:
                self._counts["draft_hits_ahead"] += 1
                drafts[place] = Draft(found)
                continue
            limit = min(limit, self.twins.max_len - request.num_tokens + 1)
            twin = self.twins.follow(request) if limit > 0 and request.media is None else None
            if twin is not None:
                twins.append(twin)
                wanted.append(limit)
                places.append(place)
        self._ahead.clear()
        kept = self.twins.reserve(twins, wanted)
        if not all(kept):
            jobs = [job for job, is_kept in zip(zip(twins, wanted, places, strict=True), kept, strict=True) if is_kept]
            twins, wanted, places = [t for t, _, _ in jobs], [n for _, n, _ in jobs], [p for _, _, p in jobs]
        starts = [twin.num_tokens for twin in twins]
        if twins:
            self._decode(twins, wanted)
        for place, twin, start in zip(places, twins, starts, strict=True):
            drafts[place] = Draft(twin.token_ids[start : twin.num_tokens].tolist())
        if self._thread is not None:
            self._start_ahead(requests, drafts)
        return drafts

    def _decode(self, twins: list[Request], limits: list[int]) -> None:
        """Append ``limits[i]`` tokens to each twin, fewer where its sequence ends."""
        ends = [twin.num_tokens + limit for twin, limit in zip(twins, limits, strict=True)]
        self._catch_up(twins)
        rows = list(zip(twins, ends, strict=True))
        with torch.inference_mode():
            while rows:
                active = [twin for twin, _ in rows]
                counts = [twin.num_tokens - twin.num_computed_tokens for twin in active]
                tokens = self._run(active, counts)
                left = []
                for (twin, end), count in zip(rows, counts, strict=True):
                    twin.num_computed_tokens += count
                    token = tokens.get(twin)
                    if token is None:  # its logits are no numbers: the target will say so, if it is so there
                        continue
                    twin.append(token)
                    if twin.num_tokens < end and token not in twin.eos_token_ids and token < self.twins.vocab_size:
                        left.append((twin, end))
                rows = left

    def _catch_up(self, twins: list[Request]) -> None:
        """Compute long prompts in chunks, all but their last part."""
        with torch.inference_mode():
            while True:
                behind = [(twin, twin.num_tokens - twin.num_computed_tokens) for twin in twins]
                if sum(count for _, count in behind) <= self._chunk:
                    return
                twin, count = max(behind, key=lambda pair: pair[1])
                count = min(count - 1, self._chunk)
                if count < 1:  # more rows than a step may have tokens
                    return
                self._run([twin], [count])
                twin.num_computed_tokens += count

    def _run(self, twins: list[Request], counts: list[int]) -> dict[Request, int]:
        """One forward of the draft model: the next token of each twin that reaches its end."""
        pipeline = self.pipeline
        batch = pipeline.batch_builder.build(twins, counts)
        self._counts["draft_steps"] += 1
        self._counts["draft_tokens_computed"] += batch.num_tokens
        logits = pipeline.execute(batch, None)
        if pipeline.has_own_threads and not isinstance(logits, BestTokens):
            with one_torch_thread():
                accepted = pipeline.verify(batch, None, logits, None)
        else:
            accepted = pipeline.verify(batch, None, logits, None)
        return {twin: ids[0] for twin, ids in zip(accepted.requests, accepted.token_ids, strict=True)}

    # -- ahead of the target ------------------------------------------------------------------------------------------
    def _start_ahead(self, requests: Sequence[Request], drafts: list[Draft | None]) -> None:
        """Go on behind the drafts on another thread, while the target runs."""
        twins: list[Request] = []
        limits: list[int] = []
        owners: list[Request] = []
        for request, draft in zip(requests, drafts, strict=True):
            if draft is None or not draft.token_ids or draft.token_ids[-1] in request.eos_token_ids:
                continue
            count = request.num_tokens + len(draft.token_ids)
            twin = self.twins.drafted(request, count)
            limit = min(self.max_num_draft + 1, self.twins.max_len - count + 1)
            if twin is None or limit < 1:
                continue
            twins.append(twin)
            limits.append(limit)
            owners.append(request)
        kept = self.twins.reserve(twins, limits)
        jobs = [job for job, is_kept in zip(zip(owners, twins, limits, strict=True), kept, strict=True) if is_kept]
        if not jobs or self._thread is None:
            return

        def run() -> None:
            self._decode([twin for _, twin, _ in jobs], [limit for _, _, limit in jobs])
            for request, twin, _ in jobs:
                self._ahead[request] = twin.token_ids[: twin.num_tokens].tolist()

        self._running = self._thread.submit(run)

    def _found_ahead(self, request: Request, limit: int) -> list[int]:
        """What was drafted ahead, as far as it fits what the target chose since."""
        ids = self._ahead.get(request)
        if ids is None or len(ids) <= request.num_tokens:
            return []
        if ids[: request.num_tokens] != request.token_ids[: request.num_tokens].tolist():
            return []
        return ids[request.num_tokens : request.num_tokens + limit]

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    # -- told by the stages -------------------------------------------------------------------------------------------
    def draft_s(self, num_rows: int, num_draft: int) -> float:
        cost = self.pipeline.cost_model
        if cost.measured is None:
            return 0.0
        return num_draft * cost.step_s(num_rows, num_rows, 0, 0)

    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        """What was accepted is read from the requests when they draft again."""

    def forget(self, request: Request) -> None:
        self._wait()
        self._ahead.pop(request, None)
        self.twins.forget(request)

    def stats(self) -> dict[str, Any]:
        return {**self._counts, "draft_blocks_used": self.pipeline.block_pool.num_used}

    def close(self) -> None:
        """Free the draft model's blocks and stop its thread."""
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()
        self.twins.clear()
        self.pipeline.close()
