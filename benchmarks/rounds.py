"""Takes turns: every contestant once per round, so that whatever disturbs the machine disturbs all alike.

Each contestant lives in a task of its own: one that breaks, even as a whole, leaves the others in the race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from benchmarks.contestants import Contestant
from benchmarks.contestants.contestant import NotOffered
from benchmarks.measurements import Effort, Measurement

TURN_S = 90.0
"""A turn that takes longer is given up."""


@dataclass(slots=True)
class Cell:
    """One contestant's part in one measurement."""

    contestant: str
    samples: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    problem: str | None = None


@dataclass(slots=True)
class _Request:
    measurement: Measurement
    effort: Effort
    done: anyio.Event = field(default_factory=anyio.Event)
    samples: list[float] = field(default_factory=list)
    problem: str | None = None


class Seat:
    """Keeps one contestant open and hands it one turn at a time."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.problem: str | None = None
        """Why it is out of the race altogether."""
        self._send, self._requests = anyio.create_memory_object_stream[_Request](1)

    @property
    def name(self) -> str:
        return self.contestant.name

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """The contestant's whole life; ends when the seat is closed."""
        current: list[_Request] = []
        is_open = False
        with self._requests:
            try:
                async with self.contestant:
                    is_open = True
                    task_status.started()
                    async for request in self._requests:
                        current[:] = [request]
                        await _take(request, self.contestant)
                        request.done.set()
            except Exception as exc:
                self.problem = told(exc)
                for request in current:
                    request.problem = request.problem or self.problem
                    request.done.set()
        if not is_open:
            task_status.started()

    async def turn(self, measurement: Measurement, effort: Effort) -> _Request:
        """Let it take one turn; comes back with samples or a problem."""
        request = _Request(measurement, effort, problem=self.problem)
        if self.problem is None:
            await self._send.send(request)
            await request.done.wait()
        return request

    def close(self) -> None:
        """No more turns."""
        self._send.close()


async def _take(request: _Request, contestant: Contestant) -> None:
    try:
        with anyio.fail_after(TURN_S):
            request.samples = await request.measurement.turn(contestant, request.effort)
    except Exception as exc:
        request.problem = told(exc)


def told(exc: BaseException) -> str:
    """One line about an exception, of a group its first member."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    line = " ".join(str(exc).split())[:200]
    return line if isinstance(exc, NotOffered) else f"{type(exc).__name__}: {line}"


async def seat_all(contestants: Sequence[Contestant], group: TaskGroup) -> list[Seat]:
    """Open every contestant, one after another."""
    seats = [Seat(contestant) for contestant in contestants]
    for seat in seats:
        await group.start(seat.serve)
    return seats


async def measure(
    measurement: Measurement,
    seats: Sequence[Seat],
    effort: Effort,
    rounds: int,
    on_turn: Callable[[int, str], None] = lambda done, name: None,
) -> list[Cell]:
    """Take `rounds` rounds; who starts moves on by one each time, so that nobody always follows the same neighbour."""
    cells = {seat.name: Cell(seat.name) for seat in seats if takes_part(seat, measurement)}
    racing = [seat for seat in seats if seat.name in cells]
    for number in range(rounds + measurement.warms_up):
        first = number % max(1, len(racing))
        for seat in (*racing[first:], *racing[:first]):
            cell = cells[seat.name]
            if may_go_on(cell, measurement):
                on_turn(number, seat.name)
                await anyio.sleep(measurement.pause_s)
                await _one_turn(cell, seat, measurement, effort, is_warm_up=number == 0 and measurement.warms_up)
    return list(cells.values())


async def _one_turn(cell: Cell, seat: Seat, measurement: Measurement, effort: Effort, is_warm_up: bool) -> None:
    start = time.perf_counter()
    answer = await seat.turn(measurement, effort)
    took = time.perf_counter() - start
    cell.problem = answer.problem
    # A turn so slow that the warm-up alone uses the budget is its own sample: a cold start is no part of it.
    if not is_warm_up or took > measurement.budget_s:
        cell.samples += answer.samples
        cell.spent_s += took


def may_go_on(cell: Cell, measurement: Measurement) -> bool:
    """False once a contestant has failed or used its time up."""
    return cell.problem is None and cell.spent_s <= measurement.budget_s


def takes_part(seat: Seat, measurement: Measurement) -> bool:
    """False when this measurement would show the same as another contestant's."""
    chosen = seat.contestant.measures
    return chosen is None or measurement.key in chosen
