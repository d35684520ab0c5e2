"""Drafts behind a batch of decodes: the native way packs what the plain one packs, and refuses what it refuses."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from llmopt import native
from llmopt.batch import MAX_DRAFTS, Batch, DraftTokens
from llmopt.batch_builder import BatchBuilder
from llmopt.draft_check import DraftCheck
from llmopt.recovery import WrongResultError
from llmopt.request import Request
from tests.llmopt.helpers import request

BLOCK, VOCAB = 4, 500
ARRAYS = ("token_ids", "positions", "draft_masks", "slot_mapping", "seq_lens", "cu_seqlens_q", "num_scheduled",
          "num_drafts", "logits_indices", "block_tables", "slots", "banned_rows", "banned_ids")  # fmt: skip


def decoding(chooser: np.random.Generator, size: int, has_kv: bool = True) -> list[Request]:
    """Rows of any length, with blocks for all that their request may hold, and no more."""
    made = []
    for number in range(size):
        r = request(
            range(1, 1 + int(chooser.integers(2, 30))), f"r{number}", max_new_tokens=int(chooser.integers(2, 80))
        )
        r.num_computed_tokens = r.num_tokens - 1
        if has_kv:
            r.block_table = chooser.permutation(1000)[: -(-r.max_len // BLOCK)].tolist()
        r.slot = number
        made.append(r)
    return made


def random_drafts(chooser: np.random.Generator, requests: list[Request], width: int, form: str) -> DraftTokens:
    """Rows without drafts among them, and pads with any content."""
    ids = chooser.integers(-5, VOCAB + 5, (len(requests), width))
    counts = np.zeros(len(requests), dtype=np.int32)
    parents = chooser.integers(-9, 99, ids.shape).astype(np.int32)
    for row, made in enumerate(requests):
        count = int(chooser.integers(0, min(width, made.max_len - 1 - made.num_tokens) + 1))
        counts[row] = count
        ids[row, :count] = chooser.permutation(VOCAB)[:count]
        parents[row, :count] = (
            [int(chooser.integers(-1, i)) if i else -1 for i in range(count)]
            if form == "trees"
            else range(-1, count - 1)
        )
    return DraftTokens(ids, counts, None if form == "chains" else parents)


def packed(monkeypatch: pytest.MonkeyPatch, core: ModuleType | None, requests: list[Request], drafts: DraftTokens,
           check: DraftCheck) -> Batch:  # fmt: skip
    monkeypatch.setattr("llmopt.draft_check.cached_core", lambda: core)
    builder = BatchBuilder(BLOCK)
    builder.draft_check, builder.may_want_best = check, True
    batch = builder.build(requests, [1] * len(requests))
    before = {name: getattr(batch, name).copy() for name in ARRAYS}
    result = builder.with_drafts(batch, drafts)
    for name, array in before.items():  # they come again in the next step
        assert np.array_equal(getattr(batch, name), array), name
    assert builder.build(requests, [1] * len(requests)) is batch
    return result


def told(monkeypatch: pytest.MonkeyPatch, core: ModuleType | None, requests: list[Request], drafts: DraftTokens,
         check: DraftCheck) -> str:  # fmt: skip
    with pytest.raises(WrongResultError) as failure:
        packed(monkeypatch, core, requests, drafts, check)
    return str(failure.value)


@pytest.fixture(scope="module")
def core() -> ModuleType:
    found = native.core()
    if found is None:
        pytest.skip("the extension is not built")
    return found


@pytest.mark.parametrize("form", ["chains", "chains_with_parents", "trees"])
@pytest.mark.parametrize("has_kv", [True, False])
def test_the_native_packer_fills_random_ragged_batches_as_the_plain_one_does(
    form: str, has_kv: bool, core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = np.random.default_rng(1)
    for number in range(60):
        size, width = int(chooser.choice([1, 2, 5, 13, 40])), int(chooser.choice([1, 3, 8, MAX_DRAFTS]))
        requests = decoding(chooser, size, has_kv)
        for made in requests[: number % 3]:
            made.eos_token_ids = frozenset((2, 3))
            object.__setattr__(made.sampling, "min_new_tokens", 3)
        drafts = random_drafts(chooser, requests, width, form)
        check = DraftCheck(vocab_size=VOCAB if number % 2 else None)
        with monkeypatch.context() as patch:  # the native way is not to ask the plain one
            patch.setattr("llmopt.draft_packer.pack", None)
            found = packed(patch, core, requests, drafts, check)
        wanted = packed(monkeypatch, None, requests, drafts, check)
        for name in ARRAYS:
            mine, theirs = getattr(found, name), getattr(wanted, name)
            assert mine.tolist() == theirs.tolist(), name
            assert mine.dtype == theirs.dtype, name
        assert found.logits_requests == wanted.logits_requests
        is_tree = drafts.parents is not None and any(
            drafts.parents[row, i] != i - 1 for row, count in enumerate(drafts.num_draft) for i in range(count)
        )
        assert bool(found.draft_masks.size) == is_tree


def test_a_packer_that_served_many_rows_serves_few_and_more_again(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = np.random.default_rng(2)
    monkeypatch.setattr("llmopt.draft_check.cached_core", lambda: core)
    builder = BatchBuilder(BLOCK)
    for size in (3, 20, 1, 90, 7):
        requests = decoding(chooser, size)
        drafts = random_drafts(chooser, requests, 6, "trees")
        found = builder.with_drafts(builder.build(requests, [1] * size), drafts)
        wanted = BatchBuilder(BLOCK).build(requests, [1] * size, drafts)
        for name in ARRAYS:
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name


def test_arrays_that_are_not_contiguous_are_packed_too(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = decoding(np.random.default_rng(3), 2)
    for made in requests:
        made.max_len, made.block_table = made.num_tokens + 9, list(range(30))
    drafts = DraftTokens(np.arange(12).reshape(2, 6)[:, ::2], np.array([3, 9, 2, 9], np.int32)[::2])
    for way in (core, None):
        batch = packed(monkeypatch, way, requests, drafts, DraftCheck())
        first, second = (made.num_tokens for made in requests)
        assert batch.token_ids.tolist() == [first, 0, 2, 4, second, 6, 8]


def wrong(kind: str) -> DraftTokens:
    """Drafts of three rows, of which the last one, or all of them, cannot run."""
    ids = np.arange(12).reshape(3, 4) + 10
    counts = np.array([2, 0, 4], dtype=np.int32)
    parents = np.tile(np.array([-1, 0, 0, 2], dtype=np.int32), (3, 1))
    if kind == "too many for the array":
        counts[2] = 5
    elif kind == "too many for the room":
        counts[1] = 4
    elif kind == "fewer than none":
        counts[2] = -1
    elif kind == "an id behind the vocabulary":
        ids[2, 3] = VOCAB
    elif kind == "an id before it":
        ids[0, 1] = -1
    elif kind == "a parent that comes later":
        parents[2, 1] = 1
    elif kind == "a parent before the newest token":
        parents[2, 1] = -2
    elif kind == "twins":
        ids[2, 1] = ids[2, 2]
    elif kind == "a row too few":
        return DraftTokens(ids[:2], counts[:2], parents[:2])
    elif kind == "counts of fewer rows":
        counts = counts[:2]
    elif kind == "parents of another shape":
        parents = parents[:, :3]
    elif kind == "flat ids":
        ids = ids.reshape(-1)
    elif kind == "short ids":
        ids = ids.astype(np.int32)
    elif kind == "unsigned ids":
        ids = ids.astype(np.uint64)
    elif kind == "float ids":
        ids = ids.astype(np.float64)
    elif kind == "long counts":
        counts = counts.astype(np.int64)
    elif kind == "unsigned counts":
        counts = counts.astype(np.uint32)
    elif kind == "long parents":
        parents = parents.astype(np.int64)
    return DraftTokens(ids, counts, parents)


@pytest.mark.parametrize(
    "kind",
    ["too many for the array", "too many for the room", "fewer than none", "an id behind the vocabulary",
     "an id before it", "a parent that comes later", "a parent before the newest token", "twins", "a row too few",
     "counts of fewer rows", "parents of another shape", "flat ids", "short ids", "unsigned ids", "float ids",
     "long counts", "unsigned counts", "long parents", "trees where none may be", "more than the check allows",
     "a lockstep group"],
)  # fmt: skip
def test_both_ways_tell_the_same_of_drafts_that_cannot_run(
    kind: str, core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = decoding(np.random.default_rng(4), 3)
    for made, room in zip(requests, (9, 3, 9), strict=True):
        made.max_len = made.num_tokens + 1 + room
        made.block_table = list(range(30))
    check = DraftCheck(vocab_size=VOCAB)
    packed(monkeypatch, core, requests, wrong("nothing"), check)
    if kind == "trees where none may be":
        check.why_no_trees = "'x' does not take them"
    elif kind == "more than the check allows":
        check = DraftCheck(3, VOCAB)
    elif kind == "a lockstep group":
        requests[2].lockstep = object()  # type: ignore[assignment]
    messages = [told(monkeypatch, way, requests, wrong(kind), check) for way in (core, None)]
    assert messages[0] == messages[1]
    assert "DraftTokens with" in messages[0]
