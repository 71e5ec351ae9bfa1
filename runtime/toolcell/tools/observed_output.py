"""What tools were seen to return, for the stubs of tools that do not declare it.

Only stubs and descriptions for models have it, marked as observed. It is not part of a tool's definition: arguments,
digests, audit records, checks of types and what scripts are told do not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from toolcell.tools.call import Call
from toolcell.tools.concurrency import ToolIdentity
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.result import Status, ToolResult
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.stubs import OBSERVED, is_observed
from toolcell.tools.table_arguments import MEDIA_TYPE
from toolcell_bridge.wire.tables import Array, Table

MIN_RESULTS: Final = 2
"""From so many results on a type is shown, and a field when so many records had it: a key that only one had is data."""
MAX_RESULTS: Final = 50
"""That are looked at. Then the type stays as it is."""
MAX_VISITED: Final = 500
"""Values of one result that are looked at."""
MAX_FIELDS: Final = 32
"""Most fields of one record; with more keys it is a mapping."""
MAX_FIELD_CHARS: Final = 64
MAX_DEPTH: Final = 4

_KINDS: Final = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_BYTES: Final = "bytes"
_TABLE: Final = "table"


class _Shape:
    """What was seen in one place of a tool's results."""

    __slots__ = ("_fields", "_is_mapping", "_items", "_kinds", "_records", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self._kinds: dict[str, None] = {}
        self._items: _Shape | None = None
        self._fields: dict[str, _Shape] = {}
        self._records = 0
        self._is_mapping = False

    def add(self, value: Any, left: Iterator[int], depth: int = 0) -> None:
        """Take note of a value, as long as `left` has turns."""
        if next(left, None) is None:
            return
        self.seen += 1
        match value:
            case bytes():
                self._kinds[_BYTES] = None
            case Array() | Table():
                self._kinds[_TABLE] = None
            case list():
                self._kinds["array"] = None
                if value and depth < MAX_DEPTH:
                    self._items = self._items or _Shape()
                    for item in value[:MAX_VISITED]:
                        self._items.add(item, left, depth + 1)
            case dict():
                self._kinds["object"] = None
                if depth < MAX_DEPTH:
                    self._add_record(value, left, depth)
            case _:
                self._kinds[_KINDS.get(type(value), "string")] = None

    def _add_record(self, value: Mapping[Any, Any], left: Iterator[int], depth: int) -> None:
        self._records += 1
        names = [name for name in value if isinstance(name, str) and len(name) <= MAX_FIELD_CHARS]
        if len(names) < len(value) or len(self._fields.keys() | names) > MAX_FIELDS:
            self._is_mapping = True
            self._fields.clear()
        if not self._is_mapping:
            for name in names:
                self._fields.setdefault(name, _Shape()).add(value[name], left, depth + 1)

    def schema(self) -> dict[str, Any]:
        """Return a JSON Schema of everything that was seen."""
        kinds = [kind for kind in self._kinds if kind != "integer" or "number" not in self._kinds]
        schemas = [self._schema(kind) for kind in kinds]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else {}

    def _schema(self, kind: str) -> dict[str, Any]:
        if kind == _BYTES:
            return {"type": "string", "contentEncoding": "base64"}
        if kind == "array":
            return {"type": "array"} | ({"items": self._items.schema()} if self._items is not None else {})
        if kind == _TABLE:
            return {"contentMediaType": MEDIA_TYPE}
        if kind != "object":
            return {"type": kind}
        fields = {name: field for name, field in self._fields.items() if field.seen >= MIN_RESULTS}
        if not fields:
            return {"type": "object"}
        required = [name for name, field in fields.items() if field.seen == self._records]
        properties = {name: field.schema() for name, field in fields.items()}
        return {"type": "object", "properties": properties, "required": required}


class ObservedOutput:
    """What one tool was seen to return. It takes a bounded amount of memory."""

    def __init__(self) -> None:
        self._shape, self._lock = _Shape(), threading.Lock()
        self._schema: Mapping[str, Any] | None = None

    def add(self, value: Any) -> None:
        """Take note of a result, as a script gets it."""
        with self._lock:
            if self._shape.seen >= MAX_RESULTS:
                return
            self._shape.add(value, iter(range(MAX_VISITED)))
            if self._shape.seen >= MIN_RESULTS:
                self._schema = self._shape.schema() | {OBSERVED: self._shape.seen}

    def schema(self) -> Mapping[str, Any] | None:
        """Return the JSON Schema with the number of results as `x-observed`; None after too few."""
        return self._schema


_observed: WeakKeyDictionary[ToolIdentity, ObservedOutput] = WeakKeyDictionary()
_lock = threading.Lock()


def note_result(state: RegistryState, call: Call, result: ToolResult) -> None:
    """Take note of what a tool returned, unless it declares that. What a dry run made up does not count."""
    tool = state.tools.get(call.name)
    if tool is None or not _is_open(tool) or result.status is not Status.OK:
        return
    if not call.is_executed or call.run.dry_run is not None or tool.options.orchestrates:
        return
    with _lock:
        observed = _observed.setdefault(tool.identity, ObservedOutput())
    observed.add(result.guest_value())


def _is_open(tool: RegisteredTool) -> bool:
    """Return whether a tool declares nothing about what it returns."""
    return tool.options.returns is None or is_observed(tool.options.returns)


def with_observed(state: RegistryState) -> RegistryState:
    """Return a state whose tools have the types that were observed until now, in place of none."""
    if not state.settings.observe_outputs or state.has_observed:
        return state
    with _lock:
        found = {tool.name: _observed.get(tool.identity) for tool in state.tools.values() if _is_open(tool)}
    new = {name: each.schema() for name, each in found.items() if each is not None}
    tools = {
        name: _returning(tool, new[name]) if new.get(name) is not None else tool for name, tool in state.tools.items()
    }
    return replace(state, tools=tools, has_observed=True)


def _returning(tool: RegisteredTool, returns: Mapping[str, Any] | None) -> RegisteredTool:
    spec = replace(tool.spec, options=replace(tool.options, returns=returns))
    return RegisteredTool(spec, tool.checker, tool.aliases, tool.identity)
