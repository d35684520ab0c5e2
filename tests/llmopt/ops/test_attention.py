"""The native attention op against the torch reference, on random ragged batches."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llmopt import native
from llmopt.ops.attention import PagedAttention, paged_attention, write_kv
from llmopt.ops.quantized_rows import dequantize_rows, quantize_rows, rotate_rows

needs_native = pytest.mark.skipif(native.why_not("auto") is not None, reason=str(native.why_not("auto")))

# float32: different order of additions. bfloat16: against the same inputs in float32; probabilities and outputs are
# rounded to 8 bits of mantissa (2^-9 relative) and the values are of order 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@dataclass(slots=True)
class Case:
    """One step: caches with used blocks in random places, everything else NaN, and the queries."""

    key_cache: Tensor  # [num_blocks, Hkv, S, D]
    value_cache: Tensor  # [num_blocks, Hkv, S, Dv]
    query: Tensor  # [T, Hq, D]
    block_tables: np.ndarray  # [B, M], -1 where nothing may be read
    seq_lens: np.ndarray  # [B]
    cu_seqlens_q: np.ndarray  # [B + 1]

    def quantized(self) -> Case:
        """The same with caches in 8 bits."""
        key, value = quantize_rows(rotate_rows(self.key_cache)), quantize_rows(self.value_cache)
        return replace(self, key_cache=key, value_cache=value)

    def unpacked(self) -> Case:
        """What a quantized case stands for."""
        key = rotate_rows(dequantize_rows(self.key_cache, torch.float64))
        return replace(self, key_cache=key, value_cache=dequantize_rows(self.value_cache, torch.float64))

    def reference(self, **options: object) -> Tensor:
        """The torch reference in float64."""
        return paged_attention(
            self.query.double(),
            self.key_cache.double(),
            self.value_cache.double(),
            torch.from_numpy(self.block_tables),
            torch.from_numpy(self.seq_lens),
            torch.from_numpy(self.cu_seqlens_q),
            **options,  # type: ignore[arg-type]
        )

    def native(self, num_threads: int = 2, **options: object) -> Tensor:
        """The native op."""
        op = PagedAttention.create(
            [self.key_cache],
            [self.value_cache],
            dtype=self.query.dtype,
            native_mode="require",
            num_threads=num_threads,
        )
        op.plan(self.block_tables, self.seq_lens, self.cu_seqlens_q)
        return op(0, self.query, **options)  # type: ignore[arg-type]


def make_case(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    head_dim_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    blocks_of = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(blocks_of) + 3
    ids = iter(rng.permutation(num_blocks))
    block_tables = np.full((len(kv_lens), max(blocks_of, default=0) + 1), -1, np.int32)
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    value_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim_v), float("nan"), dtype=dtype)
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = max(0, kv_len - q_len - window + 1) if window else 0
        for block in range(first // block_size, blocks_of[b]):  # blocks before the window are free: the table keeps -1
            block_tables[b, block] = next(ids)
        positions = np.arange(first, kv_len)
        blocks, offsets = block_tables[b, positions // block_size], positions % block_size
        for cache in (key_cache, value_cache):
            rows = torch.randn(len(positions), num_kv_heads, cache.shape[3], generator=generator)
            cache[blocks, :, offsets] = rows.to(dtype)
    # As transformers hands queries over: [1, Hq, T, D] transposed.
    query = torch.randn(num_heads, sum(q_lens), head_dim, generator=generator).to(dtype).transpose(0, 1)
    cu_seqlens_q = np.cumsum([0, *q_lens]).astype(np.int32)
    return Case(key_cache, value_cache, query, block_tables, np.array(kv_lens, np.int32), cu_seqlens_q)


def assert_close(case: Case, out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


DTYPES = [torch.float32, torch.bfloat16]
RAGGED = ([1, 7, 1, 40, 3, 1], [1, 7, 33, 90, 60, 300])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3), (8, 1), (5, 5), (14, 2)])
def test_native_equals_reference_for_head_counts_and_block_sizes(heads, block_size, dtype) -> None:
    case = make_case(*RAGGED, heads=heads, block_size=block_size, dtype=dtype)
    assert_close(case, case.native(scale=0.125), case.reference(scale=0.125))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (8, 8),
        (5, 3),
        (1, 1),
        (17, 31),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (64, 40),
        (33, 512),
    ],
)
def test_native_equals_reference_for_head_sizes(head_dim, head_dim_v, dtype) -> None:
    case = make_case(*RAGGED, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    scale = head_dim**-0.5
    assert_close(case, case.native(scale=scale), case.reference(scale=scale))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 5, 33, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_native_equals_reference_for_window_softcap_and_sinks(window, softcap, with_sinks, dtype) -> None:
    case = make_case(*RAGGED, dtype=dtype, window=window)
    sinks = torch.linspace(-3, 3, 6).to(dtype) if with_sinks else None
    options = {"scale": 0.2, "sliding_window": window, "softcap": softcap, "sinks": sinks}
    assert_close(case, case.native(**options), case.reference(**options))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 2000), (2, 1537), (16, 5000), (300, 700), (257, 257)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_long_contexts_split_over_threads_give_the_same(q_len, kv_len, num_threads, dtype) -> None:
    case = make_case([q_len], [kv_len], heads=(3, 1), dtype=dtype)
    out = case.native(scale=0.125, num_threads=num_threads)
    assert_close(case, out, case.reference(scale=0.125))
    assert torch.equal(out, case.native(scale=0.125, num_threads=1))


@needs_native
def test_a_request_computes_the_same_bits_alone_and_in_a_batch() -> None:
    case = make_case([1, 5, 30, 1], [700, 40, 900, 3000])
    together = case.native(scale=0.125)
    for b, (begin, end) in enumerate(itertools.pairwise(case.cu_seqlens_q.tolist())):
        alone = Case(
            case.key_cache,
            case.value_cache,
            case.query[begin:end],
            case.block_tables[b : b + 1],
            case.seq_lens[b : b + 1],
            np.array([0, end - begin], np.int32),
        )
        assert torch.equal(alone.native(scale=0.125), together[begin:end])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)])
@pytest.mark.parametrize("q_len", [2, 20])
def test_rows_that_see_no_key_give_zeros(q_len, sinks, dtype) -> None:
    # One key and several queries: only the last query has a position that is not negative.
    case = make_case([q_len, 1, 3], [1, 0, 5], dtype=dtype)
    out = case.native(scale=0.125, sinks=sinks)
    assert torch.equal(out[: q_len - 1], torch.zeros_like(out[: q_len - 1]))
    assert torch.equal(out[q_len], torch.zeros_like(out[q_len]))
    assert out[q_len - 1].abs().sum() > 0
    assert_close(case, out, case.reference(scale=0.125, sinks=sinks))


@needs_native
def test_rows_past_the_last_request_give_zeros() -> None:
    case = make_case([2, 1], [5, 9])
    case.query = torch.cat([case.query, torch.ones(4, 6, 64)])
    for out in (case.native(scale=0.125), case.reference(scale=0.125)):
        assert torch.equal(out[3:], torch.zeros_like(out[3:]))


@needs_native
def test_a_nan_in_a_visible_key_is_seen_in_the_output() -> None:
    case = make_case([1, 1, 30], [40, 40, 60])
    case.key_cache[int(case.block_tables[0, 1]), 0, 3, 7] = float("nan")
    case.value_cache[int(case.block_tables[2, 0]), 1, 0, 0] = float("nan")
    out = case.native(scale=0.125)
    assert out[0, :3].isnan().all()
    assert not out[0, 3:].isnan().any()
    assert not out[1].isnan().any()
    assert out[2:, 3:, 0].isnan().all()


@needs_native
def test_scores_of_large_magnitude_do_not_overflow() -> None:
    case = make_case([1, 30], [400, 60])
    case.query *= 1e4
    assert_close(case, case.native(scale=1.0), case.reference(scale=1.0))


@needs_native
@pytest.mark.parametrize("seed", range(30))
def test_native_equals_reference_on_random_shapes(seed) -> None:
    rng = np.random.default_rng(1000 + seed)
    num_requests = int(rng.integers(1, 9))
    q_lens = [int(rng.choice([1, 1, 2, 5, int(rng.integers(1, 200))])) for _ in range(num_requests)]
    kv_lens = [q + int(rng.choice([0, 1, int(rng.integers(0, 600))])) for q in q_lens]
    num_kv_heads = int(rng.integers(1, 5))
    window = int(rng.choice([0, 0, int(rng.integers(1, 100))]))
    case = make_case(
        q_lens,
        kv_lens,
        heads=(num_kv_heads * int(rng.integers(1, 10)), num_kv_heads),
        head_dim=int(rng.choice([16, 64, 72, 128, int(rng.integers(1, 300))])),
        head_dim_v=int(rng.choice([16, 64, 72, 128, int(rng.integers(1, 300))])),
        block_size=int(rng.choice([1, 4, 16, 32, int(rng.integers(1, 70))])),
        dtype=DTYPES[seed % 2],
        window=window,
        seed=seed,
    )
    options = {"scale": 0.1, "sliding_window": window}
    assert_close(case, case.native(**options), case.reference(**options))


@needs_native
@pytest.mark.parametrize("seed", range(30))
def test_native_equals_reference_on_random_shapes_in_8_bits(seed) -> None:
    rng = np.random.default_rng(2000 + seed)
    q_lens = [int(rng.choice([1, 1, 2, 5, int(rng.integers(1, 200))])) for _ in range(int(rng.integers(1, 7)))]
    kv_lens = [q + int(rng.choice([0, 1, int(rng.integers(0, 1500))])) for q in q_lens]
    num_kv_heads, window = int(rng.integers(1, 5)), int(rng.choice([0, 0, int(rng.integers(1, 100))]))
    case = make_case(
        q_lens,
        kv_lens,
        heads=(num_kv_heads * int(rng.integers(1, 10)), num_kv_heads),
        head_dim=int(rng.choice([32, 64, 72, 128, int(rng.integers(1, 300))])),
        head_dim_v=int(rng.choice([32, 64, 72, 128, int(rng.integers(1, 300))])),
        block_size=int(rng.choice([1, 16, 32, int(rng.integers(1, 70))])),
        dtype=DTYPES[seed % 2],
        window=window,
        seed=seed,
    ).quantized()
    options = {"scale": 0.1, "sliding_window": window}
    assert_close(case, case.native(**options), case.unpacked().reference(**options))


@pytest.mark.parametrize("native_mode", ["require", "off"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_and_attending_in_8_bits_is_close_to_doing_so_in_full_precision(native_mode, dtype) -> None:
    if native_mode == "require" and native.why_not("auto") is not None:
        pytest.skip(str(native.why_not("auto")))
    num_tokens, heads, size = 90, 2, 48
    key, value = torch.randn(2, num_tokens, heads, size).to(dtype)
    query = torch.randn(num_tokens, 4, size).to(dtype)
    table = np.array([[4, 1, 0, 5, 2, 3]], np.int32)
    slots = (table[0, :, None].astype(np.int64) * 16 + np.arange(16)).flatten()
    found = []
    for width, stored in ((size, dtype), (size + 2, torch.int8)):
        caches = [torch.zeros(6, heads, 16, width, dtype=stored) for _ in range(2)]
        op = PagedAttention.create(caches[:1], caches[1:], dtype=dtype, native_mode=native_mode)
        op.plan(
            table,
            np.array([num_tokens], np.int32),
            np.array([0, num_tokens], np.int32),
            slots[:num_tokens],
        )
        op.write(0, key, value)
        found.append(op(0, query, scale=size**-0.5).double())
    assert found[1].dtype == found[0].dtype
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < error < 0.02


def test_caches_in_8_bits_need_the_dtype_of_attention() -> None:
    cache = torch.zeros(3, 2, 4, 10, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"caches are torch\.int8 and attention is to be in torch\.int8"):
        PagedAttention.create([cache], [cache.clone()])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("native_mode", ["require", "off"])
def test_write_stores_tokens_in_their_slots_and_leaves_the_rest(native_mode, block_size, dtype) -> None:
    num_blocks, num_kv_heads, head_dim, head_dim_v, num_tokens = 9, 3, 40, 24, 7
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), -77.0, dtype=dtype)
    value_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim_v), -77.0, dtype=dtype)
    key = torch.randn(num_kv_heads, num_tokens, head_dim).to(dtype).transpose(0, 1)
    value = torch.randn(num_tokens + 2, num_kv_heads, head_dim_v).to(dtype)  # two padding tokens behind the slots
    key = torch.cat([key, key[:2]])
    slots = np.random.default_rng(0).permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slots[2] = -1
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_key[slot // block_size, :, slot % block_size] = key[token]
            expected_value[slot // block_size, :, slot % block_size] = value[token]

    op = PagedAttention.create([key_cache], [value_cache], native_mode=native_mode)
    empty = np.zeros((0, 0), np.int32)
    op.plan(empty, np.zeros(0, np.int32), np.zeros(1, np.int32), slots)
    op.write(0, key, value)
    assert torch.equal(key_cache, expected_key)
    assert torch.equal(value_cache, expected_value)


@needs_native
def test_large_write_on_several_threads_equals_reference() -> None:
    key, value = torch.randn(3, 2000, 64).transpose(0, 1), torch.randn(2000, 3, 64)
    slots = np.random.default_rng(0).permutation(200 * 16)[:2000].astype(np.int64)
    caches = [torch.zeros(200, 3, 16, 64) for _ in range(4)]
    op = PagedAttention.create(caches[:1], caches[1:2], native_mode="require", num_threads=2)
    op.plan(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32), slots)
    op.write(0, key, value)
    write_kv(key, value, caches[2], caches[3], torch.from_numpy(slots))
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@needs_native
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def test_every_instruction_set_of_this_machine_equals_reference(isa) -> None:
    core = native.core("auto")
    assert core is not None
    if isa not in core.available_isas():
        pytest.skip(f"this machine has no {isa}")
    if "LLMOPT_ISA" in os.environ:
        pytest.skip("the instruction set is already forced")
    selected = "head_counts or head_sizes or window_ or long_contexts or random_shapes or no_key or nan or magnitude"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", selected],
        env={**os.environ, "LLMOPT_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


def plan_arguments(**changed: np.ndarray) -> dict[str, np.ndarray]:
    arguments = {
        "block_tables": np.zeros((2, 3), np.int32),
        "seq_lens": np.array([5, 9], np.int32),
        "cu_seqlens_q": np.array([0, 2, 3], np.int32),
        "slot_mapping": np.arange(3),
    }
    return {**arguments, **changed}


def native_op(num_blocks: int = 3, dtype: torch.dtype = torch.float32) -> PagedAttention:
    cache = torch.zeros(num_blocks, 2, 4, 8, dtype=dtype)
    return PagedAttention.create([cache], [cache.clone()], native_mode="require")


@needs_native
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_lens": np.array([5, 9])}, "seq_lens must be a contiguous int32 array.*int64"),
        ({"block_tables": np.zeros((1, 3), np.int32)}, "block_tables has 1 rows, seq_lens has 2"),
        ({"cu_seqlens_q": np.array([0, 3], np.int32)}, "cu_seqlens_q has 2 entries, seq_lens has 2"),
        ({"cu_seqlens_q": np.array([0, 3, 2], np.int32)}, "cu_seqlens_q falls from 3 to 2"),
        ({"slot_mapping": np.arange(3, dtype=np.int32)}, "slot_mapping must be a contiguous int64 array.*int32"),
        ({"block_tables": np.zeros((2, 6), np.int32)[:, ::2]}, "rows of block_tables must be contiguous"),
    ],
)
def test_a_plan_of_arrays_that_do_not_fit_is_refused(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        native_op().plan(**plan_arguments(**changed))


@needs_native
def test_a_refused_plan_leaves_the_earlier_one() -> None:
    op = native_op()
    op.plan(**plan_arguments())
    with pytest.raises(ValueError):
        op.plan(**plan_arguments(cu_seqlens_q=np.array([1, 2, 3], np.int32)))
    assert op(0, torch.zeros(3, 4, 8), scale=1.0).shape == (3, 4, 8)


@needs_native
def test_the_plan_keeps_its_arrays_alive() -> None:
    op = native_op()
    op.plan(**plan_arguments())
    rubbish = [np.full((2, 3), -9, np.int32) for _ in range(50)]
    assert op(0, torch.zeros(3, 4, 8), scale=1.0).isfinite().all()
    assert len(rubbish) == 50


@needs_native
def test_block_tables_may_be_a_view_of_a_larger_array() -> None:
    case = make_case([3, 1], [40, 90])
    wide = np.full((5, 30), -5, np.int32)
    wide[:2, : case.block_tables.shape[1]] = case.block_tables
    case.block_tables = wide[:2, : case.block_tables.shape[1]]
    assert_close(case, case.native(scale=0.1), case.reference(scale=0.1))


@needs_native
def test_sizes_that_do_not_fit_the_cache_are_refused_with_both_sides() -> None:
    op = native_op()
    op.plan(**plan_arguments())
    with pytest.raises(ValueError, match="head_dim 7, the key cache has 8"):
        op(0, torch.zeros(3, 4, 7), scale=1.0)
    with pytest.raises(ValueError, match="3 heads, the key cache has 2"):
        op(0, torch.zeros(3, 3, 8), scale=1.0)
    with pytest.raises(ValueError, match="2 tokens, the plan has 3"):
        op(0, torch.zeros(2, 4, 8), scale=1.0)
    with pytest.raises(ValueError, match=r"torch\.float64 but attention is in torch\.float32"):
        op(0, torch.zeros(3, 4, 8, dtype=torch.float64), scale=1.0)
    with pytest.raises(ValueError, match="negative"):
        op(0, torch.zeros(3, 4, 8), scale=-1.0)
    with pytest.raises(ValueError, match="sinks has 3 values but the query has 4 heads"):
        op(0, torch.zeros(3, 4, 8), scale=1.0, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="slot_mapping has 3 slots, there are 2 new tokens"):
        op.write(0, torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
    with pytest.raises(ValueError, match="the cache has"):
        op.write(0, torch.zeros(3, 1, 8), torch.zeros(3, 1, 8))


@needs_native
def test_a_block_or_slot_outside_of_the_cache_is_refused() -> None:
    op = native_op()
    op.plan(**plan_arguments(block_tables=np.array([[0, 1, -1], [0, 3, 1]], np.int32)))
    with pytest.raises(IndexError, match=r"block_tables\[1, 1\] is 3, the cache has blocks 0 to 2"):
        op(0, torch.zeros(3, 4, 8), scale=1.0)
    op.plan(**plan_arguments(slot_mapping=np.array([0, 12, 1])))
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] is 12, the cache has slots 0 to 11"):
        op.write(0, torch.zeros(3, 2, 8), torch.zeros(3, 2, 8))


@needs_native
def test_a_query_whose_last_dimension_is_strided_is_copied() -> None:
    case = make_case([3, 1], [40, 90])
    out = case.native(scale=0.1)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert case.query.stride(-1) != 1
    assert torch.equal(case.native(scale=0.1), out)


def test_reference_serves_float16_and_says_why_native_does_not() -> None:
    case = make_case([3, 1, 5], [40, 9, 5])
    caches = (case.key_cache.half(), case.value_cache.half())
    op = PagedAttention.create([caches[0]], [caches[1]], native_mode="auto")
    assert op.why_reference is not None
    op.plan(case.block_tables, case.seq_lens, case.cu_seqlens_q)
    out = op(0, case.query.half(), scale=0.125)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), case.reference(scale=0.125), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 6])
def test_reference_equals_attention_written_out(window, softcap) -> None:
    case = make_case([3, 1, 9], [20, 9, 9], head_dim=16, window=window)
    out = case.reference(scale=0.3, sliding_window=window, softcap=softcap)
    for b, (begin, end) in enumerate(itertools.pairwise(case.cu_seqlens_q.tolist())):
        for token in range(begin, end):
            position = int(case.seq_lens[b]) - end + token
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            places = [(int(case.block_tables[b, p // 16]), p % 16) for p in seen]
            key = torch.stack([case.key_cache[block, :, offset] for block, offset in places]).double()  # [L, Hkv, D]
            value = torch.stack([case.value_cache[block, :, offset] for block, offset in places]).double()
            for head in range(6):
                scores = key[:, head // 3] @ case.query[token, head].double() * 0.3
                scores = (scores / softcap).tanh() * softcap if softcap else scores
                expected = scores.softmax(0) @ value[:, head // 3]
                torch.testing.assert_close(out[token, head], expected)


def test_caches_that_do_not_fit_together_are_refused() -> None:
    cache = torch.zeros(3, 2, 4, 8)
    with pytest.raises(ValueError, match="1 key caches and 0 value caches"):
        PagedAttention.create([cache], [])
    with pytest.raises(ValueError, match="must both be"):
        PagedAttention.create([cache], [torch.zeros(3, 2, 5, 8)])
    with pytest.raises(ValueError, match="must agree"):
        PagedAttention.create([cache], [cache.bfloat16()])
    with pytest.raises(ValueError, match="contiguous"):
        PagedAttention.create([cache], [torch.zeros(2, 3, 4, 8).transpose(0, 1)])


@needs_native
def test_requiring_native_for_a_dtype_it_does_not_serve_raises() -> None:
    with pytest.raises(ValueError, match=r"LLMOPT_NATIVE=require, but .*float16"):
        native_op(dtype=torch.float16)


@needs_native
def test_threads_come_from_the_openmp_runtime_of_torch() -> None:
    core = native.core("require")
    assert core is not None
    assert core.parallel_backend() == "openmp"
    assert "torch" in core.parallel_library()
