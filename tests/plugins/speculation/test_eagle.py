"""EAGLE drafts: the output stays what it was, good heads are believed, and what they keep is given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import llmopt
from llmopt.errors import PluginUnavailableError
from llmopt.testing import check_plugin, tiny_model, tiny_prompts
from llmopt_plugins.speculation.eagle import Eagle
from llmopt_plugins.speculation.eagle.self_check import check_prompt

from .eagle_heads import LAYOUTS, write_head
from .eagle_oracle import forgetful_model, write_oracle, write_pupil

EXECUTORS = [pytest.param([], id="torch"), pytest.param(["native"], id="native", marks=pytest.mark.native)]
PROMPTS = tiny_prompts(4, min_length=2)


def outputs(pipe: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    options.setdefault("max_new_tokens", 20)
    found = pipe.batch(prompts, progress=False, **options)
    for output in found:
        assert output.error is None, output.error
    return [output.token_ids for output in found]


def figures(pipe: Any) -> dict[str, Any]:
    return pipe.stats()["propose.eagle"]  # type: ignore[no-any-return]


def drafter_of(pipe: Any) -> Any:
    (stage,) = (o for o in pipe.registry.chains["propose"].objects if hasattr(o, "drafter"))
    return stage.drafter


def assert_nothing_is_kept(pipe: Any) -> None:
    drafter = drafter_of(pipe)
    assert drafter.stats()["num_requests"] == 0
    assert drafter.pool.num_used == 0


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with llmopt.build(tiny_model()) as pipe:
        return outputs(pipe)


# -- lossless -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_random_head_of_any_layout_the_output_is_what_it_was(
    layout: str, executor: list[str], tmp_path: Path, plain: list[list[int]]
) -> None:
    head = write_head(tmp_path, layout)
    with llmopt.build(tiny_model(), [*executor, Eagle(head, self_check=False, fixed=8)]) as pipe:
        assert outputs(pipe) == plain
        assert figures(pipe)["drafted"] > 100
        assert_nothing_is_kept(pipe)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("width", "depth", "fixed"), [(1, 1, 1), (1, 4, 4), (2, 3, 5), (4, 4, 12), (3, 2, 12), (8, 5, 40)]
)
def test_trees_of_any_shape_leave_the_output_alone(
    width: int, depth: int, fixed: int, executor: list[str], tmp_path: Path, plain: list[list[int]]
) -> None:
    head = write_head(tmp_path, "eagle3")
    plugin = Eagle(head, self_check=False, num_draft=40, width=width, depth=depth, fixed=fixed)
    with llmopt.build(tiny_model(), [*executor, plugin]) as pipe:
        assert outputs(pipe) == plain


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_seeded_request_gets_the_same_tokens_with_and_without_drafts(executor: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 5, "repetition_penalty": 1.1}
    model = forgetful_model()
    with llmopt.build(model, executor) as pipe:
        expected = outputs(pipe, **options)
    with llmopt.build(model, [*executor, Eagle(write_oracle(tmp_path, model), fixed=6, num_draft=6)]) as pipe:
        assert outputs(pipe, **options) == expected
        assert figures(pipe)["accepted"] > 0


@pytest.mark.parametrize(
    "company",
    [
        ["chunked_prefill"], ["prefix_cache"], ["paged_kv"], ["paged_kv", "prefix_cache"], ["batch_window"],
        ["request_order"],
    ],
    ids="+".join,
)  # fmt: skip
@pytest.mark.parametrize("executor", EXECUTORS)
def test_beside_other_plugins_the_output_is_what_it_was(
    company: list[str], executor: list[str], tmp_path: Path
) -> None:
    model = forgetful_model()
    prompts = [[*PROMPTS[0], *PROMPTS[1], *p] for p in PROMPTS] * 2
    with llmopt.build(model) as pipe:
        expected = outputs(pipe, prompts)
    eagle = Eagle(write_oracle(tmp_path, model), fixed=6)
    for plugins in ([eagle, *company], [*company, eagle]):
        with llmopt.build(model, [*executor, *plugins], block_size=4, max_tokens_per_step=24) as pipe:
            assert outputs(pipe, prompts) == expected
            assert outputs(pipe, prompts) == expected  # with prefixes that are found
            assert figures(pipe)["tokens_per_round"] > 2.5
            assert_nothing_is_kept(pipe)


def test_in_a_pool_that_is_too_small_for_all_requests_start_over_and_end_with_the_same_tokens(tmp_path: Path) -> None:
    model = forgetful_model()
    with llmopt.build(model) as pipe:
        expected = outputs(pipe)
    plugins = ["paged_kv", Eagle(write_oracle(tmp_path, model), fixed=4, num_draft=4)]
    with llmopt.build(model, plugins, block_size=4, max_model_len=48, pool_bytes=16 * 4 * 256) as pipe:
        assert outputs(pipe) == expected
        assert_nothing_is_kept(pipe)


# -- heads that know ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("width", "depth", "fixed"), [(1, 5, 5), (4, 4, 12)])
def test_a_head_that_is_always_right_is_believed_to_the_last_level(
    width: int, depth: int, fixed: int, executor: list[str], tmp_path: Path
) -> None:
    model = forgetful_model()
    head = write_oracle(tmp_path, model)
    with llmopt.build(model, executor) as pipe:
        expected = outputs(pipe, max_new_tokens=41)
    plugin = Eagle(head, num_draft=fixed, width=width, depth=depth, fixed=fixed)
    with llmopt.build(model, [*executor, plugin]) as pipe:
        assert outputs(pipe, max_new_tokens=41) == expected
        found = figures(pipe)
        assert found["agreement"] == 1.0
        levels = fixed if width == 1 else depth
        assert found["tokens_per_round"] > 0.9 * (1 + levels)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_head_that_learnt_its_texts_by_heart_gives_several_tokens_per_round(
    executor: list[str], tmp_path: Path
) -> None:
    model = tiny_model(num_hidden_layers=3)
    with llmopt.build(model) as pipe:
        expected = outputs(pipe, max_new_tokens=30)
    texts = [[*p, *ids] for p, ids in zip(PROMPTS, expected, strict=True)]
    length = min(map(len, texts))
    head = write_pupil(tmp_path, model, [text[-length:] for text in texts], [0, 1, 2])
    plugin = Eagle(head, aux_layers=[0, 1, 2], fixed=8, self_check=False)
    with llmopt.build(model, [*executor, plugin]) as pipe:
        assert outputs(pipe, max_new_tokens=30) == expected
        assert figures(pipe)["tokens_per_round"] > 1.8


def test_prompts_that_are_found_in_the_cache_leave_a_hole_and_drafts_go_on(tmp_path: Path) -> None:
    model = forgetful_model()
    prompt = tiny_prompts(1, min_length=40, max_length=40)[0]
    with llmopt.build(model, ["prefix_cache", Eagle(write_oracle(tmp_path, model), fixed=4)], block_size=8) as pipe:
        first = outputs(pipe, [prompt])
        assert outputs(pipe, [prompt]) == first
        assert drafter_of(pipe).stats()["num_pairs"] < 2 * 40 + 30
        assert figures(pipe)["tokens_per_round"] > 3.5


# -- the controller -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_controller_may_turn_drafts_off_and_on_again(executor: list[str], tmp_path: Path) -> None:
    model = forgetful_model()
    with llmopt.build(model, executor) as pipe:
        expected = outputs(pipe, max_new_tokens=60)
    with llmopt.build(model, [*executor, Eagle(write_oracle(tmp_path, model), fixed=4)]) as pipe:
        (stage,) = (o for o in pipe.registry.chains["propose"].objects if hasattr(o, "drafter"))
        asleep = iter([k // 7 % 2 == 1 for k in range(1000)])
        stage.goodput.is_asleep = lambda: next(asleep)
        assert outputs(pipe, max_new_tokens=60) == expected
        assert figures(pipe)["tokens_per_round"] > 3.5
        assert_nothing_is_kept(pipe)


def test_without_fixed_the_controller_decides_and_the_output_stays(tmp_path: Path, plain: list[list[int]]) -> None:
    with llmopt.build(tiny_model(), [Eagle(write_head(tmp_path, "eagle3"), self_check=False)]) as pipe:
        assert outputs(pipe) == plain


# -- the self-check -------------------------------------------------------------------------------------------------
def test_a_head_that_knows_nothing_of_its_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginUnavailableError, match=r"names \d+% of the tokens .* reads other layers than"):
        llmopt.build(tiny_model(), [Eagle(write_head(tmp_path, "eagle3"))])


def test_of_two_readings_of_the_layers_in_a_config_the_one_that_agrees_is_taken(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=4)
    with llmopt.build(model) as pipe:
        prompt = check_prompt(pipe)
        (ids,) = outputs(pipe, [prompt], max_new_tokens=64)
    write_pupil(tmp_path, model, [[*prompt, *ids]], [0, 1, 3], num_steps=200)  # or 1, 2 and 4, if they mean outputs
    with llmopt.build(model, [Eagle(tmp_path)]) as pipe:
        assert figures(pipe)["agreement"] > 0.5
        assert drafter_of(pipe).taps == [0, 1, 3]  # all of 0 to 4 are shown
        assert any("are read as (0, 1, 3)" in note for note in pipe.notes)


# -- refusals -------------------------------------------------------------------------------------------------------
def test_without_a_head_for_the_model_there_is_nothing_to_draft_with() -> None:
    with pytest.raises(
        PluginUnavailableError, match="'eagle' needs a draft head: none ships with llmopt for this model"
    ):
        llmopt.build(tiny_model(), ["eagle"])


def test_build_names_the_plugin_the_folder_and_the_reason(tmp_path: Path) -> None:
    folder = write_head(tmp_path, "eagle3", config={"target_hidden_size": 128})
    with pytest.raises(
        PluginUnavailableError, match=r"'eagle' cannot use the draft head in '.*': it was made for a target"
    ):
        llmopt.build(tiny_model(), [Eagle(folder)])
    with pytest.raises(
        PluginUnavailableError, match=r"'eagle' cannot use the draft head in '.*nowhere': it has no config"
    ):
        llmopt.build(tiny_model(), [Eagle(tmp_path / "nowhere")])


def test_the_plugin_keeps_to_the_rules_of_all_plugins(tmp_path: Path) -> None:
    model = forgetful_model()
    head = write_oracle(tmp_path, model)

    def make() -> Eagle:
        return Eagle(head, fixed=4)

    report = check_plugin(make, model=model, company=["native", "paged_kv", "prefix_cache", "chunked_prefill"])
    assert report.passed


# -- options --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft": 0}, "num_draft is a whole number from 1 to 64"),
        ({"width": 40, "depth": 4}, r"width \* \(depth - 1\) is at most 64"),
        ({"bits": 4}, "bits is 8 or None, found 4"),
        ({"fixed": 13}, "fixed is a whole number from 1 to 12, which is num_draft=12"),
        ({"depth": True}, "depth is a whole number"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle("somewhere", **options)


@pytest.mark.native
def test_the_head_may_be_stored_in_8_bits(tmp_path: Path) -> None:
    model = forgetful_model()
    head = write_oracle(tmp_path, model)
    sizes = []
    for bits in (None, 8):
        with llmopt.build(model, ["native", Eagle(head, bits=bits, fixed=4)]) as pipe:
            outputs(pipe)
            assert figures(pipe)["tokens_per_round"] > 3
            sizes.append(drafter_of(pipe).head.num_bytes)
    assert sizes[1] < 0.5 * sizes[0]


def test_a_plugin_object_builds_several_pipelines(tmp_path: Path) -> None:
    model = forgetful_model()
    plugin = Eagle(write_oracle(tmp_path, model), fixed=4)
    with llmopt.build(model, [plugin]) as one, llmopt.build(model, [plugin]) as other:
        assert outputs(one) == outputs(other)
        assert drafter_of(one) is not drafter_of(other)


def test_weights_of_the_target_stay_bit_equal(tmp_path: Path) -> None:
    model = forgetful_model()
    before = {name: w.clone() for name, w in model.state_dict().items()}
    with llmopt.build(model, [Eagle(write_oracle(tmp_path, model), fixed=4)]) as pipe:
        outputs(pipe)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


@pytest.mark.native
def test_pipelines_with_the_same_head_share_its_packed_weights(tmp_path: Path, plain: list[list[int]]) -> None:
    model = tiny_model()
    plugins = ["native", Eagle(write_head(tmp_path, "eagle3"), self_check=False, fixed=4)]
    with llmopt.build(model, plugins) as one:
        with llmopt.build(model, plugins) as other:
            assert drafter_of(one).head.packed.memory is drafter_of(other).head.packed.memory
            assert outputs(one) == outputs(other) == plain
        assert outputs(one) == plain


@pytest.mark.native
@pytest.mark.parametrize(("bits", "is_packed_again"), [(None, False), (8, True)])
def test_the_targets_output_matrix_is_not_packed_again_where_it_has_the_form_of_the_heads(
    bits: int | None, is_packed_again: bool, tmp_path: Path, plain: list[list[int]]
) -> None:
    model: Any = tiny_model()
    bare = write_head(tmp_path / "bare", "eagle1")  # brings no output matrix
    copy = write_head(tmp_path / "copy", "eagle1", changes={"lm_head.weight": model.lm_head.weight.detach().clone()})
    found = []
    for head, has_own in ((bare, is_packed_again), (copy, True)):
        with llmopt.build(model, ["native", Eagle(head, bits=bits, self_check=False, fixed=4)]) as pipe:
            assert ("head" in drafter_of(pipe).head.packed.matrices) is has_own
            assert outputs(pipe) == plain
            found.append((figures(pipe)["drafted"], figures(pipe)["accepted"]))
    assert found[0] == found[1]


@pytest.mark.native
def test_a_head_that_reads_the_targets_matrices_follows_them_to_where_they_are_packed_again(tmp_path: Path) -> None:
    model = forgetful_model()
    head = write_oracle(tmp_path, model)
    plugins = ["native", Eagle(head, bits=None, fixed=4)]
    with llmopt.build(model, plugins) as one, llmopt.build(model, plugins) as other:
        wanted, before = outputs(one), figures(one)["tokens_per_round"]
        run = drafter_of(one).head
        old, count = run._memory, figures(one)["drafted"]
        assert not {"embedding", "head"} & run.packed.matrices.keys()
        with torch.no_grad():
            model.model.norm.weight.mul_(2)  # all logits grow, and the best ones stay
        assert outputs(one) == wanted
        assert figures(one)["drafted"] > count
        assert run._memory is run._target.memory is not old
        assert run._target.memory is not other.registry.chains["execute"].objects[0].packed.memory
        assert outputs(other) == wanted
        assert figures(one)["tokens_per_round"] > 0.8 * before
