"""The requests that are not finished: waiting for KV, or running."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from llmopt.request import Request, RequestStatus


@dataclass(slots=True)
class QueueLoad:
    """What the running requests need next."""

    num_decodes: int  # requests that are one token behind
    num_context_tokens: int  # KV tokens that these read in a step
    prompts: list[Request]  # requests that are more tokens behind, in the order of the line
    num_prompt_tokens: int  # tokens that the prompts are behind, together


class RequestQueue:
    """Waiting requests in order of arrival, running requests in order of admission.

    :param num_slots: how many requests may run at once; each running request has its own slot number.
    """

    def __init__(self, num_slots: int) -> None:
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.wake_s: float | None = None  # when the scheduler wants a step although nothing happens, of perf_counter()
        self.refused: list[Request] = []  # ended by `refuse`; the pipeline tells those who wait for them
        self.num_added = 0  # requests that ever arrived
        self.arrivals_s: deque[float] = deque(maxlen=32)  # when the last of them arrived
        self.is_alone = False  # an `only` view: its request is to run now, whatever a budget says

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        yield from list(self.running)
        yield from list(self.waiting)

    def add(self, request: Request) -> None:
        """Append a new request."""
        self.by_id[request.request_id] = request
        self.waiting.append(request)
        self.num_added += 1
        self.arrivals_s.append(request.arrival_s)

    def load(self) -> QueueLoad:
        """Count what runs. One walk over the running requests, so ask once per step."""
        num_decodes = num_context = num_missing = 0
        prompts: list[Request] = []
        for request in self.running:
            behind = request.num_tokens - request.num_computed_tokens
            if behind > 1:
                prompts.append(request)
                num_missing += behind
            elif behind:
                num_decodes += 1
                num_context += request.num_tokens
        return QueueLoad(num_decodes, num_context, prompts, num_missing)

    def start(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        self.waiting.remove(request)
        request.slot = self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """Return a running request to the head of the waiting ones. Its KV has been freed."""
        self.running.remove(request)
        self._give_slot(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        if self.by_id.get(request.request_id) is not request:
            return
        del self.by_id[request.request_id]
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if not request.keep_blocks:
            self.free_slot(request)

    def refuse(self, request: Request, error: BaseException) -> None:
        """End a waiting request, which holds no KV, with an error that says why."""
        request.finish("error", error)
        self.remove(request)
        self.refused.append(request)

    def free_slot(self, request: Request) -> None:
        """Take the slot back from a request that has one, also when an `only` view started it."""
        if request.slot >= 0:
            self._give_slot(request)

    def _give_slot(self, request: Request) -> None:
        self.free_slots.append(request.slot)
        request.slot = -1

    def only(self, request: Request) -> RequestQueue:
        """A queue that shows one request alone, to find out which request of a batch makes a stage fail."""
        view = RequestQueue(0)
        view.is_alone = True
        view.free_slots = self.free_slots  # shared, so that slots stay unique
        view.by_id[request.request_id] = request
        (view.running if request in self.running else view.waiting).append(request)
        return view

    def absorb(self, view: RequestQueue) -> None:
        """Take over what happened to the request of an `only` view."""
        for request in view.running:
            if request in self.waiting:
                self.waiting.remove(request)
                self.running.append(request)
        for request in view.waiting:
            if request in self.running:
                self.running.remove(request)
                self.waiting.appendleft(request)
        for request in view.refused:
            self.remove(request)
            self.refused.append(request)
