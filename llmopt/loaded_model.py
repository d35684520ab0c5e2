"""A model that a plugin loaded, in place of `llmopt.load`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(slots=True)
class LoadedModel:
    """What `llmopt_load` returns."""

    model: PreTrainedModel  # in eval mode; its own forward works, whenever it is called
    tokenizer: PreTrainedTokenizerBase | None = None  # pads on the left
    weights_unread: bool = False  # the first forward reads the weights: `build` leaves it alone where it can
