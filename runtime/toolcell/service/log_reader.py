"""Read one record for many requests: a thread of its own keeps it open and answers in turn."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.audit import (
    Filter,
    Index,
    RecordDatabase,
    RecordedRun,
    RunSummary,
    Verifier,
    database_of,
    load_verifiers,
)
from toolcell.errors import UsageError
from toolcell.service.problems import Problem
from toolcell.support import daemon_threads

Answer = TypeVar("Answer")

LOOK_AGAIN_S: Final = 0.25
READING_SHARE: Final = 10
"""A log that grows is read again at most for a tenth of the time, however large it is."""


class LogReader:
    """One record, and answers from it that are kept until it changes. Close it."""

    def __init__(
        self,
        directory: str | Path | RecordDatabase,
        verifiers: Iterable[Verifier] = (),
        *,
        is_patient: bool = True,
    ) -> None:
        """`is_patient`: an answer may be of a moment ago; otherwise it has all that was written before the question."""
        self.directory = database_of(directory)
        self._is_patient = is_patient
        self.verifiers = tuple(verifiers)
        self.revision = 0
        """Counts how often something new was read."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="toolcell-log")
        self._index: Index | None = None
        self._seen: object = None
        self._look_at_s = 0.0
        self._kept: dict[object, tuple[int, Any]] = {}

    async def read(self, question: Callable[[Index], Answer]) -> Answer:
        """Return the answer to a question.

        Raises:
            AuditError: there is no log, or it cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._answer, question)

    async def read_large(self, question: Callable[[Index], Answer]) -> Answer:
        """Do the same for whole runs: what it takes is charged to whoever asks."""
        return await self.read(partial(daemon_threads.account.get().timed, question))

    async def read_kept(self, key: object, question: Callable[[Index], Answer]) -> Answer:
        """Do the same, and keep the answer until the log changes. `key` names the question."""

        def kept(index: Index) -> Answer:
            revision, answer = self._kept.get(key, (-1, None))
            if revision != self.revision:
                answer = question(index)
                if len(self._kept) >= 64:
                    self._kept.clear()
                self._kept[key] = (self.revision, answer)
            return answer  # type: ignore[no-any-return]

        return await self.read(kept)

    async def close(self) -> None:
        """Close the index and end the thread. Safe to call twice."""
        await daemon_threads.run_sync(self.close_now)

    def close_now(self) -> None:
        """Close where no event loop runs."""
        try:
            self._executor.submit(self._close_index)
        except RuntimeError:  # closed before
            return
        self._executor.shutdown(wait=True)

    # In the thread

    def _answer(self, question: Callable[[Index], Answer]) -> Answer:
        if self._index is None:
            self._index = Index(self.directory, self.verifiers)
        self._refresh(self._index)
        return question(self._index)

    def _refresh(self, index: Index) -> None:
        """Read what is new, unless that was done a moment ago."""
        if self._is_patient and time.monotonic() < self._look_at_s:
            return
        state = index.state()
        begun_s = time.monotonic()
        if state != self._seen:
            index.refresh()
            self._seen = state
            self.revision += 1
        took_s = time.monotonic() - begun_s
        self._look_at_s = time.monotonic() + max(LOOK_AGAIN_S, READING_SHARE * took_s)

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


class RecordedRuns:
    """Queries over one log, one after the other. The index stays open between them."""

    def __init__(self, directory: str | Path | RecordDatabase, key: Path | None) -> None:
        """`key`: the file of the key that signs the log; None for the user's own."""
        self._directory, self._key = directory, key
        self._reader: LogReader | None = None

    async def close(self) -> None:
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
        chosen = replace(wanted, **changes)
        found = (await self._log().read(lambda index: index.runs(chosen)))[::-1]
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
            return run.to_dict() | {"trust": summary.trust, "runs": [asdict(each) for each in run.family]}

        return await self._log().read_large(read)

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

        return await self._log().read_large(read)

    def _log(self) -> LogReader:
        if self._reader is None:
            self._reader = LogReader(self._directory, load_verifiers(self._key, is_needed=False), is_patient=False)
        return self._reader


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
