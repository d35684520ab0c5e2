"""Rows of the quantized KV cache in plain torch: int8 values, and behind them their scale.

A row is what one token has for one head. Its n values are stored in n + 2 bytes: integers in -127..127, then a scale in
bfloat16, the row's largest magnitude / 127 rounded up. A value is integer * scale. The native op does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
_SMALLEST_SCALE = 1e-36  # below it a row counts as zeros: the reciprocal of the scale must be finite


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
