"""A tool for each kind of schema, all of one argument `x`; the types of some fail while they are decoded."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from typing_extensions import TypedDict

from toolcell.tools import ToolRegistry, ToolResult


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Unlucky(pydantic.BaseModel):
    """Its validator fails in a way that pydantic does not expect."""

    x: Any = None

    @pydantic.field_validator("x")
    @classmethod
    def _look(cls, value: Any) -> Any:
        return {}["missing"]


@dataclasses.dataclass
class Checked:
    """Fails when it is made."""

    x: Any = None

    def __post_init__(self) -> None:
        raise RuntimeError("not today")


@dataclasses.dataclass
class Leaving:
    """Ends the process when it is made, if it can."""

    x: Any = None

    def __post_init__(self) -> None:
        raise SystemExit(3)


@dataclasses.dataclass
class Endless:
    """Calls itself without end when it is made."""

    x: Any = None

    def __post_init__(self) -> None:
        Endless(self.x)


class Cat(pydantic.BaseModel):
    type: Literal["cat"]
    name: str


class Dog(pydantic.BaseModel):
    type: Literal["dog"]
    age: int


class Row(TypedDict):
    x: int
    y: NotRequired[list[str]]


TYPES: dict[str, Any] = {
    "any": Any, "int": int, "float": float, "str": str, "bool": bool, "bytes": bytes, "maybe_bytes": bytes | None,
    "blobs": list[bytes], "ints": list[int], "texts": list[str], "table": dict[str, int], "open": dict[str, Any],
    "maybe_int": int | None, "mixed": int | list[int] | dict[str, float], "literal": Literal["red", 1, None],
    "enum": Colour, "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time,
    "timedelta": datetime.timedelta, "decimal": decimal.Decimal, "uuid": uuid.UUID, "path": pathlib.Path,
    "set": set[int], "pair": tuple[int, str], "bounded": Annotated[int, pydantic.Field(ge=0, multiple_of=3)],
    "pattern": Annotated[str, pydantic.Field(pattern="^(a+)+$")], "url": pydantic.AnyUrl, "model": Cat,
    "pets": list[Annotated[Cat | Dog, pydantic.Field(discriminator="type")]], "row": Row, "rows": list[Row],
    "unlucky": Unlucky, "checked": Checked, "leaving": Leaving, "endless": Endless,
}  # fmt: skip
"""Tools that are functions with one annotated parameter."""

_TREE = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/tree"}},
    "$defs": {"tree": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}},
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "tree": _TREE,
    "silent": {"type": "object"},
    "untyped": {"type": "object", "properties": {"x": {}}},
    "types": {"type": "object", "properties": {"x": {"type": ["integer", "array", "null"]}}},
    "names": {"type": "object", "patternProperties": {"^x": {"type": "number"}}, "propertyNames": {"maxLength": 3}},
    "tuple": {
        "type": "object",
        "properties": {"x": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}},
    },
    "old_tuple": {"type": "object", "properties": {"x": {"type": "array", "items": [{"type": "integer"}]}}},
    "condition": {"type": "object", "if": {"required": ["x"]}, "then": {"properties": {"x": {"minimum": 3}}}},
    "negated": {"type": "object", "properties": {"x": {"not": {"type": ["string", "object"]}}}},
    "lookaround": {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?=(a+)+$)(a+)+$"}}},
    "broken_default": {
        "type": "object",
        "properties": {"x": {"type": "string", "default": None}, "y": {"default": []}},
    },
    "deep_default": {
        "type": "object",
        "properties": {"x": {"properties": {"x": {"type": "integer", "default": "no"}}}},
    },
    "unique": {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True, "contains": {"const": 1}}}},
    "base64": {"type": "object", "properties": {"x": {"type": "string", "contentEncoding": "base64"}}},
}

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"coercion": "lenient"},
    {"coercion": "off"},
    {"validate": False},
    {"extras": "forbid"},
    {"extras": "allow"},
)


def registry_of_all_kinds(options: dict[str, Any]) -> ToolRegistry:
    """Return a registry with all these tools, all with the same options."""
    return registry_of(options, *TYPES, *SCHEMAS)


def registry_of(options: dict[str, Any], *names: str) -> ToolRegistry:
    """Return a registry with some of these tools; all of them take as long to register as a whole test of one."""
    registry = ToolRegistry(timeout_s=60.0, max_batch=10_000, max_workers=4)
    for name in names:
        if name in TYPES:
            registry.tool(_taking(TYPES[name]), name=name, blocking=False, **options)
        else:
            text = "Take what its schema lets through."
            registry.register(name, text, SCHEMAS[name], _of_dict, blocking=False, **options)
    return registry


def _taking(kind: Any) -> Any:
    def take(x):  # type: ignore[no-untyped-def]
        """Take one argument of some type."""
        return ToolResult.ok(f"took {type(x).__name__}")

    take.__annotations__ = {"x": kind}
    return take


def _of_dict(args: dict[str, Any]) -> ToolResult:
    return ToolResult.ok(f"took {len(args)} arguments")
