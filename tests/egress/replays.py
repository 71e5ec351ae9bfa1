"""Replays of the only run of a log."""

from __future__ import annotations

from pathlib import Path

from toolcell import Runtime
from toolcell.audit import Filter, Index, RecordedRun
from toolcell.control import Replay, replay


async def replayed(log: Path, source: str) -> tuple[RecordedRun, Replay]:
    """Return the run that a log has, and what came of replaying it."""
    with Index(log / "runs.db") as index:
        (line,) = index.runs(Filter(limit=None))
        recorded = index.load(line)
    async with Runtime(**recorded.runtime_options()) as runtime:
        return recorded, await replay(runtime, recorded, source=source)
