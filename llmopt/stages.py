"""The contract of every stage, grouped by the seven layers.

A stage is a callable. The pipeline holds one object per stage and calls it in the step, or once per request, or once
while the pipeline is built. Stages may also have ``stats() -> dict`` (shown by `InferencePipeline.stats`),
``describe() -> str`` (one line for `InferencePipeline.describe`) and ``close()`` (called once by
`InferencePipeline.close`). A wrapping stage forwards what it does not change.

When each is called::

    build      probe, place, shard
    arrival    tokenize, encode_media, admit
    step       schedule (order, budget, lookup, allocate), propose, constrain, exchange, adapt, execute (attend),
               verify, commit (detokenize, allocate.free)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from llmopt.batch import AcceptedTokens, Batch, BestTokens, DraftTokens, StepBudget, StepOutput
    from llmopt.kv_cache import LayerKV
    from llmopt.queue import RequestQueue
    from llmopt.request import Request

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"


# ---------------------------------------------------------------------------------------------------------------------
# 1. application
# ---------------------------------------------------------------------------------------------------------------------
class Tokenize(Protocol):
    def __call__(self, prompt: Prompt) -> list[int]:
        """Turn text, chat messages or ids into prompt ids.

        Chat messages go through the tokenizer's template with the generation prompt added; ids are returned as a list.

        :raises InvalidPromptError: when nothing is left to compute, or a message is malformed.
        """


class EncodeMedia(Protocol):
    def __call__(self, request: Request) -> None:
        """Prepare what a request carries beside its ids (images, audio): read and write ``request.media``.

        Called once for every request, on the caller's thread, before it is admitted. The baseline leaves
        requests as they are.
        """


class LogitsMask(Protocol):
    def apply(self, logits: Tensor) -> Tensor:
        """Forbid tokens: set their logits to -inf, in place or in a copy. logits: ``[R, vocab]`` float32."""


class Constrain(Protocol):
    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> LogitsMask | None:
        """Say which tokens each row of logits may choose; None allows all.

        Called before the forward, so that host work can overlap with it: the returned object may still be computing
        and waits in `LogitsMask.apply`.
        """


class Detokenize(Protocol):
    def __call__(self, request: Request) -> str:
        """Return the text that the newest tokens of a request add, as far as it can no longer change.

        Keeps its state in ``request.text_state``. When the request is finished the rest is returned. Text held back:
        the bytes of an unfinished character, and what may become a stop string. A completed stop string sets
        ``request.stop_reason`` and nothing from its first character on is returned. Called after every token where the
        request has stop strings, else once for all tokens of a step.
        """


# ---------------------------------------------------------------------------------------------------------------------
# 2. scheduling
# ---------------------------------------------------------------------------------------------------------------------
class Admit(Protocol):
    def __call__(self, request: Request, queue: RequestQueue) -> None:
        """Put a new request into the queue.

        :raises RequestError: when it can never run: empty, ids outside the vocabulary, too long, larger than the pool,
            or a live request has the same id.
        """


class Order(Protocol):
    def __call__(self, queue: RequestQueue) -> None:
        """Bring the queue into the order in which requests are considered.

        ``queue.waiting`` starts from its head; ``queue.running`` is pre-empted from its end. Called in every step, so
        it does little when nothing has changed. Adds nothing and removes nothing, except that ``queue.refuse`` may end
        a waiting request that has become pointless. The baseline leaves the order of arrival.
        """


class Budget(Protocol):
    def __call__(self, queue: RequestQueue) -> StepBudget:
        """Say what this step may hold; ``queue`` is in order by then.

        A `StepBudget` (`llmopt.batch`) has ``num_tokens``, ``num_prefill_tokens``, ``may_start``, ``num_first_tokens``
        and ``wake_s``. Decodes come first and take one token each; the prefill tokens are for prompts. A wrapping
        stage narrows what the inner one returned. Who holds work back until some time says so with
        ``budget.wake_at(time_s)``: without another event the next step comes then. The baseline allows
        ``max_tokens_per_step`` of any kind.
        """


class Schedule(Protocol):
    def __call__(self, queue: RequestQueue) -> Batch | None:
        """Choose how many tokens each request computes in this step; None when nothing can run.

        There is no prefill phase: a request is behind by ``num_tokens - num_computed_tokens`` and catches up. The
        baseline calls `order`, then `budget`, and fills: decodes, prompts that are under way, waiting requests. It
        allocates blocks, and pre-empts when they run out. Does not advance ``num_computed_tokens``. With None it sets
        ``queue.wake_s`` when waiting alone will change something.
        """


class Commit(Protocol):
    def __call__(self, batch: Batch, accepted: AcceptedTokens) -> StepOutput:
        """Write the results of a step back to its requests: computed tokens, new tokens, text, finish, freed blocks."""


# ---------------------------------------------------------------------------------------------------------------------
# 6. memory
# ---------------------------------------------------------------------------------------------------------------------
class Lookup(Protocol):
    def __call__(self, request: Request) -> int | None:
        """Find KV that is in the pool already.

        Called when a waiting request is about to start. Appends shared blocks to ``request.block_table`` (each held
        once more) and returns how many leading tokens they cover, at most ``num_tokens - 1``. None: wait, another
        request is computing the KV right now. Never called for a request with ``media``, whose ids do not tell its KV:
        who keeps KV for others leaves such requests out.
        """


class Allocate(Protocol):
    """Blocks for a request: ``allocate(request, n)`` before tokens are computed, ``allocate.free(request)`` after."""

    def __call__(self, request: Request, num_tokens: int) -> bool:
        """Make ``request.block_table`` cover ``num_computed_tokens + num_tokens`` tokens.

        Returns False, and changes nothing, when the pool has too few free blocks.
        """

    def free(self, request: Request) -> None:
        """Give back everything the request holds. Harmless when it holds nothing."""

    def num_blocks_ever(self, request: Request) -> int:
        """The blocks that this request holds at its longest, to refuse what can never fit."""


class Adapt(Protocol):
    def __call__(self, batch: Batch) -> None:
        """Make the adapters (LoRA) of the batch's rows active for the coming forward. The baseline has none.

        A stage that loads adapters has ``adapter_key(name) -> str``, which is another one when another adapter was
        loaded under the same name: whoever keeps KV asks for it.

        :raises RequestError: for a request that names an adapter which is not loaded.
        """


# ---------------------------------------------------------------------------------------------------------------------
# 3. speculation
# ---------------------------------------------------------------------------------------------------------------------
class Propose(Protocol):
    def __call__(self, batch: Batch) -> DraftTokens | None:
        """Guess the next tokens of every decoding request; None when there is no guess at all.

        Reads the batch and changes nothing. At most ``config.speculation.max_num_draft`` per row, and at most
        ``max_len - num_tokens - 1``; rows that do not reach their last token in this step, and rows of a lockstep
        group, have ``num_draft == 0``. A guess may be wrong: `Verify` decides. What breaks these rules ends the
        requests with an error that names the plugin. Trees (``DraftTokens.parents``) are for pipelines whose
        ``BuildContext.allows_trees`` is set.
        """


class Verify(Protocol):
    def __call__(
        self, batch: Batch, drafts: DraftTokens | None, logits: Tensor | BestTokens, mask: LogitsMask | None
    ) -> AcceptedTokens:
        """Choose tokens from logits, and keep the drafts that the choice confirms.

        A plugin's stage is given logits, never `BestTokens`, unless it has an attribute ``accepts_best = True``, and
        no drafts that are trees unless it has ``takes_trees = True``. It then says in ``AcceptedTokens.paths`` which
        drafts it kept: their KV is brought to where it belongs before `Commit`.

        :param logits: ``[R, vocab]`` float32, rows in the order of ``batch.logits_indices``; a row with ``d`` drafts
            has ``d + 1`` consecutive rows of logits, first that of its newest token. When the batch ``wants_best``,
            perhaps only the best of each row.
        """


# ---------------------------------------------------------------------------------------------------------------------
# 5. kernel
# ---------------------------------------------------------------------------------------------------------------------
class Execute(Protocol):
    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        """Run the model over the batch, write KV, and return float32 logits ``[R, vocab]``.

        When the batch ``wants_best``, the best token of each row may be returned instead, chosen without those of
        ``banned_rows`` and ``banned_ids``; in logits they are left to `Verify`. It does so only where nobody
        looks at logits: there is no `LogitsMask`, and every plugin's stage that wraps `execute`, or stands in `verify`,
        has an attribute ``accepts_best = True``. The result is only valid until the next call.

        Requests with ``media`` only come to a stage that has an attribute ``takes_media = True``, as the baseline's;
        one that cannot run such rows itself hands them to ``context.baseline.execute``, which uses the same blocks.

        When the batch ``wants_hidden``, ``batch.hidden`` is filled in: the residual stream of all tokens where
        `BuildContext.hidden_layers` says. An executor that can do so has an attribute ``gives_hidden = True``; without
        it, plugins that ask for hidden states are refused.

        An executor that computes on threads of its own has an attribute ``has_own_threads = True``: `verify` then runs
        on one thread of torch, because the others would spin on the CPUs that the next step needs.

        A plugin's executor is given drafts that are trees (``batch.draft_masks``) when it has an attribute
        ``takes_trees = True``. One that leaves attention to `Attend` and positions to the batch can say so.

        An executor with weights of its own may say how many bytes of them a step reads, as ``weight_bytes``, and of
        which type their products are, as ``weight_dtype`` (``"int8"``): `llmopt.roofline` asks.
        """


class Attend(Protocol):
    """Attention over the blocks of the pool. The executor calls `plan` once per step, then each layer.

    A plugin's stage that heeds ``batch.draft_masks`` has an attribute ``takes_trees = True``. Without it nobody drafts
    trees.
    """

    def plan(self, batch: Batch) -> None:
        """Index work that is the same for all layers of this step."""

    def write(self, layer: LayerKV, key: Tensor, value: Tensor) -> None:
        """Store new keys ``[T, num_key_heads, key_dim]`` and values at ``batch.slot_mapping``; slot -1 is dropped."""

    def __call__(
        self,
        layer: LayerKV,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ``query [T, num_heads, key_dim]`` over each row's blocks: ``[T, num_heads, value_dim]``.

        Softmax in float32. ``sliding_window`` counts the query's own position; ``softcap`` is applied before the mask;
        ``sinks [num_heads]`` adds one logit per head to the denominator.
        """


# ---------------------------------------------------------------------------------------------------------------------
# 4. parallelism
# ---------------------------------------------------------------------------------------------------------------------
class Shard(Protocol):
    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        """Split the model over ranks, once, while the pipeline is built. The baseline returns it as it is."""


class Exchange(Protocol):
    def __call__(self, batch: Batch | None, drafts: DraftTokens | None) -> tuple[Batch, DraftTokens | None]:
        """Give every rank the same batch: the scheduling rank sends, the others receive and pass None.

        The baseline runs on one rank and returns its arguments.
        """


# ---------------------------------------------------------------------------------------------------------------------
# 7. hardware
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    cpus: tuple[int, ...]  # CPU ids in the affinity mask
    num_threads: int  # threads that make sense: affinity and cgroup quota, whichever is smaller
    available_bytes: int  # host memory that may still be taken, cgroup limit included
    total_bytes: int  # host memory, or the cgroup limit when that is smaller
    device: str  # type of the accelerator, "cpu" when there is none
    device_name: str  # as the system reports it
    device_available_bytes: int  # memory of the accelerator that is free; equals `available_bytes` on the CPU


class Probe(Protocol):
    def __call__(self) -> Machine:
        """Look at the machine, once, while the pipeline is built."""


class Place(Protocol):
    def __call__(self, model: PreTrainedModel, machine: Machine) -> PreTrainedModel:
        """Bind threads, memory and the model to the hardware, once. The baseline leaves the model where it is."""
