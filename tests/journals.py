"""What runs need to go on, in a record or in `runs.db` of a folder, as another program sees and changes it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def rows(record: Path, query: str, *values: object) -> list[Any]:
    """Return what a statement gives; what it changes is committed."""
    with closing(sqlite3.connect(record / "runs.db" if record.is_dir() else record, isolation_level=None)) as database:
        return database.execute(query, values).fetchall()


def names(record: Path, kind: str = "run") -> list[str]:
    """Return the names of all journals of a kind."""
    return [name for (name,) in rows(record, "SELECT DISTINCT name FROM kept WHERE kind = ? ORDER BY name", kind)]


def replace(record: Path, kind: str, old: bytes, new: bytes) -> None:
    """Change bytes in the records of a kind, as a fault of the disk would."""
    for *place, body in rows(record, "SELECT name, n, body FROM kept WHERE kind = ?", kind):
        if old in body:
            change = "UPDATE kept SET body = ? WHERE kind = ? AND name = ? AND n = ?"
            rows(record, change, body.replace(old, new), kind, *place)


def forget(record: Path, kind: str) -> None:
    """Remove all journals of a kind."""
    rows(record, "DELETE FROM kept WHERE kind = ?", kind)


def make_old(record: Path) -> None:
    """Have everything look as if it was written long ago."""
    rows(record, "UPDATE kept SET at = 0")
