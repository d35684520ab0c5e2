"""Packing: what stands in a batch belongs to the request it is said to belong to, whatever was packed before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from llmopt.batch import Batch, DraftTokens
from llmopt.batch_builder import BatchBuilder
from llmopt.request import Request
from tests.llmopt.helpers import request

BLOCK = 4


def at(
    prompt_len: int, computed: int, output: int = 0, name: str = "r", start: int = 100, first_block: int = 0
) -> Request:
    """A running request whose token ``i`` is ``start + i`` and whose block ``j`` is ``first_block + 2 j``."""
    made = request(range(start, start + prompt_len), name, max_new_tokens=output + 20)
    for number in range(output):
        made.append(start + prompt_len + number)
    made.num_computed_tokens = computed
    made.block_table = [first_block + 2 * j for j in range(-(-made.max_len // BLOCK))]
    made.slot = first_block
    return made


def check(batch: Batch, requests: list[Request], scheduled: list[int], drafts: list[list[int]] | None = None) -> None:
    """Compare a batch with what its docstring says, computed token by token."""
    drafts = drafts or [[] for _ in requests]
    token_ids, positions, slots, wanted, owners = [], [], [], [], []
    bounds = [0]
    for r, count, guesses in zip(requests, scheduled, drafts, strict=True):
        known = r.token_ids[r.num_computed_tokens : r.num_computed_tokens + count].tolist()
        row = known + guesses
        places = range(r.num_computed_tokens, r.num_computed_tokens + len(row))
        if r.num_computed_tokens + count == r.num_tokens:
            first = len(token_ids) + count - 1
            wanted += range(first, first + 1 + len(guesses))
            owners += [r] * (1 + len(guesses))
        token_ids += row
        positions += places
        slots += [r.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in places]
        bounds.append(len(token_ids))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.cu_seqlens_q.tolist() == bounds
    assert batch.logits_indices.tolist() == wanted
    assert batch.logits_requests == owners
    assert batch.num_scheduled.tolist() == np.diff(bounds).tolist()
    assert batch.num_drafts.tolist() == [len(d) for d in drafts]
    assert batch.seq_lens.tolist() == [
        r.num_computed_tokens + c + len(d) for r, c, d in zip(requests, scheduled, drafts, strict=True)
    ]
    assert batch.request_ids == [r.request_id for r in requests]
    assert batch.slots.tolist() == [r.slot for r in requests]
    for row_table, r in zip(batch.block_tables.tolist(), requests, strict=True):
        assert row_table[: len(r.block_table)] == r.block_table
        assert not any(row_table[len(r.block_table) :])


def test_prompts_chunks_and_decodes_are_packed_one_after_the_other() -> None:
    requests = [at(7, 0, name="a"), at(9, 4, name="b", first_block=1), at(3, 4, 2, name="c", first_block=40)]
    check(BatchBuilder(BLOCK).build(requests, [7, 3, 1]), requests, [7, 3, 1])


def test_a_chunk_that_does_not_reach_the_last_token_asks_for_no_logits() -> None:
    batch = BatchBuilder(BLOCK).build([at(9, 0)], [5])
    assert batch.logits_indices.size == 0
    assert batch.logits_requests == []


def test_drafts_follow_their_row_and_ask_for_logits() -> None:
    requests = [at(3, 4, 2, "a"), at(6, 0, name="b", first_block=1), at(2, 2, 1, "c", first_block=50)]
    drafts = DraftTokens(np.array([[7, 8, -1], [-1, -1, -1], [9, -1, -1]]), np.array([2, 0, 1], dtype=np.int32))
    builder = BatchBuilder(BLOCK)
    plain = builder.build(requests, [1, 6, 1])
    check(builder.with_drafts(plain, drafts), requests, [1, 6, 1], [[7, 8], [], [9]])


def test_a_decode_with_drafts_is_packed_again_without_them_in_the_next_step() -> None:
    made = at(3, 4, 2)
    builder = BatchBuilder(BLOCK)
    drafts = DraftTokens(np.array([[7, 8]]), np.array([2], dtype=np.int32))
    builder.with_drafts(builder.build([made], [1]), drafts)
    made.append(55)
    made.num_computed_tokens += 1
    check(builder.build([made], [1]), [made], [1])


def test_random_steps_in_one_builder_equal_a_fresh_builder_each_time() -> None:
    """Requests decode, prefill in chunks, come, go, are pre-empted, and blocks move; buffers grow on the way."""
    chooser = random.Random(0)
    builder = BatchBuilder(BLOCK)
    running: list[Request] = []
    for step in range(400):
        if chooser.random() < 0.15 or not running:
            length = chooser.choice([1, 2, 5, 11, 300 if step == 200 else 3])
            running.append(at(length, 0, name=str(step), start=1000 * step, first_block=chooser.randrange(100)))
        elif chooser.random() < 0.1:
            running.pop(chooser.randrange(len(running)))
            continue
        if chooser.random() < 0.1 and running:  # pre-empted: other blocks, another slot, from the first token
            victim = chooser.choice(running)
            victim.num_computed_tokens = 0
            victim.block_table = [b + 1 for b in victim.block_table]
            victim.slot += 1
        scheduled = []
        for r in running:
            behind = r.num_tokens - r.num_computed_tokens
            scheduled.append(behind if chooser.random() < 0.8 else chooser.randint(1, behind))
        check(builder.build(list(running), scheduled), running, scheduled)
        for r, count in zip(running, scheduled, strict=True):
            r.num_computed_tokens += count
            if r.num_computed_tokens == r.num_tokens:
                r.append(chooser.randrange(10_000))
        running = [r for r in running if r.num_tokens < r.max_len]


def test_a_moved_block_table_is_noticed_between_two_decodes() -> None:
    made = at(4, 4, 1)
    builder = BatchBuilder(BLOCK)
    check(builder.build([made], [1]), [made], [1])
    made.append(77)
    made.num_computed_tokens += 1
    made.block_table = [b + 3 for b in made.block_table]
    check(builder.build([made], [1]), [made], [1])


@pytest.mark.parametrize("adapter", [None, "poet"])
def test_a_batch_survives_the_way_to_another_rank(adapter: str | None) -> None:
    requests = [at(7, 0, name="ä \n b"), at(3, 4, 2, name="c", first_block=40)]
    requests[1].adapter = adapter
    requests.append(request([1, 2], "d", min_new_tokens=3, stop_token_ids=(5, 6)))
    requests[2].block_table = [80]
    sent = BatchBuilder(BLOCK).build(requests, [5, 1, 2])
    assert sent.banned_ids.size == 2
    received = Batch.from_bytes(sent.to_bytes())
    for name in ("token_ids", "positions", "cu_seqlens_q", "seq_lens", "block_tables", "slot_mapping",
                 "logits_indices", "slots", "num_drafts", "num_scheduled", "banned_rows", "banned_ids"):  # fmt: skip
        mine, theirs = getattr(sent, name), getattr(received, name)
        assert np.array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert received.request_ids == sent.request_ids
    assert received.adapters == ([] if adapter is None else [None, "poet", None])
    assert received.requests == []


def bans(batch: Batch) -> list[tuple[int, int]]:
    return sorted(zip(batch.banned_rows.tolist(), batch.banned_ids.tolist(), strict=True))


def test_ids_that_would_end_a_row_before_its_minimum_are_banned_from_it_alone() -> None:
    builder = BatchBuilder(BLOCK)
    free = request([1, 2, 3], "free", max_new_tokens=9, stop_token_ids=(7,))
    long = request([1, 2, 3], "long", max_new_tokens=9, min_new_tokens=4, stop_token_ids=(7, 8))
    short = request([1, 2, 3], "short", max_new_tokens=9, min_new_tokens=2, stop_token_ids=(9,))
    rows = [free, long, short]
    seen = []
    for made in rows:
        made.block_table = [0, 2, 4]
    for step in range(6):
        batch = builder.build(rows, [3 if step == 0 else 1] * 3)
        assert batch.num_tokens == (9 if step == 0 else 3)
        seen.append(bans(batch))
        for made in rows:
            made.num_computed_tokens = made.num_tokens
            made.append(50 + step)
    both = [(1, 7), (1, 8), (2, 9)]
    assert seen == [both, both, both[:2], both[:2], [], []]


def test_rows_of_drafts_are_banned_from_ending_as_far_as_the_minimum_reaches() -> None:
    made = request([1, 2, 3], max_new_tokens=9, min_new_tokens=3, stop_token_ids=(7,))
    made.append(60)
    made.num_computed_tokens, made.block_table = 3, [0, 2, 4]
    batch = BatchBuilder(BLOCK).build([made], [1], DraftTokens(np.array([[61, 62, 63]]), np.array([3], dtype=np.int32)))
    assert bans(batch) == [(0, 7), (1, 7)]


def test_nothing_is_banned_where_a_row_needs_logits() -> None:
    greedy = request([1, 2], "a", min_new_tokens=3, stop_token_ids=(7,))
    drawn = request([1, 2], "b", min_new_tokens=3, stop_token_ids=(7,), temperature=1.0)
    for made in (greedy, drawn):
        made.block_table = [0, 2, 4]
    assert bans(BatchBuilder(BLOCK).build([greedy, drawn], [2, 2])) == []


def test_a_pool_without_kv_gives_slots_of_minus_one() -> None:
    made: Any = at(3, 0)
    made.block_table = []
    assert BatchBuilder(BLOCK).build([made], [3]).slot_mapping.tolist() == [-1, -1, -1]
