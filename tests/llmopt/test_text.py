"""One request as a stream, many as a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

import llmopt
from llmopt import SamplingParams
from llmopt.errors import LlmoptError, ModelError, RequestError, UnsupportedModelError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import scripted_model, tiny_model, tiny_prompts, tiny_tokenizer
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes

SCRIPTS = [("hi", "Grüße, 世界 🔥!"), ("hi there", "a longer answer"), ("user: hi\nassistant: ", "hello")]


@pytest.fixture(scope="module")
def spoken() -> Any:
    tokenizer = tiny_tokenizer()
    with llmopt.build(scripted_model(SCRIPTS, tokenizer), tokenizer=tokenizer, block_size=4) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def tiny() -> Any:
    with build_tiny(block_size=4, max_num_requests=16) as pipe:
        yield pipe


# -- stream ---------------------------------------------------------------------------------------
def test_pieces_join_to_the_whole_text(spoken: InferencePipeline) -> None:
    pieces = list(spoken.stream("hi", max_new_tokens=60))
    assert "".join(pieces) == SCRIPTS[0][1]
    assert len(pieces) > 5
    assert_idle(spoken)


def test_messages_stream_through_the_chat_template(spoken: InferencePipeline) -> None:
    assert "".join(spoken.stream([{"role": "user", "content": "hi"}], max_new_tokens=9)) == "hello"


def test_a_stream_that_is_closed_early_gives_its_blocks_back(spoken: InferencePipeline) -> None:
    stream = spoken.stream("hi", max_new_tokens=60)
    assert next(stream) == "G"
    assert spoken.block_pool.num_used > 0
    stream.close()
    assert_idle(spoken)
    for piece in spoken.stream("hi there", max_new_tokens=60):
        assert piece == "a"
        break
    assert_idle(spoken)


def test_a_stream_that_is_dropped_or_closed_before_its_first_piece_ends_its_request(spoken: InferencePipeline) -> None:
    stream = spoken.stream("hi", max_new_tokens=60)
    assert len(spoken.queue) == 1
    stream.close()
    assert_idle(spoken)
    spoken.stream("hi", max_new_tokens=60)
    assert_idle(spoken)


def test_a_stream_that_was_never_read_can_be_aborted_by_its_id(spoken: InferencePipeline) -> None:
    stream = spoken.stream("hi", request_id="mine", max_new_tokens=60)
    spoken.abort("mine")
    with pytest.raises(LlmoptError, match="'mine' was aborted"):
        next(stream)
    assert_idle(spoken)


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        ("", {}, "empty"),
        ("hi", {"temperature": -1.0}, "temperature >= 0"),
        ("hi", {"max_tokens": 5}, "unknown options max_tokens. Options: .*max_new_tokens"),
        ("hi", {"n": 2}, "a stream has one continuation, n=2"),
        ("hi", {"max_new_tokens": 5000}, "limit is 1024"),
        ("hi", {"sampling": {"seed": 1}}, "sampling must be SamplingParams, found dict"),
        ([{"role": "user"}], {}, r"messages\[0\].content"),
    ],
)
def test_what_is_wrong_is_said_at_the_call_and_nothing_is_left(
    spoken: InferencePipeline, prompt: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        spoken.stream(prompt, **options)
    assert_idle(spoken)


def test_without_a_tokenizer_ids_run_in_a_batch_and_a_stream_is_refused() -> None:
    with llmopt.build(tiny_model()) as pipe:
        with pytest.raises(RequestError, match="a stream needs a tokenizer"):
            pipe.stream([5, 6])
        with pytest.raises(ModelError, match="no tokenizer"):
            pipe.batch(["hi"], progress=False)
        (output,) = pipe.batch([[5, 6]], max_new_tokens=3, progress=False)
        assert (output.text, len(output.token_ids)) == ("", 3)


def test_a_model_that_the_engine_cannot_run_is_named_by_every_face() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model()
    model.config.is_encoder_decoder = True
    with llmopt.build(model, tokenizer=tokenizer) as pipe:
        for call in (lambda: pipe.stream("hi"), lambda: pipe.batch(["hi"], progress=False), lambda: pipe.submit("hi")):
            with pytest.raises(UnsupportedModelError, match="engine cannot run this model: encoder-decoder"):
                call()


# -- options --------------------------------------------------------------------------------------
def test_options_win_over_sampling_and_none_means_not_given(tiny: InferencePipeline) -> None:
    given = SamplingParams(temperature=1.0, seed=3, max_new_tokens=5)
    wanted = alone(tiny, [5, 6], temperature=1.0, seed=3, max_new_tokens=5)
    assert alone(tiny, [5, 6], sampling=given) == wanted
    assert alone(tiny, [5, 6], sampling=given, temperature=None, top_k=None, stop=None) == wanted
    assert alone(tiny, [5, 6], sampling=given, temperature=0.0) == alone(tiny, [5, 6], max_new_tokens=5)


def test_the_models_generation_config_gives_the_defaults(tiny: InferencePipeline) -> None:
    config = tiny.model.generation_config
    before = config.to_dict()
    try:
        config.update(do_sample=True, temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.2)
        got = alone(tiny, [5, 6], seed=4, max_new_tokens=9)
    finally:
        config.update(**before)
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 4}
    assert got == alone(tiny, [5, 6], max_new_tokens=9, **options)


def test_the_models_generation_config_limits_the_output_as_far_as_the_context_goes() -> None:
    model = tiny_model()
    model.generation_config.max_new_tokens = 30
    with llmopt.build(model, max_model_len=24) as pipe:
        assert len(alone(pipe, [5, 6], ignore_eos=True)) == 22
        assert len(alone(pipe, [5, 6], ignore_eos=True, max_new_tokens=4)) == 4
        model.generation_config.max_new_tokens = 5
        assert len(alone(pipe, [5, 6], ignore_eos=True)) == 5
        assert len(alone(pipe, [5, 6], ignore_eos=True, max_new_tokens=8)) == 8
        assert len(alone(pipe, [5, 6], sampling=SamplingParams(ignore_eos=True))) == 22


def test_fields_of_the_generation_config_that_requests_ignore_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.generation_config.update(
        suppress_tokens=[7], bad_words_ids=[[8]], typical_p=1.0, temperature=0.5, num_beams=1
    )
    model.generation_config.update(remove_invalid_values=True, no_repeat_ngram_size=0, forced_eos_token_id=1)
    with llmopt.build(model) as pipe:
        caplog.clear()
        for _ in range(2):
            alone(pipe, [5, 6], max_new_tokens=2)
    (record,) = caplog.records
    assert (
        "generation config: bad_words_ids, forced_eos_token_id, remove_invalid_values, suppress_tokens. `gen"
        in record.getMessage()
    )


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ("hello", r"found the text 'hello'. Write batch\(\[prompt\]\)"),
        ([{"role": "user", "content": "hi"}], r"one list of messages. Write batch\(\[messages\]\)"),
        ([5, 6, 7], r"one list of token ids. Write batch\(\[ids\]\)"),
        ({"prompt": "hi"}, "found dict"),
        (None, "found NoneType"),
    ],
)
def test_one_prompt_where_many_are_wanted_is_refused_with_the_list_that_was_meant(
    spoken: InferencePipeline, requests: Any, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        spoken.batch(requests, progress=False)


@pytest.mark.parametrize("processors", [3, [3], lambda ids, logits: logits])
def test_processors_that_cannot_be_called_are_refused_on_arrival(tiny: InferencePipeline, processors: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors must be a list of callables"):
        tiny.batch([[5, 6]], logits_processors=processors, max_new_tokens=2, progress=False)
    assert_idle(tiny)


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (7, 7), (None, 253)])
def test_the_limit_of_new_tokens_is_exact_and_without_one_the_context_is_filled(
    tiny: InferencePipeline, limit: int | None, count: int
) -> None:
    (output,) = tiny.batch([[5, 6, 7]], max_new_tokens=limit, ignore_eos=True, progress=False)
    assert (len(output.token_ids), output.finish_reason) == (count, "length")


def test_no_tokens_at_all_is_refused_and_the_next_request_runs(tiny: InferencePipeline) -> None:
    with pytest.raises(RequestError, match="max_new_tokens >= 1, found 0"):
        tiny.batch([[5]], max_new_tokens=0, progress=False)
    assert len(alone(tiny, [5], max_new_tokens=1)) == 1


# -- batch ----------------------------------------------------------------------------------------
def test_outputs_keep_the_order_and_the_options_of_their_requests(tiny: InferencePipeline) -> None:
    prompts = tiny_prompts(5, max_length=20)
    requests: list[Any] = [
        prompts[0],
        {"prompt": prompts[1], "max_new_tokens": 2},
        {"prompt": prompts[2], "temperature": 1.0, "seed": 5},
        {"prompt": prompts[3], "n": 3, "temperature": 1.0, "seed": 6},
        {"prompt": prompts[4], "request_id": "mine"},
    ]
    outputs = tiny.batch(requests, max_new_tokens=9, ignore_eos=True, progress=False)
    assert [o.prompt_ids for o in outputs] == [prompts[i] for i in (0, 1, 2, 3, 3, 3, 4)]
    assert [len(o.token_ids) for o in outputs] == [9, 2, 9, 9, 9, 9, 9]
    assert outputs[-1].request_id == "mine"
    assert outputs[0].token_ids == alone(tiny, prompts[0], max_new_tokens=9, ignore_eos=True)
    assert outputs[2].token_ids == alone(tiny, prompts[2], max_new_tokens=9, ignore_eos=True, temperature=1.0, seed=5)
    assert len({tuple(o.token_ids) for o in outputs[3:6]}) == 3
    assert all(0 < o.ttft_s <= o.latency_s for o in outputs)  # type: ignore[operator]
    assert_idle(tiny)


def test_every_call_of_many_returns_its_own_results_in_order(tiny: InferencePipeline) -> None:
    chooser = random.Random(2)
    pool = tiny_prompts(12, max_length=16)
    wanted = [alone(tiny, p, max_new_tokens=4, ignore_eos=True) for p in pool]
    for call in range(60):
        places = [chooser.randrange(12) for _ in range((1, 7, 3)[call % 3])]
        requests = [{"prompt": pool[i], "max_new_tokens": chooser.randint(1, 4)} for i in places]
        outputs = tiny.batch(requests, ignore_eos=True, progress=False)
        assert [o.prompt_ids for o in outputs] == [pool[i] for i in places]
        for output, place, made in zip(outputs, places, requests, strict=True):
            assert output.token_ids == wanted[place][: made["max_new_tokens"]]  # type: ignore[misc]


def test_continuations_depend_on_their_seed_and_not_on_other_requests(tiny: InferencePipeline) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 42, "n": 4, "max_new_tokens": 12}
    mine = {"prompt": [9, 8, 7], **options}

    def ids(outputs: Any) -> list[list[int]]:
        return [o.token_ids for o in outputs]

    first = ids(tiny.batch([mine], progress=False))
    assert len(set(map(tuple, first))) > 1
    assert ids(tiny.batch([mine], progress=False)) == first
    others: list[Any] = [{"prompt": p, "temperature": 1.3, "max_new_tokens": 20} for p in tiny_prompts(7)]
    crowd = tiny.batch([*others[:3], mine, *others[3:]], progress=False)
    assert ids(crowd[3:7]) == first
    greedy = ids(tiny.batch([{**mine, "temperature": 0.0}], progress=False))
    assert len(set(map(tuple, greedy))) == 1
    free = {"prompt": [9, 8, 7], "temperature": 1.0, "max_new_tokens": 12}
    assert ids(tiny.batch([free], progress=False)) != ids(tiny.batch([free], progress=False))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"max_new_tokens": 3}, r"requests\[1\] is a dict without 'prompt'"),
        ({"prompt": [5], "temperature": "hot"}, "temperature"),
        ([512], "token id 512"),
        ({"prompt": [5], "request_id": "same"}, "'same' belongs to a live request"),
        ([5] * 300, "prompt of 300 tokens"),
    ],
)
def test_one_bad_request_and_nothing_is_started(tiny: InferencePipeline, bad: Any, told: str) -> None:
    before = tiny.stats()["num_step_tokens"]
    with pytest.raises(RequestError, match=told):
        tiny.batch([{"prompt": [5, 6], "request_id": "same"}, bad], max_new_tokens=4, progress=False)
    assert tiny.stats()["num_step_tokens"] == before
    assert_idle(tiny)


def test_a_request_that_fails_while_it_runs_ends_alone() -> None:
    import torch

    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    with llmopt.build(model, block_size=4, pool_bytes=pool_bytes(64, 4)) as pipe:
        requests: list[Any] = [[5, 6], [77, 8], {"prompt": [9], "logits_processors": [lambda ids, line: 1 / 0]}, [7]]
        outputs = pipe.batch(requests, max_new_tokens=6, ignore_eos=True, progress=False)
        assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length"]
        assert "next token is nan" in str(outputs[1].error)
        assert "ZeroDivisionError" in str(outputs[2].error)
        assert outputs[0].token_ids == alone(pipe, [5, 6], max_new_tokens=6, ignore_eos=True)
        assert_idle(pipe)


def test_a_progress_bar_counts_requests_and_an_empty_batch_is_empty(
    tiny: InferencePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.batch([[5], [6]], max_new_tokens=3, ignore_eos=True)
    assert "2/2" in capsys.readouterr().out
    assert tiny.batch([]) == []
