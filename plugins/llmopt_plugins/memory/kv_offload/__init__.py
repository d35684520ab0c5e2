"""Evicted KV of the prefix cache goes to host memory, then to a file, and comes back when that beats computing it.

Stage: lookup (wraps).   Promise: exact, what comes back is what was computed.
Helps: more prefixes than the pool holds; prefixes that outlive the process.   Hurts: memory and disk beside the pool;
storing is skipped where it would take more than 3 % of the time to compute.
Source: Y. Sheng et al., "FlexGen: High-Throughput Generative Inference of Large Language Models with a Single GPU",
2023 (tiers); B. Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", 2024 (KV of earlier turns in host memory and on disk).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt.errors import PluginOptionError
from llmopt_plugins.memory.kv_offload.block_file import BlockFile, BlockFileError
from llmopt_plugins.memory.prefix_cache.prefix_file import fingerprint
from llmopt_plugins.memory.prefix_cache.stages import CachedLookup
from llmopt_plugins.option_checks import check_host_memory, check_int, check_path, check_use
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.kv_cache import KVCache
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request
    from llmopt.stages import Lookup
    from llmopt_plugins.memory.kv_offload.store import BlockStore

logger = logging.getLogger("llmopt")

_FILE_BYTES = 4 << 30


class OffloadLookup(Wrapping):
    """Passes requests on; the prefix cache asks the store. Here for what the store has to say, and for its end."""

    inner: Lookup

    def __init__(self, inner: Lookup) -> None:
        super().__init__(inner)
        self.store: BlockStore | None = None

    def __call__(self, request: Request) -> int | None:
        return self.inner(request)

    def stats(self) -> dict[str, float]:
        return {} if self.store is None else self.store.stats()

    def describe(self) -> str:
        store = self.store
        if store is None:
            return "keeps nothing: this model's KV cannot be kept"
        text = f"up to {store.num_slots} evicted blocks in host memory"
        return text if store.file is None else f"{text}, {store.file.num_slots} in {store.file.path}"

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


class KvOffload:
    """Keep evicted KV blocks in host memory and in a file."""

    info = PluginInfo(
        name="kv_offload",
        layer="memory",
        promise="exact",
        summary="evicted KV goes to host memory, then to a file, and comes back when that beats computing it",
        requires=("prefix_cache",),
    )

    def __init__(
        self, host_bytes: int = 1 << 30, folder: str | os.PathLike[str] | None = None, file_bytes: int = _FILE_BYTES
    ) -> None:
        """:param host_bytes: host memory for evicted blocks.
        :param folder: where the file is, one per model; None: there is none. One process at a time uses it.
        :param file_bytes: size of the file, at most.
        """
        check_int("host_bytes", host_bytes, 1, of="bytes")
        check_int("file_bytes", file_bytes, 1, of="bytes")
        if folder is None:
            check_use("a folder", {"file_bytes": (file_bytes, _FILE_BYTES)})
        else:
            check_path("folder", folder, "a path, or None")
        self.host_bytes, self.folder, self.file_bytes = host_bytes, folder, file_bytes
        self._lookup: OffloadLookup | None = None

    @hookimpl
    def llmopt_reserve(self, context: BuildContext) -> int | None:
        if context.model.device.type != "cpu":
            return None
        assert context.machine is not None
        check_host_memory("kv_offload", "host_bytes", self.host_bytes, context.machine)
        return self.host_bytes

    @hookimpl
    def llmopt_wrap_lookup(self, lookup: Lookup, config: PipelineConfig, context: BuildContext) -> Lookup:
        assert context.kv_cache is not None
        assert context.machine is not None
        check_host_memory("kv_offload", "host_bytes", self.host_bytes, context.machine, context.kv_cache)
        context.cost_model.wanted()
        self._lookup = OffloadLookup(lookup)
        return self._lookup

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        from llmopt_plugins.memory.kv_offload.store import BlockStore

        if pipeline.why_not is not None or self._lookup is None or pipeline.cost_model.measured is None:
            return
        found = [s for s in pipeline.registry.chains["lookup"].objects if isinstance(s, CachedLookup)]
        if not found:
            return
        (cached,) = found
        block_bytes = pipeline.block_pool.block_size * cached.kv_cache.bytes_per_token(cached.kv_cache.shapes)
        file = self._open(pipeline, cached.kv_cache, block_bytes)
        store = BlockStore(
            pipeline.block_pool, cached.kv_cache, cached.index, pipeline.cost_model, self.host_bytes, file
        )
        self._lookup.store = store
        cached.sources.append(store.restore)

    def _open(self, pipeline: InferencePipeline, kv_cache: KVCache, block_bytes: int) -> BlockFile | None:
        if self.folder is None:
            return None
        identity = fingerprint(pipeline.model, pipeline.config, kv_cache)
        size = kv_cache.block_size
        path = Path(self.folder) / f"{identity}-{size}.kv"
        try:
            file = BlockFile(path, identity, size, block_bytes, self.file_bytes)
        except BlockFileError as error:
            told = f"kv_offload works without a file: {error}"
            logger.warning(told)
            pipeline.notes.append(told)
            return None
        if not file.num_slots:
            file.close()
            raise PluginOptionError(
                f"kv_offload has {self.file_bytes} file_bytes, and a KV block of this model takes {block_bytes}: the "
                "file would hold none. Give it many times as much, or no folder."
            )
        return file
