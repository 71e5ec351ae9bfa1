"""Admission: never above the limits, nobody starves, and nothing is lost when requests give up."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell import PoolConfig, Runtime, SandboxUnavailable
from toolcell.errors import UsageError
from toolcell.service import admission as admission_module
from toolcell.service.admission import (
    LARGE_BURST_S,
    LARGE_SHARE,
    LONGEST_RETRY_S,
    QUIET_S,
    Admission,
    FairQueue,
    Share,
    Ticket,
    Waiter,
)
from toolcell.service.problems import Problem
from toolcell.service.tenants import TenantSessions
from toolcell.sessions import Session
from toolcell.testing import FakeBackend

pytestmark = pytest.mark.quick

TENANTS = ("a", "b", "c")


def share_of(places: int, waiting: int) -> Any:
    return lambda tenant: Share(places, waiting)


class Requests:
    """Requests that a test makes of a queue, and what they were told."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue, self.all, self.now = queue, list[Waiter](), 0.0
        self.told: Counter[int] = Counter()

    def join(self, tenant: str) -> Waiter:
        waiter = Waiter(tenant, lambda: self.told.update([id(waiter)]))
        self.all.append(waiter)
        self.queue.join(waiter, self.now)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        self.now += 1
        self.queue.leave(waiter, self.now)

    def of(self, ticket: Ticket, tenant: str | None = None) -> list[Waiter]:
        return [each for each in self.all if each.ticket is ticket and tenant in (None, each.tenant)]


@given(
    places=st.integers(1, 4),
    capacity=st.integers(0, 6),
    share=st.builds(Share, st.integers(1, 4), st.integers(0, 6)),
    steps=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 99)), max_size=80),
)
def test_whatever_comes_and_goes_the_limits_hold_and_no_place_is_lost(
    places: int, capacity: int, share: Share, steps: list[tuple[str, int]]
) -> None:
    queue = FairQueue(places, capacity, lambda tenant: share)
    requests = Requests(queue)
    for tenant, choice in steps:
        present = requests.of(Ticket.RUNS) + requests.of(Ticket.WAITS)
        if present and choice >= 50:
            requests.leave(present[choice % len(present)])
        else:
            requests.join(tenant)
        running, waiting = requests.of(Ticket.RUNS), requests.of(Ticket.WAITS)
        assert (len(running), len(waiting)) == (queue.running, queue.waiting)
        assert queue.running <= places and queue.waiting <= capacity
        for each in TENANTS:
            counts = len(requests.of(Ticket.RUNS, each)), len(requests.of(Ticket.WAITS, each))
            assert counts == queue.counts(each)
            assert counts[0] <= share.places and counts[1] <= share.waiting
            assert not (counts[1] and queue.running < places and counts[0] < share.places), "a place is kept free"
        assert 1 <= queue.retry_after_s("a", requests.now) <= LONGEST_RETRY_S
    assert max(requests.told.values(), default=0) <= 1
    for each in requests.all:
        requests.leave(each)
    assert (queue.running, queue.waiting, queue._lines) == (0, 0, {})


@given(greedy=st.integers(1, 60), places=st.integers(1, 4), modest=st.integers(1, 3))
def test_no_tenant_waits_longer_than_its_turn(greedy: int, places: int, modest: int) -> None:
    queue = FairQueue(places, 200, share_of(places, 200))
    requests = Requests(queue)
    for _ in range(greedy + places):
        requests.join("greedy")
    late = [requests.join("modest") for _ in range(modest)]

    for served in range(1, 2 * modest + 1):
        for running in requests.of(Ticket.RUNS)[:1]:
            requests.leave(running)
        assert sum(each.ticket is not Ticket.WAITS for each in late) >= min(served // 2, modest)


def test_a_full_queue_loses_the_newest_of_the_longest_line() -> None:
    queue = FairQueue(1, 4, share_of(1, 4))
    requests = Requests(queue)
    greedy = [requests.join("greedy") for _ in range(5)]
    own = requests.join("modest")

    assert [each.ticket for each in greedy] == [Ticket.RUNS, *[Ticket.WAITS] * 3, Ticket.REFUSED]
    assert requests.told[id(greedy[4])] == 1
    assert own.ticket is Ticket.WAITS
    assert requests.join("greedy").ticket is Ticket.REFUSED


def test_the_answer_says_when_to_come_again_by_what_is_known() -> None:
    queue = FairQueue(2, 10, share_of(2, 10))
    requests = Requests(queue)
    first = [requests.join("a") for _ in range(2)]
    assert queue.retry_after_s("a", requests.now) == 1, "nothing is known yet"
    requests.now = 9
    requests.leave(first[0])  # held for 10 s
    for _ in range(5):
        requests.join("a")

    assert queue.counts("a") == (2, 4)
    assert queue.retry_after_s("a", requests.now) == 30  # 6 before it, 2 at once, 10 s each
    assert queue.retry_after_s("b", requests.now) == 30


@pytest.fixture
def one_place() -> Admission:
    return Admission(1, 8, share_of(1, 8))


def test_a_tenant_whose_large_data_took_its_allowance_waits_while_others_are_served() -> None:
    queue = FairQueue(4, 20, share_of(4, 20))
    requests = Requests(queue)
    for _ in range(3):  # alone, it does not wait
        queue.charge("a", LARGE_BURST_S, requests.now)
        requests.leave(requests.join("a"))
    assert len(requests.of(Ticket.GONE)) == 3

    polite = requests.join("b")
    held = [requests.join("a") for _ in range(2)]
    assert {each.ticket for each in held} == {Ticket.WAITS} and requests.join("b").ticket is Ticket.RUNS
    assert queue.retry_after_s("a", requests.now) == LONGEST_RETRY_S

    requests.leave(polite)
    for running in requests.of(Ticket.RUNS, "b"):
        requests.leave(running)
    assert {each.ticket for each in held} == {Ticket.WAITS}, "the next request of b is expected"
    queue.hand_out(requests.now + QUIET_S)
    assert {each.ticket for each in held} == {Ticket.RUNS}


def test_who_had_a_place_while_its_body_was_read_waits_for_a_place_alone() -> None:
    queue = FairQueue(2, 20, share_of(2, 20))
    requests = Requests(queue)
    polite = requests.join("b")
    queue.charge("a", 2 * LARGE_BURST_S, requests.now)
    before = requests.join("a")
    read = [Waiter("a", lambda: None, was_served=True, ignores_debt=True) for _ in range(2)]
    for each in read:
        queue.join(each, requests.now)

    assert [each.ticket for each in (before, *read)] == [Ticket.WAITS, Ticket.RUNS, Ticket.WAITS]
    requests.leave(polite)
    assert [each.ticket for each in (before, *read)] == [Ticket.WAITS, Ticket.RUNS, Ticket.RUNS]


def test_a_request_that_ignores_its_tenants_debt_is_served_after_those_that_came_before_it() -> None:
    queue = FairQueue(1, 20, share_of(1, 20))
    requests = Requests(queue)
    running = requests.join("a")
    small, *large = [Waiter("a", lambda: None, ignores_debt=is_large) for is_large in (False, True, True)]
    for each in (small, *large):
        queue.join(each, requests.now)
    for each in (small, *large):
        requests.leave(running)
        assert each.ticket is Ticket.RUNS
        running = each


def test_a_request_that_ignores_its_tenants_debt_does_not_wait_because_of_it() -> None:
    queue = FairQueue(3, 20, share_of(3, 20))
    requests = Requests(queue)
    requests.join("b")
    queue.charge("a", 2 * LARGE_BURST_S, requests.now)
    large = Waiter("a", lambda: None, ignores_debt=True)
    queue.join(large, requests.now)
    assert [large.ticket, requests.join("a").ticket] == [Ticket.RUNS, Ticket.WAITS]


def test_the_allowance_comes_back_with_time() -> None:
    queue = FairQueue(4, 20, share_of(4, 20))
    requests = Requests(queue)
    requests.join("b")
    queue.charge("a", LARGE_BURST_S, requests.now)
    assert requests.join("a").ticket is Ticket.RUNS, "it has taken its allowance, and no more"
    queue.charge("a", 0.1, requests.now)
    held = requests.join("a")
    queue.hand_out(requests.now + 0.09 / LARGE_SHARE)
    assert held.ticket is Ticket.WAITS
    queue.hand_out(requests.now + 0.11 / LARGE_SHARE)
    assert held.ticket is Ticket.RUNS


@pytest.mark.parametrize("step_s", [0.5, 40.0], ids=["often", "seldom"])
def test_who_has_overspent_is_not_held_up_by_others_who_have(step_s: float) -> None:
    queue = FairQueue(1, 20, share_of(1, 20))
    requests = Requests(queue)
    for tenant in TENANTS:
        queue.charge(tenant, 1_000, 0.0)
    served = Counter[str]()
    for turn in range(30):
        requests.now += step_s
        requests.join(TENANTS[turn % 3])
        for running in requests.of(Ticket.RUNS):
            served[running.tenant] += 1
            requests.leave(running)
    assert served == dict.fromkeys(TENANTS, 10)


def test_who_only_comes_and_goes_is_not_served() -> None:
    queue = FairQueue(1, 0, share_of(1, 0))
    requests = Requests(queue)
    queue.charge("a", LARGE_BURST_S + 1, 0.0)
    running = requests.join("a")
    assert requests.join("b").ticket is Ticket.REFUSED
    requests.leave(running)
    assert requests.join("a").ticket is Ticket.RUNS


def test_who_owes_nothing_any_more_is_forgotten() -> None:
    queue = FairQueue(1, 0, share_of(1, 0))
    requests = Requests(queue)
    for number in range(100):
        requests.now += 1 + QUIET_S
        queue.charge(f"t{number}", 0.01, requests.now)
        requests.leave(requests.join(f"t{number}"))
    assert len(queue.large) + len(queue._seen) <= 4


@pytest.mark.anyio
async def test_one_look_is_for_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "LOOK_S", 0.01)
    admission, looks = Admission(50, 100, share_of(2, 10)), list[float]()
    hand_out = admission.queue.hand_out
    monkeypatch.setattr(admission.queue, "hand_out", lambda now: (looks.append(now), hand_out(now)))
    async with admission.slot("polite"), anyio.create_task_group() as tasks:
        for number in range(40):
            admission.queue.charge(f"t{number}", 1_000, time.monotonic())
            tasks.start_soon(hold, admission, f"t{number}", anyio.Event(), anyio.Event())
        await until(lambda: len(looks) > 8)
        assert all(later - one > 0.009 for one, later in pairwise(looks))
        assert admission.queue.waiting == 40
        tasks.cancel_scope.cancel()


async def hold(admission: Admission, tenant: str, held: anyio.Event, let_go: anyio.Event) -> None:
    async with admission.slot(tenant):
        held.set()
        await let_go.wait()


async def until(condition: Any) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_who_waits_gets_the_place_when_it_is_given_back(one_place: Admission) -> None:
    held, let_go, second, end = (anyio.Event() for _ in range(4))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, one_place, "a", held, let_go)
        await held.wait()
        tasks.start_soon(hold, one_place, "b", second, end)
        await until(lambda: one_place.queue.waiting == 1)
        assert not second.is_set()
        let_go.set()
        with anyio.fail_after(60):
            await second.wait()
        end.set()
    assert (one_place.queue.running, one_place.queue.waiting) == (0, 0)


@pytest.mark.anyio
async def test_a_deadline_and_a_full_queue_are_answered_with_503() -> None:
    slow, full = (Admission(1, size, lambda tenant: Share(1, 8, queue_s=0.01)) for size in (1, 0))
    for admission, says in ((slow, "before the deadline"), (full, "the queue is full")):
        async with admission.slot("a"):
            with pytest.raises(Problem) as caught:
                async with admission.slot("b"):
                    pass
        assert caught.value.status == 503 and says in caught.value.detail
        assert int(caught.value.headers["Retry-After"]) >= 1
        assert (admission.queue.running, admission.queue.waiting) == (0, 0)


@pytest.mark.anyio
async def test_what_is_pushed_out_of_a_full_queue_is_answered_at_once() -> None:
    admission, answers = Admission(1, 2, share_of(1, 8)), list[int]()

    async def ask(tenant: str) -> None:
        try:
            async with admission.slot(tenant):
                pass
        except Problem as problem:
            answers.append(problem.status)

    async with admission.slot("a"), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "a")
        tasks.start_soon(ask, "a")
        await until(lambda: admission.queue.waiting == 2)
        tasks.start_soon(ask, "b")
        await until(lambda: answers)
        assert answers == [503]
        assert admission.queue.counts("b") == (0, 1)
        tasks.cancel_scope.cancel()
    assert (admission.queue.running, admission.queue.waiting) == (0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("is_given", [False, True], ids=["while it waits", "just as it gets its place"])
async def test_a_request_that_gives_up_loses_no_place(one_place: Admission, is_given: bool) -> None:
    held, let_go, never = anyio.Event(), anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, one_place, "a", held, let_go)
        await held.wait()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(hold, one_place, "b", anyio.Event(), never)
                await until(lambda: one_place.queue.waiting == 1)
                if is_given:
                    let_go.set()
                    await until(lambda: one_place.queue.counts("b") == (1, 0))
                scope.cancel()
        let_go.set()
    assert (one_place.queue.running, one_place.queue.waiting) == (0, 0)
    async with one_place.slot("c"):
        assert one_place.queue.running == 1


@pytest.mark.anyio
async def test_many_tasks_under_load_never_pass_the_limits_and_all_are_answered() -> None:
    admission = Admission(4, 1000, share_of(2, 1000))
    now, most, done = Counter[str](), Counter[str](), Counter[str]()

    async def ask(tenant: str) -> None:
        async with admission.slot(tenant):
            now.update([tenant, "all"])
            for each in (tenant, "all"):
                most[each] = max(most[each], now[each])
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            now.subtract([tenant, "all"])
        done.update([tenant])

    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            for tenant in TENANTS:
                tasks.start_soon(ask, tenant)
    assert done == dict.fromkeys(TENANTS, 60)
    assert most["all"] == 4 and max(most[each] for each in TENANTS) == 2


def test_an_admission_without_places_is_refused() -> None:
    with pytest.raises(UsageError):
        Admission(0, 1, share_of(1, 1))


@pytest.mark.anyio
async def test_sessions_that_are_being_opened_count_and_those_that_failed_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, open_session, refusals = anyio.Event(), Session.open, list[str]()

    async def fail(_: Session) -> Session:
        raise SandboxUnavailable("no room on this machine")

    async def wait(session: Session) -> Session:
        await goes_on.wait()
        return await open_session(session)

    async with Runtime(backend=FakeBackend(), allow_unisolated=True, pool=PoolConfig(warm=0)) as runtime:
        sessions = TenantSessions(runtime, 2)

        async def create() -> None:
            try:
                await sessions.create(None, {})
            except Problem as exc:
                refusals.append(exc.code)

        monkeypatch.setattr(Session, "open", fail)
        for _ in range(5):
            with pytest.raises(SandboxUnavailable):
                await sessions.create(None, {})
        monkeypatch.setattr(Session, "open", wait)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(create)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        assert (sessions.open_count, refusals) == (2, ["too_many_sessions"] * 3)
        for name, _ in await sessions.list():
            await sessions.forget(name)
        sessions.lend()
        await create()
        await create()
        assert (sessions.open_count, len(refusals)) == (2, 4)
