"""Parameters that are arrays and frames: how a schema marks them, and what makes them of what was received."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Union, get_args, get_origin

from toolcell.calls.values import BadValue, ValueProblem
from toolcell_bridge.wire.tables import TABLES, Array, Table

MEDIA_TYPE: Final = "application/vnd.toolcell.table"
"""`contentMediaType` of such a parameter. A script sends an array or a frame, a model rows or lists."""

_METHODS: Final = {
    ("numpy", "ndarray"): "to_numpy",
    ("pandas", "DataFrame"): "to_pandas",
    ("pandas", "Series"): "to_pandas",
    ("polars", "DataFrame"): "to_polars",
    ("polars", "Series"): "to_polars",
    ("pyarrow", "Table"): "to_arrow",
}
"""By top-level package and class name: what makes one of a `Table`."""


def table_type(hint: Any) -> type | None:
    """Return the class of an annotation that stands for an array or a frame, or None for any other."""
    origin = get_origin(hint)
    if origin is Annotated:
        return table_type(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        some = [each for each in get_args(hint) if each is not type(None)]
        return table_type(some[0]) if len(some) == 1 else None
    kind = origin or hint
    if not isinstance(kind, type):
        return None
    return kind if kind in TABLES or _name_of(kind) in _METHODS else None


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__.partition(".")[0], kind.__qualname__


def table_schema(kind: type) -> dict[str, Any]:
    """Return the schema of a parameter of such a class."""
    shape = (
        "an array: numbers in lists" if kind is Array or kind.__qualname__ == "ndarray" else "a table: a list of rows"
    )
    return {"contentMediaType": MEDIA_TYPE, "description": f"{kind.__qualname__}, {shape}"}


def table_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that are arrays and frames."""
    properties = schema.get("properties") or {}
    return frozenset(
        name
        for name, each in properties.items()
        if isinstance(each, dict) and each.get("contentMediaType") == MEDIA_TYPE
    )


def without_tables(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a validator, which knows neither arrays nor tables; nothing is to be checked in them."""
    return {name: {} if type(each) in TABLES else each for name, each in args.items()}


def table_maker(name: str, kind: type) -> Callable[[Any], Any]:
    """Return what makes the value of a parameter of such a class.

    It raises `BadValue` where nothing can be made of what was received.
    """
    if kind in TABLES:
        return lambda value: _checked(name, kind, value)
    method = _METHODS[_name_of(kind)]

    def make(value: Any) -> Any:
        if value is None:
            return None
        made = value
        if isinstance(value, Array | Table):
            made = getattr(value, method)() if hasattr(value, method) else value.to_numpy()
        if isinstance(made, kind):
            return made
        try:
            if method == "to_arrow":
                return importlib.import_module("pyarrow").Table.from_pylist(made)
            if method == "to_numpy":
                return importlib.import_module("numpy").asarray(made)
            return kind(made)
        except Exception as exc:  # whatever rows of a model provoke in a package
            said = f"{type(exc).__name__}: {exc!s:.200}"
            raise BadValue(ValueProblem((name,), f"is not a {kind.__qualname__}: {said}")) from exc

    return make


def _checked(name: str, kind: type, value: Any) -> Any:
    if value is None or isinstance(value, kind):
        return value
    shown = type(value).__name__
    raise BadValue(ValueProblem((name,), f"must be {kind.__qualname__}, not {shown}; only a script can send one"))
