"""What exists while a pipeline is built: the context that hooks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmopt.cost_model import CostModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.batch_builder import BatchBuilder
    from llmopt.block_pool import BlockPool
    from llmopt.hf.capabilities import Capabilities
    from llmopt.kv_cache import KVCache
    from llmopt.queue import RequestQueue
    from llmopt.stages import Machine


@dataclass(slots=True)
class BuildContext:
    """What exists while a pipeline is built. Fields fill up in the order of `llmopt.layers.STAGES`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str | None = None  # folder, .gguf file or hub id, when the model was given by name
    load_options: dict[str, Any] = field(default_factory=dict)  # what the user gave for loading it
    weights_unread: bool = False  # a forward of the model would read its weights; see `LoadedModel`
    machine: Machine | None = None  # after probe
    capabilities: Capabilities | None = None  # after shard: how the engine can run the model
    block_pool: BlockPool | None = None  # before lookup
    kv_cache: KVCache | None = None  # before lookup
    batch_builder: BatchBuilder | None = None  # before lookup
    queue: RequestQueue | None = None  # before lookup
    max_model_len: int = 0  # before lookup: longest sequence, prompt included
    hidden_layers: tuple[int, ...] = ()  # before lookup: where plugins want hidden states, ascending
    allows_trees: bool = False  # before propose: whether drafts may be trees, see `DraftTokens`
    cost_model: CostModel = field(default_factory=CostModel)  # call `wanted()` in a hook; measured after the stages
    stages: SimpleNamespace = field(default_factory=SimpleNamespace)  # stages built so far, by name
    baseline: SimpleNamespace = field(default_factory=SimpleNamespace)  # their plain forms, by name
