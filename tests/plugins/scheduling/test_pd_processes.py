"""Prefill in processes of its own, with real processes: tokens, kills, hangs, aborts, and what is left behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.errors import DeadlineError, PluginUnavailableError
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams
from llmopt.testing import check_plugin, tiny_model, tiny_prompts
from llmopt_plugins.memory.paged_kv import PagedKv
from llmopt_plugins.scheduling.pd_separation import PdSeparation
from llmopt_plugins.scheduling.pd_separation.process_mode import ProcessMode

PROMPTS = tiny_prompts(6, min_length=5, max_length=150)
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "progress": False}


def pd(**options: Any) -> PdSeparation:
    return PdSeparation(**{"mode": "process", "min_tokens": 20, "chunk_tokens": 32, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def quick_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessMode, "first_delay_s", 0.05)


@pytest.fixture(scope="module")
def pipe(folder: str) -> Iterator[InferencePipeline]:
    with llmopt.build(folder, [pd()], block_size=16, pool_bytes=2 << 20) as pipe:
        pipe.start()
        yield pipe


@pytest.fixture(scope="module")
def wanted(folder: str) -> Callable[..., list[list[int]]]:
    """The tokens of a pipeline without plugins."""
    plain = llmopt.build(folder, block_size=16, pool_bytes=2 << 20)
    return lambda prompts=PROMPTS, **options: tokens(plain, prompts, **options)


def tokens(pipe: InferencePipeline, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    outputs = pipe.batch(prompts, **{**OPTIONS, **options})
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


def stats(pipe: InferencePipeline) -> dict[str, Any]:
    found: dict[str, Any] = pipe.stats()["lookup.pd_separation"]
    return found


def pid_of(pipe: InferencePipeline) -> int:
    """Of the worker; waits until it is ready."""
    wait(lambda: stats(pipe)["num_workers_ready"] == 1)
    (pid,) = stats(pipe)["pids"]
    assert isinstance(pid, int)
    return pid


def wait(is_true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.01)


def long_request(name: str, length: int = 150) -> Request:
    (prompt,) = tiny_prompts(1, seed=9, min_length=length, max_length=length)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    return Request(name, prompt, params, length + 12, wants_text=False)


def test_tokens_are_those_of_one_process_greedy_sampled_and_with_continuations(pipe: Any, wanted: Any) -> None:
    before = stats(pipe)
    assert tokens(pipe) == wanted()
    after = stats(pipe)
    assert after["num_handed_over"] == before["num_handed_over"] + 5  # one prompt is short
    assert after["num_prefill_tokens"] - before["num_prefill_tokens"] == sum(len(p) for p in PROMPTS if len(p) > 20)
    assert after["num_first_tokens"] - before["num_first_tokens"] == 5
    sampled = {"temperature": 1.0, "top_k": 20, "seed": 3, "n": 2}
    assert tokens(pipe, **sampled) == wanted(**sampled)
    assert stats(pipe)["num_recomputed"] == before["num_recomputed"]
    assert pipe.block_pool.num_used == 0


def test_requests_on_the_background_thread_and_streams_get_their_tokens(folder: str, pipe: Any, wanted: Any) -> None:
    handles = [pipe.submit(prompt, max_new_tokens=12, ignore_eos=True) for prompt in PROMPTS]
    assert [handle.result(timeout_s=120.0).token_ids for handle in handles] == wanted()


def test_a_worker_killed_in_the_middle_costs_a_recompute_and_no_request(pipe: Any, wanted: Any) -> None:
    pid = pid_of(pipe)
    before = stats(pipe)
    os.kill(pid, signal.SIGSTOP)  # so that it is in the middle for sure
    request = long_request("killed")
    pipe.add(request)
    wait(lambda: stats(pipe)["num_handed_over"] == before["num_handed_over"] + 1)
    os.kill(pid, signal.SIGKILL)
    wait(lambda: request.is_finished)
    assert request.error is None
    assert [request.output_ids] == wanted([request.prompt_ids])
    assert stats(pipe)["num_recomputed"] == before["num_recomputed"] + 1
    assert pipe.block_pool.num_used == 0
    pipe.block_pool.check()
    assert pid_of(pipe) != pid
    assert tokens(pipe) == wanted()  # the new worker serves
    assert stats(pipe)["num_handed_over"] == before["num_handed_over"] + 6


def test_blocks_of_an_aborted_request_are_not_used_again_while_the_worker_may_write(pipe: Any) -> None:
    pid = pid_of(pipe)
    before = stats(pipe)["num_handed_over"]
    os.kill(pid, signal.SIGSTOP)
    request = long_request("aborted")
    pipe.add(request)
    wait(lambda: stats(pipe)["num_handed_over"] == before + 1)
    pipe.abort(request)
    assert request.finish_reason == "abort"
    assert not request.block_table
    held = pipe.block_pool.num_used
    time.sleep(0.1)
    assert pipe.block_pool.num_used == held > 0
    os.kill(pid, signal.SIGCONT)
    wait(lambda: pipe.block_pool.num_used == 0)
    pipe.block_pool.check()
    assert pid_of(pipe) == pid


def test_others_decode_while_a_prompt_waits_for_its_worker_and_nobody_spins(pipe: Any, wanted: Any) -> None:
    pid = pid_of(pipe)
    os.kill(pid, signal.SIGSTOP)
    try:
        request = long_request("waits")
        pipe.add(request)
        assert tokens(pipe, [[5, 6, 7]]) == wanted([[5, 6, 7]])
        assert not request.is_finished
        calls = []
        schedule = pipe.schedule
        pipe.schedule = lambda queue: (calls.append(1), schedule(queue))[1]
        time.sleep(0.5)
        pipe.schedule = schedule
        assert len(calls) < 100
    finally:
        os.kill(pid, signal.SIGCONT)
    wait(lambda: request.is_finished)
    assert [request.output_ids] == wanted([request.prompt_ids])


def test_changed_weights_are_computed_here(pipe: Any, wanted: Any) -> None:
    before = stats(pipe)["num_handed_over"]
    with torch.no_grad():
        weight = next(pipe.model.parameters())
        weight.add_(0.0)
    try:
        assert tokens(pipe) == wanted()
        assert stats(pipe)["num_handed_over"] == before
    finally:
        over = next(o for o in pipe.registry.chains["lookup"].objects if hasattr(o, "hand_over")).hand_over
        over.start(pipe)  # for the tests that follow


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up_and_a_failing_one_too_and_nothing_is_left(folder: str, wanted: Any) -> None:
    plugin = Failing(os.getpid())
    before = memory_files()
    pipe = llmopt.build(
        folder, ["native", plugin, pd(timeout_s=1.0)], block_size=16, pool_bytes=1 << 20, max_model_len=200
    )
    pid = pid_of(pipe)
    (prompt,) = tiny_prompts(1, seed=4, min_length=100, max_length=100)
    expected = wanted([prompt])
    assert tokens(pipe, [[*prompt[:50], 500, *prompt[51:]]]) == wanted([[*prompt[:50], 500, *prompt[51:]]])
    assert stats(pipe)["num_recomputed"] == 1  # the worker raised, and lives
    assert pid_of(pipe) == pid
    assert tokens(pipe, [prompt]) == expected
    assert stats(pipe)["num_recomputed"] == 1
    os.kill(pid, signal.SIGSTOP)
    assert tokens(pipe, [prompt]) == expected
    assert stats(pipe)["num_recomputed"] == 2
    assert not Path(f"/proc/{pid}").exists()
    assert pipe.block_pool.num_used == 0
    next_pid = pid_of(pipe)
    pipe.close()
    assert not Path(f"/proc/{next_pid}").exists()
    del pipe
    gc.collect()
    assert memory_files() == before


def memory_files() -> int:
    """Descriptors of pools that this process has."""
    return sum("llmopt-kv" in _link(path) for path in Path("/proc/self/fd").iterdir())


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Failing:
    """Raises in another process than this one when it sees token 500."""

    info = PluginInfo(name="failing", layer="kernel", promise="exact", summary="raises in a worker")

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @hookimpl
    def llmopt_wrap_execute(self, execute: Any) -> Any:
        def run(batch: Any, drafts: Any) -> Any:
            if os.getpid() != self.pid and (batch.token_ids == 500).any():
                raise ValueError("token 500")
            return execute(batch, drafts)

        return run


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], ["native"]])
def test_a_worker_that_reports_over_the_network_sends_its_kv_and_may_be_lost(
    plugins: list[str], folder: str, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_PREFILL_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-m", "llmopt_plugins.scheduling.pd_separation.remote_worker", address]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})

    worker = start()
    try:
        with llmopt.build(folder, [*plugins, pd(listen=address)], block_size=16, pool_bytes=2 << 20) as pipe:
            assert tokens(pipe) == wanted()
            assert stats(pipe)["num_handed_over"] == 5
            assert stats(pipe)["num_recomputed"] == 0
            pipe.start()
            os.kill(worker.pid, signal.SIGSTOP)
            request = long_request("lost")
            pipe.add(request)
            wait(lambda: stats(pipe)["num_handed_over"] == 6)
            worker.kill()
            worker.wait()
            wait(lambda: request.is_finished)
            assert [request.output_ids] == wanted([request.prompt_ids])
            assert pipe.block_pool.num_used == 0
            worker = start()
            wait(lambda: stats(pipe)["num_workers_ready"] == 1)
            assert tokens(pipe) == wanted()
            assert stats(pipe)["num_handed_over"] == 11
            assert stats(pipe)["num_recomputed"] == 1
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.slow
def test_it_keeps_to_what_every_plugin_keeps_to(folder: str) -> None:
    check_plugin(lambda: pd(source=folder, min_tokens=4, chunk_tokens=8), company=[])


@pytest.mark.slow
def test_workers_end_when_the_decode_process_is_killed(folder: str) -> None:
    code = (
        "import sys, time, llmopt\n"
        f"pipe = llmopt.build({folder!r}, ['pd_separation:mode=process'], pool_bytes=1 << 20)\n"
        "print(pipe.stats()['lookup.pd_separation']['pids'][0], flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    host = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE)
    assert host.stdout is not None
    with host:
        pid = int(host.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        host.kill()
        host.wait()
    wait(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_pool_that_holds_two_prompts_serves_many(folder: str, wanted: Any) -> None:
    prompts = [p * 2 for p in tiny_prompts(8, seed=2, min_length=40, max_length=60)]
    per_token = 512
    with llmopt.build(
        folder, ["paged_kv", pd()], block_size=16, max_model_len=160, pool_bytes=20 * 16 * per_token
    ) as pipe:
        assert tokens(pipe, prompts) == wanted(prompts)
        assert stats(pipe)["num_handed_over"] >= 8
        assert pipe.block_pool.num_used == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_a_request_that_was_swapped_out_comes_back_with_its_own_kv(is_last: bool, folder: str, wanted: Any) -> None:
    paged = PagedKv(swap_bytes=10 << 20)
    plugins = [paged, pd()] if is_last else [pd(), paged]
    prompts = [p * 2 for p in tiny_prompts(8, seed=2, min_length=40, max_length=60)]
    with llmopt.build(folder, plugins, block_size=16, max_model_len=160, pool_bytes=20 * 16 * 512) as pipe:
        pipe.cost_model.copy_s = lambda num_bytes: 0.0  # type: ignore[method-assign]
        assert tokens(pipe, prompts, max_new_tokens=36) == wanted(prompts, max_new_tokens=36)
        assert pipe.stats()["allocate.paged_kv"]["num_swapped_in"] > 0
        assert "allocate.pd_separation" not in pipe.stats()  # the numbers are those of paged_kv alone
        assert pipe.block_pool.num_used == 0
        pipe.block_pool.check()


def test_a_prompt_that_is_refused_while_a_worker_computes_it_gives_its_blocks_back(folder: str) -> None:
    plugins = ["prefix_cache", pd(), "request_order:deadlines=refuse"]
    with llmopt.build(folder, plugins, block_size=16, pool_bytes=2 << 20) as pipe:
        (worker,) = stats(pipe)["pids"]
        os.kill(worker, signal.SIGSTOP)
        late = pipe.submit(PROMPTS[0] * 2, deadline_s=0.5, max_new_tokens=4)
        wait(lambda: stats(pipe)["num_handed_over"] == 1)
        with pytest.raises(DeadlineError):
            late.result(timeout_s=20)
        os.kill(worker, signal.SIGCONT)
        wait(lambda: pipe.block_pool.num_used == 0)
        assert not pipe.registry.chains["lookup"].objects[1].index.chains  # type: ignore[attr-defined]


def test_the_order_of_requests_still_asks_the_cache_behind_it(folder: str) -> None:
    with llmopt.build(folder, ["prefix_cache", pd(), "request_order:policy=cached_prefix"], block_size=16) as pipe:
        assert "no cache is listed" not in str(pipe.describe())


@pytest.mark.parametrize("is_last", [True, False])
def test_beside_other_plugins_tokens_are_the_same_and_found_prefixes_are_used(
    is_last: bool, folder: str, wanted: Any
) -> None:
    others = ["chunked_prefill", "paged_kv", "prefix_cache"]
    plugins = [*others, pd()] if is_last else [pd(), *others]
    start = tiny_prompts(1, seed=8, min_length=100, max_length=100)[0]
    prompts = [start + p for p in tiny_prompts(4, seed=5, min_length=10, max_length=60)]
    with llmopt.build(folder, plugins, block_size=16, pool_bytes=2 << 20) as pipe:
        assert tokens(pipe, prompts[:1]) == wanted(prompts[:1])
        assert tokens(pipe, prompts) == wanted(prompts)
        assert tokens(pipe, prompts, n=2, temperature=1.0, seed=1) == wanted(prompts, n=2, temperature=1.0, seed=1)
        assert pipe.block_pool.num_used == 0
        pipe.block_pool.check()
        if is_last:
            assert pipe.stats()["lookup.prefix_cache"]["num_hits"] > 4
            assert stats(pipe)["num_prefill_tokens"] < 400
        assert any("List it after them" in note for note in pipe.notes) != is_last


def test_a_model_without_a_source_and_bad_options_are_refused_with_what_to_do() -> None:
    with pytest.raises(PluginUnavailableError, match="given as an object. Build from its folder"):
        llmopt.build(tiny_model(), [pd()])
    with pytest.raises(ValueError, match="workers is a whole number"):
        pd(workers=0)
    with pytest.raises(ValueError, match="start_timeout_s is a number of seconds"):
        pd(start_timeout_s=float("inf"))  # no wait of threads takes it
    with pytest.raises(ValueError, match="chunk_tokens is a whole number of tokens from 1 to 2048"):
        pd(chunk_tokens=4096)


def test_a_source_with_other_weights_is_refused(folder: str) -> None:
    with pytest.raises(PluginUnavailableError, match="are others than the decode process has"):
        llmopt.build(tiny_model(seed=1), [pd(source=folder)])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.native
def test_the_demo_model_says_the_same_in_float32() -> None:
    prompts = [list(range(100 + n, 100 + n + length)) for n, length in enumerate((700, 30, 400))]
    found = []
    for plugins in (["native"], ["native", "pd_separation:mode=process"]):
        options: dict[str, Any] = {"load_options": {"dtype": "float32"}, "max_model_len": 1024, "pool_bytes": 1 << 28}
        with llmopt.build("demo", plugins, **options) as pipe:
            found.append(tokens(pipe, prompts))
            if len(plugins) == 2:
                assert stats(pipe)["num_handed_over"] == 2
                assert stats(pipe)["num_recomputed"] == 0
    assert found[0] == found[1]
