"""A model that a plugin loaded, in place of `llmopt.load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.kv_cache import LayerShape


@dataclass(slots=True)
class LoadedModel:
    """What `llmopt_load` returns."""

    model: PreTrainedModel  # in eval mode; its own forward works, whenever it is called
    tokenizer: PreTrainedTokenizerBase | None = None  # pads on the left
    weights_unread: bool = False  # the first forward reads the weights: `build` leaves it alone where it can
    layer_shapes: Mapping[int, LayerShape] | None = (
        None  # what each layer stores, where that is known; else it is probed
    )
