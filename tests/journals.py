"""The database of a directory of journals, as another program sees and changes it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def rows(folder: Path, query: str, *values: object) -> list[Any]:
    """Return what a statement gives; what it changes is committed."""
    with closing(sqlite3.connect(folder / "journals.db", isolation_level=None)) as database:
        return database.execute(query, values).fetchall()


def names(folder: Path, kind: str = "run") -> list[str]:
    """Return the names of all journals of a kind."""
    return [name for (name,) in rows(folder, "SELECT DISTINCT name FROM record WHERE kind = ? ORDER BY name", kind)]


def replace(folder: Path, kind: str, old: bytes, new: bytes) -> None:
    """Change bytes in the records of a kind, as a fault of the disk would."""
    for rowid, body in rows(folder, "SELECT rowid, body FROM record WHERE kind = ?", kind):
        if old in body:
            rows(folder, "UPDATE record SET body = ? WHERE rowid = ?", body.replace(old, new), rowid)


def forget(folder: Path, kind: str) -> None:
    """Remove all journals of a kind."""
    rows(folder, "DELETE FROM record WHERE kind = ?", kind)


def make_old(folder: Path) -> None:
    """Have everything look as if it was written long ago."""
    rows(folder, "UPDATE record SET at = 0")
