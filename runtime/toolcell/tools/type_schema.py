"""JSON Schemas out of Python types and signatures.

pydantic describes each type; what it adds for itself is taken away again. It takes a tenth of a second to import, so
this module is imported when a function or a type becomes a tool.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined, to_jsonable_python
from typing_extensions import is_typeddict

from toolcell.errors import RegistrationError
from toolcell.support.lru import Lru
from toolcell.tools.bytes_arguments import BASE64
from toolcell.tools.schema import OF_RESULTS, Schema, clean_schema, optional_schema
from toolcell.tools.table_arguments import table_maker, table_schema, table_type
from toolcell.tools.values import json_copy
from toolcell_bridge.wire.frozen import frozen


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
            return super().generate_inner(schema)
        finally:
            self._models -= is_dumped

    def ser_schema(self, schema: Any) -> Schema | None:
        return super().ser_schema(schema) if self._models else None

    def bytes_schema(self, schema: Any) -> Schema:
        return dict(BASE64)

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


_BUILT_IN = frozenset(map(id, (str, int, float, bool, bytes, list, dict, object, Any, type(None), None)))

_known_schemas: Lru[tuple[str, str], Schema] = Lru(1000)
"""By mode and text of a type that is made of built-in ones. As a key the type itself would not do: unions that have the
same members in another order are equal, and their schemas are not."""


def _is_built_in(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is None:
        return id(annotation) in _BUILT_IN
    return origin in (list, dict, Union, types.UnionType) and all(map(_is_built_in, get_args(annotation)))


def type_schema(annotation: Any, mode: Literal["validation", "serialization"] = "validation") -> Schema:
    """Return the clean JSON Schema of one Python type: of an argument, or of a result ("serialization").

    Raises:
        RegistrationError: the type has none.
    """
    if not _is_built_in(annotation):
        return _made_schema(annotation, mode)
    key = mode, repr(annotation)
    if (known := _known_schemas.get(key)) is None:
        _known_schemas.put(key, known := _made_schema(annotation, mode))
    schema: Schema = json_copy(known)
    return schema


def _made_schema(annotation: Any, mode: Literal["validation", "serialization"]) -> Schema:
    try:
        return clean_schema(TypeAdapter(annotation).json_schema(schema_generator=_Described, mode=mode))
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError, NameError) as exc:
        raise RegistrationError(f"type {annotation!r} has no JSON Schema: {str(exc).splitlines()[0]:.200}") from exc


def record_schema(record: Any) -> Schema:
    """Return the schema of a pydantic model, dataclass or TypedDict as a tool's parameters, with `OF_RESULTS`.

    Raises:
        RegistrationError: it is not a record, or cannot be described inline.
    """
    is_record = isinstance(record, type) and (
        issubclass(record, BaseModel) or dataclasses.is_dataclass(record) or is_typeddict(record)
    )
    if not is_record:
        raise RegistrationError(f"{record!r} is not a record: a tool takes a pydantic model, dataclass or TypedDict")
    schema = type_schema(record)
    schema.pop("description", None)
    return schema


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Shape: (description, parameter name -> description). Understands Google, NumPy and Sphinx style."""
    text = inspect.getdoc(function) or ""
    if "\n" not in text and not text.startswith((":", "@", ".")) and not text.endswith(":"):
        return text.strip(), {}  # a line without markup
    from docstring_parser import Docstring, ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:  # no style that is known: all of it describes the tool
        parsed = Docstring()
        parsed.short_description = text
    described = {
        each.arg_name.lstrip("*"): " ".join(each.description.split()) for each in parsed.params if each.description
    }
    return (parsed.description or "").strip(), described


@frozen
class Signature:
    """What a function's signature says about calling it with JSON arguments."""

    parameters: Schema
    """With `OF_RESULTS`."""
    converters: Mapping[str, Callable[[Any], Any]]
    """Parameters whose type is more than JSON, with what makes it out of the validated value, bytes being bytes."""
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
    hints = _hints(function)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    converters: dict[str, Callable[[Any], Any]] = {}
    context_parameter, extra = None, False
    for parameter in _parameters(function):
        name, hint = parameter.name, hints.get(parameter.name, Any)
        if name not in hints:
            _check_meant(function, name, context_type)
        if hint is context_type or context_type in get_args(hint):
            context_parameter = name
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = True
            continue
        hint, default = _default(parameter, hint)
        properties[name] = _property(function, name, hint, default, descriptions.get(name))
        if default is PydanticUndefined:
            required.append(name)
        if (table := table_type(hint)) is not None:
            converters[name] = table_maker(name, table)
        elif not _is_plain_type(hint):
            converters[name] = TypeAdapter(hint).validate_python
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = extra
    returns = hints.get("return", Any)
    wants_result = returns is result_type
    return Signature(schema, converters, context_parameter, _return_schema(returns, result_type), wants_result)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as exc:
        raise RegistrationError(f"{_name(function)} does not say what it takes; write a function around it") from exc
    for parameter in parameters:
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL}:
            raise RegistrationError(
                f"{_name(function)}: parameter {parameter.name!r} cannot be passed by name; tools are called by name"
            )
    return parameters


def _check_meant(function: Callable[..., Any], name: str, context_type: type) -> None:
    """Refuse parameters without annotation that a model would be asked for, although they are not for it."""
    if name in ("self", "cls"):
        raise RegistrationError(
            f"{_name(function)}: {name!r} is the object that the method belongs to; register the method of an object, "
            "as in registry.add(thing.method)"
        )
    if name == "ctx":
        kind = context_type.__name__
        raise RegistrationError(
            f"{_name(function)}: 'ctx' has no annotation, so a model would fill it; write ctx: {kind}"
        )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(target), include_extras=True)
    except (NameError, TypeError) as exc:
        raise RegistrationError(f"{_name(function)}: annotations cannot be resolved: {exc}") from exc


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _default(parameter: inspect.Parameter, hint: Any) -> tuple[Any, Any]:
    """Unpack `= Field(...)` defaults, pydantic's way of writing constraints."""
    default = parameter.default
    if isinstance(default, FieldInfo):
        return Annotated[hint, default], default.get_default(call_default_factory=True, validated_data={})
    return hint, PydanticUndefined if default is parameter.empty else default


def _property(function: Callable[..., Any], name: str, hint: Any, default: Any, description: str | None) -> Schema:
    try:
        schema = type_schema(hint) if (table := table_type(hint)) is None else table_schema(table)
    except RegistrationError as exc:
        raise RegistrationError(f"{_name(function)}: parameter {name!r}: {exc}") from exc
    schema.pop("default", None)
    if default is not PydanticUndefined:
        schema = optional_schema(schema)
        if default is not None:
            schema["default"] = to_jsonable_python(default, fallback=str)
    if description and "description" not in schema:
        schema["description"] = description
    return schema


def _return_schema(annotation: Any, result_type: type) -> Schema | None:
    if annotation in (Any, None, result_type, inspect.Signature.empty):
        return None
    try:
        return type_schema(annotation, "serialization")
    except RegistrationError:
        return None  # a return type without a schema is not an obstacle: it only documents


_PLAIN_TYPES = (str, int, float, bool, object, type(None))


def _is_plain_type(hint: Any) -> bool:
    """True when a validated JSON value is already what the annotation promises."""
    if hint in _PLAIN_TYPES or hint is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _is_plain_type(args[0]) and not any(_transforms(extra) for extra in args[1:])
    if origin is dict and args[0] not in (str, Any):  # JSON has text for keys
        return False
    if origin in (Union, types.UnionType) or origin in (list, dict):
        return all(_is_plain_type(arg) for arg in args)
    return origin is Literal or hint in (list, dict)


def _transforms(metadata: Any) -> bool:
    """True for pydantic validators, which may change a value; constraints only check it."""
    if isinstance(metadata, FieldInfo):
        return any(_transforms(inner) for inner in metadata.metadata)
    return hasattr(metadata, "__get_pydantic_core_schema__") or hasattr(metadata, "func")
