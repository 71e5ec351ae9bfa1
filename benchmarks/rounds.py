"""Run the measurements in rounds: every competitor once per round, so that a disturbance hits all of them alike.

Each competitor is open in a task of its own. One that fails does not stop the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from benchmarks import own
from benchmarks.competitors import Competitor
from benchmarks.competitors.competitor import NotAvailable
from benchmarks.measurements import Measurement, Workload

MAX_TURN_S = 90.0
"""A turn that takes longer is a failure."""


@dataclass(slots=True)
class Series:
    """One competitor's samples of one measurement."""

    competitor: str
    samples: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    problem: str | None = None


@dataclass(slots=True)
class _Turn:
    measurement: Measurement
    workload: Workload
    done: anyio.Event = field(default_factory=anyio.Event)
    samples: list[float] = field(default_factory=list)
    problem: str | None = None


class CompetitorTask:
    """Keeps one competitor open and gives it one turn at a time."""

    def __init__(self, competitor: Competitor) -> None:
        self.competitor = competitor
        self.problem: str | None = None
        """Why the competitor cannot be measured any more."""
        self._send, self._turns = anyio.create_memory_object_stream[_Turn](1)

    @property
    def name(self) -> str:
        return self.competitor.name

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Open the competitor and serve turns until `close` is called."""
        current: list[_Turn] = []
        is_open = False
        with self._turns:
            try:
                async with self.competitor:
                    is_open = True
                    task_status.started()
                    async for turn in self._turns:
                        current[:] = [turn]
                        await _take(turn, self.competitor)
                        turn.done.set()
            except Exception as exc:
                self.problem = describe_error(exc)
                for turn in current:
                    turn.problem = turn.problem or self.problem
                    turn.done.set()
        if not is_open:
            task_status.started()

    async def turn(self, measurement: Measurement, workload: Workload) -> _Turn:
        """Take one turn, which has samples or a problem afterwards."""
        turn = _Turn(measurement, workload, problem=self.problem)
        if self.problem is None:
            await self._send.send(turn)
            await turn.done.wait()
        return turn

    def close(self) -> None:
        """End `serve`, which closes the competitor."""
        self._send.close()


async def _take(turn: _Turn, competitor: Competitor) -> None:
    try:
        with anyio.fail_after(MAX_TURN_S):
            turn.samples = await turn.measurement.turn(competitor, turn.workload)
    except Exception as exc:
        turn.problem = describe_error(exc)


def describe_error(exc: BaseException) -> str:
    """Describe an exception in one line. Of a group, describe the first member."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    line = " ".join(str(exc).split())[:200]
    return line if isinstance(exc, NotAvailable) else f"{type(exc).__name__}: {line}"


async def open_all(competitors: Sequence[Competitor], group: TaskGroup) -> list[CompetitorTask]:
    """Open every competitor, one after another."""
    tasks = [CompetitorTask(competitor) for competitor in competitors]
    for task in tasks:
        await group.start(task.serve)
    return tasks


async def measure(
    measurement: Measurement,
    tasks: Sequence[CompetitorTask],
    workload: Workload,
    rounds: int,
    on_turn: Callable[[int, str], None] = lambda number, name: None,
) -> list[Series]:
    """Take one measurement in `rounds` rounds.

    Each round starts with another competitor, so that nobody always follows the same one.
    """
    measured = [task for task in tasks if is_measured(task.competitor, measurement)]
    series = {task.name: Series(task.name) for task in measured}
    for number in range(rounds + measurement.warms_up):
        first = number % max(1, len(measured))
        for task in (*measured[first:], *measured[:first]):
            if has_time_left(series[task.name], measurement):
                on_turn(number, task.name)
                await anyio.sleep(measurement.pause_s)
                is_warm_up = number == 0 and measurement.warms_up
                await _one_turn(series[task.name], task, measurement, workload, is_warm_up)
    return list(series.values())


async def _one_turn(
    series: Series, task: CompetitorTask, measurement: Measurement, workload: Workload, is_warm_up: bool
) -> None:
    start = time.perf_counter()
    turn = await task.turn(measurement, workload)
    took_s = time.perf_counter() - start
    series.problem = turn.problem
    # A warm-up that uses the whole budget is a sample: there will be no other, and a cold start is a small part of it.
    if not is_warm_up or took_s > measurement.budget_s:
        series.samples += turn.samples
        series.spent_s += took_s


def has_time_left(series: Series, measurement: Measurement) -> bool:
    """True while the competitor has not failed and has not used its time budget."""
    return series.problem is None and series.spent_s <= measurement.budget_s


def is_measured(competitor: Competitor, measurement: Measurement) -> bool:
    """False when the competitor has no such thing, or when it would show the same as another competitor."""
    if measurement.is_own and not own.has(competitor):
        return False
    return competitor.measures is None or measurement.key in competitor.measures
