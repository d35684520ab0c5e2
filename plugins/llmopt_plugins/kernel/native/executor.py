"""The stage: one call of the C++ decoder per step, and the Hugging Face executor for rows that it cannot run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt.batch import BestTokens
from llmopt.hf.rows import join_hidden, take_rows
from llmopt_plugins.kernel.native.shared_weights import num_users

if TYPE_CHECKING:
    from llmopt.batch import Batch, DraftTokens
    from llmopt.request import Request
    from llmopt.stages import Execute
    from llmopt_plugins.kernel.native.packing import PackedWeights
    from llmopt_plugins.kernel.native.weight_watch import WeightWatch

logger = logging.getLogger("llmopt")


class NativeExecute:
    """Runs batches on the decoder.

    :param packed: the weights that the decoder reads.
    :param decoder: has the extension's ``step``, and owns the memory that it looks at: ``memory``, and others.
    :param plan: an extension's `StepPlan` of its own.
    :param fallback: runs rows with media or adapters, and everything while the model is another than was packed. It
        uses the same blocks.
    :param refresh: packs the model's weights again, and gives this object another decoder (`use`) when they lie
        elsewhere then; returns the reason when the decoder cannot run the model any more.
    :param model_about: the model in a few words for `describe`; ``machine_about``: what it runs on.
    :param hidden_shape: layers whose hidden states a step shows, and their size.
    """

    takes_media = True
    gives_hidden = True
    takes_trees = True
    has_own_threads = True

    def __init__(
        self,
        packed: PackedWeights,
        decoder: Any,
        plan: Any,
        vocab_size: int,
        fallback: Execute,
        watch: WeightWatch,
        refresh: Callable[[NativeExecute], str | None],
        model_about: str,
        machine_about: str,
        hidden_shape: tuple[int, int] = (0, 0),
    ) -> None:
        self.fallback = fallback
        self.watch, self.refresh = watch, refresh
        self.vocab_size = vocab_size
        self.why_not_now: str | None = None  # why everything goes to the fallback at the moment
        self.packed: PackedWeights | None = packed
        self._model_about, self._machine_about = model_about, machine_about
        self._plan, self._update = plan, plan.update
        self.use(decoder)
        self._logits = _logits_buffer(0, vocab_size)
        self._hidden_shape = hidden_shape
        self._hidden = torch.empty((0, *hidden_shape), dtype=torch.float32, device="cpu")
        self._known: set[Request] = set()  # requests of the last batch
        # a batch of decodes comes again in the next step, with new numbers in its arrays
        self._decodes: Batch | None = None
        self._rows = self._logits  # its rows of the logits
        self._counts = {"num_steps": 0, "num_fallback_rows": 0, "num_repacks": 0}

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        if batch is self._decodes:
            return self._run(batch, self._rows)
        self._decodes = None
        if batch.requests and not self._known.issuperset(batch.requests):
            self._check_model()
        self._known = set(batch.requests)
        if self.why_not_now is not None:
            self._counts["num_fallback_rows"] += batch.num_requests
            return self.fallback(batch, drafts)
        others = [row for row, request in enumerate(batch.requests) if request.media is not None]
        if batch.adapters:
            others = sorted({*others, *(row for row, name in enumerate(batch.adapters) if name is not None)})
        if others:
            return self._run_split(batch, drafts, others)
        rows = self._make_rows(batch)
        if batch.logits_indices.size == batch.token_ids.size:
            self._decodes, self._rows = batch, rows
        return self._run(batch, rows)

    def use(self, decoder: Any) -> None:
        """Run on this decoder from now on."""
        self.decoder = decoder  # owns the memory that its steps look at
        self._step = decoder.step

    def _run(self, batch: Batch, rows: Tensor) -> Tensor | BestTokens:
        """One call. What is looked up and made here is paid for in every token."""
        self._counts["num_steps"] += 1
        trees = (batch.num_drafts, batch.draft_masks) if batch.draft_masks.size else ()
        self._update(batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, batch.slot_mapping, *trees)
        tokens = (batch.token_ids, batch.positions, batch.logits_indices)
        hidden = self._hidden_address(batch) if batch.wants_hidden else 0
        if batch.wants_best:
            if not batch.banned_ids.size:
                return BestTokens(*self._step(self._plan, *tokens, 0, True, None, None, hidden))
            return BestTokens(*self._step(self._plan, *tokens, 0, True, batch.banned_rows, batch.banned_ids, hidden))
        self._step(self._plan, *tokens, rows.data_ptr(), False, None, None, hidden)
        return rows

    def _hidden_address(self, batch: Batch) -> int:
        """Give the batch memory for its hidden states, reused from step to step; 0 when nobody asked for any."""
        if not self._hidden_shape[0]:
            return 0
        count = batch.num_tokens
        if count > self._hidden.shape[0]:
            with torch.inference_mode(False):
                self._hidden = torch.empty((count, *self._hidden_shape), dtype=torch.float32, device="cpu")
        batch.hidden = self._hidden[:count]
        return self._hidden.data_ptr()

    def _make_rows(self, batch: Batch) -> Tensor:
        """Memory for the logits of a batch, reused from step to step."""
        count = batch.logits_indices.size
        if count > self._logits.shape[0] and not batch.wants_best:
            with torch.inference_mode(False):  # others could not write to a tensor that was made in this mode
                self._logits = _logits_buffer(count, self.vocab_size)
        return self._logits[:count]

    def _run_split(self, batch: Batch, drafts: DraftTokens | None, others: list[int]) -> Tensor | BestTokens:
        """Some rows here, the others in the fallback."""
        self._counts["num_fallback_rows"] += len(others)
        mine = sorted(set(range(batch.num_requests)) - set(others))
        if not mine:
            return self.fallback(batch, drafts)
        found: list[Tensor] = []
        places: list[np.ndarray] = []
        parts: list[tuple[list[int], Batch]] = []
        for rows, run in ((mine, self._run_part), (others, self.fallback)):
            part, its_places = take_rows(batch, rows)
            logits = run(part, drafts)
            assert isinstance(logits, Tensor), "a part of a batch wants logits"
            found.append(logits)
            places.append(its_places)
            parts.append((rows, part))
        join_hidden(batch, parts)
        return torch.cat(found)[torch.from_numpy(np.argsort(np.concatenate(places)))]

    def _run_part(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        return self._run(batch, self._make_rows(batch))

    def _check_model(self) -> None:
        """Before a request starts: pack again what has changed, or leave it to the fallback."""
        watch = self.watch
        if self.why_not_now is None and not watch.has_other_modules() and not watch.has_other_weights():
            return
        before, self.why_not_now = self.why_not_now, self.refresh(self)
        if self.why_not_now is None:
            self._counts["num_repacks"] += 1
            logger.info("native: the model's weights changed and were packed again.")
        elif before != self.why_not_now:
            logger.warning("native: the model runs through transformers' forward, because it %s.", self.why_not_now)

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the packed matrices that a step reads; of a table of embeddings it reads some rows only."""
        return sum(self._matrix_bytes().values()) or None

    @property
    def weight_dtype(self) -> str | None:
        """The type of most products: ``float32``, ``bfloat16``, or ``int8``, which four bits are widened to."""
        most = self.weight_format
        return most if most in (None, "float32", "bfloat16") else "int8"

    @property
    def weight_format(self) -> str | None:
        """The format of most packed weights, such as ``bfloat16`` or ``int4_group``."""
        sizes = self._matrix_bytes()
        return max(sizes, key=lambda name: sizes[name], default=None)

    def _matrix_bytes(self) -> dict[str, int]:
        """Bytes by format; none after `close`."""
        sizes: dict[str, int] = {}
        for name, (shape, _) in (self.packed.matrices if self.packed is not None else {}).items():
            if name != "embedding":
                sizes[shape.format] = sizes.get(shape.format, 0) + shape.num_bytes
        return sizes

    def stats(self) -> dict[str, int]:
        """Counts; the bytes of all packed weights, and how many pipelines use the same ones."""
        packed = self.packed
        num_bytes, users = (0, 0) if packed is None else (packed.memory.num_bytes, num_users(packed))
        return {**self._counts, "packed_bytes": num_bytes, "num_users": users}

    def describe(self) -> str:
        stats = self.stats()
        others = stats["num_users"] - 1
        shared = f" (shared with {others} other pipeline{'s' if others > 1 else ''})" if others > 0 else ""
        about = f"{self._model_about}, {stats['packed_bytes'] / 1e6:.0f} MB packed{shared}; {self._machine_about}"
        if self.why_not_now is not None:
            return f"{about}; not used at the moment, because the model {self.why_not_now}"
        return about

    def close(self) -> None:
        """Free the decoder and its memory, and close the fallback."""
        self._decodes, self._known = None, set()
        self._step = self._update = self._plan = self.decoder = self.packed = None
        self.refresh = lambda _: "was closed"
        self._logits = self._rows = _logits_buffer(0, self.vocab_size)
        close = getattr(self.fallback, "close", None)
        if close is not None:
            close()


def _logits_buffer(num_rows: int, vocab_size: int) -> Tensor:
    """Memory that the decoder writes float32 to, whatever torch's default dtype and device are."""
    return torch.empty((num_rows, vocab_size), dtype=torch.float32, device="cpu")
