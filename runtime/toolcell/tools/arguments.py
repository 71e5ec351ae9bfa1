"""Checking arguments against a schema, and saying what is wrong so that a model can mend it.

The JSON Schema work is jsonschema-rs (Rust, compiled once per tool). Patterns run on its linear-time engine;
those that need lookaround or backreferences run with a bounded number of backtracks. References to other
documents are never fetched.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from jsonschema_rs import ValidationErrorKind as Kind

from toolcell.errors import RegistrationError, UsageError
from toolcell.tools.coercion import Change, Coercer, closed_properties, json_copy
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import Coercion, Extras
from toolcell.tools.suggestions import did_you_mean
from toolcell.tools.values import BadValue, Problem, copy_arguments

BACKTRACK_LIMIT = 20_000
"""Steps a pattern with lookaround may take; about a millisecond, then the value is refused."""
MAX_PROBLEMS = 20
MAX_SHOWN_CHARS = 4_000
"""Of the received arguments in an error message."""
_MAX_VALUE_CHARS = 120

JsonValidator = jsonschema_rs.Validator


class InvalidArguments(UsageError):
    """Arguments do not fit a tool's schema."""

    code = "invalid_arguments"

    def __init__(self, tool: str, problems: list[Problem], received: Any) -> None:
        lines = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"  - and {len(problems) - MAX_PROBLEMS} more problems")
        listing = "\n".join(lines)
        shown = _shown(received)
        super().__init__(f'validation failed for tool "{tool}":\n{listing}\n\nReceived arguments:\n{shown}')
        self.problems = problems


def _shown(received: Any) -> str:
    try:
        text = json.dumps(received, indent=2, ensure_ascii=False, default=repr)
    except (ValueError, TypeError, RecursionError):
        text = f"({type(received).__name__} that cannot be shown as JSON)"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}\n... (truncated)"


@dataclass(frozen=True, slots=True)
class CheckedArguments:
    """Arguments a tool may be given, and what was done to make them fit."""

    args: dict[str, Any]
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


def compile_schema(schema: Mapping[str, Any]) -> JsonValidator:
    """Compile a schema; its own errors show here, not at the first call.

    Raises:
        RegistrationError: the schema is not valid JSON Schema (2020-12, or draft 7 where it says so or
            writes tuples its way).
    """
    try:
        return _compile(schema, jsonschema_rs.RegexOptions())
    except (jsonschema_rs.ValidationError, ValueError):
        pass
    try:
        return _compile(schema, jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT))
    except (jsonschema_rs.ValidationError, ValueError) as exc:
        path = getattr(exc, "instance_path", ())
        reason = getattr(exc, "message", str(exc))
        raise RegistrationError(f"invalid schema at {'/'.join(map(str, path)) or 'root'}: {reason}") from exc


def _compile(
    schema: Mapping[str, Any], regex: jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions
) -> JsonValidator:
    chosen: Any = jsonschema_rs.Draft202012Validator
    if "$schema" in schema:
        chosen = jsonschema_rs.validator_for
    elif _has_tuple_items(schema):
        chosen = jsonschema_rs.Draft7Validator
    validator: JsonValidator = chosen(dict(schema), pattern_options=regex, offline=True)
    return validator


def _has_tuple_items(schema: Any) -> bool:
    """Draft 7 wrote tuples as a list of `items`; later drafts do not know that."""
    if isinstance(schema, Mapping):
        return isinstance(schema.get("items"), list) or any(map(_has_tuple_items, schema.values()))
    return isinstance(schema, list) and any(map(_has_tuple_items, schema))


class ArgumentChecker:
    """One tool's arguments: copy, mend, fill in defaults, validate."""

    __slots__ = (
        "_branches", "_closed", "_coercion", "_defaults", "_drop_extras", "_mends", "_schema", "_validator",
        "is_valid", "tool",
    )  # fmt: skip

    def __init__(
        self, definition: ToolDefinition, coercion: Coercion = "safe", extras: Extras = "drop", validate: bool = True
    ) -> None:
        try:
            schema = definition.parameters
            if extras == "forbid" and closed_properties(schema) is not None:
                schema["additionalProperties"] = False
            self._validator = compile_schema(schema)
        except RegistrationError as exc:
            raise RegistrationError(f"tool {definition.name!r}: {exc}") from exc
        self.tool = definition.name
        self._schema = schema
        self._coercion = coercion
        self._drop_extras = extras == "drop"
        self._closed = closed_properties(schema) if extras == "drop" else None
        self._branches: dict[int, Callable[[Any], bool]] = {}
        self._defaults = _root_defaults(schema)
        self._mends = coercion == "lenient" or _needs_walk(schema)
        self.is_valid = self._validator.is_valid if validate else _anything

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
            rest = self._problems({})
            raise InvalidArguments(self.tool, [problem, *rest], args)
        try:
            mine, has_whole_floats = copy_arguments(args)
        except BadValue as exc:
            raise InvalidArguments(self.tool, [exc.problem], args) from None
        if has_whole_floats or self._mends:
            return self._mend(mine, args)
        for name, default in self._defaults:
            if name not in mine:
                mine[name] = json_copy(default)
        closed = self._closed
        if (closed is None or mine.keys() <= closed) and self.is_valid(mine):
            return CheckedArguments(mine)
        return self._mend(copy_arguments(args)[0], args)

    def _mend(self, mine: dict[str, Any], received: Mapping[str, Any]) -> CheckedArguments:
        changes: list[Change] = []
        warnings: list[str] = []
        mended: Any = mine
        if self._coercion != "off":
            lenient = self._coercion == "lenient"
            coercer = Coercer(self._schema, self._branch_is_valid, lenient=lenient, drop_extras=self._drop_extras)
            mended, changes, warnings = coercer.arguments(mine), coercer.changes, coercer.warnings
        if not self.is_valid(mended):
            raise InvalidArguments(self.tool, self._problems(mended), received)
        return CheckedArguments(mended, tuple(changes), tuple(warnings))

    def _branch_is_valid(self, schema: Mapping[str, Any], value: Any) -> bool:
        # Keyed by identity: branches are parts of self._schema and live as long as it does.
        known = self._branches.get(id(schema))
        if known is None:
            try:
                known = compile_schema({**_definitions(self._schema), **schema}).is_valid
            except RegistrationError:
                known = _nothing
            self._branches[id(schema)] = known
        return known(value)

    def _problems(self, args: Any) -> list[Problem]:
        found = [*self._validator.iter_errors(args)]
        mistyped = [tuple(error.instance_path) for error in found if isinstance(error.kind, Kind.Type)]
        problems: list[Problem] = []
        for error in found:
            path = tuple(error.instance_path)
            below_mistyped = any(path[: len(bad)] == bad for bad in mistyped)
            if isinstance(error.kind, Kind.Type) or not below_mistyped:
                problems += explain(error, self._schema)
        return problems


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


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}


def _anything(value: Any) -> bool:
    return True


def _nothing(value: Any) -> bool:
    return False


def explain(error: jsonschema_rs.ValidationError, schema: Mapping[str, Any]) -> Iterator[Problem]:
    """One validation error as lines a model can act on."""
    path: tuple[str | int, ...] = tuple(error.instance_path)
    match error.kind:
        case Kind.Required(name):
            yield Problem(path, f"missing required property {_quoted(name)}")
        case Kind.AdditionalProperties(unexpected) | Kind.UnevaluatedProperties(unexpected):
            known = _known_properties(schema, path)
            for name in unexpected:
                yield Problem(path, f"unknown property {_quoted(name)}{did_you_mean(name, known)}")
        case Kind.Type(types):
            yield Problem(path, f"must be {' or '.join(types)}, not {_kind_of(error.instance)}")
        case Kind.Enum(options):
            allowed = ", ".join(_quoted(option) for option in options)
            near = did_you_mean(error.instance, map(str, options)) if isinstance(error.instance, str) else ""
            yield Problem(path, f"must be one of {allowed}, not {_quoted(error.instance)}{near}")
        case Kind.Constant(expected):
            yield Problem(path, f"must be {_quoted(expected)}, not {_quoted(error.instance)}")
        case Kind.BacktrackLimitExceeded():
            yield Problem(path, "is too costly to check against its pattern; write it more simply")
        case Kind.AnyOf(context) | Kind.OneOfNotValid(context):
            yield Problem(path, f"fits none of the allowed forms: {_alternatives(context)}")
        case _:
            yield Problem(path, error.message[:MAX_SHOWN_CHARS])


def _alternatives(context: list[list[jsonschema_rs.ValidationError]]) -> str:
    return "; or ".join(" and ".join(error.message[:200] for error in branch) for branch in context)


def _known_properties(schema: Any, path: tuple[str | int, ...]) -> list[str]:
    for step in path:
        if not isinstance(schema, Mapping):
            return []
        schema = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
    return list(schema.get("properties", {})) if isinstance(schema, Mapping) else []


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean ({'true' if value else 'false'})"
        case str():
            return f"string ({_quoted(value)})"
        case int() | float():
            return f"number ({value})"
        case list():
            return "array"
        case _:
            return "object"
