"""How the figures of two trees are compared, and what the tables on the pages call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.measurements import MEASUREMENTS, Workload

from benchmarks import compare
from rows import each_row

ROOT = Path(__file__).parents[2]


@each_row(
    ("key", "before", "after", "change"),
    [
        ("run", (1.0, 2.0, 4.0), (0.8, 1.6, 3.2), "better"),
        ("run", (1.0, 2.0, 4.0), (1.2, 2.4, 4.8), "worse"),
        ("throughput", (1.0, 2.0, 4.0), (1.2, 2.4, 4.8), "better"),
        ("run", (1.0, 2.0, 4.0), (1.02, 2.04, 4.08), "same"),
        ("run", (1.0, 1.0, 1.0), (0.5, 1.1, 1.5), "same"),
    ],
)
def test_trees_are_compared_round_by_round_and_only_a_row_worse_than_the_noise_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, key: str, before: Sequence[float], after: Sequence[float], change: str
) -> None:
    figures = {"before": iter(before), "after": iter(after)}

    def measured(tree: Path, keys: Sequence[str], venv: str) -> compare.Medians:
        value = next(figures[tree.name])
        return {name: value for each in MEASUREMENTS if each.key in keys for name in compare.figures_of(each)}

    monkeypatch.setattr(compare, "measure_in_tree", measured)
    shown = list[compare.Row]()
    monkeypatch.setattr(compare, "show", lambda _, rows: shown.extend(rows))

    code = compare.main(["before", "after", "--rounds", "3", "--only", key])

    assert {row.change for row in shown} == {change}
    assert code == (change == "worse")


def test_the_tables_of_figures_name_their_rows_as_the_command_prints_them() -> None:
    workload = asdict(Workload(clients=4))
    printed = {f"{each.title.format_map(workload)}, {each.unit}" for each in MEASUREMENTS}

    for page in ("README.md", "docs/benchmarks.md"):
        after = (ROOT / page).read_text().partition("| Median")[2].partition("\n\n")[0]
        rows = [line.split("|")[1].strip() for line in after.splitlines()[2:]]
        assert len(rows) >= 3
        assert set(rows) <= printed
