"""Drafts without a model: what followed the same tokens before.

Stage: propose, commit, allocate (wraps).   Promise: exact, drafts are verified.
Helps: output that repeats its input: edits, code, extraction, quotations, translations of structured text.
Hurts: hardly; where nothing repeats it costs some microseconds per token, and drafts that fail turn themselves off.
Source: A. Saxena, "Prompt Lookup Decoding", 2023; Y. Hu et al., "SAM Decoding: Speculative Decoding via Suffix
Automaton", 2024; G. Oliaro et al., "SuffixDecoding", 2024 (texts of earlier requests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt_plugins.option_checks import check_flag, check_int, check_use
from llmopt_plugins.speculation.goodput import Goodput
from llmopt_plugins.speculation.ngram.drafter import PRIORS, NgramDrafter, new_automaton
from llmopt_plugins.speculation.ngram.shared_texts import SharedTexts
from llmopt_plugins.speculation.propose import DraftAllocate, DraftCommit, DraftPropose

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.request import Request
    from llmopt.stages import Allocate, Commit, Propose

_MAX_TENANTS = 64
_SHARED_TOKENS = 65536


class Ngram:
    """Draft from the request's own tokens."""

    info = PluginInfo(
        name="ngram",
        layer="speculation",
        promise="exact",
        summary="drafts from what followed the same tokens before; off where it does not pay",
    )

    def __init__(
        self,
        num_draft: int | str = "auto",
        max_num_draft: int = 16,
        min_match: int = 2,
        shared: bool = False,
        shared_tokens: int = _SHARED_TOKENS,
    ) -> None:
        """:param num_draft: drafts per request and step, or "auto": as many as pay, measured.
        :param max_num_draft: the most of them; KV is reserved for so many.
        :param min_match: tokens that must have occurred before.
        :param shared: also look at earlier outputs of the same tenant. How fast an answer comes then tells whether
            somebody of this tenant got a similar one before.
        :param shared_tokens: that are kept for each tenant.
        """
        check_int("max_num_draft", max_num_draft, 1, 64)
        if num_draft != "auto":
            check_int("num_draft", num_draft, 1, max_num_draft, ' or "auto"')
        check_int("min_match", min_match, 1, 1024)
        check_int("shared_tokens", shared_tokens, 2, 1 << 28)
        check_flag("shared", shared)
        if not shared:
            check_use("shared=True", {"shared_tokens": (shared_tokens, _SHARED_TOKENS)})
        self.num_draft = None if isinstance(num_draft, str) else num_draft
        self.max_num_draft, self.min_match = max_num_draft, min_match
        self.shared, self.shared_tokens = shared, shared_tokens
        self._made: tuple[NgramDrafter, Goodput] | None = None  # while a pipeline is built

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_draft=max(config.speculation.max_num_draft, self.max_num_draft))

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate, context: BuildContext) -> Allocate:
        shared = SharedTexts(self.shared_tokens, _MAX_TENANTS, new_automaton) if self.shared else None
        drafter = NgramDrafter(self.min_match, shared)
        priors = PRIORS if shared is None else PRIORS * 2
        goodput = Goodput(
            context.cost_model.wanted(), drafter.draft_s, self.max_num_draft, priors, fixed=self.num_draft
        )
        self._made = drafter, goodput

        def forget(request: Request) -> None:
            drafter.forget(request)
            goodput.forget(request)

        return DraftAllocate(allocate, forget)

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit) -> Commit:
        assert self._made is not None
        return DraftCommit(commit, *self._made)

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, context: BuildContext) -> Propose:
        assert self._made is not None
        assert context.capabilities is not None
        made, self._made = self._made, None
        return DraftPropose(propose, *made, self.max_num_draft, context.capabilities.vocab_size)
