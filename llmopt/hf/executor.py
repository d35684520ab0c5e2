"""The executor for any decoder-only Hugging Face model: its own forward over a packed, ragged batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmopt.hf.attention import AttentionSwitch
from llmopt.hf.cache import EngineCache
from llmopt.hf.capabilities import text_config
from llmopt.hf.step import GatherStep, PagedStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.batch import Batch, DraftTokens
    from llmopt.hf.capabilities import Capabilities
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Attend


class HfExecute:
    """Runs the model in packed layout: all rows one after the other in ``[1, T]``.

    The model is called as a whole, so that hooks of accelerate, PEFT and others keep working, and it is left as it was.
    """

    def __init__(self, model: PreTrainedModel, capabilities: Capabilities, kv_cache: KVCache, attend: Attend) -> None:
        self.model = model
        self.capabilities = capabilities
        self.step = (GatherStep if capabilities.gather else PagedStep)(kv_cache, attend)
        self.cache = EngineCache(text_config(model), self.step)
        self.switch = AttentionSwitch(model)
        self.device = model.get_input_embeddings().weight.device

    @torch.no_grad()
    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor:
        wanted = torch.from_numpy(batch.logits_indices)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.token_ids).unsqueeze(0)}
        if self.capabilities.takes_position_ids:
            inputs["position_ids"] = torch.from_numpy(batch.positions).unsqueeze(0)
        keeps = self.capabilities.takes_logits_to_keep
        if keeps:
            inputs["logits_to_keep"] = wanted if wanted.numel() else 1
        if self.device.type != "cpu":
            inputs = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        self.step.begin(batch)
        try:
            with self.switch(self.step):
                output = self.model(**inputs, cache=self.cache, use_cache=True, return_dict=True)
        finally:
            self.step.end()
        logits: Tensor = output.logits[0]
        if not keeps:
            logits = logits[wanted.to(logits.device)]
        return logits[: wanted.numel()].float()

    def close(self) -> None:
        """Forget the model's configs."""
        self.switch.close()
