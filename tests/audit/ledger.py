"""A record for tests, filled with runs that need no sandbox, and read back as plain events."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio

from toolcell import Limits, Policy, ToolRegistry
from toolcell.audit import records, store
from toolcell.audit.config import RecordConfig
from toolcell.audit.databases import database_of
from toolcell.audit.filters import Filter
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedRun
from toolcell.audit.recorder import Recorder
from toolcell.audit.records import StoredEvent
from toolcell.audit.run_record import RunRecord
from toolcell.audit.verification import Report, verify
from toolcell.errors import ToolError
from toolcell.results import ExecutionResult, LogEntry, Logs, Outcome
from toolcell.sandbox.backend import GuestFile
from toolcell.tools import Origin, RunContext
from toolcell_bridge.wire.messages import RunScript

SCRIPT = "rows = call_tool('search', query='x')\nset_result(rows)"


def make_registry() -> ToolRegistry:
    """A tool that answers, one that fails as planned, one that crashes."""
    registry = ToolRegistry()

    @registry.tool
    async def search(query: str, limit: int = 10) -> list[dict[str, Any]]:
        """Search for something and find one thing."""
        return [{"title": query, "rank": limit}]

    @registry.tool
    async def fail(text: str) -> str:
        """Fail as a tool does whose words are meant to be read."""
        raise ToolError(text)

    @registry.tool
    async def crash(text: str) -> str:
        """Raise an exception that nobody planned for."""
        raise ValueError(text)

    @registry.tool
    async def outer(query: str) -> Any:
        """Call another tool and return what it returned."""
        from toolcell.calls.context import current_context

        return (await current_context().call_tool("search", {"query": query})).value

    return registry


class Ledger:
    """One record, with one key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = HmacKey.generate()
        self.registry = make_registry()
        self._count = itertools.count(1)

    def log(self, **options: Any) -> AuditLog:
        """The log, not yet open."""
        options.setdefault("key", self.key)
        config = options.pop("config", None) or RecordConfig(fsync="never", **options.pop("settings", {}))
        return AuditLog(self.path, config=config, **options)

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Recorder]:
        """The log, open, and what makes its records."""
        with self.log(**options) as log:
            yield Recorder(log)

    def begin(self, recorder: Recorder, source: str = SCRIPT, **fields: Any) -> RunRecord:
        """Start a run as a runtime would."""
        context = fields.pop("context", None) or RunContext()
        message = RunScript(
            next(self._count), source, fields.pop("inputs", {}), " ".join(self.registry), "off", 1, 1, 1, 7, 1e9
        )
        files = [GuestFile(name, data) for name, data in fields.pop("files", ())]
        entries = anyio.run(recorder.file_entries, files, context)
        options = {"limits": Limits(), "policy": Policy(hash_seed=1), "files": entries, **fields}
        record = recorder.beginning(message, registry=self.registry.snapshot(), context=context, **options)
        assert record.begin(wait=True)
        return record

    def run(
        self, recorder: Recorder, source: str = SCRIPT, calls: Any = (("search", {"query": "x"}),), **fields: Any
    ) -> str:
        """A whole run; returns its id."""
        value, printed = fields.pop("value", 1), fields.pop("printed", "")
        record = self.begin(recorder, source, **fields)
        for number, (name, args) in enumerate(calls, start=1):
            self.call(record, name, args, number)
        logs = Logs((LogEntry("stdout", printed),), len(printed)) if printed else Logs()
        record.end(ExecutionResult(record.context.run_id, Outcome.OK, value, True, logs))
        return record.context.run_id

    def call(self, record: RunRecord, name: str, args: dict[str, Any], number: int, line: int | None = 1) -> Any:
        """A call as a script makes it."""
        record.lines[f"call_{number}"] = line
        return anyio.run(
            lambda: self.registry.dispatch(
                name, args, call_id=f"call_{number}", origin=Origin.CODE, context=record.context
            )
        )

    def fill(self, runs: int, **options: Any) -> None:
        """Write so many runs and close."""
        with self.opened(**options) as recorder:
            for number in range(runs):
                self.run(recorder, f"set_result({number})", value=number)

    # Reading

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds, as any SQLite program sees it. Also for changes."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(query, values).fetchall()

    def found(self) -> list[StoredEvent]:
        """Every event, in the order in which they were written."""
        with closing(database_of(self.path).open_read_only()) as db:
            return [records.event_of(row) for row in db.execute(f"SELECT {store.EVENT_COLUMNS} FROM event ORDER BY id")]

    def kinds(self) -> list[str]:
        """The kinds of the events of runs, in order."""
        return [event.kind for event in self.found() if event.run]

    def fields(self, kind: str) -> list[dict[str, Any]]:
        """What the events of a kind say."""
        return [event.fields for event in self.found() if event.kind == kind]

    def the_run(self, id: str = "last") -> RecordedRun:
        """One run, put together."""
        with Index(self.path) as index:
            return index.load(index.find(id))

    def trusts(self) -> dict[str, str]:
        """Id of each run to how far it can be trusted."""
        with Index(self.path, [self.key]) as index:
            return {run.id: run.trust for run in index.runs(Filter(limit=None))}

    def verify(self, **options: Any) -> Report:
        """Check it with its own key."""
        return verify(self.path, options.pop("keys", [self.key]), **options)

    def bytes_on_disk(self) -> bytes:
        """Everything in the record's files."""
        return b"".join(path.read_bytes() for path in sorted(self.path.parent.glob(f"{self.path.name}*")))


RUN_KINDS = [records.RUN_STARTED, records.CALL_STARTED, records.CALL_ENDED, records.RUN_ENDED]
