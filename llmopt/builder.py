"""Building a pipeline: load, inspect, size the pool, fold the plugins over the baseline, test."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmopt import baseline
from llmopt.batch_builder import BatchBuilder
from llmopt.block_pool import BlockPool
from llmopt.build_context import BuildContext
from llmopt.config import PipelineConfig
from llmopt.cost_measurement import measure
from llmopt.draft_check import DraftCheck
from llmopt.errors import MemoryBudgetError, ModelError, PluginUnavailableError, UnsupportedModelError
from llmopt.hf.capabilities import Capabilities, inspect_model, text_config
from llmopt.hf.generate import Generate
from llmopt.hf.probe import probe_layers
from llmopt.hf.self_test import self_test
from llmopt.kv_cache import KVCache
from llmopt.layers import STAGES
from llmopt.loaded_model import LoadedModel
from llmopt.pipeline import InferencePipeline
from llmopt.queue import RequestQueue
from llmopt.registry import Registry
from llmopt.stages import Machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DEFAULT_MODEL_LEN = 8192  # for models whose config names no limit


def build(
    model: PreTrainedModel | str | os.PathLike[str],
    plugins: Sequence[Any] | str | None = (),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PipelineConfig | None = None,
    load_options: dict[str, Any] | None = None,
    **options: Any,
) -> InferencePipeline:
    """Build a pipeline around a model.

    :param model: a loaded model, which is used as it is and never changed; or a folder, a hub id, or ``"demo"``, which
        are loaded through safetensors and accelerate.
    :param plugins: names, with options where wanted (``"native"``, ``"weight_quant:bits=8"``), plugin objects
        (``PagedKv()``), or ``"auto"``. They apply in this order.
    :param tokenizer: for prompts given as text or messages; loaded along when ``model`` is a name.
    :param config: settings; ``options`` are single settings by name, for example ``max_model_len=2048``.
    :param load_options: handed to `llmopt.load` when ``model`` is a name, for example ``{"dtype": "bfloat16"}``.
    :raises PluginError: a plugin is unknown, listed twice, conflicting, incomplete or cannot run here.
    :raises ModelError: the model cannot be found or loaded.
    :raises MemoryBudgetError: the memory for KV cannot hold one sequence.
    """
    registry = Registry(plugins)
    settings = (config or PipelineConfig()).with_options(**options)
    if isinstance(model, (str, os.PathLike)):
        from llmopt.hub import load, resolve

        source = resolve(model)
        loaded = registry.load(source, load_options or {})
        if loaded is None:
            loaded = LoadedModel(*load(source, **(load_options or {})))
    elif load_options:
        raise ModelError("load_options were given together with a model that is loaded already. Leave one of them out.")
    else:
        source, loaded = None, LoadedModel(model)
    loaded.tokenizer = tokenizer or loaded.tokenizer
    return _Builder(loaded, source, load_options or {}, registry, settings).build()


class _Builder:
    def __init__(
        self,
        loaded: LoadedModel,
        source: str | None,
        load_options: dict[str, Any],
        registry: Registry,
        config: PipelineConfig,
    ) -> None:
        self.registry = registry
        self.config = config
        self.context = BuildContext(
            model=unwrap(loaded.model),
            tokenizer=loaded.tokenizer,
            source=source,
            load_options=load_options,
            weights_unread=loaded.weights_unread,
        )
        self.loaded_model, self.known_shapes = loaded.model, loaded.layer_shapes
        self.notes: list[str] = []
        self.reserved: dict[
            str, int
        ] = {}  # plugin -> bytes that its stages will hold, which the KV pool leaves to them

    def build(self) -> InferencePipeline:
        from transformers import PreTrainedModel

        context = self.context
        self.registry.check_available(context)
        config = self.config = self.registry.configure(self.config)
        self._stage("probe", lambda: baseline.BaselineProbe(context.model.device))
        machine: Machine = self.registry.run_stage("probe", Machine)
        context.machine = machine
        self._stage("place", baseline.BaselinePlace)
        context.model = self.registry.run_stage("place", PreTrainedModel, context.model, machine)
        self._stage("shard", baseline.BaselineShard)
        context.model = self.registry.run_stage("shard", PreTrainedModel, context.model)
        capabilities = context.capabilities = inspect_model(context.model)
        if capabilities.why_not is None:
            try:
                known = self.known_shapes if context.model is self.loaded_model else None
                probe_layers(context.model, capabilities, weights_unread=context.weights_unread, known=known)
                if config.speculation.max_num_draft and capabilities.has_states:
                    raise UnsupportedModelError("recurrent states cannot be rewound, so drafts cannot be verified")
            except UnsupportedModelError as error:
                capabilities.why_not = str(error)
        if capabilities.why_not is not None:
            self.registry.refuse_without_engine(capabilities.why_not)
        pipeline = InferencePipeline()
        pipeline.notes = self.notes
        pipeline.registry, pipeline.config, pipeline.machine = self.registry, config, machine
        pipeline.model, pipeline.tokenizer, pipeline.capabilities = context.model, context.tokenizer, capabilities
        pipeline.baseline = context.baseline
        pipeline.cost_model = context.cost_model
        pipeline.why_not = capabilities.why_not
        pipeline.max_model_len = pipeline.max_num_requests = 0
        pipeline.generate = Generate(pipeline)
        if pipeline.why_not is None:
            self._build_engine(pipeline, capabilities, machine)
        for stage in STAGES:
            if hasattr(context.stages, stage):
                setattr(pipeline, stage, getattr(context.stages, stage))
        if pipeline.why_not is None and config.kernel.self_test:
            weights_unread = context.weights_unread and self.registry.chains["execute"].owners[0] != "baseline"
            reason = pipeline.why_not = capabilities.why_not = self_test(pipeline, weights_unread=weights_unread)
            if reason is not None:
                self.registry.refuse_without_engine(reason)
                self.registry.close_stages()
                pipeline.kv_cache.layers.clear()
        if context.cost_model.is_wanted and pipeline.why_not is None:
            measure(pipeline)
        self.registry.finish(pipeline)
        return pipeline

    def _build_engine(self, pipeline: InferencePipeline, capabilities: Capabilities, machine: Machine) -> None:
        context, config = self.context, self.config
        if config.memory.kv_bits is not None:
            self._quantize_kv(capabilities)
        budget = config.memory.pool_bytes
        if budget is None:
            self.reserved = {n: size for n, size in self.registry.reserved_bytes(config, context).items() if size}
            left = max(0, machine.device_available_bytes - sum(self.reserved.values()))
            budget = int(left * config.memory.memory_fraction)
        max_num_requests = self._num_slots(capabilities, budget)
        budget -= max_num_requests * 2 * capabilities.state_bytes  # at rest, and live in the cache layers
        context.max_model_len, context.block_pool = self._size_pool(capabilities, budget, max_num_requests)
        pool = context.block_pool
        kv = context.kv_cache = KVCache(
            capabilities.layer_shapes, pool.num_blocks, pool.block_size, self.registry.kv_storage(config, context)
        )
        builder = context.batch_builder = BatchBuilder(pool.block_size)
        builder.draft_check = DraftCheck(config.speculation.max_num_draft, capabilities.vocab_size)
        queue = context.queue = RequestQueue(max_num_requests)
        num_layers = text_config(context.model).num_hidden_layers
        context.hidden_layers = self.registry.hidden_layers(config, context, num_layers)
        builder.wants_hidden = bool(context.hidden_layers)
        stages, tokenizer = context.stages, context.tokenizer

        make: dict[str, Callable[[], Any]] = {
            "lookup": lambda: baseline.BaselineLookup(pool, kv, can_share=not capabilities.has_states),
            "allocate": lambda: baseline.BaselineAllocate(pool),
            "adapt": baseline.BaselineAdapt,
            "attend": lambda: baseline.BaselineAttend(kv),
            "execute": lambda: self._plain_execute(kv),
            "tokenize": lambda: baseline.BaselineTokenize(tokenizer),
            "encode_media": baseline.BaselineEncodeMedia,
            "constrain": baseline.BaselineConstrain,
            "detokenize": lambda: baseline.BaselineDetokenize(tokenizer),
            "admit": lambda: baseline.BaselineAdmit(
                stages.allocate, pool, capabilities.vocab_size, context.max_model_len
            ),
            "order": baseline.BaselineOrder,
            "budget": lambda: baseline.BaselineBudget(config.scheduling.max_tokens_per_step),
            "schedule": lambda: baseline.BaselineSchedule(
                stages.order,
                stages.budget,
                stages.allocate,
                stages.lookup,
                builder,
                max_num_requests=max_num_requests,
                can_chunk=not capabilities.has_states,
                num_lookahead=config.speculation.max_num_draft,
            ),
            "commit": lambda: baseline.BaselineCommit(stages.allocate, stages.detokenize, queue),
            "propose": baseline.BaselinePropose,
            "verify": baseline.BaselineVerify,
            "exchange": baseline.BaselineExchange,
        }
        for stage in STAGES:
            if stage == "propose":
                builder.draft_check.why_no_trees = self._why_no_trees()
                context.allows_trees = builder.draft_check.why_no_trees is None
            if stage in make:
                self._stage(stage, make[stage])
        builder.may_want_best = self._accepts_best()
        self._check_hidden_states()
        pipeline.has_own_threads = any(
            getattr(made, "has_own_threads", False) for made in self.registry.chains["execute"].objects
        )
        pipeline.max_model_len, pipeline.max_num_requests = context.max_model_len, max_num_requests
        pipeline.block_pool, pipeline.kv_cache, pipeline.queue = pool, kv, queue
        pipeline.batch_builder = builder

    def _plain_execute(self, kv_cache: KVCache) -> Any:
        """The baseline's executor.

        :raises PluginUnavailableError: a plugin wants hidden states, and the model does not show them.
        """
        context = self.context
        assert context.capabilities is not None
        try:
            return baseline.BaselineExecute(
                context.model, context.capabilities, kv_cache, context.stages.attend, context.hidden_layers
            )
        except UnsupportedModelError as error:
            names = " and ".join(map(repr, self.registry.hidden_owners))
            raise PluginUnavailableError(
                f"plugin {names} needs hidden states of the model: {error}. Remove it from plugins=[...]."
            ) from error

    def _check_hidden_states(self) -> None:
        """Refuse plugins that want hidden states from an executor that has none.

        :raises PluginUnavailableError: names both.
        """
        chain = self.registry.chains["execute"]
        if self.context.hidden_layers and not getattr(chain.objects[0], "gives_hidden", False):
            names = " and ".join(map(repr, self.registry.hidden_owners))
            raise PluginUnavailableError(
                f"plugin {names} needs hidden states of the model, and the executor of plugin {chain.owners[0]!r} does "
                "not give any. Keep one of them in plugins=[...]."
            )

    def _accepts_best(self) -> bool:
        """Whether nobody behind the executor looks at logits: see `Execute` in `llmopt.stages`."""
        chains = self.registry.chains
        behind = [*chains["execute"].objects[1:], *chains["verify"].objects]
        return all(made is self.context.baseline.verify or getattr(made, "accepts_best", False) for made in behind)

    def _why_no_trees(self) -> str | None:
        """Who would not understand drafts that are trees: see `Execute`, `Attend` and `Verify` in `llmopt.stages`."""
        for stage, count in (("attend", None), ("execute", 1), ("verify", None)):
            chain, plain = self.registry.chains[stage], getattr(self.context.baseline, stage)
            for owner, made in list(zip(chain.owners, chain.objects, strict=True))[:count]:
                if made is not plain and not getattr(made, "takes_trees", False):
                    return f"plugin {owner!r} in stage {stage!r} does not say takes_trees = True"
        return None

    def _stage(self, name: str, make: Callable[[], Any]) -> Any:
        plain = make()
        setattr(self.context.baseline, name, plain)
        return self.registry.build_stage(name, plain, self.config, self.context)

    def _num_slots(self, capabilities: Capabilities, budget: int) -> int:
        """How many requests may run at once: as configured, or as many as half of the budget holds states for.

        :raises MemoryBudgetError: not even one request's states fit.
        """
        wanted, per_request = self.config.scheduling.max_num_requests, 2 * capabilities.state_bytes
        if per_request * wanted <= max(0, budget) // 2:
            return wanted
        fitting = budget // 2 // per_request
        if fitting < 1:
            raise MemoryBudgetError(
                f"the recurrent states of one request take {per_request} bytes, and half of the {budget} bytes that "
                "are available may hold states. Raise pool_bytes or memory_fraction."
            )
        self.notes.append(f"max_num_requests is cut from {wanted} to {fitting}, whose recurrent states fit the memory")
        return fitting

    def _quantize_kv(self, capabilities: Capabilities) -> None:
        """Store keys and values in 8 bits where attention can read them so."""
        shapes = capabilities.layer_shapes
        left = None
        if not shapes:
            left = "this model stores none"
        elif capabilities.gather:
            left = "its attention changes them after the cache, so each step would take all of them back to floats"
        elif any(shape.device.type != "cpu" for shape in shapes.values()):
            left = "attention reads 8 bits on the CPU only"
        if left is not None:
            self.notes.append(f"keys and values keep their dtype: {left}")
            return
        capabilities.layer_shapes = {i: replace(shape, is_quantized=True) for i, shape in shapes.items()}

    def _size_pool(self, capabilities: Capabilities, budget: int, max_num_requests: int) -> tuple[int, BlockPool]:
        """Longest sequence and blocks, from the bytes that are left for KV.

        :raises MemoryBudgetError: names the bytes needed for one sequence, the bytes there are, and what would fit; or
            `pool_bytes` is more than the device holds.
        """
        memory = self.config.memory
        limit = capabilities.position_limit or _DEFAULT_MODEL_LEN
        wanted = min(memory.max_model_len or limit, limit)
        if memory.max_model_len is not None and memory.max_model_len > limit:
            self.notes.append(f"max_model_len {memory.max_model_len} is cut to {limit}, the limit of the model")
        per_token = KVCache.bytes_per_token(capabilities.layer_shapes)
        if per_token == 0:  # no attention layer: a block is a licence to run, and holds nothing
            return wanted, BlockPool(max_num_requests, wanted)
        size = min(memory.block_size, wanted)
        num_blocks = max(0, budget) // (per_token * size)
        fitting = num_blocks * size or max(0, budget) // per_token  # less than a block: blocks become smaller
        if fitting < wanted:
            if memory.max_model_len is not None or fitting < 2:
                needed = -(-wanted // size) * size * per_token
                others = " and ".join(f"the {size} bytes of plugin {name!r}" for name, size in self.reserved.items())
                raise MemoryBudgetError(
                    f"one sequence of {wanted} tokens needs {needed} bytes of KV ({per_token} per token), and "
                    f"{budget} bytes are available{f' beside {others}' if others else ''}; the largest max_model_len "
                    f"that fits is {fitting}. "
                    "Lower max_model_len, or raise pool_bytes or memory_fraction."
                )
            self.notes.append(f"max_model_len is cut from {wanted} to {fitting}, which is what the KV pool holds")
            wanted = fitting
            size = min(size, wanted)
            num_blocks = budget // (per_token * size)
        num_blocks = min(num_blocks, -(-wanted // size) * max_num_requests)
        assert self.context.machine is not None
        available = self.context.machine.device_available_bytes
        if memory.pool_bytes is not None and num_blocks * size * per_token > available:
            raise MemoryBudgetError(
                f"pool_bytes={memory.pool_bytes} makes a KV pool of {num_blocks * size * per_token} bytes, and this "
                f"process may take {available} bytes. Lower pool_bytes, or leave it out."
            )
        return wanted, BlockPool(num_blocks, size)


def unwrap(model: Any) -> PreTrainedModel:
    """Take the transformers model out of a PEFT wrapper.

    :raises ModelError: for anything that is not a model of transformers, and for a wrapper whose adapter is not in the
        model: prompt learning, which puts virtual tokens in front of the prompt.
    """
    from transformers import PreTrainedModel

    adapters = getattr(model, "peft_config", None)
    for name, adapter in adapters.items() if isinstance(adapters, dict) else ():
        if getattr(adapter, "is_prompt_learning", False):
            raise ModelError(
                f"adapter {name!r} ({type(adapter).__name__}) is prompt learning, whose virtual tokens the engine does "
                "not have. Call the wrapper's own generate, or pass model.get_base_model() to run without the adapter."
            )
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"expected a transformers model, a folder or a hub id, found {type(model).__name__}. "
            "Load it with AutoModelForCausalLM.from_pretrained, or pass its name."
        )
    return inner
