"""From a model's call to what a tool may be given: parse, prepare, check against the schema, say what is wrong.

The JSON Schema work is jsonschema-rs (Rust, compiled once per tool).
"""

from __future__ import annotations

import copy
import enum
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final, Self

from toolcell.calls.compiled_schema import MAX_PLAIN, compile_schema, flat_schema, large_from
from toolcell.calls.concurrency import maybe_await, passes_on
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Coercion, Extras
from toolcell.calls.result import ErrorCode
from toolcell.calls.schema import closed_properties, dicts_in, mentions_bytes, table_names, without_tables
from toolcell.calls.schema_walk import CheckedArguments, SchemaParts, Walk
from toolcell.calls.values import (
    CHARS_PER_ELEMENT,
    LARGE_ELEMENTS,
    MAX_INTEGER,
    MAX_PROBLEMS,
    MAX_TEXT_CHARS,
    MIN_INTEGER,
    BadValue,
    Copied,
    ValueProblem,
    bounded_json,
    copy_arguments,
    in_thread_if_large,
    is_large,
    json_copy,
    path_text,
    with_text_for_bytes,
)
from toolcell.errors import RegistrationError, UsageError
from toolcell.support.checks import brief, closest, text_of
from toolcell_bridge.wire.frozen import frozen, replaced

# JSON as models write it: in fences, with small mistakes, and broken off


class ParseMode(enum.StrEnum):
    """How a text was read as JSON."""

    STRICT = "strict"
    """It is JSON."""
    REPAIRED = "repaired"
    """Complete, but with small mistakes: code fences, raw line breaks in strings, trailing commas."""
    PARTIAL = "partial"
    """It breaks off; what was there has been kept."""
    INVALID = "invalid"
    """It cannot be read."""


SAFE_MODES = frozenset({ParseMode.STRICT, ParseMode.REPAIRED})
"""Arguments read in any other way may lack what the model was about to say; such calls are not run."""

_FENCE = re.compile(r"```(?:json)?[^\S\n]*+\n(?P<body>.*)```", re.DOTALL)
_MISTAKES = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*+"?)|,(?=\s*+[}\]])', re.DOTALL)
"""Strings, finished or not, and commas before a closing bracket. Possessive, so that work is linear."""
_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_json(text: str) -> tuple[Any, ParseMode]:
    """Read JSON that a model's stream may have left unfinished or slightly wrong.

    Shape: (value, mode); the value of invalid text is None. pydantic reads what breaks off; it takes no fences, no raw
    line breaks and no trailing commas, so these are mended before.
    """
    try:
        return json.loads(text), ParseMode.STRICT
    except (ValueError, RecursionError):
        pass
    text = text.removeprefix("\ufeff")
    if fenced := _FENCE.fullmatch(text.strip()):
        text = fenced["body"]
    text = _MISTAKES.sub(lambda found: _escaped(found["string"]) if found["string"] is not None else "", text)
    try:
        return json.loads(text), ParseMode.REPAIRED
    except (ValueError, RecursionError):
        pass
    from pydantic_core import from_json

    try:
        from_json(text)
    except TypeError:  # a lone surrogate
        return None, ParseMode.INVALID
    except ValueError as exc:
        if "EOF while parsing" not in str(exc):  # something is wrong before the end
            return None, ParseMode.INVALID
    try:
        return from_json(text, allow_partial="trailing-strings"), ParseMode.PARTIAL
    except ValueError:
        return None, ParseMode.INVALID


def _escaped(string: str) -> str:
    return _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], string)


MAX_SHOWN_CHARS = 4_000
"""Most characters of the received arguments in an error message."""


MAX_PLAIN_CHARS = 100_000
"""Characters of each argument that are copied without counting them all."""

Prepare = Callable[[dict[str, Any]], Any]


class ArgumentError(UsageError):
    """Arguments cannot be used; the message, after `prefix`, is for the model."""

    code = ErrorCode.INVALID_ARGUMENTS
    steps = 0
    """Values that were looked at."""

    def __init__(self, message: str, prefix: str = "invalid tool arguments: ", code: ErrorCode = code) -> None:
        super().__init__(message)
        self.prefix, self.code = prefix, code
        self.details: dict[str, Any] = {}


class InvalidArguments(ArgumentError):
    """Arguments do not fit a tool's schema."""

    def __init__(self, tool: str, problems: list[ValueProblem], received: Any, steps: int = 0) -> None:
        lines = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append("  - and more problems")
        listing = "\n".join(lines)
        shown = bounded_json(received, MAX_SHOWN_CHARS, "\n... (truncated)", indent=2)
        shown = shown.encode("utf-8", "replace").decode("utf-8")
        super().__init__(f'validation failed for tool "{tool}":\n{listing}\n\nReceived arguments:\n{shown}')
        self.problems = problems[: MAX_PROBLEMS + 1]
        self.details = {"fields": {path_text(problem.path): problem.message for problem in self.problems}}
        self.steps = steps


def read_arguments(text: str) -> tuple[Any, ParseMode]:
    """Read arguments that came as JSON text: also none, or twice as JSON text, which is how some models write them."""
    value, mode = parse_json(text) if text.strip() else ({}, ParseMode.STRICT)
    again = "" if value is None else value if isinstance(value, str) and value.lstrip()[:1] in ("{", '"') else None
    if again is None or mode not in SAFE_MODES:
        return value, mode
    value, mode = read_arguments(again)  # which is shorter
    return value, ParseMode.REPAIRED if mode is ParseMode.STRICT else mode


def parse_arguments(text: str) -> Any:
    """Parse arguments that came as JSON text, also in a code fence, with the small mistakes of models, or twice.

    Raises:
        ArgumentError: the text is not JSON, or it breaks off.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ArgumentError(f"{len(text)} characters of JSON, more than {MAX_TEXT_CHARS}", "invalid args: ")
    value, mode = read_arguments(text)
    if mode in SAFE_MODES:
        return value
    why = _BREAKS_OFF if mode is ParseMode.PARTIAL else ""
    try:
        why = f"its text is not JSON either: {brief(json.loads(text))}{why}"
    except (ValueError, RecursionError) as exc:
        why = f"{exc}{why}"
    raise ArgumentError(why, "invalid args: ")


_BREAKS_OFF: Final = "; it breaks off, perhaps at the limit of tokens of an answer: send less at once"


async def prepare_arguments(received: Any, prepare: Prepare | None, tables: Collection[str] = ()) -> Any:
    """Parse text, then let the tool's own preparation rewrite a private copy. `tables`: see `copy_arguments`.

    Raises:
        ArgumentError: the arguments are not JSON, or the preparation failed.
    """
    if isinstance(received, str):
        text = str.__str__(received)
        received = await in_thread_if_large(text, partial(parse_arguments, text))
    if received is None:  # how several models write "no arguments"
        received = {}
    if prepare is None or not isinstance(received, Mapping):
        return received
    try:
        mine = copy_arguments(received, tables).args
    except BadValue as exc:
        raise ArgumentError(str(exc)) from exc
    try:
        prepared = await maybe_await(prepare(mine))
    except BaseException as exc:
        if passes_on(exc):
            raise
        message = f"{type(exc).__name__}: {text_of(exc)}"
        raise ArgumentError(message, "preparing the arguments failed: ", ErrorCode.PREPARE_FAILED) from exc
    if not isinstance(prepared, dict):
        kind = type(prepared).__name__
        raise ArgumentError(f"returned {kind} in place of the dict of arguments", "prepare ", ErrorCode.PREPARE_FAILED)
    return prepared


class ArgumentChecker:
    """One tool's arguments: copy, mend, fill in defaults, validate.

    Making one checks and compiles the schema, but for that of a stranger. What else it says is found out at the first
    call, since most of many tools are never called.
    """

    def __init__(
        self,
        definition: ToolDefinition,
        coercion: Coercion = "safe",
        extras: Extras = "drop",
        validate: bool = True,
        *,
        is_foreign: bool = False,
        makes_bytes: bool = False,
    ) -> None:
        """`is_foreign`: a stranger wrote the schema. Then only `check_plain` uses what is flat in it, and a checker
        process all of it: `check` is not called. `makes_bytes`: base64 text becomes the bytes that the tool declares.
        """
        schema = definition.checked_parameters
        if extras == "forbid" and closed_properties(schema) is not None:
            schema["additionalProperties"] = False
        self.tool = definition.name
        self._definition = definition
        self._schema = schema
        self._coercion: Coercion = coercion
        self._extras: Extras = extras
        self._validates = validate
        self._is_foreign = is_foreign
        self._has_names_of_results = definition.has_names_of_results
        self._makes_bytes = makes_bytes and mentions_bytes(schema)
        self.tables = table_names(schema)
        """Names of arguments that may be arrays and tables."""
        self._large_from = most = LARGE_ELEMENTS if is_foreign else large_from(schema)
        self._plain_chars = MAX_PLAIN_CHARS if most == LARGE_ELEMENTS else most * CHARS_PER_ELEMENT
        """Characters of a text that `check_plain` may copy."""
        if not is_foreign:
            _ = self.is_valid  # a mistake of the tool's author shows here

    @functools.cached_property
    def _used_here(self) -> dict[str, Any]:
        """The schema, or what is flat in that of a stranger."""
        return flat_schema(self._schema) if self._is_foreign else self._schema

    @functools.cached_property
    def is_valid(self) -> Callable[[Any], bool]:
        """What says whether arguments fit what is used of the schema here."""
        if not self._validates:
            return lambda args: True
        try:
            is_valid = compile_schema(self._used_here).is_valid
        except RegistrationError as exc:
            if self._is_foreign:  # the checker process says what is wrong with it
                return lambda args: False
            raise RegistrationError(f"tool {self.tool!r}: {exc}") from exc
        return (lambda args: is_valid(without_tables(args))) if self.tables else is_valid

    def fits_here(self, received: Any) -> bool:
        """Return whether `check` takes a few milliseconds at most."""
        if self.tables and isinstance(received, Mapping):
            received = without_tables(received)
        return not (self._is_foreign or is_large(received, self._large_from))

    @functools.cached_property
    def spec_text(self) -> str:
        """What another process needs to make the same checker, as JSON."""
        return json.dumps([self.tool, self._schema, self._coercion, self._extras, self._validates, self._makes_bytes])

    @functools.cached_property
    def _parts(self) -> SchemaParts:
        return SchemaParts(self._used_here)

    @functools.cached_property
    def _closed(self) -> frozenset[str] | None:
        return closed_properties(self._schema) if self._extras == "drop" else None

    @functools.cached_property
    def _defaults(self) -> tuple[tuple[str, Any], ...]:
        properties = self._used_here.get("properties") or {}
        return tuple(
            (name, properties[name]["default"]) for name in self._parts.defaults(self._parts.node(self._used_here))
        )

    @functools.cached_property
    def _mends(self) -> bool:
        """Arguments are walked through, whatever they are."""
        return (
            self._coercion == "lenient"
            or _needs_walk(self._schema)
            or (not self._validates and self._coercion != "off")
            or self._has_names_of_results
            or self._makes_bytes
        )

    @functools.cached_property
    def _looks_below(self) -> bool:
        """Members may have members of their own that the schema does not name."""
        below = (part for each in self._schema.values() for part in dicts_in(each))
        return self._extras != "allow" and any(
            closed_properties(part) is not None and isinstance(part["properties"], dict) for part in below
        )

    @functools.cached_property
    def _own_names(self) -> dict[str, str]:
        return self._definition.own_names

    @functools.cached_property
    def _plain(self) -> frozenset[str]:
        """Names that `check_plain` may copy."""
        properties = frozenset(self._used_here.get("properties", ()))
        return properties if not self._mends and len(properties) <= MAX_PLAIN else frozenset()

    def renamed(self, tool: str) -> ArgumentChecker:
        """The same checks, reporting under another name."""
        twin = copy.copy(self)
        twin.tool = tool
        twin.__dict__.pop("spec_text", None)
        return twin

    def check_plain(self, args: dict[str, Any]) -> dict[str, Any] | None:
        """Return a copy of short plain scalars that need no change, in a fraction of the time that `check` takes.

        None: the arguments are anything else, and `check` must look at them.
        """
        plain = self._plain
        for name, value in args.items():
            kind = type(value)
            if kind is int:
                if not MIN_INTEGER <= value <= MAX_INTEGER:
                    return None
            elif kind is str:
                if len(value) > self._plain_chars or not value.isascii():
                    return None
            elif kind is not bool and value is not None:
                return None
            if name not in plain:
                return None
        if not plain:
            return None
        mine = self._filled(args)
        return mine if self.is_valid(mine) else None

    def _filled(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with the defaults of those that are absent."""
        mine = args.copy()
        for name, default in self._defaults:
            if name not in mine:
                mine[name] = json_copy(default)
        return mine

    def check(self, args: Any) -> CheckedArguments:
        """Return arguments fit for the tool; `args` itself is never touched.

        Raises:
            InvalidArguments: names every problem and its path.
        """
        if not isinstance(args, Mapping):
            kind = "null" if args is None else type(args).__name__
            problem = ValueProblem((), f"must be an object, not {kind}")
            rest = Walk(self._parts, Copied(), "off", "allow").problems(self._schema, {})
            raise InvalidArguments(self.tool, [problem, *rest], args)
        if not args.keys() <= self._schema.get("properties", {}).keys():
            own = {new: name for new, name in self._own_names.items() if name not in args}
            args = {own.get(name, name): value for name, value in args.items()}
        try:
            copied = copy_arguments(args, self.tables)
        except BadValue as exc:
            raise InvalidArguments(self.tool, [exc.problem], args, exc.steps) from None
        if copied.has_whole_floats or self._mends or copied.has_bytes or (self._looks_below and copied.has_containers):
            return self._mend(copied, args)
        mine, closed = self._filled(copied.args), self._closed
        if (closed is None or mine.keys() <= closed) and self.is_valid(mine):
            return CheckedArguments(mine, steps=copied.nodes)
        return self._mend(copied, args)

    def _mend(self, copied: Copied, received: Mapping[str, Any]) -> CheckedArguments:
        steps, tried = copied.nodes, list[tuple[Walk, CheckedArguments]]()
        for fill in (True, False):  # where arguments do not fit with all the defaults, they may fit without any
            walk = Walk(self._parts, copied, self._coercion, self._extras, fill=fill, makes_bytes=self._makes_bytes)
            try:
                mended = walk.arguments()
            except BadValue as exc:
                raise InvalidArguments(self.tool, [exc.problem], received, steps + walk.steps) from None
            steps += walk.steps
            tried.append((walk, mended))
            if (fits := self._fits(copied, mended)) or not (self._mends or self._defaults):
                break
        problems = walk.unknown if self._extras == "forbid" else []
        if not fits:
            walk, mended = tried[0]
            problems = [*self._find_bare_argument(copied.args), *(mended.problems or [walk.no_reason]), *walk.unknown]
        if problems:
            raise InvalidArguments(self.tool, problems, received, steps)
        return CheckedArguments(mended.args, mended.changes, mended.warnings, steps)

    def _fits(self, copied: Copied, mended: CheckedArguments) -> bool:
        """Return whether arguments are valid. A validator of JSON knows no bytes: what the walk says of them counts."""
        if not (copied.has_bytes or self._makes_bytes):
            return self.is_valid(mended.args)
        return not (self._validates and mended.problems) and self.is_valid(with_text_for_bytes(mended.args))

    def _find_bare_argument(self, args: dict[str, Any]) -> list[ValueProblem]:
        """Say which argument was given in place of all of them: `f(item)` where `f(item=item)` was meant."""
        properties = self._schema.get("properties", {})
        if not args or args.keys() & properties.keys():
            return []
        names = [*args][:MAX_PROBLEMS]
        for name in self._schema.get("required", ()):
            if not any(closest(each, [name]) for each in names) and self._parts.fits(properties.get(name), args):
                return [ValueProblem((), f"this is the value of one argument: write {name}=...")]
        return []


def _needs_walk(schema: Mapping[str, Any]) -> bool:
    """True when defaults below the first level must be filled in, which only a walk can do."""
    parts = [part for part in schema.get("properties", {}).values() if isinstance(part, dict)]
    below = [{key: value for key, value in part.items() if key not in ("default", "enum", "const")} for part in parts]
    others = {key: value for key, value in schema.items() if key != "properties"}
    return any("default" in part for part in dicts_in([*below, others]))


# The calls that a model asked for: providers write them in several forms


UNREADABLE = "unreadable_arguments"
"""In a transcript: the key under which arguments that could not be read are quoted."""

MAX_QUOTED_CHARS = 2_000

_KEYS = {"name", "tool", "id", "call_id", "type", "index"}
"""Keys of a call without arguments. What stands under another one, such as `parameters`, would be lost."""


class _WithText:
    """The text that arguments were read from. It is of one instance only, and no field of it."""

    __slots__ = ("_read",)

    _read: tuple[str, Mapping[str, Any]]
    """With the arguments as they were then. Unset when nothing was read."""


@frozen
class ToolCall(_WithText):
    """One call a model asked for."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """As received: a mapping, or JSON text."""
    mode: ParseMode = ParseMode.STRICT
    """How well the text of the arguments could be read."""

    @classmethod
    def read(cls, call: Any) -> Self:
        """Read a call from a ToolCall, a (name, arguments) pair, or a dict as OpenAI, Anthropic or toolcell writes it.

        An object of an SDK is read as the dict that it dumps.

        Raises:
            UsageError: it has another form.
        """
        if isinstance(call, cls):
            return call
        if isinstance(call, tuple) and len(call) == 2:
            return cls("", call[0], call[1])
        if callable(dump := getattr(call, "model_dump", None)):
            call = dump()
        if isinstance(call, Mapping):
            function = call.get("function")
            source = function if isinstance(function, Mapping) else call
            name = source.get("name", source.get("tool"))
            found: list[Any] = [source[key] for key in ("arguments", "args", "input") if key in source]
            if isinstance(name, str) and (found or source.keys() <= _KEYS):
                # The Responses API has both: `id` is that of the item, `call_id` what its answer refers to.
                ident = next((each for key in ("call_id", "id") if (each := call.get(key)) not in (None, "")), "")
                return cls(str(ident), name, found[0] if found else {})
        raise UsageError(f'{call!r:.200} is not a tool call; write ("name", {{...}})')

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text; text stays exactly as it was received."""
        received = self._received
        return received if isinstance(received, str) else json.dumps(received, ensure_ascii=False)

    @property
    def _received(self) -> Mapping[str, Any] | str:
        """The text that the arguments were read from, unless somebody has changed them since."""
        try:
            text, read = self._read
        except AttributeError:
            return self.arguments
        return text if self.arguments == read else self.arguments

    def parsed(self) -> Self:
        """Return the same call with its arguments as a mapping if they can be read as one; `mode` says how well."""
        if not isinstance(self.arguments, str):
            return self
        value, mode = read_arguments(self.arguments[:MAX_TEXT_CHARS])
        if mode is ParseMode.INVALID or not isinstance(value, dict):
            return replaced(self, mode=mode)
        parsed = replaced(self, arguments=value, mode=mode)
        try:
            read = json_copy(value)
        except RecursionError:  # deeper than any tool takes: it is refused
            read = value
        object.__setattr__(parsed, "_read", (self.arguments, read))
        return parsed

    def parsed_if_safe(self) -> Self:
        """Return the same call with its arguments read, unless something may be missing: then they stay text,
        which no tool accepts."""
        parsed = self.parsed()
        return parsed if parsed.mode in SAFE_MODES else replaced(parsed, arguments=parsed._received)

    def perhaps_cut(self) -> Self:
        """Return the last call of an answer that was cut off: its arguments break off, unless their text shows their
        end. An object may be what a server made of the beginning, and no text may be all that came."""
        received = self._received
        if isinstance(received, str) and received.strip():
            return self
        return replaced(self, arguments=json.dumps(received or {}, ensure_ascii=False)[:-1], mode=ParseMode.PARTIAL)

    @property
    def sent_arguments(self) -> dict[str, Any]:
        """The arguments as they stand in a transcript: what the tool was called with. Those of a call that was refused
        because they cannot be read are quoted, so that every provider takes them back."""
        read = self.parsed_if_safe().arguments
        return dict(read) if isinstance(read, Mapping) else {UNREADABLE: str(read)[:MAX_QUOTED_CHARS]}

    def to_openai(self) -> dict[str, Any]:
        """Return the call for a transcript. Arguments that came as the text of a JSON object stay that text.

        Shape: {"id", "type": "function", "function": {"name", "arguments": "<json>"}}.
        """
        parsed = self.parsed()
        sent = parsed._received
        is_object = parsed.mode is ParseMode.STRICT and isinstance(parsed.arguments, Mapping)
        if not (is_object and isinstance(sent, str) and sent.strip()):
            sent = json.dumps(parsed.sent_arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": sent}}


def unique_ids(calls: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the same calls, each with an id of its own: repeated ids get a suffix, missing ones are made up."""
    seen: set[str] = set()
    unique: list[ToolCall] = []
    for index, call in enumerate(calls):
        wanted = call.id or f"call_{index}"
        chosen, number = wanted, 2
        while chosen in seen:
            chosen, number = f"{wanted}_{number}", number + 1
        seen.add(chosen)
        unique.append(call if chosen == call.id else replaced(call, id=chosen))
    return unique


def decode_tool_call(tool: ToolDefinition, call: Any) -> dict[str, Any]:
    """Return the validated arguments of `call`, a call of `tool`.

    Raises:
        UsageError: the call is of another tool, or its arguments do not fit.
    """
    read = ToolCall.read(call).parsed_if_safe()
    if read.name != tool.name:
        raise UsageError(f"this is a call of {read.name!r}, not of {tool.name!r}")
    if read.mode not in SAFE_MODES:
        raise UsageError(f"the arguments of {tool.name!r} are {read.mode} JSON: something may be missing")
    return ArgumentChecker(tool).check(read.arguments).args
