"""draft_model: a second model's drafts never change the output, and its KV follows what the target accepted."""

from __future__ import annotations

from typing import Any

import pytest

import llmopt
from llmopt.errors import ModelError, PluginOptionError
from llmopt.request import Request
from llmopt.testing import tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins.speculation.draft_model import DraftModel
from llmopt_plugins.speculation.draft_model.drafter import ModelDrafter
from llmopt_plugins.speculation.draft_model.vocabulary import why_not_same

PROMPTS = tiny_prompts(5)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


def run(plugins: list[Any], model: Any = None, prompts: Any = PROMPTS, **options: Any) -> tuple[list[list[int]], Any]:
    options = {"max_new_tokens": 24, **options}
    with llmopt.build(model or tiny_model(), plugins, self_test=False) as pipe:
        outputs = pipe.batch(prompts, progress=False, **options)
        for output in outputs:
            if output.error is not None:
                raise output.error
        stats = pipe.stats()
        assert pipe.block_pool.num_used == 0
    return [output.token_ids for output in outputs], stats.get("propose.draft_model", {})


def nearly(seed: int = 0) -> Any:
    """A draft model that agrees with the tiny model here and there."""
    import torch

    model = tiny_model(seed=seed)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("fixed", [1, 4])
@pytest.mark.parametrize("draft", ["right", "nearly", "wrong"])
def test_tokens_are_those_of_the_target_whatever_the_draft_model_says(
    draft: str, fixed: int, native: bool, ahead: bool
) -> None:
    wanted, _ = run([])
    model = {"right": tiny_model, "nearly": nearly, "wrong": lambda: tiny_model(seed=7)}[draft]()
    found, stats = run([DraftModel(model, fixed=fixed, native=native, ahead=ahead)])
    assert found == wanted
    assert stats["draft_blocks_used"] == 0
    if draft == "right":
        assert stats["accepted"] == stats["drafted"] > 0
        assert not ahead or stats["draft_hits_ahead"] > 0
    elif draft == "nearly":
        assert 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2"])
def test_draft_models_of_other_families_and_with_sliding_windows_draft_exactly(kind: str) -> None:
    model = tiny_model(kind)
    prompts = tiny_prompts(3, min_length=20, max_length=40)
    wanted, _ = run([], model, prompts, max_new_tokens=40)
    found, stats = run([DraftModel(tiny_model(kind), fixed=5)], model, prompts, max_new_tokens=40)
    assert found == wanted
    assert stats["accepted"] == stats["drafted"] > 0  # also far beyond a window of 32


def test_a_rejected_draft_rewinds_the_draft_model_to_the_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled: list[int] = []

    class Spoiled(ModelDrafter):
        def draft(self, requests: Any, limits: Any) -> Any:
            drafts = super().draft(requests, limits)
            spoiled.append(len(spoiled))
            if len(spoiled) == 3 and drafts[0] is not None:
                drafts[0].token_ids[1] = (drafts[0].token_ids[1] + 1) % 500
            self.twins.check()
            return drafts

    monkeypatch.setattr("llmopt_plugins.speculation.draft_model.drafter.ModelDrafter", Spoiled)
    wanted, _ = run([], prompts=[PROMPTS[0]], max_new_tokens=60)
    found, stats = run([DraftModel(tiny_model(), fixed=4)], prompts=[PROMPTS[0]], max_new_tokens=60)
    assert found == wanted
    assert stats["drafted"] - stats["accepted"] == 3  # those behind the spoiled one, and it; no other is ever wrong
    # each token is computed once, and once more after the rejection
    assert stats["draft_tokens_computed"] <= len(PROMPTS[0]) + 60 + 4


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_draft_model_with_a_shorter_context_stops_drafting_where_it_ends(kind: str) -> None:
    model, draft = tiny_model(max_position_embeddings=64), tiny_model(kind, max_position_embeddings=32)
    prompt = tiny_prompts(1, min_length=20, max_length=20)[0]
    with llmopt.build(model, [DraftModel(draft, fixed=5)], self_test=False) as pipe:
        output = pipe.batch([prompt], progress=False, ignore_eos=True)[0]
        assert pipe.stats()["propose.draft_model"]["drafted"] > 0
    with llmopt.build(model, self_test=False) as pipe:
        wanted = pipe.batch([prompt], progress=False, ignore_eos=True)[0]
    assert output.token_ids == wanted.token_ids
    assert len(prompt) + len(output.token_ids) == 64
    assert output.finish_reason == "length"


def test_vocabularies_that_are_padded_differently_draft_over_the_common_ids() -> None:
    model, draft = tiny_model(vocab_size=520), tiny_model(vocab_size=512)
    for target_model, draft_model in ((model, draft), (draft, model)):
        wanted, _ = run([], target_model)
        found, _ = run([DraftModel(draft_model, fixed=4)], target_model)
        assert found == wanted


def test_another_tokenizer_is_refused_with_a_string_that_differs() -> None:
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    assert why_not_same(ours, theirs, 512, 600) is None
    theirs.add_tokens(["<tool>"])
    assert why_not_same(ours, theirs, 512, 512) is None  # more tokens at the end
    ours.add_tokens(["<image>"])
    assert "'<tool>' instead of '<image>'" in str(why_not_same(ours, theirs, 512, 512))
    plugin = DraftModel(tiny_model(), tokenizer=theirs)
    with pytest.raises(ValueError, match="tokenizer is another one"):
        llmopt.build(tiny_model(), [plugin], tokenizer=ours, self_test=False)


def test_another_size_of_vocabulary_is_refused_where_no_tokenizers_can_be_compared() -> None:
    with pytest.raises(ModelError, match="its vocabulary has 2048 tokens and the target's 512"):
        llmopt.build(tiny_model(), [DraftModel(tiny_model(vocab_size=2048))], self_test=False)


def test_a_draft_model_whose_states_cannot_be_rewound_is_refused() -> None:
    pytest.importorskip("transformers.models.mamba")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mamba", vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=8)
    draft = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="draft_model cannot use this model"):
        llmopt.build(tiny_model(), [DraftModel(draft)], self_test=False)


def test_sampled_tokens_are_those_of_the_plain_run_alone_and_beside_others() -> None:
    options = {"temperature": 1.0, "seed": 9, "max_new_tokens": 20}
    wanted, _ = run([], prompts=[PROMPTS[3]], **options)
    found, stats = run([DraftModel(nearly(), fixed=4)], prompts=[PROMPTS[3]], **options)
    assert found == wanted
    assert stats["accepted"] > 0
    beside, _ = run([DraftModel(nearly(), fixed=4)], prompts=[PROMPTS[3], *PROMPTS], **options)
    assert beside[0] == wanted[0]
    other, _ = run([DraftModel(nearly(), fixed=4)], prompts=[PROMPTS[3]], **{**options, "seed": 10})
    assert other != wanted


def test_drafts_of_sampled_requests_use_the_random_numbers_of_the_target() -> None:
    options = {"temperature": 1.0, "seed": 3}
    _, stats = run([DraftModel(tiny_model(), fixed=4)], **options)
    assert stats["accepted"] == stats["drafted"] > 0


def test_penalties_and_a_minimum_length_count_drafted_tokens() -> None:
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_new_tokens": 12}
    wanted, _ = run([], **options)
    found, stats = run([DraftModel(tiny_model(), fixed=4)], **options)
    assert found == wanted
    assert stats["accepted"] == stats["drafted"] > 0


@pytest.mark.parametrize(
    "company",
    [
        ["paged_kv", "prefix_cache", "chunked_prefill"],
        ["native", "paged_kv:swap_bytes=1000000"],
        ["native", "kv_quant"],
    ],
)
def test_in_company_tokens_stay_the_same(company: list[str]) -> None:
    repeated = [*PROMPTS, PROMPTS[0]]
    wanted, _ = run(company, prompts=repeated)
    found, _ = run([*company, DraftModel(nearly(), fixed=4)], prompts=repeated)
    assert found == wanted


def test_a_small_draft_pool_drops_the_twins_that_wait_longest() -> None:
    wanted, _ = run([])
    per_block = 2 * 2 * 16 * 2 * 4 * 32
    plugin = DraftModel(tiny_model(), fixed=4, pool_bytes=9 * per_block)
    found, stats = run([plugin])
    assert found == wanted
    assert stats["drafted"] > 0


def test_its_own_weights_in_fewer_bits_draft_for_the_target() -> None:
    model = tiny_model(hidden_size=128, intermediate_size=256, initializer_range=0.1)
    wanted, _ = run(["native"], model)
    found, stats = run(["native", DraftModel(bits=8, fixed=4)], model)
    assert found == wanted
    assert stats["accepted"] > 0.5 * stats["drafted"]


def test_the_controller_turns_a_useless_draft_model_off() -> None:
    wanted, _ = run([], prompts=[PROMPTS[0]], max_new_tokens=200, ignore_eos=True)
    plugin = DraftModel(tiny_model(seed=7), native=False)  # a draft step takes as long as one of the target
    found, stats = run([plugin], prompts=[PROMPTS[0]], max_new_tokens=200, ignore_eos=True)
    assert found == wanted
    assert stats["drafted"] < 100


@pytest.mark.parametrize(
    "options", [{"num_draft": 0}, {"fixed": 65}, {"bits": 5}, {"bits": 4, "native": False}, {"pool_bytes": "1"}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"found|native"):
        DraftModel("self", **options)


def test_a_shared_model_without_own_threads_does_not_draft_ahead() -> None:
    model = tiny_model()
    with pytest.raises(PluginOptionError, match="the same object"):
        llmopt.build(model, [DraftModel(model, native=False, ahead=True)], self_test=False)


def test_an_aborted_request_gives_its_draft_blocks_back() -> None:
    with llmopt.build(tiny_model(), [DraftModel(tiny_model(), fixed=4)], self_test=False) as pipe:
        request = Request("a", PROMPTS[0], llmopt.SamplingParams(ignore_eos=True), max_len=200, wants_text=False)
        pipe.add(request)
        for _ in range(4):
            pipe.advance()
        assert pipe.stats()["propose.draft_model"]["draft_blocks_used"] > 0
        pipe.abort(request)
        assert pipe.stats()["propose.draft_model"]["draft_blocks_used"] == 0


@pytest.mark.model
def test_a_real_model_in_8_bits_drafts_for_itself_and_the_tokens_stay_its_own(demo_fp32: tuple[Any, Any]) -> None:
    model, tokenizer = demo_fp32
    prompts = [tokenizer(text).input_ids for text in ("Three rivers of Europe are", "def add(a, b):\n")]
    wanted, _ = run(["native"], model, prompts, max_new_tokens=32)
    found, stats = run(["native", DraftModel(bits=8, fixed=4)], model, prompts, max_new_tokens=32)
    assert found == wanted
    assert stats["tokens_per_round"] > 3.0
