"""JSON Schemas out of Python types and signatures."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typing_extensions
from typing_extensions import is_typeddict

from toolcell.calls.result import File, Image, Text
from toolcell.calls.schema import BASE64, TABLE_MEDIA_TYPE, Schema, optional_schema
from toolcell.calls.values import copy_arguments, json_copy
from toolcell.errors import RegistrationError
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import TABLES, Array, Table

_BUILT_IN: Final[dict[int, Schema]] = {
    id(str): {"type": "string"},
    id(int): {"type": "integer"},
    id(float): {"type": "number"},
    id(bool): {"type": "boolean"},
    id(bytes): dict(sorted(BASE64.items())),
    id(list): {"items": {}, "type": "array"},
    id(dict): {"additionalProperties": True, "type": "object"},
    id(object): {},
    id(Any): {},
    id(type(None)): {"type": "null"},
    id(None): {"type": "null"},
}
"""By the id of a type: some types of others have no hash, or are equal to what they are not."""
_KEYS: Final = frozenset(map(id, (str, int, float, bool, object, Any)))
"""Keys of a dict that its schema says nothing of."""


def _built_in_schema(annotation: Any) -> Schema | None:
    """Return the schema of a type that is made of built-in ones, as pydantic would describe it; None for others."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is None:
        known = _BUILT_IN.get(id(annotation))
        return None if known is None else json_copy(known)
    if origin not in (list, dict, Union, types.UnionType) or (origin is dict and id(args[0]) not in _KEYS):
        return None
    parts: list[Schema] = []
    for each in args:
        if (part := _built_in_schema(each)) is None:
            return None
        parts.append(part)
    if origin is list:
        return {"items": parts[0], "type": "array"}
    if origin is dict:
        return {"additionalProperties": parts[1] or True, "type": "object"}
    branches = [part for at, part in enumerate(parts) if part not in parts[:at] and part != {"type": "null"}]
    if {"type": "null"} in parts:
        branches.append({"type": "null"})
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def type_schema(annotation: Any, mode: Literal["validation", "serialization"] = "validation") -> Schema:
    """Return the clean JSON Schema of one Python type: of an argument, or of a result ("serialization").

    Raises:
        RegistrationError: the type has none.
    """
    if (built_in := _built_in_schema(annotation)) is not None:
        return built_in
    from toolcell.calls.pydantic_types import described_schema

    return described_schema(annotation, mode)


def record_schema(record: Any) -> Schema:
    """Return the schema of a pydantic model, dataclass or TypedDict as a tool's parameters, with `OF_RESULTS`.

    Raises:
        RegistrationError: it is not a record, or cannot be described inline.
    """
    if not (isinstance(record, type) and (_is_record(record) or is_typeddict(record))):
        raise RegistrationError(f"{record!r} is not a record: a tool takes a pydantic model, dataclass or TypedDict")
    schema = type_schema(record)
    schema.pop("description", None)
    return schema


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "__pydantic_core_schema__"))


def record_in(function: Callable[..., Any], parameter: int | str) -> type | None:
    """Return the model or dataclass that a function takes in this parameter; None for a dict and what is like one."""
    try:
        hints, names = _hints(function), [*_signature(function)]
    except RegistrationError:  # it does not say
        return None
    name = parameter if isinstance(parameter, str) else names[parameter] if parameter < len(names) else ""
    hint = hints.get(name)
    return hint if isinstance(hint, type) and _is_record(hint) else None


_KEYWORDS: Final = re.compile(r"^(?:Keyword|Other) (?:Arg|Argument|Parameter)s:(?=\s*$)", re.MULTILINE)
"""Headings of Google style that the parser does not know."""
_OF_PARAMETERS: Final = re.compile(
    r"^((?:(?:Keyword|Other) )?(?:Arg|Argument|Param|Parameter)s:[^\S\n]*+\n)"
    r"(?:[^\S\n]++\S.*+\n?+|[^\S\n]*+\n)*+"  # Google
    r"|^((?:Other )?Parameters[^\S\n]*+\n-++[^\S\n]*+\n)(?:(?!.*+\n-++[^\S\n]*+$).*+\n?+)*+"  # NumPy
    r"|^[:@](?:param|parameter|arg|argument|key|keyword|type)\b.*+\n?+(?:[^\S\n]++\S.*+\n?+)*+",  # Sphinx, Epydoc
    re.MULTILINE,
)
"""Sections of a docstring about the parameters. Its groups are their headings."""
_ENTRY: Final = re.compile(
    r"^([^\S\n]*+)(?=\S)[:@]?+([^:\n]*+).*+\n?+(?:\1[^\S\n]++\S.*+\n?+|[^\S\n]*+\n)*+", re.MULTILINE
)
"""What such a section says of one parameter or of several. Its second group has their names."""


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Shape: (description, parameter name -> description). Understands Google, NumPy and Sphinx style."""
    if isinstance(function, functools.partial) and "__doc__" not in vars(function):
        return read_docstring(function.func)
    text = inspect.getdoc(function) or inspect.getdoc(_called(function)) or ""
    if "\n" not in text and not text.startswith((":", "@", ".")) and not text.endswith(":"):
        return text.strip(), {}  # a line without markup
    from docstring_parser import ParseError, parse

    try:
        parameters = parse(_KEYWORDS.sub("Params:", text)).params
    except ParseError:  # no style that is known: all of it describes the tool
        return text.strip(), {}
    names = _signature(function)
    described = {
        name.strip().lstrip("*"): " ".join(each.description.split())
        for each in parameters
        for name in each.arg_name.split(",")
        if each.description and name.strip().lstrip("*") in names
    }
    types = tuple(f"type {name}:" for name in described)

    def left_of_entry(entry: re.Match[str]) -> str:
        words = " ".join(entry[0].split())
        endings = tuple(described[name] for name in re.findall(r"\w+", entry[2]) if name in described)
        return "" if words.endswith(endings) or words.startswith(types, 1) else entry[0]

    def left(section: re.Match[str]) -> str:
        # Without the entries that some parameter has, and without the heading where one has any
        body = section[0].removeprefix(section[1] or section[2] or "")
        return section[0] if (rest := _ENTRY.sub(left_of_entry, body)) == body else rest

    return _OF_PARAMETERS.sub(left, text).strip(), described


_NO_DEFAULT: Final = inspect.Parameter.empty
_UNPACKS: Final[tuple[Any, ...]] = (typing.Unpack, typing_extensions.Unpack)


@frozen
class Signature:
    """What a function's signature says about calling it with JSON arguments."""

    parameters: Schema
    """With `OF_RESULTS`."""
    defaults: Mapping[str, Callable[[], Any]]
    """What makes those of pydantic's `Field` that its schema does not have, such as None and what a factory makes."""
    converters: Mapping[str, Callable[[Any], Any]]
    """Parameters whose type is more than JSON, with what makes it out of the validated value, bytes being bytes."""
    converts_extra: Callable[[Any], Any] | None
    """The same for each argument that `**` takes."""
    context_parameter: str | None
    returns: Schema | None
    wants_result: bool
    """The function is declared to return a ToolResult, so None from it is an error."""


def read_signature(
    function: Callable[..., Any], context_type: type, result_type: type, descriptions: Mapping[str, str]
) -> Signature:
    """Derive a tool's parameters from a function.

    Raises:
        RegistrationError: a parameter cannot be passed by name or has no JSON Schema.
    """
    called, hints = name_of(function), _hints(function)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    defaults: dict[str, Callable[[], Any]] = {}
    converters: dict[str, Callable[[Any], Any]] = {}
    context_parameter, converts_extra = None, None
    extra: Schema | bool = False
    for parameter in _parameters(function):
        name, hint = parameter.name, hints.get(parameter.name, Any)
        if name not in hints:
            _check_meant(function, name, context_type)
        if hint is context_type or context_type in get_args(hint):
            context_parameter = name
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            if table_type(hint) is not None or get_origin(hint) in _UNPACKS:
                raise RegistrationError(f"{called}: **{name} takes no {hint!r}; give each of them a parameter")
            extra = _property(function, name, hint, _NO_DEFAULT, descriptions.get(name)) or True
            converts_extra = _converter(hint)
            continue
        fields = filter(_is_field, (*get_args(hint), parameter.default))
        if any(field.alias or field.validation_alias for field in fields):
            raise RegistrationError(
                f"{called}: parameter {name!r} has an alias, and tools are called by the names of parameters; rename "
                "it, or write the schema: registry.register(name, description, schema, function)"
            )
        hint, default, makes_default = _default(parameter, hint)
        properties[name] = _property(function, name, hint, default, descriptions.get(name))
        if default is _NO_DEFAULT:
            required.append(name)
        elif makes_default is not None and "default" not in properties[name]:
            defaults[name] = makes_default
        if (convert := _converter(hint)) is not None:
            converters[name] = convert
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = extra
    returns = hints.get("return", Any)
    return Signature(
        parameters=schema,
        defaults=defaults,
        converters=converters,
        converts_extra=converts_extra,
        context_parameter=context_parameter,
        returns=_return_schema(returns, result_type),
        wants_result=returns is result_type,
    )


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError) as exc:
        raise RegistrationError(f"{name_of(function)} does not say what it takes; write a function around it") from exc


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = [*_signature(function).values()]
    for parameter in parameters:
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL}:
            raise RegistrationError(
                f"{name_of(function)}: parameter {parameter.name!r} cannot be passed by name; tools are called by name"
            )
    return parameters


def _check_meant(function: Callable[..., Any], name: str, context_type: type) -> None:
    """Refuse parameters without annotation that a model would be asked for, although they are not for it."""
    if name in ("self", "cls"):
        raise RegistrationError(
            f"{name_of(function)}: {name!r} is the object that the method belongs to; register the method of an "
            "object, as in registry.add(thing.method)"
        )
    if name == "ctx":
        kind = context_type.__name__
        raise RegistrationError(
            f"{name_of(function)}: 'ctx' has no annotation, so a model would fill it; write ctx: {kind}"
        )


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a partial, or an object with `__call__`, calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing_extensions.get_type_hints(inspect.unwrap(_called(function)), include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as exc:  # annotations may be any text
        cure = "; define or import it before the tool is registered" * isinstance(exc, NameError)
        raise RegistrationError(f"{name_of(function)}: annotations cannot be resolved: {exc}{cure}") from exc


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, of what a partial calls, or of an object's class."""
    while isinstance(function, functools.partial) and "__name__" not in vars(function):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _default(parameter: inspect.Parameter, hint: Any) -> tuple[Any, Any, Callable[[], Any] | None]:
    """Return type and default, and what makes it where that is pydantic's `Field(...)`, which `Annotated` may have."""
    default = field = parameter.default
    if default is _NO_DEFAULT and get_origin(hint) is Annotated:
        fields = filter(_is_field, reversed(get_args(hint)))
        field = next((each for each in fields if not each.is_required()), default)
    if not _is_field(field):
        return hint, default, None
    hint = Annotated[hint, field] if field is default else hint
    if field.is_required():
        return hint, _NO_DEFAULT, None
    if field.default_factory_takes_validated_data:
        raise RegistrationError(f"parameter {parameter.name!r}: a default_factory of a tool takes no arguments")
    # A factory is called for each call of the tool: it may make the time, or an id
    makes = functools.partial(field.get_default, call_default_factory=True, validated_data={})
    return hint, field.default_factory or field.default, makes


def _is_field(value: Any) -> bool:
    """True for pydantic's `Field(...)`. Whoever has made one has imported pydantic."""
    fields = sys.modules.get("pydantic.fields")
    return fields is not None and isinstance(value, fields.FieldInfo)


def converter(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a type out of a validated value. It raises a ValueError for a value that does not fit."""
    from toolcell.calls.pydantic_types import type_converter  # pydantic takes a tenth of a second

    return type_converter(hint)


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    """Return what makes a parameter's type out of a validated value; None where that is the type already."""
    if (table := table_type(hint)) is not None:
        return table_maker(table)
    if hint in (float, float | None):
        return lambda value: value + 0.0 if type(value) is int else value
    return None if _is_plain(hint) else converter(hint)


def _shown_default(hint: Any, default: Any) -> Any:
    """Return a default as arguments may have it; `_NO_DEFAULT` if its type does not make the same value of that."""
    shown, kind = default, type(default)
    try:
        if default is not None and kind not in (str, int, float, bool):
            from pydantic_core import to_jsonable_python

            made = shown = to_jsonable_python(default)
            is_same_kind = type(shown) is kind
            if hint is not Any and not _is_plain(hint):
                made, is_same_kind = converter(hint)(shown), True
            if not is_same_kind or made != default:
                return _NO_DEFAULT
        copy_arguments({"default": shown})
    except Exception:  # an object of any kind, or a number that JSON has not
        return _NO_DEFAULT
    return shown


def _property(function: Callable[..., Any], name: str, hint: Any, default: Any, description: str | None) -> Schema:
    try:
        schema = type_schema(hint) if (table := table_type(hint)) is None else table_schema(table)
    except RegistrationError as exc:
        raise RegistrationError(f"{name_of(function)}: parameter {name!r}: {exc}") from exc
    schema.pop("default", None)
    if (shown := default if default is _NO_DEFAULT else _shown_default(hint, default)) is not _NO_DEFAULT:
        schema = optional_schema({**schema, "default": shown})
    if description and "description" not in schema:
        schema["description"] = description
    return schema


def _return_schema(annotation: Any, result_type: type) -> Schema | None:
    if annotation is Any or _may_be_result(annotation, result_type):
        return None
    try:
        return type_schema(annotation, "serialization")
    except RegistrationError:
        return None  # a return type without a schema is not an obstacle: it only documents


def _may_be_result(annotation: Any, result_type: type) -> bool:
    """Return true for a form of result, which has text, data and files of its own, and for what may be one."""
    kinds = get_args(annotation) or (annotation,)
    if any(kind in (result_type, Text, Image, File) or hasattr(kind, "to_tool_result") for kind in kinds):
        return True
    return kinds != (annotation,) and any(_may_be_result(kind, result_type) for kind in kinds)


def _is_plain(hint: Any) -> bool:
    """True when a validated JSON value is already what the annotation promises. An integer is not yet a float."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is dict and args[0] not in (str, Any):  # JSON has text for keys
        return False
    if args:
        return origin in (list, dict, Union, types.UnionType) and all(map(_is_plain, args))
    return id(hint) in _BUILT_IN.keys() - {id(float), id(bytes)}


# Parameters that are arrays and frames: how a schema marks them, and what makes them of what was received


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
    return {"contentMediaType": TABLE_MEDIA_TYPE, "description": f"{kind.__qualname__}, {shape}"}


def table_maker(kind: type) -> Callable[[Any], Any]:
    """Return what makes the value of a parameter of such a class.

    It raises a ValueError where nothing can be made of what was received.
    """
    method = _METHODS.get(_name_of(kind))

    def make(value: Any) -> Any:
        made = value
        if method is not None and isinstance(value, Array | Table):
            made = getattr(value, method)() if hasattr(value, method) else value.to_numpy()
        if made is None or isinstance(made, kind):
            return made
        if method is None:
            raise ValueError(f"must be {kind.__qualname__}, not {type(value).__name__}; only a script can send one")
        try:
            if method == "to_arrow":
                return importlib.import_module("pyarrow").Table.from_pylist(made)
            if method == "to_numpy":
                return importlib.import_module("numpy").asarray(made)
            return kind(made)
        except Exception as exc:  # whatever rows of a model provoke in a package
            raise ValueError(f"is not a {kind.__qualname__}: {type(exc).__name__}: {exc!s:.200}") from exc

    return make
