"""`RequestKeys`: which requests of a tenant were begun, by their idempotency keys, and what they were answered.

Each is a journal of the record: it is written before the request is carried out, and open meanwhile. Whoever finds one
that nobody has open and that has no answer knows that the process was killed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from toolcell.audit.log import AuditLog
from toolcell.journal.database import REQUEST, JournalDatabase, OpenJournal, UnderWay
from toolcell.support.packing import unpack

ANSWER_BYTES: Final = 256 << 20
"""Of a record that may have any size."""
COUNT_S: Final = 60.0
"""How old a count of the keys may be. What this process adds and removes is counted at once."""
AGAIN_S: Final = 1.0
"""Between two counts where one more key, or answer, is too much."""
AT_ONCE: Final = 500
"""Keys that are removed in one transaction, for which other writers wait."""

_OURS: Final = "FROM kept WHERE kind = ? AND name > ? AND name < ?"
_COUNTS: Final = (
    "SELECT count(CASE WHEN n = 1 THEN 1 END), coalesce(sum(CASE WHEN n = 3 THEN length(body) END), 0), "
    f"coalesce(min(at), 0) {_OURS}"
)
_OLD: Final = f"SELECT name, max(n) {_OURS} GROUP BY name HAVING max(at) < ?"
_ANSWERS: Final = f"SELECT name, length(body) {_OURS} AND n = 3 ORDER BY at DESC, name"
_DROP: Final = "DELETE FROM kept WHERE kind = ? AND name = ? AND n >= ? AND at < ?"
"""The first record of a request is its digest and the id of its run, the second is status and media type of the answer,
and the third is the answer's bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of the request that has a key."""

    state: Literal["begun", "running", "answered", "interrupted", "other request", "full"]
    """`begun`: the key is new, so carry the request out. `interrupted`: its process died before it had an answer.
    `other request`: the key was used for one. `full`: the tenant has as many keys as are kept."""
    run_id: str = ""
    status: int = 0
    media_type: str = ""
    body: bytes | None = None
    """The answer. None: it was too large, or is too old, to be kept."""
    retry_after_s: float = 0.0
    """When the oldest key of a full tenant is forgotten."""


class RequestKeys:
    """The keys of one tenant. Several processes and hosts may use them at once.

    A key is never forgotten before `keep_s`: forgetting it early would run its request twice. Answers are: the oldest
    go first when they take more than a quarter of what the record may keep. Each method waits, and raises `OSError` if
    the record cannot be read or written.
    """

    def __init__(
        self,
        log: AuditLog,
        tenant: str = "",
        keep_s: float = 86_400.0,
        rows: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`tenant`: several may have one record, `log`. `close` ends what reads it."""
        self._database = JournalDatabase(log)
        self._keep_s, self._rows, self._clock = keep_s, rows, clock
        self._prefix = f"{tenant} "  # no key has a space
        self._all = (REQUEST, self._prefix, f"{tenant}!")
        most = log.config.continue_bytes
        self._answer_bytes = ANSWER_BYTES if most is None else most // 4
        self._turn = threading.Lock()
        self._open: dict[str, OpenJournal] = {}
        """What this process carries out, by key."""
        self._counting, self._adding = threading.Lock(), threading.Lock()
        self._count, self._bytes, self._oldest, self._counted = 0, 0, 0.0, -math.inf
        """Keys, bytes of answers, the time of the oldest key, and when they were counted."""

    def close(self) -> None:
        self._database.close()

    def begin(self, key: str, digest: bytes, run_id: str) -> Entry:
        """Take a key for a request, or return what became of the request that has it. `digest`: of the request."""
        if self._is_count_old() and self._counting.acquire(blocking=self._counted == -math.inf):
            try:
                if self._is_count_old():  # still
                    self._count_again()
            finally:
                self._counting.release()
        with self._turn:
            self._database.settle()  # one that could not be noted may not be closed yet
            try:
                journal = OpenJournal(self._database, REQUEST, self._prefix + key)
            except UnderWay:
                return self._found(key, digest, "running") or Entry("running")
            try:
                return self._found(key, digest, "interrupted") or self._begin(journal, key, digest, run_id)
            finally:
                if key not in self._open:
                    journal.close()
                    self._database.settle()  # then it is closed for everybody

    def _begin(self, journal: OpenJournal, key: str, digest: bytes, run_id: str) -> Entry:
        if self._count >= self._rows:
            return Entry("full", retry_after_s=max(1.0, self._oldest + self._keep_s - self._clock()))
        journal.remove()  # what is too old
        try:
            journal.write(digest, run_id, needs_room=False)
            self._database.settle()
            if (lock := journal.lock) is not None:
                if lock.is_lost:
                    raise OSError("the connection was lost, and another process has the key now; send it again")
                lock.has_begun = True
        except OSError:
            journal.remove()  # nor is it written later
            raise
        self._open[key] = journal
        self._add(1, 0)
        return Entry("begun", run_id)

    def _add(self, keys: int, size: int) -> None:
        with self._adding:
            self._count, self._bytes = self._count + keys, self._bytes + size

    def _is_count_old(self) -> bool:
        now = self._clock()
        is_full = self._count >= self._rows and now > self._oldest + self._keep_s
        most_s = AGAIN_S if is_full or self._bytes > self._answer_bytes else COUNT_S
        return not 0 <= now - self._counted <= most_s

    def _count_again(self) -> None:
        """Remove what is too old or too much, and count the rest. Nobody waits for a look at so many rows."""
        before, every = int((self._clock() - self._keep_s) * 1e9), int(self._clock() * 1e9) + 1
        with self._database.reading_alone() as db:
            old = db.execute(_OLD, (*self._all, before)).fetchall()
            self._drop([(REQUEST, name, 1, before) for name, n in old if n > 1])
            for name in (name for name, n in old if n == 1):
                with suppress(UnderWay), closing(OpenJournal(self._database, REQUEST, name)):
                    self._drop([(REQUEST, name, 1, before)])
            count, size = self._count, self._bytes
            found, found_size, oldest = db.execute(_COUNTS, self._all).fetchone()
            answers = db.execute(_ANSWERS, self._all).fetchall() if found_size > self._answer_bytes else []
        sums = accumulate(each for _, each in answers)
        most = self._answer_bytes * 7 // 8
        too_many = [(name, each) for (name, each), total in zip(answers, sums, strict=True) if total > most]
        self._drop([(REQUEST, name, 3, every) for name, _ in too_many])
        self._add(found - count, int(found_size) - sum(each for _, each in too_many) - size)
        self._oldest, self._counted = oldest / 1e9, self._clock()

    def _drop(self, rows: list[tuple[str, str, int, int]]) -> None:
        for start in range(0, len(rows), AT_ONCE):
            self._database.change_each(_DROP, rows[start : start + AT_ONCE])

    def _found(self, key: str, digest: bytes, unanswered: Literal["running", "interrupted"]) -> Entry | None:
        """Return what is recorded of a key. None: nothing, or it is too old."""
        with self._database.reading() as db:
            query = "SELECT n, at, body FROM kept WHERE kind = ? AND name = ? ORDER BY n"
            rows = db.execute(query, (REQUEST, self._prefix + key)).fetchall()
        is_old = bool(rows) and rows[-1][1] < (self._clock() - self._keep_s) * 1e9
        if not rows or (is_old and (len(rows) > 1 or unanswered == "interrupted")):
            return None
        (sha256, run_id), *answer = (unpack(body) for _, _, body in rows)
        if sha256 != digest:
            return Entry("other request", run_id)
        if not answer:
            return Entry(unanswered, run_id)
        return Entry("answered", run_id, *(part for each in answer for part in each))

    def finish(self, key: str, answer: tuple[int, str, bytes] | None) -> None:
        """Keep the answer of a request that this process carried out. None: it did not begin, so its key is free."""
        journal = self._open[key]
        if answer is None:
            journal.remove()
            self._add(-1, 0)
        else:
            self._keep(journal, answer)
        lock = journal.lock
        self.end(key)
        self._database.settle()
        if lock is not None and lock.is_lost:
            raise OSError("the connection was lost, and another process has begun the request since")

    def _keep(self, journal: OpenJournal, answer: tuple[int, str, bytes]) -> None:
        """Write an answer, all of it at once; only that there was one, where it has no room."""
        if len(answer[2]) <= self._answer_bytes:
            with suppress(OSError):
                journal.write_each([answer[:2], answer[2:]])
                self._add(0, len(answer[2]))
                return
        journal.write(*answer[:2], needs_room=False)

    def end(self, key: str) -> None:
        """Let others look at a key: its request is not carried out any more. Does not wait."""
        if (journal := self._open.pop(key, None)) is not None:
            journal.close()
