"""Heads on the model's last hidden state guess the tokens that follow; a tree of their guesses is checked at once.

Stages: propose, commit, allocate (wraps); verify (wraps) with ``lossy`` only.
Promise: exact, whatever the heads say; with ``lossy=True`` it is lossy.
Helps: decoding of few rows, with heads that were trained for this very model.
Hurts: the heads' output matrices are read in every step; heads of another model only cost, until they are turned off.
Source: T. Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt.batch import MAX_DRAFTS
from llmopt_plugins.option_checks import check_flag, check_int, check_number, check_path, check_use
from llmopt_plugins.speculation.goodput import Goodput
from llmopt_plugins.speculation.propose import DraftAllocate, DraftCommit, DraftPropose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Allocate, Commit, Propose, Verify
    from llmopt_plugins.speculation.medusa.checkpoint import Heads
    from llmopt_plugins.speculation.medusa.drafter import MedusaDrafter

_EPSILON, _DELTA = 0.09, 0.3


class Medusa:
    """Draft with Medusa heads."""

    info = PluginInfo(
        name="medusa",
        layer="speculation",
        promise="exact",
        summary="heads on the last hidden state draft a tree, the target checks it in one forward",
        in_company=False,
    )

    def __init__(
        self,
        heads: str | os.PathLike[str] | None = None,
        num_draft: int = 12,
        fixed: int | None = None,
        top_k: int = 4,
        lossy: bool = False,
        epsilon: float = _EPSILON,
        delta: float = _DELTA,
    ) -> None:
        """:param heads: a folder or a file with trained heads; it has to be given.
        :param num_draft: nodes of a tree at most; the controller chooses how many pay.
        :param fixed: always so many, whether they pay or not; for measurements.
        :param top_k: guesses of each head that a tree may use.
        :param lossy: sampled requests accept drafts that are likely enough, instead of the tokens that would have been
            drawn: more are accepted, and the output no longer has the model's distribution.
        :param epsilon: with `lossy`, the probability that is always likely enough.
        :param delta: with `lossy`, less is enough where the entropy is high: ``delta * exp(-entropy)``.
        """
        if heads is not None:
            check_path("heads", heads, "a folder or a file with trained heads")
        check_int("num_draft", num_draft, 1, MAX_DRAFTS)
        if fixed is not None:
            check_int("fixed", fixed, 1, num_draft, f", which is num_draft={num_draft}, or None")
        check_int("top_k", top_k, 1, 64)
        check_flag("lossy", lossy)
        check_number("epsilon", epsilon, "a probability, 0 < epsilon < 1", lambda x: 0 < x < 1)
        check_number("delta", delta, "a factor, 0 < delta <= 1", lambda x: 0 < x <= 1)
        if not lossy:
            check_use("lossy=True", {"epsilon": (epsilon, _EPSILON), "delta": (delta, _DELTA)})
        self.path = None if heads is None else Path(heads).expanduser()
        self.num_draft, self.fixed, self.top_k = num_draft, fixed, top_k
        self.lossy, self.epsilon, self.delta = lossy, epsilon, delta
        if lossy:
            self.info = replace(
                type(self).info,
                promise="lossy",
                loss="sampled output follows likely drafts instead of the model's distribution; greedy output is exact",
            )
        self._heads: Heads | None = None  # while a pipeline is built
        self._made: tuple[MedusaDrafter, Goodput] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Its options only: another process builds a pipeline of its own."""
        options = (self.path, self.num_draft, self.fixed, self.top_k, self.lossy, self.epsilon, self.delta)
        return type(self), options

    def why_unavailable(self, context: BuildContext) -> str | None:
        return "needs trained heads: medusa:heads=FOLDER" if self.path is None else None

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig | None:
        self._heads, self._made = None, None
        wanted = self.fixed or self.num_draft
        if config.speculation.max_num_draft >= wanted:
            return None
        return config.with_options(max_num_draft=wanted)

    @hookimpl
    def llmopt_hidden_states(self, config: PipelineConfig, context: BuildContext) -> Sequence[int]:
        from llmopt.hf.capabilities import text_config
        from llmopt_plugins.speculation.medusa.checkpoint import read_heads

        assert self.path is not None
        weight = context.model.get_output_embeddings().weight
        self._heads = read_heads(self.path, weight.shape[1], weight.shape[0])
        return [text_config(context.model).num_hidden_layers]

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate, config: PipelineConfig, context: BuildContext) -> Allocate:
        return DraftAllocate(allocate, self._make(context)[0].forget)

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit, config: PipelineConfig, context: BuildContext) -> Commit:
        return DraftCommit(commit, *self._make(context))

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, config: PipelineConfig, context: BuildContext) -> Propose:
        drafter, goodput = self._make(context)
        drafter.has_trees = context.allows_trees
        assert context.capabilities is not None
        return DraftPropose(propose, drafter, goodput, self.fixed or self.num_draft, context.capabilities.vocab_size)

    @hookimpl
    def llmopt_wrap_verify(self, verify: Verify, config: PipelineConfig, context: BuildContext) -> Verify | None:
        from llmopt_plugins.speculation.medusa.typical import TypicalVerify

        return TypicalVerify(verify, self.epsilon, self.delta) if self.lossy else None

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        self._heads, self._made = None, None

    def _make(self, context: BuildContext) -> tuple[MedusaDrafter, Goodput]:
        """The drafter and its controller, made once per pipeline."""
        from llmopt.hf.capabilities import text_config
        from llmopt_plugins.speculation.medusa.drafter import MedusaDrafter

        if self._made is None:
            assert self._heads is not None
            output = context.model.get_output_embeddings()
            layer = context.hidden_layers.index(text_config(context.model).num_hidden_layers)
            bias = getattr(output, "bias", None)
            drafter = MedusaDrafter(self._heads, output.weight.detach(), bias, layer, self.top_k)
            cost = context.cost_model.wanted()
            self._made = drafter, Goodput(cost, drafter.draft_s, self.fixed or self.num_draft, (0.5,), self.fixed)
        return self._made
