"""What a padded call knows of its rows, what reaches the blocks, and how its rows are scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmopt.baseline import (
    BaselineAllocate,
    BaselineAttend,
    BaselineBudget,
    BaselineLookup,
    BaselineOrder,
    BaselineSchedule,
)
from llmopt.batch_builder import BatchBuilder
from llmopt.block_pool import BlockPool
from llmopt.errors import UnsupportedModelError
from llmopt.hf.padded import PaddedCall, PaddedStep, is_given
from llmopt.kv_cache import KVCache, LayerShape
from llmopt.queue import RequestQueue
from llmopt.request import Request, SamplingParams


def _call(lengths: list[int], **inputs: Any) -> PaddedCall:
    ids = torch.zeros((len(lengths), 0), dtype=torch.long)
    return PaddedCall(ids, inputs, lengths, 4, has_token_types="token_type_ids" in inputs)


def test_positions_go_on_after_the_last_of_the_prompt() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    assert _call([4, 2], position_ids=positions).offsets.tolist() == [[0, 0]]
    assert _call([4, 2], position_ids=positions * 3).offsets.tolist() == [[6, 2]]


def test_one_row_of_positions_stands_for_all() -> None:
    assert _call([4, 4, 4], position_ids=torch.tensor([[2, 3, 4, 5]])).offsets.tolist() == [[2, 2, 2]]


def test_sections_of_positions_go_on_apart() -> None:
    sections = torch.stack([torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 1, 1]])])
    assert _call([4], position_ids=sections).offsets.tolist() == [[0], [-2]]


def test_calls_without_positions_have_no_offset() -> None:
    assert _call([4, 1]).offsets.tolist() == [[0, 0]]


def test_the_type_of_the_last_token_is_that_of_tokens_to_come() -> None:
    call = _call([4, 4], token_type_ids=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert call.token_types_of([1, 0]).tolist() == [8, 4]


def test_pads_and_other_rows_are_no_tokens() -> None:
    assert _call([4, 1, 2]).real_tokens([2, 1]).int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]]


_VALUES = [(None, False), ({}, False), ({"image": None}, False), ({"image": 1}, True), (False, True), (0, True)]


@pytest.mark.parametrize(("value", "given"), _VALUES)
def test_empty_inputs_are_not_given(value: Any, given: bool) -> None:
    assert is_given(value) is given


def _step() -> tuple[PaddedStep, KVCache]:
    shape = LayerShape(1, 2, 1, 2, torch.float32, torch.device("cpu"))
    kv = KVCache({0: shape}, num_blocks=8, block_size=2)
    kv.layers[0].key.zero_()
    return PaddedStep(kv, BaselineAttend(kv)), kv


def _started(name: str, length: int, table: list[int]) -> Request:
    request = Request(name, [0] * length, SamplingParams(), max_len=length + 2)
    request.block_table = table
    return request


def test_real_tokens_reach_the_blocks_of_their_row_and_come_back_unchanged() -> None:
    step, kv = _step()
    call = _call([4, 3, 1])
    batch = BatchBuilder(2).build([_started("b", 3, [5, 2]), _started("c", 1, [7])], [3, 1])
    key = torch.arange(12.0).reshape(3, 1, 4, 1).expand(3, 1, 4, 2).contiguous()
    step.begin(batch, call.real_tokens([1, 2]))
    given, _ = step.update(key, key, 0)
    assert given is key
    stored = kv.layers[0].key[:, 0, :, 0]
    assert stored[5].tolist() == [5.0, 6.0]
    assert stored[2, 0] == 7.0
    assert stored[7, 0] == 11.0
    assert float(stored.sum()) == 5 + 6 + 7 + 11


def test_keys_of_something_else_than_the_prompt_are_refused() -> None:
    step, _ = _step()
    call = _call([4])
    step.begin(BatchBuilder(2).build([_started("a", 4, [0, 1])], [4]), call.real_tokens([0]))
    key = torch.zeros(1, 1, 9, 2)
    with pytest.raises(UnsupportedModelError, match="9 keys for 4 tokens"):
        step.update(key, key, 0)


def _schedule(num_blocks: int = 64, can_chunk: bool = True, max_tokens: int = 8) -> tuple[Any, RequestQueue]:
    pool = BlockPool(num_blocks, 2)
    lookup = BaselineLookup(pool, KVCache({}, num_blocks, 2), can_share=True)
    schedule = BaselineSchedule(
        BaselineOrder(), BaselineBudget(max_tokens), BaselineAllocate(pool), lookup, BatchBuilder(2), 8, can_chunk, 0
    )
    return schedule, RequestQueue(8)


def _waiting(name: str, length: int, call: object | None = None) -> Request:
    return Request(name, [1] * length, SamplingParams(), max_len=length + 4, companions=call, media=call)


def test_companions_start_in_one_step_with_whole_prompts() -> None:
    schedule, queue = _schedule()
    for request in (_waiting("a", 6, "call"), _waiting("b", 6, "call"), _waiting("other", 4)):
        queue.add(request)
    batch = schedule(queue)
    assert batch.request_ids == ["a", "b"]  # more than the budget of 8, since one forward computes both
    assert batch.num_scheduled.tolist() == [6, 6]


def test_companions_do_not_start_beside_others_that_leave_no_room() -> None:
    schedule, queue = _schedule()
    for request in (_waiting("other", 4), _waiting("a", 6, "call")):
        queue.add(request)
    assert schedule(queue).request_ids == ["other"]


def test_a_companion_without_blocks_starts_later() -> None:
    schedule, queue = _schedule(num_blocks=6)
    first, second = _waiting("a", 6, "call"), _waiting("b", 6, "call")
    queue.add(first)
    queue.add(second)
    assert schedule(queue).request_ids == ["a"]
    schedule.allocate.free(first)
    queue.remove(first)
    assert schedule(queue).request_ids == ["b"]


@pytest.mark.parametrize(("can_chunk", "sizes"), [(True, [6, 3]), (False, [6, 1, 1, 1])])
def test_tokens_after_a_repeated_prefill_are_computed_on_their_own(can_chunk: bool, sizes: list[int]) -> None:
    schedule, queue = _schedule(can_chunk=can_chunk)
    request = _waiting("a", 6, "call")
    for token in (5, 6, 7):
        request.append(token)
    queue.add(request)
    seen = []
    while request.num_computed_tokens < request.num_tokens:
        batch = schedule(queue)
        seen.append(int(batch.num_scheduled[0]))
        request.num_computed_tokens += seen[-1]
        assert len(batch.logits_indices) == (request.num_computed_tokens == request.num_tokens)
    assert seen == sizes


def test_ids_that_only_hold_places_are_not_looked_up() -> None:
    schedule, queue = _schedule()
    parent = _waiting("parent", 6)
    queue.add(parent)
    schedule(queue)
    parent.num_computed_tokens = 6
    child = _waiting("child", 6, "call")
    child.parent = parent
    queue.add(child)
    parent.append(1)
    schedule(queue)
    assert child.num_cached_tokens == 0
