"""Types that are not made of built-in ones: pydantic describes them, and makes them out of JSON values.

It takes a tenth of a second to import, so this module is imported when there is such a type. What it adds to
schemas for itself is taken away again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Flag, IntEnum
from functools import cache, partial
from typing import Any, Final, Literal

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, PydanticSerializationError, SchemaValidator, core_schema

from toolcell.calls.schema import BASE64, OF_RESULTS, Schema, clean_schema
from toolcell.calls.values import MAX_LISTED_ERRORS, BadValue, copy_arguments, is_large
from toolcell.errors import RegistrationError
from toolcell.support.checks import brief

MAX_PATTERN_CHARS: Final = 1_000
"""Most characters of all texts of an argument that become patterns. Compiling so many takes the host some 10 ms."""


class _Described(GenerateJsonSchema):
    """pydantic's description of types, with bytes as base64 text. Rules about their length are left to pydantic.

    As arguments ("validation") a duration may be seconds too: that is what scripts and results have. As results
    ("serialization") types are what `to_plain` makes of them: serializers count inside models of pydantic only.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._models = 0
        """Those that the described type is inside of."""

    def generate_inner(self, schema: Any) -> Schema:
        is_dumped = schema["type"] in ("model", "dataclass") and hasattr(schema["cls"], "__pydantic_serializer__")
        self._models += is_dumped
        try:
            described = super().generate_inner(schema)
        finally:
            self._models -= is_dumped
        if schema["type"] == "function-plain" and described.get("format") == "regex" and self.mode == "validation":
            return {**described, "maxLength": MAX_PATTERN_CHARS}
        return described

    def ser_schema(self, schema: Any) -> Schema | None:
        return super().ser_schema(schema) if self._models else None

    def get_title_from_name(self, name: str) -> str:
        return name  # as it is written: of a named tuple's fields nothing else says it

    def bytes_schema(self, schema: Any) -> Schema:
        return dict(BASE64)

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012  # as pydantic declares it

    def encode_default(self, dft: Any) -> Any:
        shown = super().encode_default(dft)
        try:
            copy_arguments({"default": shown})
        except BadValue as exc:  # NaN, a large integer: the schema has no default then
            raise PydanticSerializationError(str(exc)) from exc
        return shown

    def enum_schema(self, schema: Any) -> Schema:
        described = super().enum_schema(schema)
        if not issubclass(flags := schema["cls"], Flag):
            return described
        several = "the sum of any of " + ", ".join(f"{flag.value} ({flag.name})" for flag in flags)
        own = {key: each for key, each in described.items() if key not in ("enum", "const")}
        # A docstring takes the place of the description, which is why the values are examples, too.
        return {"description": several, "examples": [flag.value for flag in flags]} | own if [*flags] else own

    def timedelta_schema(self, schema: Any) -> Schema:
        if self.mode == "serialization":
            return {"type": "number"}
        return {"type": ["number", "string"], "format": "duration"}

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "validation" or field["type"] == "typed-dict-field":
            return super().field_is_required(field, total)
        return "serialization_exclude_if" not in field

    def model_fields_schema(self, schema: Any) -> Schema:
        return self._with_names_of_results(super().model_fields_schema(schema), schema, schema["fields"].items())

    def dataclass_args_schema(self, schema: Any) -> Schema:
        fields = [(field["name"], field) for field in schema["fields"]]
        return self._with_names_of_results(super().dataclass_args_schema(schema), schema, fields)

    def _with_names_of_results(self, described: Schema, schema: Any, fields: Iterable[tuple[str, Any]]) -> Schema:
        if self.mode == "serialization":
            return described
        names: dict[str, str | None]
        names = {field.get("serialization_alias", name): _argument_name(name, field) for name, field in fields}
        names |= {each.get("alias", each["property_name"]): None for each in schema.get("computed_fields", ())}
        others = [[*each] for each in names.items() if each[0] not in described.get("properties", ())]
        return {**described, OF_RESULTS: others} if others else described


def _argument_name(name: str, field: Mapping[str, Any]) -> str:
    """Return what a field is called in arguments: its alias, of several the first that is one name."""
    alias = field.get("validation_alias", name)
    if isinstance(alias, str):
        return alias
    paths = [path if isinstance(path, list) else [path] for path in alias]
    return next((path[0] for path in paths if len(path) == 1), name)


def described_schema(annotation: Any, mode: Literal["validation", "serialization"]) -> Schema:
    """Return the clean JSON Schema of one Python type: of an argument, or of a result ("serialization").

    Raises:
        RegistrationError: the type has none.
    """
    try:
        return clean_schema(TypeAdapter(annotation).json_schema(schema_generator=_Described, mode=mode))
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError, NameError, ValueError, KeyError) as exc:
        why = (str(exc) or type(exc).__name__).splitlines()[0]
        if getattr(exc, "code", None) == "class-not-fully-defined":
            why = "it refers to a class that is not defined yet; register the tool after that"
        raise RegistrationError(f"type {annotation!r} has no JSON Schema: {why:.200}") from exc


# A tool's own types out of validated JSON values. Of values whose hashes are equal, a set or a dict takes quadratic
# time, in one call that nothing interrupts. Whoever sends numbers, UUIDs or tuples can choose such values: each is
# counted before it is put in


MOST_OF_ONE_HASH: Final = 64
"""Different values with one hash. Of honest numbers up to 33 have the same: powers of two that are 61 apart."""

_UNGUESSED: Final = frozenset({"any", "bool", "enum", "float", "literal", "none", "str"})
"""Types of which nobody can send many values with one hash. Texts have random hashes."""
_OF_PATTERNS: Final = frozenset({"pattern_either_validator", "pattern_str_validator", "pattern_bytes_validator"})
"""Functions of pydantic that compile a text."""
_FAILING_FAST: Final = frozenset({"counter", "deque", "dict", "frozenset", "list", "set", "tuple"})
_PARTS: Final = frozenset({"choices", "definitions", "fields", "steps"})
"""Members of pydantic's schemas that are schemas, besides those whose name says it."""


class _Seen:
    """What one conversion has made so far."""

    def __init__(self) -> None:
        self.hashed: dict[int, list[Any]] = {}
        """Values of sets, and keys of dicts, by their hashes."""
        self.patterns: dict[int, str | bytes] = {}
        """By identity: each member of a union is given the same text."""
        self.refused: dict[int, str | bytes] = {}
        """Texts that would have been too much, by identity."""
        self.chars, self.refused_chars = 0, 0
        """Of the patterns, and of what was refused."""

    @property
    def too_many(self) -> str:
        chars = self.chars + self.refused_chars
        return f"its patterns have {chars} characters together, limit {MAX_PATTERN_CHARS}; send fewer"


_TOO_MANY: Final = "too_many_pattern_chars"
"""The type of error, in the words of pydantic."""

_seen: ContextVar[_Seen] = ContextVar("_seen")


class _TooMuch(Exception):
    """Making the values takes too long. Not a ValueError, of which pydantic makes a list."""


def type_converter(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a type out of a validated value. It raises a ValueError for a value that does not fit."""
    adapter = TypeAdapter(hint)
    schema, found = _counting(adapter.core_schema)
    if not found:
        return adapter.validate_python

    @cache
    def validator(of_large: bool) -> SchemaValidator:
        made = _counting(adapter.core_schema, of_large=True)[0] if of_large else schema
        return _validator(made, adapter.validator.title)

    if found is _Found.COUNTS:
        validator(of_large=False)

    def convert(value: Any) -> Any:
        of_large = is_large(value)
        if not of_large and found is _Found.PAUSES:
            return adapter.validate_python(value)
        token = _seen.set(seen := _Seen())
        try:
            return validator(of_large).validate_python(value)
        except ValidationError as exc:
            if seen.refused and (exc.error_count() > MAX_LISTED_ERRORS or _are_too_many(exc)):
                raise ValueError(seen.too_many) from None
            raise
        except _TooMuch as exc:
            raise ValueError(str(exc)) from None
        finally:
            _seen.reset(token)

    return convert


def _are_too_many(exc: ValidationError) -> bool:
    return all(each["type"] == _TOO_MANY for each in exc.errors(include_url=False, include_input=False))


def _validator(schema: Any, title: str) -> SchemaValidator:
    """`title`: what errors call it."""
    try:  # not with what the classes of models have ready
        return SchemaValidator(schema, {"title": title}, _use_prebuilt=False)
    except TypeError:  # pydantic before 2.12
        return SchemaValidator(schema, {"title": title})


class _Found(IntEnum):
    """What is added to a schema of pydantic: pauses for large values only, counts for all."""

    NOTHING = 0
    PAUSES = 1
    COUNTS = 2


def _counting(part: Any, *, of_large: bool = False) -> tuple[Any, _Found]:
    """Return a schema of pydantic in which values of sets and keys of dicts are counted, and what there is of it.

    `of_large`: other threads may go on between two items, and of the items of a list only the first error is kept: an
    error has objects that Python's garbage collector walks through again and again, and all other threads wait for it.
    """
    if isinstance(part, list | tuple):
        members = [_counting(each, of_large=of_large) for each in part]
        return type(part)(each for each, _ in members), max((found for _, found in members), default=_Found.NOTHING)
    if not isinstance(part, dict):
        return part, _Found.NOTHING
    kind = part.get("type")
    made, most_found = {**part}, _Found.NOTHING
    for name, each in part.items():
        if name.endswith("schema") or name in _PARTS or not isinstance(kind, str):  # or fields and choices by name
            made[name], found = _counting(each, of_large=of_large)
            most_found = max(most_found, found)
    if kind == "function-plain" and getattr(part["function"]["function"], "__name__", "") in _OF_PATTERNS:
        return core_schema.no_info_before_validator_function(_count_pattern, part), _Found.COUNTS
    counted = "items_schema" if kind in ("set", "frozenset") else "keys_schema"
    if isinstance(kind, str) and made.get(counted, {}).get("type", "any") not in _UNGUESSED:
        made[counted] = core_schema.no_info_after_validator_function(_count, made[counted])
        most_found = _Found.COUNTS
    if of_large and kind in _FAILING_FAST:
        made["fail_fast"] = True
    for name in {"items_schema", "keys_schema"} & made.keys() if isinstance(kind, str) else ():
        most_found = max(most_found, _Found.PAUSES)
        if of_large:
            paused = partial(core_schema.no_info_before_validator_function, _go_on)
            made[name] = [*map(paused, made[name])] if kind == "tuple" else paused(made[name])
    if kind == "generator" and most_found is _Found.COUNTS:
        return core_schema.no_info_after_validator_function(_CountedItems, made), most_found
    return made, most_found


class _CountedItems(Iterator[Any]):
    """The items of an Iterable, which pydantic makes when the tool reads them: they are counted too."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._seen = items, _seen.get()

    def __next__(self) -> Any:
        token = _seen.set(self._seen)
        try:
            return next(self._items)
        except _TooMuch as exc:
            raise ValueError(str(exc)) from None
        finally:
            _seen.reset(token)


def _go_on(value: Any) -> Any:
    """Let other threads go on: pydantic alone would keep them from the interpreter until all items are made."""
    return value


def _count_pattern(value: Any) -> Any:
    seen = _seen.get()
    if not isinstance(value, str | bytes) or id(value) in seen.patterns:
        return value
    if seen.chars + len(value) > MAX_PATTERN_CHARS:
        if id(value) not in seen.refused:
            seen.refused[id(value)] = value
            seen.refused_chars += len(value)
        raise PydanticCustomError(_TOO_MANY, seen.too_many)  # the next member of a union may take it
    seen.patterns[id(value)] = value
    seen.chars += len(value)
    return value


def _count(value: Any) -> Any:
    try:
        known = _seen.get().hashed.setdefault(hash(value), [])
    except TypeError:  # pydantic says what is wrong with it
        return value
    if value not in known:
        if len(known) == MOST_OF_ONE_HASH:
            limit = f"limit {MOST_OF_ONE_HASH}"
            raise _TooMuch(f"a set or dict was sent too many values with one hash, {limit}: {brief(value)}")
        known.append(value)
    return value
