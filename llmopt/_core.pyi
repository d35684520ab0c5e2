"""Types of the compiled extension. Addresses are what ``tensor.data_ptr()`` gives, strides count elements."""

import numpy as np
import numpy.typing as npt

def isa() -> str:
    """Instruction set the kernels run with; the first call decides it. RuntimeError: ``LLMOPT_ISA`` cannot be served."""

def available_isas() -> list[str]:
    """Instruction sets this machine can run, widest first."""

def parallel_backend() -> str:
    """Where threads come from: ``openmp``, the runtime found in the process, or ``own``."""

def parallel_library() -> str:
    """Path of the library that holds the OpenMP runtime, or an empty string."""

class LayerCache:
    """Addresses and sizes of one layer's cache. The caller keeps the memory alive."""

    def __init__(
        self,
        key: int,
        value: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        head_dim_v: int,
        bfloat16: bool,
        /,
    ) -> None: ...

class StepPlan:
    """The arrays of a step, kept by reference, and the split of its work."""

    def __init__(self) -> None: ...
    def update(
        self,
        block_tables: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        cu_seqlens_q: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take a new step. ValueError: dtype, layout or sizes do not fit."""

def paged_attention(
    plan: StepPlan,
    cache: LayerCache,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    query: int,
    token_stride: int,
    head_stride: int,
    out: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: int,
    num_threads: int,
    /,
) -> None:
    """Attend; ``sinks`` is the address of float32 values or 0. ValueError, IndexError: sizes or block ids do not fit."""

def write_kv(
    plan: StepPlan,
    cache: LayerCache,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    key: int,
    key_token_stride: int,
    key_head_stride: int,
    value: int,
    value_token_stride: int,
    value_head_stride: int,
    num_threads: int,
    /,
) -> None:
    """Store new keys and values in the slots of the plan. ValueError, IndexError: sizes or slots do not fit."""

def argmax_rows(
    rows: int, num_rows: int, size: int, row_stride: int, num_threads: int, /
) -> tuple[list[int], list[float]]:
    """Place and value of the largest float32 of each row; the first NaN where there is one. ValueError: no values."""
