"""The decoder layers of the model's own forward, compiled by torch.compile.

Stage: execute (wraps).   Promise: exact, the same operations in another order of additions.
Helps: many small operations per layer, which become a few loops; long prompts.   Hurts: the first build, which compiles
for seconds to minutes.
Source: J. Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", 2024.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import types
import weakref
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.option_checks import check_flag

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from llmopt.batch import Batch, BestTokens, DraftTokens
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.hf.module_switch import ModuleSwitch
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Execute

logger = logging.getLogger("llmopt")

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


class CompiledLayers:
    """The compiled forwards of one model, for all pipelines that run it; compiled anew for every kind of input."""

    def __init__(self) -> None:
        self.num_graphs = 0  # compilations so far
        self.compile_s = 0.0
        self._forwards: dict[Any, Callable[..., Any]] = {}  # by the class's forward

    def forward_of(self, layer: nn.Module) -> Callable[..., Any]:
        """The compiled forward, bound to a layer. Layers of a class share it: weights come in as inputs."""
        import torch

        function: Any = type(layer).forward
        compiled = self._forwards.get(function)
        if compiled is None:
            # a code object of its own, since torch counts and limits compilations by code object
            copy = types.FunctionType(
                function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
                function.__closure__,
            )  # fmt: skip
            copy.__kwdefaults__ = function.__kwdefaults__
            compiled = self._forwards[function] = torch.compile(copy, dynamic=True, backend=self._compile)
        return functools.partial(compiled, layer)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        import torch
        from torch._dynamo import lookup_backend
        from torch._inductor import config

        start = time.perf_counter()
        # in float16 and bfloat16 every operation rounds as the model's does, not only the last one of a loop
        rounds = any(isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in inputs)
        with config.patch(emulate_precision_casts=rounds or config.emulate_precision_casts):
            compiled = lookup_backend("inductor")(graph, inputs)
        self.num_graphs += 1
        self.compile_s += time.perf_counter() - start
        return compiled


_layers_of: weakref.WeakKeyDictionary[nn.Module, CompiledLayers] = weakref.WeakKeyDictionary()


class CompiledExecute:
    """The executor it found, with compiled decoder layers in the model while it runs."""

    accepts_best = True  # logits pass through unseen

    def __init__(self, inner: Execute, switch: ModuleSwitch, layers: CompiledLayers) -> None:
        self.inner = inner
        self.switch = switch
        self.layers = layers
        self.num_graphs_built = 0  # compilations until the pipeline was complete

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        import torch

        # numbers of layers are inputs of a graph, so that all layers share it
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True), self.switch:
            return self.inner(batch, drafts)

    def stats(self) -> dict[str, Any]:
        return {
            "num_layers": len(self.switch),
            "num_graphs": self.layers.num_graphs,
            "num_graphs_in_steps": self.layers.num_graphs - self.num_graphs_built,
            "compile_s": round(self.layers.compile_s, 1),
        }

    def describe(self) -> str:
        return f"{len(self.switch)} layers, {self.layers.num_graphs} graphs compiled in {self.layers.compile_s:.1f} s"

    def close(self) -> None:
        self.switch.close()


class TorchCompile:
    """Compile the decoder layers."""

    info = PluginInfo(
        name="torch_compile",
        layer="kernel",
        promise="exact",
        summary="decoder layers of the model's own forward compiled by torch.compile, for any number of tokens",
        conflicts=("native",),  # which runs no module of the model
        in_company=False,  # compiles anew for the model of every check; in its own it meets all others
    )

    def __init__(self, warm_up: bool = True) -> None:
        """:param warm_up: compile for one row and for several while the pipeline is built."""
        check_flag("warm_up", warm_up)
        self.warm_up = warm_up

    def why_unavailable(self, context: BuildContext) -> str | None:
        from torch.utils._triton import has_triton

        if context.model.device.type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            try:
                get_cpp_compiler()
            except Exception as error:
                return (
                    "needs a C++ compiler on this machine, since torch.compile writes C++ for the CPU, and found none "
                    f"({type(error).__name__}; install g++ or set CXX)"
                )
        elif context.model.device.type == "cuda" and not has_triton():
            return "needs Triton, in whose language torch.compile writes for CUDA, and found none"
        return None

    @hookimpl
    def llmopt_wrap_execute(self, execute: Execute, config: PipelineConfig, context: BuildContext) -> Execute | None:
        from llmopt.errors import PluginUnavailableError
        from llmopt.hf.module_switch import ModuleSwitch, why_not

        found = [layer for layer in decoder_layers(context.model) if why_not(layer) is None]
        capabilities = context.capabilities
        assert capabilities is not None
        if capabilities.gather or capabilities.has_states or not found:
            what = "changes keys after the cache" if capabilities.gather else "has recurrent states"
            what = what if capabilities.gather or capabilities.has_states else "has no list of equal decoder layers"
            raise PluginUnavailableError(
                f"plugin 'torch_compile' needs plain decoder layers, and this model {what}. "
                "Remove it from plugins=[...]."
            )
        keep_compiled_code()
        layers = _layers_of.setdefault(context.model, CompiledLayers())
        return CompiledExecute(execute, ModuleSwitch({layer: layers.forward_of(layer) for layer in found}), layers)

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        if pipeline.why_not is not None:
            return
        (stage,) = (o for o in pipeline.registry.chains["execute"].objects if isinstance(o, CompiledExecute))
        if self.warm_up:
            logger.info("torch_compile: compiling %d decoder layers", len(stage.switch))
            warm_up(pipeline)
            logger.info("torch_compile: %s", stage.describe())
        stage.num_graphs_built = stage.layers.num_graphs


def keep_compiled_code() -> None:
    """Let torch keep what it compiles in llmopt's cache, unless the user chose a folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from llmopt.demo_models import cache_folder

    # torch names its default, which lasts until the machine restarts, in the variable when it is imported
    if os.environ.get(_FOLDER, default_cache_dir()) == default_cache_dir():
        os.environ[_FOLDER] = str(cache_folder() / "torch_compile")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the longest list of modules that knows one class, or a few, of layers."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((layers for layers in lists if len({type(layer) for layer in layers}) <= 2), key=len, default=[])


def warm_up(pipeline: InferencePipeline) -> None:
    """Run a prompt of several tokens and a decode, so that both kinds of graph are there."""
    from llmopt.request import Request, SamplingParams

    pool, queue = pipeline.block_pool, pipeline.queue
    num_tokens = min(8, pipeline.max_model_len - 1)
    request = Request("warm-up", [0] * (num_tokens + 1), SamplingParams(), max_len=num_tokens + 1, wants_text=False)
    request.slot = queue.free_slots[-1]
    request.block_table.extend(pool.allocate(pool.num_blocks_for(num_tokens + 1)))
    try:
        for count in (num_tokens, 1):
            pipeline.execute(pipeline.batch_builder.build([request], [count]), None)
            request.num_computed_tokens += count
    finally:
        pool.free(request.block_table)
