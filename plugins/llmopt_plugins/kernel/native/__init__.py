"""The whole model in one C++ call per step, on packed weights and the same KV blocks.

Stage: execute (replaces).   Promise: exact, the same sums in another order; in bfloat16 up to near-ties.
Helps: everything on a CPU; most where the forward of transformers spends its time beside the weights (small batches).
Hurts: memory, because the packed weights stand beside those of a loaded model; building takes the time to pack.
Source: own work. Tiles and dot products after Intel's Architecture Instruction Set Extensions reference; attention in
blocks after T. Dao, "FlashAttention-2", 2023; paged KV after W. Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl, native
from llmopt.loaded_model import LoadedModel
from llmopt.threads import num_native_threads
from llmopt_plugins.option_checks import check_int, check_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Execute
    from llmopt_plugins.kernel.native.gguf_weights import GgufWeights
    from llmopt_plugins.kernel.native.packed_store import PackedStore


class Native:
    """Run the model on the native decoder."""

    info = PluginInfo(
        name="native",
        layer="kernel",
        promise="exact",
        summary="the whole forward as one C++ call on packed weights (CPU, known model families)",
        devices=("cpu",),
        auto=True,
    )

    def __init__(self, threads: int | None = None, save: bool | str = False) -> None:
        """:param threads: of the decoder; None: what the machine and the container allow.
        :param save: keep the packed weights in a file and read them from it next time. True: beside the model, or in
            the user's cache where that cannot be written; a path: that file. A file that is there is used in any case,
            when it fits.
        """
        if threads is not None:
            check_int("threads", threads, 1, other=", or None", of="threads")
        if not isinstance(save, bool):
            check_path("save", save, "True, False or a path")
        self.threads = threads
        self.save = save
        self._gguf: tuple[PreTrainedModel, GgufWeights] | None = None  # between llmopt_load and llmopt_finish
        self._store: PackedStore | None = None

    def __reduce__(self) -> tuple[type[Native], tuple[Any, ...]]:
        """Its options only: another process builds a pipeline of its own."""
        return type(self), (self.threads, self.save)

    def why_unavailable(self, context: BuildContext) -> str | None:
        reason = native.why_not()
        if reason is not None:
            return f"needs the compiled extension: {reason}"
        from llmopt_plugins.kernel.native.decoder_spec import why_not_native

        reason = why_not_native(context.model)
        return None if reason is None else f"cannot run this model: it {reason}"

    @hookimpl
    def llmopt_load(self, source: str, load_options: dict[str, Any]) -> LoadedModel | None:
        from llmopt_plugins.kernel.native.decoder_spec import stored_shapes
        from llmopt_plugins.kernel.native.packed_store import has_candidate

        self._gguf = self._store = None
        if native.why_not() is not None:
            return None
        if source.endswith(".gguf"):
            from llmopt_plugins.kernel.native.gguf_model import load_gguf

            loaded, weights = load_gguf(Path(source), load_options, keep=bool(self.save))
            self._gguf = loaded.model, weights
            loaded.layer_shapes = stored_shapes(loaded.model)
            return loaded
        if not Path(source).is_dir() or load_options.get("device_map") or not has_candidate(source, self.save):
            return None
        from llmopt.hub import load

        model, tokenizer = load(source, **load_options)  # mapped, not read
        return LoadedModel(model, tokenizer, weights_unread=True, layer_shapes=stored_shapes(model))

    @hookimpl
    def llmopt_reserve(self, config: PipelineConfig, context: BuildContext) -> int | None:
        from llmopt_plugins.kernel.native.builder import bytes_to_hold

        return bytes_to_hold(context, config.kernel, self._num_threads(context), self._gguf_weights(context.model))

    @hookimpl
    def llmopt_replace_execute(self, config: PipelineConfig, context: BuildContext) -> Execute | None:
        from llmopt_plugins.kernel.native.builder import make_executor
        from llmopt_plugins.kernel.native.packed_store import PackedStore, options_of

        model = context.model
        weights = self._gguf_weights(model)
        self._store = None
        if context.source is not None and Path(context.source).exists():
            options = options_of(model.dtype, config.kernel, is_gguf=weights is not None)
            self._store = PackedStore(context.source, model.config, options, self.save)
        return make_executor(config, context, self._num_threads(context), source=weights, store=self._store)

    def _num_threads(self, context: BuildContext) -> int:
        assert context.machine is not None
        return num_native_threads(self.threads, context.machine.num_threads)

    def _gguf_weights(self, model: PreTrainedModel) -> GgufWeights | None:
        """The file that the model was loaded from, while it is built."""
        return self._gguf[1] if self._gguf is not None and self._gguf[0] is model else None

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        from llmopt_plugins.kernel.native import resident
        from llmopt_plugins.kernel.native.executor import NativeExecute

        gguf, store = self._gguf, self._store
        self._gguf = self._store = None
        if pipeline.why_not is not None:
            return
        execute = pipeline.registry.chains["execute"].objects[0]
        if store is not None and isinstance(execute, NativeExecute) and execute.packed is not None:
            store.keep(execute.packed)
            pipeline.notes += store.notes
        elif self.save is not False and isinstance(execute, NativeExecute):
            pipeline.notes.append(
                "the packed weights were not saved: the model was not given as a folder or file, whose changes tell "
                "when they are out of date"
            )
        if gguf is not None:
            gguf[1].file.release()
        if store is not None:  # the model is nobody else's yet
            resident.give_back_mapped(pipeline.model.parameters())
            resident.trim_heap()
