"""The benchmarks as a command. The tests check that there are figures, not how large these are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.isolation, pytest.mark.slow]


OF_BOTH = ("run", "throughput", "faults")
OWN = ("call_plain", "parallel", "parallel_plain", "plan", "plan_gather", "session", "open", "import_cpu", "command")
"""What toolcell alone has."""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the root of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
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
    assert results["isolation"]["seccomp"]
    assert results["machine"]["cores"]
    for key in ("run", "call", "gap_5", "cpu_run"):
        competitors = results["measurements"][key]["competitors"]
        for name in ("toolcell", "python subprocess"):
            assert competitors[name]["problem"] is None
            assert competitors[name]["p50"] > 0
    assert "one run, one call" in done.stdout


def test_one_round_of_a_comparison_measures_the_toolcell_of_its_own_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--measure", str(ROOT), "--only", *OF_BOTH, *OWN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    medians = json.loads(done.stdout)
    assert set(medians) == {*OF_BOTH, *OWN}
    assert min(medians.values()) > 0


def test_a_comparison_refuses_a_tree_without_an_environment_and_a_toolcell_from_elsewhere(tmp_path: Path) -> None:
    def compare(*arguments: str) -> str:
        command = [sys.executable, "-m", "benchmarks.compare", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        return done.stderr

    assert f"{tmp_path} has no .venv" in compare(str(tmp_path), str(tmp_path))
    assert f"which is not in {tmp_path}" in compare("--measure", str(tmp_path))


def test_an_unknown_measurement_is_refused_with_the_names_there_are() -> None:
    done = bench("--only", "speed")

    assert done.returncode == 2
    assert "throughput" in done.stderr


def test_sessions_are_timed_beside_a_bare_loop_and_idle_ones_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sessions", "--rounds", "1", "--sessions", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    for row in ("bare loop, in a row", "session, journal, after 20 ms", "2 idle sessions:", "brought back"):
        assert row in done.stdout, done.stderr
