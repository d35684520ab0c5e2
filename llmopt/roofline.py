"""Bytes that a step must move and operations that it must do, and how close to the machine's limit it came.

What is counted::

    weights     every matrix once per step, the head only when logits are wanted; of experts as many as are expected
                to be chosen; of an embedding table the rows of the tokens
    KV          keys and values of the tokens before (inside the window, where a layer has one), read once per request;
                those of the new tokens, written
    operations  two per weight and token, two per query, key and dimension in attention

Activations are left out: they stay in the caches. So the limit is a lower bound, and a fraction of 1 is not reachable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.batch import Batch
    from llmopt.kv_cache import LayerShape
    from llmopt.machine_limits import MachineLimits

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """What work has to move and to compute."""

    num_bytes: float = 0.0
    num_ops: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(self.num_bytes + other.num_bytes, self.num_ops + other.num_ops)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Layers with the same window, added up."""

    window: int | None  # keys that a query sees, its own included; None: all
    bytes_per_token: int  # key and value of one token
    ops_per_pair: int  # of one query with one key, all heads


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model costs per step, per token, per row of logits and per key."""

    dtype: str  # operands of the products: whose peak holds
    layer_bytes: float  # matrices and norms of the layers, experts left out
    layer_ops: float  # per token
    head_bytes: float
    head_ops: float  # per row of logits
    embedding_row_bytes: float
    attention: tuple[AttentionCost, ...] = ()
    expert_bytes: float = 0.0  # all experts together
    expert_ops: float = 0.0  # per token, with the experts it chooses
    num_experts: int = 0
    num_experts_per_token: int = 0

    @property
    def weight_bytes(self) -> float:
        """All that a large step reads."""
        return self.layer_bytes + self.expert_bytes + self.head_bytes

    def with_weight_bytes(self, weight_bytes: float, dtype: str | None = None) -> ModelCost:
        """The same model with weights of another size, packed ones for example: every part shrinks alike."""
        share = weight_bytes / self.weight_bytes
        return replace(
            self,
            dtype=dtype or self.dtype,
            layer_bytes=share * self.layer_bytes,
            expert_bytes=share * self.expert_bytes,
            head_bytes=share * self.head_bytes,
        )

    def step(self, seq_lens: Any, num_scheduled: Any, num_logits: int) -> StepCost:
        """The cost of one step.

        :param seq_lens: ``[B]``, tokens of each request after the step.
        :param num_scheduled: ``[B]``, tokens of each request in the step.
        :param num_logits: rows of logits that are wanted.
        """
        ends = np.asarray(seq_lens, dtype=np.int64)
        new = np.asarray(num_scheduled, dtype=np.int64)
        before = ends - new
        num_tokens = int(new.sum())
        num_bytes = self.layer_bytes + num_tokens * self.embedding_row_bytes
        num_ops = num_tokens * (self.layer_ops + self.expert_ops) + num_logits * self.head_ops
        if num_logits:
            num_bytes += self.head_bytes
        if self.num_experts:
            # of E experts, T tokens with k each meet E (1 - (1 - k / E)^T) when they choose evenly
            missed = (1 - self.num_experts_per_token / self.num_experts) ** num_tokens
            num_bytes += self.expert_bytes * (1 - missed)
        for layer in self.attention:
            kept = before if layer.window is None else np.minimum(before, layer.window - 1)
            num_bytes += layer.bytes_per_token * int((kept + new).sum())
            num_ops += layer.ops_per_pair * int(_pairs(ends, layer.window) - _pairs(before, layer.window))
        return StepCost(float(num_bytes), float(num_ops))

    def decode(self, batch: int, first_len: int, num_steps: int) -> StepCost:
        """The mean cost of decode steps of ``batch`` requests whose lengths go from ``first_len`` up, one per step."""
        total = StepCost()
        for length in range(first_len, first_len + num_steps):
            total += self.step([length] * batch, [1] * batch, batch)
        return StepCost(total.num_bytes / num_steps, total.num_ops / num_steps)

    def prefill(self, batch: int, length: int) -> StepCost:
        """The cost of computing whole prompts in one step."""
        return self.step([length] * batch, [length] * batch, batch)


def _pairs(lengths: np.ndarray, window: int | None) -> int:
    """Query-key pairs of causal attention over whole sequences: the sum of ``min(position, window)``."""
    inside = lengths if window is None else np.minimum(lengths, window)
    pairs = int((inside * (inside + 1) // 2).sum())
    return pairs if window is None else pairs + int(window * (lengths - inside).sum())


def model_cost(model: PreTrainedModel, shapes: Mapping[int, LayerShape], layer_types: Sequence[str] = ()) -> ModelCost:
    """What a model of transformers costs, from its parameters.

    :param shapes: what each attention layer stores.
    :param layer_types: per layer, as transformers names them: which layers have the config's sliding window.
    """
    from torch import nn

    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() or model
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    in_tables = {id(p) for module in decoder.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    in_head = {id(p) for p in head.parameters()} if head is not None else set()
    num_experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    per_token = _first(config, "num_experts_per_tok", "moe_topk")
    share = per_token / num_experts if num_experts else 1.0
    layer_bytes = layer_ops = expert_bytes = expert_ops = 0.0
    for name, parameter in decoder.named_parameters():
        size, count = parameter.numel() * parameter.element_size(), parameter.numel()
        if id(parameter) in in_tables or id(parameter) in in_head:
            continue
        if num_experts and ".experts." in name:
            expert_bytes += size
            expert_ops += 2 * share * count
        else:
            layer_bytes += size
            layer_ops += 2 * count if parameter.dim() > 1 else 0
    head_bytes = sum(p.numel() * p.element_size() for p in head.parameters()) if head is not None else 0
    head_ops = sum(2 * p.numel() for p in head.parameters() if p.dim() > 1) if head is not None else 0
    weight = table.weight
    return ModelCost(
        dtype=str(model.dtype).removeprefix("torch."),
        layer_bytes=layer_bytes,
        layer_ops=layer_ops,
        head_bytes=head_bytes,
        head_ops=head_ops,
        embedding_row_bytes=weight[0].numel() * weight.element_size(),
        attention=_attention(config, shapes, layer_types),
        expert_bytes=expert_bytes,
        expert_ops=expert_ops,
        num_experts=num_experts,
        num_experts_per_token=per_token,
    )


def _first(config: Any, *names: str) -> int:
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _attention(config: Any, shapes: Mapping[int, LayerShape], layer_types: Sequence[str]) -> tuple[AttentionCost, ...]:
    window = getattr(config, "sliding_window", None)
    num_heads = _first(config, "num_attention_heads", "n_head")
    groups: dict[int | None, list[int]] = {}
    for index, shape in shapes.items():
        slides = index < len(layer_types) and layer_types[index] == "sliding_attention"
        sums = groups.setdefault(window if slides else None, [0, 0])
        sums[0] += shape.bytes_per_token
        sums[1] += 2 * num_heads * (shape.key_dim + shape.value_dim)
    return tuple(AttentionCost(seen, *sums) for seen, sums in groups.items())


def kind_of(batch: Batch) -> Kind:
    """``decode`` when every row has one token beside its drafts, else ``prefill``."""
    return "decode" if bool((batch.num_scheduled - batch.num_drafts == 1).all()) else "prefill"


@dataclass(slots=True)
class Totals:
    """Steps of one kind, added up."""

    num_steps: int = 0
    num_tokens: int = 0
    num_bytes: float = 0.0
    num_ops: float = 0.0
    seconds: float = 0.0
    limit_s: float = 0.0  # the shortest time that the machine allows for these steps

    def add(self, cost: StepCost, num_tokens: int, seconds: float, limit_s: float) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_bytes += cost.num_bytes
        self.num_ops += cost.num_ops
        self.seconds += seconds
        self.limit_s += limit_s

    def report(self) -> dict[str, float]:
        """Per step and per second. ``fraction_of_limit`` is 1 for a step as fast as the machine allows."""
        steps, seconds = max(1, self.num_steps), self.seconds or 1e-12
        return {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "ms_per_step": 1e3 * self.seconds / steps,
            "limit_ms_per_step": 1e3 * self.limit_s / steps,
            "fraction_of_limit": self.limit_s / seconds,
            "mb_per_step": self.num_bytes / steps / 1e6,
            "gflop_per_step": self.num_ops / steps / 1e9,
            "gb_per_s": self.num_bytes / seconds / 1e9,
            "gflop_per_s": self.num_ops / seconds / 1e9,
        }


@dataclass(slots=True)
class Tally:
    """The steps of a pipeline, prefill and decode apart."""

    cost: ModelCost
    limits: MachineLimits
    totals: dict[Kind, Totals] = field(default_factory=lambda: {"prefill": Totals(), "decode": Totals()})

    def add(self, kind: Kind, cost: StepCost, num_tokens: int, seconds: float) -> None:
        """Count one step."""
        limit_s = self.limits.seconds(cost.num_bytes, cost.num_ops, self.cost.dtype)
        self.totals[kind].add(cost, num_tokens, seconds, limit_s)

    def report(self) -> dict[str, dict[str, float]]:
        """Kind to figures; kinds that did not occur are absent."""
        return {kind: totals.report() for kind, totals in self.totals.items() if totals.num_steps}

    def lines(self) -> list[str]:
        """The report for people, one line per kind."""
        return [
            f"{kind}: {figures['num_steps']:.0f} steps of {figures['ms_per_step']:.2f} ms, "
            f"{figures['gb_per_s']:.1f} GB/s and {figures['gflop_per_s']:.0f} GFLOP/s, "
            f"{100 * figures['fraction_of_limit']:.0f} % of this machine's limit "
            f"({figures['limit_ms_per_step']:.2f} ms)"
            for kind, figures in self.report().items()
        ]
