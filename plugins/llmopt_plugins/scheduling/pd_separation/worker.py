"""The prefill process.

It is started by the decode process, with a socket and the memory file of the pool as open descriptors, and ends when
the socket is closed at the other end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.scheduling.pd_separation.protocol import Broken, Channel, Chunk, Done, Ready, Setup

if TYPE_CHECKING:
    from llmopt.kv_cache import KVStorage
    from llmopt.pipeline import InferencePipeline


class GivenStorage:
    """The pool lies where the decode process put it."""

    info = PluginInfo(
        name="given_storage", layer="memory", promise="exact", summary="the KV pool in memory of another process"
    )

    def __init__(self, storage: KVStorage) -> None:
        self.storage = storage

    @hookimpl
    def llmopt_kv_storage(self) -> KVStorage:
        return self.storage


def build_worker(setup: Setup, storage: KVStorage | None) -> InferencePipeline:
    """The pipeline of a worker, whose `execute` is all that is used of it.

    :raises RuntimeError: it would not compute the same on the same blocks.
    """
    import llmopt

    plugins = list(setup.plugins)
    for plugin in plugins:
        if isinstance(getattr(plugin, "threads", None), int):
            plugin.threads = min(plugin.threads, setup.num_threads)
    if storage is not None:
        plugins.append(GivenStorage(storage))
    # the self-test would write to blocks that belong to somebody
    config = replace(setup.config, kernel=replace(setup.config.kernel, self_test=False))
    pipe = llmopt.build(setup.source, plugins, config=config, load_options=setup.load_options)
    pool = pipe.block_pool
    if (pool.num_blocks, pool.block_size) != (setup.num_blocks, setup.block_size):
        raise RuntimeError(
            f"the worker's pool would have {pool.num_blocks} blocks of {pool.block_size} tokens, not "
            f"{setup.num_blocks} of {setup.block_size}"
        )
    found = shapes_of(pipe)
    if found != setup.shapes:
        raise RuntimeError(f"layers of the worker store {found}, those of the decode process {setup.shapes}")
    if sample_of(pipe.model) != setup.sample:
        raise RuntimeError(f"the weights that were loaded from {setup.source} are others than the decode process has")
    return pipe


def shapes_of(pipe: Any) -> dict[int, str]:
    """What each layer of a pool stores, as text. ``pipe``: a pipeline, or a `BuildContext`."""
    return {
        index: f"{tuple(layer.key.shape)} {tuple(layer.value.shape)} {layer.key.dtype}"
        for index, layer in pipe.kv_cache.layers.items()
    }


def sample_of(model: Any) -> list[float]:
    """A few numbers out of the first and the last parameter."""
    parameters = list(model.parameters())
    return [float(x) for p in (parameters[0], parameters[-1]) for x in p.detach().flatten()[:8].float().tolist()]


def serve(channel: Channel, make: Callable[[Setup], tuple[InferencePipeline, Callable[[list[int]], None]]]) -> None:
    """Answer chunks until the other end says None, or is gone.

    :param make: builds the pipeline, and what sends the written blocks after each chunk, if they must be sent.
    """
    import torch

    from llmopt.batch import Batch

    setup = channel.recv()
    try:
        pipe, send = make(setup)
    except Exception as error:
        channel.send(Broken(f"{type(error).__name__}: {error}"))
        return
    with pipe:
        channel.send(Ready())
        while True:
            chunk: Chunk | None = channel.recv()
            if chunk is None:
                return
            start, reason, logits = time.perf_counter(), None, None
            try:
                found = pipe.execute(Batch.from_bytes(chunk.batch), None)
                assert isinstance(found, torch.Tensor), "a chunk wants logits"
                if len(found):
                    logits = found[-1].float().numpy()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            channel.send(Done(chunk.number, time.perf_counter() - start, reason, logits))
            if reason is None:
                send(chunk.blocks)


def main(arguments: list[str]) -> None:
    """Run as a process of the machine on which the decode process runs.

    :param arguments: descriptors of the socket and of the memory file, and CPUs to run on (``"2,3"``; empty: any).
    """
    socket, memory, cpus = int(arguments[0]), int(arguments[1]), arguments[2]
    if cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])  # threads that start later inherit it
    from multiprocessing.connection import Connection

    from llmopt_plugins.scheduling.pd_separation.shared_pool import SharedPool

    def make(setup: Setup) -> tuple[InferencePipeline, Callable[[list[int]], None]]:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(setup.num_threads)
        return build_worker(setup, SharedPool(memory)), lambda blocks: None  # the blocks are there already

    channel = Connection(socket)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the decode process is gone
        serve(channel, make)
