"""Types of the compiled extension. Addresses are what ``tensor.data_ptr()`` gives, strides count elements."""

import enum
from collections.abc import Sequence

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

class SuffixAutomaton:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def extend(self, tokens: npt.NDArray[np.int64]) -> None: ...
    def draft(
        self, tokens: npt.NDArray[np.int64], num_tokens: int, count: int, min_length: int
    ) -> tuple[int, list[int]]: ...
    def draft_for(
        self, tokens: npt.NDArray[np.int64], num_tokens: int, count: int, min_length: int, max_length: int
    ) -> tuple[int, list[int]]: ...

class BlockPool:
    """States of KV blocks: held, unused, or kept for their content. Keys have 16 bytes.

    AssertionError: a call that the state does not allow.
    """

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_unused(self) -> int: ...
    @property
    def num_kept(self) -> int: ...
    @property
    def num_keys(self) -> int: ...
    @property
    def ref_counts(self) -> npt.NDArray[np.int32]:
        """A view: ``[num_blocks]``."""

    def allocate(self, count: int, /) -> list[int]: ...
    def evict(self, count: int, /) -> tuple[list[int], list[bytes]]: ...
    def share(self, blocks: Sequence[int], /) -> None: ...
    def free(self, blocks: Sequence[int], /) -> None: ...
    def sort_unused(self) -> None: ...
    def set_key(self, block: int, key: bytes, /) -> bool: ...
    def drop_key(self, block: int, /) -> None: ...
    def key_of(self, block: int, /) -> bytes | None: ...
    def find(self, keys: bytes, /) -> list[int]: ...
    def unused(self) -> list[int]: ...
    def kept(self) -> list[int]: ...
    def error(self) -> str: ...

class PrefixIndex:
    """What the kept blocks of a pool hold. Keys have 16 bytes, digests 32; ids are token ids.

    AssertionError: a call that the state of the pool does not allow. ValueError: sizes do not fit.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None: ...
    @property
    def num_collisions(self) -> int: ...
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A view: ``[num_blocks, block_size]``, -1 behind the end of a part."""

    @property
    def digests(self) -> npt.NDArray[np.uint8]:
        """A view: ``[num_blocks, 32]``."""

    @property
    def is_durable(self) -> npt.NDArray[np.bool_]:
        """A view: ``[num_blocks]``."""

    @property
    def serials(self) -> npt.NDArray[np.int64]:
        """A view: ``[num_blocks]``, 0 for blocks that are not entered."""

    @property
    def parents(self) -> npt.NDArray[np.int64]:
        """A view: ``[num_blocks]``, the serial number of what a block follows."""

    def new_serial(self) -> int: ...
    def hash_blocks(self, last: bytes, ids: npt.NDArray[np.int64], /) -> bytes: ...
    def match(self, root: int, keys: bytes, ids: npt.NDArray[np.int64], /) -> list[int]: ...
    def match_part(self, serial: int, ids: npt.NDArray[np.int64], /) -> tuple[int, int]: ...
    def enter(
        self,
        blocks: Sequence[int],
        ids: npt.NDArray[np.int64],
        keys: bytes,
        digests: bytes,
        serial: int,
        is_durable: bool,
        /,
    ) -> tuple[int, int]: ...
    def enter_part(self, block: int, ids: npt.NDArray[np.int64], key: bytes, serial: int, /) -> None: ...
    def forget(self, blocks: Sequence[int], /) -> None: ...
    def followers(self, serial: int, /) -> list[int]: ...

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
        num_drafts: npt.NDArray[np.int32] | None = None,
        draft_masks: npt.NDArray[np.uint64] | None = None,
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

class TokenMover:
    """Moves the keys and values of single tokens to other places of a pool.

    :param tensors: address, blocks, heads and bytes per row of each tensor ``[num_blocks, num_heads, block_size]``.
        Their memory must outlive this object. ValueError: a number that is not positive.
    """

    def __init__(self, tensors: list[tuple[int, int, int, int]], block_size: int, /) -> None: ...
    def move(self, sources: list[int], targets: list[int], /) -> None:
        """Copy tokens in this order. ValueError, IndexError: the lists differ, or a place does not exist."""

def plant_trees(
    token_ids: npt.NDArray[np.int64],
    num_draft: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int32] | None,
    vocab_size: int,
    masks: npt.NDArray[np.uint64] | None,
    depths: npt.NDArray[np.int64] | None,
    /,
) -> int:
    """Fill masks and depths, ``[B, num_draft]`` like the others. Returns 0 for chains, 1 for trees, 2 for drafts that
    cannot run. ValueError: arrays that do not fit together."""

class DraftPacker:
    """Puts drafts behind a batch of decodes.

    Looks at the arrays of the batch, and writes to those of the batch with drafts; all are contiguous and hold ``R``
    rows or more, and 65 tokens for each in the arrays of tokens. ValueError: one is too small.
    """

    def __init__(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        packed_ids: npt.NDArray[np.int64],
        packed_positions: npt.NDArray[np.int64],
        packed_slots: npt.NDArray[np.int64],
        packed_masks: npt.NDArray[np.uint64],
        num_scheduled: npt.NDArray[np.int32],
        packed_lens: npt.NDArray[np.int32],
        cu_seqlens_q: npt.NDArray[np.int32],
        block_size: int,
        /,
    ) -> None: ...
    def pack(
        self,
        table_width: int,
        rooms: list[int],
        vocab_size: int,
        allows_trees: bool,
        token_ids: object,
        num_draft: object,
        parents: object,
        /,
    ) -> tuple[int, list[int]]:
        """Pack drafts behind the first ``len(rooms)`` rows.

        :param table_width: columns of the block tables that are in use.
        :param rooms: drafts that each row may have.
        :param token_ids: an array ``[B, num_draft]`` int64, and the others as in `llmopt.batch.DraftTokens`.
        :returns: 0 for chains, whose masks are not written, or 1 for trees, and the number of drafts of each row.
            2 and nothing: these drafts cannot run, or only another way.
        """

def argmax_rows(
    rows: int, num_rows: int, size: int, row_stride: int, num_threads: int, places: list[int] = ...
) -> tuple[list[int], list[float]]:
    """Place and value of the largest float32 of each row; the first NaN where there is one.

    :param places: those rows alone. ValueError: no values. IndexError: a place that is no row.
    """

class WeightFormat(enum.Enum):
    """How a packed matrix stores its values."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_GROUP = 3
    INT4_GROUP = 4

class SourceType(enum.Enum):
    """Element type of dense weights that can be packed."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

class Activation(enum.Enum):
    """Function between the matrices of an MLP."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    RELU_SQUARED = 5

class NormKind(enum.Enum):
    """RMS norm, layer norm, or nothing."""

    NONE = 0
    RMS = 1
    LAYER = 2

class RouterKind(enum.Enum):
    """How the logits of a router become the weights of experts."""

    SOFTMAX_THEN_TOP = 0
    TOP_THEN_SOFTMAX = 1

class MatrixShape:
    """What a packed matrix is, without its bytes. y = x W^T, W is [num_outputs, num_inputs]."""

    format: WeightFormat
    num_outputs: int
    num_inputs: int
    group_size: int  # grouped formats: values that share a scale
    has_minimum: bool  # INT4_GROUP: w = scale * q + minimum

    def __init__(
        self,
        format: WeightFormat = ...,
        num_outputs: int = 0,
        num_inputs: int = 0,
        group_size: int = 0,
        has_minimum: bool = False,
    ) -> None: ...
    @property
    def num_panels(self) -> int:
        """Panels of 16 outputs."""

    def __eq__(self, other: object, /) -> bool: ...

class PackedMatrix:
    """A shape and the address of its bytes, aligned to 64. The caller keeps the memory alive."""

    def __init__(self, shape: MatrixShape = ..., address: int = 0) -> None: ...
    @property
    def shape(self) -> MatrixShape: ...
    @property
    def address(self) -> int: ...

def padded_inputs(shape: MatrixShape) -> int:
    """``num_inputs`` with its padding."""

def panel_bytes(shape: MatrixShape) -> int:
    """Bytes of 16 outputs, a multiple of 64. ValueError: a shape that no kernel reads."""

def packed_bytes(shape: MatrixShape) -> int:
    """Bytes of the whole matrix. ValueError: a shape that no kernel reads."""

def fingerprint(address: int, num_bytes: int, num_threads: int) -> int:
    """64 bits that are the same for the same bytes, wherever they lie and with any number of threads."""

def pack_panels(
    shape: MatrixShape,
    row_addresses: npt.NDArray[np.int64],
    element_stride: int,
    source_type: SourceType,
    out_address: int,
    num_threads: int,
    first_panel: int = 0,
) -> None:
    """Pack rows of W, 16 to a panel, from ``first_panel`` on; ``out_address`` is where panel 0 lies.

    :param row_addresses: where each row begins; 0 is a row of zeros. Fewer than all rows pack a part of the matrix.
    :param element_stride: elements from one value of a row to the next: 1, or num_outputs for a transposed weight.
    :raises ValueError: a shape that no kernel reads, or more rows than panels.
    """

def pack_gguf_panels(
    shape: MatrixShape,
    type: int,
    panels: npt.NDArray[np.int64],
    row_addresses: npt.NDArray[np.int64],
    out_address: int,
    num_threads: int,
) -> None:
    """Pack rows of a quantized tensor of a GGUF file into panels, values as they are.

    :param type: number of the tensor's type in the file; its blocks must be those of ``shape``.
    :param panels: ``[P]`` numbers of the panels to write, counted from ``out_address``.
    :param row_addresses: ``[P * 16]`` where the rows lie; 0: a row of zeros.
    :raises ValueError: a type that is not read, or that is not the form of ``shape``.
    """

def dequantize_gguf_rows(
    type: int, row_addresses: npt.NDArray[np.int64], num_inputs: int, out_address: int, num_threads: int
) -> None:
    """Rows of a tensor of a GGUF file as float32, ``[rows, num_inputs]`` at ``out_address``."""

def unpack_rows(matrix: PackedMatrix, rows: npt.NDArray[np.int64], out_address: int) -> None:
    """Rows of W as float32 [len(rows), num_inputs] at ``out_address``. IndexError: no such row."""

class LinearTuning:
    """Thresholds of the matrix products, one object per process."""

    tile_rows_bf16: int  # from so many rows on: tiles instead of dot products
    tile_rows_int8: int
    tile_rows_group: int
    unpack_rows: int
    prefetch_bytes: int  # how far ahead of the reading a panel is fetched

def linear_tuning() -> LinearTuning:
    """The thresholds in use; change them before the first step."""

class NormSpec:
    """A norm; ``weight`` and ``bias`` are addresses of float32, 0 for none."""

    kind: NormKind
    weight: int
    bias: int
    epsilon: float

    def __init__(self, kind: NormKind = ..., weight: int = 0, bias: int = 0, epsilon: float = 0.0) -> None: ...

class LinearSpec:
    """A matrix and the address of its float32 bias in the order of the packed columns, 0 for none."""

    weight: PackedMatrix
    bias: int

    def __init__(self, weight: PackedMatrix = ..., bias: int = 0) -> None: ...

class RopeTable:
    """Addresses of float32 cos and sin [num_positions, rotary_dim / 2]."""

    cos: int
    sin: int
    num_positions: int
    rotary_dim: int
    is_interleaved: bool  # pairs 2i with 2i + 1 instead of i with i + rotary_dim / 2

    def __init__(
        self, cos: int = 0, sin: int = 0, num_positions: int = 0, rotary_dim: int = 0, is_interleaved: bool = False
    ) -> None: ...

class AttentionSpec:
    """Attention of a layer; the fields of csrc/include/llmopt/decoder_spec.h."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearSpec
    output: LinearSpec
    q_norm: NormSpec
    k_norm: NormSpec
    norm_spans_heads: bool
    rope: int
    scale: float
    softcap: float
    sliding_window: int

    def __init__(self) -> None: ...

class MlpSpec:
    """An MLP, or an expert."""

    up: LinearSpec
    down: LinearSpec
    activation: Activation
    is_gated: bool

    def __init__(self) -> None: ...

class MoeSpec:
    """Experts; a list is copied on access, so assign it whole."""

    router: LinearSpec
    kind: RouterKind
    num_top: int
    norm_top: bool
    experts: list[MlpSpec]

    def __init__(self) -> None: ...

class LayerSpec:
    """One layer: x += norm_after(f(norm_before(x))) * residual_scale, for attention and then the MLP."""

    before_attention: NormSpec
    after_attention: NormSpec
    before_mlp: NormSpec
    after_mlp: NormSpec
    attention: AttentionSpec
    mlp: MlpSpec
    moe: MoeSpec

    def __init__(self) -> None: ...

class DecoderSpec:
    """A whole model; lists are copied on access, so assign them whole."""

    hidden_size: int
    vocab_size: int
    embedding: PackedMatrix
    embedding_scale: float
    position_embedding: int  # address of float32 [num_positions, hidden_size], 0 for none
    num_positions: int
    embedding_norm: NormSpec
    ropes: list[RopeTable]
    layers: list[LayerSpec]
    residual_scale: float
    final_norm: NormSpec
    head: LinearSpec
    logit_scale: float
    logit_softcap: float

    def __init__(self) -> None: ...

class ThreadTeam:
    """Threads that meet at barriers; the caller of a step is one of them."""

    def __init__(self, num_threads: int, cpus: Sequence[int] = (), pin: bool = True, spin_us: int = 200) -> None: ...
    @property
    def size(self) -> int: ...

class Decoder:
    """One forward of a whole decoder per call. Not safe for two callers at once."""

    is_profiling: bool  # switching on starts from zero

    def __init__(self, spec: DecoderSpec, caches: Sequence[LayerCache], team: ThreadTeam) -> None:
        """Copies the spec, not the memory its addresses name. ValueError: sizes that do not fit together."""

    def step(
        self,
        plan: StepPlan,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_indices: npt.NDArray[np.int64],
        logits_address: int = 0,
        want_best: bool = False,
        banned_rows: npt.NDArray[np.int64] | None = None,
        banned_ids: npt.NDArray[np.int64] | None = None,
    ) -> tuple[list[int], list[float]] | None:
        """Run the tokens of a plan that has been updated for this step.

        :param logits_indices: packed tokens whose logits are wanted, ascending.
        :param logits_address: float32 [len(logits_indices), vocab_size] to fill, or 0.
        :param want_best: return the place and value of each row's largest logit; of its first NaN where there is one.
        :param banned_rows: rows of logits in which the token of ``banned_ids`` at the same place may not be chosen: its
            logit becomes -inf. Ids outside the vocabulary do no harm.
        :raises IndexError: a row, token id, position, slot or block that does not exist; nothing is written then.
        :raises ValueError: arrays that do not fit together.
        """

    def draft_step(
        self,
        plan: StepPlan,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_indices: npt.NDArray[np.int64],
        features_address: int = 0,
        states_address: int = 0,
        states_out_address: int = 0,
        top: int = 0,
        top_ids_address: int = 0,
        top_log_probs_address: int = 0,
    ) -> None:
        """The same for a decoder that drafts, which reads hidden states: ``features`` of the target or own ``states``.

        :param states_out_address: float32 [len(logits_indices), hidden_size] to fill: what the next level reads.
        :param top: best tokens of each row, into int32 and float32 [len(logits_indices), top]; 0: none.
        """

    def profile(self) -> dict[str, float]:
        """Seconds per phase since `is_profiling` was switched on."""

class FeatureRows:
    """Hidden states of some tokens, copied out of a step's memory."""

    def __init__(
        self, hidden_address: int, num_tokens: int, num_layers: int, size: int, rows: list[int], taps: list[int]
    ) -> None:
        """Layers ``taps`` of the tokens ``rows`` of float32 [num_tokens, num_layers, size]. IndexError: not there."""

    def __len__(self) -> int: ...

class TreeSearch:
    """Draft trees of several requests, grown on a decoder that drafts. Not safe for two callers at once."""

    num_levels: int  # of the last search

    def __init__(self, decoder: Decoder, target_ids: list[int]) -> None:
        """:param target_ids: of each token of the head. ValueError: not one for each."""

    def run(
        self,
        block_tables: list[list[int]],
        num_pairs: list[int],
        lengths: list[int],
        token_ids: list[int],
        positions: list[int],
        features: list[FeatureRows],
        block_size: int,
        width: int,
        depth: int,
        counts: list[int],
        least_gain: float = 0.0,
        least_chance: float = 0.0,
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """Store the new pairs and grow the trees. The parameters are those of ``csrc/include/llmopt/tree_search.h``.

        :returns: of each request the tokens, parents and logs of chances of its likeliest nodes, likeliest first.
        :raises ValueError: inputs that do not fit together. IndexError: a token, position or block that does not exist.
        """

class BandwidthProbe:
    """Memory that is read again and again. ValueError: no bytes or no CPUs; MemoryError: no memory."""

    def __init__(self, max_bytes: int, cpus: list[int]) -> None: ...
    def measure(self, num_bytes: int, num_threads: int, seconds: float) -> float:
        """Bytes per second of the fastest pass. ValueError: more bytes or threads than were announced."""

def peak_kinds() -> list[str]:
    """Kinds of arithmetic the selected instruction set has: ``float32``, ``bfloat16_dot``, ``bfloat16_tile``, ``int8_dot``, ``int8_tile``."""

def measure_peak(kind: str, cpus: list[int], seconds: float) -> float:
    """Operations per second, one thread per CPU id; a multiplication and an addition are two. ValueError: unknown kind."""
