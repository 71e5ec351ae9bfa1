"""How turns are taken and figures are compared, with fake competitors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup
from benchmarks.__main__ import arguments, selected_competitors, selected_measurements
from benchmarks.compare import Medians, compare_row
from benchmarks.competitors import FRESH, SHARED, Competitor
from benchmarks.competitors.competitor import NotAvailable, intervals
from benchmarks.measurements import MEASUREMENTS, Measurement, Workload, run
from benchmarks.rounds import Series, measure, open_all

from benchmarks import processor_time, report

ROOT = Path(__file__).parents[2]
RUN = Measurement("run", "a run", "ms", 1e3, run, rounds=3, quick_rounds=1, pause_s=0, warms_up=False)


class FakeCompetitor:
    """Runs in no time, records its turns, and fails where `breaks` says."""

    measures: frozenset[str] | None = None

    def __init__(self, name: str, turns: list[str] | None = None, breaks: str = "") -> None:
        self.name = name
        self.breaks = breaks
        self._turns = turns if turns is not None else []
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> object:
        if self.breaks == "opening":
            raise NotAvailable("is not installed")
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        assert self._group is not None
        return await self._group.__aexit__(*exc_info)

    async def run(self) -> float:
        self._turns.append(self.name)
        if self.breaks == "run":
            raise ValueError("failed")
        if self.breaks == "background":
            assert self._group is not None
            self._group.start_soon(self._fail)
            await anyio.sleep_forever()
        return 0.002

    async def _fail(self) -> None:
        raise RuntimeError("its own task died")


def measure_all(
    competitors: Sequence[FakeCompetitor], measurement: Measurement = RUN, rounds: int = 3
) -> dict[str, Series]:
    """Measure, and return the series of each competitor."""

    async def main() -> list[Series]:
        async with anyio.create_task_group() as group:
            tasks = await open_all(cast("Sequence[Competitor]", competitors), group)
            series = await measure(measurement, tasks, Workload(), rounds)
            for task in tasks:
                task.close()
        return series

    return {series.competitor: series for series in anyio.run(main)}


def test_each_competitor_has_one_turn_per_round_and_another_one_starts_each_round() -> None:
    turns: list[str] = []

    series = measure_all([FakeCompetitor(name, turns) for name in "abc"])

    assert turns == [*"abc", *"bca", *"cab"]
    assert all(each.samples == [0.002] * 3 for each in series.values())


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        ("opening", "is not installed"),
        ("run", "ValueError: failed"),
        ("background", "RuntimeError: its own task died"),
    ],
)
def test_a_competitor_that_fails_is_reported_and_the_others_are_measured(breaks: str, problem: str) -> None:
    series = measure_all([FakeCompetitor("good"), FakeCompetitor("broken", breaks=breaks), FakeCompetitor("last")])

    assert series["broken"].problem == problem
    assert series["broken"].samples == []
    assert len(series["good"].samples) == len(series["last"].samples) == 3


def test_a_warm_up_round_leaves_no_samples() -> None:
    turns: list[str] = []

    series = measure_all([FakeCompetitor("a", turns)], replace(RUN, warms_up=True))

    assert len(turns) == 4
    assert len(series["a"].samples) == 3


def test_a_competitor_that_has_used_its_time_keeps_its_samples_and_gets_no_further_turn() -> None:
    series = measure_all([FakeCompetitor("a")], replace(RUN, warms_up=True, budget_s=0.0))

    assert series["a"].samples == [0.002]


def test_a_competitor_is_measured_only_in_the_measurements_that_it_lists() -> None:
    elsewhere = FakeCompetitor("elsewhere")
    elsewhere.measures = frozenset({"cold"})

    assert set(measure_all([FakeCompetitor("a"), elsewhere])) == {"a"}


def test_round_trips_are_the_times_between_calls_and_a_lost_call_is_refused() -> None:
    assert intervals([1.0, 1.5, 3.0], 3) == [0.5, 1.5]
    with pytest.raises(Exception, match="returned 3, not 4"):
        intervals([1.0, 1.5, 3.0], 4)


def test_ratios_compare_medians_with_both_montys() -> None:
    series = [Series("ours", [0.001, 0.002, 0.009]), Series(FRESH, [0.004]), Series(SHARED, [0.001])]

    group = report.row_group(RUN, Workload(), series, took_s=1.0)

    ours = group["competitors"]["ours"]
    assert (ours["p50"], ours["p95"]) == (2.0, 9.0)
    assert (ours["to_fresh_monty"], ours["to_shared_monty"]) == (0.5, 2.0)


def test_without_monty_there_are_figures_and_no_ratios() -> None:
    group = report.row_group(
        RUN, Workload(), [Series("ours", [0.001]), Series(FRESH, problem="not installed")], took_s=1.0
    )

    assert group["competitors"]["ours"]["p50"] == 1.0
    assert "to_fresh_monty" not in group["competitors"]["ours"]
    assert group["competitors"][FRESH] == {"problem": "not installed"}


@pytest.mark.parametrize(("rate", "met"), [(300.0, True), (100.0, False)])
def test_a_target_that_is_a_floor_is_met_from_above(rate: float, met: bool) -> None:
    throughput = replace(RUN, key="throughput", scale=1.0, more_is_better=True)
    series = [Series(report.LOADED, [rate]), Series(FRESH, [200.0])]

    (checked,) = report.check_targets({"throughput": report.row_group(throughput, Workload(), series, took_s=1.0)})

    assert (checked["got"], checked["met"]) == (rate / 200, met)


@pytest.mark.parametrize(("value", "shown"), [(0.12345, "0.123"), (4.567, "4.57"), (45.67, "45.7"), (5370.4, "5,370")])
def test_figures_are_shown_with_three_digits(value: float, shown: str) -> None:
    assert report.figure(value) == shown


def medians(*values: float) -> list[Medians]:
    return [{"run": value} for value in values]


@pytest.mark.parametrize(
    ("before", "after", "more_is_better", "change"),
    [
        ((1.0, 2.0, 4.0), (0.8, 1.6, 3.2), False, "better"),
        ((1.0, 2.0, 4.0), (1.2, 2.4, 4.8), False, "worse"),
        ((1.0, 2.0, 4.0), (1.2, 2.4, 4.8), True, "better"),
        ((1.0, 2.0, 4.0), (1.02, 2.04, 4.08), False, "same"),
        ((1.0, 1.0, 1.0), (0.5, 1.1, 1.5), False, "same"),
    ],
)
def test_trees_are_compared_round_by_round_and_a_change_must_be_larger_than_the_noise(
    before: Sequence[float], after: Sequence[float], more_is_better: bool, change: str
) -> None:
    row = compare_row(replace(RUN, more_is_better=more_is_better), medians(*before), medians(*after))

    assert row.change == change
    assert row.low <= row.ratio <= row.high


def test_processor_time_is_that_of_processes_that_have_ended_too() -> None:
    before = processor_time.seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert processor_time.seconds() - before > 0.02


def test_the_tables_of_figures_name_their_rows_as_the_command_prints_them() -> None:
    workload = asdict(Workload(clients=4))
    printed = {f"{each.title.format_map(workload)}, {each.unit}" for each in MEASUREMENTS}

    for page in ("README.md", "docs/benchmarks.md"):
        after = (ROOT / page).read_text().partition("| Median")[2].partition("\n\n")[0]
        rows = [line.split("|")[1].strip() for line in after.splitlines()[2:]]
        assert len(rows) >= 3
        assert set(rows) <= printed


def test_a_word_that_is_a_competitors_name_selects_it_alone_and_rounds_are_bounded() -> None:
    options = arguments(["--only", "run", "call", "--rounds", "9"])

    assert [each.name for each in selected_competitors(["toolcell"])] == ["toolcell"]
    assert [each.name for each in selected_competitors(["bwrap", "fresh worker"])] == [
        FRESH, "Monty, fresh worker, started ahead", "bwrap + python",
    ]  # fmt: skip
    assert len(selected_competitors(None)) == 7
    assert [(each.key, rounds) for each, rounds in selected_measurements(options)] == [("run", 9), ("call", 8)]
