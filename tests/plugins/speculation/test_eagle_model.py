"""The EAGLE-3 head in torch: names, shapes, and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from llmopt_plugins.speculation.eagle.model import Eagle3Config, Eagle3Head


def small_config(**changes: object) -> Eagle3Config:
    values = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "num_taps": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 100,
        "draft_vocab_size": 20,
    }
    return Eagle3Config(**(values | changes))  # type: ignore[arg-type]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_the_state_dict_has_the_names_and_shapes_of_published_heads() -> None:
    shapes = {name: tuple(value.shape) for name, value in Eagle3Head(small_config()).state_dict().items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
        "d2t": (20,),
        "t2d": (100,),
    }


def test_without_the_embedding_half_the_layer_is_a_decoder_layer_of_llama() -> None:
    torch.manual_seed(0)
    config = small_config()
    head = Eagle3Head(config)
    llama_config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(llama_config, 0)
    weights = head.midlayer.state_dict()
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"self_attn.{name}.weight"][:, :32] = 0
        weights[f"self_attn.{name}.weight"][:, 32:] = layer.state_dict()[f"self_attn.{name}.weight"]
    for name, value in layer.state_dict().items():
        if name.startswith(("mlp.", "self_attn.o_proj", "post_attention")):
            weights[name].copy_(value)
    weights["hidden_norm.weight"].copy_(layer.input_layernorm.weight)

    hidden, embeddings = torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    positions = torch.arange(3, 10).expand(2, 7)
    got = head(embeddings, hidden, positions, causal)
    expected = layer(hidden, position_embeddings=head.rotary_emb(hidden, positions))
    torch.testing.assert_close(got, expected)


def test_taps_may_be_stacked_or_side_by_side() -> None:
    head = Eagle3Head(small_config(fc_norm=True, norm_before_fc=True))
    taps = torch.randn(5, 3, 32)
    torch.testing.assert_close(head.fuse(taps), head.fuse(taps.flatten(-2)))


def test_draft_ids_become_ids_of_the_target() -> None:
    head = Eagle3Head(small_config())
    chosen = torch.arange(20) * 3 + 7
    head.set_vocabulary(chosen)
    assert torch.equal(head.target_ids(torch.arange(20)), chosen)
    assert head.t2d.nonzero().flatten().tolist() == chosen.tolist()


@pytest.mark.parametrize("feeds_normed", [False, True])
def test_the_state_handed_on_is_the_one_the_config_names(feeds_normed: bool) -> None:
    head = Eagle3Head(small_config(feeds_normed=feeds_normed))
    torch.nn.init.constant_(head.norm.weight, 2.0)
    output = torch.randn(4, 32)
    torch.testing.assert_close(head.feedback(output), head.norm(output) if feeds_normed else output)
