"""native: what it runs itself, what it leaves to the Hugging Face executor, and what it says of itself."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llmopt
from llmopt import native
from llmopt.batch import Batch, BestTokens, DraftTokens
from llmopt.errors import NonFiniteLogitsError, PluginOptionError, PluginUnavailableError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.kernel.native import Native

PROMPTS = tiny_prompts(4, min_length=2, max_length=30)


def counts(pipe: InferencePipeline) -> dict[str, int]:
    found: dict[str, int] = pipe.stats()["execute.native"]
    return found


def tokens(pipe: InferencePipeline, **options: Any) -> list[list[int]]:
    outputs = pipe.batch(PROMPTS, progress=False, max_new_tokens=12, ignore_eos=True, **options)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.token_ids for output in outputs]


def plain_tokens(model: Any) -> list[list[int]]:
    with llmopt.build(model) as pipe:
        return tokens(pipe)


# -- what it says ----------------------------------------------------------------------------------------------------
@pytest.mark.native
def test_describe_shows_formats_bytes_kernels_and_threads() -> None:
    with llmopt.build(tiny_model("mixtral"), [Native(threads=2)]) as pipe:
        told = str(pipe.describe())
    core = native.core()
    assert core is not None
    assert "native: 2 layers, 2 of 4 experts, float32, " in told
    assert f"MB packed; {core.isa()} kernels, 2 threads" in told


@pytest.mark.native
def test_auto_chooses_it_for_a_known_family() -> None:
    with llmopt.build(tiny_model("llama"), "auto") as pipe:
        assert "native" in pipe.describe().details


def test_without_the_extension_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", "off")
    with pytest.raises(PluginUnavailableError, match="needs the compiled extension.*LLMOPT_NATIVE=off"):
        llmopt.build(tiny_model("llama"), ["native"])


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_threads_are_checked(threads: Any) -> None:
    from llmopt.plugin_search import make_plugin

    with pytest.raises(PluginOptionError, match="threads"):
        make_plugin("native", {"threads": threads})


# -- rows that it leaves to others -----------------------------------------------------------------------------------
@pytest.mark.native
def test_rows_that_are_more_than_ids_run_on_the_hugging_face_executor_in_the_same_step() -> None:
    model = tiny_model("llama")
    embeddings = model.get_input_embeddings()(torch.tensor([PROMPTS[0]])).detach()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(inputs_embeds=embeddings, **options)
    with llmopt.build(model, ["native"]) as pipe:
        handles = [pipe.submit(prompt, max_new_tokens=40, ignore_eos=True) for prompt in PROMPTS]
        assert torch.equal(pipe.generate(inputs_embeds=embeddings, **options), wanted)
        mixed = [handle.result().token_ids for handle in handles]
        assert not pipe.generate.fall_backs
        assert counts(pipe)["num_fallback_rows"] > 0
        alone = pipe.batch(PROMPTS, progress=False, max_new_tokens=40, ignore_eos=True)
        assert mixed == [output.token_ids for output in alone]


# -- a model that changes --------------------------------------------------------------------------------------------
def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)


def _through_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data *= -2


def _new_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = -weight.data


def _new_parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach())


def _norm(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight[3:9] = -1


@pytest.mark.native
@pytest.mark.parametrize("change", [_in_place, _through_data, _new_data, _new_parameter, _norm])
def test_weights_that_change_are_packed_again_before_the_next_request(change: Any) -> None:
    model = tiny_model("llama")
    before = plain_tokens(model)
    with llmopt.build(model, ["native"]) as pipe:
        assert tokens(pipe) == before
        change(model)
        after = plain_tokens(model)
        assert after != before
        assert tokens(pipe) == after
        assert counts(pipe) == {**counts(pipe), "num_repacks": 1, "num_fallback_rows": 0}


@pytest.mark.native
def test_hooks_run_on_the_hugging_face_executor_while_they_are_there(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model("llama")
    wanted = plain_tokens(model)
    calls: list[int] = []
    with llmopt.build(model, ["native"]) as pipe:
        hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        with caplog.at_level(logging.WARNING, "llmopt"):
            assert tokens(pipe) == wanted
        assert calls
        assert "model.layers.0 with forward hooks" in caplog.text
        assert "not used at the moment" in str(pipe.describe())
        hook.remove()
        calls.clear()
        steps = counts(pipe)["num_steps"]
        assert tokens(pipe) == wanted
        assert not calls
        assert counts(pipe)["num_steps"] > steps
        assert "not used" not in str(pipe.describe())


@pytest.mark.native
def test_exchanged_modules_run_on_the_hugging_face_executor() -> None:
    model: Any = tiny_model("llama")

    class Twice(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with llmopt.build(model, ["native"]) as pipe:
        old = model.model.layers[0].mlp.up_proj
        new = Twice(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        model.model.layers[0].mlp.up_proj = new
        assert tokens(pipe) == plain_tokens(model)
        assert counts(pipe)["num_fallback_rows"] > 0


@pytest.mark.native
def test_modules_of_another_class_run_on_the_hugging_face_executor() -> None:
    model: Any = tiny_model("llama")

    class Twice(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with llmopt.build(model, ["native"]) as pipe:
        before = tokens(pipe)
        projection = model.model.layers[0].mlp.up_proj
        projection.__class__ = Twice
        assert tokens(pipe) == plain_tokens(model) != before
        assert "not used at the moment" in str(pipe.describe())
        projection.__class__ = torch.nn.Linear
        assert tokens(pipe) == before
        assert "not used" not in str(pipe.describe())


@pytest.mark.native
def test_a_part_exchanged_for_one_of_another_kind_is_told_and_runs_on_the_hugging_face_executor() -> None:
    model: Any = tiny_model("llama")
    with llmopt.build(model, ["native"]) as pipe:
        model.model.layers[0].mlp = torch.nn.Identity()
        assert tokens(pipe) == plain_tokens(model)
        assert counts(pipe)["num_fallback_rows"] > 0
    with pytest.raises(PluginUnavailableError, match="not put together as a LlamaForCausalLM"):
        llmopt.build(model, ["native"])
    with llmopt.build(model, "auto") as pipe:
        assert tokens(pipe) == plain_tokens(model)


@pytest.mark.native
def test_a_model_that_was_cut_to_its_first_layers_runs_and_reordered_layers_are_refused() -> None:
    model: Any = tiny_model("llama")
    layers = model.model.layers
    model.model.layers = layers[:1]
    with llmopt.build(model, ["native"]) as pipe:
        assert tokens(pipe) == plain_tokens(model)
        assert counts(pipe)["num_fallback_rows"] == 0
    model.model.layers = torch.nn.ModuleList([layers[1], layers[0]])
    with pytest.raises(PluginUnavailableError, match="number 1 in place 0"):
        llmopt.build(model, ["native"])


@pytest.mark.native
def test_a_model_made_in_inference_mode_runs() -> None:
    wanted = plain_tokens(tiny_model("llama"))
    with torch.inference_mode():
        model: Any = tiny_model("llama")
    with llmopt.build(model, ["native"]) as pipe:
        assert tokens(pipe) == wanted
        with torch.inference_mode():
            model.model.layers[0].mlp.down_proj.weight.mul_(-2)
        assert tokens(pipe) == plain_tokens(model) != wanted


@pytest.mark.native
def test_a_forked_child_builds_and_runs() -> None:
    model = tiny_model("llama")
    with llmopt.build(model, [Native(threads=2)]) as pipe:
        wanted = tokens(pipe)
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that waits for threads that are not there
            code = 1
            try:
                with llmopt.build(model, [Native(threads=2)]) as own:
                    code = 0 if tokens(own) == wanted and tokens(pipe) == wanted else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tokens(pipe) == wanted


# -- logits or the best token ----------------------------------------------------------------------------------------
class Seen:
    """Notes what `execute` returned, between it and `verify`."""

    def __init__(self, pipe: InferencePipeline) -> None:
        self.kinds: list[type] = []
        execute = pipe.execute

        def noting(batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
            result = execute(batch, drafts)
            self.kinds.append(type(result))
            return result

        pipe.execute = noting


@pytest.mark.native
def test_greedy_requests_get_their_best_token_without_logits() -> None:
    model = tiny_model("llama")
    with llmopt.build(model, ["native"]) as pipe:
        seen = Seen(pipe)
        assert tokens(pipe) == plain_tokens(model)
        assert set(seen.kinds) == {BestTokens}
        seen.kinds.clear()
        tokens(pipe, repetition_penalty=1.3)
        assert set(seen.kinds) == {Tensor}


@pytest.mark.native
def test_a_plugin_that_reads_logits_finds_them() -> None:
    shapes: list[tuple[int, ...]] = []

    class Reader:
        info = llmopt.PluginInfo(name="reader", layer="speculation", promise="exact")

        @llmopt.hookimpl
        def llmopt_wrap_verify(self, verify: Any) -> Any:
            def reading(batch: Batch, drafts: Any, logits: Tensor, mask: Any) -> Any:
                shapes.append(tuple(logits.shape))
                return verify(batch, drafts, logits, mask)

            return reading

    model = tiny_model("llama")
    with llmopt.build(model, ["native", Reader()]) as pipe:
        assert tokens(pipe) == plain_tokens(model)
    assert shapes
    assert {shape[1] for shape in shapes} == {512}


class Drafter:
    """Proposes what is known to come, with a mistake at some places."""

    info = llmopt.PluginInfo(name="drafter", layer="speculation", promise="exact")

    def __init__(self, known: list[list[int]]) -> None:
        self.whole = [[*prompt, *output] for prompt, output in zip(PROMPTS, known, strict=True)]

    @llmopt.hookimpl
    def llmopt_configure(self, config: Any) -> Any:
        return config.with_options(max_num_draft=4)

    @llmopt.hookimpl
    def llmopt_replace_propose(self) -> Any:
        def propose(batch: Batch) -> DraftTokens:
            drafts = np.full((batch.num_requests, 4), -1, dtype=np.int64)
            counts = np.zeros(batch.num_requests, dtype=np.int32)
            ready = set(batch.logits_requests)
            for row, request in enumerate(batch.requests):
                known = request.token_ids[: request.num_tokens].tolist()
                whole = next((w for w in self.whole if w[: len(known)] == known), [])
                ahead = whole[len(known) :][: min(4, max(0, request.max_len - request.num_tokens - 1))]
                if request.lockstep is None and request in ready and ahead:
                    if len(known) % 3 == 0:
                        ahead[-1] = (ahead[-1] + 1) % 500
                    drafts[row, : len(ahead)] = ahead
                    counts[row] = len(ahead)
            return DraftTokens(drafts, counts)

        return propose


@pytest.mark.native
def test_rows_with_drafts_run_in_one_call_and_keep_their_tokens() -> None:
    model = tiny_model("llama")
    wanted = plain_tokens(model)
    with llmopt.build(model, ["native", Drafter(wanted)], block_size=4) as pipe:
        seen = Seen(pipe)
        assert tokens(pipe) == wanted
        assert set(seen.kinds) == {BestTokens}
        with_drafts = pipe.stats()["num_steps"]
        assert tokens(pipe, temperature=0.9, seed=3)  # sampled: drafts are wrong, and logits are asked for
        assert Tensor in seen.kinds
    with llmopt.build(model, ["native"], block_size=4) as pipe:
        tokens(pipe)
        assert with_drafts < pipe.stats()["num_steps"]


@pytest.mark.native
def test_logits_that_are_not_finite_end_the_request_with_the_reason() -> None:
    model: Any = tiny_model("llama")
    with llmopt.build(model, ["native"]) as pipe:
        with torch.no_grad():
            model.lm_head.weight[7, 3] = torch.nan
        output = pipe.batch(PROMPTS[:1], progress=False, max_new_tokens=3)[0]
    assert isinstance(output.error, NonFiniteLogitsError)


# -- company ---------------------------------------------------------------------------------------------------------
@pytest.mark.native
def test_it_works_in_inference_mode_and_with_gradients_on() -> None:
    model = tiny_model("qwen3")
    wanted = plain_tokens(model)
    with llmopt.build(model, ["native", "paged_kv"], block_size=4, max_tokens_per_step=7) as pipe:
        with torch.inference_mode():
            assert tokens(pipe) == wanted
        with torch.enable_grad():
            assert tokens(pipe) == wanted
        assert_same_tokens(pipe, model, PROMPTS)
        assert_same_tokens(pipe, model, PROMPTS, num_beams=1, num_return_sequences=2, do_sample=True, top_k=10)


@pytest.mark.native
def test_two_pipelines_of_one_model_do_not_disturb_each_other() -> None:
    model = tiny_model("gpt2")
    wanted = plain_tokens(model)
    with llmopt.build(model, ["native"]) as first, llmopt.build(model, ["native", "paged_kv"]) as second:
        handles = [
            (pipe, pipe.submit(p, max_new_tokens=12, ignore_eos=True)) for p in PROMPTS for pipe in (first, second)
        ]
        found = [handle.result().token_ids for _, handle in handles]
    assert found[0::2] == wanted
    assert found[1::2] == wanted


# -- how tokens are chosen -------------------------------------------------------------------------------------------
@pytest.mark.native
def test_a_minimum_length_is_kept_without_logits() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([p[:2] for p in PROMPTS])
    with llmopt.build(model, [Native(threads=2)]) as pipe:
        free = pipe.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=-1)
        ends = sorted(set(free[:, 2:5].flatten().tolist()))  # each row would end soon
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        for minimum in ({"min_new_tokens": 7}, {"min_length": 6}, {"min_new_tokens": 12}):
            wanted = model.generate(ids, **options, **minimum)
            is_best: list[bool] = []
            step = pipe.execute._step
            pipe.execute._step = lambda *a, step=step, seen=is_best: (seen.append(a[5:6] == (True,)), step(*a))[1]
            assert torch.equal(pipe.generate(ids, **options, **minimum), wanted)
            pipe.execute._step = step
            assert is_best
            assert all(is_best)
        outputs = pipe.batch(ids.tolist(), max_new_tokens=12, min_new_tokens=7, stop_token_ids=ends, progress=False)
    with llmopt.build(model) as pipe:
        plain = pipe.batch(ids.tolist(), max_new_tokens=12, min_new_tokens=7, stop_token_ids=ends, progress=False)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.native
def test_tokens_are_chosen_on_one_thread_of_torch() -> None:
    seen: list[int] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return scores

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = tiny_model("llama")
        for plugins, count in (([Native(threads=2)], 1), ([], 2)):
            with llmopt.build(model, plugins) as pipe:
                pipe.generate(torch.tensor([[5, 6]]), max_new_tokens=3, eos_token_id=-1, logits_processor=[look])
                assert torch.get_num_threads() == 2
                assert seen == [count] * 3
                seen.clear()
    finally:
        torch.set_num_threads(before)


@pytest.mark.native
def test_logits_are_float32_whatever_torchs_defaults_are() -> None:
    """The decoder writes float32: memory of torch's default dtype would be too small for it."""
    sampled = {"temperature": 0.8, "seed": 1}
    with llmopt.build(tiny_model("llama"), ["native"]) as pipe:
        expected = tokens(pipe, **sampled)
    with llmopt.build(tiny_model("llama"), ["native"]) as pipe:
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert tokens(pipe, **sampled) == expected
        finally:
            torch.set_default_dtype(torch.float32)
