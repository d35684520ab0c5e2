"""A lockstep group on its own: who is waited for, who gets a token, who ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from llmopt.errors import NonFiniteLogitsError
from llmopt.hf.lockstep import LockstepGroup, LockstepOptions, is_choosing
from llmopt.request import Request, SamplingParams

VOCAB, EOS, PAD = 8, 7, 0


def group_of(rows: int = 3, length: int = 2, new: int = 4, **changes: Any) -> LockstepGroup:
    """A group whose prompts are ``1, 1, ...`` and which ends at `EOS` or after ``new`` tokens."""
    ids = torch.ones(rows, length, dtype=torch.long)
    requests = [
        Request(f"row-{n}", [1] * length, SamplingParams(), max_len=length + new, wants_text=False) for n in range(rows)
    ]
    settings: dict[str, Any] = {
        "processors": LogitsProcessorList(),
        "criteria": StoppingCriteriaList([MaxLengthCriteria(length + new), EosTokenCriteria(torch.tensor([EOS]))]),
        "config": GenerationConfig(do_sample=False, return_dict_in_generate=False),
        "has_eos": True,
        "pad_token_id": PAD,
        "keep_stepping": False,
    }
    return LockstepGroup(ids, requests, LockstepOptions(**{**settings, **changes}))


def logits_for(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()


def step(group: LockstepGroup, *tokens: int) -> Any:
    """One step in which the live rows want these tokens; commits what was accepted."""
    live = [r for r in group.requests if not r.is_finished]
    complete = [group.put(r, logits_for(t)) for r, t in zip(live, tokens, strict=True)]
    assert complete == [False] * (len(live) - 1) + [True]
    accepted = group.choose()
    for request, ids, reason in zip(accepted.requests, accepted.token_ids, accepted.finish_reasons, strict=True):
        request.append(*ids)
        if reason is not None:
            request.finish(reason)
    return accepted


def test_a_choice_needs_the_logits_of_every_live_row() -> None:
    group = group_of(3)
    first, second, third = group.requests
    assert not group.put(third, logits_for(5))
    assert not group.put(first, logits_for(3))
    assert not group.put(third, logits_for(5))  # computed again after a pre-emption
    assert group.put(second, logits_for(4))
    accepted = group.choose()
    assert [r.request_id for r in accepted.requests] == ["row-0", "row-1", "row-2"]
    assert accepted.token_ids == [[3], [4], [5]]
    assert group.input_ids[:, -1].tolist() == [3, 4, 5]


def test_a_finished_row_leaves_and_is_filled_with_pads() -> None:
    group = group_of(2)
    accepted = step(group, EOS, 3)
    assert accepted.finish_reasons == ["stop", None]
    assert step(group, 4).token_ids == [[4]]
    assert step(group, EOS).finish_reasons == ["stop"]
    assert group.input_ids.tolist() == [[1, 1, EOS, PAD, PAD], [1, 1, 3, 4, EOS]]


def test_a_finished_row_stays_when_somebody_looks_at_its_logits() -> None:
    group = group_of(2, keep_stepping=True)
    assert step(group, EOS, 3).finish_reasons == [None, None]
    assert step(group, 5, 4).token_ids == [[PAD], [4]]  # its own choice does not count any more
    assert step(group, 5, EOS).finish_reasons == ["stop", "stop"]


def test_all_rows_end_at_the_length() -> None:
    group = group_of(2, new=2)
    step(group, 3, 3)
    assert step(group, 4, 4).finish_reasons == ["stop", "stop"]


def test_scores_and_logits_are_kept_where_the_configuration_asks_for_them() -> None:
    for scores, logits in ((True, False), (False, True), (False, False)):
        config = GenerationConfig(return_dict_in_generate=True, output_scores=scores, output_logits=logits)
        group = group_of(2, config=config, keep_stepping=True)
        step(group, 3, 4)
        assert len(group.result.scores) == scores
        assert len(group.result.logits) == logits


def test_an_error_ends_the_live_rows_and_every_later_choice() -> None:
    error = RuntimeError("on purpose")

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 2:
            raise error
        return scores

    group = group_of(3, processors=LogitsProcessorList([processor]))
    step(group, 3, EOS, 4)
    assert step(group, 3, 4).errors == {"row-0": error, "row-2": error}
    assert group.put(group.requests[0], logits_for(3))
    assert group.choose().errors == {"row-0": error, "row-2": error}
    assert not is_choosing()


def test_an_interrupt_on_the_callers_own_thread_is_an_error_of_the_call() -> None:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    group = group_of(1, processors=LogitsProcessorList([processor]))
    (error,) = step(group, 3).errors.values()
    assert isinstance(error, KeyboardInterrupt)


def test_an_interrupt_on_another_thread_stops_that_thread_and_ends_the_call() -> None:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    group = group_of(1, processors=LogitsProcessorList([processor]))
    raised: list[BaseException] = []

    def other() -> None:
        try:
            step(group, 3)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert isinstance(raised[0], KeyboardInterrupt)
    assert group.put(group.requests[0], logits_for(3))
    assert group.choose().errors == {"row-0": raised[0]}


def test_a_choice_that_was_not_committed_is_given_again() -> None:
    group = group_of(2)
    for request, token in zip(group.requests, (3, 4), strict=True):
        group.put(request, logits_for(token))
    lost = group.choose()
    assert group.put(group.requests[1], logits_for(6))
    again = group.choose()
    assert again.token_ids == lost.token_ids == [[3], [4]]
    assert group.input_ids.shape == (2, 3)
    for request, ids in zip(again.requests, again.token_ids, strict=True):
        request.append(*ids)
    assert step(group, 5, 6).token_ids == [[5], [6]]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_nan_names_its_row(sampled: bool) -> None:
    group = group_of(2, config=GenerationConfig(do_sample=sampled))
    first, second = group.requests
    group.put(first, logits_for(3))
    group.put(second, torch.full((VOCAB,), float("nan")))
    (error, _) = group.choose().errors.values()
    assert isinstance(error, NonFiniteLogitsError)
    assert "row 1" in str(error)


def test_nan_in_a_finished_row_harms_nobody() -> None:
    group = group_of(2, keep_stepping=True)
    step(group, EOS, 3)
    first, second = group.requests
    group.put(first, torch.full((VOCAB,), float("nan")))
    group.put(second, logits_for(4))
    assert group.choose().token_ids == [[PAD], [4]]


def test_a_processor_that_needs_more_than_ids_and_scores_is_refused() -> None:
    class Wants:
        def __call__(self, ids: Tensor, scores: Tensor, image: Tensor) -> Tensor:
            return scores

    with pytest.raises(ValueError, match="image"):
        group_of(1, processors=LogitsProcessorList([Wants()]))


def test_callbacks_know_that_they_are_inside_a_step() -> None:
    seen = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(is_choosing())
        return scores

    step(group_of(1, processors=LogitsProcessorList([processor])), 3)
    assert seen == [True]
    assert not is_choosing()
