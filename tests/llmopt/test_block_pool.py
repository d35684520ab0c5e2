"""Block ids: held as often as somebody holds them, free when nobody does, kept and found while they have a key."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmopt import native
from llmopt.block_pool import BlockPool

NATIVE = pytest.param(True, marks=pytest.mark.native, id="native")
BOTH = pytest.mark.parametrize("is_native", [NATIVE, pytest.param(False, id="plain")])


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@BOTH
@given(num_blocks=st.integers(1, 12), data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_holders_never_share_by_accident_and_lose_nothing(
    is_native: bool, num_blocks: int, data: st.DataObject
) -> None:
    pool = BlockPool(num_blocks, 4, is_native)
    holders: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "share", "free", "free_some"]))
        if action == "allocate":
            count = data.draw(st.integers(0, pool.num_free))
            blocks = pool.allocate(count)
            assert len(set(blocks)) == count
            assert all(b not in held for b in blocks for held in holders)  # nobody holds a block that was free
            holders.append(blocks)
        elif holders:
            held = data.draw(st.sampled_from(holders))
            if action == "share":
                pool.share(held)
                holders.append(list(held))
            elif action == "free":
                holders.remove(held)
                pool.free(held)
            elif held:
                pool.free([held.pop()])
        counts = Counter(b for held in holders for b in held)
        assert [int(c) for c in pool.ref_counts] == [counts[b] for b in range(num_blocks)]
        assert pool.num_used == len(counts)
        assert pool.num_free + pool.num_used == num_blocks
        pool.check()
    for held in holders:
        pool.free(held)
    assert pool.num_free == num_blocks
    pool.check()


class Model:
    """What the pool promises, written down once more: contents by key, holders, and nothing about the order."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.holders: list[list[int]] = []
        self.keys: dict[int, bytes] = {}  # block -> key
        pool.on_evict.append(self.forget)

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        held = {b for blocks in self.holders for b in blocks}
        for block, its_key in zip(blocks, keys, strict=True):
            assert block not in held
            assert self.keys.pop(block) == its_key

    def check(self, *, is_deep: bool) -> None:
        counts = Counter(b for held in self.holders for b in held)
        assert self.pool.num_used == len(counts)
        assert self.pool.num_keys == len(self.keys)
        if is_deep:
            self.pool.check()
            assert self.pool.ref_counts.tolist() == [counts[b] for b in range(self.pool.num_blocks)]
            for block, its_key in self.keys.items():
                assert self.pool.find(its_key) == [block]
                assert self.pool.key_of(block) == its_key
            assert set(self.pool.kept_blocks()) == {b for b in self.keys if b not in counts}


def random_steps(pools: list[BlockPool], num_steps: int, seed: int) -> None:
    """The same random calls on every pool; what they return must agree."""
    chooser = random.Random(seed)
    models = [Model(pool) for pool in pools]
    pool, holders = pools[0], models[0].holders
    for number in range(num_steps):
        action = chooser.choice(["allocate", "allocate", "free", "free_some", "share", "find", "key", "key", "drop"])
        action = "free" if len(holders) > 6 else action  # else all blocks would be held
        if action == "allocate":
            count = chooser.randint(0, min(pool.num_free, 12))
            for model in models:
                model.holders.append(model.pool.allocate(count))
            assert len(set(holders[-1])) == count
            assert not any(b in held for b in holders[-1] for held in holders[:-1])
        elif action in ("free", "free_some") and holders:
            place, count = chooser.randrange(len(holders)), chooser.randint(1, 3)
            for model in models:
                held = model.holders[place]
                gone = list(held) if action == "free" else held[-count:]
                del held[len(held) - len(gone) :]
                model.pool.free(gone)
                if not held:
                    del model.holders[place]
        elif action == "share" and holders:
            place = chooser.randrange(len(holders))
            for model in models:
                model.pool.share(model.holders[place])
                model.holders.append(list(model.holders[place]))
        elif action == "find":
            start = chooser.randrange(200)
            keys = b"".join(map(key, range(start, start + 3)))
            for model in models:
                found = model.pool.find(keys)
                assert [model.keys[b] for b in found] == [key(start + i) for i in range(len(found))]
                model.pool.share(found)
                model.holders.append(found)
        elif action == "key" and holders and (held := chooser.choice(holders)):
            block, its_key = chooser.choice(held), key(chooser.randrange(200))
            for model in models:
                if block not in model.keys:
                    is_new = model.pool.set_key(block, its_key)
                    assert is_new == (its_key not in model.keys.values())
                    if is_new:
                        model.keys[block] = its_key
        elif action == "drop" and chooser.random() < 0.3:
            block = chooser.randrange(pool.num_blocks)
            for model in models:
                model.pool.drop_key(block)
                model.keys.pop(block, None)
        for model in models:
            model.check(is_deep=number % 100 == 0)
            assert model.holders == holders
        assert all(p.kept_blocks() == pool.kept_blocks() for p in pools if number % 100 == 0)
    for model in models:
        for held in model.holders:
            model.pool.free(held)
        model.holders.clear()
        model.check(is_deep=True)
        assert model.pool.num_free == model.pool.num_blocks
        assert model.pool.num_evicted > num_steps // 100


@BOTH
def test_100000_random_calls_lose_no_block_and_the_index_is_true(is_native: bool) -> None:
    random_steps([BlockPool(40, 4, is_native)], 100_000, seed=1)


@pytest.mark.native
def test_the_native_pool_does_what_the_plain_one_does() -> None:
    random_steps([BlockPool(40, 4, False), BlockPool(40, 4, True)], 5_000, seed=2)


def test_without_the_extension_the_plain_pool_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", lambda: None)
    pool = BlockPool(3, 4)
    assert pool.allocate(3) == [0, 1, 2]
    with pytest.raises(ImportError, match="was to be native"):
        BlockPool(3, 4, is_native=True)


@BOTH
def test_calls_that_the_state_does_not_allow_are_refused(is_native: bool) -> None:
    pool = BlockPool(2, 4, is_native)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="free block"):
        pool.share(blocks)
    with pytest.raises(AssertionError, match="num_free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.set_key(blocks[0], key(1))
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="16 bytes"):
        pool.set_key(block, b"short")
    assert pool.set_key(block, key(1))
    with pytest.raises(AssertionError, match="has a key already"):
        pool.set_key(block, key(2))
    with pytest.raises(ValueError, match="16 bytes"):
        pool.find(b"no key")
    pool.check()


@BOTH
def test_the_check_notices_a_lost_block(is_native: bool) -> None:
    pool = BlockPool(3, 4, is_native)
    (block,) = pool.allocate(1)
    pool.ref_counts[block] = 0
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check()


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda blocks: blocks._unused.append(blocks._unused[0]), "twice"),
        (lambda blocks: blocks._index.clear(), "does not find"),
        (lambda blocks: blocks._once.update({blocks._unused[0]: None}), "free and kept"),
        (lambda blocks: blocks._index.update({key(9): 0}), "no block has"),
    ],
)
def test_the_check_notices_what_is_wrong_with_lists_and_index(break_it: Any, told: str) -> None:
    pool = BlockPool(4, 4, is_native=False)
    blocks = pool.allocate(1)
    pool.set_key(blocks[0], key(1))
    pool.check()
    break_it(pool._blocks)
    with pytest.raises(AssertionError, match=told):
        pool.check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert BlockPool(9, 4).num_blocks_for(tokens) == blocks


@BOTH
def test_after_sorting_the_next_blocks_are_neighbours(is_native: bool) -> None:
    pool = BlockPool(9, 4, is_native)
    blocks = pool.allocate(8)
    pool.free([blocks[i] for i in (6, 1, 4, 2, 0, 7)])
    pool.sort_free()
    assert pool.allocate(4) == [0, 1, 2, 4]
    pool.check()


# -- kept blocks ------------------------------------------------------------------------------------------------------
def keep(pool: BlockPool, numbers: range) -> list[int]:
    """A sequence of blocks with these keys, used once and kept."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.set_key(block, key(number))
    pool.free(blocks)
    return blocks


def use(pool: BlockPool, numbers: range) -> int:
    """Find, hold and give back what is there of a sequence; its length."""
    found = pool.find(b"".join(map(key, numbers)))
    pool.share(found)
    pool.free(found)
    return len(found)


@BOTH
def test_a_kept_block_counts_as_free_and_is_found_until_it_is_evicted(is_native: bool) -> None:
    pool = BlockPool(4, 4, is_native)
    kept = keep(pool, range(2))
    assert (pool.num_free, pool.num_used, pool.num_kept) == (4, 0, 2)
    assert pool.find(key(0) + key(1) + key(2)) == kept
    told: list[Any] = []
    pool.on_evict.append(lambda blocks, keys: told.append((blocks, keys)))
    empty = pool.allocate(2)
    assert set(empty) & set(kept) == set()  # empty blocks go first
    assert told == []
    pool.allocate(1)
    assert told == [([kept[1]], [key(1)])]  # the end of the sequence
    assert pool.find(key(0) + key(1)) == kept[:1]
    assert pool.find(key(1)) == []
    pool.check()


@BOTH
def test_whoever_listens_hears_of_an_eviction_before_the_block_has_a_new_holder(is_native: bool) -> None:
    pool = BlockPool(2, 4, is_native)
    keep(pool, range(2))
    seen: list[int] = []
    pool.on_evict.append(lambda blocks, keys: seen.extend(int(pool.ref_counts[b]) for b in blocks))
    pool.allocate(2)
    assert seen == [0, 0]
    assert pool.num_evicted == 2


@BOTH
def test_a_shared_block_is_never_evicted_and_a_found_one_comes_back_to_life(is_native: bool) -> None:
    pool = BlockPool(4, 4, is_native)
    kept = keep(pool, range(3))
    pool.share(kept[:2])
    assert (pool.num_free, pool.num_kept) == (2, 1)
    pool.allocate(2)
    assert pool.find(key(0) + key(1) + key(2)) == kept[:2]
    with pytest.raises(AssertionError, match="num_free"):
        pool.allocate(1)


@BOTH
def test_a_second_block_with_the_same_content_does_not_take_the_key(is_native: bool) -> None:
    pool = BlockPool(4, 4, is_native)
    first, second = pool.allocate(2)
    assert pool.set_key(first, key(7))
    assert not pool.set_key(second, key(7))
    pool.free([first, second])
    assert (pool.num_kept, pool.find(key(7))) == (1, [first])
    pool.drop_key(first)
    assert (pool.num_kept, pool.num_free, pool.find(key(7))) == (0, 4, [])
    pool.check()


@BOTH
def test_a_long_sequence_that_comes_once_does_not_drive_out_one_that_comes_often(is_native: bool) -> None:
    pool = BlockPool(20, 4, is_native)
    keep(pool, range(6))
    assert use(pool, range(6)) == 6
    for start in range(100, 1000, 100):
        keep(pool, range(start, start + 14))
    assert use(pool, range(6)) == 6
    assert use(pool, range(100, 114)) == 0


@BOTH
def test_sequences_used_again_make_room_for_each_other_oldest_first(is_native: bool) -> None:
    pool = BlockPool(10, 4, is_native)
    for start in (0, 10, 20):
        keep(pool, range(start, start + 4))
        use(pool, range(start, start + 4))
    assert [use(pool, range(start, start + 4)) for start in (10, 20)] == [4, 4]
    assert use(pool, range(4)) < 4
    pool.check()


@BOTH
def test_the_head_of_a_sequence_outlives_its_end(is_native: bool) -> None:
    pool = BlockPool(8, 4, is_native)
    keep(pool, range(8))
    for taken in range(1, 8):
        pool.allocate(1)
        assert len(pool.find(b"".join(map(key, range(8))))) == 8 - taken
