"""How turns are taken and figures compared, with contestants that only pretend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup
from benchmarks.contestants import FRESH, SHARED, Contestant
from benchmarks.contestants.contestant import NotOffered, intervals
from benchmarks.measurements import Effort, Measurement, run
from benchmarks.rounds import Cell, measure, seat_all

from benchmarks import report

RUN = Measurement("run", "a run", "ms", 1e3, run, rounds=3, quick_rounds=1, pause_s=0, warms_up=False)


class Pretender:
    """Runs in no time and notes its turns; breaks where told."""

    measures: frozenset[str] | None = None

    def __init__(self, name: str, turns: list[str] | None = None, breaks: str = "") -> None:
        self.name = name
        self.breaks = breaks
        self._turns = turns if turns is not None else []
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> object:
        if self.breaks == "opening":
            raise NotOffered("is not installed")
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        assert self._group is not None
        return await self._group.__aexit__(*exc_info)

    async def run(self) -> float:
        self._turns.append(self.name)
        if self.breaks == "run":
            raise ValueError("went wrong")
        if self.breaks == "background":
            assert self._group is not None
            self._group.start_soon(self._fail)
            await anyio.sleep_forever()
        return 0.002

    async def _fail(self) -> None:
        raise RuntimeError("its own task died")


def race(contestants: Sequence[Pretender], measurement: Measurement = RUN, rounds: int = 3) -> dict[str, Cell]:
    """Measure and return each contestant's cell."""

    async def main() -> list[Cell]:
        async with anyio.create_task_group() as group:
            seats = await seat_all(cast("Sequence[Contestant]", contestants), group)
            cells = await measure(measurement, seats, Effort(), rounds)
            for seat in seats:
                seat.close()
        return cells

    return {cell.contestant: cell for cell in anyio.run(main)}


def test_everybody_has_one_turn_per_round_and_another_one_starts_each_time() -> None:
    turns: list[str] = []

    cells = race([Pretender(name, turns) for name in "abc"])

    assert turns == [*"abc", *"bca", *"cab"]
    assert all(cell.samples == [0.002] * 3 for cell in cells.values())


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        ("opening", "is not installed"),
        ("run", "ValueError: went wrong"),
        ("background", "RuntimeError: its own task died"),
    ],
)
def test_a_contestant_that_breaks_is_reported_and_the_others_go_on(breaks: str, problem: str) -> None:
    cells = race([Pretender("good"), Pretender("broken", breaks=breaks), Pretender("last")])

    assert cells["broken"].problem == problem
    assert cells["broken"].samples == []
    assert len(cells["good"].samples) == len(cells["last"].samples) == 3


def test_a_warm_up_round_leaves_no_samples() -> None:
    turns: list[str] = []

    cells = race([Pretender("a", turns)], replace(RUN, warms_up=True))

    assert len(turns) == 4
    assert len(cells["a"].samples) == 3


def test_who_has_used_the_time_up_stops_and_keeps_what_was_measured() -> None:
    cells = race([Pretender("a")], replace(RUN, warms_up=True, budget_s=0.0))

    assert cells["a"].samples == [0.002]


def test_a_contestant_takes_part_only_where_it_says_so() -> None:
    elsewhere = Pretender("elsewhere")
    elsewhere.measures = frozenset({"cold"})

    assert set(race([Pretender("a"), elsewhere])) == {"a"}


def test_round_trips_are_the_times_between_calls_and_a_lost_call_is_refused() -> None:
    assert intervals([1.0, 1.5, 3.0], 3) == [0.5, 1.5]
    with pytest.raises(Exception, match="returned 3, not 4"):
        intervals([1.0, 1.5, 3.0], 4)


def test_ratios_compare_medians_with_both_montys() -> None:
    cells = [Cell("ours", [0.001, 0.002, 0.009]), Cell(FRESH, [0.004]), Cell(SHARED, [0.001])]

    group = report.row_group(RUN, Effort(), cells, took_s=1.0)

    ours = group["contestants"]["ours"]
    assert (ours["p50"], ours["p95"]) == (2.0, 9.0)
    assert (ours["to_fresh_monty"], ours["to_shared_monty"]) == (0.5, 2.0)


def test_without_monty_there_are_figures_and_no_ratios() -> None:
    group = report.row_group(RUN, Effort(), [Cell("ours", [0.001]), Cell(FRESH, problem="not installed")], took_s=1.0)

    assert group["contestants"]["ours"]["p50"] == 1.0
    assert "to_fresh_monty" not in group["contestants"]["ours"]
    assert group["contestants"][FRESH] == {"problem": "not installed"}


@pytest.mark.parametrize(("rate", "met"), [(300.0, True), (100.0, False)])
def test_a_target_that_is_a_floor_is_met_from_above(rate: float, met: bool) -> None:
    throughput = replace(RUN, key="throughput", scale=1.0, more_is_better=True)
    cells = [Cell(report.LOADED, [rate]), Cell(FRESH, [200.0])]

    (judged,) = report.judge({"throughput": report.row_group(throughput, Effort(), cells, took_s=1.0)})

    assert (judged["got"], judged["met"]) == (rate / 200, met)


@pytest.mark.parametrize(("value", "shown"), [(0.12345, "0.123"), (4.567, "4.57"), (45.67, "45.7"), (5370.4, "5,370")])
def test_figures_are_shown_with_three_digits(value: float, shown: str) -> None:
    assert report.figure(value) == shown
