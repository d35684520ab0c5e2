"""Layer 2, plain: first come, first served, continuous batching, long prompts in chunks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmopt.batch import AcceptedTokens, Batch, StepBudget, StepOutput
from llmopt.errors import ContextLengthError, InvalidPromptError, RequestError, RequestTooLargeError
from llmopt.recovery import WrongResultError
from llmopt.request import RequestStatus

if TYPE_CHECKING:
    from llmopt.batch_builder import BatchBuilder
    from llmopt.block_pool import BlockPool
    from llmopt.queue import RequestQueue
    from llmopt.request import Request
    from llmopt.stages import Allocate, Budget, Detokenize, Lookup, Order


class BaselineAdmit:
    """Refuse what can never run; append the rest to the waiting requests."""

    def __init__(self, allocate: Allocate, pool: BlockPool, vocab_size: int, max_model_len: int) -> None:
        self.allocate = allocate
        self.pool = pool
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def __call__(self, request: Request, queue: RequestQueue) -> None:
        name = request.request_id
        if name in queue.by_id:
            raise RequestError(f"request id {name!r} belongs to a live request. Choose another, or wait for its end.")
        ids = request.token_ids[: request.num_tokens]
        if ids.size == 0:
            raise InvalidPromptError(f"request {name!r} has an empty prompt. Give at least one token.")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = next(int(i) for i in ids if not 0 <= i < self.vocab_size)
            raise InvalidPromptError(
                f"request {name!r} has token id {bad}; the vocabulary of the model is 0 to {self.vocab_size - 1}."
            )
        wanted = request.num_prompt_tokens + (request.sampling.max_new_tokens or 1)
        if wanted > self.max_model_len:
            raise ContextLengthError(
                f"request {name!r} has a prompt of {request.num_prompt_tokens} tokens and wants at least "
                f"{request.sampling.max_new_tokens or 1} more; the limit is {self.max_model_len} together. "
                "Shorten the prompt, ask for fewer tokens, or build with a larger max_model_len."
            )
        outside = [i for i in request.sampling.logit_bias or () if not 0 <= i < self.vocab_size]
        if outside:
            raise RequestError(
                f"request {name!r} has a logit_bias for token id {outside[0]}; the vocabulary of the model is 0 to "
                f"{self.vocab_size - 1}."
            )
        needed = self.allocate.num_blocks_ever(request)
        if needed > self.pool.num_blocks:
            raise RequestTooLargeError(
                f"request {name!r} needs {needed} KV blocks of {self.pool.block_size} tokens, the pool has "
                f"{self.pool.num_blocks}. Ask for fewer tokens, or build with a larger pool_bytes."
            )
        queue.add(request)


class BaselineOrder:
    """First come, first served; pre-empted requests stand at the head of the line."""

    def __call__(self, queue: RequestQueue) -> None:
        return None


class BaselineBudget:
    """So many tokens per step, of whatever kind."""

    def __init__(self, max_tokens_per_step: int) -> None:
        self.max_tokens_per_step = max_tokens_per_step

    def __call__(self, queue: RequestQueue) -> StepBudget:
        return StepBudget(self.max_tokens_per_step, self.max_tokens_per_step)


class BaselineSchedule:
    """Decodes first, then prompts that are under way, then waiting requests; each in the order of its line.

    Policy when the pool is short: a waiting request that lacks blocks lets later ones pass, until ``max_overtakes``
    requests have started before it; then nobody passes, so it runs at the latest when the running ones end. A running
    request that lacks blocks pre-empts the one at the end of the line, which starts again from its first token; nobody
    starts in such a step.

    :param can_chunk: whether a prompt may be computed in several steps; recurrent states only take a whole one.
    :param num_lookahead: draft tokens to keep room for.
    """

    max_overtakes = 64

    def __init__(
        self,
        order: Order,
        budget: Budget,
        allocate: Allocate,
        lookup: Lookup,
        builder: BatchBuilder,
        max_num_requests: int,
        can_chunk: bool,
        num_lookahead: int,
    ) -> None:
        self.order = order
        self.budget = budget
        self.allocate = allocate
        self.lookup = lookup
        self.builder = builder
        self.max_num_requests = max_num_requests
        self.can_chunk = can_chunk
        self.num_lookahead = num_lookahead
        self.num_preemptions = 0
        self._overtakes: dict[Request, int] = {}  # head of the line -> requests that passed it

    def __call__(self, queue: RequestQueue) -> Batch | None:
        self.order(queue)
        budget = self.budget(queue)
        if not isinstance(budget, StepBudget):
            raise WrongResultError("budget", budget, "a StepBudget")
        if queue.is_alone:
            budget = StepBudget(budget.num_tokens, budget.num_tokens)
        queue.wake_s = None
        num_preemptions = self.num_preemptions
        allocate, num_lookahead = self.allocate, self.num_lookahead
        chosen: dict[Request, int] = {}
        prompts: list[Request] = []
        left = budget.num_tokens
        for request in list(queue.running):
            behind = request.num_tokens - request.num_computed_tokens
            if behind > 1 or (behind and request.companions is not None):
                prompts.append(request)
            elif (
                behind  # 0: waits for its group
                and left > 0
                and request.status is RequestStatus.RUNNING
                and (allocate(request, 1 + num_lookahead) or self._make_room(request, 1, queue, chosen))
            ):
                chosen[request] = 1
                left -= 1
        num_prefill = min(left, budget.num_prefill_tokens)
        if num_prefill > 0 and (prompts or (queue.waiting and budget.may_start)):
            may_start = budget.may_start and num_preemptions == self.num_preemptions
            self._fill(queue, chosen, prompts, may_start, left, num_prefill, budget.num_first_tokens)
        if not chosen:
            if num_prefill > 0 and budget.may_start and self._break_stall(queue):
                return self(queue)
            queue.wake_s = budget.wake_s
            return None
        return self.builder.build(list(chosen), list(chosen.values()))

    def _fill(
        self,
        queue: RequestQueue,
        chosen: dict[Request, int],
        prompts: list[Request],
        may_start: bool,
        left: int,
        num_prefill: int,
        num_first: int | None,
    ) -> None:
        """Give prompt tokens to running requests, and start waiting ones.

        :param prompts: running requests that are more than one token behind.
        :param left: tokens of the step that decodes have left.
        :param num_prefill: how many of them may belong to prompts.
        :param num_first: see `StepBudget`.
        """
        line = [*prompts, *queue.waiting] if may_start else prompts
        if num_first is not None and len(line) > 1:  # the first keeps its place; the others by what they lack
            line = [line[0], *sorted(line[1:], key=_remaining)]
        decodes = len(chosen)
        num_preemptions = self.num_preemptions
        blocked: Request | None = None
        num_failed = 0
        for place, request in enumerate(line):
            if num_prefill <= 0:
                break
            if request in chosen:
                continue  # came with a companion
            limit = num_prefill if num_first is None or place or len(line) == 1 else min(num_prefill, num_first)
            if not self.can_chunk or request.companions is not None:  # whole: the first may go beyond its share
                limit = num_prefill if len(chosen) > decodes else left
            if request.status is RequestStatus.RUNNING:
                num_new = self._fit(request, limit, bool(chosen))
                if num_new and (
                    self.allocate(request, num_new + self.num_lookahead)
                    or self._make_room(request, num_new, queue, chosen)
                ):
                    chosen[request] = num_new
                    num_prefill -= num_new
                    left -= num_new
                continue
            if not may_start or num_preemptions != self.num_preemptions:
                continue
            if len(queue.running) >= self.max_num_requests or not queue.free_slots:
                may_start = False
                continue
            if request.parent is not None and request.parent.status is RequestStatus.WAITING:
                continue  # shares a prompt that has not started; it holds nobody up meanwhile
            is_started = self._start(request, queue, chosen, limit)
            if is_started is None:
                continue  # waits for KV that somebody computes; it lacks no blocks, and holds nobody up
            if not is_started:
                blocked = blocked or request
                num_failed += 1  # a long line of requests that all lack blocks is not walked to its end in every step
                if num_failed > self.max_overtakes or self._overtakes.get(blocked, 0) >= self.max_overtakes:
                    may_start = False
                continue
            num_new = chosen[request]
            if request.companions is not None:
                num_new += self._start_companions(request, queue, chosen)
            num_prefill -= num_new
            left -= num_new
            self._overtakes.pop(request, None)
            if blocked is not None:
                self._overtakes[blocked] = self._overtakes.get(blocked, 0) + 1
                if self._overtakes[blocked] >= self.max_overtakes:
                    may_start = False
        if len(self._overtakes) > len(queue):
            self._overtakes = {r: n for r, n in self._overtakes.items() if queue.by_id.get(r.request_id) is r}

    def _fit(self, request: Request, budget: int, has_company: bool) -> int:
        """Tokens of a request that this step can take."""
        behind = request.num_tokens - request.num_computed_tokens
        can_chunk = self.can_chunk
        if request.companions is not None and request.num_computed_tokens < request.num_prompt_tokens:
            behind, can_chunk = request.num_prompt_tokens - request.num_computed_tokens, False
        elif not can_chunk and request.num_computed_tokens:
            behind = 1  # also after a shared prefill that had to be repeated: its tokens follow one by one
        if behind <= budget or can_chunk:
            return min(behind, budget)
        return 0 if has_company else behind

    def _make_room(self, request: Request, num_new: int, queue: RequestQueue, chosen: dict[Request, int]) -> bool:
        """Pre-empt from the end of the line until a running request has its blocks; False when it went itself."""
        while not self.allocate(request, num_new + self.num_lookahead):
            victim = queue.running[-1]
            chosen.pop(victim, None)
            self.allocate.free(victim)
            queue.preempt(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        return True

    def _break_stall(self, queue: RequestQueue) -> bool:
        """Free blocks when lockstep groups wait for members that cannot start.

        Every running request then waits, so the group that started first may take all: the others go back to the end
        of the line, and its own members come to the front of it. Returns whether anything changed.
        """
        if not queue.running or not queue.waiting:
            return False
        first = queue.running[0].lockstep
        victims = [r for r in queue.running if r.lockstep is not first]
        for victim in victims:
            self.allocate.free(victim)
            queue.preempt(victim)
            queue.waiting.rotate(-1)  # from the head of the line to its end
            self.num_preemptions += 1
        if first is None:
            return bool(victims)
        ordered = sorted(queue.waiting, key=lambda r: r.lockstep is not first)
        is_changed = bool(victims) or ordered != list(queue.waiting)
        queue.waiting.clear()
        queue.waiting.extend(ordered)
        return is_changed

    def _start(self, request: Request, queue: RequestQueue, chosen: dict[Request, int], budget: int) -> bool | None:
        """Whether a waiting request runs in this step; None when `lookup` tells it to wait."""
        found = 0 if request.media is not None else self.lookup(request)  # ids beside media only hold places
        if found is None:
            return None
        request.num_computed_tokens = request.num_cached_tokens = found
        num_new = self._fit(request, budget, bool(chosen))
        if num_new == 0 or not self.allocate(request, num_new + self.num_lookahead):
            self.allocate.free(request)  # what `lookup` shared
            request.num_computed_tokens = request.num_cached_tokens = 0
            return False
        queue.start(request)
        chosen[request] = num_new
        return True

    def _start_companions(self, first: Request, queue: RequestQueue, chosen: dict[Request, int]) -> int:
        """Start those who share a prefill with a request that starts: it computes them anyway. Returns their tokens.

        One that finds no blocks or slot starts later, and the prefill is repeated for it.
        """
        total = 0
        for request in [r for r in queue.waiting if r.companions is first.companions]:
            if len(queue.running) >= self.max_num_requests or not queue.free_slots:
                break
            if self._start(request, queue, chosen, budget=request.num_prompt_tokens):
                total += chosen[request]
        return total

    def stats(self) -> dict[str, int]:
        return {"num_preemptions": self.num_preemptions}


def _remaining(request: Request) -> tuple[int, int]:
    """Sorts prompts by urgency, then by the tokens they lack."""
    return request.priority, request.num_tokens - request.num_computed_tokens


class BaselineCommit:
    """Advance the requests of a step, turn tokens into text, and let finished requests go at once."""

    def __init__(self, allocate: Allocate, detokenize: Detokenize, queue: RequestQueue) -> None:
        self.allocate = allocate
        self.detokenize = detokenize
        self.queue = queue

    def __call__(self, batch: Batch, accepted: AcceptedTokens) -> StepOutput:
        for request, num_new, num_drafts in zip(
            batch.requests, batch.num_scheduled.tolist(), batch.num_drafts.tolist(), strict=True
        ):
            request.num_computed_tokens += num_new - num_drafts
        output = StepOutput(num_tokens=batch.num_tokens)
        now = time.perf_counter()
        for request, token_ids, reason in zip(
            accepted.requests, accepted.token_ids, accepted.finish_reasons, strict=True
        ):
            try:
                num_kept = self._append(request, token_ids)
            except Exception as error:  # text of one request must not stop the others
                request.finish("error", error)
                num_kept = 0
            if num_kept:
                request.num_computed_tokens += num_kept - 1  # accepted drafts are in the pool
                request.first_token_s = request.first_token_s or now
                output.num_new_tokens += num_kept
                output.advanced.append(request)
            if reason is not None and not request.is_finished:
                request.finish(reason)
            if request.is_finished:
                self._release(request, output)
        for name, cause in accepted.errors.items():
            failed = self.queue.by_id.get(name)
            if failed is not None:
                failed.finish("error", cause)
                self._release(failed, output)
        return output

    def _append(self, request: Request, token_ids: list[int]) -> int:
        """Append tokens until one ends the request. Returns how many were kept."""
        if request.lockstep is not None:  # its group decides about the end
            for token_id in token_ids:
                request.append(token_id)
            return len(token_ids)
        if len(token_ids) == 1 and not request.wants_text:  # the short way of most tokens
            (token_id,) = token_ids
            request.append(token_id)
            if token_id in request.eos_token_ids:
                request.stop_reason = token_id
                request.finish("stop")
            elif request.num_tokens >= request.max_len:
                request.finish("length")
            return 1
        looks_for_stops = request.wants_text and bool(request.sampling.stop)  # at which token one is complete
        for count, token_id in enumerate(token_ids, start=1):
            request.append(token_id)
            if token_id in request.eos_token_ids:
                request.stop_reason = token_id
                request.finish("stop")
            elif looks_for_stops or (request.wants_text and count == len(token_ids)):
                self._add_text(request)
                if request.stop_reason is not None:
                    request.finish("stop")
            if not request.is_finished and request.num_tokens >= request.max_len:
                request.finish("length")
            if request.is_finished:
                if request.wants_text and not isinstance(request.stop_reason, str):  # nothing follows a stop string
                    self._add_text(request)
                    if request.finish_reason == "length" and request.stop_reason is not None:
                        request.finish("stop")
                return count
        return len(token_ids)

    def _add_text(self, request: Request) -> None:
        piece = self.detokenize(request)
        try:
            request.text += piece
        except TypeError as error:
            raise WrongResultError("detokenize", piece, "a str") from error

    def _release(self, request: Request, output: StepOutput) -> None:
        self.queue.remove(request)
        if not request.keep_blocks:
            self.allocate.free(request)
        output.finished.append(request)
