"""The controller in simulated time: it finds the best number of drafts, and turns off what does not pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from llmopt.cost_model import StepShape
from llmopt.request import Request
from llmopt_plugins.speculation.acceptance import Acceptance
from llmopt_plugins.speculation.goodput import Goodput, Row
from tests.llmopt.helpers import request

MOST = 16


class Machine:
    """A clock that steps move, and what the controller believes of it.

    :param token_s: of each token beyond the first, as a share of a plain step.
    :param draft_s: of each draft token, in the same unit.
    :param belief: predicted over true cost of tokens beyond the first.
    """

    def __init__(self, token_s: float, draft_s: float = 0.0, belief: float = 1.0) -> None:
        self.now = 0.0
        self.token_s, self.one_draft_s, self.belief = token_s, draft_s, belief
        self.plain_belief = belief  # the same of steps without drafts
        self.measured = True
        self.left_out_s = 0.0

    def clock(self) -> float:
        return self.now

    def true_s(self, num_tokens: int) -> float:
        return 1.0 + self.token_s * (num_tokens - 1)

    def step_s(self, num_tokens: int, num_rows: int = 1, context: int = 0, pairs: int = 0) -> float:
        ratio = self.plain_belief if num_tokens == num_rows else self.belief
        return 1.0 + ratio * self.token_s * (num_tokens - 1)

    def draft_s(self, num_rows: int, num_draft: int) -> float:
        return self.one_draft_s * num_draft

    def leave_out(self, seconds: float) -> None:
        self.left_out_s += seconds


class World:
    """Steps of some requests whose drafts are accepted by chance.

    :param chances: for each row, of each draft token whose predecessor was accepted; may change while it runs.
    """

    def __init__(self, machine: Machine, chances: Sequence[float], fixed: int | None = None, **options: Any) -> None:
        self.machine = machine
        self.chances = list(chances)
        self.requests: list[Request] = [request([1, 2, 3], f"r{i}", max_new_tokens=4) for i in range(len(chances))]
        self.goodput = Goodput(
            machine,
            machine.draft_s,
            MOST,
            fixed=fixed,
            clock=machine.clock,
            **options,  # type: ignore[arg-type]
        )
        self.random = random.Random(0)
        self.num_tokens = 0
        self.drafts: list[list[int]] = []  # of each step
        self.cold = 1.0  # time of drafting after a step without, over that after a step with drafts

    def step(self) -> None:
        size, start = len(self.requests), self.machine.now
        counts = [0] * size
        goodput = self.goodput
        if not goodput.is_asleep():
            goodput.begin(StepShape(size, size, 100 * size, 0), size)
            counts = goodput.plan([Row(r, MOST) for r in self.requests])
            is_cold = not self.drafts or not any(self.drafts[-1])
            self.machine.now += self.machine.draft_s(size, max(counts)) * (self.cold if is_cold else 1.0)
            asked, counts = counts, [self.made(n) for n in counts]
            drafted = [(r, 0, n, a) for r, n, a in zip(self.requests, counts, asked, strict=True) if a]
            goodput.end_draft(drafted, len(drafted), max(asked))
        self.machine.now += self.machine.true_s(size + sum(counts))
        accepted = {r: range(self.accepted(i, n)) for i, (r, n) in enumerate(zip(self.requests, counts, strict=True))}
        if goodput.is_under_way:
            goodput.end(accepted, sum(counts))
        self.num_tokens += size + sum(map(len, accepted.values()))
        self.drafts.append(counts)
        assert self.machine.now > start

    def made(self, count: int) -> int:
        """Tokens of a draft that should have so many."""
        return count

    def accepted(self, row: int, count: int) -> int:
        for depth in range(count):
            if self.random.random() >= self.chances[row]:
                return depth
        return count

    def run(self, num_steps: int) -> float:
        """Tokens per second of these steps."""
        tokens, start = self.num_tokens, self.machine.now
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - tokens) / (self.machine.now - start)


COSTS = [(0.01, 0.0), (0.03, 0.0), (0.1, 0.0), (0.3, 0.0), (0.01, 0.05), (0.02, 0.08), (0.05, 0.1), (0.1, 0.4)]


class Choosy(World):
    """The drafter knows when it is right: drafts that would fail are not made."""

    sure = 0.3  # how often it is

    def made(self, count: int) -> int:
        return count if self.random.random() < self.sure else 0


def expected(chance: float, count: int) -> float:
    """Tokens of a round with so many drafts."""
    return sum(chance**depth for depth in range(count + 1))


def share_of_best(chance: float, token_s: float, draft_s: float, num_tokens: int, num_runs: int = 10) -> float:
    """Goodput of the controller from its first step on, over that of the best fixed number of drafts.

    What is counted are the tokens to expect of the drafts that it chose: luck cancels out.
    """
    tokens = seconds = 0.0
    for seed in range(num_runs):
        world = World(Machine(token_s, draft_s), [chance])
        world.random = random.Random(seed)
        while world.num_tokens < num_tokens:
            world.step()
        tokens += sum(expected(chance, count) for (count,) in world.drafts)
        seconds += world.machine.now
    best = max(expected(chance, n) / (1.0 + n * (token_s + draft_s)) for n in range(MOST + 1))
    return tokens / seconds / best


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.45, 0.6, 0.75, 0.85, 0.95])
@pytest.mark.parametrize(("token_s", "draft_s"), COSTS)
def test_outputs_of_300_tokens_lose_3_percent_at_most_against_the_best_fixed_number_of_drafts(
    chance: float, token_s: float, draft_s: float
) -> None:
    assert share_of_best(chance, token_s, draft_s, 300) >= 0.97


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.75, 0.95])
@pytest.mark.parametrize(("token_s", "draft_s"), COSTS)
def test_a_first_output_of_100_tokens_loses_10_percent_at_most_to_learning(
    chance: float, token_s: float, draft_s: float
) -> None:
    assert share_of_best(chance, token_s, draft_s, 100) >= 0.9


def test_where_all_is_accepted_the_longest_drafts_come_within_five_rounds() -> None:
    world = World(Machine(0.03), [1.0])
    world.run(6)
    assert world.drafts[5] == [MOST]


def test_drafts_that_are_always_wrong_cost_less_than_3_percent_after_100_tokens() -> None:
    world = World(Machine(0.05, 0.1), [0.0])
    while world.num_tokens < 100:
        world.step()
    assert world.run(1000) >= 0.97
    assert not world.goodput.is_on


def test_while_it_is_off_most_steps_do_not_ask_the_drafter() -> None:
    world = World(Machine(0.05, 0.1), [0.0])
    world.run(500)
    assert sum(any(counts) for counts in world.drafts[100:]) <= 8
    assert world.goodput.stats()["num_slept"] > 300


def test_it_turns_on_again_when_drafts_become_good() -> None:
    world = World(Machine(0.02), [0.0])
    world.run(300)
    assert not world.goodput.is_on
    world.chances[0] = 0.9
    world.run(800)
    assert world.goodput.is_on
    assert world.run(200) > 3.0


def test_drafting_that_is_slow_after_a_pause_does_not_keep_it_off() -> None:
    world = World(Machine(0.02, 0.1), [0.75])
    world.cold = 8.0
    world.run(100)
    world.chances = [0.0]
    world.run(3000)
    world.chances = [0.75]
    world.run(2000)
    best = max(expected(0.75, n) / (1.0 + 0.12 * n) for n in range(MOST))
    assert world.run(1000) >= 0.95 * best


def test_the_guard_turns_off_what_was_predicted_to_pay_and_does_not() -> None:
    world = World(Machine(0.8, belief=0.02), [0.5])  # a token costs 50 times what the model says
    world.run(100)
    assert world.goodput.stats()["num_guarded"] >= 1
    assert world.run(2000) >= 0.97


def test_costs_that_are_believed_too_low_are_seen_before_the_guard_acts() -> None:
    world = World(Machine(0.3, belief=0.05), [0.5])
    world.run(100)
    assert world.goodput.stats()["num_guarded"] == 0
    assert world.run(1000) >= 0.97


def test_a_plain_step_that_is_faster_than_believed_is_found_although_every_step_has_drafts() -> None:
    machine = Machine(0.03)
    machine.plain_belief = 1.5  # as if drafts, of which 4 of 10 are accepted, made 32 rows 1.2 times as fast
    world = World(machine, [0.4] * 32)
    world.run(100)
    assert world.goodput.stats()["num_guarded"] == 0
    assert world.run(1000) >= 0.98 * 32 / machine.true_s(32)


def test_plain_steps_that_are_taken_to_be_measured_are_few() -> None:
    world = World(Machine(0.03), [0.9])
    world.run(1000)
    assert 2 <= sum(not any(counts) for counts in world.drafts) <= 10


@pytest.mark.parametrize(
    ("size", "token_s", "chance"), [(8, 0.04, 0.45), (8, 0.04, 0.5), (16, 0.03, 0.5), (16, 0.02, 0.6)]
)
def test_requests_that_were_out_of_luck_get_drafts_again(size: int, token_s: float, chance: float) -> None:
    world = World(Machine(token_s), [chance] * size)
    world.run(200)
    tokens, seconds = 0.0, world.machine.now
    for _ in range(600):
        world.step()
        tokens += sum(expected(chance, count) for count in world.drafts[-1])
    seconds = world.machine.now - seconds
    best = max(size * expected(chance, n) / world.machine.true_s(size * (1 + n)) for n in range(4))
    assert tokens / seconds >= 0.98 * best


def test_drafts_that_are_not_made_do_not_count_as_ones_that_would_have_been_right() -> None:
    world = Choosy(Machine(0.02), [0.9] * 16)
    world.run(300)
    stats = world.goodput.stats()
    assert stats["accepted"] / stats["drafted"] > 0.6
    assert stats["acceptance"][0][0] == pytest.approx(0.9 * Choosy.sure, abs=0.08)
    assert stats["predicted_speedup"] == pytest.approx(stats["measured_speedup"], rel=0.1)


def test_a_choosy_drafter_is_asked_for_as_many_tokens_as_one_that_is_always_sure() -> None:
    world = Choosy(Machine(0.03), [0.9])
    world.run(500)
    rate = world.run(2000)
    best = max(
        (1 - Choosy.sure + Choosy.sure * expected(0.9, n))
        / (1 - Choosy.sure + Choosy.sure * world.machine.true_s(1 + n))
        for n in range(MOST + 1)
    )
    assert rate >= 0.95 * best  # in tokens that were really accepted, so with their luck


def test_of_a_batch_the_rows_that_are_guessed_well_get_the_drafts() -> None:
    world = World(Machine(0.12), [0.95, 0.05, 0.05, 0.05])
    world.run(100)
    sums = [sum(step[row] for step in world.drafts[50:]) for row in range(4)]
    assert sums[0] > 5 * max(sums[1:])


def test_a_full_batch_where_every_row_costs_gets_none() -> None:
    world = World(Machine(1.0), [0.6] * 8)  # the machine is at its limit
    world.run(100)
    assert world.run(1000) >= 0.97 * 8 / 8.0


def test_fixed_drafts_are_drafted_whatever_they_cost() -> None:
    world = World(Machine(1.0), [0.0, 0.0], fixed=3)
    world.run(50)
    assert world.drafts == [[3, 3]] * 50


def test_its_statistics_count_what_happened() -> None:
    world = World(Machine(0.02), [1.0])
    world.run(100)
    stats = world.goodput.stats()
    drafted = sum(map(sum, world.drafts))
    assert stats["drafted"] == stats["accepted"] == drafted
    assert stats["rounds"] == 100
    assert stats["tokens_per_round"] == pytest.approx(world.num_tokens / 100, abs=1e-3)
    assert stats["measured_speedup"] == pytest.approx(world.num_tokens / world.machine.now, rel=0.02)
    assert stats["predicted_speedup"] == pytest.approx(stats["measured_speedup"], rel=0.25)


def test_a_round_of_another_request_leaves_no_trace_after_it_is_forgotten() -> None:
    world = World(Machine(0.02), [0.5, 0.5])
    world.run(10)
    for made in world.requests:
        world.goodput.forget(made)
    assert not world.goodput._skills


def test_places_that_no_draft_has_reached_follow_from_those_before() -> None:
    acceptance = Acceptance(0.5, 8)
    assert acceptance.chances() == pytest.approx([0.5**n for n in range(1, 9)])
    for _ in range(200):
        acceptance.observe(2, [0, 1])
    assert acceptance.chances()[7] > 0.9
    for _ in range(400):
        acceptance.observe(8, [])
    assert acceptance.chances()[0] < 0.04


def test_a_place_that_was_unlucky_once_is_forgotten_while_no_draft_reaches_it() -> None:
    acceptance = Acceptance(0.5, 8)
    for _ in range(3):
        acceptance.observe(3, [0, 1])
    unlucky = acceptance.chances()[2]
    for _ in range(300):
        acceptance.observe(2, [0, 1])
    assert unlucky < 0.4
    assert acceptance.chances()[2] > 0.8


def test_chances_never_rise_from_one_place_to_the_next() -> None:
    acceptance = Acceptance(0.5, 6)
    chooser = random.Random(1)
    for _ in range(50):
        acceptance.observe(chooser.randrange(1, 7), chooser.sample(range(6), 3))
        chances = acceptance.chances()
        assert chances == sorted(chances, reverse=True)
        assert all(0.0 <= chance <= 1.0 for chance in chances)
