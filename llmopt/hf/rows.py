"""Row layout: models with recurrent or convolution states, whose sequences cannot be packed into one row.

Every prompt is one forward ``[1, L]``, all decodes of a step are one forward ``[B, 1]``. Keys and values of their
attention layers go to the block pool as always; the states live here, one row per request::

    pool   [num_slots, ...]   states at rest, per layer and state; row = `Request.slot`
    live   [B, ...]           states of the rows that ran last, inside the cache layers

The same rows usually decode again and again, so live states stay where they are. They go back to the pool when other
rows are to run, and are forgotten when a forward fails: its requests start again from their first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from llmopt.batch import NO_MASKS, Batch
from llmopt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# Attributes in which modules of some models (recurrent_gemma) keep their states, instead of the cache.
_MODULE_STATES = ("conv1d_state", "recurrent_states")

Key: TypeAlias = tuple[str, int, int]  # kind, number of the layer or module, number of the state
States: TypeAlias = dict[Key, Tensor]


class RowStates:
    """The recurrent and convolution states of all running requests.

    :param cache: the cache that the model is given; its state layers hold the live states.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self._layers = [
            (number, layer)
            for number, layer in enumerate(cache.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        self._attributes = _module_states(model)
        self._has_previous: dict[tuple[int, int], bool] = {}  # as each state layer says after a prompt
        self._pool: States = {}
        self._capacity = 0
        self._slots: list[int] | None = None  # whose states are live
        self._live: States = {}

    @contextmanager
    def forward(self, slots: list[int], is_prompt: bool) -> Iterator[None]:
        """Hold the states of some rows in cache and modules during one forward, which advances them.

        :param slots: one per row of the forward; -1 for a row whose states nobody wants.
        :param is_prompt: the rows begin with this forward, without states.
        """
        if is_prompt or slots != self._slots:
            self._flush()
            self._live = {} if is_prompt else self._gather(slots)
            self._install(self._live)
        before = [getattr(module, name) for module, name in self._attributes]
        for number, (module, name) in enumerate(self._attributes):
            setattr(module, name, self._live.get((name, number, 0)))
        self._slots = None  # a forward that fails leaves half of the layers advanced
        try:
            yield
            self._live = self._read()
            if -1 in slots:
                kept = [row for row, slot in enumerate(slots) if slot >= 0]
                self._live = {key: state[_index(kept, state)] for key, state in self._live.items()}
                self._install(self._live)
            self._slots = [slot for slot in slots if slot >= 0]
        finally:
            for (module, name), value in zip(self._attributes, before, strict=True):
                setattr(module, name, value)

    @property
    def are_in_cache(self) -> bool:
        """Whether the model keeps all states in the cache, none in its modules."""
        return not self._attributes

    def fill(self, cache: Cache, slots: list[int]) -> None:
        """Copy the states of some slots, in their order, into another cache of the model."""
        if self._slots is not None:
            with torch.inference_mode(False), torch.no_grad():  # the mode of the forwards, which write to the pool
                self._store(self._slots, self._live)
        states = self._gather(slots)
        for number, mine in self._layers:
            layer = cache.layers[number]
            layer.dtype, layer.device = mine.dtype, mine.device
            layer.conv_kernel_size.update(mine.conv_kernel_size)
            self._fill_layer(layer, number, states)

    def num_bytes(self) -> int:
        """Bytes of the live states of one row; 0 before the first forward."""
        return sum(t[:1].numel() * t.element_size() for t in self._live.values())

    def close(self) -> None:
        """Free all states."""
        self._slots = None
        self._live.clear()
        self._pool.clear()
        self._install({})

    def _flush(self) -> None:
        """Move the live states to the pool."""
        if self._slots is not None:
            self._store(self._slots, self._live)
            self._slots = None

    def _store(self, slots: list[int], states: States) -> None:
        needed = max(slots) + 1
        if needed > self._capacity:
            self._capacity = max(needed, 2 * self._capacity)
        for key, state in states.items():
            rows = self._pool.get(key)
            if rows is None or rows.shape[0] < self._capacity:
                larger = state.new_empty((self._capacity, *state.shape[1:]))
                if rows is not None:
                    larger[: rows.shape[0]] = rows
                self._pool[key] = rows = larger
            rows[_index(slots, rows)] = state

    def _gather(self, slots: list[int]) -> States:
        return {key: rows[_index(slots, rows)] for key, rows in self._pool.items()}

    def _read(self) -> States:
        """The states that cache layers and modules hold now."""
        states: States = {}
        for number, layer in self._layers:
            for i in range(layer.number_of_states):
                if layer.is_conv_states_initialized[i]:
                    states["conv", number, i] = layer.conv_states[i]
                if layer.is_recurrent_states_initialized[i]:
                    states["recurrent", number, i] = layer.recurrent_states[i]
                self._has_previous[number, i] = layer.has_previous_state[i]
        for number, (module, name) in enumerate(self._attributes):
            value = getattr(module, name)
            if value is not None:
                states[name, number, 0] = value
        return states

    def _install(self, states: States) -> None:
        """Put states into the cache layers; layers without any become as new."""
        for number, layer in self._layers:
            self._fill_layer(layer, number, states)

    def _fill_layer(self, layer: LinearAttentionCacheLayerMixin, number: int, states: States) -> None:
        for i in range(layer.number_of_states):
            conv, recurrent = states.get(("conv", number, i)), states.get(("recurrent", number, i))
            layer.conv_states[i], layer.is_conv_states_initialized[i] = conv, conv is not None
            layer.recurrent_states[i], layer.is_recurrent_states_initialized[i] = recurrent, recurrent is not None
            is_empty = conv is None and recurrent is None
            layer.has_previous_state[i] = not is_empty and self._has_previous.get((number, i), False)


def _index(slots: list[int], like: Tensor) -> Tensor:
    return torch.tensor(slots, device=like.device)


def _module_states(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Modules with a state as a plain attribute; parameters and buffers are not in ``vars``."""
    return [(m, name) for m in model.modules() for name in _MODULE_STATES if name in vars(m)]


def take_rows(batch: Batch, rows: list[int]) -> tuple[Batch, np.ndarray]:
    """The part of a batch that some of its rows make up.

    :param rows: row numbers; the part has them in this order.
    :returns: the part, and which rows of the batch's logits are its own: ``[R]`` int64.
    """
    tokens = tokens_of(batch, rows)
    cu_seqlens_q = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(batch.num_scheduled[rows], out=cu_seqlens_q[1:])
    token_places = np.empty(batch.num_tokens, dtype=np.int64)
    token_places[tokens] = np.arange(tokens.size)
    ranks = np.full(batch.num_requests, -1)
    ranks[rows] = np.arange(len(rows))
    owners = ranks[np.searchsorted(batch.cu_seqlens_q, batch.logits_indices, side="right") - 1]
    places = np.argsort(owners, kind="stable")[np.count_nonzero(owners < 0) :]
    part = Batch(
        request_ids=[batch.request_ids[r] for r in rows],
        num_scheduled=batch.num_scheduled[rows],
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=batch.seq_lens[rows],
        block_tables=batch.block_tables[rows],
        slot_mapping=batch.slot_mapping[tokens],
        logits_indices=token_places[batch.logits_indices[places]],
        slots=batch.slots[rows],
        num_drafts=batch.num_drafts[rows],
        draft_masks=batch.draft_masks[tokens] if batch.draft_masks.size else NO_MASKS,
        adapters=[batch.adapters[r] for r in rows] if batch.adapters else [],
        requests=[batch.requests[r] for r in rows] if batch.requests else [],
        logits_requests=[batch.logits_requests[p] for p in places] if batch.logits_requests else [],
        wants_hidden=batch.wants_hidden,
    )
    return part, places


def tokens_of(batch: Batch, rows: list[int]) -> np.ndarray:
    """Which packed tokens some rows own, row after row: ``[T]`` int64."""
    starts, ends = batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[1:]
    return np.concatenate([np.arange(starts[r], ends[r]) for r in rows])


def join_hidden(batch: Batch, parts: list[tuple[list[int], Batch]]) -> None:
    """Fill in a batch's hidden states from those of the parts that ran in its place.

    Tokens of a part without any get zeros.

    :param parts: rows of the batch, and the part that `take_rows` made of them.
    """
    found = [part.hidden for _, part in parts if part.hidden is not None]
    if not batch.wants_hidden or not found:
        return
    is_one_dtype = all(hidden.dtype is found[0].dtype for hidden in found)
    dtype = found[0].dtype if is_one_dtype else torch.float32
    batch.hidden = torch.zeros((batch.num_tokens, *found[0].shape[1:]), dtype=dtype, device=found[0].device)
    for rows, part in parts:
        if part.hidden is not None:
            batch.hidden[torch.from_numpy(tokens_of(batch, rows)).to(batch.hidden.device)] = part.hidden.to(dtype)


def split_rows(batch: Batch, rows: list[int]) -> list[list[int]]:
    """The forwards that rows of a batch take in row layout: all decodes together, then every prompt on its own.

    :raises UnsupportedModelError: the scheduler split a prompt, or added drafts.
    """
    num_scheduled, seq_lens = batch.num_scheduled[rows], batch.seq_lens[rows]
    is_decode = seq_lens > num_scheduled
    if (num_scheduled[is_decode] > 1).any():
        raise UnsupportedModelError(
            "recurrent states take a prompt in one piece and one token per decode; the batch holds a part of a prompt "
            "or draft tokens. Remove the plugin that chunks prompts or drafts."
        )
    if is_decode.all():
        return [rows]
    places = np.array(rows)
    groups = [places[is_decode].tolist(), *([row] for row in places[~is_decode].tolist())]
    return [group for group in groups if group]
