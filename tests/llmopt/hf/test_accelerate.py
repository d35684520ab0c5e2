"""An accelerated model behaves as before, only its `generate` goes through the engine; afterwards it is as it was."""

from __future__ import annotations

import copy
import io
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, pipeline

import llmopt
from llmopt.errors import ModelError, PipelineClosedError
from tests.llmopt.hf.tiny import left_padded, prompts, tiny_gpt2, tiny_llama, tiny_tokenizer

NEW = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(params=[tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


def snapshot(model: Any) -> dict[str, Any]:
    """Everything about a model that somebody could see, as plain values."""
    hooks = [n for n, v in vars(model).items() if n.endswith("_hooks") and isinstance(v, dict)]
    modules = dict(model.named_modules())
    with torch.no_grad():
        logits = model(prompts()).logits
    return {
        "type": type(model),
        "attributes": {name: sorted(vars(m)) for name, m in modules.items()},
        "modules": {name: id(m) for name, m in modules.items()},
        "training": {name: m.training for name, m in modules.items()},
        "hooks": {name: [(h, list(getattr(m, h))) for h in hooks] for name, m in modules.items()},
        "parameters": {
            n: (id(p), p.data_ptr(), p._version, p.requires_grad, p.grad) for n, p in model.named_parameters()
        },
        "buffers": {n: (id(b), b.data_ptr()) for n, b in model.named_buffers()},
        "config": copy.deepcopy(dict(vars(model.config))),
        "config_id": id(model.config),
        "generation_config": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "generate": getattr(model.generate, "__func__", model.generate),
        "logits": logits.tolist(),
        "state": {k: v.clone() for k, v in model.state_dict().items()},
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in before:
        if name == "state":
            assert before[name].keys() == after[name].keys()
            assert all(torch.equal(before[name][k], after[name][k]) for k in before[name])
        else:
            assert after[name] == before[name], name


def use(model: Any) -> None:
    """Calls of every kind: native, lockstep, fall-back, failing."""
    model.generate(**left_padded(), **NEW)
    model.generate(**left_padded(), **NEW, do_sample=True, num_return_sequences=2)
    model.generate(prompts(), **NEW, num_beams=2)
    model.generate(prompts(), **NEW, cache=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="tempature"):
        model.generate(prompts(), tempature=1.0)


@pytest.mark.parametrize("as_function", [False, True], ids=["with", "function"])
def test_a_restored_model_is_bit_for_bit_what_it_was(model: Any, as_function: bool) -> None:
    before = snapshot(model)
    if as_function:
        acceleration = llmopt.accelerate(model, block_size=8)
        use(model)
        acceleration.restore()
        acceleration.restore()
    else:
        with llmopt.accelerate(model, block_size=8) as pipe:
            use(model)
            assert pipe.stats()["generate_calls"] == {"native": 1, "lockstep": 1}
    assert_unchanged(before, snapshot(model))
    assert model.generate.__func__ is GenerationMixin.generate


def test_a_model_is_restored_when_the_block_raises(model: Any) -> None:
    before = snapshot(model)
    with pytest.raises(KeyError), llmopt.accelerate(model):
        raise KeyError("on purpose")
    assert_unchanged(before, snapshot(model))


def test_while_accelerated_only_generate_is_different(model: Any) -> None:
    before = snapshot(model)
    with llmopt.accelerate(model) as pipe:
        during = snapshot(model)
        assert during.pop("generate") is pipe.generate
        assert during["attributes"].pop("") == sorted([*before["attributes"][""], "generate"])
        assert_unchanged({k: v for k, v in before.items() if k in during and k != "attributes"}, during)


def test_accelerated_results_are_those_of_the_model(model: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: model.generate(**left_padded(), **NEW),
        lambda: model.generate(prompts(), GenerationConfig(max_new_tokens=4, repetition_penalty=1.4)),
        lambda: model.generate(**left_padded(), **NEW, do_sample=True, top_p=0.9),
        lambda: model.generate(prompts(), **NEW, num_beams=3),
        lambda: model.generate(prompts(), **NEW, return_dict_in_generate=True, output_scores=True).sequences,
    ]

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        return [call() for call in calls]

    expected = results()
    with llmopt.accelerate(model):
        actual = results()
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_a_training_and_frozen_state_is_kept(model: Any) -> None:
    next(model.parameters()).requires_grad_(False)
    model.train()
    before = {n: (p.requires_grad, model.training) for n, p in model.named_parameters()}
    with llmopt.accelerate(model) as pipe:
        torch.manual_seed(0)
        model.generate(prompts(), **NEW)
        assert pipe.stats()["fall_backs"] == {"the model is in training mode": 1}
        model.eval()
        model.generate(prompts(), **NEW)
        assert pipe.stats()["generate_calls"] == {"native": 1}
        model.train()
    assert {n: (p.requires_grad, model.training) for n, p in model.named_parameters()} == before


def _loss(model: Any) -> Tensor:
    return model(prompts(), labels=prompts()).loss


def test_a_model_trains_while_and_after_it_is_accelerated(model: Any) -> None:
    _loss(model).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with llmopt.accelerate(model):
        model.generate(prompts(), **NEW)
        _loss(model).backward()
        assert all(torch.equal(p.grad, wanted[n]) for n, p in model.named_parameters())
        model.zero_grad()
    _loss(model).backward()
    assert all(torch.equal(p.grad, wanted[n]) for n, p in model.named_parameters())


def test_a_step_of_training_shows_in_the_next_generation(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with llmopt.accelerate(model):
        before = model.generate(prompts(), **NEW)
        for _ in range(3):
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
        after = model.generate(prompts(), **NEW)
    assert not torch.equal(before, after)
    assert torch.equal(model.generate(prompts(), **NEW), after)


def test_two_threads_may_generate_with_one_model(model: Any) -> None:
    inputs = [prompts(2, 5, seed=1), prompts(3, 9, seed=2)]
    expected = [model.generate(ids, max_new_tokens=30) for ids in inputs]
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = [model.generate(inputs[number], max_new_tokens=30) for _ in range(3)]

    with llmopt.accelerate(model) as pipe:
        threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pipe.stats()["generate_calls"] == {"native": 6}
    for number, want in enumerate(expected):
        assert all(torch.equal(result, want) for result in results[number])


# ---------------------------------------------------------------------------------------------------------------------
# refusals
# ---------------------------------------------------------------------------------------------------------------------
def test_accelerating_twice_is_an_error_that_says_what_to_do(model: Any) -> None:
    with llmopt.accelerate(model) as pipe:
        with pytest.raises(ModelError, match="Restore it before accelerating it again"):
            llmopt.accelerate(model)
        assert model.generate is pipe.generate
    with llmopt.accelerate(model):
        model.generate(prompts(), **NEW)


def test_a_generate_that_somebody_else_installed_is_left_alone(model: Any) -> None:
    own = lambda *args, **kwargs: "mine"  # noqa: E731
    model.generate = own
    with pytest.raises(ModelError, match="`generate` of its own"):
        llmopt.accelerate(model)
    assert model.generate is own


def test_a_generate_installed_in_the_meantime_survives_the_end(model: Any) -> None:
    with llmopt.accelerate(model):
        model.generate = types.MethodType(lambda self: "mine", model)
    assert model.generate() == "mine"


@pytest.mark.parametrize("wrong", ["demo", torch.nn.Linear(2, 2), None])
def test_what_is_no_loaded_model_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError):
        llmopt.accelerate(wrong)


def test_a_kept_generate_says_that_the_pipeline_was_closed(model: Any) -> None:
    with llmopt.accelerate(model):
        kept = model.generate
    with pytest.raises(PipelineClosedError):
        kept(prompts(), **NEW)


# ---------------------------------------------------------------------------------------------------------------------
# copies
# ---------------------------------------------------------------------------------------------------------------------
def test_a_copy_of_an_accelerated_model_stands_alone(model: Any) -> None:
    expected = model.generate(prompts(), **NEW)
    with llmopt.accelerate(model) as pipe:
        copied = copy.deepcopy(model)
        assert copied.generate.__self__ is copied
        assert torch.equal(copied.generate(prompts(), **NEW), expected)
        assert pipe.stats()["generate_calls"] == {}
        with llmopt.accelerate(copied) as other:
            assert torch.equal(copied.generate(prompts(), **NEW), expected)
            assert other.stats()["generate_calls"] == {"native": 1}
    assert copied.generate.__func__ is GenerationMixin.generate


def test_an_accelerated_model_can_be_saved_whole_and_by_its_weights(model: Any, tmp_path: Any) -> None:
    expected = model.generate(prompts(), **NEW)
    file = io.BytesIO()
    with llmopt.accelerate(model):
        model.save_pretrained(tmp_path)
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.generate(prompts(), **NEW), expected)
    assert torch.equal(type(model).from_pretrained(tmp_path).generate(prompts(), **NEW), expected)


# ---------------------------------------------------------------------------------------------------------------------
# code that calls generate
# ---------------------------------------------------------------------------------------------------------------------
TEXTS = ["the thing is on", "then", "an answer in the other", "x"]


@pytest.fixture
def text_pipeline(model: Any) -> Callable[..., Any]:
    return lambda **options: pipeline("text-generation", model=model, tokenizer=tiny_tokenizer(), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "num_return_sequences": 2, "return_full_text": False},
        {"do_sample": False, "stop_sequence": "q"},
        {"do_sample": False, "return_tensors": True},
        {"num_beams": 2},
    ],
    ids=lambda o: ",".join(o),
)
def test_the_text_generation_pipeline_gives_the_same_texts(
    text_pipeline: Callable[..., Any], model: Any, batch_size: int, options: dict[str, Any]
) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        return text_pipeline()(list(TEXTS), batch_size=batch_size, max_new_tokens=10, **options)

    expected = run()
    with llmopt.accelerate(model) as pipe:
        assert run() == expected
        served = pipe.stats()
        assert bool(served["fall_backs"]) is ("num_beams" in options)
        assert sum(served["generate_calls"].values()) + sum(served["fall_backs"].values()) == -(-4 // batch_size)


@pytest.mark.model
@pytest.mark.slow
def test_the_text_generation_pipeline_gives_the_same_texts_with_the_demo_model(demo_fp32: tuple[Any, Any]) -> None:
    model, tokenizer = demo_fp32
    kept = tokenizer.padding_side
    messages = [
        [{"role": "user", "content": "Name three colours."}],
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
    ]
    before = vars(model).keys() - {"generate"}

    def run() -> Any:
        torch.manual_seed(0)
        speak = pipeline("text-generation", model=model, tokenizer=tokenizer)
        greedy = speak(copy.deepcopy(messages), batch_size=2, max_new_tokens=16, do_sample=False)
        return greedy, speak("Once upon a time", max_new_tokens=12, do_sample=True, top_k=20)

    try:
        expected = run()
        with llmopt.accelerate(model) as pipe:
            assert run() == expected
            assert pipe.stats()["fall_backs"] == {}
    finally:
        tokenizer.padding_side = kept
    assert vars(model).keys() == before
    assert "Paris" in str(expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.to(torch.bfloat16), "dtype was torch.float32 when the pipeline was built and is torch.bfloat16"),
        (lambda m: m.resize_token_embeddings(160), "number of embeddings was 128"),
    ],
    ids=["dtype", "embeddings"],
)
def test_a_model_that_changed_since_the_build_runs_its_own_loop(
    model: Any, change: Callable[[Any], Any], reason: str
) -> None:
    with llmopt.accelerate(model) as pipe:
        change(model)
        ids = prompts().clone()
        ids[:, 0] = model.get_input_embeddings().num_embeddings - 1  # a new id, where there are any
        assert torch.equal(model.generate(ids, **NEW), GenerationMixin.generate(model, ids, **NEW))
        assert not pipe.generate.calls
        assert any(reason in found for found in pipe.generate.fall_backs)


def test_inputs_that_a_wrapper_prepares_are_used_and_its_leftovers_do_no_harm(model: Any) -> None:
    with llmopt.accelerate(model) as pipe:
        plain = model.generate(prompts(), **NEW)
        own = model.prepare_inputs_for_generation

        def prompt_learning(input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return own(input_ids.flip(-1) if kwargs.get("is_first_iteration") else input_ids, *args, **kwargs)

        model.prepare_inputs_for_generation = prompt_learning
        expected = GenerationMixin.generate(model, prompts(), **NEW)
        assert not torch.equal(expected, plain)
        assert torch.equal(model.generate(prompts(), **NEW), expected)
        assert any("prepare_inputs_for_generation" in found for found in pipe.generate.fall_backs)
        model.prepare_inputs_for_generation = own  # as PEFT leaves it after a call
        assert torch.equal(model.generate(prompts(), **NEW), plain)
        assert sum(pipe.generate.calls.values()) == 2


class _Wrapper(torch.nn.Module):
    """What the engine reads of a PEFT wrapper: the model inside, and the configs of its adapters by name."""

    def __init__(self, model: Any, is_prompt_learning: bool) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": types.SimpleNamespace(is_prompt_learning=is_prompt_learning)}

    def get_base_model(self) -> Any:
        return self.base_model


@pytest.mark.parametrize("enter", [llmopt.build, llmopt.accelerate])
def test_prompt_learning_is_refused_and_other_wrappers_are_opened(model: Any, enter: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match=r"prompt learning.*generate"):
        enter(_Wrapper(model, is_prompt_learning=True))
    assert "generate" not in vars(model)
    with enter(_Wrapper(model, is_prompt_learning=False)) as pipe:
        assert pipe.model is model


@pytest.mark.parametrize("face", ["stream", "batch", "submit"])
def test_text_is_not_made_by_a_model_in_training_mode(model: Any, face: str) -> None:
    with llmopt.build(model, tokenizer=tiny_tokenizer()) as pipe:
        model.train()
        prompt: Any = ["the"] if face == "batch" else "the"
        with pytest.raises(ModelError, match=r"training mode.*eval\(\)"):
            list(getattr(pipe, face)(prompt, max_new_tokens=2))
        model.eval()
        assert pipe.batch(["the"], max_new_tokens=2, progress=False)[0].error is None
