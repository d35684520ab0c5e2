"""Paged attention and the cache write in plain torch: any device, any float dtype, no autograd.

Names of dimensions: T tokens of the step, B requests, M blocks per table row, Hq query heads, Hkv key heads,
D and Dv the head sizes of key and value, S block size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmopt.ops.quantized_rows import SCALE_BYTES, dequantize_rows, quantize_rows, rotate_rows

# Queries are taken in chunks so that one score matrix stays below this.
MAX_SCORE_BYTES = 256 << 20


@torch.no_grad()
def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store the keys and values of this step's tokens in the cache.

    :param key: [T, Hkv, D], any strides, dtype of the cache.
    :param value: [T, Hkv, Dv], any strides, dtype of the cache.
    :param key_cache: [num_blocks, Hkv, S, D], written in place; or int8 [num_blocks, Hkv, S, D + 2], quantized rows
        of rotated keys.
    :param value_cache: [num_blocks, Hkv, S, Dv], written in place; or int8 as for keys.
    :param slot_mapping: [T] int64, ``block * S + offset``; a token whose slot is negative is dropped.
    """
    block_size = key_cache.shape[2]
    if key_cache.dtype == torch.int8:
        key, value = quantize_rows(rotate_rows(key)), quantize_rows(value)
    slots = slot_mapping.to(key_cache.device)
    kept = slots >= 0
    if not bool(kept.all()):
        slots, key, value = slots[kept], key[: len(kept)][kept], value[: len(kept)][kept]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[: len(slots)]
    value_cache[blocks, :, offsets] = value[: len(slots)]


@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    draft_masks: Sequence[int] = (),
) -> Tensor:
    """Causal attention of a packed ragged batch over its paged keys and values.

    The queries of request ``b`` are rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and stand at the last positions
    of its ``seq_lens[b]`` keys. A row that sees no key gives zeros, and so do rows past ``cu_seqlens_q[-1]``.

    :param query: [T, Hq, D], any strides.
    :param key_cache: [num_blocks, Hkv, S, D], Hkv divides Hq; or int8 [num_blocks, Hkv, S, D + 2], quantized rows
        of rotated keys.
    :param value_cache: [num_blocks, Hkv, S, Dv]; or int8 as for keys.
    :param block_tables: [B, M] int32; entries that no query can see are not used and may hold anything.
    :param seq_lens: [B] int32, keys of each request, this step's tokens included.
    :param cu_seqlens_q: [B + 1] int32, first query row of each request.
    :param scale: factor of the scores.
    :param sliding_window: a query sees that many last keys, itself included; 0 is all.
    :param softcap: scores become ``tanh(score / softcap) * softcap`` before the mask; 0 is off.
    :param sinks: [Hq], one more logit per head in the softmax denominator.
    :param draft_masks: one per token where drafts are trees, else empty: see `visible_keys`.
    :returns: [T, Hq, Dv], dtype of the query.
    """
    if key_cache.dtype == torch.int8:
        query = rotate_rows(query).to(query.dtype)
    head_dim_v = value_cache.shape[-1] - (SCALE_BYTES if value_cache.dtype == torch.int8 else 0)
    out = query.new_zeros((query.shape[0], query.shape[1], head_dim_v))
    starts = cu_seqlens_q.tolist()
    lengths = seq_lens.tolist()
    requests_by_q_len: dict[int, list[int]] = defaultdict(list)
    for request, kv_len in enumerate(lengths):
        q_len = starts[request + 1] - starts[request]
        if q_len > 0 and kv_len > 0:
            requests_by_q_len[q_len].append(request)

    device = query.device
    options = (scale, sliding_window, softcap, sinks)
    for requests in requests_by_q_len.values():
        rows = torch.tensor([range(starts[r], starts[r + 1]) for r in requests], device=device)  # [n, q_len]
        kv_lens = torch.tensor([lengths[r] for r in requests], device=device)  # [n]
        masks = [list(draft_masks[starts[r] : starts[r + 1]]) for r in requests] if draft_masks else None
        group = _attend_group(query[rows], key_cache, value_cache, block_tables[requests], kv_lens, masks, *options)
        out[rows.flatten()] = group.flatten(0, 1)
    return out


def _attend_group(
    query: Tensor,  # [n, q_len, Hq, D]
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    masks: list[list[int]] | None,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Requests with the same number of queries, keys padded to the longest. Gives [n, q_len, Hq, Dv]."""
    num_requests, q_len, num_heads, _ = query.shape
    device = query.device
    block_size = key_cache.shape[2]
    max_len = int(kv_lens.max())
    num_blocks = -(-max_len // block_size)

    k_pos = torch.arange(max_len, device=device)  # [L]
    q_pos = kv_lens[:, None] - q_len + torch.arange(q_len, device=device)  # [n, q_len], negative: before the first key
    first = (q_pos[:, :1] - sliding_window + 1) if sliding_window else torch.zeros_like(q_pos[:, :1])
    in_use = (k_pos < kv_lens[:, None]) & (k_pos >= first)  # [n, L]

    # Blocks nobody sees may be unset or freed: take block 0 for them and put zeros, since 0 * NaN would spread.
    block_in_use = F.pad(in_use, (0, num_blocks * block_size - max_len)).unflatten(1, (num_blocks, block_size)).any(2)
    blocks = block_tables[:, :num_blocks].to(device).long().where(block_in_use, 0)

    def gather(cache: Tensor) -> Tensor:  # -> [n, Hkv, L, D]
        rows = cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :max_len]
        if cache.dtype == torch.int8:
            rows = dequantize_rows(rows, query.dtype)
        return rows.masked_fill(~in_use[:, None, :, None], 0)

    key, value = gather(key_cache), gather(value_cache)
    query = query.transpose(1, 2)  # [n, Hq, q_len, D]
    plain = softcap == 0.0 and sinks is None and masks is None
    if plain and sliding_window == 0 and q_len == max_len and int(kv_lens.min()) == max_len:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    chunk = max(1, MAX_SCORE_BYTES // (4 * num_requests * num_heads * max_len))
    pieces = []
    for begin in range(0, q_len, chunk):
        positions = q_pos[:, begin : begin + chunk, None]  # [n, q, 1]
        visible = (k_pos <= positions) & (k_pos < kv_lens[:, None, None])
        if sliding_window:
            visible &= k_pos > positions - sliding_window
        for row, of_row in enumerate(masks or ()):
            if any(of_row):
                length = int(kv_lens[row])
                seen = visible_keys(of_row, length, sliding_window).to(device)
                visible[row, :, :length] = seen[begin : begin + chunk]
        visible = visible[:, None]  # [n, 1, q, L]
        part = query[:, :, begin : begin + chunk]
        piece = masked_attention(part, key, value, visible, scale, softcap, sinks)
        pieces.append(piece.masked_fill(~visible.any(-1, keepdim=True), 0))
    return torch.cat(pieces, dim=2).transpose(1, 2)


def visible_keys(masks: Sequence[int], kv_len: int, sliding_window: int = 0) -> Tensor:
    """Which keys the queries of one request see, when its last ones are drafts that make up a tree.

    :param masks: one per query; 0 for a token that is no draft, else bit ``i`` for each draft ``i`` that it sees,
        itself included.
    :param kv_len: keys of the request; the queries are the last of them, in their order.
    :param sliding_window: as for `paged_attention`. Positions count: a draft stands as far behind the request's newest
        token as there are bits in its mask.
    :returns: bool [len(masks), kv_len].
    """
    num_drafts = max(mask.bit_length() for mask in masks)  # the last one's own bit; earlier ones may be no queries
    first = kv_len - num_drafts  # the first draft
    places = torch.arange(kv_len)
    positions = places.clone()
    bits = torch.zeros((len(masks), kv_len), dtype=torch.bool)
    for query, mask in enumerate(masks):
        place = kv_len - len(masks) + query
        if mask:
            positions[place] = first - 1 + mask.bit_count()
            bits[query, :first] = True
            bits[query, [first + i for i in range(num_drafts) if mask >> i & 1]] = True
        else:
            bits[query, : place + 1] = True
    if sliding_window:
        bits &= positions > positions[kv_len - len(masks) :, None] - sliding_window
    return bits


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of dense keys and values; softcap and sinks with the score matrix in memory.

    :param query: [n, Hq, q, D]; key [n, Hkv, L, D], value [n, Hkv, L, Dv].
    :param visible: bool, broadcast to [n, Hq, q, L]: which keys a query sees.
    :returns: [n, Hq, q, Dv], dtype of the query.
    """
    if softcap == 0.0 and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, visible, scale=scale, enable_gqa=True)
    math_dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key = key.to(math_dtype).repeat_interleave(groups, dim=1)
    value = value.to(math_dtype).repeat_interleave(groups, dim=1)
    scores = query.to(math_dtype) @ key.transpose(-1, -2) * scale  # [n, Hq, q, L]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(math_dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs = scores.softmax(dim=-1)
    return (probs @ value).to(query.dtype)
