"""Prefill in processes of its own: what the hooks of the plugin do in this mode."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llmopt.errors import PluginOptionError, PluginUnavailableError
from llmopt.plugin_info import info_of
from llmopt_plugins.scheduling.pd_separation.cpu_split import Share, SplitProbe
from llmopt_plugins.scheduling.pd_separation.first_token import HandOverExecute
from llmopt_plugins.scheduling.pd_separation.hand_over import HandOver, HandOverAllocate, HandOverLookup
from llmopt_plugins.scheduling.pd_separation.keeper import Keeper, Limits, Process
from llmopt_plugins.scheduling.pd_separation.launch import LocalProcess
from llmopt_plugins.scheduling.pd_separation.options import ProcessOptions
from llmopt_plugins.scheduling.pd_separation.protocol import Setup
from llmopt_plugins.scheduling.pd_separation.remote import RemoteHub
from llmopt_plugins.scheduling.pd_separation.shared_pool import SharedPool
from llmopt_plugins.scheduling.pd_separation.worker import sample_of, shapes_of

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Allocate, Execute, Lookup, Probe


class ProcessMode:
    """One pipeline's workers, from the probe of the machine to the end.

    :param plugin: the plugin object that this belongs to, which the workers do without.
    """

    first_delay_s = 1.0  # before a lost worker is started again

    def __init__(self, options: ProcessOptions, plugin: Any) -> None:
        self.options, self.plugin = options, plugin
        self.probe: SplitProbe | None = None
        self.memory: SharedPool | None = None
        self.hand_over: HandOver | None = None
        self.context: BuildContext | None = None

    def wrap_probe(self, probe: Probe) -> Probe | None:
        if self.options.listen is not None:
            return None  # the workers have machines of their own
        self.probe = SplitProbe(probe, self.options.workers, self.options.cpus)
        return self.probe

    def reserve(self, context: BuildContext) -> int | None:
        """Bytes of the workers' models."""
        if self.options.listen is not None:
            return None
        num_bytes = sum(p.numel() * p.element_size() for p in context.model.parameters())
        return int(2 * self.options.workers * num_bytes)  # packed weights may stand beside those that were loaded

    def kv_storage(self, context: BuildContext) -> SharedPool | None:
        """
        :raises PluginUnavailableError: a worker could not have the same model on the same blocks.
        """
        if context.model.device.type != "cpu":
            raise PluginUnavailableError(
                f'pd_separation with mode="process" shares host memory, and the model is on {context.model.device}. '
                'Use mode="slices".'
            )
        if self.source_of(context) is None:
            raise PluginUnavailableError(
                'pd_separation with mode="process" starts processes that load the model themselves, and this model was '
                'given as an object. Build from its folder or name, llmopt.build("folder", ...), or say where it was '
                'saved: PdSeparation(mode="process", source="folder").'
            )
        assert context.capabilities is not None
        if context.capabilities.has_states:
            raise PluginUnavailableError(
                'pd_separation with mode="process" hands over keys and values, and this model has recurrent states '
                'beside them. Use mode="slices".'
            )
        if self.options.listen is not None:
            return None
        self.memory = SharedPool()
        return self.memory

    def source_of(self, context: BuildContext) -> str | None:
        """Where workers load the model from."""
        return self.options.source or context.source

    def wrap_lookup(self, lookup: Lookup, context: BuildContext) -> Lookup:
        assert context.block_pool is not None
        self.context = context
        self.hand_over = HandOver(context.block_pool, self.options.min_tokens)
        about = f"prompts from {self.options.min_tokens} tokens on are computed by "
        if self.probe is None:
            about += f"{self.options.workers} processes that report at {self.options.listen}"
        else:
            shares = "+".join(str(len(share.cpus) or share.num_threads) for share in self.probe.workers)
            about += f"{self.options.workers} processes with {shares} CPUs, decodes have {self.probe.own.num_threads}"
        return HandOverLookup(lookup, self.hand_over, context, about, self.close)

    def wrap_allocate(self, allocate: Allocate) -> Allocate:
        assert self.hand_over is not None
        return HandOverAllocate(allocate, self.hand_over)

    def wrap_execute(self, execute: Execute, context: BuildContext) -> Execute:
        assert self.hand_over is not None
        return HandOverExecute(execute, self.hand_over, context.cost_model)

    def finish(self, pipeline: InferencePipeline) -> None:
        """Start the workers and wait until they are ready.

        :raises PluginUnavailableError: one of them cannot be set up.
        """
        if pipeline.why_not is not None or self.hand_over is None:
            return
        hand_over, options = self.hand_over, self.options
        limits = Limits(options.chunk_tokens, options.timeout_s, options.start_timeout_s, self.first_delay_s)
        try:
            for number, (share, launch) in enumerate(self._launchers(pipeline)):
                keeper = Keeper(number, launch, self._setup(pipeline, share), limits, hand_over.on_over)
                keeper.has_own_pool = options.listen is not None
                hand_over.keepers.append(keeper)
                keeper.start()
            for keeper in hand_over.keepers:
                reason = keeper.wait_ready(options.start_timeout_s)
                if reason is not None:
                    raise PluginUnavailableError(f"pd_separation: a prefill process cannot be set up: {reason}.")
        except BaseException:
            hand_over.close()
            self.close()
            if self.probe is not None:
                self.probe.close()
            raise
        owners = pipeline.registry.chains["lookup"].owners
        name = info_of(self.plugin).name
        if owners[-1] != name:
            others = ", ".join(owners[owners.index(name) + 1 :])
            pipeline.notes.append(
                f"{name} stands before {others} in lookup, so workers compute what would be found. List it after them."
            )
        hand_over.start(pipeline)

    def _launchers(self, pipeline: InferencePipeline) -> list[tuple[Share, Callable[[], Process]]]:
        """For each worker, what it computes on, and what starts it."""
        if self.options.listen is not None:
            hub = RemoteHub(self.options.listen, pipeline.kv_cache, self.options.timeout_s)
            assert self.hand_over is not None
            self.hand_over.closers.append(hub.close)
            return [(Share((), 0), hub.accept)] * self.options.workers
        memory, probe = self.memory, self.probe
        assert memory is not None
        assert probe is not None
        return [(share, partial(LocalProcess, share, memory.descriptor)) for share in probe.workers]

    def _setup(self, pipeline: InferencePipeline, share: Share) -> Setup:
        assert self.context is not None
        source = self.source_of(self.context)
        assert source is not None
        pool, config = pipeline.block_pool, pipeline.config
        per_token = sum(shape.bytes_per_token for shape in pipeline.kv_cache.shapes.values())
        memory = replace(
            config.memory,
            pool_bytes=pool.num_blocks * pool.block_size * per_token,
            block_size=pool.block_size,
            max_model_len=pipeline.max_model_len,
        )
        # as many slots as the blocks allow, so that nothing but the bytes bounds the pool
        scheduling = replace(config.scheduling, max_num_requests=max(pool.num_blocks, 1))
        options = dict(self.context.load_options)
        options.setdefault("dtype", str(pipeline.model.dtype).removeprefix("torch."))
        return Setup(
            source=source,
            load_options=options,
            plugins=self._plugins_of_workers(pipeline),
            config=replace(config, memory=memory, scheduling=scheduling),
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            shapes=shapes_of(pipeline),
            sample=sample_of(pipeline.model),
            num_threads=share.num_threads or 1 << 16,
        )

    def _plugins_of_workers(self, pipeline: InferencePipeline) -> list[Any]:
        """Those that take part in a forward.

        :raises PluginOptionError: one of them cannot be sent to another process.
        """
        chains = pipeline.registry.chains
        standing = {*chains["execute"].plugins, *chains["attend"].plugins}
        chosen = []
        for plugin in pipeline.registry.plugins:
            info = info_of(plugin)
            if plugin is self.plugin or not (info.layer == "kernel" or info.name in standing):
                continue
            try:
                pickle.dumps(plugin)
            except Exception as error:
                raise PluginOptionError(
                    f"plugin {info.name!r} takes part in the forward, and cannot be sent to a prefill process "
                    f"({type(error).__name__}: {error}). Give its class a __reduce__ that returns its options."
                ) from error
            chosen.append(plugin)
        return chosen

    def close(self) -> None:
        """Let go of the memory file; the tensors go with the pool."""
        if self.memory is not None:
            self.memory.close()
