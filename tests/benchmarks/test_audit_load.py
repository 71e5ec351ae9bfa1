"""The load of many writers on one record, in short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import audit_load
from record_places import drop, record_url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def record(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield ""
        return
    url = record_url(request.getfixturevalue("postgres_server"))
    yield url
    drop(url)


@pytest.mark.slow
def test_of_two_hundred_writers_in_four_processes_that_are_killed_at_random_every_effect_has_its_start(
    tmp_path: Path, record: str
) -> None:
    """The short form of `python -m benchmarks.audit_load`."""
    found = audit_load.load(tmp_path, kills=2, record=record)
    assert found["findings"] == found["without_start"] == []
    assert found["effects"] >= 2 * audit_load.EFFECTS
    # A call that was just made, or that waited for a thread, has a start and left no trace.
    assert found["without_effect"] <= (audit_load.PROCESSES + 2) * audit_load.WRITERS
    assert found["chains"] >= 2  # a process that was killed early has written nothing
