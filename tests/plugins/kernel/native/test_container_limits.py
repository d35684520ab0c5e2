"""native in a container: threads and the KV pool follow what it allows, and the pool leaves room for packed weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import llmopt
from llmopt import container
from llmopt.kv_cache import KVCache
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model
from llmopt_plugins.kernel.weight_quant import WeightQuant

GIB = 1 << 30
MODEL = tiny_model(vocab_size=8192, hidden_size=128)  # packed weights of a few megabytes
BLOCK = 32


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put this process into a made-up container on a machine with 16 CPUs and 64 GB."""
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "meminfo").write_text(f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {48 * GIB >> 10} kB\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    for function in (container.memory, container.num_cpus):
        monkeypatch.setattr(function, "__defaults__", (cgroup, proc))
    for name in ("LLMOPT_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def limit(*, cpus: int, limit_bytes: int, used_bytes: int) -> None:
        (cgroup / "cpu.max").write_text(f"{cpus * 100000} 100000\n")
        (cgroup / "memory.max").write_text(f"{limit_bytes}\n")
        (cgroup / "memory.current").write_text(f"{used_bytes}\n")

    return limit


def build(*plugins: Any) -> InferencePipeline:
    # so many requests that the memory bounds the pool, and not their number
    return llmopt.build(MODEL, plugins, memory_fraction=0.5, block_size=BLOCK, max_num_requests=1 << 20)


def block_bytes(pipe: InferencePipeline) -> int:
    return KVCache.bytes_per_token(pipe.kv_cache.shapes) * pipe.block_pool.block_size


def packed_bytes(pipe: InferencePipeline) -> int:
    return int(pipe.registry.chains["execute"].objects[0].packed.memory.num_bytes)


@pytest.mark.native
@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (5, 4)])
@pytest.mark.parametrize("limit_bytes", [2 * GIB, GIB])
def test_threads_and_pool_follow_the_container(limited: Any, cpus: int, threads: int, limit_bytes: int) -> None:
    limited(cpus=cpus, limit_bytes=limit_bytes, used_bytes=GIB // 2)
    with build("native") as pipe:
        assert pipe.machine.num_threads == cpus
        assert f", {threads} thread{'s' if threads > 1 else ''}" in pipe.describe().details["native"]
        wanted = (limit_bytes - GIB // 2 - packed_bytes(pipe)) // 2
        assert wanted - block_bytes(pipe) < pipe.describe().pool_bytes <= wanted
        outputs = pipe.batch([[5, 6, 7]], max_new_tokens=4, ignore_eos=True, progress=False)
        assert len(outputs[0].token_ids) == 4


@pytest.mark.native
@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "minimum": True}, {"bits": 4, "minimum": False}])
def test_fewer_bits_leave_more_to_the_pool(limited: Any, options: dict[str, Any]) -> None:
    limited(cpus=1, limit_bytes=GIB, used_bytes=GIB // 2)
    with build("native") as pipe:
        dense, dense_pool = packed_bytes(pipe), pipe.describe().pool_bytes
    with build("native", WeightQuant(**options)) as pipe:
        saved, gained = dense - packed_bytes(pipe), pipe.describe().pool_bytes - dense_pool
        assert saved > 100 * block_bytes(pipe)
        assert abs(gained - saved // 2) <= block_bytes(pipe)


@pytest.mark.native
def test_where_packing_decides_about_minimums_the_pool_counts_with_them(limited: Any) -> None:
    limited(cpus=1, limit_bytes=GIB, used_bytes=GIB // 2)
    pools = []
    for minimum in (True, None):
        with build("native", WeightQuant(bits=4, minimum=minimum)) as pipe:
            pools.append(pipe.describe().pool_bytes)
    assert pools[0] == pools[1]


@pytest.mark.native
def test_weights_that_another_pipeline_has_packed_take_nothing_from_the_pool(limited: Any) -> None:
    limited(cpus=1, limit_bytes=GIB, used_bytes=GIB // 2)
    pools = []
    with build("native") as first:
        pools.append(first.describe().pool_bytes)
        with build("native") as second:
            pools.append(second.describe().pool_bytes)
        with build("native", WeightQuant(bits=8)) as other:
            eighths = other.describe().pool_bytes
            assert abs((GIB // 2 - packed_bytes(other)) // 2 - eighths) <= block_bytes(other)
        assert abs(pools[1] - pools[0] - packed_bytes(first) // 2) <= 2 * block_bytes(first)
