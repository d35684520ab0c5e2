"""KV of earlier requests, found again by the tokens that they have in common.

Stage: lookup, allocate, commit (wraps).   Promise: exact, the tokens are those of a request that computes everything.
Helps: long system prompts, few-shot examples, documents that are asked about, conversations, pre-empted requests.
Hurts: prompts that never repeat cost a hash of each block and its entry in the index: tenths of a per cent.
Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023 (shared
blocks); L. Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024 (prefixes of all
requests); R. Karedla et al., "Caching Strategies to Improve Disk System Performance", 1994 (segmented LRU).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmopt import PluginInfo, hookimpl
from llmopt.errors import LlmoptError
from llmopt_plugins.memory.prefix_cache.chain import KEY_BYTES
from llmopt_plugins.memory.prefix_cache.index import BlockIndex
from llmopt_plugins.memory.prefix_cache.model_watch import ModelWatch
from llmopt_plugins.memory.prefix_cache.prefix_file import (
    Prefix,
    PrefixFileError,
    fingerprint,
    gather,
    read,
    scatter,
    write,
)
from llmopt_plugins.memory.prefix_cache.stages import CachedAllocate, CachedCommit, CachedLookup, IdleLookup

if TYPE_CHECKING:
    import os

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Allocate, Commit, Lookup, Prompt

__all__ = ["PrefixCache", "PrefixFileError"]


class PrefixCache:
    """Keep the KV of finished requests and share it with those that begin with the same tokens.

    The methods concern the pipeline that was built with this object last.
    """

    info = PluginInfo(
        name="prefix_cache",
        layer="memory",
        promise="exact",
        summary="KV of the same leading tokens is found again instead of computed again",
        auto=True,
    )

    def __init__(self) -> None:
        self._lookup: CachedLookup | None = None
        self._allocate: CachedAllocate | None = None
        self._pipeline: InferencePipeline | None = None
        self._names: dict[str, tuple[bytes, list[int]]] = {}  # name -> salt and token ids

    @hookimpl
    def llmopt_wrap_lookup(self, lookup: Lookup, config: PipelineConfig, context: BuildContext) -> Lookup:
        assert context.block_pool is not None
        assert context.kv_cache is not None
        assert context.capabilities is not None
        self._lookup = self._pipeline = None
        self._names = {}
        if context.capabilities.has_states:
            return IdleLookup(lookup, "the recurrent states of this model cannot be cut at a block")
        index = BlockIndex(context.block_pool)
        self._lookup = CachedLookup(lookup, index, context.kv_cache, context, ModelWatch(context.model))
        return self._lookup

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate) -> Allocate | None:
        if self._lookup is None:
            return None
        self._allocate = CachedAllocate(allocate, self._lookup)
        return self._allocate

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit) -> Commit | None:
        if self._lookup is None or self._allocate is None:
            return None
        return CachedCommit(commit, self._lookup.index, self._allocate)

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        self._pipeline = pipeline

    # -- named prefixes -----------------------------------------------------------------------------------------------
    @property
    def names(self) -> list[str]:
        """The prefixes that have a name."""
        return list(self._names)

    def add(self, name: str, prompt: Prompt, *, adapter: str | None = None, cache_salt: str | None = None) -> int:
        """Compute a prefix, if it is not there, and give it a name under which it can be saved.

        Its KV is kept like that of any request, and evicted when the pool is short; `save` raises then.

        :param prompt: text, messages or ids, as for `InferencePipeline.batch`.
        :returns: the tokens in full blocks, which is what can be shared.
        :raises RequestError: the prompt can never run.
        """
        pipeline, lookup = self._built()
        entry = {"prompt": prompt, "adapter": adapter, "cache_salt": cache_salt}
        (output,) = pipeline.batch([entry], max_new_tokens=1, progress=False)
        if output.error is not None:
            raise output.error
        self._names[name] = lookup.salt_of(adapter, None, cache_salt), output.prompt_ids
        return len(output.prompt_ids) // pipeline.block_pool.block_size * pipeline.block_pool.block_size

    def save(self, path: str | os.PathLike[str], name: str) -> None:
        """Write a named prefix to a safetensors file.

        :raises KeyError: nothing has this name.
        :raises LlmoptError: its KV was evicted meanwhile, or it is shorter than a block.
        """
        pipeline, lookup = self._built()
        if name not in self._names:
            raise KeyError(f"no prefix is called {name!r}; names are: {', '.join(map(repr, self._names)) or 'none'}.")
        salt, ids = self._names[name]
        size = pipeline.block_pool.block_size
        if len(ids) < size:
            raise LlmoptError(f"prefix {name!r} has {len(ids)} tokens, and only full blocks, of {size}, can be saved.")
        import torch

        found: list[Prefix] = []

        def copy() -> None:
            index = lookup.index
            chain = index.new_chain(salt)
            index.extend(chain, np.array(ids, dtype=np.int64))
            keys = chain.keys
            blocks = pipeline.block_pool.find(bytes(keys))
            if len(blocks) == len(keys) // KEY_BYTES:
                token_ids = torch.tensor(ids[: len(blocks) * size], dtype=torch.int32)
                found.append(Prefix(name, salt, token_ids, gather(lookup.kv_cache, blocks)))

        pipeline.between_steps(copy)
        if not found:
            raise LlmoptError(
                f"the KV of prefix {name!r} was evicted. Add it again, or build with a larger pool_bytes."
            )
        write(Path(path), found[0], fingerprint(pipeline.model, pipeline.config, lookup.kv_cache))

    def load(self, path: str | os.PathLike[str]) -> str:
        """Read a prefix that `save` has written; requests that begin with its tokens find it. Returns its name.

        :raises PrefixFileError: the file is damaged, or belongs to another model or dtype.
        :raises FileNotFoundError: there is no such file.
        :raises LlmoptError: the pool has too few free blocks now, or larger ones than the prefix has tokens.
        """
        pipeline, lookup = self._built()
        prefix = read(Path(path), fingerprint(pipeline.model, pipeline.config, lookup.kv_cache), lookup.kv_cache)
        ids = [int(i) for i in prefix.token_ids]
        size = pipeline.block_pool.block_size
        if len(ids) < size:
            raise LlmoptError(
                f"prefix {prefix.name!r} has {len(ids)} tokens, and only full blocks, of {size} here, can be found. "
                "Build with a smaller block_size."
            )

        def enter() -> None:
            index, pool = lookup.index, pipeline.block_pool
            chain = index.new_chain(prefix.salt)
            index.extend(chain, np.array(ids, dtype=np.int64))
            keys = chain.keys
            num_blocks = len(keys) // KEY_BYTES
            known = pool.find(bytes(keys))
            pool.share(known)  # so that they stay while room is made
            if pool.num_free < num_blocks - len(known):
                pool.free(known)
                raise LlmoptError(
                    f"prefix {prefix.name!r} needs {num_blocks - len(known)} free KV blocks, and there are "
                    f"{pool.num_free}. Load it when fewer requests run, or build with a larger pool_bytes."
                )
            blocks = known + pool.allocate(num_blocks - len(known))
            scatter(lookup.kv_cache, prefix.tensors, list(range(len(known), num_blocks)), blocks[len(known) :])
            index.enter_blocks(chain, blocks, np.array(ids, dtype=np.int64))
            pool.share(blocks[len(known) :])  # as if used twice, so that it outlives prompts that come once
            pool.free(blocks[len(known) :])
            pool.free(blocks)

        pipeline.between_steps(enter)
        self._names[prefix.name] = prefix.salt, ids
        return prefix.name

    def clear(self) -> None:
        """Forget all KV that was kept, for example after the weights were changed in a way that torch cannot see."""
        pipeline, lookup = self._built()
        pipeline.between_steps(lookup.index.clear)

    def _built(self) -> tuple[InferencePipeline, CachedLookup]:
        if self._pipeline is None:
            raise LlmoptError(
                "this PrefixCache belongs to no pipeline. Give it to llmopt.build in plugins=[...] first."
            )
        if self._lookup is None:
            raise LlmoptError("this model's KV cannot be kept; describe() says why.")
        return self._pipeline, self._lookup
