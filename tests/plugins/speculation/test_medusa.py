"""medusa: published layouts are read, others refused with the reason; the output stays that of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import llmopt
from llmopt.errors import ModelError, PluginUnavailableError
from llmopt.testing import tiny_model, tiny_prompts
from llmopt_plugins.speculation.medusa import Medusa
from llmopt_plugins.speculation.medusa.checkpoint import read_heads
from llmopt_plugins.speculation.medusa.drafter import best_tree

from .medusa_heads import write_trained

HIDDEN, VOCAB = 64, 512
PROMPTS = tiny_prompts(5)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


def original(
    num_heads: int = 3, num_layers: int = 1, has_outputs: bool = True, scale: float = 0.3
) -> dict[str, Tensor]:
    """Random heads under the names of the original implementation."""
    maker = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return scale * torch.randn(shape, generator=maker)

    found: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            found[f"{i}.{j}.linear.weight"] = random(HIDDEN, HIDDEN)
            found[f"{i}.{j}.linear.bias"] = random(HIDDEN)
        if has_outputs:
            found[f"{i}.{num_layers}.weight"] = random(VOCAB, HIDDEN)
    return found


def write_pt(folder: Path, tensors: dict[str, Tensor]) -> Path:
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}  # it holds more
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def write_safetensors(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)
    return folder


def converted(**options: Any) -> dict[str, Tensor]:
    """The same under the names of serving engines, which drop biases."""
    found: dict[str, Tensor] = {}
    for key, tensor in original(**options).items():
        i, j, *rest = key.split(".")
        if rest == ["linear", "weight"]:
            found[f"blocks.{i}.layers.{j}.weight"] = tensor
        elif rest == ["weight"]:
            found[f"lm_heads.{i}.weight"] = tensor
    return found


def run(plugins: list[Any], prompts: Any = PROMPTS, **options: Any) -> tuple[list[list[int]], Any]:
    with llmopt.build(tiny_model(), plugins, self_test=False) as pipe:
        outputs = pipe.batch(prompts, progress=False, **{"max_new_tokens": 24, **options})
        for output in outputs:
            if output.error is not None:
                raise output.error
        stats = pipe.stats().get("propose.medusa", {})
        assert pipe.block_pool.num_used == 0
    return [output.token_ids for output in outputs], stats


def test_heads_are_counted_from_the_file_and_not_from_the_config(tmp_path: Path) -> None:
    found = read_heads(write_pt(tmp_path, original(5)), HIDDEN, VOCAB)
    assert len(found.heads) == 5
    assert found.heads[4].output is not None
    assert torch.equal(found.heads[4].blocks[0]["bias"], original(5)["4.0.linear.bias"])


def test_heads_of_several_blocks_are_read(tmp_path: Path) -> None:
    found = read_heads(write_pt(tmp_path, original(2, num_layers=3)), HIDDEN, VOCAB)
    assert [sorted(head.blocks) for head in found.heads] == [[0, 1, 2]] * 2


def layouts() -> dict[str, Any]:
    def shared_by_engines(folder: Path) -> Path:
        tensors = converted(has_outputs=False)
        return write_safetensors(folder, {**tensors, "original_lm_head.weight": original()["0.1.weight"]})

    def truncated_vocabulary(folder: Path) -> Path:
        tensors = converted()
        ids = torch.arange(0, VOCAB, 2)
        tensors = {k: v[ids] if k.startswith("lm_heads") else v for k, v in tensors.items()}
        return write_safetensors(folder, {**tensors, "token_map": ids})

    def whole_model(folder: Path) -> Path:
        heads = {f"medusa_head.{key}": tensor for key, tensor in original().items()}
        return write_safetensors(folder, {**heads, "model.norm.weight": torch.ones(HIDDEN)})

    return {
        "original": lambda folder: write_pt(folder, original()),
        "safetensors": lambda folder: write_safetensors(folder, original(), "medusa_lm_head.safetensors"),
        "shared": lambda folder: write_safetensors(folder, original(has_outputs=False), "medusa_lm_head.safetensors"),
        "converted": lambda folder: write_safetensors(folder, converted()),
        "converted_shared": shared_by_engines,
        "truncated": truncated_vocabulary,
        "whole": whole_model,
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_every_published_layout_loads_drafts_and_verifies(layout: str, tmp_path: Path) -> None:
    wanted, _ = run([])
    found, stats = run([Medusa(layouts()[layout](tmp_path), fixed=6)])
    assert found == wanted
    assert stats["num_heads"] == 3
    assert stats["drafted"] > 100


def damaged() -> dict[str, tuple[Any, str]]:
    def other_size(folder: Path) -> Path:
        return write_pt(folder, {k: v[:32] if k.endswith("bias") else v[:, :32] for k, v in original().items()})

    def other_vocabulary(folder: Path) -> Path:
        return write_pt(folder, {k: v[:500] if v.shape[0] == VOCAB else v for k, v in original().items()})

    def cut_off(folder: Path) -> Path:
        write_safetensors(folder, original(), "medusa_lm_head.safetensors")
        path = folder / "medusa_lm_head.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        return folder

    def cut_off_pt(folder: Path) -> Path:
        path = write_pt(folder, original()) / "medusa_lm_head.pt"
        path.write_bytes(path.read_bytes()[:-5000])
        return folder

    def head_missing(folder: Path) -> Path:
        return write_pt(folder, {k: v for k, v in original().items() if not k.startswith("1.")})

    def matrix_missing(folder: Path) -> Path:
        return write_pt(folder, {k: v for k, v in original().items() if k != "2.0.linear.weight"})

    def output_missing(folder: Path) -> Path:
        return write_pt(folder, {k: v for k, v in original().items() if k != "2.1.weight"})

    def no_number(folder: Path) -> Path:
        return write_pt(folder, {k: v / 0 if k == "0.0.linear.weight" else v for k, v in original().items()})

    return {
        "hidden size": (other_size, "hidden size of 64"),
        "vocabulary": (other_vocabulary, "vocabulary of 512"),
        "cut off": (cut_off, "cannot read"),
        "cut off pt": (cut_off_pt, "cannot read"),
        "unexpected": (
            lambda f: write_pt(f, {**original(), "fc.weight": torch.ones(2)}),
            "'fc.weight', which no layout",
        ),
        "head missing": (head_missing, "one is missing"),
        "matrix missing": (matrix_missing, "matrix None"),
        "output missing": (output_missing, "some heads have an output matrix"),
        "no number": (no_number, "no numbers"),
        "empty": (lambda folder: folder, "found no heads"),
        "token map": (lambda f: write_safetensors(f, {**converted(), "token_map": torch.tensor([600])}), "token_map"),
    }


@pytest.mark.parametrize("case", list(damaged()))
def test_what_does_not_fit_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, reason = damaged()[case]
    with pytest.raises(ModelError, match=reason):
        llmopt.build(tiny_model(), [Medusa(make(tmp_path))], self_test=False)


@pytest.mark.parametrize("company", [[], ["native"], ["native", "paged_kv", "prefix_cache", "chunked_prefill"]])
@pytest.mark.parametrize("fixed", [1, 8, 25])
def test_trees_of_any_size_give_the_tokens_of_the_target(fixed: int, company: list[str], tmp_path: Path) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    wanted, _ = run([], prompts)
    found, stats = run([*company, Medusa(write_pt(tmp_path, original()), num_draft=fixed, fixed=fixed)], prompts)
    assert found == wanted
    assert stats["drafted"] > stats["rounds"] or fixed == 1


def copying(folder: Path) -> Path:
    """A head that is always right about a model which repeats its last hidden state: see the test below."""
    return write_pt(folder, {f"{i}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(3)})


def test_heads_see_the_hidden_state_behind_the_newest_token(tmp_path: Path) -> None:
    """Heads without any change give the model's own logits again: they guess that the newest token is repeated."""
    model = tiny_model()
    with llmopt.build(model, [Medusa(copying(tmp_path), fixed=3, top_k=1)], self_test=False) as pipe:
        drafter: Any = pipe.registry.chains["propose"].objects[-1].drafter
        seen: list[tuple[int, int]] = []
        plain = drafter.draft

        def draft(requests: Any, limits: Any) -> Any:
            drafts = plain(requests, limits)
            for request, found in zip(requests, drafts, strict=True):
                seen.append((int(request.token_ids[request.num_tokens - 1]), found.token_ids[0]))
            return drafts

        drafter.draft = draft
        pipe.batch(PROMPTS, progress=False, max_new_tokens=24)
    assert len(seen) > 50
    assert all(newest == guess for newest, guess in seen)


@pytest.mark.parametrize("executor", [[], pytest.param(["native"], marks=pytest.mark.native)])
def test_trained_heads_give_more_tokens_per_round_and_the_tokens_of_generate(
    executor: list[str], tmp_path: Path
) -> None:
    model, prompts = tiny_model(), [prompt for prompt in PROMPTS if len(prompt) > 1]
    wanted = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False)
        wanted.append(ids[0, len(prompt) :].tolist())
    heads = write_trained(tmp_path, model, prompts, wanted)
    for fixed in (3, 8):
        found, stats = run([*executor, Medusa(heads, fixed=fixed)], prompts, max_new_tokens=32, ignore_eos=True)
        assert found == wanted
        assert stats["tokens_per_round"] > 3.5  # of 4; the state of another token gives 2.5


def test_a_sampled_request_gets_the_tokens_of_the_plain_run(tmp_path: Path) -> None:
    options = {"temperature": 1.0, "seed": 9}
    wanted, _ = run([], **options)
    found, _ = run([Medusa(write_pt(tmp_path, original()), fixed=8)], **options)
    assert found == wanted


def test_trees_hold_the_likeliest_paths_parents_first() -> None:
    draft = best_tree([[0.6, 0.25], [0.5, 0.2]], [[10, 11], [20, 21]], 5)
    assert draft.token_ids == [10, 20, 11, 20, 21]  # 0.6, 0.3, 0.25, 0.125, 0.12
    assert draft.parents == [-1, 0, -1, 2, 0]
    assert len(best_tree([[0.6, 0.3], [0.5, 0.2]], [[10, 11], [20, 21]], 50).token_ids) == 6


def test_only_with_lossy_may_sampled_output_change(tmp_path: Path) -> None:
    folder = write_pt(tmp_path, original())
    assert Medusa(folder).info.promise == "exact"
    plugin = Medusa(folder, fixed=8, lossy=True, epsilon=1e-6, delta=1e-6)  # nearly everything is likely enough
    assert plugin.info.promise == "lossy"
    assert plugin.info.loss
    greedy, _ = run([])
    assert run([plugin])[0] == greedy
    options = {"temperature": 1.0, "seed": 9, "ignore_eos": True}
    wanted, _ = run([], **options)
    found, stats = run([Medusa(folder, fixed=8, lossy=True, epsilon=1e-6, delta=1e-6)], **options)
    assert found != wanted
    assert stats["accepted"] > stats["rounds"]
    never, _ = run([Medusa(folder, fixed=8, lossy=True, epsilon=0.999, delta=1.0)], **options)
    assert len(never) == len(wanted)


def test_without_heads_it_says_what_is_missing() -> None:
    with pytest.raises(PluginUnavailableError, match="medusa:heads=FOLDER"):
        llmopt.build(tiny_model(), ["medusa"], self_test=False)


@pytest.mark.parametrize("options", [{"num_draft": 0}, {"fixed": 65}, {"top_k": 0}, {"lossy": 1}, {"epsilon": 2.0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="found"):
        Medusa("folder", **options)
