"""Whether a drafter can pay at all, before anybody trains it: measured cost of verifying, cost of drafting.

With ``P_i`` the chance that the first ``i`` drafts are all right, a round of ``K`` drafts gives ``1 + P_1 + ... + P_K``
tokens in ``T(K+1) + K d`` seconds, and the plain step one token in ``T(1)`` (Leviathan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Commit

_CONTEXT = 256  # tokens of KV in the steps that are compared
_MAX_DRAFTS = 12
_HOST_S = 1e-4  # of a round: building drafts and choosing among them
_BEST_ACCEPTANCE = 0.75  # of each draft: more than a small head on general chat reaches


class CostProbe:
    """A plugin that has the cost of steps measured, and does nothing else."""

    info = PluginInfo(name="cost_probe", layer="speculation", promise="exact", summary="has the cost of steps measured")

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit, context: BuildContext) -> None:
        context.cost_model.wanted()


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Seconds of steps and drafts at one request, and what follows from them."""

    verify_s: tuple[float, ...]  # of a step with 0, 1, 2, ... drafts
    draft_s: float  # of one draft level
    levels_count: bool = True  # each draft costs a level; False: one level makes all drafts (Medusa)

    def speedup(self, chances: Sequence[float]) -> float:
        """Of rounds with ``len(chances)`` drafts; ``chances[i]`` that the first ``i + 1`` are all right."""
        levels = len(chances) if self.levels_count else min(1, len(chances))
        round_s = self.verify_s[len(chances)] + levels * self.draft_s + (_HOST_S if chances else 0.0)
        return (1 + sum(chances)) * self.verify_s[0] / round_s

    def best(self, acceptance: float) -> tuple[float, int]:
        """The largest speed-up of a chain whose drafts are each accepted with this chance, and its length."""
        found = [(self.speedup([acceptance ** (i + 1) for i in range(k)]), k) for k in range(len(self.verify_s))]
        return max(found)

    def needed(self, gain: float = 1.0) -> float | None:
        """The acceptance of each draft from which on the best chain gains this much; None: not even at 1."""
        for percent in range(1, 101):
            if self.best(percent / 100)[0] > gain + 1e-9:
                return percent / 100
        return None

    def report(self) -> str:
        """What the user is told before training."""
        plain = self.verify_s[0]
        ratios = ", ".join(f"{k}: {self.verify_s[k] / plain:.2f}" for k in (1, 2, 4, 8, 12) if k < len(self.verify_s))
        best, length = self.best(_BEST_ACCEPTANCE)
        needed = self.needed()
        even = "no acceptance pays" if needed is None else f"pays from an acceptance of {needed:.0%} of each draft"
        return (
            f"plain step {plain * 1e3:.2f} ms; a step with drafts relative to it: {ratios}\n"
            f"a draft level {self.draft_s * 1e3:.2f} ms, {self.draft_s / plain:.2f} of a step\n"
            f"break-even: {even}; at {_BEST_ACCEPTANCE:.0%}, more than a small head usually reaches, "
            f"{best:.2f}x with {length} drafts"
        )

    @property
    def best_case(self) -> float:
        """The speed-up with more acceptance than is to be expected."""
        return self.best(_BEST_ACCEPTANCE)[0]


def measure(
    pipe: InferencePipeline, num_draft_bytes: int, num_target_bytes: int, *, one_level: bool = False
) -> BreakEven:
    """From the measured cost of a pipeline's steps; a draft level reads its weights as fast as the target does.

    :param pipe: built with `CostProbe`.
    :param num_draft_bytes: weights that one level reads.
    :param num_target_bytes: weights that a step of the target reads.
    """
    cost = pipe.cost_model
    verify = [
        cost.step_s(k + 1, 1, *((_CONTEXT, 0) if k == 0 else (0, (k + 1) * _CONTEXT))) for k in range(_MAX_DRAFTS + 1)
    ]
    return BreakEven(tuple(verify), verify[0] * num_draft_bytes / num_target_bytes, levels_count=not one_level)
