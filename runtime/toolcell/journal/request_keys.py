"""`RequestKeys`: which requests of a tenant were begun, by their idempotency keys, and what they were answered.

Each is a journal of the record: it is written before the request is carried out, and open meanwhile. Whoever finds one
that nobody has open and that has no answer knows that the process was killed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from toolcell.journal.database import REQUEST, JournalDatabase, OpenJournal, UnderWay
from toolcell.support.packing import unpack

ANSWER_BYTES: Final = 256 << 20
"""Of a record that may have any size."""
COUNT_S: Final = 1.0
"""How old a count of the keys may be."""

_COUNTS: Final = (
    "SELECT count(CASE WHEN n = 1 THEN 1 END), coalesce(sum(CASE WHEN n = 3 THEN length(body) END), 0), "
    "coalesce(min(at), 0) FROM kept WHERE kind = ?"
)
_DROP: Final = (
    "DELETE FROM kept WHERE kind = ? AND n = 3 AND at <= (SELECT max(at) FROM (SELECT at, sum(length(body)) "
    "OVER (ORDER BY at DESC, name) AS total FROM kept WHERE kind = ? AND n = 3) AS sized WHERE total > ?)"
)
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
        database: JournalDatabase,
        keep_s: float = 86_400.0,
        rows: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._keep_s, self._rows, self._clock = database, keep_s, rows, clock
        database.keep_s[REQUEST] = keep_s
        most = database.config.continue_bytes
        self._answer_bytes = ANSWER_BYTES if most is None else most // 4
        self._turn = threading.Lock()
        self._open: dict[str, OpenJournal] = {}
        """What this process carries out, by key."""
        self._count, self._oldest, self._counted = 0, 0.0, -math.inf
        """Keys, the time of the oldest one, and when they were counted."""

    def begin(self, key: str, digest: bytes, run_id: str) -> Entry:
        """Take a key for a request, or return what became of the request that has it. `digest`: of the request."""
        with self._turn:
            self._database.settle()  # one that could not be noted may not be closed yet
            try:
                journal = OpenJournal(self._database, REQUEST, key)
            except UnderWay:
                return self._found(key, digest, "running") or Entry("running")
            try:
                return self._found(key, digest, "interrupted") or self._begin(journal, digest, run_id)
            finally:
                if key not in self._open:
                    journal.close()
                    self._database.settle()  # then it is closed for everybody

    def _begin(self, journal: OpenJournal, digest: bytes, run_id: str) -> Entry:
        if (now := self._clock()) - self._counted > COUNT_S:
            self._count_again(now)
        if self._count >= self._rows:
            return Entry("full", retry_after_s=max(1.0, self._oldest + self._keep_s - now))
        journal.remove()  # what is too old
        try:
            journal.write(digest, run_id, needs_room=False)
            self._database.settle()
        except OSError:
            journal.remove()  # nor is it written later
            raise
        self._open[journal.name] = journal
        self._count += 1
        return Entry("begun", run_id)

    def _count_again(self, now: float) -> None:
        """Count the keys, and remove what is too old or too much."""
        self._database.forget_old(now)
        with self._database.reading() as db:
            self._count, size, oldest = db.execute(_COUNTS, (REQUEST,)).fetchone()
        if size > self._answer_bytes:
            self._database.change(_DROP, (REQUEST, REQUEST, self._answer_bytes * 7 // 8))
        self._oldest, self._counted = oldest / 1e9, now

    def _found(self, key: str, digest: bytes, unanswered: Literal["running", "interrupted"]) -> Entry | None:
        """Return what is recorded of a key. None: nothing, or it is too old."""
        with self._database.reading() as db:
            query = "SELECT n, at, body FROM kept WHERE kind = ? AND name = ? ORDER BY n"
            rows = db.execute(query, (REQUEST, key)).fetchall()
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
            self._count -= 1
        else:
            journal.write(*answer[:2], needs_room=False)
            if len(answer[2]) <= self._answer_bytes:
                with suppress(OSError):  # there is no room for it
                    journal.write(answer[2])
        self.end(key)
        self._database.settle()

    def end(self, key: str) -> None:
        """Let others look at a key: its request is not carried out any more. Does not wait."""
        if (journal := self._open.pop(key, None)) is not None:
            journal.close()
