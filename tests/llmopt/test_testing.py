"""The tools for plugin authors: they accept what is right, and each of them refuses what is wrong."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.errors import ModelError, PluginUnavailableError
from llmopt.plugin_search import find_plugin
from llmopt.testing import (
    TINY_KINDS,
    assert_same_distribution,
    assert_same_tokens,
    check_plugin,
    scripted_model,
    tiny_model,
    tiny_prompts,
    tiny_tokenizer,
)
from llmopt.testing.identity import left_padded

TEXT = "Grüße, 世界 🔥!"


# -- tiny models ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tiny_model_has_the_documented_sizes_and_does_not_repeat_itself(kind: str) -> None:
    model = tiny_model(kind)
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (512, 64, 2)
    assert (config.num_attention_heads, config.max_position_embeddings, model.dtype) == (4, 256, torch.float32)
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert len(set(out[0, 3:].tolist())) >= 5


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, second, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_kind_that_does_not_exist_is_refused_with_the_tested_kinds() -> None:
    with pytest.raises(ModelError, match="'lama'.*llama, gpt2"):
        tiny_model("lama")


def test_tiny_prompts_differ_in_length_and_hold_no_special_ids() -> None:
    prompts = tiny_prompts(5, min_length=1, max_length=9)
    assert sorted(map(len, prompts)) == [1, 3, 5, 7, 9]
    assert all(3 <= token < 512 for prompt in prompts for token in prompt)
    assert prompts == tiny_prompts(5, min_length=1, max_length=9)


def test_the_tiny_tokenizer_has_one_token_per_byte_and_loses_nothing() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == [3 + byte for byte in TEXT.encode()]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == TEXT


# -- the scripted model -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def spoken() -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer()
    return scripted_model([("hi", TEXT), ("hi there", "longer"), ([7, 8, 9], [4, 5])], tokenizer), tokenizer


def test_a_scripted_model_says_its_text_through_generate(spoken: tuple[Any, Any]) -> None:
    model, tokenizer = spoken
    ids, mask = left_padded([tokenizer("hi")["input_ids"], tokenizer("hi there")["input_ids"]])
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    assert texts == [TEXT, "longer"]


def test_a_scripted_model_says_its_text_through_the_engine_in_one_packed_batch(spoken: tuple[Any, Any]) -> None:
    model, tokenizer = spoken
    with llmopt.build(model, tokenizer=tokenizer, block_size=4, max_tokens_per_step=8) as pipe:
        outputs = pipe.batch(["hi", "hi there", "nobody knows this", [7, 8, 9]], max_new_tokens=40, progress=False)
        assert pipe.stats()["fall_backs"] == {}
    assert [o.text for o in outputs[:3]] == [TEXT, "longer", ""]
    assert outputs[3].token_ids == [4, 5, 2]


def test_a_scripted_model_goes_on_with_its_script_when_another_token_was_chosen(spoken: tuple[Any, Any]) -> None:
    model, tokenizer = spoken
    with llmopt.build(model, tokenizer=tokenizer) as pipe:
        (output,) = pipe.batch(["hi there"], max_new_tokens=7, progress=False, logit_bias={3 + ord("l"): -100.0})
    assert output.token_ids[0] != 3 + ord("l")
    assert output.token_ids[1:6] == [3 + byte for byte in b"onger"]


def test_a_scripted_model_notices_a_wrong_cache(spoken: tuple[Any, Any]) -> None:
    model, tokenizer = spoken
    with llmopt.build(model, tokenizer=tokenizer, block_size=4) as pipe:
        handle = pipe.stream("hi there", max_new_tokens=20)
        assert next(handle) == "l"
        for layer in pipe.kv_cache.layers.values():
            layer.value.zero_()
        assert "".join(handle) != "onger"


def test_a_script_in_text_needs_a_tokenizer_and_every_prompt_a_token() -> None:
    with pytest.raises(ModelError, match="Pass a tokenizer"):
        scripted_model([("hi", "there")])
    with pytest.raises(ModelError, match="empty prompt"):
        scripted_model([([], [4])])


# -- token identity ---------------------------------------------------------------------------------
class WrapVerify:
    """A plugin made from a function on accepted tokens, to break things with."""

    info = PluginInfo(name="wrap_verify", layer="speculation", promise="exact", summary="for tests")

    def __init__(self, change: Any) -> None:
        self.change = change

    @hookimpl
    def llmopt_wrap_verify(self, verify: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            accepted = verify(*arguments)
            self.change(accepted)
            return accepted

        return changed


def other_token(accepted: Any) -> None:
    """Change the token of every request that has 5 output tokens."""
    for request, tokens in zip(accepted.requests, accepted.token_ids, strict=True):
        if request.num_output_tokens == 5:
            tokens[0] ^= 1


def test_equal_tokens_pass_greedy_and_sampled() -> None:
    model = tiny_model()
    with llmopt.build(model) as pipe:
        assert_same_tokens(pipe, model, tiny_prompts(3))
        assert_same_tokens(pipe, model, tiny_prompts(3), do_sample=True, top_p=0.9, repetition_penalty=1.2)


def test_a_single_other_token_is_found_and_named() -> None:
    model = tiny_model()
    with (
        llmopt.build(model, [WrapVerify(other_token)]) as pipe,
        pytest.raises(AssertionError, match="row 0 differs from new token 5 on"),
    ):
        assert_same_tokens(pipe, model, tiny_prompts(2))


def test_a_fall_back_is_no_equality() -> None:
    model = tiny_model()
    with llmopt.build(model) as pipe, pytest.raises(AssertionError, match="fell back.*num_beams"):
        assert_same_tokens(pipe, model, tiny_prompts(1), num_beams=2)


def test_half_precision_is_refused_because_equality_means_nothing_there() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    with llmopt.build(model) as pipe, pytest.raises(ValueError, match="float32"):
        assert_same_tokens(pipe, model, tiny_prompts(1))


def test_samples_of_the_engine_fit_the_exact_distribution_and_biased_ones_do_not() -> None:
    model, prompt = tiny_model(), [9, 8]
    with llmopt.build(model) as pipe:
        assert assert_same_distribution(pipe, model, prompt) < 4
        with pytest.raises(AssertionError, match="standard deviations"):
            assert_same_distribution(_Temperature(pipe, 0.8), model, prompt)  # type: ignore[arg-type]


class _Temperature:
    """A pipeline that samples at another temperature than it is asked for."""

    def __init__(self, pipeline: Any, factor: float) -> None:
        self.pipeline, self.factor = pipeline, factor

    def batch(self, requests: Any, **options: Any) -> Any:
        return self.pipeline.batch(requests, **{**options, "temperature": options["temperature"] * self.factor})


# -- the conformance check --------------------------------------------------------------------------
class Stats:
    """A plugin as it should be: counts steps."""

    info = PluginInfo(name="count_steps", layer="scheduling", promise="exact", summary="count steps")

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        return lambda queue: schedule(queue)


def test_a_right_plugin_passes_and_the_report_says_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [find_plugin(name) for name in ("paged_kv", "fused_ops", "torch_compile")]  # all of them take a minute
    monkeypatch.setattr("llmopt.testing.conformance.builtin_plugins", lambda: few)
    report = check_plugin(Stats)
    text = str(report)
    assert report.passed
    assert report.stages == {"schedule": ["baseline", "count_steps"]}
    assert [c.name for c in report.checks] == ["declaration", "hooks", "output", "company", "blame", "isolation",
                                               "blocks", "model", "overhead"]  # fmt: skip
    assert "FAILED" not in text
    assert re.search("same output beside .*paged_kv", text)
    assert "torch_compile" not in text  # slow to build: met when it is named
    assert report.step_us > 0


def failed_checks(factory: Any, **options: Any) -> str:
    options = {"company": (), "max_new_tokens": 8, **options}
    with pytest.raises(AssertionError) as caught:
        check_plugin(factory, **options)
    return "\n".join(line for line in str(caught.value).splitlines() if "FAILED" in line)


def test_a_plugin_that_changes_tokens_fails_on_its_output() -> None:
    failed = failed_checks(lambda: WrapVerify(other_token))
    assert "FAILED output: row" in failed
    assert "blocks" not in failed


class Partial(Stats):
    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        return functools.partial(schedule)


def test_a_stage_that_cannot_be_blamed_fails() -> None:
    assert "FAILED blame: an exception in its stage 'schedule' is blamed on" in failed_checks(Partial)


class Leaking(Stats):
    """Takes a block for itself in its 40th step."""

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any, context: Any) -> Any:
        count, is_done = 0, False

        def leak(queue: Any) -> Any:
            nonlocal count, is_done
            count += 1
            if count >= 40 and not is_done and context.block_pool.num_free:
                is_done = True
                context.block_pool.allocate(1)
            return schedule(queue)

        return leak


def test_one_lost_block_fails() -> None:
    assert "FAILED blocks: a request that takes the whole pool never runs: 11 of 12 blocks are free" in failed_checks(
        Leaking
    )


class Scaling(Stats):
    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any, context: Any) -> None:
        with torch.no_grad():
            context.model.get_input_embeddings().weight[511] *= 1.5


def test_a_changed_weight_fails() -> None:
    assert "FAILED model: weight model.embed_tokens.weight changed" in failed_checks(Scaling, model=tiny_model())


class Greedy(Stats):
    """Ends every running request when one step fails for one of them."""

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Any) -> Any:
        lost: set[str] = set()

        def remember(queue: Any) -> Any:
            batch = schedule(queue)
            for request in queue.running:
                if request.num_preemptions and request.request_id not in lost:
                    lost.add(request.request_id)
                    raise RuntimeError("cannot start twice")
            return batch

        return remember


def test_a_plugin_that_does_not_survive_a_failed_step_fails() -> None:
    assert "FAILED isolation" in failed_checks(Greedy)


class Nameless(Stats):
    info = PluginInfo(name="two words", layer="scheduling", promise="lossy")


def test_a_careless_declaration_fails() -> None:
    assert "FAILED declaration: the name 'two words' is no identifier" in failed_checks(Nameless)


class NotHere(Stats):
    def why_unavailable(self, context: Any) -> str:
        return "needs a machine with seven cores"


def test_a_plugin_that_cannot_run_here_raises_and_is_not_reported_as_right() -> None:
    with pytest.raises(PluginUnavailableError, match="seven cores"):
        check_plugin(NotHere, company=())


class Lossy(WrapVerify):
    info = PluginInfo(name="sloppy", layer="kernel", promise="lossy", summary="for tests", loss="one token in ten")

    def __init__(self) -> None:
        super().__init__(other_token)


def test_a_lossy_plugin_is_measured_and_not_judged() -> None:
    report = check_plugin(Lossy, company=())
    output = next(check for check in report.checks if check.name == "output")
    assert output.detail.startswith("25 of 120 greedy tokens agree")
    assert output.detail.endswith("stated loss: one token in ten")


class Apart(Stats):
    info = PluginInfo(name="apart", layer="scheduling", promise="exact", summary="s", conflicts=("paged_kv",))


def test_company_that_is_excluded_is_reported_with_its_reason() -> None:
    report = check_plugin(Apart, company=["paged_kv"])
    company = next(check for check in report.checks if check.name == "company")
    assert "cannot be combined with paged_kv" in company.detail
    assert "exclude each other" in company.detail
