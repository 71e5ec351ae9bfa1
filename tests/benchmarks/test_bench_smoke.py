"""The benchmarks as a command. The tests check that there are figures, not how large these are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.isolation, pytest.mark.slow]


OWN = ("clients_4", "faults", "session", "plan", "command", "import_cpu")
"""What most other competitors have not, and what is measured in other processes."""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the root of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_quick_run_measures_our_sandboxes_and_plain_processes_and_names_the_live_layers(tmp_path: Path) -> None:
    out = tmp_path / "results.json"

    done = bench(
        "--only",
        "run",
        "call",
        "gap_5",
        "cpu_run",
        "--competitors",
        "toolcell",
        "python subprocess",
        "--json",
        str(out),
    )

    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["isolation"]["toolcell"]["seccomp"]
    assert results["machine"]["cores"]
    for key in ("run", "call", "gap_5", "cpu_run"):
        competitors = results["measurements"][key]["competitors"]
        for name in ("toolcell", "python subprocess"):
            assert competitors[name]["problem"] is None
            assert competitors[name]["p50"] > 0
    assert "one run, one call" in done.stdout


def test_two_trees_are_compared_and_each_is_measured_in_its_own_process(tmp_path: Path) -> None:
    for each in ("runtime", "bridge"):
        shutil.copytree(ROOT / each, tmp_path / "before" / each)
    out = tmp_path / "results.json"

    bench(
        "--only", *OWN, "--competitors", "toolcell", "--trees", str(tmp_path / "before"), str(ROOT), "--json", str(out)
    )

    for key, group in json.loads(out.read_text())["measurements"].items():
        figures = list(group["competitors"].values())
        assert [each["problem"] for each in figures] == [None, None], key
        assert min(each["p50"] for each in figures) > 0, key
        assert figures[1]["ratio"] > 0


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    done = bench("--trees", str(tmp_path))

    assert done.returncode == 1
    assert f"{tmp_path} is not a tree of toolcell" in done.stderr


def test_a_tree_whose_toolcell_is_not_the_one_that_would_be_measured_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runtime/toolcell").mkdir(parents=True)

    done = bench("--only", "run", "--competitors", "toolcell", "--trees", str(tmp_path))

    assert done.returncode == 1
    assert f"which is not in the tree {tmp_path}" in done.stderr


def test_an_unknown_measurement_is_refused_with_the_names_there_are() -> None:
    done = bench("--only", "speed")

    assert done.returncode == 2
    assert "clients_4" in done.stderr


def test_sessions_are_timed_beside_a_bare_loop_and_idle_ones_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sessions", "--rounds", "1", "--sessions", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    for row in ("bare loop, in a row", "session, journal, after 20 ms", "2 idle sessions:", "brought back"):
        assert row in done.stdout, done.stderr
