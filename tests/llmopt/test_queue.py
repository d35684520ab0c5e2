"""Requests between arrival and finish: order, slots, and the view that shows one alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmopt.queue import RequestQueue
from llmopt.request import RequestStatus
from tests.llmopt.helpers import request


def filled(count: int, num_slots: int = 4) -> RequestQueue:
    queue = RequestQueue(num_slots)
    for number in range(count):
        queue.add(request([1, 2], str(number)))
    return queue


def ids(requests: object) -> str:
    return "".join(r.request_id for r in requests)  # type: ignore[attr-defined]


def test_running_requests_come_first_and_waiting_ones_keep_their_order() -> None:
    queue = filled(4)
    queue.start(queue.waiting[1])
    assert ids(queue) == "1023"
    assert len(queue) == 4


def test_a_preempted_request_returns_to_the_head_of_the_line_and_starts_from_its_first_token() -> None:
    queue = filled(3)
    first = queue.waiting[0]
    queue.start(first)
    assert first.slot == 0
    first.num_computed_tokens = 2
    queue.preempt(first)
    assert ids(queue.waiting) == "012"
    assert (first.status, first.slot, first.num_computed_tokens) == (RequestStatus.WAITING, -1, 0)
    assert first.num_preemptions == 1


def test_removing_a_request_leaves_its_namesake_alone() -> None:
    queue = filled(1)
    queue.remove(request([5], "0"))  # the same id, another request
    assert len(queue) == 1
    queue.remove(queue.by_id["0"])
    assert len(queue) == 0
    assert not queue.waiting


def test_a_request_started_in_a_view_gives_its_slot_back_when_it_ends_there() -> None:
    queue = filled(2, num_slots=2)
    lone = queue.waiting[0]
    view = queue.only(lone)
    assert ids(view) == "0"
    view.start(lone)
    queue.remove(lone)  # what commit does
    queue.absorb(view)
    assert sorted(queue.free_slots) == [0, 1]
    assert ids(queue) == "1"


def test_what_happens_in_a_view_happens_to_the_request() -> None:
    queue = filled(3)
    lone = queue.waiting[1]
    view = queue.only(lone)
    view.start(lone)
    queue.absorb(view)
    assert (ids(queue.running), ids(queue.waiting)) == ("1", "02")
    view = queue.only(lone)
    view.preempt(lone)
    queue.absorb(view)
    assert (ids(queue.running), ids(queue.waiting)) == ("", "102")


@given(st.lists(st.tuples(st.sampled_from(["add", "start", "preempt", "remove"]), st.integers(0, 9)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_slots_stay_unique_and_none_is_lost(actions: list[tuple[str, int]]) -> None:
    queue = RequestQueue(3)
    for number, (action, place) in enumerate(actions):
        if action == "add":
            queue.add(request([1], str(number)))
        elif action == "start" and queue.waiting and queue.free_slots:
            queue.start(queue.waiting[place % len(queue.waiting)])
        elif action == "preempt" and queue.running:
            queue.preempt(queue.running[place % len(queue.running)])
        elif action == "remove" and len(queue):
            queue.remove(list(queue)[place % len(queue)])
        slots = [r.slot for r in queue.running] + queue.free_slots
        assert sorted(slots) == [0, 1, 2]
        assert all(r.slot == -1 for r in queue.waiting)
        assert len(queue) == len(queue.running) + len(queue.waiting)
