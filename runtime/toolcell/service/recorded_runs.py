"""The runs in a tenant's audit log, for queries. A thread of its own reads: a log may be large."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from toolcell.audit import Filter, Index, RecordedRun, RunSummary, Verifier, default_key_path, load_verifier
from toolcell.errors import AuditError, UsageError
from toolcell.service.log_reader import LogReader
from toolcell.service.problems import Problem

T = TypeVar("T")


class RecordedRuns:
    """Queries over one log, one after the other. The index stays open between them."""

    def __init__(self, directory: Path, key: Path | None) -> None:
        """`key`: the file of the key that signs the log; None for the user's own."""
        self._directory, self._key = directory, key
        self._reader: LogReader | None = None

    async def close(self) -> None:
        """Close the index."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def page(self, wanted: Filter, cursor: str | None) -> tuple[list[RunSummary], str | None]:
        """Return the newest runs that are selected, and the cursor of those before them.

        Raises:
            Problem: the cursor is malformed (422).
        """
        limit = wanted.limit or 0
        changes: dict[str, Any] = {"before": _position(cursor) if cursor is not None else None, "limit": limit + 1}
        chosen = Filter(**{name: getattr(wanted, name) for name in wanted.__slots__} | changes)
        found = (await self._read(lambda index: index.runs(chosen)))[::-1]
        page = found[:limit]
        return page, _cursor(page[-1]) if len(found) > limit else None

    async def detail(self, ident: str) -> dict[str, Any]:
        """Return everything recorded of a run, and how far it can be trusted.

        Raises:
            Problem: there is no such run (404).
        """

        def read(index: Index) -> dict[str, Any]:
            summary = _find_run(index, ident)
            run = index.load(summary)
            return run.to_dict() | {"trust": summary.trust, "runs": [each.to_dict() for each in run.family]}

        return await self._read(read)

    async def load(self, ident: str) -> RecordedRun:
        """Return the record of a run.

        Raises:
            Problem: there is no such run (404).
        """
        return (await self.load_trusted(ident))[0]

    async def load_trusted(self, ident: str) -> tuple[RecordedRun, str]:
        """Return the record of a run, and how far it can be trusted.

        Raises:
            Problem: there is no such run (404).
        """

        def read(index: Index) -> tuple[RecordedRun, str]:
            summary = _find_run(index, ident)
            return index.load(summary), summary.trust

        return await self._read(read)

    async def _read(self, query: Callable[[Index], T]) -> T:
        if self._reader is None:
            self._reader = LogReader(self._directory, self._verifiers(), is_patient=False)
        return await self._reader.read(query)

    def _verifiers(self) -> list[Verifier]:
        path = self._key or default_key_path()
        try:
            return [load_verifier(path)] if path.exists() else []
        except AuditError:
            return []


def _find_run(index: Index, ident: str) -> RunSummary:
    try:
        return index.find(ident, is_whole=True)
    except UsageError as exc:
        raise Problem(404, "no_such_run", "No such run", f"no run {ident!r:.80} is recorded, or several are") from exc


def _cursor(last: RunSummary) -> str:
    text = json.dumps([last.started_ns, last.seq, last.chain])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _position(cursor: str) -> tuple[int, int, str]:
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        found = None
    match found:
        case [int(started), int(seq), str(chain)] if max(abs(started), abs(seq)) < 2**63 and chain.isascii():
            return started, seq, chain
    raise Problem(422, "invalid_request", "The request is wrong", f"cursor = {cursor!r:.80}: it is not one of `next`")
