"""What prefix_cache notes of blocks: the native index does what the plain one does, and both tell the truth."""

# ruff: noqa: B023 (the lambdas are called before the loop goes on)
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from llmopt import native
from llmopt.block_pool import BlockPool
from llmopt_plugins.memory.prefix_cache.chain import DIGEST_BYTES, KEY_BYTES, strong_hash
from llmopt_plugins.memory.prefix_cache.index import BlockIndex
from llmopt_plugins.memory.prefix_cache.plain_index import PlainIndex

SIZE, NUM_BLOCKS = 3, 40
NATIVE = pytest.param(True, marks=pytest.mark.native, id="native")
BOTH = pytest.mark.parametrize("is_native", [NATIVE, pytest.param(False, id="plain")])


def make(is_native: bool) -> tuple[BlockPool, Any]:
    pool = BlockPool(NUM_BLOCKS, SIZE, is_native)
    core = native.core()
    index: Any = core.PrefixIndex(pool.native_pool, SIZE) if is_native and core else PlainIndex(pool, SIZE)
    pool.on_evict.append(lambda blocks, keys: index.forget(blocks))
    return pool, index


def keys_of(digests: bytes, num_keys: int) -> bytes:
    """Keys of which there are only so many, so that contents collide."""
    parts = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    return b"".join((part[0] % num_keys).to_bytes(KEY_BYTES, "little") for part in parts)


def random_steps(pairs: list[tuple[BlockPool, Any]], num_steps: int, num_keys: int, seed: int) -> None:
    """The same random sequences through every index; what they return and note must agree, and be right."""
    chooser = random.Random(seed)
    pool, first = pairs[0]
    holders: list[list[int]] = []
    sequences: dict[int, tuple[int, ...]] = {}  # block -> salt and tokens up to its end, as they were entered
    num_found = num_parts = 0

    def on_each(call: Any) -> Any:
        """What a call gives, the same from every pool and index."""
        results = [call(*pair) for pair in pairs]
        assert all(result == results[0] for result in results)
        return results[0]

    roots = on_each(lambda _, index: [index.new_serial(), index.new_serial()])
    for number in range(num_steps):
        salt = chooser.randrange(2)
        ids = np.array([chooser.randrange(2) for _ in range(chooser.randint(1, 5 * SIZE))], dtype=np.int64)
        count = ids.size // SIZE
        digests = on_each(lambda _, index: index.hash_blocks(bytes([salt]), ids))
        assert len(digests) == count * DIGEST_BYTES
        keys = keys_of(digests, num_keys)
        found = on_each(lambda _, index: index.match(roots[salt], keys, ids))
        assert [sequences[b] for b in found] == [(salt, *ids[: (i + 1) * SIZE]) for i in range(len(found))]
        num_found += len(found)
        action = chooser.choice(["enter", "enter", "free", "evict", "forget", "part"])
        if action == "free" or len(holders) > 5:
            gone = holders.pop(chooser.randrange(len(holders))) if holders else []
            on_each(lambda pool, _: pool.free(gone))
        elif action == "evict":
            on_each(lambda pool, _: pool.evict(min(2, pool.num_kept)))
        elif action == "forget":
            block = chooser.randrange(NUM_BLOCKS)
            on_each(lambda pool, index: (pool.drop_key(block), index.forget([block])))
        elif pool.num_free > count:
            on_each(lambda pool, _: pool.share(found))
            new = on_each(lambda pool, _: pool.allocate(count + 1 - len(found)))
            table = [*found, *new]
            holders.append(table)
            whole = [-1 if chooser.random() < 0.05 else block for block in table[:count]]
            before = first.serials.copy()
            entered, serial = on_each(lambda _, index: index.enter(whole, ids, keys, digests, roots[salt], salt == 0))
            for place in range(entered):
                if first.serials[table[place]] and not before[table[place]]:
                    sequences[table[place]] = (salt, *ids[: (place + 1) * SIZE])
            if action == "part" and entered == count and ids.size % SIZE:
                rest, key = ids[count * SIZE :], keys_of(strong_hash(bytes([salt]) + ids.tobytes()), num_keys)
                best = on_each(lambda _, index: index.match_part(serial, rest))
                assert best[0] < 0 or first.tokens[best[0], : best[1]].tolist() == rest[: best[1]].tolist()
                num_parts += best[1] > 0
                on_each(lambda _, index: index.enter_part(table[count], rest, key, serial))
                sequences[table[count]] = (salt, *ids)
        if number % 50 == 0:
            pool.check()
            for name in ("tokens", "digests", "is_durable", "serials", "parents"):
                on_each(lambda _, index: getattr(index, name).tolist())
            on_each(lambda _, index: index.num_collisions)
            for serial in {0, *first.serials.tolist(), *first.parents.tolist()}:
                on_each(lambda _, index: index.followers(serial))
            assert np.count_nonzero(first.serials) == pool.num_keys
    assert num_found > num_steps // 10
    assert num_parts > num_steps // 1000
    assert pool.num_evicted > num_steps // 100
    assert first.num_collisions > 0 or num_keys > 100


@BOTH
@pytest.mark.parametrize("num_keys", [8, 256])
def test_what_is_found_was_entered_after_the_same_tokens_whatever_the_keys(is_native: bool, num_keys: int) -> None:
    random_steps([make(is_native)], 3_000, num_keys, seed=1)


@pytest.mark.native
@pytest.mark.parametrize("num_keys", [8, 256])
def test_the_native_index_does_what_the_plain_one_does(num_keys: int) -> None:
    random_steps([make(False), make(True)], 3_000, num_keys, seed=2)


@BOTH
@pytest.mark.parametrize("num_bytes", [0, 1, 16, 32, 100])
def test_digests_are_blake2b_over_the_one_before_and_the_ids(is_native: bool, num_bytes: int) -> None:
    _, index = make(is_native)
    last = bytes(range(num_bytes))
    ids = np.array([1, 2, 3, 70_000, 5, 6, 7], dtype=np.int64)
    first = strong_hash(last + np.array([1, 2, 3], dtype=np.int32).tobytes())
    second = strong_hash(first + np.array([70_000, 5, 6], dtype=np.int32).tobytes())
    assert index.hash_blocks(last, ids) == first + second


@BOTH
def test_sizes_that_do_not_fit_are_refused(is_native: bool) -> None:
    pool, index = make(is_native)
    root, (block,) = index.new_serial(), pool.allocate(1)
    ids, key, digest = np.arange(SIZE), bytes(KEY_BYTES), bytes(DIGEST_BYTES)
    with pytest.raises(ValueError, match="more keys than blocks of ids"):
        index.match(root, key * 2, ids)
    for few in ((ids[:1], key, digest), (ids, b"", digest), (ids, key, b"")):
        with pytest.raises(ValueError, match="more blocks than keys, digests or blocks of ids"):
            index.enter([block], *few, root, True)
    with pytest.raises(ValueError, match="a part is longer than a block"):
        index.enter_part(block, np.arange(SIZE + 1), key, root)
    with pytest.raises(ValueError, match="keys have 16 bytes each, found 17"):
        index.match(root, key + b"x", ids)


@BOTH
def test_the_index_is_native_where_the_pool_is(is_native: bool) -> None:
    pool = BlockPool(4, SIZE, is_native)
    assert isinstance(BlockIndex(pool)._contents, PlainIndex) is not is_native


@pytest.mark.native
def test_the_index_and_views_of_it_outlive_the_pool_object() -> None:
    pool, index = make(True)
    root, blocks = index.new_serial(), pool.allocate(1)
    index.enter(blocks, np.arange(SIZE), bytes(KEY_BYTES), bytes(DIGEST_BYTES), root, True)
    tokens = index.tokens
    del pool
    assert index.match(root, bytes(KEY_BYTES), np.arange(SIZE)) == blocks
    del index
    assert tokens[blocks[0]].tolist() == list(range(SIZE))
