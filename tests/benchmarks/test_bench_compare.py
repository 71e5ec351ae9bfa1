"""How the figures of two trees are compared, and what the tables on the pages call them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import psutil
import pytest
from benchmarks.__main__ import ROOT, Worker, exit_code, main
from benchmarks.measurements import MEASUREMENTS, QUICK, Workload
from benchmarks.report import Series, compare

from rows import each_row


@each_row(
    ("key", "before", "after", "change"),
    [
        ("run", (1.0, 2.0, 4.0), (0.8, 1.6, 3.2), "better"),
        ("run", (1.0, 2.0, 4.0), (1.2, 2.4, 4.8), "worse"),
        ("clients_4", (1.0, 2.0, 4.0), (1.2, 2.4, 4.8), "better"),
        ("run", (1.0, 2.0, 4.0), (1.02, 2.04, 4.08), "same"),
        ("run", (1.0, 1.0, 1.0), (0.5, 1.1, 1.5), "same"),
    ],
)
def test_trees_are_compared_round_by_round_and_only_a_row_worse_than_the_noise_is_worse(
    key: str, before: Sequence[float], after: Sequence[float], change: str
) -> None:
    measurement = next(each for each in MEASUREMENTS if each.key == key)
    early, late = (Series([[sample] for sample in samples]) for samples in (before, after))

    compared = compare(measurement, late, early)

    assert compared["change"] == change
    groups = {key: {"competitors": {"before": {}, "after": compared}}}
    assert exit_code(groups, [{"seccomp": "on"}]) == (change == "worse")


def test_a_toolcell_that_could_not_be_opened_is_in_the_exit_code() -> None:
    assert [exit_code({}, [{"seccomp": "on"}, layers]) for layers in ({"seccomp": "on"}, {})] == [0, 1]


def test_the_tables_of_figures_name_their_rows_as_the_command_prints_them() -> None:
    workload = asdict(Workload())
    printed = {f"{each.title.format_map(workload)}, {each.unit}" for each in MEASUREMENTS}

    for page in ("README.md", "docs/benchmarks.md"):
        after = (ROOT / page).read_text().partition("| Median")[2].partition("\n\n")[0]
        rows = [line.split("|")[1].strip() for line in after.splitlines()[2:]]
        assert len(rows) >= 3
        assert set(rows) <= printed


def test_a_competitor_whose_process_has_died_is_a_problem_in_each_turn_and_costs_no_other_its_results() -> None:
    before = psutil.Process().children()
    worker = Worker("python subprocess", ROOT, sys.executable, [])
    assert worker.problem is None
    (process,) = [each for each in psutil.Process().children() if each not in before]
    process.kill()
    assert [worker.turn("cold", QUICK) for _ in range(3)] == [{"problem": "its process has ended"}] * 3
    worker.close()


@each_row(("option", "value"), [("--base", "nobody"), ("--rounds", "0")])
def test_an_option_that_could_give_no_figures_is_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--quick", "--only", "cold", "--competitors", "python subprocess", option, value])
    assert refused.value.code not in (0, None)
