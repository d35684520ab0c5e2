"""torch_compile: all layers share a few graphs for any number of tokens, and the tokens stay."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import llmopt
from llmopt import native
from llmopt.errors import PluginConflictError, PluginUnavailableError
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.kernel.torch_compile import TorchCompile, decoder_layers
from tests.equivalence.packed_configs import tiny_packed_model


def why_not() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        return f"no C++ compiler: {type(error).__name__}"
    return None


needs_compiler = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
PROMPTS = tiny_prompts(4, min_length=1, max_length=20)


@pytest.fixture(scope="module")
def model() -> Any:
    """Its graphs are found once and shared by the tests that run them as they are."""
    return tiny_model()


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they were found: what a graph holds is the same, and compiling C++ takes half a minute."""
    real = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: real("eager"))


@needs_compiler
@pytest.mark.slow
def test_two_graphs_serve_all_layers_and_any_number_of_tokens() -> None:
    model = tiny_model()
    with llmopt.build(model, ["torch_compile"]) as pipe:
        for prompts in (PROMPTS, PROMPTS[:1], tiny_prompts(7, seed=4)):
            assert_same_tokens(pipe, model, prompts)
        stats = pipe.stats()["execute.torch_compile"]
        assert stats["num_layers"] == 2
        assert stats["num_graphs"] == 2  # one row of queries, and several
        assert stats["num_graphs_in_steps"] == 0
        assert "2 layers, 2 graphs" in pipe.describe().details["torch_compile"]


@needs_compiler
@pytest.mark.usefixtures("graphs_alone")
def test_a_second_pipeline_of_the_model_compiles_nothing(model: Any) -> None:
    llmopt.build(model, ["torch_compile"]).close()
    with llmopt.build(model, ["torch_compile"]) as first, llmopt.build(model, ["torch_compile"]) as second:
        before = first.stats()["execute.torch_compile"]["num_graphs"]
        assert_same_tokens(second, model, PROMPTS)
        assert second.stats()["execute.torch_compile"]["num_graphs"] == before


@needs_compiler
@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_graph_in_bfloat16_rounds_where_the_model_does(
    dtype: torch.dtype, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, run = [], torch._dynamo.lookup_backend("inductor")  # the graph as it is, from the fixture

    def compile_graph(graph: Any, inputs: Any) -> Any:
        found.append(inductor_config.emulate_precision_casts)
        return run(graph, inputs)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compile_graph)
    llmopt.build(tiny_model().to(dtype), [TorchCompile(warm_up=False)], max_model_len=64).close()
    assert set(found) == {rounds}


@needs_compiler
@pytest.mark.usefixtures("graphs_alone")
def test_without_a_warm_up_the_graphs_come_with_the_first_steps() -> None:
    model = tiny_model(seed=3)
    with llmopt.build(model, [TorchCompile(warm_up=False)], self_test=False) as pipe:
        assert pipe.stats()["execute.torch_compile"]["num_graphs"] == 0
        assert_same_tokens(pipe, model, PROMPTS)
        assert pipe.stats()["execute.torch_compile"]["num_graphs_in_steps"] == 1  # four rows from first to last


@needs_compiler
@pytest.mark.usefixtures("graphs_alone")
def test_the_model_is_as_it_was_while_no_step_runs(model: Any) -> None:
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with llmopt.build(model, ["torch_compile"]) as pipe:
        pipe.batch(PROMPTS, max_new_tokens=3, progress=False)
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
        assert torch._dynamo.config.allow_unspec_int_on_nn_module is False


@needs_compiler
@pytest.mark.usefixtures("graphs_alone")
def test_soft_caps_and_windows_need_no_more_graphs() -> None:
    model = tiny_packed_model("gemma2")
    with llmopt.build(model, ["torch_compile"]) as pipe:
        assert_same_tokens(pipe, model, [[5, 9, 33, 7, 21, 60, 11, 12, 13], [17, 3, 44], [70]])
        assert pipe.stats()["execute.torch_compile"]["num_graphs_in_steps"] == 0


@needs_compiler
@pytest.mark.native
@pytest.mark.skipif(native.core() is None, reason=str(native.why_not()))
@pytest.mark.parametrize(
    "plugins", [["torch_compile", "fused_ops", "paged_kv"], ["paged_kv", "fused_ops", "torch_compile"]]
)
@pytest.mark.usefixtures("graphs_alone")
def test_beside_fused_ops_and_paged_blocks_the_tokens_are_the_same(model: Any, plugins: list[str]) -> None:
    with llmopt.build(model, plugins, max_model_len=64, block_size=4) as pipe:
        assert_same_tokens(pipe, model, PROMPTS)
        assert pipe.stats()["execute.torch_compile"]["num_graphs_in_steps"] == 0


@needs_compiler
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("/chosen/by/the/user", "/chosen/by/the/user"),
        (default_cache_dir(), "/cache/torch_compile"),
        (None, "/cache/torch_compile"),
    ],
    ids=["user", "torch", "nobody"],
)
def test_compiled_code_is_kept_where_the_user_chose_or_in_the_cache(
    chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_CACHE", "/cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with llmopt.build(tiny_model(), [TorchCompile(warm_up=False)], self_test=False):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected


def test_without_a_compiler_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(PluginUnavailableError, match=r"needs a C\+\+ compiler on this machine.*install g\+\+"):
        llmopt.build(tiny_model(), ["torch_compile"])


def test_a_model_without_plain_layers_is_refused_with_the_reason() -> None:
    if why_not() is not None:
        pytest.skip(str(why_not()))
    with pytest.raises(PluginUnavailableError, match="changes keys after the cache"):
        llmopt.build(tiny_packed_model("deepseek_v3"), ["torch_compile"])


def test_native_and_the_compiled_layers_exclude_each_other() -> None:
    with pytest.raises(PluginConflictError, match="'torch_compile' and 'native' exclude each other"):
        llmopt.build(tiny_model(), ["torch_compile", "native"])


def test_the_layers_are_the_longest_list_of_equal_modules() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Identity(), nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()])
    assert decoder_layers(nn.ModuleDict({"mixed": mixed, "layers": layers})) == list(layers)
    assert decoder_layers(nn.Linear(2, 2)) == []
