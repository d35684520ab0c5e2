"""Priorities with ageing, cached prefixes first, fair tenants, and deadlines that can no longer be met."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

import llmopt
from llmopt.errors import DeadlineError
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.scheduling.request_order import PolicyOrder, RequestOrder
from llmopt_plugins.scheduling.tenant_shares import TenantShares
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, wrap
from tests.plugins.scheduling.simulation import LinearCost, Simulation


def simulation(
    policy: str = "priority",
    ageing_s: float = 10.0,
    *,
    fair: bool = False,
    num_cached: Any = None,
    deadlines: bool = False,
    **options: Any,
) -> Simulation:
    def make(inner: Any, sim: Simulation) -> Any:
        shares = TenantShares() if fair else None
        cost = sim.cost if deadlines else None
        return PolicyOrder(inner, policy, ageing_s, shares, num_cached, cost, sim.clock)

    return Simulation(orders=[make], **{"max_num_requests": 1, **options})


# -- priority --------------------------------------------------------------------------------------------------------
def test_smaller_priorities_start_first_and_equal_ones_in_order_of_arrival() -> None:
    sim = simulation()
    for name, priority in (("first", 0), ("a", 2), ("b", 0), ("c", -1), ("d", 0), ("e", 2)):
        sim.at(0.0 if name == "first" else 0.01, name, 10, new=3, priority=priority)
    sim.run()
    assert sim.started == ["first", "c", "b", "d", "a", "e"]


def test_a_request_that_waits_long_enough_passes_more_urgent_ones() -> None:
    def place(ageing_s: float) -> int:
        sim = simulation(ageing_s=ageing_s)
        sim.at(0.0, "patient", 10, new=4, priority=1)
        for number in range(100):  # urgent ones, faster than they can be served
            sim.at(0.01 * number, f"urgent-{number}", 10, new=4, priority=0)
        sim.run()
        return sim.started.index("patient")

    assert place(1000.0) == 100
    assert 5 < place(0.2) < 30


def test_the_least_urgent_request_is_preempted_first() -> None:
    sim = simulation(max_num_requests=4, num_blocks=8)
    first = sim.at(0.0, "patient", 16, new=60, priority=5)
    second = sim.at(0.01, "urgent", 16, new=60, priority=0)
    sim.run()
    assert first.num_preemptions > 0
    assert second.num_preemptions == 0


def test_a_large_request_at_the_head_neither_blocks_small_ones_nor_starves() -> None:
    sim = simulation(max_num_requests=8, num_blocks=12)
    sim.schedule.max_overtakes = 10
    sim.at(0.0, "holder", 80, new=80)
    sim.at(0.02, "large", 160, new=10, priority=-3)
    for number in range(40):
        sim.at(0.03, f"small-{number}", 8, new=2)
    sim.run()
    assert "large" in sim.times
    assert sim.started.index("large") == 11  # after the holder and ten that passed


# -- cached prefixes -------------------------------------------------------------------------------------------------
def test_the_longest_cached_share_starts_first_and_ageing_bounds_who_is_passed() -> None:
    def order(ageing_s: float) -> list[str]:
        cached = {"none": 0, "half": 50, "all": 99}
        sim = simulation("cached_prefix", ageing_s, num_cached=lambda r: cached.get(r.request_id, 0))
        sim.at(0.0, "first", 10, new=30)
        for place, name in enumerate(("none", "half", "all")):
            sim.at(0.01 + 0.1 * place, name, 100, new=1)
        sim.run()
        return sim.started[1:]

    assert order(10.0) == ["all", "half", "none"]
    assert order(0.05) == ["none", "half", "all"]


def test_without_a_cache_the_order_is_that_of_arrival_and_describe_says_so() -> None:
    with build_tiny(plugins=["request_order:policy=cached_prefix"]) as pipe:
        text = str(pipe.describe())
        if not hasattr(pipe.lookup, "num_cached"):
            assert "no cache is listed: order of arrival" in text


def test_the_lookup_stage_is_asked_for_the_cached_prefix_when_it_knows() -> None:
    asked = []

    class Knows:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, request: Any) -> Any:
            return self.inner(request)

        def num_cached(self, request: Any) -> int:
            asked.append(request.request_id)
            return 0

    with build_tiny(plugins=[wrap("lookup", Knows), RequestOrder(policy="cached_prefix")]) as pipe:
        pipe.batch([{"prompt": [5, 6], "request_id": n} for n in "abc"], max_new_tokens=2, progress=False)
    assert set(asked) == {"a", "b", "c"}


# -- tenants ---------------------------------------------------------------------------------------------------------
def tokens_of(sim: Simulation, tenants: dict[str, str], until_s: float) -> dict[str, int]:
    served: dict[str, int] = {}
    for name, times in sim.times.items():
        tenant = tenants[name]
        served[tenant] = served.get(tenant, 0) + sum(t <= until_s for t in times)
    return served


@pytest.mark.parametrize("fair", [True, False])
def test_a_tenant_with_few_requests_is_not_buried_under_one_with_many(fair: bool) -> None:
    sim = simulation("fcfs", fair=fair, max_num_requests=4)
    tenants = {}
    for number in range(200):
        tenants[sim.at(0.0, f"loud-{number}", 20, new=10, tenant="loud").request_id] = "loud"
    for number in range(50):
        tenants[sim.at(0.05, f"quiet-{number}", 20, new=10, tenant="quiet").request_id] = "quiet"
    sim.run()
    end = max(times[-1] for name, times in sim.times.items() if tenants[name] == "quiet")
    served = tokens_of(sim, tenants, end)
    if fair:
        assert served["quiet"] == pytest.approx(served["loud"], rel=0.15)
    else:
        assert served["loud"] == 2000  # all of them came first


def test_shares_are_tokens_and_not_requests() -> None:
    sim = simulation("fcfs", fair=True, max_num_requests=2)
    tenants = {}
    for number in range(120):
        tenants[sim.at(0.0, f"long-{number}", 100, new=40, tenant="long").request_id] = "long"
        tenants[sim.at(0.0, f"short-{number}", 10, new=4, tenant="short").request_id] = "short"
    sim.run()
    end = max(times[-1] for name, times in sim.times.items() if tenants[name] == "short")
    work = {"long": 0.0, "short": 0.0}
    for name, times in sim.times.items():
        if times[0] <= end:
            work[tenants[name]] += (100 if tenants[name] == "long" else 10) + 2 * sum(t <= end for t in times)
    assert work["long"] == pytest.approx(work["short"], rel=0.2)


def test_a_tenant_that_comes_late_has_no_claim_for_the_time_before() -> None:
    sim = simulation("fcfs", fair=True, max_num_requests=2)
    tenants = {}
    for number in range(150):
        tenants[sim.at(0.0, f"early-{number}", 20, new=10, tenant="early").request_id] = "early"
    for number in range(50):
        tenants[sim.at(3.0, f"late-{number}", 20, new=10, tenant="late").request_id] = "late"
    sim.run()
    started = [name.split("-")[0] for name in sim.started[sim.started.index("late-0") :]][:40]
    assert 17 <= started.count("early") <= 23


def test_requests_of_one_tenant_keep_their_priorities() -> None:
    sim = simulation("priority", fair=True)
    sim.at(0.0, "first", 10, new=3)
    for name, tenant, priority in (("a1", "a", 1), ("a0", "a", 0), ("b1", "b", 1), ("b0", "b", 0)):
        sim.at(0.01, name, 10, new=3, tenant=tenant, priority=priority)
    sim.run()
    assert sim.started.index("a0") < sim.started.index("a1")
    assert sim.started.index("b0") < sim.started.index("b1")
    assert {name[0] for name in sim.started[1:3]} == {"a", "b"}


def test_a_long_line_of_many_tenants_is_put_in_order_quickly() -> None:
    sim = simulation("priority", fair=True)
    chooser = random.Random(1)
    for number in range(2000):
        tenant = f"t{chooser.randrange(20)}"
        sim.queue.add(sim.at(0.0, str(number), 5, new=2, tenant=tenant, priority=chooser.randrange(3)))
    sim.order(sim.queue)
    start = time.perf_counter()
    for _ in range(10):
        sim.order(sim.queue)  # nothing has changed
    assert time.perf_counter() - start < 0.005


# -- deadlines -------------------------------------------------------------------------------------------------------
def test_a_waiting_request_is_refused_as_soon_as_it_can_no_longer_end_in_time_and_not_before() -> None:
    sim = simulation("fcfs", deadlines=True)
    sim.at(0.0, "holder", 10, new=100, eos=[2])  # for about a second, but it may end at any time
    late = sim.at(0.1, "late", 90, new=10, deadline_s=0.5)
    patient = sim.at(0.1, "patient", 90, new=10, deadline_s=20.0)
    while not late.is_finished:
        assert sim.step()
    needed_s = 0.019 + 9 * 0.0101  # a prompt and nine tokens, alone
    assert sim.now == pytest.approx(0.1 + 0.5 - needed_s, abs=0.02)
    assert isinstance(late.error, DeadlineError)
    assert "deadline of 0.5 s" in str(late.error)
    sim.run()
    assert patient.finish_reason == "length"


def test_a_request_that_may_end_early_is_refused_only_when_even_its_first_token_comes_too_late() -> None:
    sim = simulation("fcfs", deadlines=True)
    sim.at(0.0, "holder", 10, new=20)
    hopeful = sim.at(0.1, "hopeful", 90, new=500, deadline_s=0.3, eos=[2])
    hopeless = sim.at(0.1, "hopeless", 90, new=500, deadline_s=0.3)
    sim.run()
    assert hopeful.finish_reason == "length"
    assert isinstance(hopeless.error, DeadlineError)


def test_who_must_wait_for_a_slot_that_comes_too_late_is_refused_at_once() -> None:
    sim = simulation("fcfs", deadlines=True)
    sim.at(0.0, "holder", 10, new=100)  # for about a second, and certainly
    late = sim.at(0.1, "late", 90, new=10, deadline_s=0.5)
    just = sim.at(0.1, "just", 90, new=10, deadline_s=1.5)
    while not late.is_finished:
        assert sim.step()
    assert sim.now < 0.15
    sim.run()
    assert just.finish_reason == "length"
    assert sim.times["just"][-1] <= 0.1 + 1.5


def test_prompts_ahead_count_and_requests_that_end_in_time_are_not_refused() -> None:
    sim = simulation("fcfs", deadlines=True, max_num_requests=64, max_tokens_per_step=1000)
    sim.cost.max_tokens = 1000  # 0.11 s
    for number in range(4):
        sim.at(0.0, f"long-{number}", 1000, new=2)
    late = sim.at(0.001, "late", 900, new=2, deadline_s=0.4)  # four steps of prompts come before its own
    tight = sim.at(0.001, "tight", 900, new=2, deadline_s=0.75)
    sim.run()
    assert isinstance(late.error, DeadlineError)
    assert tight.finish_reason == "length"
    assert sim.times["tight"][-1] <= 0.001 + 0.75


def test_what_runs_beside_a_request_makes_its_steps_longer() -> None:
    class PerRow(LinearCost):
        token_s = 0.01

    ends = []
    for others in (0, 9):
        sim = simulation("fcfs", deadlines=True, max_num_requests=64)
        sim.cost = PerRow()
        sim.order.cost = sim.cost
        for number in range(others):
            sim.at(0.0, f"runs-{number}", 2, new=200)
        asked = sim.at(0.05, "asked", 2, new=20, deadline_s=1.0)  # 0.4 s alone, 2 s in company
        sim.run()
        ends.append(asked.error)
    assert ends[0] is None
    assert isinstance(ends[1], DeadlineError)


def test_who_runs_already_is_not_refused() -> None:
    sim = simulation("fcfs", deadlines=True)
    made = sim.at(0.0, "runs", 10, new=50, deadline_s=0.3, eos=[2])
    sim.run()
    assert made.finish_reason == "length"


def test_the_caller_gets_the_error_of_a_refused_request_and_others_go_on() -> None:
    class Slow(LinearCost):
        base_s = 30.0

    def order(inner: Any) -> Any:
        return PolicyOrder(inner, "fcfs", 10.0, cost=Slow())  # type: ignore[arg-type]

    with build_tiny(plugins=[wrap("order", order)]) as pipe:
        wanted = alone(pipe, [5, 6, 7], max_new_tokens=3)
        good, bad = pipe.batch([[5, 6, 7], {"prompt": [8, 9], "deadline_s": 10}], max_new_tokens=3, progress=False)
        assert good.token_ids == wanted
        assert isinstance(bad.error, DeadlineError)
        with pytest.raises(DeadlineError, match=r"takes at least .* with the work before it"):
            pipe.submit([5, 6], max_new_tokens=3, deadline_s=5.0).result(timeout_s=20)
        assert_idle(pipe)


def test_of_refused_requests_nothing_is_kept() -> None:
    with build_tiny(plugins=["prefix_cache", "request_order:deadlines=refuse"]) as pipe:
        late = [{"prompt": [5 + n] * 40, "deadline_s": 1e-9} for n in range(4)]
        outputs = pipe.batch([*late, [5] * 40], max_new_tokens=3, progress=False)
        assert [o.finish_reason for o in outputs] == ["error"] * 4 + ["length"]
        (cache,) = (s for s in pipe.registry.chains["lookup"].objects if hasattr(s, "index"))
        assert not cache.index.chains
        assert_idle(pipe)


# -- together --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plugins", [
    ["request_order"], ["request_order:policy=cached_prefix,fair=true"],
    ["paged_kv", "request_order:fair=true,deadlines=refuse", "chunked_prefill", "batch_window", "pd_separation"],
    ["pd_separation:slice_ms=0.01", "batch_window:min_batch=3", "chunked_prefill:chunk_size=5", "request_order"],
])  # fmt: skip
def test_tokens_are_those_of_the_model_in_any_order(plugins: list[str]) -> None:
    model = tiny_model()
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "pool_bytes": pool_bytes(60, 4)}
    prompts = tiny_prompts(8, min_length=1, max_length=40)
    with llmopt.build(model, plugins, **options) as pipe:
        assert_same_tokens(pipe, model, prompts, max_new_tokens=16)
        with llmopt.build(model, **options) as plain:
            wanted = [alone(plain, prompt, max_new_tokens=10, temperature=1.0, seed=3) for prompt in prompts]
        requests = [{"prompt": p, "priority": i % 3, "tenant": "ab"[i % 2]} for i, p in enumerate(prompts)]
        outputs = pipe.batch(requests, max_new_tokens=10, temperature=1.0, seed=3, progress=False)
        assert [o.token_ids for o in outputs] == wanted
        assert_idle(pipe)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "random"}, 'policy is "fcfs", "priority" or "cached_prefix"'),
        ({"ageing_s": float("inf")}, "ageing_s is a number of seconds above 0"),  # times priority 0 it is no number
        ({"ageing_s": 0}, "ageing_s is a number of seconds above 0"),
        ({"fair": "yes"}, "fair is True or False"),
        ({"deadlines": "ignore"}, 'deadlines is "refuse" or None'),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RequestOrder(**options)
