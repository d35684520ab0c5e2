"""The executor for any decoder-only Hugging Face model: its own forward over the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt.hf.attention import AttentionSwitch
from llmopt.hf.cache import EngineCache
from llmopt.hf.capabilities import input_device, text_config
from llmopt.hf.hidden_states import HiddenStates
from llmopt.hf.padded import PaddedCall, PaddedPrompt, PaddedStep
from llmopt.hf.rows import RowStates, join_hidden, split_rows, take_rows
from llmopt.hf.step import GatherStep, PagedStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.batch import Batch, DraftTokens
    from llmopt.hf.capabilities import Capabilities
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Attend


class HfExecute:
    """Runs the model: in packed layout all rows one after the other in ``[1, T]``; see `llmopt.hf.rows` for models with
    recurrent states, and `llmopt.hf.padded` for prompts that are more than ids.

    The model is called as a whole, so that hooks of accelerate, PEFT and others keep working, and it is left as it was.

    :param hidden_layers: where to take the residual stream for batches that want it; see `HiddenStates`.
    """

    gives_hidden = True

    def __init__(
        self,
        model: PreTrainedModel,
        capabilities: Capabilities,
        kv_cache: KVCache,
        attend: Attend,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.capabilities = capabilities
        self.step = (GatherStep if capabilities.gather else PagedStep)(kv_cache, attend)
        self.padded_step = PaddedStep(kv_cache, attend)
        self.cache = EngineCache(text_config(model), self.step)
        self.switch = AttentionSwitch(model)
        self.device = input_device(model)
        self._is_on_cpu = self.device.type == "cpu"
        self.hidden = HiddenStates(model, hidden_layers) if hidden_layers else None
        self.states = RowStates(model, self.cache) if capabilities.layout == "rows" else None
        # a batch of decodes comes again in the next step, with new numbers in the arrays that its inputs are views of
        self._decodes: Batch | None = None
        self._decode_inputs: dict[str, Any] = {}

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(batch, drafts)
        if torch.is_inference_mode_enabled():  # states made in this mode could not be written to outside of it
            with torch.inference_mode(False), torch.no_grad():
                return self(batch, drafts)
        if batch is self._decodes:
            logits = self._forward(batch, self._decode_inputs)[0]
            return logits if logits.dtype is torch.float32 else logits.float()
        has_media = any(request.media is not None for request in batch.requests)
        if self.states is None and not has_media:
            return self._run_packed(batch)
        groups = self._groups(batch, has_media)
        if len(groups) == 1 and groups[0][1] == list(range(batch.num_requests)):
            run, _ = groups[0]
            return run(batch)
        found: list[Tensor] = []
        places: list[np.ndarray] = []
        parts: list[tuple[list[int], Batch]] = []
        for run, rows in groups:
            part, its_places = take_rows(batch, rows)
            found.append(run(part))
            places.append(its_places)
            parts.append((rows, part))
        join_hidden(batch, parts)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return torch.cat(found)[order.to(found[0].device)]

    def _groups(self, batch: Batch, has_media: bool) -> list[tuple[Callable[[Batch], Tensor], list[int]]]:
        """The forwards of a step, each with the rows that it computes."""
        rest = list(range(batch.num_requests))
        calls: dict[PaddedCall, list[int]] = {}
        typed: list[int] = []  # rows whose decodes have token types
        if has_media:
            is_prompt = (batch.seq_lens == batch.num_scheduled).tolist()
            for row, request in enumerate(batch.requests):
                if request.media is not None and is_prompt[row]:
                    calls.setdefault(request.media.call, []).append(row)
                elif request.media is not None and request.media.call.has_token_types:
                    typed.append(row)
            padded = {row for rows in calls.values() for row in rows}
            rest = [row for row in rest if row not in padded and row not in typed]
        groups: list[tuple[Callable[[Batch], Tensor], list[int]]] = []
        for rows in (rest, typed):
            if rows and self.states is None:
                groups.append((self._run_packed, rows))
            elif rows:
                groups += [(self._run_rows, group) for group in split_rows(batch, rows)]
        for rows in calls.values():
            groups.append((self._run_padded, sorted(rows, key=lambda row: batch.requests[row].media.row)))
        return groups

    def _run_rows(self, batch: Batch) -> Tensor:
        """Row layout: one prompt, or decodes as ``[B, 1]``."""
        assert self.states is not None
        is_prompt = bool(batch.seq_lens[0] == batch.num_scheduled[0])
        with self.states.forward(batch.slots.tolist(), is_prompt):
            if is_prompt:
                return self._run_packed(batch)
            logits = self._forward(batch, self._text_inputs(batch, is_column=True))[:, -1]
            if batch.logits_indices.size != batch.num_requests:
                logits = logits[torch.from_numpy(batch.logits_indices).to(logits.device)]
            return logits if logits.dtype is torch.float32 else logits.float()

    def _run_packed(self, batch: Batch) -> Tensor:
        """One forward ``[1, T]``."""
        num_wanted = batch.logits_indices.size
        wants_all = num_wanted == batch.token_ids.size
        inputs = self._text_inputs(batch)
        if wants_all and self.states is None and not any(request.media for request in batch.requests):
            self._decodes, self._decode_inputs = batch, inputs
        keeps = self.capabilities.takes_logits_to_keep
        if keeps and not wants_all:
            inputs["logits_to_keep"] = torch.from_numpy(batch.logits_indices) if num_wanted else 1
        logits = self._forward(batch, inputs)[0]
        if not keeps and not wants_all:
            logits = logits[torch.from_numpy(batch.logits_indices).to(logits.device)]
        if num_wanted == 0:
            logits = logits[:0]
        return logits if logits.dtype is torch.float32 else logits.float()

    def _run_padded(self, batch: Batch) -> Tensor:
        """The prefill of one call of `generate`, as transformers would do it, for those of its rows that start."""
        prompts: list[PaddedPrompt] = [request.media for request in batch.requests]
        call, rows = prompts[0].call, [prompt.row for prompt in prompts]
        slots = np.full(len(call.lengths), -1)
        slots[rows] = batch.slots
        real = call.real_tokens(rows)
        self.padded_step.begin(batch, real)
        self.cache.step = self.padded_step
        try:
            with self.states.forward(slots.tolist(), True) if self.states is not None else nullcontext():
                if self.hidden is not None and batch.wants_hidden:
                    with self.hidden.taking():
                        logits = call.forward(self.model, self.cache)
                    batch.hidden = self.hidden.result(self.device, real)
                else:
                    logits = call.forward(self.model, self.cache)
        finally:
            self.cache.step = self.step
        wanted = [row for row, request in zip(rows, batch.requests, strict=True) if request in batch.logits_requests]
        return logits[torch.tensor(wanted, dtype=torch.long, device=logits.device)].float()

    def _text_inputs(self, batch: Batch, is_column: bool = False) -> dict[str, Any]:
        """Ids and positions: ``[1, T]``, or ``[T, 1]`` as a column; positions with sections have those in front."""
        shape = (-1, 1) if is_column else (1, -1)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids.reshape(shape))}
        prompts: list[PaddedPrompt | None] = [request.media for request in batch.requests]
        if self.capabilities.takes_position_ids:
            positions = batch.positions.reshape(shape)
            if any(prompts):
                positions = (batch.positions + _offsets(prompts).repeat(batch.num_scheduled, axis=1)).reshape(
                    -1, *positions.shape
                )
                positions = positions[0] if positions.shape[0] == 1 else positions
            inputs["position_ids"] = torch.from_numpy(positions)
        if prompts and prompts[0] is not None and prompts[0].call.has_token_types:
            types = np.concatenate([p.call.token_types_of([p.row]) for p in prompts if p is not None])
            inputs["token_type_ids"] = torch.from_numpy(types.repeat(batch.num_scheduled).reshape(shape))
        return inputs

    def _forward(self, batch: Batch, inputs: dict[str, Any]) -> Tensor:
        """Call the model with its attention over the blocks; its logits as they come."""
        if not self._is_on_cpu:
            inputs = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.step.begin(batch)
        try:
            with self.switch(self.step):
                if self.hidden is not None and batch.wants_hidden:
                    with self.hidden.taking():
                        output = self.model(**inputs, cache=self.cache, use_cache=True, return_dict=True)
                    batch.hidden = self.hidden.result(self.device)
                else:
                    output = self.model(**inputs, cache=self.cache, use_cache=True, return_dict=True)
        finally:
            self.step.end()
        logits: Tensor = output.logits
        return logits

    def close(self) -> None:
        """Forget the model's configs and free the states."""
        self.switch.close()
        if self.states is not None:
            self.states.close()


def _offsets(prompts: list[PaddedPrompt | None]) -> np.ndarray:
    """What to add to the positions of each row: ``[num_sections, B]``."""
    sections = max(p.call.offsets.shape[0] for p in prompts if p is not None)
    found = np.zeros((sections, len(prompts)), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            found[:, row] = prompt.call.offsets[:, prompt.row]
    return found
