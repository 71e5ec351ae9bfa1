"""A feature is a part: without its modules, runs and calls that do not use it are what they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from house import SOURCES, House

TESTS = Path(__file__).parent.parent

PARTS = {
    "audit log": "audit",
    "quotas": "quotas",
    "requests of scripts": "egress",
    "sessions": "sessions",
    "commit": "control.commit",
    "revert": "control.revert",
    "repair": "control.repair",
    "maps": "control.map_stream control.map_runs",
    "early checks": "control.preflight control.type_check control.saved_script_check",
    "journals": "journal control.journaled_calls control.script_header",
    "approvals that wait": "control.suspension control.resumption control.agent_turns",
    "dry runs": "control.draft control.dry_runs control.kept_drafts",
    "plans": "control.plans",
    "replays": "control.replays",
    "streams": "run.streaming",
    "other backends": "sandbox.docker sandbox.kubernetes sandbox.ray",
    "outer rooms": "builtin agents mcp integrations service kernel cli compat",
}
"""Each feature that is a part, and the modules that it is gone with."""

CORE = ("test_tools_from_scripts.py", "test_run_output.py", "test_run_failures.py")
"""Tests of runs and their calls, with the names that their own programs need."""


def run_without(modules: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that cannot import these modules of `toolcell`."""
    taken = " ".join(f"toolcell.{each}" for each in modules.split())
    environment = {**os.environ, "TAKEN_AWAY": taken, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=TESTS.parent)


@pytest.mark.isolation
def test_the_tests_of_runs_and_calls_pass_with_every_part_taken_away() -> None:
    modules = " ".join(PARTS.values())
    assert {f"toolcell.{each}" for each in modules.split()} <= House(SOURCES).modules.keys()
    core = [str(TESTS / "runtime" / name) for name in CORE]

    ran = run_without(modules, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "taken_away", *core)

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "passed" in ran.stdout


def test_a_module_that_was_taken_away_cannot_be_imported() -> None:
    ran = run_without("quotas", "-c", "import taken_away, toolcell; toolcell.Runtime; print(1); toolcell.Quotas()")

    assert ran.stdout == "1\n"
    assert "toolcell.quotas was taken away" in ran.stderr
