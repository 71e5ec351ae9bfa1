"""What a model knows of a tool: name, description, JSON Schema of its arguments, in each provider's format.

Knows nothing of how a tool runs. A definition never changes; every `parameters` handed out is a fresh copy.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal, NoReturn, NotRequired, TypedDict

from toolcell.calls.schema import OF_RESULTS, dicts_in, pointed, with_parts, without_names_of_results
from toolcell.errors import RegistrationError, warn_user
from toolcell.support.checks import brief, keywords_known
from toolcell_bridge.guest.tool_names import provider_name, python_path
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.plain import PackedValue

MIN_DESCRIPTION_CHARS = 15
"""Shorter descriptions make models misuse a tool; registering one warns."""


ANYTHING = {"type": "object", "properties": {}, "additionalProperties": True}
"""Parameters of a tool that gives no schema: whatever is sent arrives."""


class ToolDescriptionWarning(UserWarning):
    """A description is too short for a model to choose well."""


class ProviderFunction(TypedDict):
    """The `function` half of an OpenAI tool definition."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: NotRequired[bool]


class ProviderToolDef(TypedDict):
    """One tool as OpenAI's API takes it."""

    type: Literal["function"]
    function: ProviderFunction


class AnthropicToolDef(TypedDict):
    """One tool as Anthropic's API takes it."""

    name: str
    description: str
    input_schema: dict[str, Any]


# Parameters as each provider takes them: what it would refuse is written in another way, or left out. Arguments are
# checked against the tool's own schema all the same. Sources: the providers' pages on function calling, and public
# reports of the requests that their servers refused


Part = dict[str, Any]
DialectName = Literal["openai", "openai-strict", "anthropic", "gemini", "mistral"]

MAX_PARTS: Final = 10_000
"""Parts of one schema that are written. References may stand for more; the rest may be any plain value."""
MAX_LEVELS: Final = 64
"""Parts inside each other that are written. Providers take fewer, such as OpenAI ten."""
MAX_PROPERTY_CHARS: Final = 64
"""Most characters of a property's name that Anthropic takes."""
_UNKNOWN_SIGN: Final = re.compile(r"[^A-Za-z0-9_.-]")


def with_items(part: Part) -> Part:
    """Servers say `array schema missing items`, or `items: missing field`."""
    items = part.get("items")
    if "array" not in _kinds(part) or isinstance(items, dict):
        return part
    first = items if isinstance(items, list) else part.get("prefixItems") or ()
    return {**{key: value for key, value in part.items() if key != "prefixItems"}, "items": _any_of([*first])}


def with_properties(part: Part) -> Part:
    """ "object schema missing properties"."""
    return (
        part if part.get("type") != "object" or isinstance(part.get("properties"), dict) else part | {"properties": {}}
    )


def merged(part: Part) -> Part:
    """Servers say `must not have 'oneOf'/'anyOf'/... at the top level`: what the choices name stands in one object."""
    made = {key: value for key, value in part.items() if key not in _CHOICES}
    properties, required = dict(part.get("properties") or {}), list(part.get("required") or ())
    for keyword in ("allOf", "anyOf", "oneOf"):
        for choice in [each for each in part.get(keyword) or () if isinstance(each, dict)]:
            properties = {**(choice.get("properties") or {}), **properties}
            required += [*(choice.get("required") or ())] if keyword == "allOf" else []
    if len(made) == len(part):
        return part
    return _with_required({**made, "properties": properties}, required)


def with_known_names(part: Part) -> Part:
    """Servers say `Property keys should match pattern '^[a-zA-Z0-9_.-]{1,64}$'`."""
    properties = part.get("properties") or {}
    if not (new := new_names(properties)):
        return part
    told = {name: {"description": name, **properties[name]} for name in new if isinstance(properties[name], dict)}
    made = {new.get(name, name): told.get(name, each) for name, each in properties.items()}
    return _with_required(part | {"properties": made}, map(new.get, part.get("required") or ()))


def new_names(properties: Iterable[str]) -> dict[str, str]:
    """Return the names that Anthropic gets in place of those that it refuses."""
    new, taken = dict[str, str](), {*properties}
    for name in properties:
        if (known := _UNKNOWN_SIGN.sub("_", name)[:MAX_PROPERTY_CHARS]) != name:
            if known in taken or not known.strip("_"):
                mark = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
                known = f"{known[: MAX_PROPERTY_CHARS - 9]}_{mark}"
            taken.add(known)
            new[name] = known
    return new


def of_its_type(part: Part) -> Part:
    """Servers say `properties: only allowed for OBJECT type`, and `property is not defined` of a required one."""
    kinds = (None, *_kinds(part))
    return _with_required({key: value for key, value in part.items() if _OWNERS.get(key) in kinds}, ())


def _with_required(part: Part, more: Iterable[str | None]) -> Part:
    """Require what there is of these names and of those that are required now."""
    names = dict.fromkeys(name for name in [*(part.get("required") or ()), *more] if isinstance(name, str))
    needed = [name for name in names if name in (part.get("properties") or ())]
    kept = {key: value for key, value in part.items() if key != "required"}
    return {**kept, "required": needed} if needed else kept


def add_to(made: Part, part: Part) -> None:
    """Add what another schema says of the same value, as far as one schema can say both."""
    for key, value in part.items():
        known = made.get(key)
        if key == "description" and isinstance(known, str) and isinstance(value, str):
            made[key] = known if value in known else f"{known}\n{value}".strip()
        else:
            made[key] = {**value, **known} if isinstance(known, dict) and isinstance(value, dict) else known or value


def one_type(part: Part) -> Part:
    """Servers say `Proto field is not repeating`: a list of types is `anyOf`, and null is `nullable`."""
    if part.get("default", part) is None:
        part = {key: value for key, value in part.items() if key != "default"}
    kinds = part.get("type")
    if isinstance(kinds, list):
        rest = {key: value for key, value in part.items() if key != "type"}
        some = [{**rest, "type": kind} for kind in kinds if kind != "null"] or [{**rest, "type": "string"}]
        part = {**(some[0] if len(some) == 1 else {"anyOf": some}), **({"nullable": True} if "null" in kinds else {})}
    choices = part.get("anyOf", part.get("oneOf"))
    if not isinstance(choices, list):
        return part
    some = [each for each in choices if each != {"type": "null"}]
    rest = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
    rest |= {"nullable": True} if len(some) < len(choices) else {}
    return {**rest, "allOf": some} if len(some) == 1 else {**rest, "anyOf": some}


def typed(part: Part) -> Part:
    """Servers say `schema must have a 'type' key`. What may be anything can be sent as a plain value."""
    if part.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}:
        return part
    kind = "object" if part.keys() & _OF_OBJECTS else "array" if part.keys() & {"items", "prefixItems"} else None
    return {**part, **({"type": kind} if kind else _PLAIN)}


def alone(part: Part) -> Part:
    """Servers say `When using any_of, it must be the only field set`: what is beside it goes into each choice."""
    beside = {key: value for key, value in part.items() if key != "anyOf"}
    if not isinstance(choices := part.get("anyOf"), list) or not beside:
        return part
    return {"anyOf": [each if each == {"type": "null"} else {"allOf": [each, beside]} for each in choices]}


def complete_choices(part: Part) -> Part:
    """Write each choice with its type: one that says only what is required would be another type, or no property."""
    return alone(part) if "type" in part or part.keys() & _OF_OBJECTS else part


def text_choices(part: Part) -> Part:
    """Only text may be enumerated."""
    made = dict(part)
    values = [made.pop("const")] if "const" in made else made.pop("enum", None)
    if isinstance(values, list) and values and all(isinstance(each, str) and each for each in values):
        made |= {"type": "string", "enum": values}
    elif isinstance(values, list) and values and "type" not in made:
        made["type"] = _KINDS.get(type(values[0]), "string")
    return made


def any_of(part: Part) -> Part:
    """Strict mode has no `oneOf`."""
    return {**part, "anyOf": part["oneOf"]} if "oneOf" in part and "anyOf" not in part else part


def closed(part: Part) -> Part:
    """Strict mode: every property is required, null where it may be left out, and there are no others."""
    if "object" not in _kinds(part):
        return part
    if "patternProperties" in part or part.get("additionalProperties", "properties" not in part) is not False:
        return part | {"additionalProperties": True}  # see `is_free`
    properties, required = part.get("properties") or {}, part.get("required") or ()
    made = {name: each if name in required else _or_null(each) for name, each in properties.items()}
    return part | {"properties": made, "required": [*made], "additionalProperties": False}


def is_free(schema: Part) -> bool:
    """Return whether strict mode would refuse a schema, or take less: an object in it may have any properties."""
    return any("object" in _kinds(part) and part.get("additionalProperties") is not False for part in dicts_in(schema))


def _kinds(part: Mapping[str, Any]) -> list[Any]:
    kinds = part.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def _or_null(part: Any) -> Part:
    choices = part.get("anyOf") if isinstance(part, dict) else None
    if isinstance(choices, list):
        return part if {"type": "null"} in choices else {**part, "anyOf": [*choices, {"type": "null"}]}
    return {"anyOf": [part if isinstance(part, dict) else {}, {"type": "null"}]}


def _any_of(parts: list[Any]) -> Part:
    known = [part for at, part in enumerate(parts) if isinstance(part, dict) and part not in parts[:at]]
    return known[0] if len(known) == 1 else {"anyOf": known} if known else {}


_CHOICES = frozenset({"anyOf", "oneOf", "allOf", "enum", "not", "if", "then", "else"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OWNERS: Mapping[str, str] = {
    **dict.fromkeys(("properties", "required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("items", "minItems", "maxItems"), "array"),
}
_KINDS: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number"}
_PLAIN: Final[Part] = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_OPENAI_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_GEMINI_KEYS = frozenset({
    "type", "format", "title", "description", "nullable", "enum", "items", "properties", "required", "minItems",
    "maxItems", "minimum", "maximum", "minLength", "maxLength", "minProperties", "maxProperties", "pattern", "anyOf",
    "default", "example", "propertyOrdering",
})  # fmt: skip
_NOT_STRICT = frozenset({
    "default", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "minProperties", "maxProperties",
    "contains", "minContains", "maxContains", "uniqueItems", "contentEncoding", "contentMediaType",
})  # fmt: skip


@frozen
class Dialect:
    """What one provider takes."""

    root: tuple[Callable[[Part], Part], ...]
    """What is done with the schema itself,"""
    parts: tuple[Callable[[Part], Part], ...]
    """and with each part of it, outer ones first."""
    known: frozenset[str] | None = None
    """Keywords that it knows. None: all."""
    refused: frozenset[str] = frozenset()
    formats: tuple[str, ...] | None = None
    """Values of `format` that it knows, such as `date` and not `uri`. None: all."""
    inlines: bool = False
    """It takes neither references nor `allOf`."""


DIALECTS: Mapping[DialectName, Dialect] = {
    "openai": Dialect((with_properties, merged), (with_items,), formats=_OPENAI_FORMATS),
    "openai-strict": Dialect(
        (merged,),
        (any_of, complete_choices, typed, with_items, of_its_type, closed),
        refused=_NOT_STRICT,
        formats=_OPENAI_FORMATS,
        inlines=True,
    ),
    "anthropic": Dialect((with_properties, merged, with_known_names), ()),
    "gemini": Dialect(
        (with_properties, merged),
        (one_type, typed, with_items, alone, text_choices, of_its_type),
        known=_GEMINI_KEYS,
        formats=("enum", "date-time", "int32", "int64", "float", "double"),
        inlines=True,
    ),
    "mistral": Dialect((with_properties, merged), (with_items,)),
}


def dialect_of(model: str) -> DialectName:
    """Return the dialect behind a server with OpenAI's API, by the name of its model, such as `google/gemini-3`."""
    name = model.lower()
    known: dict[str, DialectName] = {"gemini": "gemini", "mistral": "mistral", "claude": "anthropic"}
    return next((dialect for part, dialect in known.items() if part in name), "openai")


@lru_cache(2048)
def adapted_json(schema: str, dialect: DialectName) -> str:
    """Return a schema as a provider takes it, both as JSON text."""
    return json.dumps(_Writer(DIALECTS[dialect], json.loads(schema)).root())


class _Writer:
    """Writes one schema in one dialect."""

    def __init__(self, dialect: Dialect, schema: Part) -> None:
        self._dialect, self._schema = dialect, schema
        self._left = MAX_PARTS

    def root(self) -> Part:
        part = self._resolved(self._schema, (), inlines=True)[0]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(some := part.get(key), list):
                each = [one if isinstance(one, dict) else {} for one in some]
                part = part | {key: [self._resolved(one, (), inlines=True)[0] for one in each]}
        for change in self._dialect.root:
            part = change(part)
        made: Part = self._part(part, ())
        return made

    def _part(self, part: Any, inside: tuple[str, ...], level: int = 0) -> Any:
        self._left -= 1
        if not isinstance(part, dict):
            return _PLAIN if self._dialect.inlines else part
        is_written = False
        while not is_written:
            part, inside = self._in_one(part, inside) if self._dialect.inlines else (part, inside)
            if self._left < 0 or level > MAX_LEVELS:
                return _PLAIN
            for change in self._dialect.parts:
                part = change(part)
            # `one_type` leaves `allOf` in the place of a single choice
            is_written = not self._dialect.inlines or "allOf" not in part
        refused, known, formats = self._dialect.refused, self._dialect.known, self._dialect.formats
        kept = {key: each for key, each in part.items() if key not in refused and (known is None or key in known)}
        if formats is not None and kept.get("format") not in formats:
            kept.pop("format", None)
        return with_parts(kept, lambda each: self._part(each, inside, level + 1))

    def _in_one(self, part: Part, inside: tuple[str, ...]) -> tuple[Part, tuple[str, ...]]:
        """Write what `$ref` and `allOf` name as one schema, as far as it can be."""
        made: Part = {}
        todo: list[Any] = [part]
        while todo and self._left >= 0:
            self._left -= 1
            each = todo.pop()
            if isinstance(each, dict):
                each, inside = self._resolved(each, inside)
                some = each.pop("allOf", None)
                todo += reversed(some) if isinstance(some, list) else ()
                add_to(made, each)
        return made, inside

    def _resolved(self, part: Part, inside: tuple[str, ...], *, inlines: bool = False) -> tuple[Part, tuple[str, ...]]:
        """Put what references name in their place. Of what contains itself, only the type stands there."""
        while (inlines or self._dialect.inlines) and isinstance(reference := part.get("$ref"), str):
            self._left -= 1
            beside = {key: value for key, value in part.items() if key != "$ref"}
            target = pointed(self._schema, reference)
            target = target if isinstance(target, dict) else {}
            if reference in inside or target is self._schema:
                target = {key: each for key, each in target.items() if key == "type"}
            part, inside = {**target, **beside}, (*inside, reference)
        if self._dialect.inlines:
            part = {key: value for key, value in part.items() if key not in ("$defs", "definitions")}
        return part, inside


class ToolDefinition:
    """Name, description and JSON Schema of one function, exactly as given: no key added, none reordered.

    What a schema says of names that only results have (`OF_RESULTS`) is not shown to models.
    """

    __slots__ = ("_parameters_json", "checked_json", "description", "name")

    name: str
    description: str
    checked_json: str
    _parameters_json: str

    @keywords_known
    def __init__(self, name: str, description: str, parameters: Mapping[str, Any] | None = None) -> None:
        given: object = parameters
        if isinstance(given, str | bytes | type):
            cure = "json.loads(...)" if isinstance(given, str | bytes) else "ToolDefinition.from_model(...)"
            raise RegistrationError(f"tool {name!r}: parameters must be a dict, not {brief(given)}; write {cure}")
        try:
            checked = shown = json.dumps(ANYTHING if parameters is None else parameters, allow_nan=False)
            if OF_RESULTS in checked:
                shown = json.dumps(without_names_of_results(parameters))
        except (TypeError, ValueError, RecursionError) as exc:
            raise RegistrationError(f"tool {name!r}: parameters are not JSON: {exc}") from exc
        set_once = object.__setattr__
        set_once(self, "name", name)
        set_once(self, "description", description)
        set_once(self, "checked_json", checked)
        set_once(self, "_parameters_json", shown)

    @classmethod
    def from_model(cls, name: str, description: str, model: type[Any]) -> ToolDefinition:
        """Derive a definition from a pydantic model, dataclass or TypedDict: what the tool takes as arguments.

        Raises:
            RegistrationError: no such definition can be derived.
        """
        from toolcell.calls.type_schema import record_schema

        definition = cls(name, description, record_schema(model))
        check_definition(definition)
        return definition

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of the arguments, as a copy that may be changed freely."""
        schema: dict[str, Any] = json.loads(self._parameters_json)
        return schema

    @property
    def checked_parameters(self) -> dict[str, Any]:
        """The same with what is known of names that only results have: arguments are checked against this."""
        schema: dict[str, Any] = json.loads(self.checked_json)
        return schema

    @property
    def size_chars(self) -> int:
        """How many characters of a request it takes, about."""
        return len(self.name) + len(self.description) + len(self._parameters_json)

    @property
    def has_names_of_results(self) -> bool:
        """True when the two differ."""
        return self.checked_json != self._parameters_json

    def adapted(self, dialect: DialectName) -> dict[str, Any]:
        """Return `parameters` without what a provider would refuse a request for."""
        schema: dict[str, Any] = json.loads(adapted_json(self._parameters_json, dialect))
        return schema

    @property
    def own_names(self) -> dict[str, str]:
        """Names of its properties, by what some provider is given in their place."""
        return {new: name for name, new in new_names(self.adapted("openai").get("properties") or {}).items()}

    def to_openai(self, model: str = "", *, strict: bool = False) -> ProviderToolDef:
        """Shape: {"type": "function", "function": {"name", "description", "parameters"}}.

        `model`: Gemini, Mistral and Claude take other schemas. `strict`: OpenAI holds its model to the schema. For
        Claude, and for a tool that takes objects with any properties, it is sent as `"strict": False`.
        """
        dialect = dialect_of(model)
        is_strict = strict and dialect != "anthropic" and not is_free(self.adapted("openai-strict"))
        parameters = self.adapted("openai-strict" if is_strict else dialect)
        function = ProviderFunction(name=provider_name(self.name), description=self.description, parameters=parameters)
        if strict:
            function["strict"] = is_strict
        return ProviderToolDef(type="function", function=function)

    def to_anthropic(self) -> AnthropicToolDef:
        """Shape: {"name", "description", "input_schema"}."""
        return AnthropicToolDef(
            name=provider_name(self.name), description=self.description, input_schema=self.adapted("anthropic")
        )

    def to_mcp(self) -> dict[str, Any]:
        """Shape: {"name", "description", "inputSchema"}, as in MCP's tools/list."""
        return {"name": self.name, "description": self.description, "inputSchema": self.parameters}

    def renamed(self, name: str) -> ToolDefinition:
        """The same definition under another name."""
        return ToolDefinition(name, self.description, self.checked_parameters)

    def __setattr__(self, key: str, value: object) -> NoReturn:
        raise AttributeError(f"a ToolDefinition does not change; cannot set {key!r}")

    def __delattr__(self, key: str) -> NoReturn:
        raise AttributeError(f"a ToolDefinition does not change; cannot delete {key!r}")

    def __reduce__(self) -> tuple[type[ToolDefinition], tuple[str, str, dict[str, Any]]]:
        return ToolDefinition, (self.name, self.description, self.checked_parameters)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolDefinition):
            return NotImplemented
        return (self.name, self.description, self.parameters) == (other.name, other.description, other.parameters)

    def __hash__(self) -> int:
        return hash((self.name, self.description))

    def __repr__(self) -> str:
        return f"ToolDefinition({self.name!r}, {self.description!r}, {self.parameters!r})"


def check_definition(definition: ToolDefinition) -> None:
    """Refuse what a provider would refuse, when the tool is registered rather than when it is first called.

    The schema itself is checked by `validation.compile_schema`.

    Raises:
        RegistrationError: names the tool and what is wrong with it.
    """
    name: object = definition.name  # typed loosely: definitions may be written by hand
    description: object = definition.description
    schema: object = definition.parameters
    check_name(name)
    if not isinstance(description, str) or not description.strip():
        said = "the description is empty, so no model would know when to call it; write a docstring"
        raise RegistrationError(f"tool {name!r}: {said}")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise RegistrationError(f'tool {name!r}: parameters must be a JSON Schema of "type": "object"')
    required, properties = schema.get("required", []), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for missing in (each for each in required if each not in properties):
            raise RegistrationError(f"tool {name!r}: {missing!r} is required but not among its properties")
    try:  # one that cannot be sent would fail `list_tools` of scripts, and with it all other tools
        PackedValue([{"description": description, "parameters": schema}], "definition")
    except (UnsendableValue, ValueTooLarge) as exc:
        raise RegistrationError(f"tool {name!r}: scripts cannot be told about it: {exc}") from exc


def warn_about_description(definition: ToolDefinition) -> None:
    """Warn when a description is too short to choose a tool by."""
    if len(definition.description.strip()) < MIN_DESCRIPTION_CHARS:
        message = (
            f"tool {definition.name!r}: description {definition.description!r} is shorter than "
            f"{MIN_DESCRIPTION_CHARS} characters; say what the tool does and when to use it"
        )
        warn_user(message, ToolDescriptionWarning)


# Names of tools. A name is one part or several, with dots between them: in `github.create_issue`, `github` is a
# namespace. Providers take no dots, so a model is shown `github__create_issue`, and a call by that name calls the tool.


NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
"""Parts of the signs that every provider accepts."""

MAX_NAME_CHARS = 64
"""Most characters of a name as providers are given it."""

RESERVED = "toolcell"
"""The namespace of what the host answers itself."""


def check_name(name: object) -> None:
    """Refuse what no provider would accept, and the namespace that is the host's own.

    Raises:
        RegistrationError: names the tool and what is wrong with it.
    """
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or len(provider_name(name)) > MAX_NAME_CHARS:
        shown = f"^{NAME_PATTERN.pattern}$ and have at most {MAX_NAME_CHARS} characters; "
        shown += "a dot counts twice, and so does a digit or dash at the beginning"
        raise RegistrationError(f"tool {str(name)[:200]!r}: a name must match {shown}")
    if name.partition(".")[0].casefold() == RESERVED and "." in name:
        raise RegistrationError(f"tool {name!r}: the namespace {RESERVED!r} is taken")
    if any(len(part) > 4 and part.startswith("__") and part.endswith("__") for part in name.split(".")):
        raise RegistrationError(f"tool {name!r}: a name such as __class__ means something else in Python; rename it")


@functools.lru_cache(maxsize=8192)
def collision_key(name: str) -> str:
    """Return what two names must not have in common: how they look to a provider or in Python, whatever their case."""
    return provider_name(python_path(name)).casefold()


class TakenNames:
    """The names of a registry's tools, by what two of them must not have in common. Adding one looks at no other."""

    def __init__(self, tools: Iterable[str]) -> None:
        """`tools`: names that stand side by side already. They are not checked."""
        self._known = dict[str, str]()
        self._namespaces = dict[str, str]()
        for name in tools:
            self._note(name)

    def _note(self, name: str) -> None:
        self._known.setdefault(collision_key(name), name)
        if "." in name:
            self._namespaces.setdefault(collision_key(name.rpartition(".")[0]), name)

    def add(self, new: Iterable[str], identity: Callable[[str], object]) -> None:
        """Add names, each checked against all others. `identity(name)` is equal for names of one tool.

        Raises:
            RegistrationError: two names differ in case or signs only, or a name is also a namespace. Some are added.
        """
        for name in new:
            self._note(name)
            key = collision_key(name)
            other = self._known[key]
            if identity(other) != identity(name):
                alike = f"{other!r} differs from it in case or signs only"
                raise RegistrationError(f"tool {name!r}: {alike}; rename one of them")
            for each in {key, collision_key(name.rpartition(".")[0])}:
                if each in self._known and each in self._namespaces:
                    alike = f"the namespace of {self._namespaces[each]!r}"
                    raise RegistrationError(f"tool {self._known[each]!r} has the name of {alike}; rename one of them")
