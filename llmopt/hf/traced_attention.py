"""The attention entry as one opaque operator, for forwards that are traced and compiled.

A tracer sees tensors without memory, so it cannot follow the way from a layer's keys to their blocks. It sees
``llmopt::hf_attend`` instead, which at run time stores keys and values and attends, both through the step of its
thread. The layer is named by its number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmopt.errors import UnsupportedModelError
from llmopt.hf.attention_options import AttentionOptions

_library = torch.library.Library("llmopt", "FRAGMENT")  # lives as long as the process
_library.define(
    "hf_attend(Tensor query, Tensor key, Tensor value, SymInt layer, float scale, SymInt? sliding_window, "
    "float? softcap, Tensor? sinks) -> Tensor"
)


def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, value.shape[-1]))


torch.library.register_fake("llmopt::hf_attend", _fake)


def bind(attend: Callable[..., Tensor]) -> None:
    """Say what the operator does; once."""
    _library.impl("hf_attend", attend, "CompositeExplicitAutograd")


def trace(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """What a tracer sees of one call of attention.

    :raises UnsupportedModelError: the module does not know the number of its layer.
    """
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no layer_idx, which compiled attention needs")
    out: Tensor = torch.ops.llmopt.hf_attend(query, key, value, layer, *options)
    return out
