"""What one call of attention asks for beside its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class AttentionOptions(NamedTuple):
    """Options of one call, in the order in which the compiled entry takes them. A tuple, because one is made per layer
    and step."""

    scale: float  # factor of the scores
    sliding_window: int | None = None  # a query sees that many last keys, itself included; None: all
    softcap: float | None = None  # scores become tanh(score / softcap) * softcap; None: as they are
    sinks: Tensor | None = None  # [Hq], one more logit per head in the softmax's sum
