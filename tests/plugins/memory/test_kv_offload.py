"""kv_offload: what the pool evicts comes back as it was, from memory or from a file, or is computed again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmopt
from llmopt.errors import PluginOptionError, PluginRequirementError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model
from llmopt_plugins.memory.kv_offload import KvOffload
from llmopt_plugins.memory.kv_offload.block_file import BlockFile, BlockFileError
from llmopt_plugins.memory.kv_offload.store import BlockStore
from tests.llmopt.helpers import build_tiny, pool_bytes
from tests.plugins.memory.test_prefix_cache import BLOCK, PREFIX, assert_at_rest, cached, index_of, tokens

BLOCK_BYTES = BLOCK * 512


def build(*, costly: bool = True, num_blocks: int = 24, **options: Any) -> InferencePipeline:
    """A pipeline with a small pool; ``costly``: computing takes for ever, so that everything is kept and restored."""
    options = {"host_bytes": 100 * BLOCK_BYTES, **options}
    plugins = ["prefix_cache", "paged_kv", KvOffload(**options)]
    pipe = build_tiny(plugins=plugins, block_size=BLOCK, max_model_len=80, pool_bytes=pool_bytes(num_blocks, BLOCK))
    if costly:
        store = store_of(pipe)
        store.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 1e9  # type: ignore[method-assign]
    return pipe


def store_of(pipe: InferencePipeline) -> BlockStore:
    (stage,) = (s for s in pipe.registry.chains["lookup"].objects if hasattr(s, "store"))
    store: BlockStore = stage.store
    return store


def flood(pipe: InferencePipeline, seed: int = 0, rounds: int = 4) -> None:
    """Use the whole pool for something else."""
    chooser = random.Random(seed)
    for _ in range(rounds):
        tokens(pipe, [[chooser.randrange(200, 400) for _ in range(70)]], max_new_tokens=2)


@pytest.fixture(scope="module")
def plain() -> Any:
    with build_tiny(max_model_len=80) as pipe:
        yield pipe


# -- host memory ------------------------------------------------------------------------------------------------------
def test_what_was_evicted_comes_back_from_host_memory_and_the_output_is_the_same(plain: InferencePipeline) -> None:
    with build() as pipe:
        wanted = tokens(plain, [PREFIX])
        assert tokens(pipe, [PREFIX]) == wanted
        flood(pipe)
        stats = pipe.stats()["lookup.kv_offload"]
        assert stats["num_memory_stored"] >= 10
        before = pipe.stats()["num_step_tokens"]
        (made,) = pipe.batch([PREFIX], max_new_tokens=12, ignore_eos=True, progress=False)
        assert [made.token_ids] == wanted
        assert made.num_cached_tokens >= 36
        assert pipe.stats()["num_step_tokens"] - before <= 4 + 11
        assert pipe.stats()["lookup.kv_offload"]["num_memory_restored"] >= 9
        assert_at_rest(pipe)


def test_a_part_in_the_pool_and_a_part_in_memory_make_one_prefix(plain: InferencePipeline) -> None:
    with build(num_blocks=20) as pipe:
        tokens(pipe, [PREFIX], max_new_tokens=1)
        pipe.between_steps(lambda: pipe.block_pool.evict(5))  # the end of the sequence
        assert (index_of(pipe).serials > 0).sum() == 5
        (made,) = pipe.batch([PREFIX], max_new_tokens=6, ignore_eos=True, progress=False)
        assert made.num_cached_tokens >= 36
        assert [made.token_ids] == tokens(plain, [PREFIX], max_new_tokens=6)
        assert pipe.stats()["lookup.kv_offload"]["num_memory_restored"] in (4, 5)
        assert_at_rest(pipe)


@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_host_memory_is_bounded_and_what_does_not_fit_is_computed(num_slots: int, plain: InferencePipeline) -> None:
    with build(host_bytes=num_slots * BLOCK_BYTES) as pipe:
        for number in range(4):
            prompt = [number + 5, *PREFIX]
            for _ in range(2):
                assert tokens(pipe, [prompt]) == tokens(plain, [prompt])
                flood(pipe, number, rounds=1)
                assert pipe.stats()["lookup.kv_offload"]["num_blocks_in_memory"] <= num_slots
        assert_at_rest(pipe)


def test_where_restoring_is_slower_than_computing_nothing_is_stored_or_restored(plain: InferencePipeline) -> None:
    with build(costly=False) as pipe:
        store = store_of(pipe)
        store.cost_model.recompute_s = lambda num_tokens, num_computed_tokens=0: 0.0  # type: ignore[method-assign]
        tokens(pipe, [PREFIX])
        flood(pipe)
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        stats = pipe.stats()["lookup.kv_offload"]
        assert stats["num_memory_stored"] == stats["num_memory_restored"] == 0
        assert stats["num_memory_skipped"] > 0
        store.block_s = lambda: 1e9  # type: ignore[method-assign]
        flood(pipe, 1)
        assert pipe.stats()["lookup.kv_offload"]["num_memory_stored"] > 0
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        assert pipe.stats()["lookup.kv_offload"]["num_memory_restored"] == 0
        assert_at_rest(pipe)


def test_salts_are_kept_apart_in_host_memory_too() -> None:
    with build() as pipe:
        tokens(pipe, [PREFIX], cache_salt="a")
        flood(pipe)
        assert cached(pipe, [PREFIX], cache_salt="b") == [0]
        assert cached(pipe, [PREFIX], cache_salt="a")[0] >= 36


def test_a_model_whose_weights_were_changed_gets_nothing_back(tmp_path: Path) -> None:
    model = tiny_model(seed=5)
    plugins = ["prefix_cache", "paged_kv", KvOffload(folder=str(tmp_path), file_bytes=1 << 20)]
    with llmopt.build(model, plugins, block_size=BLOCK, max_model_len=80, pool_bytes=pool_bytes(24, BLOCK)) as pipe:
        store_of(pipe).block_s = lambda: 1e9  # type: ignore[method-assign]
        tokens(pipe, [PREFIX])
        flood(pipe)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        assert cached(pipe, [PREFIX]) == [0]
        assert store_of(pipe).file is None


def test_random_requests_with_salts_aborts_and_a_tiny_pool_equal_their_runs_alone(
    tmp_path: Path, plain: InferencePipeline
) -> None:
    chooser = random.Random(3)
    prefixes = [[chooser.randrange(3, 512) for _ in range(30)] for _ in range(5)]
    options = {"host_bytes": 12 * BLOCK_BYTES, "folder": str(tmp_path), "file_bytes": 40 * BLOCK_BYTES}
    with build(num_blocks=22, **options) as pipe:
        for _ in range(60):
            prompts = [
                [*chooser.choice(prefixes)[: chooser.randint(4, 30)], *chooser.choices(range(3, 20), k=2)]
                for _ in range(3)
            ]
            salt = chooser.choice([None, "a"])
            made = [llmopt.text.make_requests(pipe, p, {"cache_salt": salt, "max_new_tokens": 6, "ignore_eos": True})[0]
                    for p in prompts]  # fmt: skip
            for request in made:
                pipe.add(request)
            for _ in range(chooser.randint(0, 4)):
                pipe.advance()
            if chooser.random() < 0.4:
                pipe.abort(made[1])
            while len(pipe.queue):
                pipe.advance()
            for request, wanted in zip(made, tokens(plain, prompts, max_new_tokens=6), strict=True):
                assert request.output_ids == wanted[: request.num_output_tokens]
                assert request.finish_reason == "abort" or request.output_ids == wanted
            pipe.block_pool.check()
        stats = pipe.stats()["lookup.kv_offload"]
        assert min(stats["num_memory_restored"], stats["num_file_restored"], stats["num_file_stored"]) > 0
        assert_at_rest(pipe)


# -- the file ---------------------------------------------------------------------------------------------------------
def filled(folder: Path, **options: Any) -> None:
    with build(folder=str(folder), file_bytes=200 * BLOCK_BYTES, **options) as pipe:
        tokens(pipe, [PREFIX], max_new_tokens=1)


def file_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_blocks_that_leave_memory_go_to_the_file_and_come_back(tmp_path: Path, plain: InferencePipeline) -> None:
    with build(folder=str(tmp_path), host_bytes=6 * BLOCK_BYTES, file_bytes=200 * BLOCK_BYTES) as pipe:
        tokens(pipe, [PREFIX])
        flood(pipe)
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        assert pipe.stats()["lookup.kv_offload"]["num_file_restored"] >= 9
        assert_at_rest(pipe)
    assert file_in(tmp_path).stat().st_size <= 200 * BLOCK_BYTES


def test_after_a_restart_the_file_is_found_again(tmp_path: Path, plain: InferencePipeline) -> None:
    filled(tmp_path)
    with build(folder=str(tmp_path), file_bytes=200 * BLOCK_BYTES) as pipe:
        (made,) = pipe.batch([PREFIX], max_new_tokens=6, ignore_eos=True, progress=False)
        assert made.num_cached_tokens == 36
        assert [made.token_ids] == tokens(plain, [PREFIX], max_new_tokens=6)
        assert str(tmp_path) in str(pipe.describe())


@pytest.mark.parametrize("damage", ["torn", "flipped", "zeros", "head"])
def test_what_is_damaged_is_computed_again_and_the_rest_comes_back(
    tmp_path: Path, damage: str, plain: InferencePipeline
) -> None:
    filled(tmp_path)
    path = file_in(tmp_path)
    data = bytearray(path.read_bytes())
    record = 48 + 4 * BLOCK + BLOCK_BYTES
    place = 4096 + 4 * record  # of ten records, in whatever order
    if damage == "torn":
        del data[place + record // 2 :]
    elif damage == "flipped":
        data[place + 600] ^= 1
    elif damage == "zeros":
        data[place : place + record] = bytes(record)
    else:
        data[place + 3] ^= 1
    path.write_bytes(data)
    with build(folder=str(tmp_path), file_bytes=200 * BLOCK_BYTES) as pipe:
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        assert pipe.stats()["lookup.prefix_cache"]["num_cached_tokens"] < 36
        assert_at_rest(pipe)
    with build(folder=str(tmp_path), file_bytes=200 * BLOCK_BYTES) as pipe:  # what was computed again is there
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        assert pipe.stats()["lookup.prefix_cache"]["num_cached_tokens"] == 36


def test_a_process_that_is_killed_leaves_a_file_that_can_be_used(tmp_path: Path, plain: InferencePipeline) -> None:
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.plugins.memory.test_kv_offload import *
pipe = build(folder={str(tmp_path)!r}, host_bytes=4 * BLOCK_BYTES, file_bytes=200 * BLOCK_BYTES)
tokens(pipe, [PREFIX]); flood(pipe)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with build(folder=str(tmp_path), file_bytes=200 * BLOCK_BYTES) as pipe:
        assert tokens(pipe, [PREFIX]) == tokens(plain, [PREFIX])
        assert pipe.stats()["lookup.kv_offload"]["num_file_restored"] >= 9


def test_two_processes_do_not_share_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"folder": str(tmp_path), "file_bytes": 100 * BLOCK_BYTES}
    with build(**options) as first, build(**options) as second:
        assert store_of(first).file is not None
        assert store_of(second).file is None
        assert "another process uses" in caplog.text
        assert tokens(first, [PREFIX]) == tokens(second, [PREFIX])


def test_another_model_has_another_file(tmp_path: Path) -> None:
    filled(tmp_path)
    plugins = ["prefix_cache", KvOffload(folder=str(tmp_path), file_bytes=100 * BLOCK_BYTES)]
    with llmopt.build(tiny_model(seed=9), plugins, block_size=BLOCK, max_model_len=80) as pipe:
        assert cached(pipe, [PREFIX]) == [0]
    assert len(list(tmp_path.iterdir())) == 2


# -- the records of a file --------------------------------------------------------------------------------------------
def open_file(path: Path, num_slots: int = 4, identity: str = "model") -> BlockFile:
    return BlockFile(path, identity, num_ids=4, num_bytes=64, max_bytes=4096 + num_slots * (48 + 16 + 64))


def record(number: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    return bytes([number]) * 32, np.full(4, number, np.int32), np.full(64, number, np.uint8)


def test_a_file_keeps_the_newest_records_and_finds_them_again(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    for number in range(7):
        file.put(*record(number))
    assert [bytes([n]) * 32 in file for n in range(7)] == [False] * 3 + [True] * 4
    file.close()
    again = open_file(tmp_path / "f")
    assert len(again) == 4
    for number in range(3, 7):
        digest, ids, payload = record(number)
        assert (again.get(digest, ids) == payload).all()
        assert again.get(digest, ids + 1) is None  # the same digest, other tokens
    again.drop(record(5)[0])
    again.close()
    third = open_file(tmp_path / "f")
    assert len(third) == 3
    third.put(*record(8))
    assert (third.get(*record(8)[:2]) == 8).all()
    third.close()


def test_a_file_of_another_model_is_started_anew(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    file.put(*record(1))
    file.close()
    other = open_file(tmp_path / "f", identity="other")
    assert len(other) == 0
    other.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file")
    with pytest.raises(BlockFileError, match="cannot be opened"):
        open_file(tmp_path / "x" / "f")


@pytest.mark.parametrize("option", ["host_bytes", "file_bytes"])
def test_sizes_below_one_are_refused(option: str) -> None:
    with pytest.raises(PluginOptionError, match=f"{option} is a whole number of bytes, at least 1, found 0"):
        llmopt.build(tiny_model(), ["prefix_cache", f"kv_offload:{option}=0"])


@pytest.mark.parametrize(("option", "value"), [("host_bytes", 1.5), ("file_bytes", "1 GiB"), ("folder", 3)])
def test_options_of_the_wrong_type_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is a .*, found"):
        KvOffload(**{option: value})


def test_memory_or_a_file_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginOptionError, match=r"10 host_bytes, and a KV block of this model takes \d+"):
        build(costly=False, host_bytes=10)
    with pytest.raises(PluginOptionError, match=r"kv_offload has \d+ host_bytes, and this process may take \d+ bytes"):
        build(costly=False, host_bytes=1 << 60)
    with pytest.raises(PluginOptionError, match=r"100 file_bytes, and a KV block of this model takes \d+"):
        build(costly=False, folder=tmp_path, file_bytes=100)


def test_a_file_that_cannot_be_written_is_left_out_and_describe_says_so(tmp_path: Path) -> None:
    with build(costly=False, folder=tmp_path / "kv") as pipe:
        (name,) = os.listdir(tmp_path / "kv")
        assert pipe.notes == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / name).symlink_to("/dev/full")
    with build(folder=tmp_path / "full") as pipe:
        assert "kv_offload works without a file" in str(pipe.describe())
        assert cached(pipe, [PREFIX]) == [0]
        flood(pipe)
        assert cached(pipe, [PREFIX]) > [0]  # from host memory


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(PluginRequirementError, match="requires 'prefix_cache'"):
        llmopt.build(tiny_model(), ["kv_offload"])
