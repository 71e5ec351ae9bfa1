"""Files that scripts have returned, kept for a time so that they can be fetched: one SQLite file for each tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from toolcell.errors import StoreError
from toolcell.results import OutputFile
from toolcell.support import daemon_threads
from toolcell.support.log import logger_of
from toolcell.support.sqlite import SqliteDatabase

logger = logger_of("toolcell.service")

ROW_BYTES: Final = 256
"""What a file counts besides its content, so that very many empty ones find an end, too."""

_TABLES: Final = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, kept_at REAL NOT NULL, bytes INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE UNIQUE INDEX files_by_name ON files (run, name)
"""


class DownloadStore:
    """The returned files of one tenant. Old ones are forgotten, and the oldest make room for new ones.

    Invariant: the files that are kept have at most `most_bytes` together, with `ROW_BYTES` for each.
    """

    def __init__(self, folder: Path, keep_s: float, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """`keep_s`: how long a file is kept. With `most_bytes` 0, none is."""
        self._database = SqliteDatabase(folder / "files.sqlite", [_TABLES.split(";")], application_id=0x746C6B66)
        self._keep_s, self._most_bytes, self._clock = keep_s, most_bytes, clock

    async def keep(self, run_id: str, files: Iterable[OutputFile]) -> None:
        """Keep the files of a run. One that is larger than all together may be is not kept.

        A disk that is full spoils no result: it is logged.
        """
        found = [(each.name, each.data) for each in files if each.data is not None]
        found = [each for each in found if len(each[1]) + ROW_BYTES <= self._most_bytes]
        if not found:
            return
        try:
            await daemon_threads.run_sync(lambda: self._write(run_id, found))
        except StoreError as exc:
            logger.warning("the returned files of run %s are not kept: %s", run_id, exc)

    async def find(self, run_id: str, name: str) -> bytes | None:
        """Return the content of a file; None when it is not kept, or not any more.

        Raises:
            StoreError: the database cannot be used.
        """
        return await daemon_threads.run_sync(lambda: self._read(run_id, name)) if self._most_bytes else None

    async def close(self) -> None:
        await daemon_threads.run_sync(self._database.close)

    def _write(self, run_id: str, files: list[tuple[str, bytes]]) -> None:
        now = self._clock()
        with self._database.writing() as connection:
            connection.execute("DELETE FROM files WHERE kept_at <= ?", (now - self._keep_s,))
            for name, content in files:
                row = (run_id, name, now, len(content) + ROW_BYTES, content)
                connection.execute(
                    "INSERT OR REPLACE INTO files (run, name, kept_at, bytes, content) VALUES (?, ?, ?, ?, ?)", row
                )
            connection.execute(
                "DELETE FROM files WHERE number IN (SELECT number FROM ("
                "SELECT number, sum(bytes) OVER (ORDER BY number DESC) AS together FROM files) WHERE together > ?)",
                (self._most_bytes,),
            )

    def _read(self, run_id: str, name: str) -> bytes | None:
        wanted = (run_id, name, self._clock() - self._keep_s)
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT content FROM files WHERE run = ? AND name = ? AND kept_at > ?", wanted
            ).fetchone()
        return None if row is None else bytes(row[0])
