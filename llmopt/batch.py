"""The data of one step: what is scheduled, drafted, accepted, and what came out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.request import Request

NO_IDS = np.empty(0, dtype=np.int64)
NO_MASKS = np.empty(0, dtype=np.uint64)
MAX_DRAFTS = 64  # of one row and step: a bit of its masks each

_ARRAYS = (
    "num_scheduled",
    "token_ids",
    "positions",
    "cu_seqlens_q",
    "seq_lens",
    "block_tables",
    "slot_mapping",
    "logits_indices",
    "slots",
    "num_drafts",
    "draft_masks",
    "banned_rows",
    "banned_ids",
)


@dataclass(slots=True)
class Batch:
    """The tokens of one forward, packed and ragged.

    Row ``b`` owns tokens ``cu_seqlens_q[b] : cu_seqlens_q[b+1]`` of the packed arrays::

        token_ids      | a5 a6 a7 | b9 | c0 c1 c2 c3 |      T = 8 tokens, B = 3 requests
        cu_seqlens_q   0          3    4             8
        seq_lens       8, 10, 4                            KV length after this step
        logits_indices 2, 3, 7                             tokens whose logits are wanted

    Drafts are the last tokens of a row. Draft ``i`` lies in place ``seq_lens[b] - num_drafts[b] + i`` of the row's KV,
    whatever it follows. In a chain that is also its position. In a tree it stands ``depth`` behind the row's newest
    token, and ``draft_masks`` say which drafts of the row it sees: those on the path to it, itself included. Their
    number is its depth.

    Arrays are views of buffers that are reused: a batch is valid until the next one is scheduled. `to_bytes` holds
    everything that another rank needs to run the same forward; ``requests`` stays with the scheduler.
    """

    request_ids: list[str]
    num_scheduled: np.ndarray  # [B] int32, tokens of each request in this step, drafts included
    token_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    cu_seqlens_q: np.ndarray  # [B+1] int32
    seq_lens: np.ndarray  # [B] int32
    block_tables: np.ndarray  # [B, M] int32, M is the longest table; unused entries are 0
    slot_mapping: np.ndarray  # [T] int64, block * block_size + offset; -1: not stored
    logits_indices: np.ndarray  # [R] int64 into the packed tokens
    slots: np.ndarray  # [B] int32, number among the running requests; row of the recurrent states
    num_drafts: np.ndarray  # [B] int32, how many of the row's last tokens are drafts
    # [T] uint64, bit i of a draft: it sees draft i of its row; 0 for other tokens. Empty when all drafts are chains
    draft_masks: np.ndarray = field(default_factory=lambda: NO_MASKS)
    adapters: list[str | None] = field(default_factory=list)  # [B] LoRA adapter names
    requests: list[Request] = field(default_factory=list)  # [B], on the scheduling rank only
    logits_requests: list[Request] = field(default_factory=list)  # [R], who receives each row of logits
    wants_best: bool = False  # every row only takes its best token: `execute` may return `BestTokens`
    # where every row takes its best token, those that it may not take: ids that would end it too early
    banned_rows: np.ndarray = field(default_factory=lambda: NO_IDS)  # [K] int64, rows of the logits
    banned_ids: np.ndarray = field(default_factory=lambda: NO_IDS)  # [K] int64, perhaps outside the vocabulary
    wants_hidden: bool = False  # `execute` is to fill in `hidden`; True while plugins asked for any
    # residual stream at `BuildContext.hidden_layers`: [T, len(hidden_layers), hidden_size] on the model's device, in
    # its dtype or float32; None when it was not wanted. Valid until the next forward
    hidden: Tensor | None = None

    @property
    def num_requests(self) -> int:
        """Rows of the batch."""
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward."""
        return int(self.token_ids.shape[0])

    def to_bytes(self) -> bytes:
        """Serialise the batch for another rank: a JSON header line, then the arrays."""
        arrays = [np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS]
        header = {
            "request_ids": self.request_ids,
            "adapters": self.adapters,
            "wants_best": self.wants_best,
            "wants_hidden": self.wants_hidden,
            "arrays": [[a.dtype.str, list(a.shape)] for a in arrays],
        }
        return b"".join([json.dumps(header).encode(), b"\n", *(a.tobytes() for a in arrays)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        """Rebuild a batch from `to_bytes`; ``requests`` are empty on this side."""
        line, _, rest = data.partition(b"\n")
        header = json.loads(line)
        arrays: dict[str, Any] = {}
        start = 0
        for name, (dtype, shape) in zip(_ARRAYS, header["arrays"], strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            view = np.frombuffer(rest, dtype=dtype, count=count, offset=start)
            arrays[name] = view.reshape(shape).copy()  # aligned, and writable as torch wants it
            start += arrays[name].nbytes
        return cls(
            request_ids=header["request_ids"],
            adapters=header["adapters"],
            wants_best=header["wants_best"],
            wants_hidden=header["wants_hidden"],
            **arrays,
        )


@dataclass(slots=True)
class StepBudget:
    """What a step may hold. Each plugin narrows what the one inside it gave, and widens nothing."""

    num_tokens: int  # tokens of the forward, without drafts
    num_prefill_tokens: int  # how many of them may belong to requests that are more than one token behind
    may_start: bool = True  # whether waiting requests may start
    # prompt tokens that the first prompt in line may take while others have some too; the rest of
    # `num_prefill_tokens` goes to the shortest of the others first. None: prompts in order, each as much as is left
    num_first_tokens: int | None = None
    wake_s: float | None = None  # when time alone makes this budget wider, of time.perf_counter()

    def wake_at(self, time_s: float) -> None:
        """Ask for a step at this time, or earlier when others ask for one."""
        self.wake_s = time_s if self.wake_s is None else min(self.wake_s, time_s)


@dataclass(slots=True)
class DraftTokens:
    """Guesses for the next tokens, one row per request of the batch, at most `MAX_DRAFTS` each.

    Without ``parents`` each draft follows the one before it. With them a row is a tree: several guesses for the same
    place, each with its own continuation. Guesses that follow the same token differ.
    """

    token_ids: np.ndarray  # [B, num_draft] int64, -1 pads
    num_draft: np.ndarray  # [B] int32, how many of the row are real
    # [B, num_draft] int32, what each draft follows: -1 the newest token of the request, else an earlier draft of the
    # row by its index; None: chains. Only where `BuildContext.allows_trees`
    parents: np.ndarray | None = None


@dataclass(slots=True)
class BestTokens:
    """What `Execute` may return instead of logits when the batch ``wants_best``: each row's best that is not banned."""

    token_ids: list[int]  # [R], place of the first NaN where a row has one
    logits: list[float]  # [R], the logits there


@dataclass(slots=True)
class AcceptedTokens:
    """What `Verify` decided. A request of a lockstep group may get its token in a later step than its logits."""

    requests: list[Request]  # who got tokens
    token_ids: list[list[int]]  # the tokens of each, in order
    finish_reasons: list[str | None]  # set where the chooser itself ended the request
    errors: dict[str, BaseException] = field(default_factory=dict)  # request id -> why it can't go on
    paths: list[list[int]] | None = None  # the accepted drafts of each, by index; None when drafts are chains


@dataclass(slots=True)
class StepOutput:
    """What one step did."""

    num_tokens: int = 0  # tokens of the forward; 0: nothing was scheduled
    num_new_tokens: int = 0  # tokens chosen
    advanced: list[Request] = field(default_factory=list)  # requests that got tokens
    finished: list[Request] = field(default_factory=list)  # requests that ended in this step
