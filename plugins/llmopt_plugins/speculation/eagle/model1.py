"""The EAGLE-1 and EAGLE-2 draft head as a torch module; the two differ in how drafts are searched, not in weights.

    embedding of token t+1, hidden state f_t of the target behind its final norm
      --fc--> x --one decoder layer without a norm in front--> f_(t+1) --lm_head--> logits of token t+2

Deeper levels get the head's own f in place of the target's. The output matrix is the target's. Source: Y. Li et al.,
"EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024, and "EAGLE-2: Faster Inference of Language
Models with Dynamic Draft Trees", 2024.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmopt_plugins.speculation.eagle.model import Attend, Eagle3Config, Eagle3Mlp, rotate


class Eagle1Head(nn.Module):
    """The head, with the methods of `Eagle3Head`. Its config has one tap, of the head's own size.

    :param token_norm: a norm on embeddings before ``fc`` (HASS, speculators).
    :param feature_norm: a norm on hidden states before ``fc`` (HASS).
    :param input_norm: a norm in front of the layer's attention.
    :param output_norm: a norm in front of the output matrix (speculators).
    """

    d2t: Tensor  # [draft_vocab_size] int64: target id - draft id

    def __init__(
        self,
        config: Eagle3Config,
        *,
        own_embedding: bool = False,
        token_norm: bool = False,
        feature_norm: bool = False,
        input_norm: bool = False,
        output_norm: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.token_norm = nn.RMSNorm(size, eps) if token_norm else None
        self.feature_norm = nn.RMSNorm(size, eps) if feature_norm else None
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.midlayer = Eagle1Layer(config, input_norm)
        self.norm = nn.RMSNorm(size, eps) if output_norm else None
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary_emb = LlamaRotaryEmbedding(config.rope_config())

    def fuse(self, taps: Tensor) -> Tensor:
        """The feature as it is: ``[..., 1, hidden_size]`` or ``[..., hidden_size]`` -> ``[..., hidden_size]``."""
        return taps if taps.shape[-1] == self.config.hidden_size and taps.dim() < 3 else taps.flatten(-2)

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One level; see `Eagle3Head.forward`."""
        if self.token_norm is not None:
            embeddings = self.token_norm(embeddings)
        if self.feature_norm is not None:
            hidden = self.feature_norm(hidden)
        x = self.fc(torch.cat([embeddings, hidden], dim=-1))
        cos, sin = self.rotary_emb(x, positions)
        return cast(Tensor, self.midlayer(x, cos, sin, attend))

    def logits(self, output: Tensor) -> Tensor:
        """``[..., hidden_size]`` from `forward` -> ``[..., draft_vocab_size]``."""
        return cast(Tensor, self.lm_head(output if self.norm is None else self.norm(output)))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next level gets as its hidden state."""
        return output


class Eagle1Layer(nn.Module):
    """A Llama layer, usually without the norm in front of its attention."""

    def __init__(self, config: Eagle3Config, input_norm: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Eagle1Attention(config)
        self.mlp = Eagle3Mlp(config)
        self.input_layernorm = nn.RMSNorm(size, eps) if input_norm else None
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """:param cos: ``[B, L, head_dim]``, as ``sin``."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, cos, sin, attend)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Eagle1Attention(nn.Module):
    """Projections and rotation."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self._head_dim = config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, size, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return cast(Tensor, self.o_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2)))
