"""Evicted KV blocks in host memory, and behind it in a file; brought back where that is quicker than computing."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmopt.kv_cache import KVCache
from llmopt_plugins.memory.prefix_cache.chain import DIGEST_BYTES, Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmopt.block_pool import BlockPool
    from llmopt.cost_model import CostModel
    from llmopt.request import Request
    from llmopt_plugins.memory.kv_offload.block_file import BlockFile
    from llmopt_plugins.memory.prefix_cache.index import BlockIndex

_MAX_OUT_SHARE = 0.03  # of the time to compute a block: what may be spent to keep it anywhere; nobody may ask for it
_PROMPT_TOKENS = 1024  # of a prompt whose blocks say what computing one takes: far less than a block alone
_MAX_IN_SHARE = 0.9  # of the time to compute blocks: restoring them must take less
_RATE = 0.3  # share of a new measurement in the estimate
_DOUBT = 0.99  # an estimate that forbids fades with every time that it does, so that it is tried again


class Tier:
    """How long one place takes, per block."""

    def __init__(self, in_s: float, out_s: float) -> None:
        self.in_s, self.out_s = in_s, out_s
        self.num_in = self.num_out = self.num_skipped = 0

    def saw(self, kind: str, seconds: float, count: int) -> None:
        """Take a measurement into account."""
        if count:
            name = f"{kind}_s"
            setattr(self, name, (1 - _RATE) * getattr(self, name) + _RATE * seconds / count)
            setattr(self, f"num_{kind}", getattr(self, f"num_{kind}") + count)


class BlockStore:
    """Keeps what the pool evicts.

    :param max_bytes: of host memory.
    :param file: where blocks go that leave host memory; None: nowhere.
    """

    def __init__(
        self,
        pool: BlockPool,
        kv_cache: KVCache,
        index: BlockIndex,
        cost_model: CostModel,
        max_bytes: int,
        file: BlockFile | None,
    ) -> None:
        self.pool, self.kv_cache, self.index, self.cost_model = pool, kv_cache, index, cost_model
        self.block_bytes = pool.block_size * KVCache.bytes_per_token(kv_cache.shapes)
        self.num_slots = max_bytes // self.block_bytes
        cpu = torch.device("cpu")
        shapes = {i: replace(shape, device=cpu) for i, shape in kv_cache.shapes.items()}
        self.host = KVCache(shapes, self.num_slots, pool.block_size)  # pages are taken as they are written
        self.ids = np.zeros((self.num_slots, pool.block_size), dtype=np.int32)
        self.is_durable = np.zeros(self.num_slots, dtype=np.bool_)
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, least recently used first
        self._free = list(range(self.num_slots - 1, -1, -1))
        self.file = file
        one_way = cost_model.copy_s(self.block_bytes)
        self.memory_tier = Tier(one_way, one_way)
        self.file_tier = Tier(*_time_file(file, self.block_bytes)) if file is not None else Tier(0.0, 0.0)
        self._prompt_blocks = max(1, min(_PROMPT_TOKENS, pool.num_blocks * pool.block_size) // pool.block_size)
        pool.on_evict.append(self.put)
        index.on_clear.append(self.clear)

    def block_s(self) -> float:
        """Seconds to compute a block within a prompt, as steps are now: what `build` has measured may be over."""
        return self.cost_model.recompute_s(self._prompt_blocks * self.pool.block_size) / self._prompt_blocks

    # -- out ----------------------------------------------------------------------------------------------------------
    def put(self, blocks: list[int], keys: list[bytes]) -> None:
        """The pool is about to hand these blocks to others: keep their content."""
        blocks = [block for block in blocks if self.index.tokens[block, -1] >= 0]  # full ones
        digests = [self.index.digests[block].tobytes() for block in blocks]
        known = [digest for digest in digests if digest in self.slots]
        for digest in known:
            self.slots.move_to_end(digest)
        new = [(b, d) for b, d in zip(blocks, digests, strict=True) if d not in self.slots]
        tier = self.memory_tier
        if not new or not self.num_slots:
            return
        if tier.out_s > _MAX_OUT_SHARE * self.block_s():
            tier.num_skipped += len(new)
            tier.out_s *= _DOUBT
            return
        if self.file is None:
            new = new[-self.num_slots :]  # the others would leave at once
        for begin in range(0, len(new), self.num_slots):
            self._keep(new[begin : begin + self.num_slots])

    def _keep(self, new: list[tuple[int, bytes]]) -> None:
        """Copy blocks to host memory: no more than it has places."""
        self._make_room(len(new))
        start = time.perf_counter()
        slots = [self._free.pop() for _ in new]
        sources = [block for block, _ in new]
        _copy(self.kv_cache, sources, self.host, slots)
        self.ids[slots] = self.index.tokens[sources]
        self.is_durable[slots] = self.index.is_durable[sources]
        for (_, digest), slot in zip(new, slots, strict=True):
            self.slots[digest] = slot
        self.memory_tier.saw("out", time.perf_counter() - start, len(new))

    def _make_room(self, count: int) -> None:
        while len(self._free) < count:
            digest, slot = self.slots.popitem(last=False)
            self._spill(digest, slot)
            self._free.append(slot)

    def _spill(self, digest: bytes, slot: int) -> None:
        """Write a block that leaves host memory to the file."""
        tier, file = self.file_tier, self.file
        if file is None or not self.is_durable[slot] or digest in file:
            return
        if self.memory_tier.out_s + tier.out_s > _MAX_OUT_SHARE * self.block_s():  # both were spent on this block
            tier.num_skipped += 1
            tier.out_s *= _DOUBT
            return
        start = time.perf_counter()
        file.put(digest, self.ids[slot], self._flat(slot))
        tier.saw("out", time.perf_counter() - start, 1)

    def _flat(self, slot: int) -> np.ndarray:
        parts = [
            t[slot].reshape(-1).view(torch.uint8)
            for layer in self.host.layers.values()
            for t in (layer.key, layer.value)
        ]
        found: np.ndarray = torch.cat(parts).numpy()
        return found

    # -- in -----------------------------------------------------------------------------------------------------------
    def restore(self, request: Request, chain: Chain, start: int, end: int) -> list[int]:
        """Bring back the blocks after number ``start``: see `llmopt_plugins.memory.prefix_cache.stages.Source`."""
        in_memory, in_file = self._look(chain, start, end)
        count = len(in_memory) + len(in_file)
        missing = self.pool.num_blocks_for(request.num_tokens) - start
        if count == 0 or missing > self.pool.num_free:  # it could not start
            return []
        size = self.pool.block_size

        def pays(number: int, seconds: float) -> bool:
            return seconds < _MAX_IN_SHARE * self.cost_model.recompute_s((start + number) * size, start * size)

        seconds = len(in_memory) * self.memory_tier.in_s + len(in_file) * self.file_tier.in_s
        if not pays(count, seconds):
            tier = self.file_tier if in_file else self.memory_tier
            tier.num_skipped += count
            tier.in_s *= _DOUBT
            return []
        blocks = self.pool.allocate(count)
        in_memory, in_file = self._look(chain, start, end)  # what was evicted for them may have taken their place
        filled = self._from_memory(request, start, in_memory, blocks)
        if filled == len(in_memory):
            filled += self._from_file(request, start + filled, in_file, blocks[filled:])
        self.pool.free(blocks[filled:])
        return blocks[:filled]

    def _look(self, chain: Chain, start: int, end: int) -> tuple[list[bytes], list[bytes]]:
        """Digests of the blocks that follow: a run in host memory, then one in the file."""
        in_memory: list[bytes] = []
        in_file: list[bytes] = []
        for place in range(start, end):
            digest = bytes(chain.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
            if digest in self.slots and not in_file:
                in_memory.append(digest)
            elif self.file is not None and digest in self.file:
                in_file.append(digest)
            else:
                break
        return in_memory, in_file

    def _from_memory(self, request: Request, start: int, digests: list[bytes], blocks: list[int]) -> int:
        digests = digests[: len(blocks)]
        if not digests:
            return 0
        began = time.perf_counter()
        slots = [self.slots[digest] for digest in digests]
        size = self.pool.block_size
        ids = request.token_ids[start * size : (start + len(slots)) * size].reshape(len(slots), size)
        is_same = (self.ids[slots] == ids).all(axis=1)
        count = len(slots) if is_same.all() else int(is_same.argmin())
        _copy(self.host, slots[:count], self.kv_cache, blocks[:count])
        for digest in reversed(digests[:count]):  # the end of a sequence leaves first
            self.slots.move_to_end(digest)
        self.memory_tier.saw("in", time.perf_counter() - began, count)
        return count

    def _from_file(self, request: Request, start: int, digests: list[bytes], blocks: list[int]) -> int:
        assert self.file is not None or not digests
        began, size, count = time.perf_counter(), self.pool.block_size, 0
        for digest, block in zip(digests, blocks, strict=False):
            ids = request.token_ids[(start + count) * size : (start + count + 1) * size]
            payload = None if self.file is None else self.file.get(digest, ids)
            if payload is None:
                break
            self._fill(block, payload)
            count += 1
        self.file_tier.saw("in", time.perf_counter() - began, count)
        return count

    def _fill(self, block: int, payload: np.ndarray) -> None:
        place = 0
        for layer in self.kv_cache.layers.values():
            for tensor in (layer.key, layer.value):
                target = tensor[block]
                num_bytes = target.numel() * target.element_size()
                part = torch.from_numpy(payload[place : place + num_bytes].copy()).view(tensor.dtype)
                target.copy_(part.view(target.shape))
                place += num_bytes

    # -- the end ------------------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Forget everything: the model has changed. The file is left alone from now on: it is for the old one."""
        self._free += self.slots.values()
        self.slots.clear()
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self) -> None:
        """Write what the pool keeps and what is in host memory to the file, and let go of it."""
        if self.file is not None:
            while self.num_slots and self.pool.num_kept:
                self.pool.evict(min(self.num_slots, self.pool.num_kept))
            while self.slots:
                digest, slot = self.slots.popitem(last=False)
                if self.is_durable[slot]:
                    self.file.put(digest, self.ids[slot], self._flat(slot))
            self.file.close()
            self.file = None
        self.slots.clear()
        self.host.layers.clear()

    def stats(self) -> dict[str, float]:
        """Blocks per place, and milliseconds per block as they are expected."""
        found: dict[str, float] = {"num_blocks_in_memory": len(self.slots)}
        for name, tier in (("memory", self.memory_tier), ("file", self.file_tier)):
            if name == "file" and self.file is None:
                continue
            found |= {
                f"num_{name}_stored": tier.num_out,
                f"num_{name}_restored": tier.num_in,
                f"num_{name}_skipped": tier.num_skipped,
                f"{name}_store_ms": 1e3 * tier.out_s,
                f"{name}_restore_ms": 1e3 * tier.in_s,
            }
        if self.file is not None:
            found["num_blocks_in_file"], found["num_damaged"] = len(self.file), self.file.num_damaged
        found["recompute_ms"] = 1e3 * self.block_s()
        return found


def _copy(source: KVCache, sources: Sequence[int], target: KVCache, targets: Sequence[int]) -> None:
    """Copy blocks of one cache to blocks of another, all layers."""
    for index, layer in source.layers.items():
        for a, b in ((layer.key, target.layers[index].key), (layer.value, target.layers[index].value)):
            picked: Tensor = a[torch.tensor(sources, device=a.device)]
            b[torch.tensor(targets, device=b.device)] = picked.to(b.device)


def _time_file(file: BlockFile, num_bytes: int) -> tuple[float, float]:
    """Seconds to read and to write one block, from one that is written and removed."""
    ids = np.zeros(file.num_ids, dtype=np.int32)
    payload = np.zeros(num_bytes, dtype=np.uint8)
    times = []
    for number in range(3):
        digest = number.to_bytes(DIGEST_BYTES, "little")
        if len(file) >= file.num_slots:
            break  # full of what is worth more; the estimates come with the first uses
        start = time.perf_counter()
        file.put(digest, ids, payload)
        middle = time.perf_counter()
        file.get(digest, ids)
        times.append((time.perf_counter() - middle, middle - start))
        file.drop(digest)
    return (min(t[0] for t in times), min(t[1] for t in times)) if times else (0.0, 0.0)
