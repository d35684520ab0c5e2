"""The verifier: whatever is drafted, the output is what it would be without drafts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import llmopt
from llmopt.baseline.speculation import BaselinePropose, BaselineVerify
from llmopt.batch import DraftTokens
from llmopt.batch_builder import BatchBuilder
from llmopt.request import Request
from llmopt.testing import scripted_model, tiny_model, tiny_prompts
from tests.llmopt.baseline.test_application import both, word_ids, word_tokenizer
from tests.llmopt.helpers import Drafter, Drafts, alone, assert_idle, build_tiny, request


def guess(answers: dict[tuple[int, ...], list[int]], share: float, width: int) -> Drafter:
    """Drafts the true continuation, with each token right at a rate of ``share``."""
    chooser = random.Random(7)

    def draft(made: Request) -> list[int]:
        rest = answers[tuple(made.prompt_ids)][made.num_output_tokens :][:width]
        return [t if chooser.random() < share else (t + 1) % 512 for t in rest]

    return draft


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"logit_bias": {40: 4.0}},
    {"min_new_tokens": 9, "stop_token_ids": list(range(3, 200))},
    {"temperature": 1.0, "seed": 9},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": 9},
    {"logits_processors": [lambda ids, line: line.roll(len(ids))]},  # depends on the length of the history
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[str(i) for i in range(len(SETTINGS))])
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
def test_drafts_change_no_token_whether_right_wrong_or_mixed(
    settings: dict[str, Any], plugins: tuple[str, ...]
) -> None:
    prompts = tiny_prompts(4, max_length=12)
    requests = [{"prompt": p, "max_new_tokens": 16, **settings} for p in prompts]
    with build_tiny() as plain:
        wanted = [alone(plain, r) for r in requests]
    answers = {tuple(p): ids for p, ids in zip(prompts, wanted, strict=True)}
    for share, width in ((1.0, 4), (0.0, 3), (0.6, 8)):
        drafts = Drafts(guess(answers, share, width), width)
        with build_tiny(plugins=[*plugins, drafts], block_size=4, max_tokens_per_step=24) as pipe:
            outputs = pipe.batch(requests, progress=False)
            assert [o.token_ids for o in outputs] == wanted
            assert drafts.num_proposed > 20
            if share == 1.0:
                assert pipe.stats()["num_steps"] < 3 + 16 // 4 + 2
            assert_idle(pipe)


def test_seeded_output_with_drafts_depends_on_the_seed_and_not_on_the_neighbours() -> None:
    def draft(made: Request) -> list[int]:
        return made.output_ids[-2:][::-1]

    prompt, *others = tiny_prompts(6, max_length=12)
    with build_tiny(plugins=[Drafts(draft, 3)]) as pipe:
        options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16}
        runs = [alone(pipe, prompt, seed=9, **options) for _ in range(2)]
        crowd = pipe.batch([*others, {"prompt": prompt, "seed": 9}], progress=False, **options)
        runs.append(crowd[-1].token_ids)
        assert len(set(map(tuple, runs))) == 1
        assert alone(pipe, prompt, seed=10, **options) != runs[0]


# -- the end inside an accepted block -------------------------------------------------------------
def scripted(script: list[int], num_draft: int, answer: list[int] | None = None) -> Any:
    """A pipeline that says ``script``, with a drafter that knows it."""
    tokenizer = word_tokenizer()
    known = answer or script
    drafts = Drafts(lambda r: known[r.num_output_tokens :], num_draft)
    return llmopt.build(scripted_model([([7, 8], script)], tokenizer), [drafts], tokenizer=tokenizer, block_size=4)


def test_the_output_ends_at_the_first_eos_of_an_accepted_block() -> None:
    foo, bar = word_ids("foo", "bar")
    script = [foo, bar, 2, foo, bar, foo, bar]
    with scripted(script, 6) as pipe:
        pipe.model.generation_config.eos_token_id = [2, 1]
        made = request([7, 8], eos=(2, 1), max_new_tokens=12)
        pipe.run([made])
        assert made.output_ids == script[:3]
        assert made.finish_reason == "stop"
        assert made.stop_reason == 2
        assert made.num_computed_tokens <= made.num_tokens
        _, output = both(pipe, max_new_tokens=12)
        assert output.token_ids == script[:3]
        _, output = both(pipe, ignore_eos=True, max_new_tokens=7)
        assert output.token_ids == script
        assert pipe.stats()["num_steps"] <= 10


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_output_ends_exactly_at_its_limit_inside_an_accepted_block(limit: int) -> None:
    script = word_ids(*["foo", "bar", "baz", "END"] * 3)
    with scripted(script, 6) as pipe:
        _, output = both(pipe, max_new_tokens=limit)
    assert output.token_ids == script[:limit]
    assert output.finish_reason == "length"


@pytest.mark.parametrize(("stop", "text", "count"), [(["END"], "foo", 2), (["Dba"], "fooEN", 3)])
def test_a_stop_string_inside_an_accepted_block_cuts_text_and_ids(stop: list[str], text: str, count: int) -> None:
    script = word_ids("foo", "END", "bar", "baz")
    for num_draft in (1, 4):
        with scripted(script, num_draft) as pipe:
            got, output = both(pipe, stop=stop, max_new_tokens=9)
        assert got == text
        assert output.token_ids == script[:count]


@pytest.mark.parametrize("minimum", range(1, 9))
@pytest.mark.parametrize("num_draft", [1, 3])
def test_the_minimum_is_exact_in_every_row_of_a_block(minimum: int, num_draft: int) -> None:
    """The model always wants to end; the drafter first proposes the end, then what comes instead."""
    with scripted([], num_draft, answer=[2] * 20) as pipe:
        (output,) = pipe.batch([[7, 8]], min_new_tokens=minimum, max_new_tokens=20, progress=False)
        assert output.token_ids[-1] == 2
        assert len(output.token_ids) == minimum + 1
        assert 2 not in output.token_ids[:-1]
    with scripted([], num_draft, answer=output.token_ids) as pipe:
        assert alone(pipe, [7, 8], min_new_tokens=minimum, max_new_tokens=20) == output.token_ids


# -- the distribution -----------------------------------------------------------------------------
@pytest.mark.parametrize("drafter", ["sampled", "best", "copied"])
def test_tokens_accepted_from_drafts_follow_the_targets_distribution(drafter: str) -> None:
    """Tables of a target and a drafter over 8 tokens; the joint frequencies of the first two tokens are compared."""
    size, count, depth = 8, 20_000, 3
    numbers = np.random.default_rng(5)
    target = torch.tensor(numbers.normal(size=(size + 1, size)) * 1.5, dtype=torch.float32)  # last row: the first token
    guesser = numbers.dirichlet(np.ones(size), size=size + 1)
    verify, builder = BaselineVerify(), BatchBuilder(64)
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}

    def drafts_after(token: int) -> list[int]:
        row = []
        for _ in range(depth):
            if drafter == "sampled":
                token = int(numbers.choice(size, p=guesser[token]))
            elif drafter == "best":
                token = int(guesser[token].argmax())
            row.append(token % size)
        return row

    pairs: Counter[tuple[int, int]] = Counter()
    requests = []
    for seed in range(count):
        made = request([size], seed=seed, max_new_tokens=9, **options)
        made.block_table = [0]
        requests.append(made)
    rows = np.array([drafts_after(size if drafter != "copied" else seed) for seed in range(count)])
    for start in range(0, count, 500):
        some = requests[start : start + 500]
        guesses = DraftTokens(rows[start : start + 500], np.full(500, depth, dtype=np.int32))
        batch = builder.build(some, [1] * 500, guesses)
        before = np.concatenate([np.full((500, 1), size), guesses.token_ids], axis=1)
        accepted = verify(batch, guesses, target[torch.from_numpy(before.reshape(-1))], None)
        assert accepted.requests == some
        for made, tokens in zip(some, accepted.token_ids, strict=True):
            for token in tokens:
                made.append(token)
    refused = [made for made in requests if made.num_output_tokens == 1]  # their second token comes in another step
    for start in range(0, len(refused), 500):
        some = refused[start : start + 500]
        batch = builder.build(some, [2] * len(some))
        before = torch.tensor([made.output_ids[0] for made in some])
        for made, (token,) in zip(some, verify(batch, None, target[before], None).token_ids, strict=True):
            made.append(token)
    for made in requests:
        pairs[tuple(made.output_ids[:2])] += 1  # type: ignore[index]

    probs = (target / 0.7).softmax(-1)
    for row in probs:  # nucleus of 0.9: the smallest set of best tokens that reaches it
        order = row.argsort(descending=True)
        keep = (row[order].cumsum(0) - row[order]) < 0.9
        row[order[~keep]] = 0.0
        row /= row.sum()
    joint = (probs[size][:, None] * probs[:size]).double().numpy()
    counts = np.array([[pairs[i, j] for j in range(size)] for i in range(size)])
    assert counts[joint == 0].sum() == 0
    possible = joint > 0
    value = ((counts - joint * count) ** 2 / np.where(possible, joint * count, 1))[possible].sum()
    freedom = int(possible.sum()) - 1
    # the 0.999 quantile of chi-square (Wilson and Hilferty)
    assert value < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert np.abs(counts / count - joint).sum() / 2 < 0.02


def test_the_plain_drafter_guesses_nothing() -> None:
    made = request([4])
    made.block_table = [0]
    assert BaselinePropose()(BatchBuilder(4).build([made], [1])) is None


# -- failures -------------------------------------------------------------------------------------
def test_a_failing_row_behind_drafts_is_an_error_only_when_its_drafts_are_real() -> None:
    """Of a row that does come, the error comes back in the next step, without drafts before it."""

    def no_five(ids: np.ndarray, line: torch.Tensor) -> torch.Tensor:
        if ids[-1] == 5 or len(ids) == 4:
            raise ValueError("five, or the fourth place")
        return line

    logits = torch.zeros(4, 512)
    logits[:, 9] = 1.0
    verify, builder = BaselineVerify(), BatchBuilder(64)
    for drafts, tokens in (([5, 9, 9], [9]), ([9, 5, 9], [9, 9]), ([9, 9, 5], [9, 9, 9]), ([9, 9, 9], [9, 9, 9])):
        made = request([4], logits_processors=[no_five])
        made.block_table = [0]
        guesses = DraftTokens(np.array([drafts]), np.array([3], dtype=np.int32))
        accepted = verify(builder.build([made], [1], guesses), guesses, logits, None)
        assert accepted.token_ids == [tokens]
        assert not accepted.errors
    made = request([5], logits_processors=[no_five])
    made.block_table = [0]
    accepted = verify(builder.build([made], [1]), None, logits[:1], None)
    assert list(accepted.errors) == ["r"]
    assert accepted.requests == []


def test_not_a_number_in_the_weights_is_an_error_of_the_request_with_the_first_token() -> None:
    """Only prompts that touch the broken embedding fail; the others go on."""
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.inf
    with llmopt.build(model, block_size=4) as pipe:
        good, bad, late = pipe.batch([[5, 6, 7], [5, 77], [9, 9]], max_new_tokens=12, ignore_eos=True, progress=False)
        assert good.finish_reason == late.finish_reason == "length"
        assert good.token_ids == alone(pipe, [5, 6, 7], max_new_tokens=12, ignore_eos=True)
        assert bad.finish_reason == "error"
        assert bad.token_ids == []
        assert "best logit of its next token is nan" in str(bad.error)
        assert pipe.stats()["num_errors"] == 1
        assert_idle(pipe)
