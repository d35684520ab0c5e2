"""The EAGLE-3 draft head as a torch module; its parameters have the names of the published checkpoints.

    taps of token t  [3 * h_t] --fc--> g_t [h]                      (first level)
                                       a_t [h]                      (deeper levels: the head's own output)
    embedding of token t+1 ----------> e   [h]
                  g or a, e --midlayer--> a --norm--> lm_head --> logits of token t+2 over the draft vocabulary

Draft token ``i`` is token ``i + d2t[i]`` of the target. Source: Y. Li et al., "EAGLE-3: Scaling up Inference
Acceleration of Large Language Models via Training-Time Test", 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [..., L, heads, d], k [..., L, kv_heads, d], v the same) -> [..., L, heads, d]``; q and k are rotated already.
Who calls the head decides what a token sees, and where older keys and values lie."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shapes and switches of a head, as its ``config.json`` says them."""

    hidden_size: int
    target_hidden_size: int  # width of one tap
    num_taps: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on the heads of q and k, as Qwen3 has
    fc_bias: bool = False
    fc_norm: bool = False  # one RMSNorm per tap before fc
    norm_before_fc: bool = False  # one RMSNorm on all taps together before fc
    norm_before_residual: bool = False  # the residual is hidden_norm(g) instead of g
    feeds_normed: bool = False  # deeper levels get norm(a) instead of a

    @property
    def tap_size(self) -> int:
        """Width of the taps of one token, side by side."""
        return self.num_taps * self.target_hidden_size

    def rope_config(self) -> LlamaConfig:
        """What transformers' rotary embedding reads."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )


class Eagle3Head(nn.Module):
    """The head. ``state_dict`` has the keys of official checkpoints; ``embed_tokens`` only when the head has its own.

    :param own_embedding: the checkpoint brings its embedding; otherwise callers look tokens up in the target's.
    """

    d2t: Tensor  # [draft_vocab_size] int64: target id - draft id
    t2d: Tensor  # [vocab_size] bool: the target's ids that the head can say

    def __init__(self, config: Eagle3Config, *, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.fc = nn.Linear(config.tap_size, size, bias=config.fc_bias)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_taps))
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.tap_size, eps)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        known = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("t2d", known)
        # computed in float32 whatever the weights' dtype; not a part of checkpoints
        self.rotary_emb = LlamaRotaryEmbedding(config.rope_config())

    def fuse(self, taps: Tensor) -> Tensor:
        """What the first level gets instead of a feature of its own.

        :param taps: ``[..., num_taps, target_hidden_size]``, or the last two flattened.
        :returns: ``[..., hidden_size]``
        """
        if taps.shape[-1] != self.config.tap_size:
            taps = taps.flatten(-2)
        if self.config.fc_norm:
            parts = taps.unflatten(-1, (self.config.num_taps, -1)).unbind(-2)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return cast(Tensor, self.fc(taps))

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One level.

        :param embeddings: ``[B, L, hidden_size]``, of each feature's next token.
        :param hidden: ``[B, L, hidden_size]``: from `fuse` at the first level, the last level's result (`feedback`)
            deeper.
        :param positions: ``[B, L]`` int64; those of the features: 0 for a sequence's first.
        :returns: ``[B, L, hidden_size]`` before the norm; see `logits` and `feedback`.
        """
        cos, sin = self.rotary_emb(hidden, positions)
        return cast(Tensor, self.midlayer(embeddings, hidden, cos, sin, attend))

    def logits(self, output: Tensor) -> Tensor:
        """``[..., hidden_size]`` from `forward` -> ``[..., draft_vocab_size]``."""
        return cast(Tensor, self.lm_head(self.norm(output)))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next level gets as its hidden state."""
        return cast(Tensor, self.norm(output)) if self.config.feeds_normed else output

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary -> ids of the target."""
        return draft_ids + self.d2t[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Make draft id ``i`` stand for ``target_ids[i]``: ``[draft_vocab_size]`` int64, ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True


class Eagle3Layer(nn.Module):
    """A decoder layer whose q, k and v read the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self._residual_is_normed = config.norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = Eagle3Mlp(config)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """:param cos: ``[B, L, head_dim]``, as ``sin``, from transformers' rotary embedding."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._residual_is_normed else hidden
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = residual + self.self_attn(both, cos, sin, attend)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3Attention(nn.Module):
    """Projections and rotation; `Attend` does the rest."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self._head_dim = config.head_dim
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, size, bias=bias)
        self._qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, both: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(both).unflatten(-1, (-1, self._head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return cast(Tensor, self.o_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2)))


class Eagle3Mlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, wide, bias=bias)
        self.up_proj = nn.Linear(size, wide, bias=bias)
        self.down_proj = nn.Linear(wide, size, bias=bias)
        self._act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self._act(self.gate_proj(hidden)) * self.up_proj(hidden)))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of ``[..., heads, head_dim]``; cos and sin broadcast over the heads."""
    first, second = states.chunk(2, dim=-1)
    return (states * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)
