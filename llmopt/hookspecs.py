"""The hook points, in the order of `llmopt.stages`: two for every stage; one each to load, to configure, to reserve
memory, to provide that of the KV pool, to ask for hidden states, to finish.

Hooks are called while a pipeline is built, one plugin at a time, in the order in which the user listed the plugins;
they are never called in the step. A replacing hook returns a stage or None; at most one plugin may replace a stage. A
wrapping hook receives the stage as the plugins before it left it and returns one of the same protocol, or None to
leave it alone; the plugin listed last is outermost. Hooks may name fewer arguments than their specification.

``config`` is the whole `PipelineConfig`, read-only. ``context`` is the `BuildContext`: the model, the tokenizer, the
machine, the pool, and the stages that exist already. Stages are built in this order: probe, place, shard, lookup,
allocate, adapt, attend, execute, tokenize, encode_media, constrain, detokenize, admit, order, budget, schedule, commit,
propose, verify, exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.kv_cache import KVStorage
    from llmopt.loaded_model import LoadedModel
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import (
        Adapt,
        Admit,
        Allocate,
        Attend,
        Budget,
        Commit,
        Constrain,
        Detokenize,
        EncodeMedia,
        Exchange,
        Execute,
        Lookup,
        Order,
        Place,
        Probe,
        Propose,
        Schedule,
        Shard,
        Tokenize,
        Verify,
    )

hookspec = pluggy.HookspecMarker("llmopt")
hookimpl = pluggy.HookimplMarker("llmopt")


@hookspec
def llmopt_load(source: str, load_options: dict[str, Any]) -> LoadedModel | None:
    """Load the model that `build` was given by name.

    Runs once, first of all, and only when the model was given by name. The first plugin that returns a model decides;
    when none does, `llmopt.load` loads it.

    :param source: the path of a folder or of a .gguf file, or a hub id: what `llmopt.hub.resolve` returned.
    :param load_options: what the user gave for `llmopt.load`; read-only.
    :returns: the model and its tokenizer, or None to leave it to others.
    """


@hookspec
def llmopt_configure(config: PipelineConfig) -> PipelineConfig | None:
    """Change the configuration before anything is built.

    :param config: the configuration as the plugins listed earlier left it.
    :returns: a changed copy, or None to leave it alone.
    """


@hookspec
def llmopt_reserve(config: PipelineConfig, context: BuildContext) -> int | None:
    """Say how much memory the stages of this plugin will hold, so that the KV pool leaves it to them.

    Runs once, after the model is placed and sharded and before the pool is sized; not when ``pool_bytes`` is given, nor
    for a model that the engine cannot run.

    :returns: bytes on the device of the model, at most, beside what the model holds already; or None.
    """


@hookspec
def llmopt_kv_storage(config: PipelineConfig, context: BuildContext) -> KVStorage | None:
    """Provide the memory of the KV pool, for example memory that another process maps too.

    Runs once, when the pool is sized and before its tensors are made. At most one plugin may provide it.

    :returns: a callable ``(shape, dtype, device) -> Tensor`` that is called for the keys and the values of every layer
        in turn, lowest layer first; or None. Its memory need not be written to: blocks are, before they are read.
    """


@hookspec
def llmopt_hidden_states(config: PipelineConfig, context: BuildContext) -> Sequence[int] | None:
    """Ask for the residual stream of the model at some layers, for a drafter or a probe.

    Runs once, after the pool is sized and before the first stage of the engine is made; not for a model that the engine
    cannot run. What all plugins asked for is merged into ``context.hidden_layers``, ascending, and `execute` fills in
    ``batch.hidden`` ``[T, len(context.hidden_layers), hidden_size]``. Each step begins with ``batch.wants_hidden``
    True; `propose` may switch it off when nobody needs them in this step, so a reader expects None. Tokens whose KV was
    found instead of computed have no hidden states.

    :returns: numbers of layers: ``i`` for what enters layer ``i``, the number of layers for the output of the final
        norm; or None.
    """


@hookspec
def llmopt_finish(pipeline: InferencePipeline) -> None:
    """Look at the finished pipeline: give back what only building needed, keep what is worth keeping for next time.

    Runs once, last of all, after the self-test; also for a model that the engine cannot run.

    :param pipeline: as the user will get it. Its stages stay as they are.
    :returns: nothing.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 1. application
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_tokenize(config: PipelineConfig, context: BuildContext) -> Tokenize | None:
    """Replace the tokenizer call.

    Runs once per prompt, on the caller's thread.

    :returns: a stage of protocol `Tokenize`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_tokenize(tokenize: Tokenize, config: PipelineConfig, context: BuildContext) -> Tokenize | None:
    """Wrap the tokenizer call.

    Runs once per prompt, on the caller's thread.

    :param tokenize: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_encode_media(config: PipelineConfig, context: BuildContext) -> EncodeMedia | None:
    """Replace the preparation of images and audio.

    Runs once per request, on the caller's thread and outside of the lock, before it is admitted; also for requests
    that carry nothing beside their ids.

    :returns: a stage of protocol `EncodeMedia`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_encode_media(
    encode_media: EncodeMedia, config: PipelineConfig, context: BuildContext
) -> EncodeMedia | None:
    """Wrap the preparation of images and audio.

    Runs once per request, on the caller's thread and outside of the lock, before it is admitted; also for requests
    that carry nothing beside their ids.

    :param encode_media: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_constrain(config: PipelineConfig, context: BuildContext) -> Constrain | None:
    """Replace the choice of allowed tokens.

    Runs in every step before the forward; what it returns is applied to the logits afterwards.

    :returns: a stage of protocol `Constrain`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_constrain(constrain: Constrain, config: PipelineConfig, context: BuildContext) -> Constrain | None:
    """Wrap the choice of allowed tokens.

    Runs in every step before the forward; what it returns is applied to the logits afterwards.

    :param constrain: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_detokenize(config: PipelineConfig, context: BuildContext) -> Detokenize | None:
    """Replace the way from new tokens to text.

    Runs in `commit` for every request that wants text.

    :returns: a stage of protocol `Detokenize`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_detokenize(detokenize: Detokenize, config: PipelineConfig, context: BuildContext) -> Detokenize | None:
    """Wrap the way from new tokens to text.

    Runs in `commit` for every request that wants text.

    :param detokenize: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 2. scheduling
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_admit(config: PipelineConfig, context: BuildContext) -> Admit | None:
    """Replace the door to the queue.

    Runs once per request.

    :returns: a stage of protocol `Admit`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_admit(admit: Admit, config: PipelineConfig, context: BuildContext) -> Admit | None:
    """Wrap the door to the queue.

    Runs once per request.

    :param admit: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_order(config: PipelineConfig, context: BuildContext) -> Order | None:
    """Replace the order of the queue.

    Runs in `schedule`, first of all, in every step.

    :returns: a stage of protocol `Order`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_order(order: Order, config: PipelineConfig, context: BuildContext) -> Order | None:
    """Wrap the order of the queue.

    Runs in `schedule`, first of all, in every step.

    :param order: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_budget(config: PipelineConfig, context: BuildContext) -> Budget | None:
    """Replace the budget of a step.

    Runs in `schedule`, after `order`, in every step.

    :returns: a stage of protocol `Budget`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_budget(budget: Budget, config: PipelineConfig, context: BuildContext) -> Budget | None:
    """Wrap the budget of a step.

    Runs in `schedule`, after `order`, in every step.

    :param budget: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_schedule(config: PipelineConfig, context: BuildContext) -> Schedule | None:
    """Replace the scheduler.

    Runs at the start of every step; the memory stages exist by then.

    :returns: a stage of protocol `Schedule`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_schedule(schedule: Schedule, config: PipelineConfig, context: BuildContext) -> Schedule | None:
    """Wrap the scheduler.

    Runs at the start of every step; the memory stages exist by then.

    :param schedule: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_commit(config: PipelineConfig, context: BuildContext) -> Commit | None:
    """Replace the end of the step.

    Runs after `verify`; the scheduler, `detokenize` and `allocate` exist by then.

    :returns: a stage of protocol `Commit`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_commit(commit: Commit, config: PipelineConfig, context: BuildContext) -> Commit | None:
    """Wrap the end of the step.

    Runs after `verify`; the scheduler, `detokenize` and `allocate` exist by then.

    :param commit: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 6. memory
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_lookup(config: PipelineConfig, context: BuildContext) -> Lookup | None:
    """Replace the search for KV that exists already.

    Runs in `schedule` when a waiting request is about to start; the pool exists by then.

    :returns: a stage of protocol `Lookup`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_lookup(lookup: Lookup, config: PipelineConfig, context: BuildContext) -> Lookup | None:
    """Wrap the search for KV that exists already.

    Runs in `schedule` when a waiting request is about to start; the pool exists by then.

    :param lookup: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_allocate(config: PipelineConfig, context: BuildContext) -> Allocate | None:
    """Replace the allocation of KV blocks.

    Runs in `schedule`, and `allocate.free` in `commit`; the pool exists by then.

    :returns: a stage of protocol `Allocate`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_allocate(allocate: Allocate, config: PipelineConfig, context: BuildContext) -> Allocate | None:
    """Wrap the allocation of KV blocks.

    Runs in `schedule`, and `allocate.free` in `commit`; the pool exists by then.

    :param allocate: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_adapt(config: PipelineConfig, context: BuildContext) -> Adapt | None:
    """Replace the activation of adapters (LoRA).

    Runs in every step right before the forward.

    :returns: a stage of protocol `Adapt`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_adapt(adapt: Adapt, config: PipelineConfig, context: BuildContext) -> Adapt | None:
    """Wrap the activation of adapters (LoRA).

    Runs in every step right before the forward.

    :param adapt: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 3. speculation
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_propose(config: PipelineConfig, context: BuildContext) -> Propose | None:
    """Replace the drafter.

    Runs in every step after `schedule`. A plugin that drafts also sets `speculation.max_num_draft`, in
    `llmopt_configure`.

    :returns: a stage of protocol `Propose`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_propose(propose: Propose, config: PipelineConfig, context: BuildContext) -> Propose | None:
    """Wrap the drafter.

    Runs in every step after `schedule`. A plugin that drafts also sets `speculation.max_num_draft`, in
    `llmopt_configure`.

    :param propose: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_verify(config: PipelineConfig, context: BuildContext) -> Verify | None:
    """Replace the choice of tokens.

    Runs in every step on the logits.

    :returns: a stage of protocol `Verify`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_verify(verify: Verify, config: PipelineConfig, context: BuildContext) -> Verify | None:
    """Wrap the choice of tokens.

    Runs in every step on the logits.

    :param verify: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 5. kernel
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_execute(config: PipelineConfig, context: BuildContext) -> Execute | None:
    """Replace the forward of the model.

    Runs in every step; `attend` and the pool exist by then.

    :returns: a stage of protocol `Execute`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_execute(execute: Execute, config: PipelineConfig, context: BuildContext) -> Execute | None:
    """Wrap the forward of the model.

    Runs in every step; `attend` and the pool exist by then.

    :param execute: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_attend(config: PipelineConfig, context: BuildContext) -> Attend | None:
    """Replace attention over KV blocks.

    Runs once per layer in the forward.

    :returns: a stage of protocol `Attend`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_attend(attend: Attend, config: PipelineConfig, context: BuildContext) -> Attend | None:
    """Wrap attention over KV blocks.

    Runs once per layer in the forward.

    :param attend: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 4. parallelism
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_shard(config: PipelineConfig, context: BuildContext) -> Shard | None:
    """Replace the split of the model over ranks.

    Runs once while the pipeline is built; the placed model exists by then.

    :returns: a stage of protocol `Shard`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_shard(shard: Shard, config: PipelineConfig, context: BuildContext) -> Shard | None:
    """Wrap the split of the model over ranks.

    Runs once while the pipeline is built; the placed model exists by then.

    :param shard: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_exchange(config: PipelineConfig, context: BuildContext) -> Exchange | None:
    """Replace the distribution of a batch to all ranks.

    Runs in every step before the forward.

    :returns: a stage of protocol `Exchange`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_exchange(exchange: Exchange, config: PipelineConfig, context: BuildContext) -> Exchange | None:
    """Wrap the distribution of a batch to all ranks.

    Runs in every step before the forward.

    :param exchange: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


# ---------------------------------------------------------------------------------------------------------------------
# 7. hardware
# ---------------------------------------------------------------------------------------------------------------------
@hookspec
def llmopt_replace_probe(config: PipelineConfig, context: BuildContext) -> Probe | None:
    """Replace the look at the machine.

    Runs once, first of all.

    :returns: a stage of protocol `Probe`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_probe(probe: Probe, config: PipelineConfig, context: BuildContext) -> Probe | None:
    """Wrap the look at the machine.

    Runs once, first of all.

    :param probe: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """


@hookspec
def llmopt_replace_place(config: PipelineConfig, context: BuildContext) -> Place | None:
    """Replace the binding of model, threads and memory to the hardware.

    Runs once, right after `probe`.

    :returns: a stage of protocol `Place`, or None when this plugin does not want to after all.
    """


@hookspec
def llmopt_wrap_place(place: Place, config: PipelineConfig, context: BuildContext) -> Place | None:
    """Wrap the binding of model, threads and memory to the hardware.

    Runs once, right after `probe`.

    :param place: the stage as the plugins listed earlier left it.
    :returns: a stage of the same protocol, or None to leave it alone.
    """
