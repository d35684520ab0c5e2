"""The residual stream of a Hugging Face model at some of its layers, taken while its forward runs.

Hooks stand in the model during the forward only: the hidden states that transformers collects by itself
(``output_hidden_states``) leave hooks behind for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmopt.errors import UnsupportedModelError
from llmopt.hf.capabilities import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HiddenStates:
    """Takes what enters some decoder layers, and what leaves the final norm.

    :param layers: ascending; ``i`` below the number of layers is the input of layer ``i``, as in ``hidden_states[i]``
        of transformers; the number of layers itself is the output of the final norm.
    :raises UnsupportedModelError: the decoder has no list of its layers.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        decoder: Any = model.get_decoder()
        num_layers: int = text_config(model).num_hidden_layers
        found = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) >= num_layers]
        if not found:
            raise UnsupportedModelError(f"{type(model).__name__} has no list of its {num_layers} decoder layers")
        self._decoder: nn.Module = decoder
        self._layers = [None if i == num_layers else found[0][i] for i in layers]
        self._taken: list[Tensor | None] = [None] * len(layers)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """For a ``with`` block around one forward of this thread; other threads may use the model meanwhile."""
        thread, taken = threading.get_ident(), self._taken
        handles = []

        def take(place: int, layer: nn.Module | None) -> Any:
            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if threading.get_ident() == thread:
                    taken[place] = args[0] if args else kwargs["hidden_states"]

            def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if threading.get_ident() == thread:
                    taken[place] = output[0]

            if layer is None:
                return self._decoder.register_forward_hook(after)
            return layer.register_forward_pre_hook(before, with_kwargs=True)

        try:
            for place, layer in enumerate(self._layers):
                handles.append(take(place, layer))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self, device: torch.device, real: Tensor | None = None) -> Tensor:
        """What the last forward had: ``[T, len(layers), hidden_size]``, rows of a padded forward one after the other.

        :param real: ``[B, L]`` bool, which places of a padded forward to take; None: all.
        """
        parts = []
        for i, states in enumerate(self._taken):
            assert states is not None, "the forward did not call its layers"
            parts.append((states.flatten(0, 1) if real is None else states[real.to(states.device)]).to(device))
            self._taken[i] = None
        return torch.stack(parts, dim=1)
