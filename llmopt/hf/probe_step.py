"""A forward without a block pool: what each layer of a model stores, and how it calls attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from llmopt.errors import UnsupportedModelError
from llmopt.hf.attention_options import AttentionOptions
from llmopt.hf.step import dense_attention
from llmopt.kv_cache import LayerShape


class ProbeStep:
    """A forward without a pool, to learn what each layer stores and how it calls attention.

    :param windows: layer index -> how many tokens transformers' cache keeps of it, for layers that keep a window.
    :param num_positions: longest sequence that the engine will run; masks are compared up to there.
    """

    def __init__(self, windows: Mapping[int, int], num_positions: int) -> None:
        self.windows = windows
        self.num_positions = num_positions
        self.shapes: dict[int, LayerShape] = {}
        self.gather = False  # an attention module changed its keys or values after the cache
        self.num_attention_calls = 0
        self._layer_of: dict[tuple[int, int], int] = {}  # ids of key and value tensors -> layer that stored them
        self._masks: dict[int, Any] = {}  # id of a mask tensor -> the function that says who sees whom
        self._compared: set[tuple[int, int | None]] = set()  # masks and windows that agree
        self._keep: list[Tensor] = []  # keeps tensors, and so their ids, alive

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        self.shapes[layer_index] = LayerShape(
            num_key_heads=key.shape[1],
            key_dim=key.shape[-1],
            num_value_heads=value.shape[1],
            value_dim=value.shape[-1],
            dtype=key.dtype,
            device=key.device,
        )
        if key.dtype != value.dtype:
            self.refuse(f"layer {layer_index} has keys in {key.dtype} and values in {value.dtype}")
        self._layer_of[id(key), id(value)] = layer_index
        self._keep += [key, value]
        return key, value

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.num_attention_calls += 1
        layer = self._layer_of.get((id(key), id(value)))
        if layer is None or query.shape[-1] != key.shape[-1]:
            self.gather = True
        elif self._reach(self.windows.get(layer)) != self._reach(options.sliding_window):
            kept = _window_name(self.windows.get(layer))
            told = _window_name(options.sliding_window)
            self.refuse(f"layer {layer} has {kept}, and the attention function is told of {told}")
        out = dense_attention(query, key, value, options)
        return out.transpose(1, 2).contiguous()

    def _reach(self, window: int | None) -> int:
        """How far a window reaches: one as long as the longest sequence is none."""
        return min(window or self.num_positions, self.num_positions)

    def make_mask(self, mask_function: Any) -> Tensor | None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        self._masks[id(mask)] = mask_function
        self._keep.append(mask)
        return mask

    def check_mask(self, mask: Tensor, sliding_window: int | None) -> None:
        """Compare the model's own mask with causal attention in the window that it names, position by position."""
        function = self._masks.get(id(mask))
        if function is None:
            self.refuse("its attention is called with a mask that depends on more than positions")
        if (id(mask), sliding_window) in self._compared:
            return
        last = self.num_positions - 1
        queries = torch.tensor(sorted({0, min(2, last), last // 2, last}))[:, None]
        keys = torch.arange(self.num_positions)[None]
        zero = torch.zeros((), dtype=torch.long)
        visible = keys <= queries
        if sliding_window is not None:
            visible &= keys > queries - sliding_window
        try:
            is_same = torch.equal(function(zero, zero, queries, keys).expand_as(visible), visible)
        except Exception as error:
            raise UnsupportedModelError(f"its mask cannot be computed ({type(error).__name__}: {error})") from error
        if not is_same:
            told = _window_name(sliding_window)
            self.refuse(f"its mask is another than its attention function is told: causal, {told}")
        self._compared.add((id(mask), sliding_window))

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(why)


def _window_name(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window} tokens"
