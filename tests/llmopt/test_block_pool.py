"""Block ids: held as often as somebody holds them, free when nobody does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmopt.block_pool import BlockPool


@given(num_blocks=st.integers(1, 12), data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_holders_never_share_by_accident_and_lose_nothing(num_blocks: int, data: st.DataObject) -> None:
    pool = BlockPool(num_blocks, 4)
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


def test_freeing_twice_and_sharing_what_is_free_are_refused() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="free block"):
        pool.share(blocks)
    with pytest.raises(AssertionError, match="num_free"):
        pool.allocate(3)


def test_the_check_notices_a_lost_block_and_a_doubled_one() -> None:
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1)
    pool.ref_counts[block] = 0
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check()
    pool._free.extend([block, block])
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert BlockPool(9, 4).num_blocks_for(tokens) == blocks
