"""The small operations of a decoder layer, each as one call: norm, gated activation, rotation, product with few rows.

`FusedOps` calls the compiled core; functions with ``_reference`` in their names do the same in plain torch. Both round
to half precision where the operations of the models do, so that a call can stand for them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llmopt import native

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
DTYPES = (torch.float32, torch.bfloat16)

_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `FusedOps` does not serve tensors of this kind; None when it does."""
    if device.type != "cpu":
        return f"the fused ops serve the CPU and the model is on {device}"
    if dtype not in DTYPES:
        return f"the fused ops serve {' and '.join(map(str, DTYPES))} and the model is {dtype}"
    return native.why_not()


class FusedOps:
    """The native ops. Tensors are float32 or bfloat16 on the CPU, all of one dtype; see `why_not`.

    :param num_threads: threads for large inputs; None takes ``torch.get_num_threads()`` now.
    :raises RuntimeError: the extension is not there, or switched off.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        core: ModuleType | None = native.core()
        if core is None:
            raise RuntimeError(f"the fused ops need the extension: {native.why_not()}.")
        self._threads = num_threads or torch.get_num_threads()
        self._rms_norm = core.rms_norm
        self._gated_activation = core.gated_activation
        self._rotate = core.rotate
        self._few_rows_linear = core.few_rows_linear

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, *, adds_one: bool = False, rounds_first: bool = True
    ) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; see `rms_norm_reference`."""
        if not x.is_contiguous():
            x = x.contiguous()
        size = x.shape[-1]
        if weight is not None and (weight.shape != x.shape[-1:] or weight.dtype is not x.dtype):
            raise ValueError(f"weight is {_form(weight)}, x is {_form(x)}; it has one value per column, in x's dtype.")
        out = torch.empty_like(x)
        self._rms_norm(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            size,
            0 if weight is None else weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            eps,
            adds_one,
            rounds_first,
            self._threads,
        )
        return out

    def gated_activation(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """``activation(gate) * up``. Both ``[..., N]`` with rows at one distance, as views of one matrix are."""
        if gate.shape != up.shape or gate.dtype is not up.dtype:
            raise ValueError(f"gate is {_form(gate)} and up is {_form(up)}; they must agree.")
        gate, gate_stride = _rows(gate)
        up, up_stride = _rows(up)
        size = gate.shape[-1]
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._gated_activation(
            gate.dtype is torch.bfloat16,
            _NUMBERS[activation],
            gate.data_ptr(),
            gate_stride,
            up.data_ptr(),
            up_stride,
            out.data_ptr(),
            gate.numel() // size,
            size,
            self._threads,
        )
        return out

    def rotate(
        self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rounds_products: bool = True
    ) -> Tensor:
        """Rotary embedding of ``x [B, H, T, D]`` by ``cos`` and ``sin [B or 1, T, R]``, R <= D.

        :returns: ``[B, H, T, D]`` with the heads of a token beside each other in memory.
        """
        batch, heads, tokens, dim = x.shape
        num_rotated = cos.shape[-1]
        if cos.shape != sin.shape or cos.shape[1] != tokens or cos.shape[0] not in (1, batch) or num_rotated > dim:
            raise ValueError(f"cos is {_form(cos)} and sin {_form(sin)} for x {_form(x)}; they are [B or 1, T, R].")
        if not cos.dtype is sin.dtype is x.dtype:
            raise ValueError(f"x is {x.dtype}, cos {cos.dtype} and sin {sin.dtype}; they must agree.")
        if x.stride(3) != 1:
            x = x.contiguous()
        if cos.stride(2) != 1 or cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        batch_stride, head_stride, token_stride, _ = x.stride()
        cos_batch_stride, cos_token_stride, _ = cos.stride()
        out = torch.empty((batch, tokens, heads, dim), dtype=x.dtype)
        self._rotate(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            batch_stride,
            token_stride,
            head_stride,
            cos.data_ptr(),
            sin.data_ptr(),
            cos_batch_stride if cos.shape[0] == batch else 0,
            cos_token_stride,
            out.data_ptr(),
            batch,
            tokens,
            heads,
            dim,
            num_rotated,
            interleaved,
            rounds_products,
            self._threads,
        )
        return out.transpose(1, 2)

    def few_rows_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias`` for few rows: ``x [..., K]``, ``weight [N, K]`` with contiguous rows."""
        num_outputs, num_inputs = weight.shape
        if x.shape[-1] != num_inputs or x.dtype is not weight.dtype or weight.stride(1) != 1:
            raise ValueError(f"x is {_form(x)} and weight {_form(weight)}; they are [..., K] and [N, K], in one dtype.")
        if bias is not None and bias.dtype is not x.dtype:
            raise ValueError(f"bias is {bias.dtype} and x is {x.dtype}; they must agree.")
        x, x_stride = _rows(x)
        out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
        self._few_rows_linear(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            x_stride,
            weight.data_ptr(),
            weight.stride(0),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.numel() // num_inputs,
            num_inputs,
            num_outputs,
            self._threads,
        )
        return out


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """The tensor, copied if its rows do not lie at one distance, and that distance in elements."""
    if x.is_contiguous():
        return x, x.shape[-1]
    *outer, last = x.stride()
    is_regular = last == 1 and all(
        outer[i] == outer[i + 1] * x.shape[i + 1] or x.shape[i] == 1 for i in range(len(outer) - 1)
    )
    return (x, outer[-1]) if is_regular and outer else (x.contiguous(), x.shape[-1])


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, *, adds_one: bool = False, rounds_first: bool = True
) -> Tensor:
    """Root mean square norm.

    :param adds_one: the factor is ``1 + weight``.
    :param rounds_first: the normed values are rounded to ``x.dtype`` before they meet the weight.
    """
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        values = values.to(x.dtype).float()
    if weight is not None:
        values = values * (weight.float() + (1.0 if adds_one else 0.0))
    return values.to(x.dtype)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up``."""
    return ACTIVATIONS[activation](gate) * up


def rotate_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rounds_products: bool = True
) -> Tensor:
    """Rotary embedding of the first ``cos.shape[-1]`` values of each head of ``x [B, H, T, D]``.

    :param interleaved: pairs are ``2i`` and ``2i + 1``, else ``i`` and ``i + R / 2``.
    :param rounds_products: in half precision both products are rounded before they are added.
    """
    num_rotated = cos.shape[-1]
    turned, rest = x[..., :num_rotated], x[..., num_rotated:]
    if not rounds_products:
        turned, cos, sin = turned.float(), cos.float(), sin.float()
    if interleaved:
        pairs = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat((-second, first), dim=-1)
    turned = turned * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def few_rows_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, added in float32."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
