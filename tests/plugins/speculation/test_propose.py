"""The stages that drafters share: which rows get drafts, how drafts are cut, and who hears of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.batch import DraftTokens
from llmopt.batch_builder import BatchBuilder
from llmopt.testing import tiny_model, tiny_prompts
from llmopt_plugins.speculation.drafter import Draft
from llmopt_plugins.speculation.goodput import Goodput
from llmopt_plugins.speculation.propose import DraftAllocate, DraftCommit, DraftPropose, _pack
from tests.llmopt.helpers import build_tiny, request

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.request import Request
    from llmopt.stages import Allocate, Commit, Propose

Guess = Callable[["Request", int], "Draft | None"]


class Drafter:
    """A drafter from a function; remembers what it is told."""

    num_kinds, is_cheap, has_trees = 1, False, True

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.asked: list[tuple[str, int]] = []
        self.accepted: list[int] = []
        self.forgotten: set[str] = set()

    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        self.asked += [(r.request_id, n) for r, n in zip(requests, limits, strict=True)]
        return [self.guess(r, n) for r, n in zip(requests, limits, strict=True)]

    def draft_s(self, num_rows: int, num_draft: int) -> float:
        return 1e-5

    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        self.accepted += [len(ids) - 1 for ids in accepted.token_ids]

    def forget(self, request: Request) -> None:
        self.forgotten.add(request.request_id)

    def stats(self) -> dict[str, Any]:
        return {"num_asked": len(self.asked)}


class Drafts:
    """A plugin around a drafter."""

    def __init__(
        self, guess: Callable[[Request, int], Draft | None], name: str = "drafts", fixed: int | None = 4
    ) -> None:
        self.info = PluginInfo(name=name, layer="speculation", promise="exact", summary="drafts")
        self.drafter = Drafter(guess)
        self.fixed = fixed

    @hookimpl
    def llmopt_configure(self, config: PipelineConfig) -> PipelineConfig:
        return config.with_options(max_num_draft=8)

    @hookimpl
    def llmopt_wrap_allocate(self, allocate: Allocate, context: BuildContext) -> Allocate:
        self.goodput = Goodput(context.cost_model.wanted(), self.drafter.draft_s, 8, fixed=self.fixed)
        return DraftAllocate(allocate, self.drafter.forget)

    @hookimpl
    def llmopt_wrap_commit(self, commit: Commit) -> Commit:
        return DraftCommit(commit, self.drafter, self.goodput)

    @hookimpl
    def llmopt_wrap_propose(self, propose: Propose, context: BuildContext) -> Propose:
        assert context.capabilities is not None
        return DraftPropose(propose, self.drafter, self.goodput, 8, context.capabilities.vocab_size)


def answers(prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    with llmopt.build(tiny_model()) as pipe:
        return [out.token_ids for out in pipe.batch([list(p) for p in prompts], progress=False, **options)]


def run(plugins: Sequence[Any], prompts: Sequence[Sequence[int]], **options: Any) -> tuple[list[list[int]], Any]:
    with llmopt.build(tiny_model(), plugins=list(plugins)) as pipe:
        outputs = pipe.batch([list(p) for p in prompts], progress=False, **options)
        return [out.token_ids for out in outputs], pipe.stats()


def oracle(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Callable[[Request, int], Draft | None]:
    known = {tuple(p): list(o) for p, o in zip(prompts, outputs, strict=True)}

    def guess(request: Request, limit: int) -> Draft | None:
        rest = known[tuple(request.prompt_ids)][request.num_output_tokens :][:limit]
        return Draft(rest) if rest else None

    return guess


PROMPTS = tiny_prompts(3)


def test_right_drafts_are_accepted_and_counted() -> None:
    wanted = answers(PROMPTS, max_new_tokens=21)
    plugin = Drafts(oracle(PROMPTS, wanted))
    found, stats = run([plugin], PROMPTS, max_new_tokens=21)
    assert found == wanted
    report = stats["propose.drafts"]
    assert report["tokens_per_round"] == 5.0
    assert report["drafted"] == report["accepted"] == 4 * report["rounds"] == 48
    assert report["num_asked"] == len(plugin.drafter.asked)


def test_drafts_end_where_the_request_ends() -> None:
    wanted = answers(PROMPTS[:1], max_new_tokens=4)
    plugin = Drafts(lambda request, limit: Draft([1] * limit))
    found, _ = run([plugin], PROMPTS[:1], max_new_tokens=4)
    assert found == wanted
    assert [limit for _, limit in plugin.drafter.asked][-2:] == [2, 1]


def test_a_draft_is_cut_at_its_limit_at_ids_that_are_no_tokens_and_after_an_end() -> None:
    seen: list[int] = []

    class Spy(Drafts):
        @hookimpl
        def llmopt_wrap_propose(self, propose: Propose, context: BuildContext) -> Propose:
            inner = super().llmopt_wrap_propose(propose, context)

            def spy(batch: Batch) -> Any:
                drafts = inner(batch)
                seen.extend(drafts.num_draft.tolist() if drafts is not None else [0])
                return drafts

            return spy

    wanted = answers(PROMPTS[:1], max_new_tokens=8, stop_token_ids=[7])
    for ids, count in (([5] * 9, 4), ([5, 10**6, 5], 1), ([5, -1], 1), ([-1, 5], 0), ([5, 7, 5, 5], 2)):
        seen.clear()
        found, _ = run([Spy(lambda r, n, ids=ids: Draft(list(ids)))], PROMPTS[:1], max_new_tokens=8, stop_token_ids=[7])
        assert found == wanted
        assert seen[1] == count


def test_rows_without_own_drafts_get_those_of_the_plugin_listed_before() -> None:
    wanted = answers(PROMPTS, max_new_tokens=16)
    knows = oracle(PROMPTS, wanted)
    first = tuple(PROMPTS[0])
    inner = Drafts(lambda r, n: knows(r, n), "inner")
    outer = Drafts(lambda r, n: knows(r, n) if tuple(r.prompt_ids) == first else None, "outer", fixed=3)
    found, stats = run([inner, outer], PROMPTS, max_new_tokens=16)
    assert found == wanted
    assert stats["propose.outer"]["tokens_per_round"] == 4.0
    assert stats["propose.inner"]["tokens_per_round"] == 5.0
    assert len({name for name, _ in inner.drafter.asked}) == 2  # not for the row that has drafts already


@pytest.mark.parametrize("own", [Draft([1, 2, 3], [-1, -1, 0]), Draft([1, 2, 3]), Draft([1])])
@pytest.mark.parametrize("has_trees", [True, False])
def test_own_drafts_and_those_of_the_stage_inside_stand_in_one_array(own: Draft, has_trees: bool) -> None:
    ids, counts = np.array([[-1, -1], [7, 8], [9, -1]]), np.array([0, 2, 1], dtype=np.int32)
    others = DraftTokens(ids, counts, np.array([[-1, 0], [-1, -1], [-1, 0]], np.int32) if has_trees else None)
    batch = BatchBuilder(4).build([request([5], str(n), max_new_tokens=9) for n in range(3)], [1] * 3)
    made = _pack(batch, {0: own}, others)
    assert made.token_ids.dtype == np.int64
    assert made.num_draft.dtype == np.int32
    assert made.num_draft.tolist() == [len(own.token_ids), 2, 1]
    rows = [made.token_ids[row, :count].tolist() for row, count in enumerate(made.num_draft)]
    assert rows == [own.token_ids, [7, 8], [9]]
    if own.parents is None and not has_trees:
        assert made.parents is None
        return
    assert made.parents is not None
    assert made.parents.dtype == np.int32
    assert made.parents.shape == made.token_ids.shape
    wanted = [own.parents or list(range(-1, len(own.token_ids) - 1)), [-1, -1] if has_trees else [-1, 0], [-1]]
    assert [made.parents[row, :count].tolist() for row, count in enumerate(made.num_draft)] == wanted


def test_describe_says_in_which_order_several_drafters_are_asked() -> None:
    def notes(*names: str) -> list[str]:
        asked.clear()

        def guess(name: str) -> Callable[[Request, int], Draft | None]:
            return lambda request, limit: asked.append(name)

        with build_tiny(plugins=[Drafts(guess(name), name) for name in names]) as pipe:
            pipe.batch([PROMPTS[0]], max_new_tokens=2, ignore_eos=True, progress=False)
            return pipe.describe().notes

    asked: list[str] = []
    assert notes("a") == []
    assert notes("a", "b", "c") == ["drafts come from c first, then b, then a: the plugin listed last is asked first"]
    assert asked[:3] == ["c", "b", "a"]


def test_trees_are_cut_so_that_no_node_loses_its_parent() -> None:
    wanted = answers(PROMPTS, max_new_tokens=16)
    knows = oracle(PROMPTS, wanted)

    def guess(request: Request, limit: int) -> Draft | None:
        draft = knows(request, 3)
        if draft is None or len(draft.token_ids) < 2:
            return None
        a, b = draft.token_ids[:2]
        return Draft([10**6, a, 3, b, 9], [-1, -1, 0, 1, 3])

    found, stats = run([Drafts(guess, fixed=8)], PROMPTS, max_new_tokens=16)
    assert found == wanted
    assert stats["propose.drafts"]["accepted"] > 0
    assert stats["propose.drafts"]["drafted"] > 2 * stats["propose.drafts"]["rounds"]


def test_requests_that_end_or_are_aborted_are_forgotten() -> None:
    plugin = Drafts(lambda request, limit: Draft([1] * limit))
    with llmopt.build(tiny_model(), plugins=[plugin]) as pipe:
        pipe.batch([[5, 6]], max_new_tokens=4, progress=False)
        assert len(plugin.drafter.forgotten) == 1
        handle = pipe.submit([7, 8, 9], max_new_tokens=200)
        handle.abort()
        assert len(plugin.drafter.forgotten) == 2
        assert not plugin.goodput._skills


@pytest.mark.parametrize("fixed", [None, 1, 8])
def test_sampled_tokens_are_those_of_the_plain_run(fixed: int | None) -> None:
    options = {"max_new_tokens": 16, "temperature": 1.0, "seed": 5}
    wanted = answers(PROMPTS, **options)
    found, _ = run([Drafts(oracle(PROMPTS, wanted), fixed=fixed)], PROMPTS, **options)
    assert found == wanted
    found, _ = run([Drafts(lambda r, n: Draft([2] * n), fixed=fixed)], PROMPTS, **options)
    assert found == wanted
