"""A decoder-only transformer as data: the fields of csrc/include/llmopt/decoder_spec.h, with names for weights.

`read_decoder` in `decoder_spec` fills it from a Hugging Face model; `native_spec` turns it into the extension's object
once the weights are packed. Names of matrices and vectors are keys of ``matrices`` and ``vectors``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from llmopt_plugins.kernel.native.packing import MatrixPlan, PackedWeights, VectorPlan, extension

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NormKind = Literal["none", "rms", "layer"]
Activation = Literal["none", "silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@dataclass(slots=True)
class NormPlan:
    """A norm, or none."""

    kind: NormKind = "none"
    weight: str | None = None  # vector, or None for ones
    bias: str | None = None  # vector, or None
    epsilon: float = 0.0


@dataclass(slots=True)
class LinearPlan:
    """A matrix and its bias."""

    matrix: str
    bias: str | None = None


@dataclass(slots=True)
class AttentionPlan:
    """Attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearPlan  # queries of all heads, keys, values
    output: LinearPlan
    scale: float
    q_norm: NormPlan = field(default_factory=NormPlan)
    k_norm: NormPlan = field(default_factory=NormPlan)
    norm_spans_heads: bool = False  # one norm over all heads instead of one per head
    rope: int = -1  # place in `DecoderPlan.ropes`; -1: no rotation
    softcap: float = 0.0  # 0: none
    sliding_window: int = 0  # keys that a query sees, its own included; 0: all


@dataclass(slots=True)
class MlpPlan:
    """An MLP, or an expert."""

    up: LinearPlan  # gated: gate and up in turns of 16 rows
    down: LinearPlan
    activation: Activation
    is_gated: bool


@dataclass(slots=True)
class MoePlan:
    """Experts, and the choice among them: softmax over all, then the best."""

    router: LinearPlan
    num_top: int
    norm_top: bool  # whether the weights of the chosen ones are made to sum to one
    experts: list[MlpPlan]


@dataclass(slots=True)
class LayerPlan:
    """One layer: ``x += norm_after(f(norm_before(x))) * residual_scale`` for attention and then the MLP."""

    attention: AttentionPlan
    mlp: MlpPlan | MoePlan
    before_attention: NormPlan
    after_attention: NormPlan
    before_mlp: NormPlan
    after_mlp: NormPlan


@dataclass(slots=True)
class FrontPlan:
    """What a decoder that drafts has in front of its layers: ``DraftFront`` in csrc/include/llmopt/decoder_spec.h."""

    kind: Literal["join", "split"]
    fc: LinearPlan
    token_norm: NormPlan
    feature_norm: NormPlan
    part_norms: list[NormPlan]
    norm_residual: bool
    shows_normed: bool


@dataclass(slots=True)
class RopePlan:
    """Rotary embedding of some layers."""

    inv_freq: Tensor  # [rotary_dim / 2] float32
    scaling: float  # factor on cos and sin

    def equals(self, other: RopePlan) -> bool:
        """Whether both rotate alike, to the bit."""
        return self.scaling == other.scaling and torch.equal(self.inv_freq, other.inv_freq)

    def tables(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin ``[num_positions, rotary_dim / 2]`` float32, by the operations that transformers uses."""
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self.inv_freq
        return (angles.cos() * self.scaling).numpy(), (angles.sin() * self.scaling).numpy()


@dataclass(slots=True)
class DecoderPlan:
    """A whole model."""

    hidden_size: int
    vocab_size: int
    layers: list[LayerPlan]
    ropes: list[RopePlan]
    final_norm: NormPlan
    head: LinearPlan
    embedding: str  # matrix; the head's own when they are tied
    embedding_scale: float = 1.0
    position_embedding: str | None = None  # vector of num_positions * hidden_size values
    num_positions: int = 0  # of the position embedding
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    matrices: dict[str, MatrixPlan] = field(default_factory=dict)  # in the order in which a step reads them
    vectors: dict[str, VectorPlan] = field(default_factory=dict)
    front: FrontPlan | None = None  # of a decoder that drafts
    head_size: int = 0  # rows of the head when it does not have the whole vocabulary; 0: vocab_size

    @property
    def kinds(self) -> str:
        """What it is made of, in a few words."""
        experts = next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoePlan)), None)
        told = f"{len(self.layers)} layers"
        return told if experts is None else f"{told}, {experts.num_top} of {len(experts.experts)} experts"


def native_spec(
    plan: DecoderPlan,
    packed: PackedWeights,
    tables: Sequence[tuple[np.ndarray, np.ndarray]],
    hidden_layers: Sequence[int] = (),
    borrowed: Mapping[str, Any] | None = None,
) -> Any:
    """The extension's `DecoderSpec`. Packed weights and tables must outlive it.

    :param tables: cos and sin of each rotary embedding.
    :param hidden_layers: where steps show the residual stream, as in `BuildContext.hidden_layers`.
    :param borrowed: another decoder's packed matrices in place of the plan's own; their memory must outlive the spec,
        too.
    """
    core = extension()
    make = _Maker(core, packed, borrowed or {})
    spec = core.DecoderSpec()
    spec.hidden_size, spec.vocab_size = plan.hidden_size, plan.vocab_size
    spec.embedding = make.matrix(plan.embedding)
    spec.embedding_scale = plan.embedding_scale
    spec.position_embedding = packed.vector(plan.position_embedding)
    spec.num_positions = plan.num_positions
    spec.ropes = [
        core.RopeTable(
            cos=cos.ctypes.data, sin=sin.ctypes.data, num_positions=cos.shape[0], rotary_dim=2 * cos.shape[1]
        )
        for cos, sin in tables
    ]
    spec.layers = [make.layer(layer) for layer in plan.layers]
    spec.residual_scale = plan.residual_scale
    spec.final_norm = make.norm(plan.final_norm)
    spec.head = make.linear(plan.head)
    spec.logit_scale, spec.logit_softcap = plan.logit_scale, plan.logit_softcap
    spec.hidden_layers = list(hidden_layers)
    spec.head_size = plan.head_size
    if plan.front is not None:
        spec.draft = make.front(plan.front)
    return spec


class _Maker:
    """Makes the extension's objects."""

    def __init__(self, core: Any, packed: PackedWeights, borrowed: Mapping[str, Any]) -> None:
        self.core = core
        self.packed, self.borrowed = packed, borrowed

    def matrix(self, name: str) -> Any:
        return self.borrowed[name] if name in self.borrowed else self.packed.matrix(name)

    def norm(self, plan: NormPlan) -> Any:
        return self.core.NormSpec(
            kind=self.core.NormKind[plan.kind.upper()],
            weight=self.packed.vector(plan.weight),
            bias=self.packed.vector(plan.bias),
            epsilon=plan.epsilon,
        )

    def linear(self, plan: LinearPlan) -> Any:
        return self.core.LinearSpec(weight=self.matrix(plan.matrix), bias=self.packed.vector(plan.bias))

    def mlp(self, plan: MlpPlan) -> Any:
        spec = self.core.MlpSpec()
        spec.up, spec.down = self.linear(plan.up), self.linear(plan.down)
        spec.activation = self.core.Activation[plan.activation.upper()]
        spec.is_gated = plan.is_gated
        return spec

    def front(self, plan: FrontPlan) -> Any:
        spec = self.core.DraftFront()
        spec.kind = self.core.DraftFront.Kind[plan.kind.upper()]
        spec.fc = self.linear(plan.fc)
        spec.token_norm, spec.feature_norm = self.norm(plan.token_norm), self.norm(plan.feature_norm)
        spec.part_norms = [self.norm(norm) for norm in plan.part_norms]
        spec.norm_residual, spec.shows_normed = plan.norm_residual, plan.shows_normed
        return spec

    def layer(self, plan: LayerPlan) -> Any:
        spec = self.core.LayerSpec()
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(spec, name, self.norm(getattr(plan, name)))
        attention = self.core.AttentionSpec()
        for name in ("num_heads", "num_kv_heads", "head_dim", "norm_spans_heads"):
            setattr(attention, name, getattr(plan.attention, name))
        for name in ("rope", "scale", "softcap", "sliding_window"):
            setattr(attention, name, getattr(plan.attention, name))
        attention.qkv, attention.output = self.linear(plan.attention.qkv), self.linear(plan.attention.output)
        attention.q_norm, attention.k_norm = self.norm(plan.attention.q_norm), self.norm(plan.attention.k_norm)
        spec.attention = attention
        if isinstance(plan.mlp, MlpPlan):
            spec.mlp = self.mlp(plan.mlp)
            return spec
        moe = self.core.MoeSpec()
        moe.router = self.linear(plan.mlp.router)
        moe.kind = self.core.RouterKind.SOFTMAX_THEN_TOP
        moe.num_top, moe.norm_top = plan.mlp.num_top, plan.mlp.norm_top
        moe.experts = [self.mlp(expert) for expert in plan.mlp.experts]
        spec.moe = moe
        return spec
