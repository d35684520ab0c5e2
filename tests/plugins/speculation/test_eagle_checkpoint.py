"""Draft heads from files: every layout is read whole, and what does not fit is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmopt.testing import tiny_model
from llmopt_plugins.speculation.eagle.checkpoint import HeadError, Target, make_head, read_files

from .eagle_heads import DRAFT_VOCAB, LAYOUTS, write_head

TARGET = Target(hidden_size=64, vocab_size=512, num_tokens=259, num_layers=2, dtype=torch.float32)


def load(folder: Path, target: Target = TARGET, **options: Any) -> Any:
    model = tiny_model()
    files = read_files(folder, target, **options)
    return make_head(files, target, model.get_input_embeddings(), model.get_output_embeddings())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_with_all_its_tensors(layout: str, tmp_path: Path) -> None:
    head = load(write_head(tmp_path, layout))
    assert not any(p.is_meta for p in [*head.parameters(), *head.buffers()])
    assert all(p.dtype is torch.float32 for p in head.parameters())
    assert head.config.draft_vocab_size == (512 if layout.startswith("eagle1") else DRAFT_VOCAB)
    assert (head.embed_tokens is not None) == (layout == "eagle1")
    assert head.config.fc_norm == (layout == "eagle3_specforge")
    assert head.config.qk_norm == head.config.norm_before_residual == head.config.feeds_normed == (
        layout == "eagle3_speculators"
    )  # fmt: skip


def test_rotations_are_read_from_either_generation_of_names(tmp_path: Path) -> None:
    old = load(write_head(tmp_path / "old", "eagle3", config={"rope_theta": 777.0}))
    new = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    both = load(write_head(tmp_path / "new", "eagle3", config=new))
    assert torch.equal(old.rotary_emb.inv_freq, both.rotary_emb.inv_freq)
    scaled = {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    scaled_head = load(write_head(tmp_path / "scaled", "eagle3", config=scaled))
    assert torch.allclose(scaled_head.rotary_emb.inv_freq * 2.0, old.rotary_emb.inv_freq)


def test_an_output_matrix_that_is_left_out_has_the_rows_of_the_target(tmp_path: Path) -> None:
    head = load(write_head(tmp_path, "eagle3", changes={"lm_head.weight": None}))
    ids = head.target_ids(torch.arange(DRAFT_VOCAB))
    assert torch.equal(head.lm_head.weight, tiny_model().lm_head.weight[ids])
    assert torch.equal(load(write_head(tmp_path / "one", "eagle1")).lm_head.weight, tiny_model().lm_head.weight)


def test_an_embedding_of_its_own_may_lack_rows_that_only_pad(tmp_path: Path) -> None:
    own = torch.randn(500, 64)
    head = load(write_head(tmp_path, "eagle1", config={"vocab_size": 500}, changes={"embed_tokens.weight": own}))
    assert torch.equal(head.embed_tokens.weight[:500], own)
    assert head.embed_tokens.weight.shape == (512, 64)


def test_weights_are_cast_to_the_targets_dtype(tmp_path: Path) -> None:
    head = load(write_head(tmp_path, "eagle3"), replace(TARGET, dtype=torch.bfloat16))
    assert head.fc.weight.dtype is torch.bfloat16
    assert head.d2t.dtype is torch.int64
    assert head.rotary_emb.inv_freq.dtype is torch.float32


# -- taps -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "config", "expected"),
    [
        ("eagle1", {}, [(12,)]),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, [(2, 6, 9)]),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, [(2, 6, 10), (1, 5, 9)]),
        ("eagle3_speculators", {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, [(1, 5, 9), (2, 6, 10)]),
        ("eagle3_specforge", {}, [(0, 1, 2)]),  # of [-1, 0, 1] the other reading does not exist
    ],
)
def test_layers_are_read_in_both_ways_where_a_config_lists_them(
    layout: str, config: dict[str, Any], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    folder = write_head(tmp_path, layout, num_layers=12, config=config)
    files = read_files(folder, replace(TARGET, num_layers=12))
    assert files.readings == expected
    if files.version == 3:
        assert read_files(folder, replace(TARGET, num_layers=12), [3, 4, 5]).readings == [(3, 4, 5)]


# -- refusals -------------------------------------------------------------------------------------------------------
def changed(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(*shape)}


@pytest.mark.parametrize(
    ("layout", "config", "changes", "reason"),
    [
        ("eagle3", {"target_hidden_size": 128}, {}, "made for a target 128 wide, this one has a hidden size of 64"),
        ("eagle3", {}, changed("fc.weight", 64, 3 * 32), r"fc.weight of shape \[64, 96\]; 3 taps of the target's 64"),
        ("eagle1", {}, changed("fc.weight", 64, 64), r"embedding and feature need \[64, 128\]"),
        ("eagle3", {"hidden_size": 32}, {}, r"fc.weight of shape \[64, 192\]"),
        ("eagle3", {"vocab_size": 200}, {}, "vocabulary of 200 tokens, the target has 512 of which"),
        ("eagle3", {"draft_vocab_size": 100}, {}, "draft vocabulary of 100 tokens, and its lm_head"),
        ("eagle3", {}, {"d2t": None}, "drafts 200 of 512 tokens and has no d2t"),
        ("eagle3", {}, {"d2t": torch.arange(200) * 9}, "d2t that leads to token 1990, the target has 512"),
        ("eagle3", {}, {"d2t": -torch.arange(200)}, "one token twice"),
        ("eagle3", {}, {"d2t": torch.zeros(200, dtype=torch.int64)}, "d2t and t2d that do not name the same tokens"),
        ("eagle3", {}, {"t2d": torch.ones(100, dtype=torch.bool)}, r"t2d of shape \[100\]"),
        ("eagle3", {}, {"midlayer.mlp.up_proj.weight": None}, "lacks midlayer.mlp.up_proj.weight"),
        ("eagle3", {}, changed("midlayer.extra.weight", 3), "tensors that are not read: midlayer.extra.weight"),
        ("eagle3", {"head_dim": 32}, {}, r"q_proj.weight of shape \[64, 128\], its config.json needs \[128, 128\]"),
        ("eagle3", {"num_attention_heads": None}, {}, "without num_attention_heads"),
        ("eagle3", {}, changed("layers.1.mlp.up_proj.weight", 96, 64),
         "has 2 layers, and only heads of one layer are read"),
        ("eagle3_speculators", {}, changed("layers.3.mlp.up_proj.weight", 96, 64), "has 4 layers"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [5, 6, 7]}, {}, r"layers \[6, 7, 8\], and the target"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1]}, {}, "2 taps of the target's 64 values"),
        ("eagle3", {}, {"fc.weight": None}, "no fc.weight among"),
        ("eagle3", {}, {"midlayer.mlp.up_proj.weight": torch.full((96, 64), torch.nan)},
         "values that are no numbers in midlayer.mlp.up_proj.weight"),
        ("eagle3_speculators", {"speculators_model_type": "dflash"}, {}, "speculators type 'dflash'"),
        ("eagle3_speculators", {"speculators_model_type": "eagle"}, {}, "its tensors are those of EAGLE-3"),
        ("eagle1_speculators", {}, changed("transformer.mlp.up_proj.weight", 90, 64), r"of shape \[90, 64\]"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    layout: str, config: dict[str, Any], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadError, match=reason):
        load(write_head(tmp_path, layout, config=config, changes=changes))


def test_files_that_are_cut_short_or_missing_are_refused(tmp_path: Path) -> None:
    for layout, name in (("eagle3", "model.safetensors"), ("eagle1", "pytorch_model.bin")):
        folder = write_head(tmp_path / layout, layout)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(HeadError, match=f"file {name} that cannot be read, perhaps cut short"):
            load(folder)
        (folder / name).unlink()
        with pytest.raises(HeadError, match=r"neither model.safetensors nor pytorch_model.bin"):
            load(folder)
        (folder / "config.json").write_text("{")
        with pytest.raises(HeadError, match="config.json that is not JSON"):
            load(folder)
        (folder / "config.json").unlink()
        with pytest.raises(HeadError, match="no config.json"):
            load(folder)
