"""Verify a log in a thread, and tell how far that has got."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from toolcell.audit import Index, RecordDatabase, Report, verify
from toolcell.errors import AuditError
from toolcell.service.log_reader import LogReader
from toolcell.support import daemon_threads


@dataclass(slots=True)
class Verification:
    """One check of a log, under way or done."""

    total_events: int
    begun_s: float = field(default_factory=time.monotonic)
    checked_events: int = 0
    report: Report | None = None
    problem: str = ""
    took_s: float = 0.0
    ended_ns: int = 0

    @property
    def is_done(self) -> bool:
        """True when there is a report, or a reason why there is none."""
        return self.report is not None or bool(self.problem)

    @property
    def percent(self) -> int:
        """How much of the log was read."""
        return min(100, self.checked_events * 100 // max(1, self.total_events))


class Verifications:
    """The newest check of each log. A log is checked once at a time."""

    def __init__(self) -> None:
        self._newest: dict[RecordDatabase, Verification] = {}
        self._lock = threading.Lock()

    def newest(self, log: LogReader) -> Verification | None:
        return self._newest.get(log.directory)

    def begin(self, log: LogReader) -> Verification:
        """Check a log, unless that is under way."""
        with self._lock:
            newest = self._newest.get(log.directory)
            if newest is not None and not newest.is_done:
                return newest
            check = self._newest[log.directory] = Verification(_events_of(log.directory))
        daemon_threads.start(_check, log, check, name="toolcell-verification")
        return check


def _check(log: LogReader, check: Verification) -> None:
    def count(events: int) -> None:
        check.checked_events += events

    try:
        report = verify(log.directory, log.verifiers, on_events=count)
        check.took_s, check.ended_ns = time.monotonic() - check.begun_s, time.time_ns()
        check.report = report
    except AuditError as exc:
        check.problem = str(exc)
    except BaseException as exc:
        check.problem = f"the check failed: {type(exc).__name__}"
        raise


def _events_of(path: RecordDatabase) -> int:
    try:
        with Index(path) as index:
            return int(index.select("SELECT count(*) FROM event")[0][0])
    except AuditError:
        return 0
