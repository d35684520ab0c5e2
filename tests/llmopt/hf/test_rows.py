"""Parts of a batch in row layout, and the pool of recurrent states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

import llmopt
from llmopt.batch import Batch
from llmopt.batch_builder import BatchBuilder
from llmopt.errors import MemoryBudgetError, UnsupportedModelError
from llmopt.hf.rows import RowStates, split_rows, take_rows
from llmopt.request import Request, SamplingParams
from tests.equivalence.test_hybrid_models import hybrid_model, left_padded


def _request(name: str, num_tokens: int, num_computed: int, slot: int) -> Request:
    request = Request(name, list(range(10, 10 + num_tokens)), SamplingParams(), max_len=num_tokens + 4)
    request.num_computed_tokens, request.slot = num_computed, slot
    request.block_table = [slot * 10 + i for i in range(4)]
    return request


def _batch(*requests: Request) -> Batch:
    return BatchBuilder(4).build(list(requests), [r.num_tokens - r.num_computed_tokens for r in requests])


def test_decodes_run_together_and_every_prompt_alone() -> None:
    batch = _batch(_request("a", 3, 2, 0), _request("b", 3, 0, 1), _request("c", 6, 5, 2), _request("d", 1, 0, 3))
    parts = [take_rows(batch, rows) for rows in split_rows(batch, [0, 1, 2, 3])]
    assert [part.request_ids for part, _ in parts] == [["a", "c"], ["b"], ["d"]]
    assert [places.tolist() for _, places in parts] == [[0, 2], [1], [3]]
    decodes, prompt, _ = (part for part, _ in parts)
    assert decodes.token_ids.tolist() == [12, 15]
    assert decodes.positions.tolist() == [2, 5]
    assert decodes.cu_seqlens_q.tolist() == [0, 1, 2]
    assert decodes.seq_lens.tolist() == [3, 6]
    assert decodes.block_tables.tolist() == [[0, 1, 2, 3], [20, 21, 22, 23]]
    assert decodes.slot_mapping.tolist() == [2, 21 * 4 + 1]
    assert decodes.logits_indices.tolist() == [0, 1]
    assert decodes.slots.tolist() == [0, 2]
    assert prompt.token_ids.tolist() == [10, 11, 12]
    assert prompt.logits_indices.tolist() == [2]
    assert [r.request_id for r in prompt.logits_requests] == ["b"]


def test_only_the_rows_asked_for_are_split() -> None:
    batch = _batch(_request("a", 3, 2, 0), _request("b", 3, 0, 1), _request("c", 6, 5, 2))
    assert split_rows(batch, [1, 2]) == [[2], [1]]


def test_rows_are_taken_in_the_order_asked_for() -> None:
    batch = _batch(_request("a", 3, 0, 0), _request("b", 6, 5, 1), _request("c", 2, 0, 2))
    part, places = take_rows(batch, [2, 0])
    assert part.token_ids.tolist() == [10, 11, 10, 11, 12]
    assert part.slot_mapping.tolist() == [80, 81, 0, 1, 2]
    assert part.logits_indices.tolist() == [1, 4]
    assert places.tolist() == [2, 0]
    assert [r.request_id for r in part.logits_requests] == ["c", "a"]


def test_part_of_a_prompt_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="in one piece"):
        split_rows(_batch(_request("a", 6, 2, 0)), [0])


def _states() -> tuple[RowStates, LinearAttentionLayer]:
    layer = LinearAttentionLayer()
    return RowStates(nn.Module(), Cache(layers=[layer])), layer  # type: ignore[arg-type]


def _prompt(states: RowStates, layer: LinearAttentionLayer, slot: int, value: float) -> None:
    with states.forward([slot], is_prompt=True):
        assert not layer.has_previous_state[0]
        layer.update_conv_state(torch.full((1, 2, 3), value))
        layer.update_recurrent_state(torch.full((1, 5), -value))


def test_states_follow_their_slots() -> None:
    states, layer = _states()
    for slot, value in ((2, 20.0), (0, 0.5), (1, 10.0)):
        _prompt(states, layer, slot, value)
    with states.forward([0, 2], is_prompt=False):
        assert layer.has_previous_state[0]
        assert layer.conv_states[0][:, 0, 0].tolist() == [0.5, 20.0]
        assert layer.recurrent_states[0][:, 0].tolist() == [-0.5, -20.0]
        layer.recurrent_states[0].add_(100)
    with states.forward([1, 2], is_prompt=False):
        assert layer.recurrent_states[0][:, 0].tolist() == [-10.0, 80.0]
    with states.forward([0], is_prompt=False):
        assert layer.recurrent_states[0][:, 0].tolist() == [99.5]


def test_the_same_rows_keep_their_tensors() -> None:
    states, layer = _states()
    _prompt(states, layer, 0, 1.0)
    _prompt(states, layer, 1, 2.0)
    with states.forward([0, 1], is_prompt=False):
        first = layer.conv_states[0]
    with states.forward([0, 1], is_prompt=False):
        assert layer.conv_states[0] is first


def test_rows_without_a_slot_are_forgotten() -> None:
    states, layer = _states()
    with states.forward([3, -1, 0], is_prompt=True):
        layer.update_conv_state(torch.arange(3.0)[:, None, None].expand(3, 2, 3))
    with states.forward([0, 3], is_prompt=False):
        assert layer.conv_states[0][:, 0, 0].tolist() == [2.0, 0.0]


def test_a_slot_given_to_a_new_request_forgets_the_old_one() -> None:
    states, layer = _states()
    _prompt(states, layer, 0, 1.0)
    _prompt(states, layer, 1, 2.0)
    with states.forward([0, 1], is_prompt=False):
        pass
    _prompt(states, layer, 1, 7.0)
    with states.forward([0, 1], is_prompt=False):
        assert layer.conv_states[0][:, 0, 0].tolist() == [1.0, 7.0]


def test_a_failed_forward_leaves_nothing_live() -> None:
    states, layer = _states()
    for slot in (0, 1, 2):
        _prompt(states, layer, slot, float(slot))
    with states.forward([0, 1], is_prompt=False):
        pass  # from now on these two are live

    def fail() -> None:
        with states.forward([0, 1], is_prompt=False):
            layer.conv_states[0].fill_(99.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with states.forward([0, 1], is_prompt=False):
        assert layer.conv_states[0][:, 0, 0].tolist() == [0.0, 1.0]


def test_bytes_of_one_row_do_not_grow_with_the_rows() -> None:
    states, layer = _states()
    _prompt(states, layer, 0, 1.0)
    _prompt(states, layer, 1, 1.0)
    with states.forward([0, 1], is_prompt=False):
        pass
    assert states.num_bytes() == (2 * 3 + 5) * 4


def test_attributes_of_modules_are_states_and_are_given_back() -> None:
    module = nn.Module()
    module.conv1d_state = None  # type: ignore[assignment]
    states = RowStates(module, SimpleNamespace(layers=[]))  # type: ignore[arg-type]
    assert not states.are_in_cache
    for slot in (0, 1):
        with states.forward([slot], is_prompt=True):
            assert module.conv1d_state is None
            module.conv1d_state = torch.full((1, 2), float(slot))  # type: ignore[assignment]
    assert module.conv1d_state is None
    with states.forward([1, 0], is_prompt=False):
        assert module.conv1d_state.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_rows_that_must_advance_together_fit_the_memory_for_states_or_fall_back() -> None:
    model = hybrid_model("falcon_h1")
    per_request = 2 * llmopt.build(model).capabilities.state_bytes
    pipe = llmopt.build(model, block_size=4, pool_bytes=2 * 3 * per_request)
    assert pipe.max_num_requests == 3
    pipe.generate(**left_padded(), max_new_tokens=2, do_sample=True)
    assert pipe.generate.fall_backs == {"more rows must advance together than max_num_requests=3": 1}
    pipe.generate(**left_padded(), max_new_tokens=2, do_sample=False)  # in turns
    assert sum(pipe.generate.fall_backs.values()) == 1


def test_running_requests_are_limited_by_the_memory_for_states() -> None:
    model = hybrid_model("mamba2")
    pipe = llmopt.build(model, pool_bytes=100_000)
    per_request = 2 * pipe.capabilities.state_bytes
    assert len(pipe.queue.free_slots) == 50_000 // per_request < pipe.config.scheduling.max_num_requests
    assert any("max_num_requests is cut" in note for note in pipe.notes)
    with pytest.raises(MemoryBudgetError, match="recurrent states"):
        llmopt.build(model, pool_bytes=per_request)
