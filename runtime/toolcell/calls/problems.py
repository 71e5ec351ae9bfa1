"""Find and describe what is wrong with arguments, in time that is linear in their size.

jsonschema-rs says whether a value is valid in linear time. Its errors cost more: it collects every one of them, each
holds a copy of its value, and a union inside a union is described again for every branch. This module asks only for
validity on the way down, follows what is invalid, and stops after `MAX_PROBLEMS`. Functions import the library: a
program without tools does not need it.

Each part of a schema has a validator of its own that is compiled at its first use: jsonschema-rs answers `is_valid` in
time linear in the value, for recursive unions too, and describing problems and mending arguments ask for nothing else.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from toolcell.calls.schema import pointed
from toolcell.calls.schema_keywords import KEYWORDS
from toolcell.calls.schema_patterns import counted_repetitions, large_from
from toolcell.calls.values import MAX_STEP_CHARS, Path, ValueProblem, is_large
from toolcell.errors import RegistrationError
from toolcell.support.spelling import did_you_mean

if TYPE_CHECKING:
    import jsonschema_rs
    from jsonschema_rs import Validator
    from pydantic import ValidationError

BACKTRACK_LIMIT = 20_000
"""Steps a pattern with lookaround may take; about a millisecond, then the value is refused."""
MAX_LEVELS = 200
"""Most levels of dicts and lists in a schema. Whoever reads it calls itself for each of them."""
MAX_REFERENCES = 16
"""References that are followed for one value; a chain that is longer may be a circle."""

_ROOT = "urn:toolcell:schema"
_DEFINITIONS = ("$defs", "definitions", "$schema")

Part = Mapping[str, Any]


def compile_schema(schema: Part, registry: jsonschema_rs.Registry | None = None, like: Part | None = None) -> Validator:
    """Compile a schema; its own errors show here, not at the first call.

    Patterns run on a linear-time engine. Patterns that need lookaround or backreferences run with a bounded number
    of backtracks. References to other documents are never fetched. `like` chooses the draft in place of `schema`.

    Raises:
        RegistrationError: the schema is not valid JSON Schema (2020-12, or draft 7 where it says so or
            writes tuples its way), or is nested too deeply.
    """
    if like is None:
        check_levels(schema)
    return _compiled(_draft(schema if like is None else like), counted_repetitions(schema), registry)


def check_levels(schema: Any) -> None:
    """Refuse a schema that is nested too deeply, its references aside.

    Raises:
        RegistrationError: it is.
    """
    level, parts = 0, [schema]
    while parts := [inner for each in parts for inner in _inner(each) if isinstance(inner, dict | list)]:
        level += 1
        if level > MAX_LEVELS:
            raise RegistrationError(f"invalid schema: it is nested deeper than {MAX_LEVELS} levels")


def _inner(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def _compiled(chosen: Any, schema: Part, registry: jsonschema_rs.Registry | None) -> Validator:
    import jsonschema_rs

    try:
        return _compile(chosen, schema, jsonschema_rs.RegexOptions(), registry)
    except (jsonschema_rs.ValidationError, ValueError):
        pass
    try:
        return _compile(chosen, schema, jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT), registry)
    except (jsonschema_rs.ValidationError, ValueError) as exc:
        path = getattr(exc, "instance_path", ())
        reason = getattr(exc, "message", str(exc))
        raise RegistrationError(f"invalid schema at {'/'.join(map(str, path)) or 'root'}: {reason}") from exc


def _compile(chosen: Any, schema: Part, regex: Any, registry: jsonschema_rs.Registry | None) -> Validator:
    validator: Validator = chosen(
        schema, pattern_options=regex, registry=registry, offline=True, validate_formats=False, keywords=KEYWORDS
    )
    return validator


def _draft(schema: Part) -> Any:
    import jsonschema_rs

    if "$schema" in schema:
        return jsonschema_rs.validator_for
    return jsonschema_rs.Draft7Validator if _has_tuple_items(schema) else jsonschema_rs.Draft202012Validator


def _has_tuple_items(schema: Any) -> bool:
    """Draft 7 wrote tuples as a list of `items`; later drafts do not know that."""
    if isinstance(schema, dict):
        return isinstance(schema.get("items"), list) or any(map(_has_tuple_items, schema.values()))
    return isinstance(schema, list) and any(map(_has_tuple_items, schema))


class Subschemas:
    """One schema and its parts. A part is identified by the object that it is inside the schema."""

    def __init__(self, root: Part) -> None:
        self.root = root
        self._pointers: dict[int, str] | None = None
        self._registry: jsonschema_rs.Registry | None = None
        self._checks: dict[int, Callable[[Any], bool]] = {}
        self._derived: dict[tuple[str, int], Validator | None] = {}
        self._defaults: dict[int, bool] = {}

    def is_valid(self, part: Any, value: Any) -> bool:
        """True when `value` is valid under this part. A part that cannot be compiled accepts nothing."""
        if not isinstance(part, dict):
            return part is True
        check = self._checks.get(id(part))
        if check is None:
            self._checks[id(part)] = check = self._compiled(part)
        return check(value)

    def has_default(self, part: Any) -> bool:
        """True when a part has a default that fits it. Many schemas of the world have others, such as null for text."""
        if not (isinstance(part, dict) and "default" in part):
            return False
        if id(part) not in self._defaults:
            self._defaults[id(part)] = self.is_valid(part, part["default"])
        return self._defaults[id(part)]

    def derived(self, name: str, part: Part, make: Callable[[Part], Part]) -> Validator | None:
        """A validator of `make(part)`, with the definitions of the whole schema; None where it cannot be compiled."""
        key = (name, id(part))
        if key not in self._derived:
            definitions = {each: self.root[each] for each in _DEFINITIONS if each in self.root}
            try:
                self._derived[key] = compile_schema({**definitions, **make(part)}, like=self.root)
            except RegistrationError:
                self._derived[key] = None
        return self._derived[key]

    def resolved(self, part: Any) -> Any:
        """Follow references inside the schema. None for one that leads nowhere or in circles."""
        for _ in range(MAX_REFERENCES):
            if not (isinstance(part, dict) and "$ref" in part):
                return part
            part = self.referenced(part)
        return None

    def referenced(self, part: Part) -> Any:
        """The part that `part` refers to; None where there is none."""
        return pointed(self.root, str(part["$ref"]))

    def _compiled(self, part: Part) -> Callable[[Any], bool]:
        if self._pointers is None:
            import jsonschema_rs

            self._pointers = dict(_pointers(self.root))
            self._registry = jsonschema_rs.Registry(
                [(_ROOT, counted_repetitions(self.root))], **_registry_draft(self.root)
            )
        pointer = self._pointers.get(id(part))
        try:
            if pointer is not None:
                return compile_schema({"$ref": f"{_ROOT}#{pointer}"}, self._registry, like=self.root).is_valid
            return compile_schema(part, like=self.root).is_valid
        except RegistrationError:
            return _refuse


def _registry_draft(root: Part) -> dict[str, Any]:
    import jsonschema_rs

    return {"draft": jsonschema_rs.Draft7} if "$schema" not in root and _has_tuple_items(root) else {}


def _pointers(root: Part) -> list[tuple[int, str]]:
    """JSON Pointer of every mapping in a schema, percent-encoded for a URI fragment, by identity."""
    found: list[tuple[int, str]] = []
    pending: list[tuple[Any, str]] = [(root, "")]
    while pending:
        value, pointer = pending.pop()
        if isinstance(value, dict):
            found.append((id(value), pointer))
            pending += [(item, f"{pointer}/{_escaped(str(key))}") for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, f"{pointer}/{index}") for index, item in enumerate(value)]
    return found


def _escaped(key: str) -> str:
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~")


def _refuse(value: Any) -> bool:
    return False


MAX_PROBLEMS = 20
MAX_MESSAGE_CHARS = 4_000
"""Most characters of one problem: two long lists of allowed values are more than a model needs to read."""
DESCRIBING_S = 0.5
"""Processor time in which problems are looked for: a value is checked again on each of its levels."""
MAX_LISTED_ERRORS = 1000
"""Errors of pydantic, of which the first `MAX_PROBLEMS` are named. It can only list all of them, and each takes 400
bytes."""
MAX_BRANCHES = 8
"""Branches of a union that a message describes."""
BRANCH_PROBLEMS = 3
"""Problems of one branch that a message names."""
_MAX_VALUE_CHARS = 120

_ELSEWHERE = frozenset({
    "$ref", "$defs", "definitions", "$schema", "$id", "anyOf", "oneOf", "allOf", "if", "then", "else",
    "dependentSchemas", "propertyNames", "default", "title", "description", "examples",
})  # fmt: skip
"""Keywords that say nothing about a value itself, or that `_Finder` follows one by one."""
_BESIDE = ("properties", "patternProperties", "prefixItems", "minContains", "maxContains")
"""Keywords that another one is read with. Alone they break nothing, once members do not count."""
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems")
_NESTED = ("anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$ref")


def find_problems(schemas: Subschemas, value: Any) -> list[ValueProblem]:
    """What is wrong with an invalid value: at most `MAX_PROBLEMS`, and one more when there are more."""
    finder = _Finder(schemas, time.process_time() + DESCRIBING_S)
    return list(itertools.islice(finder.below(schemas.root, value, ()), MAX_PROBLEMS + 1))


class _Finder:
    """Walks down whatever is invalid. Describes a union only where it is not inside another one."""

    def __init__(self, schemas: Subschemas, until: float, is_in_union: bool = False) -> None:
        """`until`: processor time after which nothing more is looked for."""
        self._schemas = schemas
        self._until = until
        self._is_in_union = is_in_union

    def below(self, part: Any, value: Any, path: Path, references: int = 0) -> Iterator[ValueProblem]:
        """The problems of a value that is invalid under `part`, its own before those of its members."""
        if not isinstance(part, dict) or references > MAX_REFERENCES:
            yield ValueProblem(path, "is not allowed here")
            return
        if time.process_time() > self._until:
            yield ValueProblem(path, "does not fit its schema, and is too large for it to say where; send less")
            return
        found = False
        for is_final, problem in self._own_problems(part, value, path):
            found = True
            yield problem
            if is_final:
                return
        for problem in itertools.chain(
            self._same_value(part, value, path, references),
            *(self._union(part[keyword], keyword, value, path) for keyword in ("anyOf", "oneOf") if keyword in part),
            self._names(part, value, path),
            self._members(part, value, path),
        ):
            found = True
            yield problem
        if not found:
            yield ValueProblem(path, "does not fit its schema")

    def _own_problems(self, part: Part, value: Any, path: Path) -> Iterator[tuple[bool, ValueProblem]]:
        """What the value itself breaks, whatever its members are. True: a wrong type, after which nothing counts."""
        validator = self._schemas.derived("own", part, _without_members)
        if validator is None or validator.is_valid(value):
            return
        if (isinstance(value, dict | list) and is_large(value)) or not _is_simple(_without_members(part)):
            yield from self._own_of_large(part, value, path)
            return
        from jsonschema_rs import ValidationErrorKind as Kind

        errors = [*validator.iter_errors(value)]
        mistyped = [error for error in errors if isinstance(error.kind, Kind.Type) and not error.instance_path]
        for error in mistyped or errors:
            for text in _explain(error, value, part):
                yield bool(mistyped), ValueProblem((*path, *error.instance_path), text[:MAX_MESSAGE_CHARS])

    def _own_of_large(self, part: Part, value: Any, path: Path) -> Iterator[tuple[bool, ValueProblem]]:
        """The same, one keyword at a time: each error of the library would hold a copy of the value."""
        own = _without_members(part)
        beside = {keyword: own[keyword] for keyword in _BESIDE if keyword in own}
        for keyword in sorted(own, key=lambda keyword: keyword != "type"):
            alone = {**beside, keyword: own[keyword]}
            validator = self._schemas.derived(f"own {keyword}", part, lambda _, alone=alone: alone)  # type: ignore[misc]
            if validator is None or validator.is_valid(value):
                continue
            for text in self._explain_large(keyword, part, value):
                yield keyword == "type", ValueProblem(path, text[:MAX_MESSAGE_CHARS])

    def _explain_large(self, keyword: str, part: Part, value: Any) -> Iterator[str]:
        asked = part[keyword]
        match keyword:
            case "type":
                yield _wrong_type([asked] if isinstance(asked, str) else sorted(asked), value)
            case "required":
                yield from (_missing(name) for name in asked if name not in value)
            case "additionalProperties" | "unevaluatedProperties":
                known, patterns = part.get("properties", {}), part.get("patternProperties", {})
                unknown = (
                    name
                    for name in value
                    if name not in known and not any(self._matches(part, pattern, name) for pattern in patterns)
                )
                yield from _unknown(unknown, part)
            case _:
                held = f", and has {len(value)}" if keyword in _COUNTS else ""
                yield f"does not fit {keyword} {quoted(asked)}{held}"

    def _same_value(self, part: Part, value: Any, path: Path, references: int) -> Iterator[ValueProblem]:
        """Problems under the parts that speak about the same value."""
        schemas = self._schemas
        parts: list[Any] = [*part.get("allOf", ())]
        if "$ref" in part:
            parts.append(schemas.referenced(part))
        if "if" in part:
            parts.append(part.get("then" if schemas.is_valid(part["if"], value) else "else", True))
        if isinstance(value, dict):
            parts += [each for name, each in part.get("dependentSchemas", {}).items() if name in value]
        for each in parts:
            if not schemas.is_valid(each, value):
                yield from self.below(each, value, path, references + 1)

    def _union(self, branches: Sequence[Any], keyword: str, value: Any, path: Path) -> Iterator[ValueProblem]:
        fitting = sum(self._schemas.is_valid(branch, value) for branch in branches)
        if fitting > 1 and keyword == "oneOf":
            yield ValueProblem(path, f"fits {fitting} of the allowed forms, and must fit exactly one")
        if fitting:
            return
        if self._is_in_union:
            yield ValueProblem(path, "fits none of the allowed forms")
            return
        inner = _Finder(self._schemas, self._until, is_in_union=True)
        shown = [self._branch(inner, branch, value) for branch in branches[:MAX_BRANCHES]]
        more = "; ..." if len(branches) > MAX_BRANCHES else ""
        text = f"fits none of the allowed forms: {'; or '.join(shown)}{more}"
        yield ValueProblem(path, text[:MAX_MESSAGE_CHARS])

    @staticmethod
    def _branch(inner: _Finder, branch: Any, value: Any) -> str:
        problems = itertools.islice(inner.below(branch, value, ()), BRANCH_PROBLEMS)
        return " and ".join((str(problem) if problem.path else problem.message)[:200] for problem in problems)

    def _names(self, part: Part, value: Any, path: Path) -> Iterator[ValueProblem]:
        if "propertyNames" not in part or not isinstance(value, dict):
            return
        for name in value:
            if not self._schemas.is_valid(part["propertyNames"], name):
                for problem in self.below(part["propertyNames"], name, ()):
                    yield ValueProblem(path, f"property name {quoted(name)} {problem.message}")

    def _members(self, part: Part, value: Any, path: Path) -> Iterator[ValueProblem]:
        if isinstance(value, dict):
            members: Iterator[tuple[str | int, Any, Any]] = self._properties(part, value)
        elif isinstance(value, list):
            members = _items(part, value)
        else:
            return
        for step, item, below in members:
            if not self._schemas.is_valid(below, item):
                yield from self.below(below, item, (*path, step))

    def _properties(self, part: Part, value: dict[str, Any]) -> Iterator[tuple[str | int, Any, Any]]:
        properties, extra = part.get("properties", {}), part.get("additionalProperties", True)
        patterns = part.get("patternProperties", {})
        for name, item in value.items():
            is_known = name in properties
            if is_known:
                yield name, item, properties[name]
            for pattern, below in patterns.items():
                if self._matches(part, pattern, name):
                    is_known = True
                    yield name, item, below
            if not is_known and isinstance(extra, Mapping):
                yield name, item, extra

    def _matches(self, part: Part, pattern: str, name: str) -> bool:
        """Whether a name matches, asked of the engine whose work is bounded."""
        refusing = self._schemas.derived(f"pattern {pattern}", part, lambda _: {"patternProperties": {pattern: False}})
        return refusing is not None and not refusing.is_valid({name: None})


def _items(part: Part, value: list[Any]) -> Iterator[tuple[str | int, Any, Any]]:
    each, first = part.get("items", True), part.get("prefixItems", ())
    if isinstance(each, list):
        each, first = part.get("additionalItems", True), each
    for index, item in enumerate(value):
        below = first[index] if index < len(first) else each
        if below is not True:
            yield index, item, below


def _without_members(part: Part) -> Part:
    """A schema that says of a value what `part` says, its members aside."""
    own = {key: value for key, value in part.items() if key not in _ELSEWHERE}
    for keyword in ("properties", "patternProperties"):
        if keyword in own:
            own[keyword] = dict.fromkeys(own[keyword], True)
    if isinstance(own.get("additionalProperties"), Mapping):
        del own["additionalProperties"]
    for keyword in ("items", "additionalItems"):
        if own.get(keyword) is not False:
            own.pop(keyword, None)
    if "prefixItems" in own:
        own["prefixItems"] = [True] * len(own["prefixItems"])
    if any(keyword in part for keyword in _NESTED):
        own.pop("unevaluatedProperties", None)
        own.pop("unevaluatedItems", None)
    return own


_SIMPLE = frozenset({
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "required", "minProperties",
    "maxProperties", "dependentRequired", "properties", "patternProperties", "additionalProperties", "prefixItems",
    "items", "additionalItems", "contentEncoding", "contentMediaType", "$comment", "readOnly", "writeOnly",
})  # fmt: skip
"""Keywords whose errors the library lists in linear time: none of them holds a schema, once members do not count."""


def _is_simple(own: Part) -> bool:
    return all(key in _SIMPLE or key.startswith("x-") for key in own)


def _explain(error: jsonschema_rs.ValidationError, value: Any, part: Part) -> Iterator[str]:
    """One validation error as lines that a model can act on."""
    from jsonschema_rs import ValidationErrorKind as Kind

    value = error.instance if error.instance_path else value
    match error.kind:
        case Kind.Required(name):
            yield _missing(name)
        case Kind.AdditionalProperties(unexpected) | Kind.UnevaluatedProperties(unexpected):
            yield from _unknown(unexpected, part)
        case Kind.Type(types):
            yield _wrong_type(types, value)
        case Kind.Enum(options):
            near = did_you_mean(value, map(str, options)) if isinstance(value, str) else ""
            yield f"must be one of {_listed(options)}, not {quoted(value)}{near}"
        case Kind.Constant(expected):
            yield f"must be {quoted(expected)}, not {quoted(value)}"
        case Kind.BacktrackLimitExceeded():
            yield "is too costly to check against its pattern; write it more simply"
        case _:
            yield error.message


def _listed(options: Iterable[Any]) -> str:
    """Return options until the message is full: a schema may have thousands."""
    listed, left = list[str](), MAX_MESSAGE_CHARS
    for option in options:
        listed.append(quoted(option))
        left -= len(listed[-1])
        if left < 0:
            break
    return ", ".join(listed)


def _missing(name: str) -> str:
    return f"missing required property {quoted(name)}"


def _unknown(names: Iterable[str], part: Part) -> Iterator[str]:
    known = list(part.get("properties", {}))
    for name in itertools.islice(names, MAX_PROBLEMS + 1):
        yield f"unknown property {quoted(name)}{did_you_mean(name, known)}"


def _wrong_type(types: Iterable[str], value: Any) -> str:
    return f"must be {' or '.join(types)}, not {_kind_of(value)}"


def quoted(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    return bounded_json(value, _MAX_VALUE_CHARS, "...")


def bounded_json(value: Any, most: int, cut: str, indent: int | None = None) -> str:
    """A value as JSON of at most `most` characters, followed by `cut` where that is not all. Stops encoding there."""

    def odd_leaf(value: Any) -> str:
        return repr(value[:most] if isinstance(value, bytes) else value)

    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, indent=indent, default=odd_leaf).iterencode(value):
            text += piece[: most + 1]
            if len(text) > most:
                return text[:most] + cut
    except (Exception, SystemExit):  # it contains itself, has keys of a strange type, or its own code fails
        return f"({type(value).__name__} that cannot be shown as JSON)"
    return text


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean ({'true' if value else 'false'})"
        case str():
            return f"string ({quoted(value)})"
        case int() | float():
            return f"number ({value})"
        case list():
            return "array"
        case _:
            return "object"


# Names that do not exist

MAX_LISTED = 20
"""Names a message lists before it only says how many more there are."""


def list_names(names: Iterable[str]) -> str:
    """Shape: 'a, b, c and 7 more'."""
    every = list(names)
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more


class ParameterError(ValueError):
    """The type of one parameter refuses a value that fits its schema. Keeps pydantic's error until it is described."""

    def __init__(self, name: str, error: ValidationError) -> None:
        super().__init__(name)
        self.name = name
        self.error = error


def described(exc: ValueError | TypeError) -> str:
    """Say what a tool's own Python types found wrong with arguments that fit its schema."""
    from pydantic import ValidationError

    above: Path = ()
    if isinstance(exc, ParameterError):
        above, exc = (exc.name,), exc.error
    if not isinstance(exc, ValidationError):
        return str(exc)[:MAX_MESSAGE_CHARS]
    if (count := exc.error_count()) > MAX_LISTED_ERRORS:
        return f"{count} validation errors for {exc.title[:MAX_STEP_CHARS]}"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:MAX_PROBLEMS]
    named = [str(ValueProblem((*above, *error["loc"]), error["msg"][:MAX_MESSAGE_CHARS])) for error in errors]
    if count > MAX_PROBLEMS:
        named.append("and more problems")
    return "\n  - ".join(named)


class ValueCheck:
    """Checks values against one schema. The library's `is_valid` takes linear time, and its errors do not."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Compile the schema.

        Raises:
            RegistrationError: it cannot be used.
        """
        self._schemas = Subschemas(schema)
        self._is_valid = compile_schema(schema).is_valid
        self._large_from = large_from(schema)

    def fits_here(self, value: Any) -> bool:
        """Return whether a check of the value takes a few milliseconds at most, if the schema is not hostile."""
        return not is_large(value, self._large_from)

    def problem(self, value: Any) -> ValueProblem | None:
        """Return what is wrong first; None when the value fits."""
        try:
            return None if self._is_valid(value) else find_problems(self._schemas, value)[0]
        except (ValueError, RecursionError, OverflowError) as exc:
            return ValueProblem((), f"cannot be checked: {type(exc).__name__}")


def check_of(schema: Mapping[str, Any]) -> ValueCheck:
    """Return what checks values of a declared type; compiled once for as long as it is asked for.

    Raises:
        RegistrationError: the type says nothing that can be checked.
    """
    return _check(json.dumps(schema, default=str))


@lru_cache(128)
def _check(schema: str) -> ValueCheck:
    return ValueCheck(json.loads(schema))
