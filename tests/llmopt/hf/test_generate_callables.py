"""Streamers, processors, criteria and prefix functions see what they would see in `model.generate`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from tests.llmopt.hf.tiny import EOS, PAD, Pair, left_padded, prompts, tiny_gpt2, tiny_llama, tiny_tokenizer

FINISH_EARLY = {"eos_token_id": [16, 31, 45, 53, 89], "pad_token_id": PAD}
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


class Recorder:
    """What a callable was given, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *values: Any) -> None:
        self.seen.append(tuple(v.clone() if isinstance(v, Tensor) else v for v in values))


def recorded(pair: Pair, make: Callable[[Recorder], dict[str, Any]], seed: int = 0) -> tuple[Any, str, Recorder]:
    """Call both with callables that record, and compare the records too."""
    recorders: list[Recorder] = []

    def fresh() -> tuple[tuple[()], dict[str, Any]]:
        recorders.append(Recorder())
        return (), make(recorders[-1])

    result, way = pair.same_from(fresh, seed)
    theirs, ours = recorders
    assert len(ours.seen) == len(theirs.seen)
    for one, other in zip(theirs.seen, ours.seen, strict=True):
        assert len(one) == len(other)
        for expected, actual in zip(one, other, strict=True):
            if isinstance(expected, Tensor):
                assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
            else:
                assert actual == expected
    return result, way, ours


# ---------------------------------------------------------------------------------------------------------------------
# streamers
# ---------------------------------------------------------------------------------------------------------------------
class RecordingStreamer(BaseStreamer):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def put(self, value: Tensor) -> None:
        self.recorder.note("put", value)

    def end(self) -> None:
        self.recorder.note("end")


@pytest.mark.parametrize(
    "options",
    [{}, FINISH_EARLY, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True, **FINISH_EARLY}],
    ids=["greedy", "early", "sampled", "several"],
)
def test_a_streamer_gets_the_prompt_then_one_row_of_tokens_per_step_then_the_end(
    pair: Pair, options: dict[str, Any]
) -> None:
    _, way, recorder = recorded(
        pair, lambda r: {**left_padded(), "max_new_tokens": 12, "streamer": RecordingStreamer(r), **options}
    )
    assert way == "lockstep"
    assert recorder.seen[0][1].dim() == 2
    assert all(v[1].dim() == 1 for v in recorder.seen[1:-1])
    assert [v[0] for v in recorder.seen].count("end") == 1
    assert recorder.seen[-1] == ("end",)


def test_a_streamer_is_served_by_the_models_own_loop_too(pair: Pair) -> None:
    _, way, recorder = recorded(
        pair, lambda r: {"input_ids": prompts(1), "use_cache": False, "streamer": RecordingStreamer(r)}
    )
    assert way == "use_cache=False is asked for"
    assert recorder.seen[-1] == ("end",)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_text_streamer_prints_what_it_prints_with_transformers(
    pair: Pair, sampled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for who in (lambda *a, **k: GenerationMixin.generate(pair.model, *a, **k), pair.pipe.generate):
        torch.manual_seed(0)
        who(prompts(1), streamer=TextStreamer(TOKENIZER, skip_prompt=True), max_new_tokens=15, do_sample=sampled)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10


def test_a_text_streamer_refuses_batches_as_in_transformers(pair: Pair) -> None:
    result, _ = pair.same(prompts(2), streamer=TextStreamer(TOKENIZER))
    assert isinstance(result, ValueError)
    assert "batch size 1" in str(result)


def test_an_iterator_streamer_is_read_while_another_thread_generates(pair: Pair) -> None:
    expected = TOKENIZER.decode(
        GenerationMixin.generate(pair.model, prompts(1), max_new_tokens=15)[0, 7:], skip_special_tokens=True
    )
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=20, skip_special_tokens=True)
    worker = threading.Thread(
        target=pair.pipe.generate, args=(prompts(1),), kwargs={"streamer": streamer, "max_new_tokens": 15}
    )
    worker.start()
    pieces = list(streamer)
    worker.join()
    assert "".join(pieces) == expected


# ---------------------------------------------------------------------------------------------------------------------
# processors
# ---------------------------------------------------------------------------------------------------------------------
class RecordingProcessor(LogitsProcessor):
    """Stateful: it counts its calls and forbids what it saw last."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.recorder.note(self.num_calls, input_ids, scores, torch.is_grad_enabled())
        self.num_calls += 1
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        scores[:, self.num_calls % scores.shape[-1]] += 3.0
        return scores


class InPlaceProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 16:40] -= 5.0
        return scores


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, FINISH_EARLY, {"repetition_penalty": 1.4}], ids=["plain", "early", "penalty"])
def test_a_processor_is_called_with_the_ids_and_scores_of_transformers(
    pair: Pair, sampled: bool, options: dict[str, Any]
) -> None:
    """Left pads and the pads of finished rows are among the ids; finished rows have real scores."""
    result, way, recorder = recorded(
        pair,
        lambda r: {
            **left_padded(),
            "max_new_tokens": 25,
            "do_sample": sampled,
            "logits_processor": LogitsProcessorList([RecordingProcessor(r)]),
            **options,
        },
    )
    assert way == "lockstep"
    assert len(recorder.seen) == result.shape[1] - 7


def test_a_processor_that_works_in_place_changes_what_it_changes_in_transformers(pair: Pair) -> None:
    pair.same_from(
        lambda: (
            (),
            {
                **left_padded(),
                "max_new_tokens": 12,
                "logits_processor": LogitsProcessorList([InPlaceProcessor(), TemperatureLogitsWarper(0.7)]),
                "return_dict_in_generate": True,
                "output_scores": True,
                "output_logits": True,
            },
        )
    )


def test_a_function_may_be_a_processor_and_the_list_a_plain_one(pair: Pair) -> None:
    def shifted(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, dims=-1)

    _, way = pair.same(prompts(), logits_processor=[shifted], max_new_tokens=8)
    assert way == "lockstep"


def test_a_processor_of_a_built_in_type_replaces_the_built_in_one(pair: Pair) -> None:
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    replaced, _ = pair.same(prompts(), logits_processor=own, repetition_penalty=1.01, max_new_tokens=20)
    plain, _ = pair.same(prompts(), repetition_penalty=1.01, max_new_tokens=20)
    assert not torch.equal(replaced, plain)


def test_a_processor_that_wants_more_arguments_is_transformers_error(pair: Pair) -> None:
    class Greedy(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor, image: Tensor) -> Tensor:
            return scores

    result, _ = pair.same(prompts(), logits_processor=[Greedy()], max_new_tokens=3)
    assert isinstance(result, ValueError)
    assert "image" in str(result)


def test_a_processor_may_ask_the_model_itself(pair: Pair) -> None:
    class Guided(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + pair.model(input_ids[:, -3:]).logits[:, -1]

    _, way = pair.same(prompts(), logits_processor=[Guided()], max_new_tokens=8)
    assert way == "lockstep"


def test_a_processor_may_generate_with_the_same_pipeline(pair: Pair) -> None:
    class Nested(LogitsProcessor):
        def __init__(self, generate: Callable[..., Tensor]) -> None:
            self.generate = generate

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            peek = self.generate(input_ids[:, -4:], max_new_tokens=2)
            return scores.scatter(1, peek[:, -1:], 1e3)

    expected = GenerationMixin.generate(
        pair.model,
        prompts(2),
        logits_processor=[Nested(lambda *a, **k: GenerationMixin.generate(pair.model, *a, **k))],
        max_new_tokens=4,
        eos_token_id=None,
    )
    actual = pair.pipe.generate(
        prompts(2), logits_processor=[Nested(pair.pipe.generate)], max_new_tokens=4, eos_token_id=None
    )
    assert torch.equal(actual, expected)


# ---------------------------------------------------------------------------------------------------------------------
# prefix functions
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=["greedy", "several"])
def test_a_prefix_function_gets_the_prompts_number_and_the_ids_of_one_row(pair: Pair, options: dict[str, Any]) -> None:
    def make(recorder: Recorder) -> dict[str, Any]:
        def allowed(row: int, ids: Tensor) -> list[int]:
            recorder.note(row, ids)
            return [10 + row, 20 + row, int(ids[-1])]

        return {**left_padded(), "prefix_allowed_tokens_fn": allowed, "max_new_tokens": 8, **options}

    result, way, recorder = recorded(pair, make)
    assert way == "lockstep"
    assert {v[0] for v in recorder.seen} == {0, 1, 2}
    assert len(recorder.seen) == 8 * len(result)


def test_a_prefix_function_that_allows_nothing_is_transformers_error(pair: Pair) -> None:
    result, _ = pair.same(prompts(), prefix_allowed_tokens_fn=lambda row, ids: [], max_new_tokens=3)
    assert isinstance(result, ValueError)
    assert "constraint is unsatisfiable" in str(result)


# ---------------------------------------------------------------------------------------------------------------------
# criteria
# ---------------------------------------------------------------------------------------------------------------------
class PerRow(StoppingCriteria):
    """Ends each row at its own length; records what it is given."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.recorder.note(input_ids, scores if scores is None else len(scores), sorted(kwargs))
        return input_ids.shape[1] >= torch.arange(len(input_ids)) * 3 + 9


class OldStyle(StoppingCriteria):
    """Returns one bool for the whole batch."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.recorder.note(input_ids)
        return input_ids.shape[1] >= 11


@pytest.mark.parametrize("kind", [PerRow, OldStyle])
@pytest.mark.parametrize(
    "options",
    [
        {},
        FINISH_EARLY,
        {"do_sample": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"eos_token_id": None},  # finished rows are then not filled with pads
    ],
    ids=["greedy", "early", "sampled", "scores", "no eos"],
)
def test_a_criterion_is_called_as_in_transformers(
    pair: Pair, kind: type[PerRow] | type[OldStyle], options: dict[str, Any]
) -> None:
    _, way, recorder = recorded(
        pair,
        lambda r: {
            **left_padded(),
            "max_new_tokens": 20,
            "stopping_criteria": StoppingCriteriaList([kind(r)]),
            **options,
        },
    )
    assert way == "lockstep"
    assert recorder.seen


def test_a_time_limit_ends_the_call(pair: Pair) -> None:
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            time.sleep(0.05)
            return scores

    limits: list[dict[str, Any]] = [{"max_time": 0.2}, {"stopping_criteria": [MaxTimeCriteria(0.2, time.time() + 1e9)]}]
    result = pair.pipe.generate(prompts(), **limits[0], logits_processor=[Slow()], max_new_tokens=60, eos_token_id=None)
    assert 8 <= result.shape[1] <= 13
    result = pair.pipe.generate(prompts(), **limits[1], max_new_tokens=9, eos_token_id=None)
    assert result.shape[1] == 16  # that clock has not started


def test_a_criterion_of_a_built_in_type_replaces_the_built_in_one(pair: Pair) -> None:
    for limit in (3, 7, 8, 12, 30):
        result, way = pair.same(
            **left_padded(), stopping_criteria=[MaxLengthCriteria(limit)], max_new_tokens=20, eos_token_id=None
        )
        assert way == "native"
        assert result.shape[1] == max(8, limit)
    result, way = pair.same(
        **left_padded(), stopping_criteria=[EosTokenCriteria(torch.tensor([16, 31, 45, 89]))], max_new_tokens=20
    )
    assert way == "native"
    assert EOS not in (16, 31, 45, 89)


def test_a_criterion_with_an_eos_and_no_configured_eos_works(pair: Pair) -> None:
    options = {"stopping_criteria": [EosTokenCriteria(torch.tensor([16, 31, 45, 89]))], "eos_token_id": None}
    _, way = pair.same(**left_padded(), **options, pad_token_id=5, max_new_tokens=20)
    assert way == "native"
    pair.same(**left_padded(), **options, pad_token_id=5, max_new_tokens=20, do_sample=True)
