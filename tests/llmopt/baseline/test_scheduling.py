"""Who runs, with how many tokens, and when; and that requests come out whole."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any

import pytest

import llmopt
from llmopt.baseline.memory import BaselineAllocate
from llmopt.baseline.scheduling import BaselineBudget, BaselineOrder, BaselineSchedule
from llmopt.batch import AcceptedTokens, Batch, StepBudget
from llmopt.batch_builder import BatchBuilder
from llmopt.block_pool import BlockPool
from llmopt.errors import ContextLengthError, InvalidPromptError, RequestError, RequestTooLargeError
from llmopt.pipeline import InferencePipeline
from llmopt.queue import RequestQueue
from llmopt.request import Request, RequestStatus
from llmopt.testing import ScriptedDrafter, tiny_model, tiny_prompts
from llmopt.testing.drafters import trees
from llmopt_plugins.memory.paged_kv import PagedAllocate
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, request

BLOCK = 4


class Bench:
    """A scheduler with pool and queue, and no model: every request that is due gets token 1."""

    def __init__(self, num_blocks: int, *, paged: bool = False, **options: Any) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.allocate: Any = PagedAllocate(self.pool, 0) if paged else BaselineAllocate(self.pool)
        settings: dict[str, Any] = {"max_num_requests": 16, "max_tokens_per_step": 64, "can_chunk": True}
        settings |= {"num_lookahead": 0} | options
        self.budget: Any = BaselineBudget(settings.pop("max_tokens_per_step"))
        self.schedule = BaselineSchedule(
            BaselineOrder(),
            lambda queue: self.budget(queue),
            self.allocate,
            lambda r: 0,
            BatchBuilder(BLOCK),
            **settings,
        )
        self.queue = RequestQueue(settings["max_num_requests"])
        self.num_computed = 0
        self.num_finished = 0
        self.started: list[str] = []

    def add(self, name: str, prompt_len: int, new: int = 8, **options: Any) -> Request:
        made = request([5] * prompt_len, name, max_new_tokens=new, **options)
        self.queue.add(made)
        return made

    def step(self) -> dict[str, int]:
        """One step: ``{request id: tokens}``."""
        batch = self.schedule(self.queue)
        self.pool.check()
        assert self.pool.num_used <= self.pool.num_blocks
        if batch is None:
            return {}
        for made, count in zip(batch.requests, batch.num_scheduled.tolist(), strict=True):
            assert len(made.block_table) * BLOCK >= made.num_computed_tokens + count
            if made.num_computed_tokens == 0:
                self.started.append(made.request_id)
            made.num_computed_tokens += count
            self.num_computed += count
        for made in batch.logits_requests:
            made.append(1)
            if made.num_tokens == made.max_len:
                self.finish(made)
        return dict(zip(batch.request_ids, batch.num_scheduled.tolist(), strict=True))

    def finish(self, made: Request) -> None:
        made.finish("length")
        self.queue.remove(made)
        self.allocate.free(made)
        self.num_finished += 1

    def run(self, limit: int = 2000) -> int:
        """Step until nothing is left; the number of steps."""
        for number in range(limit):
            if not len(self.queue):
                assert self.pool.num_used == 0
                return number
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


# -- budget and chunks ----------------------------------------------------------------------------
def test_a_step_stays_within_its_token_budget_and_long_prompts_come_in_chunks() -> None:
    bench = Bench(64, max_tokens_per_step=10)
    bench.add("a", 7)
    bench.add("b", 12)
    assert bench.step() == {"a": 7, "b": 3}
    assert bench.step() == {"a": 1, "b": 9}
    assert bench.step() == {"a": 1, "b": 1}


def test_decodes_come_before_the_prompts_of_new_requests() -> None:
    bench = Bench(64, max_tokens_per_step=4)
    bench.add("a", 3)
    bench.step()
    bench.add("b", 9)
    assert [bench.step() for _ in range(3)] == [{"a": 1, "b": 3}] * 3


def test_a_prompt_that_cannot_be_split_waits_for_a_step_of_its_own() -> None:
    bench = Bench(64, max_tokens_per_step=8, can_chunk=False)
    bench.add("a", 3, new=3)
    bench.add("long", 20)
    assert [bench.step() for _ in range(4)] == [{"a": 3}, {"a": 1}, {"a": 1}, {"long": 20}]


def test_no_more_requests_run_than_there_are_slots() -> None:
    bench = Bench(64, max_num_requests=2)
    for name in "abc":
        bench.add(name, 2, new=3)
    assert set(bench.step()) == {"a", "b"}
    assert bench.run() == 5
    assert bench.started == ["a", "b", "c"]


# -- order and budget of a step ------------------------------------------------------------------
def test_decodes_come_before_prompts_that_started_earlier() -> None:
    bench = Bench(64, max_tokens_per_step=4)
    long, short = bench.add("long", 20), bench.add("short", 1)
    bench.budget = lambda queue: StepBudget(4, 4, num_first_tokens=3)
    assert bench.step() == {"long": 3, "short": 1}
    bench.budget = lambda queue: StepBudget(4, 4)
    batch = bench.schedule(bench.queue)
    assert batch is not None
    assert batch.requests == [short, long]
    assert batch.num_scheduled.tolist() == [1, 3]


def test_prompts_stay_within_their_part_of_the_budget_and_decodes_do_not_count() -> None:
    bench = Bench(64)
    bench.budget = lambda queue: StepBudget(64, 5)
    bench.add("a", 4)
    bench.add("b", 12)
    assert bench.step() == {"a": 4, "b": 1}
    assert bench.step() == {"a": 1, "b": 5}
    bench.budget = lambda queue: StepBudget(64, 0)
    assert bench.step() == {"a": 1}


def test_nobody_starts_when_the_budget_says_so_and_those_under_way_go_on() -> None:
    bench = Bench(64)
    bench.budget = lambda queue: StepBudget(64, 3)
    bench.add("a", 5)
    bench.step()
    bench.add("b", 5)
    bench.budget = lambda queue: StepBudget(64, 64, may_start=False, wake_s=17.0)
    assert bench.step() == {"a": 2}
    assert bench.queue.wake_s is None  # there is work: nobody need wake up for it
    bench.finish(bench.queue.running[0])
    assert bench.step() == {}
    assert bench.queue.wake_s == 17.0
    bench.budget = lambda queue: StepBudget(64, 64)
    assert bench.step() == {"b": 5}
    assert bench.queue.wake_s is None


def test_the_first_prompt_takes_its_share_and_the_rest_goes_to_the_shortest_of_the_others() -> None:
    bench = Bench(256)
    bench.budget = lambda queue: StepBudget(16, 16, num_first_tokens=8)
    for name, size in (("huge", 60), ("large", 30), ("small", 5), ("tiny", 2)):
        bench.add(name, size, new=1)
    assert bench.step() == {"huge": 8, "tiny": 2, "small": 5, "large": 1}
    assert bench.step() == {"huge": 8, "large": 8}
    bench.add("urgent", 40, new=1, priority=-1)
    assert bench.step() == {"huge": 8, "urgent": 8}  # among the others, priority comes before length


def test_a_prompt_that_cannot_be_split_is_not_held_up_by_a_budget_for_chunks() -> None:
    bench = Bench(64, can_chunk=False)
    bench.budget = lambda queue: StepBudget(64, 4, num_first_tokens=2)
    bench.add("a", 3)
    bench.step()
    bench.add("b", 20)
    bench.add("c", 20)
    assert bench.step() == {"a": 1, "b": 20}  # one whole prompt; the next in the next step
    assert bench.step() == {"a": 1, "b": 1, "c": 20}


def test_a_lone_view_runs_its_request_whatever_the_budget_holds_back() -> None:
    bench = Bench(64)
    bench.budget = lambda queue: StepBudget(64, 0, may_start=False)
    made = bench.add("a", 5)
    assert bench.step() == {}
    batch = bench.schedule(bench.queue.only(made))
    assert batch is not None
    assert batch.num_scheduled.tolist() == [5]


def test_a_closed_budget_is_no_reason_to_preempt_groups_that_wait_for_members() -> None:
    bench = GroupBench(64)
    group = Group()
    bench.add("a0", 5, new=4, lockstep=group)
    bench.add("a1", 5, new=4, lockstep=group)
    bench.budget = lambda queue: StepBudget(64, 5)
    assert bench.step() == {"a0": 5}
    bench.budget = lambda queue: StepBudget(64, 64, may_start=False)
    assert bench.step() == {}
    assert bench.schedule.num_preemptions == 0


# -- who waits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("paged", [False, True])
def test_small_requests_pass_one_that_lacks_blocks_until_the_bound_and_then_wait_behind_it(paged: bool) -> None:
    bench = Bench(16, paged=paged, max_num_requests=4)
    bench.schedule.max_overtakes = 5
    holder = bench.add("holder", 30, new=20) if paged else bench.add("holder", 20, new=13)
    bench.step()
    big = bench.add("big", 38, new=3)
    small = itertools.count()
    passed = 0
    for _ in range(60):
        while len(bench.queue.waiting) < 4:
            bench.add(f"small-{next(small)}", 2, new=2)
        bench.step()
        passed = len({name for name in bench.started if name.startswith("small")})
        if big.num_computed_tokens or holder.is_finished:
            break
    assert passed == 5
    if not holder.is_finished:
        bench.finish(holder)
    for _ in range(6):
        bench.step()
    assert bench.started.index("big") == 6  # after the holder and the five that passed it
    bench.run()


def test_a_continuation_that_stands_before_its_parent_does_not_hold_it_up() -> None:
    bench = Bench(64)
    parent = request([5] * 4, "parent", max_new_tokens=2)
    bench.add("child", 4, new=2, parent=parent)
    bench.queue.add(parent)
    bench.schedule.lookup = lambda r: None if r.parent is not None and r.parent.num_computed_tokens == 0 else 0
    bench.schedule._overtakes[next(iter(bench.queue.waiting))] = bench.schedule.max_overtakes
    bench.run(limit=20)
    assert bench.started == ["parent", "child"]


def test_the_bound_holds_for_every_request_in_a_stream_of_random_sizes() -> None:
    chooser = random.Random(4)
    bench = Bench(20, max_num_requests=8)
    bench.schedule.max_overtakes = 6
    arrival: list[str] = []
    for number in range(300):
        size = chooser.choice([2, 3, 5, 60])
        arrival.append(bench.add(str(number), size, new=chooser.randint(1, 12)).request_id)
        bench.step()
    bench.run(20_000)
    place = {name: i for i, name in enumerate(bench.started)}
    for index, name in enumerate(arrival):
        later_but_first = sum(place[other] < place[name] for other in arrival[index + 1 :])
        assert later_but_first <= 6 * 20  # each of the few ahead of it in line may be passed as often


def test_a_long_line_of_requests_without_blocks_is_not_walked_to_its_end() -> None:
    bench = Bench(8)
    bench.add("holder", 20, new=12)
    bench.step()
    for number in range(500):
        bench.add(str(number), 20, new=4)
    calls = 0
    inner = bench.schedule.lookup

    def count(made: Request) -> int | None:
        nonlocal calls
        calls += 1
        return inner(made)

    bench.schedule.lookup = count
    bench.step()
    assert calls <= bench.schedule.max_overtakes + 1


# -- pre-emption ----------------------------------------------------------------------------------
def test_requests_that_wait_for_kv_of_others_hold_nobody_up() -> None:
    bench = Bench(64)
    bench.schedule.lookup = lambda r: None if r.request_id.startswith("waits") else 0
    for number in range(bench.schedule.max_overtakes + 10):
        bench.add(f"waits-{number}", 8)
    for number in range(100):
        bench.add(f"small-{number}", 2, 1)
        assert bench.step() == {f"small-{number}": 2}


def test_the_request_admitted_last_gives_way_and_starts_again_when_there_is_room() -> None:
    bench = Bench(6, paged=True)
    first, second = bench.add("first", 8, new=12), bench.add("second", 8, new=12)
    while not second.num_preemptions:
        bench.step()
    assert first.num_preemptions == 0
    assert second.status is RequestStatus.WAITING
    assert second.block_table == []
    bench.run()
    assert (first.num_output_tokens, second.num_output_tokens) == (12, 12)
    assert bench.schedule.stats()["num_preemptions"] == 1


def test_nobody_starts_in_a_step_that_preempts() -> None:
    bench = Bench(6, paged=True)
    second = [bench.add(name, 8, new=12) for name in ("first", "second")][1]
    while not second.num_preemptions:
        small = bench.add(f"small-{bench.num_computed}", 1, new=1)
        before = len(bench.started)
        bench.step()
    assert len(bench.started) == before
    bench.run()
    assert small.is_finished


@pytest.mark.parametrize("paged", [False, True])
def test_a_prompt_in_chunks_that_does_not_fit_beside_a_running_request_is_not_computed_again_and_again(
    paged: bool,
) -> None:
    bench = Bench(20, paged=paged, max_tokens_per_step=16)
    bench.add("a", 47, new=30)
    for _ in range(4):
        bench.step()
    bench.add("b", 60, new=10)
    bench.run()
    ideal = (47 + 29) + (60 + 9)
    assert bench.num_computed < 1.5 * ideal


def test_drafts_near_the_end_of_a_request_that_fills_the_pool_do_not_stop_it() -> None:
    bench = Bench(3, paged=True, num_lookahead=5)
    bench.add("a", 4, new=9)
    assert bench.run() == 9


@pytest.mark.parametrize("paged", [False, True])
def test_every_request_of_a_random_crowd_ends_and_gives_everything_back(paged: bool) -> None:
    for seed in range(8):
        chooser = random.Random(seed)
        bench = Bench(chooser.randint(8, 30), paged=paged, max_tokens_per_step=chooser.choice([1, 7, 50]),
                      max_num_requests=chooser.choice([1, 3, 16]), num_lookahead=chooser.choice([0, 3]))  # fmt: skip
        made = [bench.add(str(i), chooser.randint(1, 20), new=chooser.randint(1, 12)) for i in range(40)]
        bench.run(20_000)
        assert all(r.num_output_tokens == r.sampling.max_new_tokens for r in made)


# -- groups that choose together ------------------------------------------------------------------
class Group:
    """Counts who delivered; the bench plays the chooser."""

    def __init__(self) -> None:
        self.due: set[Request] = set()

    def put(self, made: Request, logits: Any) -> bool:
        raise NotImplementedError

    def choose(self) -> AcceptedTokens:
        raise NotImplementedError


class GroupBench(Bench):
    """Members of a group get their tokens when all of them have delivered."""

    def step(self) -> dict[str, int]:
        batch: Batch | None = self.schedule(self.queue)
        self.pool.check()
        if batch is None:
            return {}
        for made, count in zip(batch.requests, batch.num_scheduled.tolist(), strict=True):
            made.num_computed_tokens += count
        for made in batch.logits_requests:
            group = made.lockstep
            assert isinstance(group, Group)
            group.due.add(made)
            members = [r for r in self.queue if r.lockstep is group]
            if group.due.issuperset(members):
                group.due.clear()
                for member in members:
                    member.append(1)
                    if member.num_tokens == member.max_len:
                        self.finish(member)
        return dict(zip(batch.request_ids, batch.num_scheduled.tolist(), strict=True))


@pytest.mark.parametrize("paged", [False, True])
def test_two_groups_that_each_hold_half_of_the_pool_both_end(paged: bool) -> None:
    bench = GroupBench(8, paged=paged)
    groups = [Group(), Group()]
    for number in range(4):  # a0 b0 a1 b1 a2 ...: each group starts with half of its members
        for name, group in zip("ab", groups, strict=True):
            bench.add(f"{name}{number}", 5, new=4, lockstep=group)
    bench.run(200)


def test_a_group_goes_on_although_a_large_request_stands_before_its_missing_members() -> None:
    bench = GroupBench(8)
    bench.schedule.max_overtakes = 0  # nobody may pass the large one
    group, other = Group(), Group()
    bench.add("a0", 5, new=4, lockstep=group)
    bench.add("large", 20, new=12, lockstep=other)
    bench.add("a1", 5, new=4, lockstep=group)
    bench.run(200)


# -- the door -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def short() -> Any:
    with build_tiny(max_model_len=64, block_size=16) as pipe:
        yield pipe


@pytest.mark.parametrize(
    ("prompt", "new"), [(64, None), (65, None), (500, None), (64, 1), (63, 2), (60, 64), (500, 64)]
)
def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(
    short: InferencePipeline, prompt: int, new: int | None
) -> None:
    start = time.perf_counter()
    with pytest.raises(ContextLengthError, match=rf"prompt of {prompt} tokens.*limit is 64"):
        short.batch([[5] * prompt], max_new_tokens=new, progress=False)
    assert time.perf_counter() - start < 5
    assert_idle(short)


@pytest.mark.parametrize(("prompt", "new", "got"), [(63, None, 1), (63, 1, 1), (62, 2, 2), (1, 63, 63), (50, None, 14)])
def test_a_request_may_fill_the_context_to_its_last_token(
    short: InferencePipeline, prompt: int, new: int | None, got: int
) -> None:
    (output,) = short.batch([[5] * prompt], max_new_tokens=new, ignore_eos=True, progress=False)
    assert (len(output.token_ids), output.finish_reason) == (got, "length")


@pytest.mark.parametrize("bad", [-1, 512, 10**6])
def test_ids_outside_the_vocabulary_are_refused_with_the_id_and_the_range(short: InferencePipeline, bad: int) -> None:
    with pytest.raises(InvalidPromptError, match=rf"token id {bad}; the vocabulary of the model is 0 to 511"):
        short.batch([[5, bad]], progress=False)
    with pytest.raises(RequestError, match=rf"logit_bias for token id {bad}"):
        short.batch([[5]], logit_bias={bad: 1.0}, max_new_tokens=2, progress=False)
    assert alone(short, [5], logit_bias={511: 100.0}, max_new_tokens=2) == [511, 511]


def test_a_request_that_is_larger_than_the_pool_is_refused_before_it_starts() -> None:
    with build_tiny(block_size=4, pool_bytes=pool_bytes(5, 4)) as pipe:
        assert pipe.max_model_len == 20
        pipe.block_pool.num_blocks = 4  # as if a plugin had taken one
        with pytest.raises(RequestTooLargeError, match="needs 5 KV blocks of 4 tokens, the pool has 4"):
            pipe.batch([[5] * 10], max_new_tokens=8, progress=False)


def test_a_live_id_is_refused_and_can_be_used_again_after_the_end(short: InferencePipeline) -> None:
    wanted = alone(short, [9, 8], max_new_tokens=12)
    first = short.submit([9, 8], request_id="x", max_new_tokens=12)
    refused = None
    try:
        second = short.submit([7], request_id="x", max_new_tokens=3)
    except RequestError as error:
        refused = error
    else:  # the first one was quick
        assert second.result(20).token_ids == alone(short, [7], max_new_tokens=3)
    assert first.result(20).token_ids == wanted
    if refused is not None:
        assert "belongs to a live request" in str(refused)
    assert short.submit([7], request_id="x", max_new_tokens=3).result(20).token_ids == alone(
        short, [7], max_new_tokens=3
    )
    assert_idle(short)


def test_an_id_is_live_until_its_request_ends() -> None:
    with build_tiny() as pipe:
        pipe.add(request([1, 2], "x"))
        with pytest.raises(RequestError, match="'x' belongs to a live request"):
            pipe.add(request([3], "x"))
        pipe.abort("x")
        pipe.add(request([3], "x"))
        pipe.abort("x")
        assert_idle(pipe)


# -- through the whole pipeline -------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
def test_an_id_can_be_used_again_at_once_after_an_abort(plugins: tuple[str, ...]) -> None:
    chooser = random.Random(0)
    prompts = tiny_prompts(6, max_length=20)
    with build_tiny(plugins=plugins, block_size=4, pool_bytes=pool_bytes(24, 4), max_tokens_per_step=16) as pipe:
        wanted = [alone(pipe, p, max_new_tokens=20, ignore_eos=True) for p in prompts]
        for _ in range(60):
            pipe.add(request(chooser.choice(prompts), "r", max_new_tokens=20))
            for _ in range(chooser.randint(0, 3)):
                pipe.advance()
            pipe.abort("r")
            assert pipe.block_pool.num_used == 0
            number = chooser.randrange(len(prompts))
            again = request(prompts[number], "r", max_new_tokens=20)
            pipe.run([again])
            assert again.output_ids == wanted[number]
        assert_idle(pipe)


def test_waiting_requests_that_are_aborted_leave_nothing_behind() -> None:
    with build_tiny(block_size=4, max_num_requests=2, plugins=["paged_kv"]) as pipe:
        parent = request(range(5, 15), "p0", temperature=1.0)
        made = [parent] + [request(range(5, 15), f"p{i}", parent=parent, seed=i, temperature=1.0) for i in range(1, 10)]
        for r in made:
            pipe.add(r)
        for _ in range(3):
            pipe.advance()
        assert (len(pipe.queue.running), len(pipe.queue.waiting)) == (2, 8)
        for r in made:
            pipe.abort(r)
        assert all(r.finish_reason == "abort" for r in made)
        assert_idle(pipe)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_a_prompt_give_no_token_and_change_none(chunk: int) -> None:
    prompt = tiny_prompts(1, max_length=50, min_length=50)[0]
    with build_tiny(max_tokens_per_step=4096) as whole:
        wanted = alone(whole, prompt, max_new_tokens=8, ignore_eos=True)
    with build_tiny(max_tokens_per_step=chunk) as pipe:
        made = request(prompt)
        news: list[int] = []
        pipe.add(made, lambda r: news.append(r.num_output_tokens))
        steps = 0
        while not made.is_finished:
            output = pipe.advance()
            steps += 1
            assert (made.num_output_tokens > 0) == (made.num_computed_tokens >= 50)
            assert output.num_new_tokens == (1 if made.num_output_tokens else 0)
        assert steps == -(-50 // chunk) + 7
        assert news == list(range(1, 9))
        assert made.output_ids == wanted
        assert_idle(pipe)


def test_two_equal_prompts_in_one_batch_both_come_back(short: InferencePipeline) -> None:
    outputs = short.batch([[9, 8, 7], [9, 8, 7]], max_new_tokens=6, progress=False)
    assert outputs[0].token_ids == outputs[1].token_ids == alone(short, [9, 8, 7], max_new_tokens=6)
    assert outputs[0].request_id != outputs[1].request_id


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"frequency_penalty": 1.0},
    {"temperature": 1.2, "top_k": 20, "seed": 5, "presence_penalty": 0.7},
    {"min_new_tokens": 3, "stop_token_ids": [17, 40, 41]},
    {"logit_bias": {30: 5.0}},
]


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("plugins", [(), ("paged_kv",)])
def test_requests_that_come_and_go_in_any_order_keep_their_own_state(plugins: tuple[str, ...], drafts: bool) -> None:
    """Lengths 1 to 8, other settings for each, fewer slots than requests."""
    prompts = tiny_prompts(8, max_length=14)
    requests: list[dict[str, Any]] = []
    for length, (prompt, settings) in enumerate(zip(prompts, SETTINGS, strict=True), start=1):
        requests.append({"prompt": prompt, "max_new_tokens": length, **settings})
    with build_tiny() as plain:
        wanted = [alone(plain, r, ignore_eos=True) for r in requests]
    planter = trees({tuple(p): ids for p, ids in zip(prompts, wanted, strict=True)}, 512, 0.8)
    drafter = ScriptedDrafter(planter, 3)
    with build_tiny(plugins=[*plugins, *([drafter] if drafts else ())], block_size=4, max_num_requests=3,
                    pool_bytes=pool_bytes(12, 4),
                    max_tokens_per_step=9) as pipe:  # fmt: skip
        for seed in range(20):
            order = random.Random(seed).sample(range(8), 8)
            outputs = pipe.batch([requests[i] for i in order], ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == [wanted[i] for i in order]
        assert (drafter.num_rounds > 100) == drafts
        assert_idle(pipe)


def test_two_generate_calls_whose_rows_fill_the_pool_together_both_return() -> None:
    import torch

    model = tiny_model()
    ids = torch.tensor([tiny_prompts(1, min_length=8, max_length=8, seed=s)[0] for s in range(4)])
    options: dict[str, Any] = {"max_new_tokens": 8, "repetition_penalty": 1.3, "do_sample": False}
    wanted = model.generate(ids, **options)
    with llmopt.build(model, block_size=4, pool_bytes=pool_bytes(18, 4), max_model_len=64) as pipe:
        results: list[Any] = [None] * 3
        threads = [
            threading.Thread(target=lambda i=i: results.__setitem__(i, pipe.generate(ids, **options))) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not pipe.stats()["fall_backs"]
        assert all(r is not None and torch.equal(r, wanted) for r in results)
        assert_idle(pipe)
