"""Reading a Hugging Face model: is every part of it known, and what is the decoder that does the same?

Only modules whose classes are known exactly are read, so a model that somebody changed (adapters, quantized layers,
hooks) is refused with the name of the module, and never computed as something else.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from llmopt.kv_cache import LayerShape
from llmopt_plugins.kernel.native.decoder_plan import (
    Activation,
    AttentionPlan,
    DecoderPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    MoePlan,
    NormPlan,
    RopePlan,
)
from llmopt_plugins.kernel.native.families import FAMILIES, Family
from llmopt_plugins.kernel.native.late_weights import has_foreign_hooks
from llmopt_plugins.kernel.native.packing import MatrixPlan, Role, Rows, VectorPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS: set[type] = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.Dropout, nn.Identity, Conv1D}
_DTYPES = (torch.float32, torch.bfloat16)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_CHANGING_ROPES = ("dynamic", "longrope")  # constant up to the original length, where the engine stops

_ACTIVATION_NAMES: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu_squared",
}
_ACTIVATIONS: dict[type, Activation] = {nn.SiLU: "silu", nn.GELU: "gelu", nn.ReLU: "relu"}
_ACTIVATIONS |= {getattr(activations, n): kind for n, kind in _ACTIVATION_NAMES.items() if hasattr(activations, n)}


class NotNativeError(Exception):
    """The native decoder cannot run a model. The message is a reason that can follow "the model"."""


def why_not_native(model: PreTrainedModel) -> str | None:
    """The reason why the native decoder cannot run a model, or None."""
    try:
        read_decoder(model)
    except NotNativeError as error:
        return str(error)
    return None


def stored_shapes(model: PreTrainedModel) -> dict[int, LayerShape] | None:
    """What each layer of a model stores for a token; None for a model that is not read here."""
    try:
        layers = read_decoder(model).layers
    except NotNativeError:
        return None
    attention = [layer.attention for layer in layers]
    return {
        i: LayerShape(a.num_kv_heads, a.head_dim, a.num_kv_heads, a.head_dim, model.dtype, torch.device("cpu"))
        for i, a in enumerate(attention)
    }


def read_decoder(model: PreTrainedModel) -> DecoderPlan:
    """The decoder that computes what a model computes. Weights may be on the meta device: only names and sizes count.

    :raises NotNativeError: the model, or a part of it, is none that the native decoder knows; says which.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or type(model).__module__ != family.module:
        known = ", ".join(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in FAMILIES)
        raise NotNativeError(f"is a {type(model).__name__}, which is none of the known families ({known})")
    check_modules(model, family)
    try:
        return _Reader(model, family).read()
    except AttributeError as error:  # a part was exchanged for one of another kind
        raise NotNativeError(f"is not put together as a {family.cls} is: {error}") from error


def check_modules(model: PreTrainedModel, family: Family) -> None:
    """Refuse modules of unknown classes, changed forwards, hooks, and weights elsewhere than in plain memory."""
    for name, module in model.named_modules():
        cls, where = type(module), f"has {name or 'a module'}"
        is_known = cls in _PARTS or cls in _ACTIVATIONS or cls.__module__ == family.module
        if not is_known:
            raise NotNativeError(f"{where} of class {cls.__module__}.{cls.__name__}, which is not a plain one")
        if has_foreign_hooks(module):
            raise NotNativeError(f"{where} with forward hooks, which the native decoder would not call")
        if "forward" in vars(module):
            raise NotNativeError(f"{where} whose forward was replaced")
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta"):
            raise NotNativeError(f"has {name} on {parameter.device}; the native decoder runs on the CPU")
        if parameter.dtype not in _DTYPES or type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__ if parameter.dtype in _DTYPES else str(parameter.dtype).split(".")[-1]
            raise NotNativeError(f"has {name} as {kind}; load it with dtype=bfloat16 or float32")


class _Reader:
    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self.model, self.family = model, family
        self.config: Any = model.config
        self.base: Any = getattr(model, family.base)
        self.matrices: dict[str, MatrixPlan] = {}
        self.vectors: dict[str, VectorPlan] = {}
        self.rope_of: dict[str | None, int] = {}  # layer type -> place in the list

    def read(self) -> DecoderPlan:
        family, config, base, model = self.family, self.config, self.base, self.model
        self._check_config()
        embedding, head = getattr(base, family.embedding), model.get_output_embeddings()
        if head is None or type(head) is not nn.Linear:
            raise NotNativeError(f"has an output head of class {type(head).__name__}")
        if head.weight.shape != embedding.weight.shape:
            raise NotNativeError(
                f"has {head.weight.shape[0]} outputs and {embedding.weight.shape[0]} embeddings, which must be as many"
            )
        is_tied = head.weight is embedding.weight
        if not is_tied:
            self._matrix("embedding", [(f"{family.base}.{family.embedding}", embedding)], role="embedding")
        ropes = self._ropes()
        count = min(config.num_hidden_layers, len(getattr(base, family.layers)))  # the forward runs no more than both
        layers = [self._layer(i) for i in range(count)]
        final_norm = self._norm("final_norm", f"{family.base}.{family.final_norm}", getattr(base, family.final_norm))
        plan = DecoderPlan(
            hidden_size=embedding.weight.shape[1],
            vocab_size=embedding.weight.shape[0],
            layers=layers,
            ropes=ropes,
            final_norm=final_norm,
            head=self._linear("head", [("lm_head", head)], role="head"),
            embedding="head" if is_tied else "embedding",
            embedding_scale=self._embedding_scale(embedding),
            residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
            logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            matrices=self.matrices,
            vectors=self.vectors,
        )
        if family.position_embedding is not None:
            table = getattr(base, family.position_embedding).weight
            name = f"{family.base}.{family.position_embedding}.weight"
            self.vectors["position_embedding"] = VectorPlan(((name, table.numel()),))
            plan.position_embedding, plan.num_positions = "position_embedding", table.shape[0]
        return plan

    def _check_config(self) -> None:
        config = self.config
        for name in ("clip_qkv", "use_bidirectional_attention", "add_cross_attention"):
            if getattr(config, name, None):
                raise NotNativeError(f"has {name}={getattr(config, name)!r}, which the native decoder does not have")
        if self.family.window == "none" and getattr(config, "sliding_window", None):
            raise NotNativeError(
                f"has sliding_window={config.sliding_window!r}, which {self.family.cls} does not apply"
            )

    def _embedding_scale(self, embedding: Any) -> float:
        scale = getattr(embedding, "scalar_embed_scale", None)
        if scale is not None:  # Gemma rounds it to the dtype of the weights
            return float(torch.tensor(scale, dtype=torch.float32).to(embedding.weight.dtype))
        return float(getattr(self.config, "embedding_multiplier", 1.0))

    # -- layers -------------------------------------------------------------------------------------------------------
    def _layer(self, index: int) -> LayerPlan:
        family = self.family
        layer = getattr(self.base, family.layers)[index]
        prefix, name = f"{family.base}.{family.layers}.{index}", f"layers.{index}"
        norms = [
            NormPlan() if attr is None else self._norm(f"{name}.{role}", f"{prefix}.{attr}", getattr(layer, attr))
            for role, attr in zip(
                ("before_attention", "after_attention", "before_mlp", "after_mlp"), family.norms, strict=True
            )
        ]
        attention = self._attention(index, name, f"{prefix}.{family.attention}", getattr(layer, family.attention))
        mlp: Any = getattr(layer, family.mlp)
        mlp_prefix = f"{prefix}.{family.mlp}"
        is_moe = hasattr(mlp, "experts")
        return LayerPlan(
            attention, self._moe(name, mlp_prefix, mlp) if is_moe else self._mlp(name, mlp_prefix, mlp), *norms
        )

    def _layer_type(self, index: int) -> str | None:
        types = getattr(self.config, "layer_types", None)
        return types[index] if types and self.family.ropes == "layer_types" else None

    def _attention(self, index: int, name: str, prefix: str, module: Any) -> AttentionPlan:
        family, config = self.family, self.config
        if module.layer_idx != index:
            raise NotNativeError(
                f"has the layer that was number {module.layer_idx} in place {index}, and its keys there"
            )
        num_heads = config.num_attention_heads
        window = {"none": None, "config": getattr(config, "sliding_window", None)}.get(
            family.window, getattr(module, "sliding_window", None)
        )
        uses_rope = bool(getattr(module, "use_rope", True))
        q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        qkv = self._linear(f"{name}.qkv", [(f"{prefix}.{p}", getattr(module, p)) for p in family.qkv])
        return AttentionPlan(
            num_heads=num_heads,
            num_kv_heads=(self.matrices[f"{name}.qkv"].num_outputs // module.head_dim - num_heads) // 2,
            head_dim=module.head_dim,
            qkv=qkv,
            output=self._linear(f"{name}.output", [(f"{prefix}.{family.output}", getattr(module, family.output))]),
            scale=float(module.scaling),
            q_norm=NormPlan() if q_norm is None else self._norm(f"{name}.q_norm", f"{prefix}.q_norm", q_norm),
            k_norm=NormPlan() if k_norm is None else self._norm(f"{name}.k_norm", f"{prefix}.k_norm", k_norm),
            norm_spans_heads=family.norm_spans_heads,
            rope=self.rope_of[self._layer_type(index)] if uses_rope and family.ropes != "none" else -1,
            softcap=float((getattr(module, "attn_logit_softcapping", None) if family.has_softcap else None) or 0.0),
            sliding_window=int(window or 0),
        )

    def _mlp(self, name: str, prefix: str, module: Any) -> MlpPlan:
        family = self.family
        ups = [(f"{prefix}.{p}", getattr(module, p)) for p in family.up]
        up = self._linear(f"{name}.up", ups, is_gated=family.is_gated)
        inner = self.matrices[f"{name}.up"].num_outputs // (2 if family.is_gated else 1)
        down = self._linear(f"{name}.down", [(f"{prefix}.{family.down}", getattr(module, family.down))], inner)
        return MlpPlan(up, down, self._activation(prefix, getattr(module, family.activation)), family.is_gated)

    def _moe(self, name: str, prefix: str, module: Any) -> MoePlan:
        router, experts = module.gate, module.experts
        self.matrices[f"{name}.router"] = MatrixPlan(
            router.weight.shape[1], (Rows(f"{prefix}.gate.weight", 0, router.weight.shape[0]),), role="router"
        )
        activation = self._activation(prefix, experts.act_fn)
        num_experts, inner, hidden = experts.down_proj.shape[0], experts.down_proj.shape[2], experts.down_proj.shape[1]
        plans = []
        for e in range(num_experts):
            both = f"{prefix}.experts.gate_up_proj"
            up = MatrixPlan(hidden, (Rows(both, 0, inner, e), Rows(both, inner, 2 * inner, e)), is_gated=True)
            down = MatrixPlan(up.num_outputs // 2, (Rows(f"{prefix}.experts.down_proj", 0, hidden, e),))
            names = f"{name}.experts.{e}.up", f"{name}.experts.{e}.down"
            self.matrices[names[0]], self.matrices[names[1]] = up, down
            plans.append(MlpPlan(LinearPlan(names[0]), LinearPlan(names[1]), activation, is_gated=True))
        norm_top = self.family.norm_top == "always" or bool(getattr(router, "norm_topk_prob", False))
        return MoePlan(LinearPlan(f"{name}.router"), int(router.top_k), norm_top, plans)

    def _activation(self, prefix: str, module: Any) -> Activation:
        kind = _ACTIVATIONS.get(type(module))
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            kind = "gelu_tanh"
        if kind is None:
            raise NotNativeError(f"has the activation {type(module).__name__} in {prefix}")
        return kind

    # -- parts --------------------------------------------------------------------------------------------------------
    def _linear(
        self,
        name: str,
        modules: list[tuple[str, Any]],
        num_inputs: int | None = None,
        *,
        role: Role = "linear",
        is_gated: bool = False,
    ) -> LinearPlan:
        """One matrix from the rows of some modules, and the biases that belong to it."""
        rows = self._matrix(name, modules, num_inputs, role=role, is_gated=is_gated)
        biases = [module.bias for _, module in modules]
        if all(bias is None for bias in biases):
            return LinearPlan(name)
        parts: list[tuple[str | None, int]] = [
            (
                None if bias is None else f"{prefix}.bias",
                sum(part.count for part in rows if part.name == f"{prefix}.weight"),
            )
            for (prefix, _), bias in zip(modules, biases, strict=True)
        ]
        if is_gated and len(parts) == 1:
            raise NotNativeError(f"has a bias in the fused projection {modules[0][0]}")
        self.vectors[f"{name}.bias"] = VectorPlan(tuple(parts), is_gated=is_gated)
        return LinearPlan(name, f"{name}.bias")

    def _matrix(
        self,
        name: str,
        modules: list[tuple[str, Any]],
        num_inputs: int | None = None,
        *,
        role: Role = "linear",
        is_gated: bool = False,
    ) -> tuple[Rows, ...]:
        parts: list[Rows] = []
        inputs = 0
        for prefix, module in modules:
            is_transposed = isinstance(module, Conv1D)
            shape = module.weight.shape
            outputs, inputs = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
            bounds = [(0, outputs // 2), (outputs // 2, outputs)] if is_gated and len(modules) == 1 else [(0, outputs)]
            parts += [Rows(f"{prefix}.weight", begin, end, None, is_transposed) for begin, end in bounds]
        self.matrices[name] = MatrixPlan(num_inputs or inputs, tuple(parts), role, is_gated)
        return tuple(parts)

    def _norm(self, name: str, prefix: str, module: Any) -> NormPlan:
        is_layer = isinstance(module, nn.LayerNorm)
        if not is_layer and not type(module).__name__.endswith("RMSNorm"):
            raise NotNativeError(f"has the norm {type(module).__name__} in {prefix}")
        plan = NormPlan("layer" if is_layer else "rms", epsilon=float(_epsilon(module)))
        if module.weight is not None:
            self.vectors[f"{name}.weight"] = VectorPlan(
                ((f"{prefix}.weight", module.weight.numel()),), add=1.0 if self.family.adds_one else 0.0
            )
            plan.weight = f"{name}.weight"
        if is_layer and module.bias is not None:
            self.vectors[f"{name}.bias"] = VectorPlan(((f"{prefix}.bias", module.bias.numel()),))
            plan.bias = f"{name}.bias"
        return plan

    def _ropes(self) -> list[RopePlan]:
        kinds: list[str | None] = {
            "none": [],
            "one": [None],
            "layer_types": sorted(set(getattr(self.config, "layer_types", None) or [])),
        }[self.family.ropes]
        if not kinds:
            return []
        rotary: Any = self.base.rotary_emb
        if any(buffer.is_meta for buffer in rotary.buffers()):
            with torch.device("cpu"):
                rotary = type(rotary)(copy.deepcopy(self.config))
        ropes: list[RopePlan] = []
        for kind in kinds:
            rope_type = rotary.rope_type if kind is None else rotary.rope_type[kind]
            if rope_type not in _ROPE_TYPES:
                raise NotNativeError(f"has a rotary embedding of type {rope_type!r}")
            prefix = "" if kind is None else f"{kind}_"
            # a long call may have left other frequencies behind in those that change
            which = f"{prefix}original_inv_freq" if rope_type in _CHANGING_ROPES else f"{prefix}inv_freq"
            inv_freq = getattr(rotary, which).detach().float().clone()
            scaling = getattr(rotary, f"{prefix}attention_scaling")
            self.rope_of[kind] = len(ropes)
            ropes.append(RopePlan(inv_freq, 1.0 if rope_type == "dynamic" else float(scaling)))
        return ropes


def _epsilon(module: Any) -> float:
    found: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return found
