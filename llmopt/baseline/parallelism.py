"""Layer 4, plain: one rank, the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.batch import Batch, DraftTokens


class BaselineShard:
    """Keep the model whole."""

    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        return model


class BaselineExchange:
    """There is nobody to exchange with."""

    def __call__(self, batch: Batch | None, drafts: DraftTokens | None) -> tuple[Batch, DraftTokens | None]:
        assert batch is not None, "there is no other rank to receive a batch from"
        return batch, drafts
