"""Weights in 8 or 4 bits for the native decoder.

Stage: none, it configures `native` (llmopt_configure).   Promise: lossy, see `PluginInfo.loss`.
Helps: decoding, which reads all weights for every token: fewer bytes, fewer milliseconds.   Hurts: a little accuracy;
building takes longer.
Source: groups after the formats of llama.cpp (Q8_0, Q4_0, Q4_1); one scale per output and per token after T. Dettmers
et al., "LLM.int8()", 2022.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.option_checks import check_choice, check_flag, check_use

if TYPE_CHECKING:
    from llmopt.config import PipelineConfig

_BITS = (8, 4)


class WeightQuant:
    """Pack weights in fewer bits."""

    info = PluginInfo(
        name="weight_quant",
        layer="kernel",
        promise="lossy",
        summary="8-bit or 4-bit weights for the native decoder",
        requires=("native",),
        devices=("cpu",),
        loss="mean KL to float32 per token 0.004 with 8 bits and with 4 (SmolLM2-135M, whose weights come from a 4-bit "
        "file, on English text)",
    )

    def __init__(
        self, bits: int = 8, group: int | None = None, head_bits: int | None = None, minimum: bool | None = None
    ) -> None:
        """:param bits: per weight, 8 or 4.
        :param group: weights that share a scale: 32, 64 or 128, with activations in 8 bits in groups of 32; with 8
            bits also 0, all of one output, with activations in 15 bits. None: 0 with 8 bits, 32 with 4.
        :param head_bits: of the output head and the embeddings; None: 8. Where they are not `bits`, the group is that
            of None.
        :param minimum: with 4 bits, whether groups have a minimum beside the scale (half a bit more per weight at group
            32); None: for the matrices where it takes away a fifth of the error.
        """
        check_choice("bits", bits, _BITS)
        check_choice("head_bits", head_bits, (*_BITS, None))
        check_choice("group", group, (None, 32, 64, 128) if bits == 4 else (None, 0, 32, 64, 128))
        if minimum is not None:
            check_flag("minimum", minimum, " or None")
        if 4 not in (bits, head_bits):
            check_use("bits=4 or head_bits=4", {"minimum": (minimum, None)})
        self.bits, self.head_bits, self.minimum = bits, head_bits, minimum
        self.group = group if group is not None else 0 if bits == 8 else 32

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        kernel = replace(
            config.kernel,
            weight_bits=self.bits,
            head_bits=self.head_bits or 8,
            weight_group_size=self.group,
            weight_minimum=self.minimum,
        )
        return replace(config, kernel=kernel)
