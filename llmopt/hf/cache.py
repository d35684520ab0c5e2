"""The cache object that a Hugging Face model sees in a step: it writes to the block pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.configuration_utils import PreTrainedConfig


class Updatable(Protocol):
    """The part of a step that stores keys and values."""

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Store new keys ``[1, H, T, D]`` or ``[B, H, 1, D]``; return what the attention module goes on with."""


class EngineCache(DynamicCache):
    """A `DynamicCache` whose attention layers live elsewhere; recurrent layers keep their state objects.

    Lengths are reported as 0, because positions are given explicitly and masks are not made by the model.
    """

    def __init__(self, config: PreTrainedConfig, step: Updatable) -> None:
        super().__init__(config=config)
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return key_states, value_states  # the traced attention stores them
        return self.step.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False
