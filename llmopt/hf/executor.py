"""The executor for any decoder-only Hugging Face model: its own forward over the rows of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt.hf.attention import AttentionSwitch
from llmopt.hf.cache import EngineCache
from llmopt.hf.capabilities import input_device, text_config
from llmopt.hf.rows import RowStates, split_batch
from llmopt.hf.step import GatherStep, PagedStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.batch import Batch, DraftTokens
    from llmopt.hf.capabilities import Capabilities
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Attend


class HfExecute:
    """Runs the model: in packed layout all rows one after the other in ``[1, T]``, in row layout see `llmopt.hf.rows`.

    The model is called as a whole, so that hooks of accelerate, PEFT and others keep working, and it is left as it was.
    """

    def __init__(self, model: PreTrainedModel, capabilities: Capabilities, kv_cache: KVCache, attend: Attend) -> None:
        self.model = model
        self.capabilities = capabilities
        self.step = (GatherStep if capabilities.gather else PagedStep)(kv_cache, attend)
        self.cache = EngineCache(text_config(model), self.step)
        self.switch = AttentionSwitch(model)
        self.device = input_device(model)
        self.states = RowStates(model, self.cache) if capabilities.layout == "rows" else None

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(batch, drafts)
        if self.states is None:
            return self._run_packed(batch)
        return self._run_parts(batch, self.states)

    def _run_parts(self, batch: Batch, states: RowStates) -> Tensor:
        """Several forwards, their logits in the order of the batch."""
        parts = split_batch(batch)
        found: list[Tensor] = []
        for part, _ in parts:
            is_prompt = bool(part.seq_lens[0] == part.num_scheduled[0])
            with states.forward(part.slots.tolist(), is_prompt):
                found.append(self._run_packed(part) if is_prompt else self._run_decodes(part))
        if len(parts) == 1:
            return found[0]
        order = np.argsort(np.concatenate([places for _, places in parts]))
        return torch.cat(found)[torch.from_numpy(order).to(found[0].device)]

    def _run_decodes(self, batch: Batch) -> Tensor:
        """One forward ``[B, 1]``."""
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids[:, None])}
        if self.capabilities.takes_position_ids:
            inputs["position_ids"] = torch.from_numpy(batch.positions[:, None])
        logits: Tensor = self._forward(batch, inputs)[:, -1]
        if batch.logits_indices.size != batch.num_requests:
            logits = logits[torch.from_numpy(batch.logits_indices).to(logits.device)]
        return logits if logits.dtype is torch.float32 else logits.float()

    def _run_packed(self, batch: Batch) -> Tensor:
        """One forward ``[1, T]``."""
        num_wanted = batch.logits_indices.size
        wants_all = num_wanted == batch.token_ids.size
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids[None])}
        if self.capabilities.takes_position_ids:
            inputs["position_ids"] = torch.from_numpy(batch.positions[None])
        keeps = self.capabilities.takes_logits_to_keep
        if keeps and not wants_all:
            inputs["logits_to_keep"] = torch.from_numpy(batch.logits_indices) if num_wanted else 1
        logits = self._forward(batch, inputs)[0]
        if not keeps and not wants_all:
            logits = logits[torch.from_numpy(batch.logits_indices).to(logits.device)]
        if num_wanted == 0:
            logits = logits[:0]
        return logits if logits.dtype is torch.float32 else logits.float()

    def _forward(self, batch: Batch, inputs: dict[str, Any]) -> Tensor:
        """Call the model with its attention over the blocks; its logits as they come."""
        if self.device.type != "cpu":
            inputs = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.step.begin(batch)
        try:
            with self.switch(self.step):
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
