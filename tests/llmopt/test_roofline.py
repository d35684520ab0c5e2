"""Bytes and operations are those that one can count by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from llmopt.hf.capabilities import inspect_model
from llmopt.kv_cache import LayerShape
from llmopt.machine_limits import machine_limits
from llmopt.roofline import AttentionCost, ModelCost, StepCost, Tally, kind_of, model_cost
from llmopt.testing import tiny_model

COST = ModelCost(
    "float32",
    layer_bytes=1000,
    layer_ops=500,
    head_bytes=100,
    head_ops=50,
    embedding_row_bytes=4,
    attention=(AttentionCost(None, 8, 2), AttentionCost(3, 16, 4)),
)


def test_a_decode_reads_weights_once_and_each_requests_keys() -> None:
    step = COST.step([10, 3], [1, 1], 2)
    full = 8 * (10 + 3)
    windowed = 16 * (3 + 3)  # two keys before and the own one
    assert step.num_bytes == 1000 + 100 + 2 * 4 + full + windowed
    assert step.num_ops == 2 * 500 + 2 * 50 + 2 * (10 + 3) + 4 * (3 + 3)


def test_a_prefill_computes_every_pair_below_the_diagonal_and_inside_the_window() -> None:
    step = COST.step([5], [5], 1)
    assert step.num_ops == 5 * 500 + 50 + 2 * (1 + 2 + 3 + 4 + 5) + 4 * (1 + 2 + 3 + 3 + 3)
    assert step.num_bytes == 1000 + 100 + 5 * 4 + (8 + 16) * 5


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_chunks_add_up_to_the_whole_prompt(window: int | None) -> None:
    cost = ModelCost("float32", 0, 7, 0, 0, 0, (AttentionCost(window, 8, 2),))
    whole = cost.step([20], [20], 0)
    parts = [cost.step([end], [size], 0) for end, size in ((6, 6), (7, 1), (20, 13))]
    assert sum(part.num_ops for part in parts) == whole.num_ops
    assert sum(part.num_bytes for part in parts) >= whole.num_bytes  # earlier chunks are read again


@pytest.mark.parametrize("window", [None, 1, 3, 9, 50])
def test_pairs_equal_a_plain_count(window: int | None) -> None:
    cost = ModelCost("float32", 0, 0, 0, 0, 0, (AttentionCost(window, 0, 1),))
    rng = np.random.default_rng(0)
    for _ in range(20):
        end = int(rng.integers(1, 30))
        new = int(rng.integers(1, end + 1))
        pairs = sum(min(position, window or position) for position in range(end - new + 1, end + 1))
        assert cost.step([end], [new], 0).num_ops == pairs


def test_without_logits_the_head_is_neither_read_nor_computed() -> None:
    assert COST.step([5], [5], 0).num_bytes == COST.step([5], [5], 1).num_bytes - 100
    assert COST.step([5], [5], 0).num_ops == COST.step([5], [5], 1).num_ops - 50


def test_more_tokens_meet_more_experts_and_never_more_than_all() -> None:
    cost = ModelCost("float32", 0, 0, 0, 0, 0, expert_bytes=800, num_experts=8, num_experts_per_token=2, expert_ops=6)
    sizes = [cost.step([n], [n], 0).num_bytes for n in (1, 2, 8, 1000)]
    assert sizes[0] == pytest.approx(200)
    assert sizes[1] == pytest.approx(800 * (1 - 0.75**2))
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(800)


def test_mean_of_decode_steps_is_the_step_in_the_middle() -> None:
    cost = ModelCost("float32", 1000, 500, 100, 50, 4, (AttentionCost(None, 8, 2),))
    mean, middle = cost.decode(4, 11, 5), cost.step([13] * 4, [1] * 4, 4)
    assert mean.num_bytes == pytest.approx(middle.num_bytes)
    assert mean.num_ops == pytest.approx(middle.num_ops)


def test_packed_weights_shrink_every_part_and_leave_keys_alone() -> None:
    packed = COST.with_weight_bytes(COST.weight_bytes / 4, "int8")
    assert (packed.layer_bytes, packed.head_bytes, packed.dtype) == (250, 25, "int8")
    assert packed.attention == COST.attention
    assert packed.layer_ops == COST.layer_ops


def cost_of(model: Any) -> ModelCost:
    config = model.config.get_text_config()
    size = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    shape = LayerShape(heads, size, heads, size, torch.float32, torch.device("cpu"))
    shapes = dict.fromkeys(range(config.num_hidden_layers), shape)
    return model_cost(model, shapes, inspect_model(model).layer_types)


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_cost_is_that_of_its_parameters(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    cost = cost_of(model)
    table = model.get_input_embeddings().weight
    every = {id(p): p.numel() * 4 for p in model.parameters()}
    assert cost.weight_bytes == sum(every.values()) - (0 if tied else table.numel() * 4)
    assert cost.head_bytes == table.numel() * 4
    assert cost.embedding_row_bytes == table.shape[1] * 4
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n)
    assert cost.layer_ops == 2 * matrices
    (attention,) = cost.attention
    config = model.config
    assert attention.ops_per_pair == 2 * config.num_hidden_layers * config.num_attention_heads * 2 * config.head_dim
    assert attention.bytes_per_token == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_tables_of_positions_are_looked_up_and_not_multiplied() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    cost = model_cost(model, {})
    tables = 64 * 32 + 32 * 32
    assert cost.layer_bytes == 4 * (sum(p.numel() for p in model.parameters()) - tables)
    assert cost.head_bytes == 4 * 64 * 32


def test_experts_count_as_often_as_they_are_chosen() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    cost = cost_of_mixtral = model_cost(MixtralForCausalLM(config), {})
    assert cost.num_experts == 4
    assert cost_of_mixtral.expert_bytes == 4 * 4 * 3 * 32 * 48
    assert cost.expert_ops == 2 * 2 * 3 * 32 * 48


def test_sliding_layers_have_the_window_of_the_config() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8,
    )  # fmt: skip
    windows = {layer.window: layer.bytes_per_token for layer in cost_of(Gemma2ForCausalLM(config)).attention}
    assert windows == {8: 2 * 2 * 16 * 4, None: 2 * 2 * 16 * 4}


class Rows:
    def __init__(self, num_scheduled: list[int], num_drafts: list[int]) -> None:
        self.num_scheduled, self.num_drafts = np.array(num_scheduled), np.array(num_drafts)


@pytest.mark.parametrize(
    ("scheduled", "drafts", "kind"),
    [([1, 1], [0, 0], "decode"), ([1, 5], [0, 4], "decode"), ([1, 5], [0, 0], "prefill"), ([7], [0], "prefill")],
)
def test_a_step_with_one_token_beside_the_drafts_in_every_row_is_a_decode(
    scheduled: list[int], drafts: list[int], kind: str
) -> None:
    assert kind_of(Rows(scheduled, drafts)) == kind  # type: ignore[arg-type]


def test_a_tally_keeps_prefill_and_decode_apart_and_divides_rightly() -> None:
    limits = machine_limits()
    tally = Tally(COST, limits)
    assert tally.report() == {}
    step = StepCost(2e9, 1e6)
    tally.add("decode", step, 1, 0.25)
    tally.add("decode", step, 1, 0.15)
    report = tally.report()
    assert set(report) == {"decode"}
    decode = report["decode"]
    assert decode["num_steps"] == decode["num_tokens"] == 2
    assert decode["ms_per_step"] == pytest.approx(200)
    assert decode["gb_per_s"] == pytest.approx(10)
    limit = limits.seconds(2e9, 1e6, "float32")
    assert decode["limit_ms_per_step"] == pytest.approx(1e3 * limit)
    assert decode["fraction_of_limit"] == pytest.approx(2 * limit / 0.4)
    assert all(math.isfinite(value) for value in decode.values())
    (line,) = tally.lines()
    assert line.startswith("decode: 2 steps of 200.00 ms, 10.0 GB/s")
