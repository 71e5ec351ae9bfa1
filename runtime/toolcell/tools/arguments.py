"""Check arguments against a schema, and say what is wrong so that a model can mend it.

The JSON Schema work is jsonschema-rs (Rust, compiled once per tool).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.errors import RegistrationError, UsageError
from toolcell.tools.coercion import Change, Coercer, Mended, closed_properties, json_copy
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import Coercion, Extras
from toolcell.tools.problems import MAX_PROBLEMS, bounded_json, find_problems
from toolcell.tools.subschemas import Subschemas, compile_schema
from toolcell.tools.values import BadValue, Copied, Problem, copy_arguments

MAX_SHOWN_CHARS = 4_000
"""Of the received arguments in an error message."""


class InvalidArguments(UsageError):
    """Arguments do not fit a tool's schema."""

    code = "invalid_arguments"

    def __init__(self, tool: str, problems: list[Problem], received: Any) -> None:
        lines = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append("  - and more problems")
        listing = "\n".join(lines)
        shown = _shown(received)
        super().__init__(f'validation failed for tool "{tool}":\n{listing}\n\nReceived arguments:\n{shown}')
        self.problems = problems


def _shown(received: Any) -> str:
    try:
        text = bounded_json(received, MAX_SHOWN_CHARS, "\n... (truncated)", indent=2)
    except (ValueError, TypeError, RecursionError):
        text = f"({type(received).__name__} that cannot be shown as JSON)"
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class CheckedArguments:
    """Arguments a tool may be given, and what was done to make them fit."""

    args: dict[str, Any]
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


class ArgumentChecker:
    """One tool's arguments: copy, mend, fill in defaults, validate."""

    __slots__ = (
        "_closed", "_coercion", "_defaults", "_drop_extras", "_mends", "_schemas", "is_valid", "tool",
    )  # fmt: skip

    def __init__(
        self, definition: ToolDefinition, coercion: Coercion = "safe", extras: Extras = "drop", validate: bool = True
    ) -> None:
        try:
            schema = definition.parameters
            if extras == "forbid" and closed_properties(schema) is not None:
                schema["additionalProperties"] = False
            validator = compile_schema(schema)
        except RegistrationError as exc:
            raise RegistrationError(f"tool {definition.name!r}: {exc}") from exc
        self.tool = definition.name
        self._schemas = Subschemas(schema)
        self._coercion = coercion
        self._drop_extras = extras == "drop"
        self._closed = closed_properties(schema) if extras == "drop" else None
        self._defaults = _root_defaults(schema)
        self._mends = coercion == "lenient" or _needs_walk(schema)
        self.is_valid = validator.is_valid if validate else _anything

    def renamed(self, tool: str) -> ArgumentChecker:
        """The same checks, reporting under another name."""
        twin = copy.copy(self)
        twin.tool = tool
        return twin

    def check(self, args: Any) -> CheckedArguments:
        """Arguments fit for the tool; `args` itself is never touched.

        Raises:
            InvalidArguments: names every problem and its path.
        """
        if not isinstance(args, Mapping):
            kind = "null" if args is None else type(args).__name__
            problem = Problem((), f"must be an object, not {kind}")
            rest = find_problems(self._schemas, {}) if not self.is_valid({}) else []
            raise InvalidArguments(self.tool, [problem, *rest], args)
        try:
            copied = copy_arguments(args)
        except BadValue as exc:
            raise InvalidArguments(self.tool, [exc.problem], args) from None
        if copied.has_whole_floats or self._mends:
            return self._mend(copied, args)
        mine = copied.args
        for name, default in self._defaults:
            if name not in mine:
                mine[name] = json_copy(default)
        closed = self._closed
        if (closed is None or mine.keys() <= closed) and self.is_valid(mine):
            return CheckedArguments(mine)
        return self._mend(copy_arguments(args), args)

    def _mend(self, copied: Copied, received: Mapping[str, Any]) -> CheckedArguments:
        mended = Mended(copied.args)
        if self._coercion != "off":
            coercer = Coercer(self._schemas, copied, lenient=self._coercion == "lenient", drop_extras=self._drop_extras)
            try:
                mended = coercer.arguments()
            except BadValue as exc:
                raise InvalidArguments(self.tool, [exc.problem], received) from None
        if not self.is_valid(mended.args):
            raise InvalidArguments(self.tool, find_problems(self._schemas, mended.args), received)
        return CheckedArguments(mended.args, mended.changes, mended.warnings)


def _root_defaults(schema: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    properties = schema.get("properties", {})
    return tuple(
        (name, part["default"]) for name, part in properties.items() if isinstance(part, dict) and "default" in part
    )


def _needs_walk(schema: Mapping[str, Any]) -> bool:
    """True when defaults below the first level must be filled in, which only a walk can do."""
    parts = [part for part in schema.get("properties", {}).values() if isinstance(part, dict)]
    below = [{key: value for key, value in part.items() if key not in ("default", "enum", "const")} for part in parts]
    others = {key: value for key, value in schema.items() if key != "properties"}
    return _mentions_default(below) or _mentions_default(others)


def _mentions_default(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "default" in schema or any(map(_mentions_default, schema.values()))
    return isinstance(schema, list) and any(map(_mentions_default, schema))


def _anything(value: Any) -> bool:
    return True
