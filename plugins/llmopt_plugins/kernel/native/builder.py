"""Putting the executor together: read the model, choose formats, pack, make the decoder."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from llmopt.errors import PluginUnavailableError
from llmopt_plugins.kernel.native.decoder_plan import DecoderPlan, RopePlan, native_spec
from llmopt_plugins.kernel.native.decoder_spec import NotNativeError, read_decoder
from llmopt_plugins.kernel.native.executor import NativeExecute
from llmopt_plugins.kernel.native.formats import choose_shapes, describe_formats
from llmopt_plugins.kernel.native.packing import (
    ModelWeights,
    PackedWeights,
    WeightSource,
    extension,
    layout,
    pack,
)
from llmopt_plugins.kernel.native.shared_weights import is_packed, refill, share
from llmopt_plugins.kernel.native.weight_watch import WeightWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from llmopt.build_context import BuildContext
    from llmopt.config import KernelConfig, PipelineConfig
    from llmopt.kv_cache import KVCache
    from llmopt_plugins.kernel.native.packed_store import PackedStore

_CACHE_DTYPES = {torch.float32: False, torch.bfloat16: True}


def make_executor(
    config: PipelineConfig,
    context: BuildContext,
    num_threads: int,
    *,
    source: WeightSource | None = None,
    store: PackedStore | None = None,
) -> NativeExecute:
    """The executor for the model of a context.

    :param source: where the weights come from; None: the model itself.
    :param store: may have the weights packed already.
    :raises PluginUnavailableError: the decoder cannot run the model; says why.
    """
    core = extension()
    model, kv_cache = context.model, context.kv_cache
    assert kv_cache is not None
    try:
        plan = read_decoder(model)
    except NotNativeError as error:
        raise PluginUnavailableError(f"plugin 'native' cannot run this model: it {error}.") from error
    check_cache(plan, kv_cache)
    weights = source or ModelWeights(model)
    packed = None if store is None else store.load(plan, num_threads)
    if packed is None:
        shapes = choose_shapes(plan.matrices, weights, config.kernel)
        make = share if source is None else pack
        packed = make(plan.matrices, plan.vectors, shapes, weights, num_threads)
        if source is None:  # from the model itself, which the self-test may well read then
            context.weights_unread = False
    shapes = {name: shape for name, (shape, _) in packed.matrices.items()}
    tables = [rope.tables(context.max_model_len) for rope in plan.ropes]
    team = thread_team(num_threads)

    def make_decoder() -> _Decoder:
        return _Decoder(plan, packed, tables, kv_cache, team, context.max_model_len, context.hidden_layers)

    has_own_weights = source is None
    watch = WeightWatch(model, reads_values=has_own_weights and not context.weights_unread)

    def refresh(execute: NativeExecute) -> str | None:
        try:
            now = read_decoder(model)
        except NotNativeError as error:
            return str(error)
        fresh = ModelWeights(model)
        is_same = (now.matrices, now.vectors, now.layers) == (plan.matrices, plan.vectors, plan.layers)
        is_same &= len(now.ropes) == len(plan.ropes) and all(map(RopePlan.equals, now.ropes, plan.ropes))
        if is_same and config.kernel.weight_bits is None:  # otherwise other weights may have other forms, too
            is_same = choose_shapes(now.matrices, fresh, config.kernel) == shapes
        if not is_same or not has_own_weights:
            return "was changed since the pipeline was built; build again"
        refill(packed, plan.matrices, plan.vectors, fresh, num_threads)
        if execute.decoder.memory is not packed.memory:
            execute.use(make_decoder())
        watch.reset()
        return None

    return NativeExecute(
        packed,
        make_decoder(),
        core.StepPlan(),
        plan.vocab_size,
        context.baseline.execute,
        watch,
        refresh,
        model_about=f"{plan.kinds}, {describe_formats(shapes)}",
        machine_about=f"{core.isa()} kernels, {team.size} thread{'s' if team.size > 1 else ''}",
        hidden_shape=(len(context.hidden_layers), plan.hidden_size),
    )


def bytes_to_hold(
    context: BuildContext, config: KernelConfig, num_threads: int, source: WeightSource | None = None
) -> int | None:
    """Bytes that the packed weights will take, at most; None for a model that the decoder cannot run.

    Nothing is packed, and weights are only read to see whether another pipeline has packed the same ones: then no bytes
    are taken. Where packing decides by the weights whether groups of four bits have a minimum, they count as having one
    (half a bit per weight more).

    :param source: where the weights come from; None: the model itself.
    """
    model = context.model
    try:
        plan = read_decoder(model)
    except NotNativeError:
        return None
    if config.weight_minimum is None:
        config = replace(config, weight_minimum=True)
    weights = source or ModelWeights(model)
    shapes = choose_shapes(plan.matrices, weights, config)
    may_share = source is None and not context.weights_unread  # otherwise they come from a file
    if may_share and is_packed(plan.matrices, plan.vectors, shapes, weights, num_threads):
        return 0
    return layout(shapes, {name: vector.count for name, vector in plan.vectors.items()})[2]


def check_cache(plan: DecoderPlan, kv_cache: KVCache) -> None:
    """Refuse a pool that stores something else than the decoder writes.

    :raises PluginUnavailableError: says what differs.
    """
    for index, layer in enumerate(plan.layers):
        shape = kv_cache.shapes.get(index)
        wanted = (layer.attention.num_kv_heads, layer.attention.head_dim)
        found = shape and (shape.num_key_heads, shape.key_dim)
        if shape is None or found != wanted or (shape.num_value_heads, shape.value_dim) != wanted:
            raise PluginUnavailableError(
                f"plugin 'native' cannot run this model: its layer {index} stores keys of {found} (heads, size), and "
                f"{wanted} were read from the model."
            )
        if shape.dtype not in _CACHE_DTYPES or shape.device.type != "cpu":
            raise PluginUnavailableError(
                f"plugin 'native' needs keys and values in float32 or bfloat16 on the CPU, the pool of this model has "
                f"{str(shape.dtype).removeprefix('torch.')} on {shape.device}. Load the model with dtype=bfloat16."
            )


@functools.cache
def thread_team(num_threads: int) -> Any:
    """The threads that all decoders of this process share; they sleep when nobody steps."""
    return extension().ThreadTeam(num_threads)


class _Decoder:
    """The extension's decoder, together with the memory that it looks at."""

    def __init__(
        self,
        plan: DecoderPlan,
        packed: PackedWeights,
        tables: list[tuple[np.ndarray, np.ndarray]],
        kv_cache: KVCache,
        team: Any,
        max_model_len: int,
        hidden_layers: Sequence[int],
    ) -> None:
        core = extension()
        self.memory = packed.memory  # `packed` may move to another
        self.owners = (tables, kv_cache)
        layers = []
        for layer in plan.layers:  # a window that holds every sequence is none
            window = layer.attention.sliding_window
            attention = replace(layer.attention, sliding_window=0 if window >= max_model_len else window)
            layers.append(replace(layer, attention=attention))
        caches = []
        for index in range(len(layers)):
            kv, shape = kv_cache.layers[index], kv_cache.shapes[index]
            caches.append(
                core.LayerCache(
                    kv.key.data_ptr(),
                    kv.value.data_ptr(),
                    kv_cache.num_blocks,
                    shape.num_key_heads,
                    kv_cache.block_size,
                    shape.key_dim,
                    shape.value_dim,
                    _CACHE_DTYPES[shape.dtype],
                    shape.is_quantized,
                )
            )
        spec = native_spec(replace(plan, layers=layers), packed, tables, hidden_layers)
        self.decoder = core.Decoder(spec, caches, team)
        self.step = self.decoder.step
