"""Prints what each attack did to its host, below the summary of the tests."""

from __future__ import annotations

import pytest

from hostile.harness import COLUMNS, PROPERTY


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine with an image of this tree's guest. An older one is built anew on its own base, in seconds."""
    from toolcell.sandbox.docker.client import EngineClient
    from toolcell.sandbox.docker.images import build, reference

    client = EngineClient.connect_now()
    try:
        found = reference.find_image(client, reference.DEFAULT_IMAGE)
        assert found is not None, "a test that wants an engine carries the mark docker"
        if not found.is_current:
            build.build_python(client, found.base, tag=found.tag)
    finally:
        client.api.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    reports = [report for outcome in ("passed", "failed") for report in stats.get(outcome, ())]
    rows = [value for report in reports for key, value in report.user_properties if key == PROPERTY]
    if rows:
        terminalreporter.section("what attacks did to their hosts")
        terminalreporter.write_line(COLUMNS)
        for row in rows:
            terminalreporter.write_line(str(row))
