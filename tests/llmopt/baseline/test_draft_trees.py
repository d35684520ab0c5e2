"""Drafts that are trees, and drafters that mean no good: the tokens are those of `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import llmopt
from llmopt import native
from llmopt.baseline.speculation import BaselineVerify
from llmopt.batch import Batch, BestTokens, DraftTokens
from llmopt.batch_builder import BatchBuilder
from llmopt.errors import LlmoptError
from llmopt.hf.rows import take_rows
from llmopt.kv_cache import KVCache, LayerShape
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request
from llmopt.testing import (
    Guess,
    ScriptedDrafter,
    adversaries,
    draft_tokens,
    scripted_model,
    tiny_model,
    tiny_prompts,
    tiny_tokenizer,
)
from llmopt.testing.drafters import Answers, trees
from tests.llmopt.baseline.test_application import word_tokenizer
from tests.llmopt.helpers import alone, assert_idle, build_tiny, request, wrap

VOCAB = 512
COMPANIES = [
    (),
    ("native",),
    ("chunked_prefill",),
    ("prefix_cache",),
    ("paged_kv", "prefix_cache"),
    ("native", "paged_kv", "prefix_cache", "chunked_prefill"),
]


def generated(model: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What the model says by itself."""
    outputs = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def answers_of(prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Answers:
    return {tuple(p): ids for p, ids in zip(prompts, outputs, strict=True)}


@pytest.mark.parametrize("plugins", COMPANIES, ids=["+".join(c) or "plain" for c in COMPANIES])
@pytest.mark.parametrize("num_draft", [1, 4, 17])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_no_drafter_changes_a_token_whatever_it_drafts(plugins: tuple[str, ...], num_draft: int, num_rows: int) -> None:
    model, prompts = tiny_model(), tiny_prompts(num_rows, max_length=14)
    wanted = generated(model, prompts, 24)
    for name, drafter in adversaries(answers_of(prompts, wanted), VOCAB, num_draft).items():
        with llmopt.build(
            model, [*plugins, drafter], tokenizer=tiny_tokenizer(), block_size=4, max_tokens_per_step=32
        ) as pipe:
            outputs = pipe.batch(prompts, max_new_tokens=24, ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == wanted, name
            num_steps = pipe.stats()["num_steps"]
            if name in ("right", "mostly_right", "trees") and num_draft > 1 and num_rows == 1:
                assert num_steps < 20, name  # a broken verifier writes right text too
            assert drafter.num_drafted > 0 or name == "noise"
            assert_idle(pipe)


@pytest.mark.parametrize("plugins", [(), ("native",)])
@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2", "qwen3", "opt"])
def test_trees_change_no_token_with_windows_caps_and_learned_positions(kind: str, plugins: tuple[str, ...]) -> None:
    """The window of these models is 32 tokens, which drafts cross."""
    if kind in ("gpt2", "opt") and plugins:
        pytest.skip("the same attention as in the others")
    model, prompts = tiny_model(kind), tiny_prompts(3, max_length=30)
    wanted = generated(model, prompts, 40)
    answers = answers_of(prompts, wanted)
    for num_draft, share in ((3, 0.9), (9, 0.7), (33, 0.8), (64, 0.5)):
        drafter = ScriptedDrafter(trees(answers, VOCAB, share), num_draft)
        with llmopt.build(model, [*plugins, drafter], tokenizer=tiny_tokenizer(), block_size=4) as pipe:
            outputs = pipe.batch(prompts, max_new_tokens=40, ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == wanted
            assert pipe.stats()["num_steps"] < 36
            assert_idle(pipe)


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"logit_bias": {40: 4.0}},
    {"min_new_tokens": 9, "stop_token_ids": list(range(3, 200))},
    {"temperature": 1.0, "seed": 9},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": 9, "repetition_penalty": 1.1},
    {"logits_processors": [lambda ids, line: line.roll(len(ids))]},  # depends on the length of the history
    {"logits_processors": [lambda ids, line: line.index_fill(0, torch.tensor([int(i) for i in ids]), -9.0)]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[str(i) for i in range(len(SETTINGS))])
def test_each_draft_of_a_tree_is_judged_with_its_own_path_as_history(settings: dict[str, Any]) -> None:
    prompts = tiny_prompts(4, max_length=12)
    requests = [{"prompt": p, "max_new_tokens": 16, **settings} for p in prompts]
    with build_tiny() as plain:
        wanted = [alone(plain, r) for r in requests]
    answers = answers_of(prompts, wanted)
    for plugins, num_draft in (((), 3), ((), 12), (("native",), 6)):
        drafter = ScriptedDrafter(trees(answers, VOCAB, 0.9), num_draft)
        with build_tiny(plugins=[*plugins, drafter], block_size=4) as pipe:
            assert [o.token_ids for o in pipe.batch(requests, progress=False)] == wanted
            longest = max(map(len, wanted))
            assert pipe.stats()["num_steps"] < longest or longest < 4
            assert_idle(pipe)


@pytest.mark.parametrize("minimum", range(1, 9))
def test_the_minimum_counts_depth_and_not_rows_of_a_tree(minimum: int) -> None:
    """The model always wants to end, and every tree proposes the end in several places, and what comes instead."""
    tokenizer = word_tokenizer()
    model = scripted_model([([7, 8], [])], tokenizer)
    with llmopt.build(model, tokenizer=tokenizer) as pipe:
        wanted = alone(pipe, [7, 8], min_new_tokens=minimum, max_new_tokens=20)
    assert len(wanted) == minimum + 1

    def guess(made: Request, room: int) -> Guess:
        instead = [*wanted[made.num_output_tokens :], 2, 2, 2]
        ids, parents = [2, instead[0], 2, instead[1], 2, instead[2]], [-1, -1, 1, 1, 3, 3]
        if instead[0] == 2:
            ids, parents = [2, 2], [-1, 0]
        elif instead[1] == 2:
            ids, parents = [2, instead[0], 2], [-1, -1, 1]
        elif instead[2] == 2:
            ids, parents = ids[:5], parents[:5]
        return Guess(ids[:room], parents[:room])

    with llmopt.build(model, [ScriptedDrafter(guess, 6)], tokenizer=tokenizer) as pipe:
        assert alone(pipe, [7, 8], min_new_tokens=minimum, max_new_tokens=20) == wanted
        assert pipe.stats()["num_steps"] <= minimum


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_seeded_request_says_the_same_alone_in_company_and_with_any_number_of_drafts(options: dict[str, Any]) -> None:
    prompt, *others = tiny_prompts(6, max_length=12)
    with build_tiny() as pipe:
        wanted = alone(pipe, prompt, seed=9, max_new_tokens=20, **options)
        other_seed = alone(pipe, prompt, seed=10, max_new_tokens=20, **options)
    assert (other_seed != wanted) == bool(options)
    for num_draft in (1, 2, 5, 16, 40):
        drafter = ScriptedDrafter(trees({tuple(prompt): wanted}, VOCAB, 0.8), num_draft)
        with build_tiny(plugins=[drafter]) as pipe:
            assert alone(pipe, prompt, seed=9, max_new_tokens=20, **options) == wanted
            crowd = pipe.batch([*others, {"prompt": prompt, "seed": 9}], progress=False, max_new_tokens=20, **options)
            assert crowd[-1].token_ids == wanted


# -- the distribution -----------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [[-1, -1, -1], [-1, -1, 0, 1, 1], [-1, 0, 0, 1, -1, 4]], ids=str)
def test_tokens_accepted_from_trees_follow_the_targets_distribution(shape: list[int]) -> None:
    """Tables over 8 tokens; the joint frequencies of the first two tokens against their exact probabilities."""
    size, count = 8, 16_000
    numbers = np.random.default_rng(3)
    target = torch.tensor(numbers.normal(size=(size + 1, size)) * 1.5, dtype=torch.float32)  # last row: the first token
    verify, builder = BaselineVerify(), BatchBuilder(64)
    pairs = np.zeros((size, size))
    for start in range(0, count, 500):
        requests, guesses = [], []
        for seed in range(start, start + 500):
            made = request([size], seed=seed, max_new_tokens=9, temperature=0.7, top_p=0.9)
            made.block_table = [0]
            requests.append(made)
            ids: list[int] = []
            for draft, parent in enumerate(shape):
                taken = {ids[i] for i in range(draft) if shape[i] == parent}
                ids.append(int(numbers.choice([t for t in range(size) if t not in taken])))
            guesses.append(Guess(ids, shape))
        drafts = draft_tokens(guesses)
        assert drafts is not None
        batch = builder.build(requests, [1] * 500, drafts)
        before = np.concatenate([np.full((500, 1), size), drafts.token_ids], axis=1)
        accepted = verify(batch, drafts, target[torch.from_numpy(before.reshape(-1))], None)
        assert accepted.paths is not None
        for made, tokens, path, guess in zip(requests, accepted.token_ids, accepted.paths, guesses, strict=True):
            assert [guess.token_ids[draft] for draft in path] == tokens[:-1]
            for token in tokens:
                made.append(token)
        refused = [made for made in requests if made.num_output_tokens == 1]
        second = builder.build(refused, [2] * len(refused))
        rows = target[torch.tensor([made.output_ids[0] for made in refused])]
        for made, (token,) in zip(refused, verify(second, None, rows, None).token_ids, strict=True):
            made.append(token)
        for made in requests:
            pairs[made.output_ids[0], made.output_ids[1]] += 1
    probs = (target / 0.7).softmax(-1)
    for row in probs:  # nucleus of 0.9
        order = row.argsort(descending=True)
        row[order[(row[order].cumsum(0) - row[order]) >= 0.9]] = 0.0
        row /= row.sum()
    joint = (probs[size][:, None] * probs[:size]).double().numpy()
    assert pairs[joint == 0].sum() == 0
    possible = joint > 0
    value = ((pairs - joint * count) ** 2 / np.where(possible, joint * count, 1))[possible].sum()
    freedom = int(possible.sum()) - 1
    assert value < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # p > 0.001
    assert np.abs(pairs / count - joint).sum() / 2 < 0.03


def test_the_short_way_of_rounds_without_errors_accepts_what_the_walk_accepts() -> None:
    """Rows that decode with chains, trees or nothing, and rows that choose no token yet."""
    chooser = np.random.default_rng(5)
    num_accepted = 0
    for number in range(400):
        requests = decoding(6)
        scheduled = [1] * 6
        for row in chooser.permutation(6)[: number % 3]:  # only a part of the prompt
            requests[row].num_computed_tokens, scheduled[row] = 0, 2
        guesses = []
        for made in requests:
            count = int(chooser.integers(0, 7)) if made.num_computed_tokens else 0
            parents = [int(chooser.integers(-1, i)) if i else -1 for i in range(count)]
            ids: list[int] = []  # few, so that drafts are often right; no twins
            for draft, parent in enumerate(parents):
                ids.append(2 * sum(p == parent for p in parents[:draft]) + int(chooser.integers(0, 2)))
            guesses.append(Guess(ids, parents) if number % 2 else Guess(ids))
        drafts = draft_tokens(guesses)
        if drafts is None:
            continue
        batch = BatchBuilder(4).build(requests, scheduled, drafts)
        tokens = chooser.integers(0, 3, batch.logits_indices.size)
        logits = torch.nn.functional.one_hot(torch.from_numpy(tokens), 9).float()
        short = BaselineVerify()(batch, drafts, BestTokens(tokens.tolist(), [1.0] * tokens.size), None)
        walked = BaselineVerify()(batch, drafts, logits, None)
        assert short == walked
        assert not short.errors
        num_accepted += sum(len(ids) - 1 for ids in short.token_ids)
    assert num_accepted > 500


# -- drafts that are no numbers -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "plugins"),
    [
        ("llama", ()),
        ("gemma2", ()),
        ("llama", ("native",)),
        ("llama", ("native", "paged_kv", "prefix_cache", "kv_quant")),
    ],
)
def test_a_draft_whose_keys_and_values_are_no_numbers_spoils_neither_its_request_nor_other_drafts(
    kind: str, plugins: tuple[str, ...]
) -> None:
    """The model knows every token but one, which it never says; a hidden draft of it would give 0 times NaN."""
    model, prompts = tiny_model(kind), tiny_prompts(4, max_length=14)
    with build_tiny(kind, plugins) as pipe:
        wanted = [alone(pipe, p, max_new_tokens=10, ignore_eos=True) for p in prompts]
    if "kv_quant" not in plugins:
        assert wanted == generated(model, prompts, 10)
    answers = answers_of(prompts, wanted)
    seen = {token for text in (*prompts, *wanted) for token in text}
    unknown = next(token for token in range(3, VOCAB) if token not in seen)
    with torch.no_grad():
        model.get_input_embeddings().weight[unknown] = torch.nan

    def rest_of(made: Request) -> Sequence[int]:
        return answers.get(tuple(made.prompt_ids), ())[made.num_output_tokens :]

    def chain(made: Request, room: int) -> Guess:
        return Guess([*rest_of(made)[:2], unknown, 7][:room])

    def tree(made: Request, room: int) -> Guess:
        first, second = [*rest_of(made), 7, 8][:2]
        return Guess([unknown, first, unknown, second][:room], [-1, -1, 1, 1][:room])

    def some(made: Request, room: int) -> Guess:
        """Beside rows without drafts, and with drafts that are fine."""
        number = prompts.index(made.prompt_ids) if made.prompt_ids in prompts else 1
        return (Guess(()), tree(made, room), Guess(rest_of(made)[:room]), chain(made, room))[number]

    for guess in (chain, tree, some):
        drafter = ScriptedDrafter(guess, 4)
        with llmopt.build(model, [*plugins, drafter], tokenizer=tiny_tokenizer(), block_size=4) as pipe:
            for options in ({}, {"temperature": 1.0, "top_k": 1, "seed": 3}):
                outputs = pipe.batch(prompts, max_new_tokens=10, ignore_eos=True, progress=False, **options)
                assert [o.token_ids for o in outputs] == wanted, guess.__name__
            assert drafter.num_rounds > 10
            assert_idle(pipe)
            longest = max(prompts, key=len)
            bad, good = pipe.batch(
                [[*longest, unknown], prompts[1]], max_new_tokens=10, ignore_eos=True, progress=False
            )
            assert "best logit of its next token is nan" in str(bad.error)
            assert good.token_ids == wanted[1]
            (again,) = pipe.batch([longest], max_new_tokens=10, ignore_eos=True, progress=False)
            assert again.token_ids == answers[tuple(longest)]


# -- the KV ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [(), ("native",)])
def test_after_each_step_the_kv_is_that_of_the_accepted_tokens(plugins: tuple[str, ...]) -> None:
    prompt = tiny_prompts(1, max_length=12)[0]
    model = tiny_model()
    (wanted,) = generated(model, [prompt], 20)

    def kv_of(pipe: InferencePipeline, made: Request) -> list[torch.Tensor]:
        length = made.num_computed_tokens
        return [t for i in pipe.kv_cache.layers for t in pipe.kv_cache.gather(i, made.block_table, length)]

    drafter = ScriptedDrafter(trees({tuple(prompt): wanted}, VOCAB, 0.9), 9)
    with llmopt.build(model, plugins, block_size=4) as plain, llmopt.build(model, [*plugins, drafter],
                                                                           block_size=4) as pipe:  # fmt: skip
        whole = request(prompt, max_new_tokens=20)
        whole.keep_blocks = True
        plain.run([whole])
        right = kv_of(plain, whole)
        made = request(prompt, max_new_tokens=20)
        made.keep_blocks = True
        pipe.add(made)
        num_steps = 0
        while not made.is_finished:
            pipe.advance()
            num_steps += 1
            for found, expected in zip(kv_of(pipe, made), right, strict=True):
                torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-4, atol=1e-5)
        assert num_steps < 16
        assert made.output_ids == wanted
        plain.release([whole])
        pipe.release([made])


@pytest.mark.parametrize("native_mode", ["auto", "off"])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_moved_tokens_are_where_they_belong_in_every_layer(
    native_mode: str, is_quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", native_mode)
    shapes = {
        0: LayerShape(2, 16, 2, 8, torch.float32, torch.device("cpu"), is_quantized),
        3: LayerShape(1, 24, 4, 16, torch.float32, torch.device("cpu"), is_quantized),
    }
    kv = KVCache(shapes, num_blocks=5, block_size=4)
    for layer in kv.layers.values():
        for tensor in (layer.key, layer.value):
            values = torch.randn(tensor.shape) * 50
            tensor.copy_(values.to(tensor.dtype))
    before = {i: (layer.key.clone(), layer.value.clone()) for i, layer in kv.layers.items()}
    kv.move([9, 13, 19], [8, 9, 10])
    for i, layer in kv.layers.items():
        for tensor, old in zip((layer.key, layer.value), before[i], strict=True):
            places = old.transpose(1, 2).flatten(0, 1).clone()
            for source, target in ((9, 8), (13, 9), (19, 10)):
                places[target] = old.transpose(1, 2).flatten(0, 1)[source]
            assert torch.equal(tensor.transpose(1, 2).flatten(0, 1), places)
    kv.layers.clear()
    kv.move([1], [0])  # a closed pipeline


@pytest.mark.parametrize("plugins", [("kv_quant",), ("native", "kv_quant")])
def test_quantized_keys_and_values_give_the_same_tokens_with_trees(plugins: tuple[str, ...]) -> None:
    prompts = tiny_prompts(3, max_length=14)
    with build_tiny(plugins=plugins) as pipe:
        wanted = [alone(pipe, p, max_new_tokens=20, ignore_eos=True) for p in prompts]
    drafter = ScriptedDrafter(trees(answers_of(prompts, wanted), VOCAB, 0.8), 6)
    with build_tiny(plugins=[*plugins, drafter]) as pipe:
        outputs = pipe.batch(prompts, max_new_tokens=20, ignore_eos=True, progress=False)
        assert [o.token_ids for o in outputs] == wanted
        assert pipe.stats()["num_steps"] < 20


def test_rejected_drafts_are_never_found_in_the_prefix_cache() -> None:
    """The second prompt goes on with what the drafter guessed wrongly for the first."""
    prompt = tiny_prompts(1, max_length=12)[0]
    guessed: list[list[int]] = []

    def guess(made: Request, room: int) -> Guess:
        ids = [(made.token_ids[made.num_tokens - 1] + 3 + i) % VOCAB for i in range(5)]
        guessed.append([*made.token_ids[: made.num_tokens].tolist(), *map(int, ids)])
        return Guess(ids[:room], [-1, 0, 1, 2, 0][:room])

    with build_tiny() as plain:
        cold = {}
        with build_tiny(plugins=["prefix_cache", ScriptedDrafter(guess, 5)], block_size=4) as pipe:
            first = alone(pipe, prompt, max_new_tokens=12, ignore_eos=True)
            assert first == alone(plain, prompt, max_new_tokens=12, ignore_eos=True)
            known = [*prompt, *first]
            for wrong in guessed[:8]:
                cold[tuple(wrong)] = alone(plain, wrong, max_new_tokens=6, ignore_eos=True)
                made = request(wrong, max_new_tokens=6)
                pipe.run([made])
                assert made.output_ids == cold[tuple(wrong)]
                same = next((i for i, (a, b) in enumerate(zip(wrong, known, strict=False)) if a != b), len(known))
                assert made.num_cached_tokens <= same


# -- what is packed -------------------------------------------------------------------------------
def decoding(count: int, length: int = 6) -> list[Request]:
    made = []
    for number in range(count):
        r = request(range(1, length + number), f"r{number}", max_new_tokens=30)
        r.num_computed_tokens = r.num_tokens - 1
        r.block_table = [10 * number + j for j in range(12)]
        r.slot = number
        made.append(r)
    return made


def test_a_tree_is_packed_behind_its_row_with_masks_and_positions_of_depth() -> None:
    requests = decoding(3)
    guesses = [Guess([7, 8, 9], [-1, -1, 0]), Guess([]), Guess([4, 5])]
    drafts = draft_tokens(guesses)
    assert drafts is not None
    for is_quick in (True, False):
        builder = BatchBuilder(4)
        batch = builder.build(requests, [1, 1, 1])
        if not is_quick:
            builder._last = None
        packed = builder.with_drafts(batch, drafts)
        assert packed.token_ids.tolist() == [5, 7, 8, 9, 6, 7, 4, 5]
        assert packed.draft_masks.tolist() == [0, 1, 2, 5, 0, 0, 1, 3]
        assert packed.draft_masks.dtype == np.uint64
        assert packed.positions.tolist() == [4, 5, 5, 6, 5, 6, 7, 8]
        assert packed.seq_lens.tolist() == [8, 6, 9]
        rows = zip(requests, (4, 5, 6), (4, 1, 3), strict=True)
        slots = [r.block_table[p // 4] * 4 + p % 4 for r, start, count in rows for p in range(start, start + count)]
        assert packed.slot_mapping.tolist() == slots
        assert packed.logits_indices.tolist() == list(range(8))
        assert packed.cu_seqlens_q.tolist() == [0, 4, 5, 8]
        received = Batch.from_bytes(packed.to_bytes())
        assert received.draft_masks.tolist() == packed.draft_masks.tolist()
        part, places = take_rows(packed, [2, 0])
        assert part.draft_masks.tolist() == [0, 1, 3, 0, 1, 2, 5]
        assert places.tolist() == [5, 6, 7, 0, 1, 2, 3]


def test_random_rounds_are_packed_alike_behind_decodes_and_from_nothing() -> None:
    chooser = np.random.default_rng(0)
    quick = BatchBuilder(4)
    requests = decoding(5)
    for made in requests:
        made.eos_token_ids = frozenset((2, 3))
        object.__setattr__(made.sampling, "min_new_tokens", int(chooser.integers(0, 12)))
    quick.may_want_best = True
    for _ in range(20):
        guesses = []
        for made in requests:
            room = min(6, made.max_len - 1 - made.num_tokens)
            count = int(chooser.integers(0, room + 1)) if room > 0 else 0
            parents = [int(chooser.integers(-1, i)) if i else -1 for i in range(count)]
            guesses.append(Guess([int(100 * i + chooser.integers(0, 99)) for i in range(count)], parents))
        drafts = draft_tokens(guesses)
        plain = quick.build(requests, [1] * 5)
        fresh = BatchBuilder(4)
        fresh.may_want_best = True
        assert fresh.build(requests, [1] * 5).token_ids.tolist() == plain.token_ids.tolist()
        if drafts is not None:
            found, wanted = quick.with_drafts(plain, drafts), fresh.build(requests, [1] * 5, drafts)
            for name in ("token_ids", "positions", "draft_masks", "slot_mapping", "seq_lens", "cu_seqlens_q",
                         "num_scheduled", "num_drafts", "logits_indices", "banned_rows", "banned_ids"):  # fmt: skip
                assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
                assert getattr(found, name).dtype == getattr(wanted, name).dtype, name
            assert found.logits_requests == wanted.logits_requests
            assert found.wants_best == wanted.wants_best
        for made in requests:
            for _ in range(int(chooser.integers(1, 4))):
                if made.num_tokens < made.max_len - 1:
                    made.append(int(chooser.integers(0, 500)))
            made.num_computed_tokens = made.num_tokens - 1


BROKEN: list[tuple[DraftTokens | str, str]] = [
    ("soup", "'soup' from stage 'propose'"),
    (DraftTokens(np.array([[1, 2]]), np.array([3], np.int32)), "up to 2 drafts for request 'r0', not 3"),
    (DraftTokens(np.array([[1, -2]]), np.array([2], np.int32)), "ids of the vocabulary, 0 to 511; row 0 has -2"),
    (DraftTokens(np.array([[1, 512]]), np.array([2], np.int32)), "row 0 has 512"),
    (DraftTokens(np.zeros((2, 1), np.int64), np.array([1, 1], np.int32)), "a row per request, 1"),
    (DraftTokens(np.array([[1, 2]]), np.array([2], np.int64)), "num_draft as int32, not int64"),
    (DraftTokens(np.array([[1, 2]]), np.array([2], np.int32), np.array([[0, -1]], np.int32)),
     "draft 0 of row 0 follows 0"),
    (DraftTokens(np.array([[1, 1]]), np.array([2], np.int32), np.array([[-1, -1]], np.int32)),
     "in row 0 two are equal"),
    (DraftTokens(np.arange(9)[None], np.array([9], np.int32)), "up to 4 drafts for request 'r0', not 9"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "told"), BROKEN, ids=[told for _, told in BROKEN])
@pytest.mark.parametrize("native_mode", ["auto", "off"])
def test_drafts_that_cannot_run_end_the_request_with_the_drafter_named(
    result: Any, told: str, native_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", native_mode)
    monkeypatch.setattr("llmopt.draft_check.cached_core", lambda: native.core(native_mode))
    drafter = ScriptedDrafter(lambda r, room: Guess([]), 4, "bad")
    drafter.propose = lambda batch: result  # type: ignore[method-assign]
    with build_tiny(plugins=[drafter]) as pipe:
        made = request([5, 6, 7], "r0", max_new_tokens=8)
        with pytest.raises(LlmoptError, match="plugin 'bad' returned") as failure:
            pipe.run([made])
        assert told in str(failure.value)
        assert_idle(pipe)


def test_trees_are_refused_where_a_stage_does_not_know_them() -> None:
    drafter = ScriptedDrafter(lambda r, room: Guess([1, 2][:room], [-1, -1][:room]), 4, "planter")
    with build_tiny(plugins=[wrap("verify", lambda inner: lambda *a: inner(*a), "chains_only"), drafter]) as pipe:
        assert not drafter.allows_trees
        with pytest.raises(LlmoptError, match="'chains_only' in stage 'verify' does not say takes_trees"):
            pipe.run([request([5, 6, 7])])
