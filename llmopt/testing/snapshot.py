"""What a pipeline must leave of a model as it was."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Snapshot:
    """Everything about a model that a pipeline must leave as it was."""

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.config = copy.deepcopy(model.config.to_dict())
        self.attention = model.config._attn_implementation
        self.attributes = set(vars(model))
        self.hooks = _num_hooks(model)
        self.training = model.training
        self.logits = _logits(model, prompt)

    def compare(self, model: PreTrainedModel, prompt: list[int]) -> str:
        """Raise AssertionError naming what changed."""
        weights = model.state_dict()
        assert weights.keys() == self.weights.keys(), f"parameters changed: {weights.keys() ^ self.weights.keys()}"
        for name, tensor in weights.items():
            assert torch.equal(tensor, self.weights[name]), f"weight {name} changed"
        assert model.config.to_dict() == self.config, "the configuration changed"
        assert model.config._attn_implementation == self.attention, "the attention implementation changed"
        added = set(vars(model)) ^ self.attributes
        assert not added, f"attributes of the model object changed: {', '.join(sorted(added))}"
        assert _num_hooks(model) == self.hooks, "forward hooks were left on the model"
        assert model.training is self.training, "the training mode changed"
        assert torch.equal(_logits(model, prompt), self.logits), "logits changed"
        return "weights, configuration, attributes and logits are bit-equal"


def _num_hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@torch.no_grad()
def _logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt], device=model.device)).logits
    return logits.clone()
