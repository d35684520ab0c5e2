"""Keys and values in 8 bits: twice the tokens in the same pool.

Stage: none, it configures the pool (llmopt_configure).   Promise: lossy, see `PluginInfo.loss`.
Helps: services whose KV pool is full, and long contexts, whose keys and values every decode reads.   Hurts: a little
accuracy; prefill pays for taking rows back to floats.
Source: one scale per token and head as in C. Hooper et al., "KVQuant", 2024 (per-token values); Y. Sheng et al.,
"FlexGen", 2023; keys are rotated first as in S. Ashkboos et al., "QuaRot", 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmopt.config import PipelineConfig


class KvQuant:
    """Store keys and values as int8 with a scale per token and head."""

    info = PluginInfo(
        name="kv_quant",
        layer="memory",
        promise="lossy",
        summary="keys and values in 8 bits, twice the tokens in the same pool",
        devices=("cpu",),
        loss="mean KL to float32 per token 0.0002 (SmolLM2-135M), 0.0016 (Qwen2.5-Coder-1.5B), on English text",
    )

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        return replace(config, memory=replace(config.memory, kv_bits=8))
