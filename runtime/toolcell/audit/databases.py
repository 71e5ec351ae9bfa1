"""Which database a record is in, by the place that a caller names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeGuard

from toolcell.audit.sqlite_record import SqliteRecord
from toolcell.audit.store import RecordDatabase
from toolcell.errors import UsageError

Place = str | os.PathLike[str] | RecordDatabase
"""A file, or the URL of a PostgreSQL database."""


def is_url(place: Place) -> TypeGuard[str]:
    """Return whether this names a PostgreSQL database, and not a file."""
    return isinstance(place, str) and place.partition("://")[0].lower() in ("postgresql", "postgres") and "://" in place


def database_of(place: Place) -> RecordDatabase:
    """Return the database of a record. Nothing is opened.

    Raises:
        UsageError: the place has no name, or is a URL that cannot be one.
    """
    if isinstance(place, RecordDatabase):
        return place
    if not os.fspath(place):
        raise UsageError("a record's file needs a name, such as 'runs.db'")
    if is_url(place):
        from toolcell.audit.postgres_record import PostgresRecord

        scheme, _, rest = place.partition("://")
        return PostgresRecord(f"{scheme.lower()}://{rest}")
    if isinstance(place, str) and "://" in place:  # there may be a password in it
        raise UsageError(
            "record=: write a file, or the URL of a PostgreSQL database as libpq takes it: postgresql://..."
        )
    if re.match(r"postgres(ql)?[\w+.-]*:", os.fspath(place), re.IGNORECASE):
        raise UsageError("record=: write the URL of a PostgreSQL database as text, postgresql://..., not as a Path")
    return SqliteRecord(Path(place))
