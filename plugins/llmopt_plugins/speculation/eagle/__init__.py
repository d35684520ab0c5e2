"""Drafts from a small head on the target's own hidden states: EAGLE-1, EAGLE-2 and EAGLE-3 checkpoints.

Stage: propose and commit (wraps).   Promise: exact, every draft is verified.
Helps: single requests and small batches, where a forward of several tokens costs little more than one of one token.
Hurts: large batches, heads that were trained for other text; the controller turns it off there.
Source: Y. Li et al., "EAGLE", 2024; "EAGLE-2", 2024; "EAGLE-3", 2025. The code is our own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl
from llmopt.batch import MAX_DRAFTS
from llmopt.errors import PluginUnavailableError
from llmopt_plugins.option_checks import check_choice, check_flag, check_int, check_path

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Commit, Propose
    from llmopt_plugins.speculation.eagle.build import Parts
    from llmopt_plugins.speculation.eagle.checkpoint import HeadFiles

logger = logging.getLogger("llmopt")

MIN_AGREEMENT = 0.15  # of the self-check; a head that reads the right hidden states names more of the target's tokens


class Eagle:
    """Draft with an EAGLE head."""

    info = PluginInfo(
        name="eagle",
        layer="speculation",
        promise="exact",
        summary="drafts from an EAGLE-1, -2 or -3 head on the model's hidden states, as trees",
        in_company=False,  # needs a head that belongs to the model; its own tests build it beside the others
    )

    def __init__(
        self,
        head: str | Path | None = None,
        num_draft: int = 12,
        depth: int = 4,
        width: int = 4,
        bits: int | None = 8,
        aux_layers: Sequence[int] | None = None,
        self_check: bool = True,
        fixed: int | None = None,
    ) -> None:
        """:param head: folder of the checkpoint; None: the one that ships with llmopt for this model.
        :param num_draft: draft tokens per request and step, at most; the controller chooses how many.
        :param depth: levels of the tree at most, each one forward of the head.
        :param width: nodes that go on at each level.
        :param bits: 8: store the head's matrices in 8 bits where it runs natively; None: in the model's dtype.
        :param aux_layers: layers whose inputs the head reads, where its config is wrong about them.
        :param self_check: refuse a head that does not know what the model says.
        :param fixed: always so many drafts, whatever they cost; None: what pays.
        """
        for name, value in (("num_draft", num_draft), ("depth", depth), ("width", width)):
            check_int(name, value, 1, MAX_DRAFTS)
        if width * (depth - 1) > MAX_DRAFTS:
            raise ValueError(f"width * (depth - 1) is at most {MAX_DRAFTS}, found {width} * {depth - 1}")
        check_choice("bits", bits, (8, None))
        if aux_layers is not None:
            _check_layers(aux_layers)
        check_flag("self_check", self_check)
        if fixed is not None:
            check_int("fixed", fixed, 1, num_draft, f", which is num_draft={num_draft}, or None")
        if head is not None:
            check_path("head", head, "the folder of a checkpoint, or None")
        self.head = None if head is None else Path(head).expanduser()
        self.num_draft, self.depth, self.width = num_draft, depth, width
        self.bits, self.aux_layers, self.self_check, self.fixed = bits, aux_layers, self_check, fixed
        self._files: HeadFiles | None = None  # between why_unavailable and llmopt_finish
        self._parts: Parts | None = None

    def why_unavailable(self, context: BuildContext) -> str | None:
        from llmopt_plugins.speculation.eagle.checkpoint import HeadError, read_files, shipped_head, target_of

        self._files = self._parts = None
        folder = self.head or shipped_head(context.model)
        if folder is None:
            return "needs a draft head: none ships with llmopt for this model. Give the folder of one with head="
        try:
            self._files = read_files(folder, target_of(context.model, context.tokenizer), self.aux_layers)
        except HeadError as error:
            return f"cannot use the draft head in {str(folder)!r}: it {error}"
        return None

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_draft=max(self.num_draft, config.speculation.max_num_draft))

    @hookimpl
    def llmopt_reserve(self, config: PipelineConfig, context: BuildContext) -> int:
        from llmopt_plugins.speculation.eagle.build import bytes_to_hold

        assert self._files is not None
        return bytes_to_hold(self._files, context.model)

    @hookimpl
    def llmopt_hidden_states(self) -> Sequence[int]:
        assert self._files is not None
        return sorted({layer for taps in self._files.readings for layer in taps})

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit, config: PipelineConfig, context: BuildContext) -> Commit:
        from llmopt_plugins.speculation.eagle.build import make_parts
        from llmopt_plugins.speculation.eagle.checkpoint import HeadError
        from llmopt_plugins.speculation.propose import DraftCommit

        assert self._files is not None
        try:
            self._parts = make_parts(
                self._files, context, config, num_draft=self.num_draft, depth=self.depth, width=self.width,
                bits=self.bits, fixed=self.fixed,
            )  # fmt: skip
        except HeadError as error:
            raise PluginUnavailableError(
                f"plugin 'eagle' cannot use the draft head in {str(self._files.folder)!r}: it {error}."
            ) from error
        return DraftCommit(commit, self._parts.drafter, self._parts.goodput)

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, config: PipelineConfig, context: BuildContext) -> Propose:
        from llmopt_plugins.speculation.eagle.build import EaglePropose

        assert self._parts is not None
        assert context.capabilities is not None
        parts = self._parts
        parts.drafter.allow_trees(context.allows_trees)
        return EaglePropose(propose, parts, self.num_draft, context.capabilities.vocab_size)

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        from llmopt_plugins.speculation.eagle.build import check_taps

        parts, files = self._parts, self._files
        self._parts = self._files = None
        if pipeline.why_not is not None or parts is None or files is None or not self.self_check:
            return
        found = check_taps(pipeline, parts, files)
        if found is not None and found < MIN_AGREEMENT:
            raise PluginUnavailableError(
                f"plugin 'eagle' does not use the draft head in {str(files.folder)!r}: it names {found:.0%} of the "
                f"tokens that the model chooses, and a head that fits names at least {MIN_AGREEMENT:.0%}. It belongs "
                f"to another model, or reads other layers than {', '.join(map(str, files.readings))}; name those that "
                "it was trained on with aux_layers=, or leave the check out with self_check=False."
            )


def _check_layers(aux_layers: Any) -> None:
    """Refuse what is no list of numbers of layers.

    :raises ValueError: says so.
    """
    is_list = isinstance(aux_layers, Sequence) and not isinstance(aux_layers, str) and len(aux_layers) > 0
    if not is_list or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in aux_layers):
        raise ValueError(f"aux_layers is a list of numbers of layers, such as [2, 15], or None, found {aux_layers!r}")
