"""Packed weights that pipelines share: who gets the same memory, who must not, and when it goes."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llmopt
from llmopt.pipeline import InferencePipeline
from llmopt.testing import tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins.kernel.native import Native, packing, shared_weights
from llmopt_plugins.kernel.native.packing import MatrixPlan, MatrixShape, PackedWeights, Rows, VectorPlan, extension
from llmopt_plugins.kernel.native.shared_weights import num_users, refill, share
from llmopt_plugins.kernel.weight_quant import WeightQuant

pytestmark = pytest.mark.native
PROMPTS = tiny_prompts(3)


def tokens(pipe: InferencePipeline) -> list[list[int]]:
    outputs = pipe.batch(PROMPTS, max_new_tokens=12, ignore_eos=True, progress=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.token_ids for output in outputs]


def plain_tokens(model: Any) -> list[list[int]]:
    with llmopt.build(model) as pipe:
        return tokens(pipe)


def packed(pipe: InferencePipeline) -> PackedWeights:
    found = pipe.registry.chains["execute"].objects[0].packed
    assert isinstance(found, PackedWeights)
    return found


def stats(pipe: InferencePipeline) -> dict[str, int]:
    found: dict[str, int] = pipe.stats()["execute.native"]
    return found


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the packed weights, each time that some are written."""
    written: list[int] = []
    fill = shared_weights.fill

    def counted(target: PackedWeights, *rest: Any) -> None:
        fill(target, *rest)
        written.append(target.memory.num_bytes)

    for module in (shared_weights, packing):  # a first packing, and one over what was there
        monkeypatch.setattr(module, "fill", counted)
    return written


# -- who shares ------------------------------------------------------------------------------------------------------
def test_a_second_pipeline_on_a_model_packs_nothing_and_gives_the_same_tokens(filled: list[int]) -> None:
    model = tiny_model()
    wanted = plain_tokens(model)
    with llmopt.build(model, ["native"]) as one:
        num_bytes = stats(one)["packed_bytes"]
        assert filled == [num_bytes]
        assert "MB packed; " in one.describe().details["native"]
        with llmopt.build(model, ["native"]) as other:
            assert filled == [num_bytes]
            assert packed(one).memory is packed(other).memory
            for pipe in (one, other):
                assert stats(pipe) == {**stats(pipe), "packed_bytes": num_bytes, "num_users": 2}
                assert "MB packed (shared with 1 other pipeline); " in pipe.describe().details["native"]
            assert [tokens(one), tokens(other)] == [wanted, wanted]
        assert stats(one)["num_users"] == 1
        assert tokens(one) == wanted


def test_the_memory_is_there_as_long_as_any_pipeline_and_no_longer() -> None:
    model = tiny_model()
    wanted = plain_tokens(model)
    one, other = (llmopt.build(model, ["native"]) for _ in range(2))
    memory = weakref.ref(packed(one).memory)
    one.close()
    assert memory() is not None
    assert tokens(other) == wanted
    other.close()
    gc.collect()
    assert memory() is None


def test_the_memory_of_pipelines_that_nobody_closed_goes_with_them() -> None:
    model = tiny_model()
    pipes = [llmopt.build(model, ["native"]) for _ in range(2)]
    memory = weakref.ref(packed(pipes[0]).memory)
    pipes.clear()
    gc.collect()
    assert memory() is None


def test_models_of_the_same_values_share_and_one_that_is_changed_leaves() -> None:
    model = tiny_model()
    twin = copy.deepcopy(model)
    with llmopt.build(model, ["native"]) as one, llmopt.build(twin, ["native"]) as other:
        assert packed(one).memory is packed(other).memory
        before = tokens(one)
        with torch.no_grad():
            twin.model.norm.weight[3:9] = -1
        changed = tokens(other)
        assert changed == plain_tokens(twin) != before
        assert packed(one).memory is not packed(other).memory
        assert tokens(one) == before
        assert stats(one)["num_repacks"] == 0


def _other_dtype(model: Any) -> Any:
    return copy.deepcopy(model).to(torch.bfloat16)


def _same(model: Any) -> Any:
    return model


@pytest.mark.parametrize(
    ("other_model", "plugins"),
    [
        (_other_dtype, ["native"]),
        (_same, ["native", WeightQuant(bits=8)]),
        (_same, ["native", WeightQuant(bits=4, minimum=True)]),
    ],
)
def test_other_forms_are_not_shared(other_model: Callable[[Any], Any], plugins: list[Any], filled: list[int]) -> None:
    model = tiny_model()
    with llmopt.build(model, ["native"]) as one, llmopt.build(other_model(model), plugins) as other:
        assert len(filled) == 2
        assert stats(one)["num_users"] == stats(other)["num_users"] == 1
        assert stats(one)["packed_bytes"] > stats(other)["packed_bytes"]


def test_options_of_quantization_are_told_apart(filled: list[int]) -> None:
    model = tiny_model(num_hidden_layers=1)
    options: list[dict[str, Any]] = [{"bits": 8}, {"bits": 8, "group": 32}, {"bits": 8, "head_bits": 4}]
    options += [{"bits": 4, "group": group, "minimum": minimum} for group in (32, 64) for minimum in (True, False)]
    pipes = [llmopt.build(model, ["native", WeightQuant(**given)]) for given in options]
    assert len({id(packed(pipe).memory) for pipe in pipes}) == len(filled) == len(options)
    pipes += [llmopt.build(model, ["native", WeightQuant(**given)]) for given in options]
    assert len(filled) == len(options)
    for pipe in pipes:
        pipe.close()


def test_what_is_read_from_a_packed_file_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    plugins = [Native(save=True)]
    pipes = [llmopt.build(folder, plugins) for _ in range(3)]  # the first one writes the file
    assert len({id(packed(pipe).memory) for pipe in pipes}) == 3
    assert tokens(pipes[0]) == tokens(pipes[1]) == tokens(pipes[2])
    for pipe in pipes:
        pipe.close()


# -- weights that change ---------------------------------------------------------------------------------------------
def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)


def _through_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data *= -2


def _one_row_through_data(model: Any) -> None:
    model.model.embed_tokens.weight.data[PROMPTS[0]] *= -3


def _new_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = -weight.data


def _new_parameter(model: Any) -> None:
    projection = model.model.layers[1].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach())


CHANGES = [_in_place, _through_data, _one_row_through_data, _new_data, _new_parameter]


@pytest.mark.parametrize("change", CHANGES)
def test_a_pipeline_built_after_a_change_packs_the_new_weights(change: Callable[[Any], None]) -> None:
    model = tiny_model()
    with llmopt.build(model, ["native"]) as one:
        before = tokens(one)
        change(model)
        with llmopt.build(model, ["native"]) as other:
            assert packed(one).memory is not packed(other).memory
            assert tokens(other) == plain_tokens(model) != before


@pytest.mark.parametrize("change", [_in_place, _through_data, _new_data, _new_parameter])
def test_after_a_change_of_their_model_pipelines_share_again_and_the_old_memory_goes(
    change: Callable[[Any], None], filled: list[int]
) -> None:
    model = tiny_model()
    with llmopt.build(model, ["native"]) as one, llmopt.build(model, ["native"]) as other:
        before, old = tokens(one), weakref.ref(packed(one).memory)
        change(model)
        after = tokens(one)
        assert after == plain_tokens(model) != before
        assert packed(other).memory is old() is not packed(one).memory
        assert tokens(other) == after
        assert packed(other).memory is packed(one).memory
        assert len(filled) == 2
        gc.collect()
        assert old() is None


def test_a_request_that_runs_keeps_its_weights_when_another_pipeline_packs_again() -> None:
    model = tiny_model()
    one, other = (llmopt.build(model, ["native"], tokenizer=tiny_tokenizer()) for _ in range(2))
    with one, other:

        def pieces(pipe: InferencePipeline) -> Iterator[str]:
            return pipe.stream(PROMPTS[0], max_new_tokens=12, ignore_eos=True)

        before = "".join(pieces(other))
        running = pieces(other)
        begun = next(running)
        _in_place(model)
        assert "".join(pieces(one)) != before
        assert begun + "".join(running) == before


def test_a_pipeline_alone_packs_over_its_old_weights() -> None:
    model = tiny_model()
    with llmopt.build(model, ["native"]) as pipe:
        before, memory = tokens(pipe), packed(pipe).memory
        _in_place(model)
        assert tokens(pipe) == plain_tokens(model) != before
        assert packed(pipe).memory is memory


# -- one matrix ------------------------------------------------------------------------------------------------------
class Source:
    """One weight and one vector; calls something before they are read."""

    def __init__(self, weight: Tensor, before: Callable[[], None] = lambda: None) -> None:
        self.weight, self.before = weight, before

    def dense(self, name: str) -> Tensor:
        self.before()
        return self.weight if name == "w" else self.weight[0]

    def quantized(self, name: str) -> None:
        return None


MATRICES = {"m": MatrixPlan(8, (Rows("w", 0, 32),))}
VECTORS = {"v": VectorPlan((("b", 8),))}
SHAPES = {"m": MatrixShape("float32", 32, 8)}


def made(source: Source) -> PackedWeights:
    return share(MATRICES, VECTORS, SHAPES, source, 1)


def values(of: PackedWeights) -> Tensor:
    out = np.empty((32, 8), dtype=np.float32)
    extension().unpack_rows(of.matrix("m"), np.arange(32), out.ctypes.data)
    return torch.from_numpy(out)


def test_of_two_that_pack_at_once_one_waits_and_finds_what_the_other_packed(filled: list[int]) -> None:
    weight = torch.randn(32, 8)
    second_came, found = threading.Event(), []

    def wait() -> None:  # in the first thread, inside of its packing
        assert second_came.wait(30)

    def come() -> None:
        second_came.set()
        found.append(made(Source(weight)))

    threads = [threading.Thread(target=lambda: found.append(made(Source(weight, wait)))), threading.Thread(target=come)]
    for thread in threads:
        thread.start()
        if thread is threads[0]:
            while not shared_weights._LOCK.locked():
                pass
    for thread in threads:
        thread.join(30)
    assert len(filled) == 1
    assert found[0].memory is found[1].memory
    assert num_users(found[0]) == 2


def test_threads_that_build_and_close_at_once_get_their_own_tokens() -> None:
    models = [tiny_model(seed=seed) for seed in (0, 0, 1, 1)]
    wanted = [plain_tokens(model) for model in models]
    found: list[list[list[list[int]]]] = [[] for _ in models]

    def work(number: int) -> None:
        for _ in range(4):
            with llmopt.build(models[number], ["native"]) as pipe:
                found[number].append(tokens(pipe))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 4 for tokens in wanted]


def test_weights_that_differ_in_one_value_are_told_apart_and_equal_ones_in_other_memory_are_not() -> None:
    weight = torch.randn(32, 8)
    kept = made(Source(weight))
    assert made(Source(weight.clone())).memory is kept.memory
    assert made(Source(weight.t().contiguous().t())).memory is kept.memory  # other strides
    for place in range(weight.numel()):
        other = weight.clone()
        other.view(-1)[place] += 1
        assert made(Source(other)).memory is not kept.memory


def test_when_packing_again_fails_the_weights_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 8)
    one, other = made(Source(weight)), made(Source(weight))
    memory = one.memory
    with monkeypatch.context() as patch:
        patch.setattr(shared_weights, "fill", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            refill(one, MATRICES, VECTORS, Source(-weight), 1)
    assert one.memory is other.memory is memory
    assert num_users(one) == num_users(other) == 2
    refill(one, MATRICES, VECTORS, Source(-weight), 1)
    assert torch.equal(values(one), -weight)
    assert torch.equal(values(other), weight)


def test_weights_that_could_not_be_packed_again_are_not_found_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 8)
    one = made(Source(weight))
    fill = shared_weights.fill

    def breaks(*arguments: Any) -> None:
        fill(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(shared_weights, "fill", breaks)
        with pytest.raises(MemoryError):
            refill(one, MATRICES, VECTORS, Source(-weight), 1)
    other = made(Source(weight))
    assert other.memory is not one.memory
    assert torch.equal(values(other), weight)
    refill(one, MATRICES, VECTORS, Source(weight), 1)
    assert one.memory is other.memory


# -- fingerprints ----------------------------------------------------------------------------------------------------
def mark(data: Any, num_threads: int = 1) -> int:
    found: int = extension().fingerprint(data.ctypes.data, data.nbytes, num_threads)
    return found


@pytest.fixture
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2 << 20) + 77, dtype=np.uint8)


def test_a_fingerprint_depends_on_bytes_and_neither_on_threads_nor_on_the_address(noise: np.ndarray) -> None:
    wanted = mark(noise)
    assert [mark(noise, threads) for threads in (2, 3, 8)] == [wanted] * 3
    elsewhere = np.empty(noise.size + 3, dtype=np.uint8)[3:]
    elsewhere[:] = noise
    assert mark(elsewhere, 2) == wanted


def test_every_bit_and_every_length_counts(noise: np.ndarray) -> None:
    places = [0, 1, 63, 64, 4095, (1 << 20) - 1, 1 << 20, noise.size - 78, noise.size - 1]
    found = [mark(noise)]
    for place in places:
        for bit in (1, 128):
            noise[place] ^= bit
            found.append(mark(noise))
            noise[place] ^= bit
    found += [mark(noise[:size]) for size in (0, 1, 7, 8, 9, 63, 64, 65, 1 << 20, noise.size - 1)]
    found += [mark(np.zeros(size, dtype=np.uint8)) for size in (1, 2, 64, 128)]
    assert len(set(found)) == len(found)


def test_changes_that_keep_sums_and_sets_of_values_count() -> None:
    weight = torch.randn(512, 64)
    swapped = weight.clone()
    swapped[[3, 400]] = weight[[400, 3]]
    columns = weight[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))].contiguous()
    some = weight.clone()
    some[:, ::2] *= -1
    found = [mark(w.numpy()) for w in (weight, -weight, 2 * weight, weight.flip(0), swapped, columns, some)]
    assert len(set(found)) == len(found)
