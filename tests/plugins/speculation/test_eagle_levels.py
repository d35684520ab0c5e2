"""The forwards of a draft head: in C++ what torch computes, and level after level what one whole forward would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmopt.config import KernelConfig
from llmopt.kv_cache import KVCache, LayerShape
from llmopt.testing import tiny_model
from llmopt_plugins.speculation.eagle.checkpoint import Target, make_head, read_files
from llmopt_plugins.speculation.eagle.level import Level
from llmopt_plugins.speculation.eagle.search import Growth, Pairs, search_levels
from llmopt_plugins.speculation.eagle.torch_head import TorchHead
from llmopt_plugins.speculation.eagle.tree import DraftTree

from .eagle_heads import LAYOUTS, write_head

MODEL = tiny_model()
EMBEDDING = MODEL.get_input_embeddings()


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    target = Target(64, 512, None, 2, dtype)
    return make_head(read_files(folder, target), target, EMBEDDING, MODEL.get_output_embeddings())


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache({0: LayerShape(2, 16, 2, 16, dtype, torch.device("cpu"))}, num_blocks=16, block_size=4)


def in_torch(head: Any) -> TorchHead:
    return TorchHead(head, EMBEDDING, cache())


def in_cpp(head: Any, num_threads: int = 1, **kernel: Any) -> Any:
    from llmopt_plugins.kernel.native.packing import MatrixPlan, MatrixShape, Rows, pack
    from llmopt_plugins.speculation.eagle.native_head import NativeHead, _Weights

    matrices = {"embedding": MatrixPlan(64, (Rows("weight", 0, 512),), "embedding")}
    shapes = {"embedding": MatrixShape("float32", 512, 64)}
    packed = pack(matrices, {}, shapes, _Weights({"weight": EMBEDDING.weight.detach()}), 1)
    return NativeHead(head, packed, None, cache(), KernelConfig(**kernel), num_threads, 256)


def first_level(lengths: list[int], tables: list[list[int]], ids: np.ndarray, positions: np.ndarray) -> Level:
    """Pairs of some requests, from their first place on."""
    ends = np.cumsum(lengths)
    slots = [table[p // 4] * 4 + p % 4 for table, n in zip(tables, lengths, strict=True) for p in range(n)]
    return Level(
        block_tables=np.array(tables, dtype=np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        slot_mapping=np.array(slots, dtype=np.int64),
        token_ids=ids,
        positions=positions,
        logits_indices=ends.astype(np.int64) - 1,
    )


def tree_level(tree: DraftTree, lengths: list[int], tables: list[list[int]], number: int) -> Level:
    """The frontier of the trees behind those pairs, at positions that go on from their number."""
    count, width = tree.token_ids.shape
    end = number * width
    places = np.array(lengths)[:, None] + np.arange(end - width, end)
    slots = [[table[p // 4] * 4 + p % 4 for p in row] for table, row in zip(tables, places, strict=True)]
    return Level(
        block_tables=np.array(tables, dtype=np.int32),
        seq_lens=(np.array(lengths) + end).astype(np.int32),
        cu_seqlens_q=np.arange(0, (count + 1) * width, width, dtype=np.int32),
        slot_mapping=np.array(slots, dtype=np.int64).reshape(-1),
        token_ids=np.ascontiguousarray(tree.token_ids).reshape(-1),
        positions=np.repeat(np.array(lengths, dtype=np.int64) + number - 1, width),
        logits_indices=np.arange(count * width, dtype=np.int64),
        num_drafts=np.full(count, end, dtype=np.int32),
        draft_masks=np.ascontiguousarray(tree.masks()).reshape(-1),
    )


def num_taps(head: Any) -> int:
    return int(head.config.num_taps)


@pytest.mark.native
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_in_cpp_guesses_what_torch_guesses(layout: str, num_threads: int, tmp_path: Path) -> None:
    head = read(write_head(tmp_path, layout))
    runs = [in_torch(head), in_cpp(head, num_threads)]
    lengths, tables = [7, 1, 12], [[3, 1, 6, 8, 13], [2, 4, 5, 7, 14], [0, 9, 10, 11, 12]]
    total = sum(lengths)
    ids = np.random.default_rng(0).integers(0, 512, total)
    positions = np.concatenate([np.arange(n) for n in lengths])
    features = torch.randn(total, num_taps(head), 64)
    level = first_level(lengths, tables, ids, positions)
    found = [run(level, features, 3, are_features=True) for run in runs]
    assert_same(*found)
    tree = DraftTree(3, 3)
    tree.grow(found[0].token_ids[:, None], found[0].log_probs[:, None])
    states = [f.states.clone()[:, None].expand(3, 3, 64).reshape(9, 64) for f in found]
    for number in (1, 2):
        level = tree_level(tree, lengths, tables, number)
        found = [run(level, s, 3) for run, s in zip(runs, states, strict=True)]
        assert_same(*found)
        tree.grow(found[0].token_ids.reshape(3, 3, 3), found[0].log_probs.reshape(3, 3, 3))
        origins = torch.from_numpy(tree.origins)
        states = [f.states.clone().unflatten(0, (3, 3))[torch.arange(3)[:, None], origins].flatten(0, 1) for f in found]


def assert_same(expected: Any, found: Any) -> None:
    torch.testing.assert_close(found.states.float(), expected.states.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        torch.from_numpy(found.log_probs), torch.from_numpy(expected.log_probs), rtol=1e-3, atol=1e-4
    )
    assert (found.token_ids == expected.token_ids).all()


@pytest.mark.native
def test_many_pairs_at_once_give_what_torch_gives(tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    torch_head, native_head = in_torch(head), in_cpp(head, 2)
    count = 60  # what the cache of these tests holds
    ids = np.random.default_rng(1).integers(0, 512, count)
    features = torch.randn(count, 3, 64)
    level = first_level([count], [list(range(16))], ids, np.arange(count))
    assert_same(*(run(level, features, 4, are_features=True) for run in (torch_head, native_head)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_in_pieces_and_drafts_in_levels_equal_one_forward_over_all_of_them(layout: str, tmp_path: Path) -> None:
    head = read(write_head(tmp_path, layout))
    run = in_torch(head)
    table, count = [list(range(16))], 9
    ids = np.random.default_rng(2).integers(0, 512, count)
    features = torch.randn(count, num_taps(head), 64)
    whole = first_level([count], table, ids, np.arange(count))
    part = first_level([5], table, ids[:5], np.arange(5))
    run(part, features[:5], 0, are_features=True)
    rest = Level(
        block_tables=whole.block_tables, seq_lens=whole.seq_lens, cu_seqlens_q=np.array([0, 4], dtype=np.int32),
        slot_mapping=whole.slot_mapping[5:], token_ids=ids[5:], positions=whole.positions[5:],
        logits_indices=np.array([3], dtype=np.int64),
    )  # fmt: skip
    found = run(rest, features[5:], 2, are_features=True)
    assert found is not None
    expected = plainly(head, ids, head.fuse(features), np.arange(count))
    torch.testing.assert_close(found.states[0], head.feedback(expected)[-1], rtol=1e-4, atol=1e-5)
    # two guesses side by side, and one behind the second: each equals a chain of its own
    tree = DraftTree(1, 2)
    tree.grow(found.token_ids[:, None], found.log_probs[:, None])
    state = found.states.clone()
    level = run(tree_level(tree, [count], table, 1), state.expand(2, 64), 2)
    assert level is not None
    for node in range(2):
        chain = plainly_with(head, ids, features, [int(tree.token_ids[0, node])], [state[0]])
        torch.testing.assert_close(level.states[node], head.feedback(chain)[-1], rtol=1e-4, atol=1e-5)
    firsts, states = tree.token_ids[0].copy(), level.states.clone()
    tree.grow(level.token_ids[None], level.log_probs[None])
    origins = tree.origins[0]
    level = run(tree_level(tree, [count], table, 2), states[torch.from_numpy(origins)], 1)
    assert level is not None
    for node in range(2):
        origin = int(origins[node])
        chain_ids = [int(firsts[origin]), int(tree.token_ids[0, node])]
        chain = plainly_with(head, ids, features, chain_ids, [state[0], states[origin]])
        torch.testing.assert_close(level.states[node], head.feedback(chain)[-1], rtol=1e-4, atol=1e-5)


def plainly(head: Any, ids: np.ndarray, hidden: Tensor, positions: np.ndarray) -> Tensor:
    """One causal forward without a cache: ``[T, hidden_size]``."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    embedding = head.embed_tokens or EMBEDDING
    with torch.no_grad():
        embedded = embedding(torch.from_numpy(np.array(ids)))[None]
        return head(embedded, hidden[None], torch.from_numpy(np.array(positions))[None], attend)[0]  # type: ignore[no-any-return]


def plainly_with(head: Any, ids: np.ndarray, features: Tensor, drafts: list[int], states: list[Tensor]) -> Tensor:
    """The same with drafts behind the pairs, which have states in place of features."""
    with torch.no_grad():
        hidden = torch.cat([head.fuse(features), torch.stack(states)])
    return plainly(head, np.concatenate([ids, drafts]), hidden, np.arange(len(hidden)))


# -- the search -----------------------------------------------------------------------------------------------------
def test_the_likeliest_nodes_are_a_tree_however_many_are_taken() -> None:
    random = np.random.default_rng(0)
    tree = DraftTree(2, 3)
    for number in range(4):
        shape = (2, 1 if number == 0 else 3, 3)
        ids = np.stack([random.permutation(50)[: shape[1] * 3].reshape(shape[1:]) for _ in range(2)])
        tree.grow(ids, np.round(np.log(random.random(shape)), 1).astype(np.float32))  # with equal ones
        tree.masks()
    for count in range(1, 20):
        for ids, parents, scores in tree.best([count, count]):
            assert len(ids) == count
            assert scores == sorted(scores, reverse=True)
            assert all(-1 <= parent < place for place, parent in enumerate(parents))
            assert len(set(zip(parents, ids, strict=True))) == count


def pairs_of(run: Any, head: Any, lengths: list[int], num_pairs: list[int], seed: int = 0) -> Pairs:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    tables = random.permutation(16)[: 5 * len(lengths)].reshape(len(lengths), 5).tolist()
    positions = [p for n, before in zip(lengths, num_pairs, strict=True) for p in range(before, before + n)]
    hidden = torch.from_numpy(random.standard_normal((total, 4, 64), dtype=np.float32))
    taps = random.permutation(4)[: num_taps(head)].tolist()
    rows = random.permutation(total).tolist()
    features = [run.keep(hidden, rows[:2], taps), run.keep(hidden, rows[2:], taps)]
    assert sum(map(len, features)) == total
    return Pairs(tables, num_pairs, lengths, random.integers(0, 512, total).tolist(), positions, features)


@pytest.mark.native
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 6), (4, 1), (3, 4), (2, 5)])
@pytest.mark.parametrize("layout", ["eagle1", "eagle3_specforge"])
def test_the_search_in_cpp_finds_the_trees_of_the_one_in_python(
    layout: str, width: int, depth: int, tmp_path: Path
) -> None:
    head = read(write_head(tmp_path, layout))
    run = in_cpp(head, 2)
    in_pieces = SimpleNamespace(keep=lambda hidden, rows, taps: hidden[rows][:, taps])
    for seed, least in enumerate([(0.0, 0.0), (0.05, 0.01), (0.0, 0.02), (9.0, 0.0)]):
        given = [5, 1, 8], [0, 2, 0], seed
        growth = Growth(width, depth, [7, 2, 40], *least)
        expected, num_levels = search_levels(run, pairs_of(in_pieces, head, *given), growth, 4)
        found, found_levels = run.search(pairs_of(run, head, *given), growth)
        assert found_levels == num_levels
        assert num_levels == 1 if least[0] == 9.0 else num_levels <= depth
        for tree, other in zip(found, expected, strict=True):
            assert tree[:2] == other[:2]
            assert tree[2] == pytest.approx(other[2], abs=1e-5)
        assert any(tree[0] for tree in found) or least[1] > 0.0


@pytest.mark.native
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [5, 0]}, "it needs a new one"),
        ({"num_pairs": [0]}, "one entry per request"),
        ({"token_ids": [1]}, "one entry per new pair"),
        ({"block_tables": [[1, 2, 3, 4, 5], [6]]}, "needs room for 12 places"),
        ({"features": []}, "features for 0 pairs, there are 6"),
        ({"token_ids": [1, 2, 3, 512, 4, 5]}, r"token_ids\[3\] is 512"),
    ],
)
def test_the_search_in_cpp_refuses_what_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    run = in_cpp(head)
    pairs = replace(pairs_of(run, head, [5, 1], [0, 2]), **changes)
    with pytest.raises((ValueError, IndexError), match=message):
        run.search(pairs, Growth(3, 4, [4, 4]))


@pytest.mark.native
def test_rows_that_are_not_there_are_no_features(tmp_path: Path) -> None:
    run = in_cpp(read(write_head(tmp_path, "eagle3_specforge")))
    for rows, taps in (([0, 5], [0]), ([-1], [0]), ([0], [2])):
        with pytest.raises(IndexError, match="there are 2 layers and 5 tokens"):
            run.keep(torch.zeros(5, 2, 64), rows, taps)


@pytest.mark.native
def test_pairs_that_are_only_stored_are_seen_by_the_next_search(tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    for make in (in_torch, in_cpp):
        run = make(head)
        pairs = pairs_of(run, head, [9], [0])
        expected, _ = run.search(pairs, Growth(2, 3, [6]))
        split = make(head)
        first = replace(pairs_of(split, head, [9], [0]), lengths=[2])
        rest = replace(first, lengths=[7], num_pairs=[2])
        for part, begin, end in ((first, 0, 2), (rest, 2, 9)):
            part.token_ids, part.positions = part.token_ids[begin:end], part.positions[begin:end]
        first.features, rest.features = first.features[:1], rest.features[1:]
        assert split.search(first, Growth(1, 0, [0])) == ([([], [], [])], 0)
        found, _ = split.search(rest, Growth(2, 3, [6]))
        assert found[0][:2] == expected[0][:2]
        assert found[0][2] == pytest.approx(expected[0][2], abs=1e-4)


def test_no_level_is_made_that_brings_less_than_it_must(tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    run = in_torch(head)
    pairs = pairs_of(run, head, [5, 3], [0, 0])
    levels = [run.search(pairs, Growth(2, 4, [9, 9], least_gain=least))[1] for least in (0.0, 1e-3, 10.0)]
    assert levels[0] == 4 >= levels[1] >= levels[2] == 1


def test_nodes_below_the_least_chance_are_left_out(tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    run = in_torch(head)
    pairs = pairs_of(run, head, [5, 3], [0, 0])
    (everything, _), _ = run.search(pairs, Growth(2, 3, [9, 9]))
    least = float(np.exp(everything[2][3])) * 1.0001
    (some, _), _ = run.search(pairs, Growth(2, 3, [9, 9], least_chance=least))
    assert some[0] == everything[0][: len(some[0])]
    assert len(some[0]) <= 3
    assert all(np.exp(score) >= least for score in some[2])


def test_a_head_without_numbers_drafts_nothing(tmp_path: Path) -> None:
    head = read(write_head(tmp_path, "eagle3_specforge"))
    pairs = pairs_of(in_torch(head), head, [5, 3], [0, 0])
    for parameter in head.parameters():
        parameter.data.fill_(torch.nan)
    found, _ = in_torch(head).search(pairs, Growth(2, 4, [9, 9]))
    assert found == [([], [], [])] * 2


def test_a_row_without_a_number_drafts_nothing() -> None:
    tree = DraftTree(2, 2)
    scores = np.array([[[np.nan, np.nan]], [[-0.5, -1.0]]], dtype=np.float32)
    tree.grow(np.array([[[1, 2]], [[3, 4]]]), scores)
    first, second = tree.best([2, 2])
    assert first == ([], [], [])
    assert second[0] == [3, 4]
