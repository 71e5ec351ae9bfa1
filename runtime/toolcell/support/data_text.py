"""Data of scripts, tools and records as JSON for people: bytes, tables and what could not be recorded included."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from toolcell.support.packing import Unrecordable, value_digest
from toolcell_bridge.wire.tables import AnyTable, Array, Table

MAX_DEPTH: Final = 100
"""What is nested deeper is not shown: JSON encoders, and readers of JSON, have a limit of their own."""


def json_line(value: Any) -> str:
    """Return data as JSON on one line."""
    return json.dumps(jsonable(value), ensure_ascii=False)


def jsonable(value: Any, depth: int = 0, *, tables: Callable[[AnyTable], Any] = str) -> Any:
    """Convert data to what JSON can hold. `tables`: what is written of an array or a table."""
    match value:
        case Mapping() | list() | tuple() if depth >= MAX_DEPTH:
            return {"unrecordable": type(value).__name__, "text": f"nested deeper than {MAX_DEPTH}"}
        case Mapping():
            return {str(key): jsonable(item, depth + 1, tables=tables) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item, depth + 1, tables=tables) for item in value]
        case bytes():
            return {"base64": base64.b64encode(value).decode("ascii")}
        case Array() | Table():
            return {"table": jsonable(tables(value), depth + 1), "sha256": value_digest(value)}
        case Unrecordable(kind, text):
            return {"unrecordable": kind, "text": text}
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        case _:
            return value


def shown_text(value: Any, tables: Callable[[AnyTable], Any] = lambda table: str(table).split("\n")) -> str:
    """Return a text as it is, anything else as JSON. `tables`: what is in it of an array or a table, else its lines."""
    if isinstance(value, str):
        return value
    return json.dumps(jsonable(value, tables=tables), ensure_ascii=False, indent=1)
