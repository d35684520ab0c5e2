"""A smaller model guesses the next tokens, the target checks them all in one forward.

Stages: propose, commit, allocate (wraps).   Promise: exact, whatever the draft model says.
Helps: decoding, where a second model with the same tokens is much faster and mostly agrees.
Hurts: memory for the second model and its KV; with many rows the target has no time to spare, and the controller turns
drafting off. Small targets: a draft step that takes a fifth of the target's leaves little to gain.
Source: Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; C. Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023. Tokens are drawn, then matched.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.batch import MAX_DRAFTS
from llmopt.errors import MemoryBudgetError, ModelError, PluginOptionError
from llmopt_plugins.option_checks import check_choice, check_flag, check_int, check_path, check_use
from llmopt_plugins.speculation.draft_model.vocabulary import why_not_same
from llmopt_plugins.speculation.goodput import Goodput
from llmopt_plugins.speculation.propose import DraftAllocate, DraftCommit, DraftPropose

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Allocate, Commit, Propose
    from llmopt_plugins.speculation.draft_model.drafter import ModelDrafter

_MODELS = 'a loaded model, its folder, file or name, or "self"'
_POOL_SHARE = 0.1  # of the free memory, for the draft's KV


class DraftModel:
    """Draft with a second model."""

    info = PluginInfo(
        name="draft_model",
        layer="speculation",
        promise="exact",
        summary="a smaller model drafts, the target checks several tokens per forward",
        in_company=False,
    )

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str] = "self",
        num_draft: int = 6,
        fixed: int | None = None,
        bits: int | None = None,
        device: str | None = None,
        ahead: bool | None = None,
        native: bool | None = None,
        pool_bytes: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """:param model: a loaded model, a folder, a file or a name, as `llmopt.build` takes them; or ``"self"``, the
            target's own weights, for drafts with fewer `bits`.
        :param num_draft: tokens of a draft at most; the controller chooses how many pay.
        :param fixed: always so many, whether they pay or not; for measurements.
        :param bits: weights of the draft model in 8 or 4 bits, which needs the native decoder; None: as they are.
        :param device: where the draft model runs; None: where it is, or beside the target.
        :param ahead: go on drafting on another thread while the target verifies. None: on a device of its own only.
        :param native: run it on the native decoder; None: where that can run it.
        :param pool_bytes: KV of the draft model; None: a tenth of the free memory, or less when less is enough.
        :param tokenizer: of a model that is given loaded: its tokens are then compared with the target's.
        """
        is_named = isinstance(model, (str, os.PathLike))
        if is_named:
            check_path("model", model, _MODELS)
        elif not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"model is {_MODELS}, found {model!r}")
        check_int("num_draft", num_draft, 1, MAX_DRAFTS)
        if fixed is not None:
            check_int("fixed", fixed, 1, num_draft, f", which is num_draft={num_draft}, or None")
        check_choice("bits", bits, (8, 4, None))
        _check_device(device)
        for name, flag in (("ahead", ahead), ("native", native)):
            if flag is not None:
                check_flag(name, flag, " or None")
        if bits is not None and native is False:
            raise ValueError(f"bits is for the native decoder, found bits={bits} and native=False. Leave one out")
        if pool_bytes is not None:
            check_int("pool_bytes", pool_bytes, 1, other=", or None", of="bytes")
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise ValueError(f"tokenizer is the tokenizer of a loaded model, or None, found {tokenizer!r}")
        if is_named:
            check_use("a model that is given loaded", {"tokenizer": (tokenizer, None)})
        self.model, self.num_draft, self.fixed, self.bits = model, num_draft, fixed, bits
        self.device, self.ahead, self.native, self.pool_bytes = device, ahead, native, pool_bytes
        self.tokenizer = tokenizer
        self._drafter: ModelDrafter | None = None  # while a pipeline is built
        self._goodput: Goodput | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Its options only: another process builds a pipeline of its own."""
        options = (self.model, self.num_draft, self.fixed, self.bits, self.device, self.ahead, self.native)
        return type(self), (*options, self.pool_bytes, self.tokenizer)

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig | None:
        self._drafter = self._goodput = None
        wanted = self.fixed or self.num_draft
        if config.speculation.max_num_draft >= wanted:
            return None
        return config.with_options(max_num_draft=wanted)

    @hookimpl
    def llmopt_reserve(self, config: PipelineConfig, context: BuildContext) -> int:
        """The draft model is loaded here already, so that only its blocks, which are not written yet, are left."""
        drafter = self._make(config, context)
        pool = drafter.pipeline.block_pool
        per_token = drafter.pipeline.kv_cache.bytes_per_token(drafter.pipeline.kv_cache.shapes)
        taken = pool.num_blocks * pool.block_size * per_token
        if self._runs_beside(drafter, context):
            return taken + _weight_bytes(drafter)
        return 0

    @staticmethod
    def _runs_beside(drafter: ModelDrafter, context: BuildContext) -> bool:
        return bool(drafter.pipeline.model.device == context.model.device)

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, config: PipelineConfig, context: BuildContext) -> Propose:
        drafter, goodput = self._make(config, context), self._goodput
        assert goodput is not None
        assert context.capabilities is not None
        return _Propose(propose, drafter, goodput, self.fixed or self.num_draft, context.capabilities.vocab_size)

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit, config: PipelineConfig, context: BuildContext) -> Commit:
        drafter, goodput = self._make(config, context), self._goodput
        assert goodput is not None
        return DraftCommit(commit, drafter, goodput)

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate, config: PipelineConfig, context: BuildContext) -> Allocate:
        return DraftAllocate(allocate, self._make(config, context).forget)

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        self._drafter = self._goodput = None

    def _make(self, config: PipelineConfig, context: BuildContext) -> ModelDrafter:
        """The drafter and its controller, made once per pipeline."""
        from llmopt_plugins.speculation.draft_model.drafter import ModelDrafter

        if self._drafter is None:
            pipeline = self._build(config, context)
            is_elsewhere = pipeline.model.device != context.model.device
            ahead = is_elsewhere if self.ahead is None else self.ahead
            if ahead and pipeline.model is context.model and not pipeline.has_own_threads:
                pipeline.close()
                raise PluginOptionError(
                    "draft_model: ahead=True runs the draft model beside the target, and both are the same object. "
                    "Leave ahead=True out, or give a draft model of its own."
                )
            wanted = self.fixed or self.num_draft
            self._drafter = ModelDrafter(pipeline, wanted, ahead)
            self._goodput = Goodput(context.cost_model.wanted(), self._drafter.draft_s, wanted, (0.7,), self.fixed)
        return self._drafter

    def _build(self, config: PipelineConfig, context: BuildContext) -> InferencePipeline:
        """The pipeline that the draft model runs in.

        :raises ModelError: it cannot draft for the target.
        """
        model, tokenizer = self._load(context)
        own = None if context.capabilities is None else context.capabilities.vocab_size
        theirs = int(model.get_input_embeddings().weight.shape[0])
        is_self = model is context.model
        reason = None if is_self else why_not_same(context.tokenizer, tokenizer, own or theirs, theirs)
        if reason is not None:
            raise ModelError(f"draft_model cannot use this model: {reason}. Choose one of the target's family.")
        options: dict[str, Any] = {
            "block_size": config.memory.block_size,
            "max_num_requests": config.scheduling.max_num_requests,
            "pool_bytes": self.pool_bytes,
        }
        if self.pool_bytes is None:
            options["memory_fraction"] = _POOL_SHARE
        limit = config.memory.max_model_len
        if limit is not None:
            options["max_model_len"] = limit
        plugins: list[Any] = [_Measured()]
        if self.bits is not None:
            plugins += ["native", f"weight_quant:bits={self.bits}"]
        elif self.native or (self.native is None and _can_be_native(model)):
            plugins += ["native"]
        try:
            pipeline = llmopt.build(model, plugins, tokenizer=tokenizer, **options)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"the draft model's own KV: {error} Here it is draft_model's pool_bytes."
            ) from error
        reason = pipeline.why_not
        if reason is None and pipeline.capabilities.has_states:
            reason = "it keeps recurrent states, which cannot be rewound when a draft is rejected"
        if reason is not None:
            pipeline.close()
            raise ModelError(f"draft_model cannot use this model: {reason}. Choose another draft model.")
        return pipeline

    def _load(self, context: BuildContext) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        import torch

        if isinstance(self.model, str) and self.model == "self":
            if self.device is not None and torch.device(self.device) != context.model.device:
                raise PluginOptionError(
                    "draft_model: the target's own weights stand on its device. Name the draft model, or leave the "
                    "device out."
                )
            return context.model, context.tokenizer
        if isinstance(self.model, (str, os.PathLike)):
            from llmopt.hub import load

            model, tokenizer = load(self.model, dtype=context.model.dtype)
        else:
            model, tokenizer = self.model, self.tokenizer
            if self.device is None:
                return model, tokenizer
        device = self.device or context.model.device
        try:
            return model.to(device), tokenizer
        except (AssertionError, RuntimeError) as error:  # the former: torch was built without this kind of device
            raise PluginOptionError(
                f"draft_model: the draft model cannot stand on device {str(device)!r}: {error}. Name a device of this "
                "machine with room for it, or leave the device out."
            ) from error


class _Propose(DraftPropose):
    """Closes the draft model with the pipeline."""

    def close(self) -> None:
        from llmopt_plugins.speculation.draft_model.drafter import ModelDrafter

        drafter = self.drafter
        assert isinstance(drafter, ModelDrafter)
        drafter.close()


class _Measured:
    """Has the draft pipeline measured, for the first estimate of a draft's time."""

    info = PluginInfo(name="draft_cost", layer="speculation", promise="exact", summary="times the draft model")

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, config: PipelineConfig, context: BuildContext) -> Propose | None:
        context.cost_model.wanted()
        return None


def _check_device(device: Any) -> None:
    """Refuse what torch does not know as a device.

    :raises ValueError: says so.
    """
    if device is None:
        return
    import torch

    try:
        if isinstance(device, (str, torch.device)) and torch.device(device):
            return
    except RuntimeError:
        pass
    raise ValueError(f'device is the name of a device, such as "cpu" or "cuda:1", or None, found {device!r}')


def _can_be_native(model: PreTrainedModel) -> bool:
    """Whether the native decoder takes this model."""
    from llmopt.build_context import BuildContext
    from llmopt.plugin_info import info_of
    from llmopt.plugin_search import builtin_plugins

    for plugin in builtin_plugins():
        if info_of(plugin).name == "native":
            made = plugin()
            return made.why_unavailable(BuildContext(model=model, tokenizer=None)) is None
    return False


def _weight_bytes(drafter: ModelDrafter) -> int:
    """What packed weights of the draft model take beside those that were loaded."""
    return int(getattr(drafter.pipeline.execute, "weight_bytes", None) or 0)
