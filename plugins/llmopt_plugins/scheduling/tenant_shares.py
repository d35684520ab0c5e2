"""Who has been served how much."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmopt.queue import RequestQueue
    from llmopt.request import Request

OUTPUT_WEIGHT = 2.0  # a new token counts as so many prompt tokens: it needs a step of its own


class TenantShares:
    """Virtual token counters: the tenant that was served least comes first.

    A tenant that comes back after a pause starts level with the least served of those who are there, so that nobody
    saves up a claim. What a pre-empted request computes again is not charged twice.
    """

    def __init__(self) -> None:
        self.served: dict[str | None, float] = {}  # weighted tokens, of tenants with live requests
        self._charged: dict[Request, float] = {}  # live requests

    def update(self, queue: RequestQueue) -> None:
        """Charge what was served since the last call, and take note of who is there."""
        for request, before in list(self._charged.items()):
            now = max(before, _served(request))
            self.served[request.tenant] += now - before
            self._charged[request] = now
            if queue.by_id.get(request.request_id) is not request:
                del self._charged[request]
        live = {request.tenant for request in queue}
        floor = min((self.served[t] for t in live if t in self.served), default=0.0)
        served = {tenant: max(self.served.get(tenant, floor), floor) for tenant in live}
        low = min(served.values(), default=0.0)
        self.served = {tenant: value - low for tenant, value in served.items()}  # only differences count
        for request in queue.waiting:
            self._charged.setdefault(request, 0.0)

    def merged(self, requests: Iterable[Request]) -> list[Request]:
        """Requests in the order of a fair service; those of one tenant keep their order."""
        lines: dict[str | None, deque[Request]] = {}
        for request in requests:
            lines.setdefault(request.tenant, deque()).append(request)
        if len(lines) == 1:
            return list(next(iter(lines.values())))
        heap = [(self.served.get(tenant, 0.0), place, line) for place, line in enumerate(lines.values())
                for tenant in (line[0].tenant,)]  # fmt: skip
        heapq.heapify(heap)
        merged: list[Request] = []
        while heap:
            served, place, line = heapq.heappop(heap)
            request = line.popleft()
            merged.append(request)
            if line:
                heapq.heappush(heap, (served + request.num_tokens, place, line))
        return merged


def _served(request: Request) -> float:
    computed = min(request.num_computed_tokens, request.num_prompt_tokens)
    return computed + OUTPUT_WEIGHT * request.num_output_tokens
