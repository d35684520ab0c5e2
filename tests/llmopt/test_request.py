"""Sampling parameters are checked where they are made, so that nothing fails in the middle of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmopt.errors import RequestError
from llmopt.request import SamplingParams
from tests.llmopt.helpers import request


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens >= 1, found 0"),
        ({"max_new_tokens": -1}, "max_new_tokens >= 1, found -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens as an int, found 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens as an int, found True"),
        ({"min_new_tokens": -1}, "min_new_tokens >= 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens <= max_new_tokens .which is 8., found 9"),
        ({"temperature": -0.1}, "temperature >= 0"),
        ({"temperature": float("nan")}, "temperature as a finite number"),
        ({"temperature": float("inf")}, "temperature as a finite number"),
        ({"temperature": "hot"}, "temperature as a finite number, found 'hot'"),
        ({"top_k": -2}, "top_k >= -1"),
        ({"top_k": 1.5}, "top_k as an int"),
        ({"top_p": 1.1}, "0 <= top_p <= 1"),
        ({"top_p": float("nan")}, "top_p as a finite number"),
        ({"min_p": -0.1}, "0 <= min_p <= 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty > 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty as a finite number"),
        ({"presence_penalty": float("nan")}, "presence_penalty as a finite number"),
        ({"frequency_penalty": None}, "frequency_penalty as a finite number, found None"),
        ({"n": 0}, "n >= 1"),
        ({"seed": "7"}, "seed as an int"),
        ({"stop": ("a", "")}, "stop strings that are not empty"),
        ({"stop": ""}, "stop strings that are not empty"),
        ({"stop": [3]}, "stop strings that are not empty"),
        ({"stop": 3}, "stop as a list, found 3"),
        ({"stop_token_ids": 3}, "stop_token_ids as a list"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids that are ints"),
        ({"logit_bias": [(7, 1.0)]}, "logit_bias maps token ids to numbers, as a dict, found"),
        ({"logit_bias": 7}, "as a dict, found 7"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias maps token ids .ints. to finite numbers, found '7'"),
        ({"logit_bias": {7: float("inf")}}, "finite numbers, found 7: inf"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_needed(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        SamplingParams(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(4))  # type: ignore[arg-type]
    assert params.max_new_tokens == 3
    assert not params.is_greedy


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-5])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_a_request_keeps_prompt_and_output_apart() -> None:
    made = request([4, 5, 6], max_new_tokens=2)
    assert (made.num_prompt_tokens, made.num_tokens, made.num_output_tokens) == (3, 3, 0)
    made.append(9)
    made.append(8)
    assert made.output_ids == [9, 8]
    assert made.prompt_ids == [4, 5, 6]
    assert made.num_tokens == made.max_len
