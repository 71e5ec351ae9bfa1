"""What a user, tenant or agent may use in a time: never more, on every route, and refused with when it is free again."""

from __future__ import annotations

import math
import threading
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell import Quota, QuotaExceeded, Quotas, RunContext, ToolRegistry, UsageError
from toolcell.quotas import MAX_KEYS, SLOTS, Window

pytestmark = pytest.mark.quick

TIMES = st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 5)), max_size=40)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def context(quotas: Quotas, user: str = "ada", **fields: Any) -> RunContext:
    return RunContext(user_id=user, **fields).having(quotas)


def registry_of_one() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def echo(text: str = "") -> str:
        """Return the text that was given."""
        return text

    registry.enable_plan_execution()
    return registry


@given(steps=TIMES)
def test_a_window_never_forgets_what_is_younger_than_it_and_always_what_is_a_slot_older(
    steps: list[tuple[float, float]],
) -> None:
    window, now, log = Window(60.0), 500.0, list[tuple[float, float]]()
    for wait, amount in steps:
        now += wait
        used = window.used(now)
        assert used >= sum(each for at, each in log if now - at < 60.0) - 1e-6
        assert used <= sum(each for at, each in log if now - at <= 60.0 + 60.0 / SLOTS + 1e-6) + 1e-6
        window.add(now, amount)
        log.append((now, amount))


@given(steps=TIMES, limit=st.floats(0.5, 20))
def test_after_the_wait_that_is_named_there_is_room_again(steps: list[tuple[float, float]], limit: float) -> None:
    window, now = Window(60.0), 500.0
    for wait, amount in steps:
        now += wait
        window.add(now, amount)
        wait_s = window.free_in_s(now, limit)
        assert (wait_s == 0) == (window.used(now) < limit)
        assert wait_s <= 60.0 + 2 * 60.0 / SLOTS

    later = Window(60.0)
    for wait, amount in steps:
        later.add(wait, amount)
    assert later.used(30 + later.free_in_s(30, limit)) < limit + 1e-6


def test_each_key_has_a_quota_of_its_own_and_a_refusal_says_when_it_is_free_again() -> None:
    clock = Clock()
    quotas = Quotas(Quota(runs=2, per_s=60), clock=clock)
    for _ in range(2):
        quotas.begin_run(context(quotas))
    quotas.begin_run(context(quotas, "bob"))
    with pytest.raises(
        QuotaExceeded, match=r"the quota of 'ada' is used up: runs=2 in 60 s; free again in 6\d(\.\d)? s"
    ) as caught:
        quotas.begin_run(context(quotas))

    clock.now += caught.value.retry_after_s
    quotas.begin_run(context(quotas))
    assert quotas.used("ada") == {"runs": 1.0}


def test_cpu_time_is_counted_when_a_run_has_ended_and_refuses_the_next_run() -> None:
    clock = Clock()
    quotas = Quotas(lambda key: Quota(cpu_s=1 if key == "ada" else None), clock=clock)
    quotas.begin_run(context(quotas))
    quotas.end_run(context(quotas), 1.5)
    quotas.begin_run(context(quotas, "bob"))
    with pytest.raises(QuotaExceeded, match="cpu_s=1 in 3600 s"):
        quotas.begin_run(context(quotas))


def test_a_quota_of_nothing_is_never_free_again() -> None:
    quotas = Quotas(Quota(runs=0))
    with pytest.raises(QuotaExceeded, match="none is allowed") as caught:
        quotas.begin_run(context(quotas))
    assert caught.value.retry_after_s == math.inf


@each_row("route", ["call", "batch", "plan", "nested"])
def test_calls_are_counted_on_every_route(route: str) -> None:
    quotas, registry = Quotas(Quota(calls=3), by=lambda run: run.custom["tenant"]), registry_of_one()

    @registry.tool
    async def outer() -> list[str]:
        """Call another tool a few times."""
        return [(await registry.dispatch("echo", {"text": "x"})).text for _ in range(4)]

    async def main() -> list[str]:
        run = context(quotas, custom={"tenant": "acme"})
        match route:
            case "call":
                return [(await registry.dispatch("echo", {}, context=run)).message for _ in range(4)]
            case "batch":
                return [each.message for each in await registry.execute_batch([("echo", {})] * 4, context=run)]
            case "plan":
                steps = [{"tool": "echo", "args": {}}] * 4
                result = await registry.run_plan({"steps": steps}, run)
                return [row.get("error", "") for row in result.value]
            case _:
                return ["", *(await registry.dispatch("outer", {}, context=run)).value]

    answers = anyio.run(main)
    refused = [each for each in answers if "echo was not called: the quota of 'acme' is used up: calls=3" in each]
    assert len(refused) == (2 if route == "nested" else 1)  # `outer` is a call too


def test_a_refused_call_says_when_to_try_again_and_is_not_made() -> None:
    quotas, registry = Quotas(Quota(calls=0)), registry_of_one()

    async def main() -> Any:
        return await registry.dispatch("echo", {}, context=context(quotas))

    result = anyio.run(main)
    assert result.error.retryable and result.error.details["retry_after_s"] == math.inf


def test_a_key_that_cannot_be_found_refuses() -> None:
    quotas, registry = Quotas(Quota(calls=9), by=lambda run: run.custom["tenant"]), registry_of_one()

    async def main() -> Any:
        return await registry.dispatch("echo", {}, context=context(quotas))

    assert "cannot be found: KeyError: 'tenant'" in anyio.run(main).message
    with pytest.raises(UsageError, match="cannot be found"):
        quotas.begin_run(context(quotas))
    with pytest.raises(UsageError, match="must be a Quota, not 3"):
        Quotas(lambda key: 3).begin_run(context(quotas))  # type: ignore[arg-type, return-value]


@each_row(
    ("make", "said"),
    [
        (lambda: Quota(runs=-1), r"Quota\(runs\) must be a whole number of at least 0, not -1"),
        (lambda: Quota(calls=1.5), r"Quota\(calls\) must be a whole number"),
        (lambda: Quota(cpu_s=math.nan), r"Quota\(cpu_s\) must be a number of seconds"),
        (lambda: Quota(per_s=0), r"Quota\(per_s\) must be a number of seconds of at least 0.001, not 0"),
        (lambda: Quotas(3), "takes a Quota, or a function"),
        (lambda: Quotas(Quota(), by="secrets"), r"Quotas\(by\) is a field of RunContext"),
    ],
)
def test_what_is_no_quota_is_refused_with_its_value(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_threads_together_get_no_more_than_the_quota() -> None:
    quotas, taken = Quotas(Quota(runs=100)), list[int]()

    def take() -> None:
        for _ in range(50):
            try:
                quotas.begin_run(context(quotas))
                taken.append(1)
            except QuotaExceeded:
                pass

    threads = [threading.Thread(target=take) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) == 100


def test_however_many_keys_there_are_one_that_is_used_up_stays_so_and_the_idle_are_forgotten() -> None:
    clock = Clock()
    quotas = Quotas(Quota(runs=1, per_s=60), clock=clock)
    for number in range(MAX_KEYS - 1):
        quotas.begin_run(context(quotas, f"idle-{number}"))
    clock.now += 120
    quotas.begin_run(context(quotas, "ada"))
    quotas.begin_run(context(quotas, "bob"))  # for whom the idle are forgotten

    assert (quotas.used("idle-0"), quotas.used("ada")) == ({}, {"runs": 1})
    with pytest.raises(QuotaExceeded):
        quotas.begin_run(context(quotas, "ada"))
