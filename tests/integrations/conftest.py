"""Tests of the adapters, each against its real framework. `.ci/frameworks` installs those and runs these tests.

Each file calls `needs` before it imports its framework, so elsewhere it is skipped as a whole. Where `.ci/frameworks`
has installed the framework, nothing is skipped: that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolcell.audit.query import Index

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "integrations"
INSTALLED = os.environ.get("FRAMEWORKS", "").split()
"""Extras that `.ci/frameworks` has installed for this run."""


def needs(module: str) -> None:
    """Skip the whole file where the framework's module is not installed."""
    pytest.importorskip(module, reason=f"{module} is not installed; .ci/frameworks runs these tests with it")


def run_example(name: str) -> str:
    """Run a program of examples/integrations and return what it printed."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def audited_calls(directory: Path) -> list[str]:
    """Return the names of the tools whose calls an audit log has, in order."""
    with Index(directory / "runs.db") as index:
        runs = [index.load(summary) for summary in index.runs()]
    return [call.tool for run in runs for call in run.calls]


LEFT_OPEN = r"ignore:unclosed (event loop|<socket\.socket fd=\d+, family=1,):ResourceWarning"
"""Event loops that frameworks leave open, each with its pair of Unix sockets: of `nest_asyncio`, `asyncio.run` closes none.
They end in whatever test comes when they are collected."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("framework") and "kubernetes" not in item.path.stem:
            item.add_marker(pytest.mark.filterwarnings(LEFT_OPEN))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    return _not_skipped(report, collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    return _not_skipped(report, item.path)


def _not_skipped(report: Any, path: Path) -> Any:
    is_installed = any(path.stem.startswith(f"test_{extra.replace('-', '_')}") for extra in INSTALLED)
    if report.outcome == "skipped" and is_installed:
        report.outcome = "failed"
        report.longrepr = f"skipped where its framework is installed: {report.longrepr}"
    return report
