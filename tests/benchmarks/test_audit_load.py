"""The load of many writers on one record, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import audit_load


@pytest.mark.slow
def test_of_two_hundred_writers_in_four_processes_that_are_killed_at_random_every_effect_has_its_start(
    tmp_path: Path,
) -> None:
    """The short form of `python -m benchmarks.audit_load`."""
    found = audit_load.load(tmp_path, kills=2)
    assert found["findings"] == found["without_start"] == []
    assert found["effects"] >= 2 * audit_load.EFFECTS
    # A call that was just made, or that waited for a thread, has a start and left no trace.
    assert found["without_effect"] <= (audit_load.PROCESSES + 2) * audit_load.WRITERS
    assert found["chains"] >= 2  # a process that was killed early has written nothing
