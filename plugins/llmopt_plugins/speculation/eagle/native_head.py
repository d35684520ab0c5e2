"""A draft head as a decoder of one layer in C++, one call per level, on packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt_plugins.kernel.native.builder import thread_team
from llmopt_plugins.kernel.native.decoder_plan import (
    Activation,
    AttentionPlan,
    DecoderPlan,
    FrontPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    RopePlan,
    native_spec,
)
from llmopt_plugins.kernel.native.formats import choose_shapes
from llmopt_plugins.kernel.native.packing import (
    MatrixPlan,
    Memory,
    PackedWeights,
    QuantizedRows,
    Role,
    Rows,
    VectorPlan,
    extension,
)
from llmopt_plugins.kernel.native.shared_weights import share
from llmopt_plugins.speculation.eagle.level import Guesses, Level
from llmopt_plugins.speculation.eagle.model import Eagle3Config, Eagle3Head
from llmopt_plugins.speculation.eagle.search import Growth, Nodes, Pairs

if TYPE_CHECKING:
    from llmopt.config import KernelConfig
    from llmopt.kv_cache import KVCache
    from llmopt_plugins.speculation.eagle.model1 import Eagle1Head

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class NativeHead:
    """Runs the head on the threads of the target's decoder.

    :param target: the target's packed weights. A head without an embedding of its own reads the target's; one whose
        output matrix is the target's reads that too, where it would be packed in the same form.
    :param output: the target's output matrix, as the model stores it.
    :param kernel: its ``weight_bits`` is that of the head's matrices.
    :param num_positions: positions that the head may be asked for.
    """

    def __init__(
        self,
        head: Eagle3Head | Eagle1Head,
        target: PackedWeights,
        output: Tensor | None,
        kv_cache: KVCache,
        kernel: KernelConfig,
        num_threads: int,
        num_positions: int,
    ) -> None:
        core = extension()
        config = head.config
        plan = self._decoder_plan = _plan(head)
        source = _Weights(dict(head.state_dict()))
        shapes = choose_shapes(plan.matrices, source, kernel)
        self._borrowed: dict[str, str] = {}  # names of matrices here -> in the target
        if head.embed_tokens is None:
            self._borrowed["embedding"] = "embedding" if "embedding" in target.matrices else "head"
        form = target.matrices["head"][0] if "head" in target.matrices else None
        if output is not None and _is_same(head.lm_head.weight, output) and form == shapes["head"]:
            self._borrowed["head"] = "head"
        own = {name: matrix for name, matrix in plan.matrices.items() if name not in self._borrowed}
        packed = share(own, plan.vectors, {name: shapes[name] for name in own}, source, num_threads)
        layer, shape = kv_cache.layers[0], kv_cache.shapes[0]
        self._cache = core.LayerCache(
            layer.key.data_ptr(),
            layer.value.data_ptr(),
            kv_cache.num_blocks,
            shape.num_key_heads,
            kv_cache.block_size,
            shape.key_dim,
            shape.value_dim,
            shape.dtype == torch.bfloat16,
            False,
        )
        self.packed: PackedWeights | None = packed
        self.state_size = config.hidden_size
        self.num_bytes = packed.memory.num_bytes
        self._kv_cache: KVCache | None = kv_cache  # keeps what the decoder looks at
        self._tables = [rope.tables(num_positions) for rope in plan.ropes]
        self._target: PackedWeights | None = target
        self._target_ids = (head.d2t + torch.arange(config.draft_vocab_size)).numpy()
        self._team = thread_team(num_threads)
        self._plan = core.StepPlan()
        self._connect()
        self._rows = core.FeatureRows
        self._block_size = kv_cache.block_size
        self._states = _new_states(0, config.hidden_size)
        self._ids = np.empty((0, 0), dtype=np.int32)
        self._log_probs = np.empty((0, 0), dtype=np.float32)

    def _connect(self) -> None:
        """Make the decoder on the memory in which the target's weights lie now."""
        core, packed, target = extension(), self.packed, self._target
        assert packed is not None
        assert target is not None
        borrowed = {name: target.matrix(there) for name, there in self._borrowed.items()}
        spec = native_spec(self._decoder_plan, packed, self._tables, borrowed=borrowed)
        self._decoder = core.Decoder(spec, [self._cache], self._team)
        self._search = core.TreeSearch(self._decoder, self._target_ids.tolist())
        self._memory: Memory | None = target.memory

    def _follow(self) -> None:
        """When the target's weights were packed again elsewhere, read them there."""
        if self._target is not None and self._target.memory is not self._memory:
            self._connect()

    def __call__(self, level: Level, hidden: Tensor, top: int, *, are_features: bool = False) -> Guesses | None:
        self._follow()
        plan = (level.block_tables, level.seq_lens, level.cu_seqlens_q, level.slot_mapping)
        if level.draft_masks is None:
            self._plan.update(*plan)
        else:
            self._plan.update(*plan, level.num_drafts, level.draft_masks)
        hidden = hidden.detach().to("cpu", torch.float32).contiguous()
        address = hidden.data_ptr()
        tokens = (level.token_ids, level.positions, level.logits_indices)
        places = (address, 0) if are_features else (0, address)
        if not top:
            self._decoder.draft_step(self._plan, *tokens, *places)
            return None
        count = len(level.logits_indices)
        if self._ids.shape != (count, top):
            self._ids, self._log_probs = np.empty((count, top), np.int32), np.empty((count, top), np.float32)
        if self._states.shape[0] < count:
            self._states = _new_states(count, self.state_size)
        addresses = (self._states.data_ptr(), top, self._ids.ctypes.data, self._log_probs.ctypes.data)
        self._decoder.draft_step(self._plan, *tokens, *places, *addresses)
        return Guesses(self._target_ids[self._ids], self._log_probs, self._states[:count])

    def keep(self, hidden: Tensor, rows: Sequence[int], taps: Sequence[int]) -> Any:
        if hidden.dtype != torch.float32 or not hidden.is_contiguous():
            hidden = hidden.detach().to("cpu", torch.float32).contiguous()
        return self._rows(hidden.data_ptr(), *hidden.shape, rows, taps)

    def search(self, pairs: Pairs, growth: Growth) -> tuple[list[Nodes], int]:
        self._follow()
        found = self._search.run(
            pairs.block_tables, pairs.num_pairs, pairs.lengths, pairs.token_ids, pairs.positions, pairs.features,
            self._block_size, growth.width, growth.depth, growth.counts, growth.least_gain, growth.least_chance,
        )  # fmt: skip
        return found, self._search.num_levels

    def close(self) -> None:
        self._search = self._decoder = self._plan = self.packed = None
        self._target = self._memory = self._kv_cache = None


def _new_states(count: int, size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty((count, size), dtype=torch.float32, device="cpu")


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same values in the same memory."""
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


class _Weights:
    """Tensors by name, for packing."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def dense(self, name: str) -> Tensor:
        return self._weights[name]

    def quantized(self, name: str) -> QuantizedRows | None:
        return None


class _Reader:
    """Collects the matrices and vectors of a head."""

    def __init__(self, weights: Mapping[str, Tensor], epsilon: float) -> None:
        self.weights = weights
        self.epsilon = epsilon
        self.matrices: dict[str, MatrixPlan] = {}
        self.vectors: dict[str, VectorPlan] = {}

    def linear(self, name: str, prefixes: list[str], *, role: Role = "linear", is_gated: bool = False) -> LinearPlan:
        shapes = [self.weights[f"{prefix}.weight"].shape for prefix in prefixes]
        parts = tuple(Rows(f"{p}.weight", 0, shape[0]) for p, shape in zip(prefixes, shapes, strict=True))
        self.matrices[name] = MatrixPlan(shapes[0][1], parts, role, is_gated)
        if f"{prefixes[0]}.bias" not in self.weights:
            return LinearPlan(name)
        biases = tuple((f"{p}.bias", shape[0]) for p, shape in zip(prefixes, shapes, strict=True))
        self.vectors[f"{name}.bias"] = VectorPlan(biases, is_gated=is_gated)
        return LinearPlan(name, f"{name}.bias")

    def norm(self, name: str) -> NormPlan:
        """No norm where the head has none of this name."""
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return NormPlan()
        self.vectors[f"{name}.weight"] = VectorPlan(((f"{name}.weight", weight.numel()),))
        return NormPlan("rms", f"{name}.weight", epsilon=self.epsilon)


def _plan(head: Eagle3Head | Eagle1Head) -> DecoderPlan:
    """The head as a decoder."""
    config: Eagle3Config = head.config
    weights = head.state_dict()
    read = _Reader(weights, config.rms_norm_eps)
    is_third = isinstance(head, Eagle3Head)
    fc = read.linear("fc", ["fc"])
    part_norms = [read.norm(f"fc_norm.{i}") for i in range(config.num_taps)] if config.fc_norm else []
    front = FrontPlan(
        kind="split" if is_third else "join",
        fc=fc,
        token_norm=read.norm("midlayer.input_layernorm" if is_third else "token_norm"),
        feature_norm=read.norm("input_norm" if is_third else "feature_norm"),
        part_norms=part_norms,
        norm_residual=config.norm_before_residual,
        shows_normed=config.feeds_normed,
    )
    attention = "midlayer.self_attn"
    inverse, scaling = head.rotary_emb.inv_freq, head.rotary_emb.attention_scaling
    layer = LayerPlan(
        attention=AttentionPlan(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv=read.linear("qkv", [f"{attention}.{p}_proj" for p in "qkv"]),
            output=read.linear("output", [f"{attention}.o_proj"]),
            scale=config.head_dim**-0.5,
            q_norm=read.norm(f"{attention}.q_norm"),
            k_norm=read.norm(f"{attention}.k_norm"),
            rope=0,
        ),
        mlp=MlpPlan(
            up=read.linear("up", ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"], is_gated=True),
            down=read.linear("down", ["midlayer.mlp.down_proj"]),
            activation=_ACTIVATIONS[config.hidden_act],
            is_gated=True,
        ),
        before_attention=read.norm("midlayer.hidden_norm" if is_third else "midlayer.input_layernorm"),
        after_attention=NormPlan(),
        before_mlp=read.norm("midlayer.post_attention_layernorm"),
        after_mlp=NormPlan(),
    )
    final_norm = read.norm("norm")
    head_plan = read.linear("head", ["lm_head"], role="head")
    if head.embed_tokens is not None:
        read.linear("embedding", ["embed_tokens"], role="embedding")
    return DecoderPlan(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=[layer],
        ropes=[RopePlan(inverse.detach().float().cpu(), float(scaling))],
        final_norm=final_norm,
        head=head_plan,
        embedding="embedding",
        matrices=read.matrices,
        vectors=read.vectors,
        front=front,
        head_size=config.draft_vocab_size,
    )


def why_not_native(config: Eagle3Config) -> str | None:
    """The reason why a head cannot run in C++, or None."""
    if config.hidden_act not in _ACTIVATIONS:
        return f"the activation {config.hidden_act!r} is not there"
    return None
