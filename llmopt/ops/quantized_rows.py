"""Rows of the quantized KV cache in plain torch: int8 values, and behind them their scale.

A row is what one token has for one head. Its n values are stored in n + 2 bytes: integers in -127..127, then a scale in
bfloat16, the row's largest magnitude / 127 rounded up. A value is integer * scale. The native op does the same.

Keys are rotated before they are rounded, and queries before they meet them: q . k stays, and channels that are much
larger than the others no longer set the scale of all. The rotation is fixed, and its own inverse.
Source: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCALE_BYTES = 2
ROW_FORMAT = 2  # of what is stored: 2 has rotated keys
_SMALLEST_SCALE = 1e-36  # below it a row counts as zeros: the reciprocal of the scale must be finite


def rotate_rows(rows: Tensor) -> Tensor:
    """Multiply groups of 2^k elements with an orthonormal Hadamard matrix, 2^k the largest that divides their number.

    :param rows: ``[..., n]``, any float dtype.
    :returns: ``[..., n]``, of at least float32.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    n = rows.shape[-1]
    size, stride = n & -n, 1
    while stride < size:
        pairs = rows.unflatten(-1, (n // (2 * stride), 2, stride))
        a, b = pairs.unbind(-2)
        rows = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return rows * (1 / math.sqrt(size))


def quantize_rows(rows: Tensor) -> Tensor:
    """Store rows in 8 bits. A row that holds an infinity or a NaN becomes NaN.

    :param rows: ``[..., n]``, any float dtype.
    :returns: ``[..., n + 2]`` int8.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    up = ((largest / 127).view(torch.int32) + 0xFFFF) >> 16  # not negative, so that more bits are more
    scale = (up << 16).view(torch.float32)
    scale = torch.where(scale > _SMALLEST_SCALE, scale, 0.0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    is_finite = largest.isfinite()
    scale = torch.where(is_finite, scale, float("nan"))
    integers = torch.where(is_finite, (rows * inverse).round(), 0.0).to(torch.int8)
    return torch.cat([integers, scale.to(torch.bfloat16).view(torch.int8)], dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Take rows back to floats.

    :param rows: ``[..., n + 2]`` int8, as `quantize_rows` made them.
    :returns: ``[..., n]`` of ``dtype``.
    """
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)
