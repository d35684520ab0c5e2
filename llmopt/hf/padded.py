"""Padded prefill: prompts that are more than ids, computed as `model.generate` computes them.

Embeddings, images, token types, positions of the caller's own, masks that are not plain causal: all rows of such a
call go through one forward ``[B, L]`` with the inputs, the mask and the attention implementation that transformers
uses. Only the cache is another: it copies keys and values of real tokens to the block pool, and hands them back::

    keys   [B, H, L, D]      . . a b c        pads are dropped
                             d e f g h   -->  blocks of row 0: a b c, of row 1: d e f g h

From then on the rows decode like any others; their positions go on where the prompt's ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from llmopt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from llmopt.batch import Batch
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Attend

# Model inputs that matter for the prompt only, so that decodes do without them.
PROMPT_INPUTS = frozenset(
    {
        *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
        "inputs_embeds",
        "token_type_ids",
        "mm_token_type_ids",
        "moe_mm_token_type_ids",
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "spatial_shapes",
        "feature_attention_mask",
        "audio_feature_lengths",
    }
)


def is_given(value: Any) -> bool:
    """Whether a model input says anything; transformers fills some in with empty dicts."""
    return value is not None and not (isinstance(value, dict) and all(v is None for v in value.values()))


@dataclass(slots=True, eq=False)
class PaddedCall:
    """The prompts of one call of `generate`, shared by its requests."""

    input_ids: Tensor  # [B, L] int64, or [B, 0] beside embeddings
    inputs: dict[str, Any]  # everything else, as transformers prepared it for the first forward, without a cache
    lengths: list[int]  # [B] real tokens of each row
    width: int  # L, pads included
    has_token_types: bool  # decodes take the type of the prompt's last token
    offsets: np.ndarray = field(init=False)  # [num_sections, B] int64, position of new tokens minus their number
    token_types: np.ndarray | None = field(init=False)  # [B] int64, type of the tokens to come; None without types

    def __post_init__(self) -> None:
        rows = len(self.lengths)
        positions, lengths = self.inputs.get("position_ids"), torch.tensor(self.lengths)
        if positions is None:
            self.offsets = torch.zeros((1, rows), dtype=torch.long).numpy()
        else:
            last = positions[..., -1].cpu().expand(*positions.shape[:-2], rows)
            self.offsets = (last + 1 - lengths).reshape(-1, rows).numpy()
        types: Any = self.inputs.get("token_type_ids")
        self.token_types = types[:, -1].cpu().expand(rows).numpy() if self.has_token_types else None

    def real_tokens(self, rows: Sequence[int]) -> Tensor:
        """Which places hold tokens of some rows: ``[B, L]`` bool, pads and other rows are False."""
        found = torch.zeros((len(self.lengths), self.width), dtype=torch.bool)
        for row in rows:
            found[row, self.width - self.lengths[row] :] = True
        return found

    def token_types_of(self, rows: Sequence[int]) -> np.ndarray:
        """Types of the tokens to come, one per row asked for."""
        assert self.token_types is not None
        return self.token_types[list(rows)]

    def forward(self, model: PreTrainedModel, cache: Cache) -> Tensor:
        """Run the prompts; the logits after the last token of each row: ``[B, vocab]``.

        :raises UnsupportedModelError: the model moves the positions, so it is unknown where decodes go on.
        """
        generative = cast("Any", model)
        inputs = generative.prepare_inputs_for_generation(
            self.input_ids, is_first_iteration=True, cache=cache, **self.inputs
        )
        given, used = self.inputs.get("position_ids"), inputs.get("position_ids")
        if given is not None and used is None:  # the model counts columns, pads included
            self.offsets = self.width - np.array([self.lengths])
        elif given is not None and not torch.equal(used.cpu(), given.cpu()):
            raise UnsupportedModelError(f"{type(model).__name__} changes the positions that generate gives it")
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
        return logits


@dataclass(slots=True, frozen=True)
class PaddedPrompt:
    """The prompt of one request (``Request.media``); the request's own ids only hold its places."""

    call: PaddedCall
    row: int  # in the call


class PaddedStep:
    """The cache side of a padded prefill: keys and values of real tokens are copied to the blocks."""

    def __init__(self, kv_cache: KVCache, attend: Attend) -> None:
        self.kv_cache = kv_cache
        self.attend = attend
        self._real = torch.empty((0, 0), dtype=torch.bool)

    def begin(self, batch: Batch, real: Tensor) -> None:
        """Plan the writes of a batch.

        :param batch: the rows that have blocks, in the order of the call.
        :param real: ``[B, L]`` bool, where their tokens stand in the forward.
        """
        self.attend.plan(batch)
        self._real = real

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        if key.shape[0] != self._real.shape[0] or key.shape[2] != self._real.shape[1]:
            raise UnsupportedModelError(
                f"layer {layer_index} stores {key.shape[2]} keys for {self._real.shape[1]} tokens of the prompt"
            )
        real = self._real.to(key.device)
        self.attend.write(self.kv_cache.layers[layer_index], key.transpose(1, 2)[real], value.transpose(1, 2)[real])
        return key, value
