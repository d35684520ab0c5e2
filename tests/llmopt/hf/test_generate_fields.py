"""Every field of `GenerationConfig`: same results as `model.generate`, served as `llmopt.hf.fields` says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from llmopt.hf.fields import FIELDS
from tests.llmopt.hf.tiny import (
    EOS,
    PAD,
    Pair,
    left_padded,
    prompts,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
SAMPLED = {"do_sample": True}
DICT = {"return_dict_in_generate": True}
ANY = object()  # the reason is of no interest: transformers raises in its preparation


@dataclass
class Case:
    """A setting of one field, and how it is to be served."""

    name: str  # the field
    value: Any
    way: Any = "lockstep"  # "native", "lockstep", the reason of a fall-back, "" when nothing ran
    beside: dict[str, Any] = field(default_factory=dict)  # other fields
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments that are no fields
    rows: int = 3

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}"[:60]


def asked(name: str, value: Any) -> str:
    return f"{name}={value!r} is asked for"


def falls(name: str, value: Any, **more: Any) -> Case:
    return Case(name, value, asked(name, value), **more)


TEXT = {"arguments": {"tokenizer": TOKENIZER}}
CASES = [
    Case("max_length", 12, "native"),
    Case("max_new_tokens", 9, "native"),
    Case("max_new_tokens", 1, "native"),
    Case("min_length", 15, "native", {"eos_token_id": [16, 31, 45]}),
    Case("min_length", 15, beside={"eos_token_id": [16, 31, 45], **SAMPLED}),
    Case("min_length", 2, "native", {"eos_token_id": [16, 31, 45]}),  # shorter than the prompt
    Case("min_length", 15, "native", {"eos_token_id": [16, 31, 45]}, rows=1),
    Case("min_length", 12, "native", {"eos_token_id": [16, 31, 45], "min_new_tokens": 8}),
    Case("min_new_tokens", 8, "native", {"eos_token_id": [16, 31, 45]}),
    Case("min_new_tokens", 8, "native", {"eos_token_id": [16, 31, 45]}, rows=1),
    Case("min_new_tokens", 4, "native", {"eos_token_id": [-1, 16, 31, 10**6]}),
    Case("min_new_tokens", 8, beside={"eos_token_id": [16, 31, 45], "repetition_penalty": 1.3}),
    Case("min_new_tokens", 8, beside={"eos_token_id": [16, 31, 45], **SAMPLED}),
    Case("min_new_tokens", 8, beside={"eos_token_id": [16, 31, 45], **DICT}),
    Case("min_new_tokens", 50, "native", {"eos_token_id": [16, 31, 45]}),  # never reached: a warning
    Case("early_stopping", True, "native"),
    Case("max_time", 1000.0),
    Case("max_time", 1e-9),  # over after the first token
    Case("stop_strings", "q", **TEXT),
    Case("stop_strings", ["q", "zz"], **TEXT),
    Case("stop_strings", ["7q"], "", {}, {}),  # no tokenizer
    Case("do_sample", True),
    Case("do_sample", False, "native"),
    Case("num_beams", 1, "native"),
    falls("num_beams", 3),
    falls("num_beams", 2, beside=SAMPLED),
    falls("num_beams", 2, beside={**DICT, "output_scores": True}),
    Case("use_mtp", False, "native"),
    falls("use_mtp", True, rows=1),
    Case("use_cache", True, "native"),
    falls("use_cache", False),
    Case("cache_implementation", "dynamic", "native"),
    Case("cache_implementation", "static", "native"),
    Case("cache_implementation", "static", beside=SAMPLED),
    Case("cache_implementation", "hybrid", "native"),
    falls("cache_implementation", "offloaded"),
    falls("cache_implementation", "offloaded_static"),
    falls("cache_implementation", "quantized"),
    Case("cache_implementation", "nonsense", ANY),
    Case("cache_config", {"backend": "quanto"}, "native"),
    Case("max_cache_len", 64, "native", {"cache_implementation": "static"}),
    Case("max_cache_len", 64, "native"),
    Case("temperature", 0.7, beside=SAMPLED),
    Case("temperature", 3.0, beside=SAMPLED),
    Case("temperature", 0.7, "native"),
    Case("top_k", 5, beside=SAMPLED),
    Case("top_k", 0, beside={**SAMPLED, "temperature": 4.0}),
    Case("top_p", 0.6, beside=SAMPLED),
    Case("min_p", 0.1, beside=SAMPLED),
    Case("top_h", 0.5, beside=SAMPLED),
    Case("typical_p", 0.5, beside=SAMPLED),
    Case("epsilon_cutoff", 0.02, beside=SAMPLED),
    Case("eta_cutoff", 0.02, beside=SAMPLED),
    Case("repetition_penalty", 1.5),
    Case("repetition_penalty", 1.5, beside={**SAMPLED, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    Case("encoder_repetition_penalty", 1.5),
    Case("length_penalty", 2.0, "native"),
    Case("no_repeat_ngram_size", 1),
    Case("no_repeat_ngram_size", 2, beside={"max_new_tokens": 60}),
    Case("bad_words_ids", [[16], [31, 16], [35, 31]]),
    Case("renormalize_logits", True, beside={**DICT, "output_scores": True}),
    Case("forced_bos_token_id", 40, arguments={"input_ids": prompts(2, 1), "attention_mask": None}),
    Case("forced_eos_token_id", 44),
    Case("forced_eos_token_id", [44, 45]),
    Case("remove_invalid_values", True),
    Case("exponential_decay_length_penalty", (2, 1.8), beside={"eos_token_id": EOS}),
    Case("suppress_tokens", [16, 31, 35]),
    Case("begin_suppress_tokens", [27, 35, 65]),
    Case("sequence_bias", [[[16], -9.0], [[31, 16], 8.0]]),
    Case("token_healing", False, "native"),
    falls(
        "token_healing",
        True,
        arguments={"tokenizer": TOKENIZER, "input_ids": torch.tensor([TOKENIZER("see th")["input_ids"]] * 2)}
        | {"attention_mask": None},
    ),
    Case("guidance_scale", 1, "native"),
    falls("guidance_scale", 1.5),
    Case("watermarking_config", WatermarkingConfig(bias=4.0)),
    Case("watermarking_config", WatermarkingConfig(seeding_scheme="selfhash", bias=3.0), beside=SAMPLED),
    Case(
        "watermarking_config",
        SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, sampling_table_size=256, context_history_size=8),
        beside=SAMPLED,
    ),
    Case("num_return_sequences", 3, beside=SAMPLED),
    Case("num_return_sequences", 3, ""),  # greedy: an error
    falls("output_attentions", True, beside={"return_dict_in_generate": True}),
    falls("output_hidden_states", True, beside={"return_dict_in_generate": True}),
    Case("output_scores", True, beside=DICT),
    Case("output_scores", True, beside={**DICT, **SAMPLED, "output_logits": True, "repetition_penalty": 1.4}),
    Case("output_scores", True, "native"),  # not returned
    Case("output_logits", True, beside=DICT),
    Case("output_logits", True, beside={**DICT, "eos_token_id": [16, 31]}),  # finished rows keep their logits
    Case("return_dict_in_generate", True),
    Case("pad_token_id", 5, "native", {"eos_token_id": [16, 31]}),
    Case("bos_token_id", 9, "native", {}, {"input_ids": None, "attention_mask": None}),
    Case("eos_token_id", 16, "native"),
    Case("eos_token_id", [16, 31, 45], "native"),
    Case("eos_token_id", [16, 31, 45], beside=SAMPLED),
    Case("eos_token_id", -1, "native"),
    Case("encoder_no_repeat_ngram_size", 1),
    Case("decoder_start_token_id", 7, "native"),
    falls("is_assistant", True),
    Case("num_assistant_tokens", 4, "native"),
    Case("num_assistant_tokens_schedule", "constant", "native"),
    Case("assistant_confidence_threshold", 0.5, "native"),
    falls("prompt_lookup_num_tokens", 3, rows=1),
    falls("prompt_lookup_num_tokens", 3, rows=1, beside={"max_matching_ngram_size": 3}),
    Case("max_matching_ngram_size", 3, "native"),
    falls("assistant_early_exit", 1, rows=1),
    Case("assistant_lookbehind", 5, "native"),
    Case("target_lookbehind", 5, "native"),
    Case("assistant_ensemble_weight", 0.5, "native"),
    falls("speculation_type", "dflash"),
    Case("compile_config", CompileConfig(), ANY),
    Case("disable_compile", True, "native"),
    Case("prefill_chunk_size", 2, "native"),
    Case("prefill_chunk_size", 2, beside={**DICT, "output_logits": True}),
    Case("low_memory", True, "native"),
    falls("penalty_alpha", 0.6, beside={"top_k": 4}),
    falls("dola_layers", "high"),
    Case("diversity_penalty", 0.0, "native"),
    Case("num_beam_groups", 2, "native"),
    falls("constraints", []),
    falls("force_words_ids", [[5]]),
]
ELSEWHERE = {
    "continuous_batching_config",  # deprecated: building a configuration with it warns
    "transformers_version",  # not a setting
}


def test_every_field_of_this_transformers_is_in_the_table() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known == set(FIELDS), "llmopt.hf.fields.FIELDS and GenerationConfig differ: decide how it is served"


def test_every_field_has_a_case_that_is_served_as_the_table_says() -> None:
    for name, served in FIELDS.items():
        ways = {c.way for c in CASES if c.name == name and c.way not in ("", ANY)}
        if name in ELSEWHERE or (name == "compile_config"):
            continue
        if served.way in ("native", "lockstep"):
            assert served.way in ways, name
        elif served.way == "falls back":
            assert any(asked(name, c.value) == c.way for c in CASES if c.name == name), name
        else:
            assert ways <= {"native", "lockstep"}, name
            assert ways, name


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(tiny_llama())


@pytest.fixture(scope="module")
def gpt2_pair() -> Pair:
    return Pair(tiny_gpt2())


@pytest.fixture
def own_config(pair: Pair) -> Iterator[GenerationConfig]:
    """The model's own generation configuration, to be changed for one test."""
    kept = pair.model.generation_config
    pair.model.generation_config = copy.deepcopy(kept)
    yield pair.model.generation_config
    pair.model.generation_config = kept


def _parts(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and other arguments of a case, complete."""
    fields: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": EOS, **case.beside, case.name: case.value}
    if case.name == "max_length":
        del fields["max_new_tokens"]
    arguments = {**left_padded(case.rows), **case.arguments}
    return fields, {k: v for k, v in arguments.items() if v is not None or k == "tokenizer"}


def _check(case: Case, result: Any, way: str) -> None:
    assert case.way is ANY or way == case.way
    if case.way == "":
        assert isinstance(result, ValueError)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_field_given_as_an_argument_acts_as_in_transformers(pair: Pair, case: Case) -> None:
    fields, arguments = _parts(case)
    _check(case, *pair.same_from(lambda: ((), copy.deepcopy(fields) | arguments), seed=3))


# transformers leaves gpt2's number of layers changed when early exit fails with it
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "assistant_early_exit"], ids=str)
def test_a_field_acts_as_in_transformers_on_a_model_with_learned_positions(gpt2_pair: Pair, case: Case) -> None:
    fields, arguments = _parts(case)
    _check(case, *gpt2_pair.same_from(lambda: ((), copy.deepcopy(fields) | arguments), seed=3))


IN_A_CONFIGURATION = [c for c in CASES if c.value != "nonsense"]  # which no configuration takes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", IN_A_CONFIGURATION, ids=str)
def test_a_field_of_a_given_configuration_acts_as_in_transformers(pair: Pair, case: Case) -> None:
    fields, arguments = _parts(case)
    config = GenerationConfig()
    for name, value in copy.deepcopy(fields).items():  # the constructor refuses what `generate` refuses
        setattr(config, name, value)
    before = copy.deepcopy(config)
    _check(case, *pair.same(**arguments, generation_config=config, seed=3))
    assert config == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", IN_A_CONFIGURATION, ids=str)
def test_a_field_of_the_models_own_configuration_acts_as_in_transformers(
    pair: Pair, own_config: GenerationConfig, case: Case
) -> None:
    fields, arguments = _parts(case)
    for name, value in copy.deepcopy(fields).items():
        setattr(own_config, name, value)
    before = copy.deepcopy(own_config)
    _check(case, *pair.same(**arguments, seed=3))
    assert own_config == before


# ---------------------------------------------------------------------------------------------------------------------
# precedence
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("own", "given", "argument", "way"),
    [
        (3, None, 1, "native"),
        (3, 1, None, "native"),
        (1, 3, 1, "native"),
        (3, None, None, asked("num_beams", 3)),
        (1, 3, None, asked("num_beams", 3)),
        (1, 1, 3, asked("num_beams", 3)),
    ],
)
def test_an_argument_wins_over_the_given_configuration_and_that_over_the_models_own(
    pair: Pair, own_config: GenerationConfig, own: int, given: int | None, argument: int | None, way: str
) -> None:
    own_config.num_beams = own
    kwargs: dict[str, Any] = {"max_new_tokens": 6, "input_ids": prompts()}
    if given is not None:
        kwargs["generation_config"] = GenerationConfig(num_beams=given)
    if argument is not None:
        kwargs["num_beams"] = argument
    _, found = pair.same(**kwargs)
    assert found == way


def test_the_models_own_defaults_apply_field_by_field(pair: Pair, own_config: GenerationConfig) -> None:
    own_config.update(do_sample=True, temperature=0.6, top_p=0.8, repetition_penalty=1.2)
    _, way = pair.same(**left_padded(), max_new_tokens=10)
    assert way == "lockstep"
    _, way = pair.same(**left_padded(), generation_config=GenerationConfig(max_new_tokens=10, top_p=1.0))
    assert way == "lockstep"
    own_config.repetition_penalty = None
    _, way = pair.same(**left_padded(), max_new_tokens=10, do_sample=False)
    assert way == "native"


# ---------------------------------------------------------------------------------------------------------------------
# stop strings
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [[], [""], ["", "q"], "never there", ["5q3", "q"], [3]], ids=repr)
@pytest.mark.parametrize("place", ["argument", "configuration", "own"])
def test_stop_strings_from_any_place_act_as_in_transformers(
    pair: Pair, own_config: GenerationConfig, place: str, value: Any
) -> None:
    kwargs: dict[str, Any] = {**left_padded(), "max_new_tokens": 10, "tokenizer": TOKENIZER}
    if place == "argument":
        kwargs["stop_strings"] = value
    elif place == "configuration":
        kwargs["generation_config"] = GenerationConfig(stop_strings=value, max_new_tokens=10)
        del kwargs["max_new_tokens"]
    else:
        own_config.stop_strings = value
    _, way = pair.same(**kwargs)
    assert way in ("lockstep", "")  # "": refused before anything ran


def test_stop_strings_end_rows_one_by_one(pair: Pair) -> None:
    plain = pair.pipe.generate(**left_padded(), max_new_tokens=10, eos_token_id=None)
    word = TOKENIZER.decode(plain[1, 9:11])
    result, way = pair.same(**left_padded(), max_new_tokens=10, stop_strings=[word], tokenizer=TOKENIZER)
    assert way == "lockstep"
    assert result[1, 10:].tolist() == [int(plain[1, 10])] + [PAD] * (result.shape[1] - 11)
    assert result.shape[1] > 11


def test_a_criterion_of_the_caller_for_stop_strings_replaces_the_built_in_one(pair: Pair) -> None:
    plain = pair.pipe.generate(**left_padded(), max_new_tokens=10, eos_token_id=None)
    own = StopStringCriteria(TOKENIZER, TOKENIZER.decode(plain[1, 10:11]))
    criteria = StoppingCriteriaList([own])
    pair.same(**left_padded(), max_new_tokens=10, stop_strings=["q"], tokenizer=TOKENIZER, stopping_criteria=criteria)
    assert list(criteria) == [own]


def test_stop_strings_leave_the_callers_list_of_criteria_alone(pair: Pair) -> None:
    criteria = StoppingCriteriaList()
    pair.pipe.generate(prompts(), max_new_tokens=3, stop_strings=["q"], tokenizer=TOKENIZER, stopping_criteria=criteria)
    assert list(criteria) == []


# ---------------------------------------------------------------------------------------------------------------------
# special tokens, and other arguments that only the model's own loop serves
# ---------------------------------------------------------------------------------------------------------------------
def test_a_model_without_special_tokens_runs_to_the_limit() -> None:
    pair = Pair(tiny_llama(pad_token_id=None, bos_token_id=None, eos_token_id=None))
    for options in ({}, SAMPLED, {**DICT, "output_logits": True}):
        result, _ = pair.same(prompts(), max_new_tokens=30, **options)
        assert getattr(result, "sequences", result).shape == (3, 37)


def test_a_pad_that_is_also_eos_fills_finished_rows(pair: Pair) -> None:
    for options in ({}, SAMPLED):
        pair.same(**left_padded(), max_new_tokens=20, eos_token_id=[16, 31, 45], pad_token_id=16, **options)


def test_without_a_pad_the_first_eos_fills_finished_rows() -> None:
    pair = Pair(tiny_llama(pad_token_id=None))
    result, way = pair.same(**left_padded(), max_new_tokens=20, eos_token_id=[31, 16])
    assert way == "native"
    assert 31 in result[:, -1].tolist()


def test_an_assistant_goes_through_the_models_own_loop(pair: Pair) -> None:
    assistant = tiny_llama(num_hidden_layers=1)
    for options in ({}, SAMPLED):
        _, way = pair.same(prompts(1), assistant_model=assistant, max_new_tokens=10, **options)
        assert way == "assistant_model is given"


def test_a_callable_as_custom_generate_runs_instead(pair: Pair) -> None:
    def first_token(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return model(input_ids).logits[:, -1:].argmax(-1)

    result, way = pair.same(prompts(), custom_generate=first_token, max_new_tokens=4)
    assert way == "custom_generate is given"
    assert result.shape == (3, 1)


def test_a_custom_generate_of_the_hub_needs_trust_as_in_transformers(pair: Pair, tmp_path: Any) -> None:
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text("def generate(model, inputs, **kwargs):\n    return 7\n")
    result, _ = pair.same(prompts(), custom_generate=str(tmp_path))
    assert isinstance(result, ValueError)
    result, way = pair.same(prompts(), custom_generate=str(tmp_path), trust_remote_code=True)
    assert result == 7
    assert way == "custom_generate is given"


def test_negative_prompts_and_guidance_go_through_the_models_own_loop(pair: Pair) -> None:
    negative = {"negative_prompt_ids": prompts(3, 4, seed=9), "guidance_scale": 1.7}
    _, way = pair.same(prompts(), **negative, max_new_tokens=5)
    assert way == "negative_prompt_ids is given"


@pytest.mark.parametrize("value", [None, False])
def test_synced_gpus_off_changes_nothing(pair: Pair, value: bool | None) -> None:
    _, way = pair.same(prompts(), synced_gpus=value, max_new_tokens=5)
    assert way == "native"


def test_a_reason_is_logged_once_and_counted_every_time(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    fresh = Pair(pair.model)
    for _ in range(3):
        fresh.pipe.generate(prompts(), num_beams=2, max_new_tokens=3)
    assert fresh.pipe.stats()["fall_backs"] == {asked("num_beams", 2): 3}
    assert caplog.text.count("num_beams=2 is asked for") == 1


def test_an_empty_list_of_processors_or_criteria_changes_nothing(pair: Pair) -> None:
    _, way = pair.same(
        prompts(), max_new_tokens=4, logits_processor=LogitsProcessorList(), stopping_criteria=StoppingCriteriaList()
    )
    assert way == "native"
