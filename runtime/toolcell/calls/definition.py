"""What a model knows of a tool: name, description, JSON Schema of its arguments, in each provider's format.

Knows nothing of how a tool runs. A definition never changes; every `parameters` handed out is a fresh copy.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, NotRequired, TypedDict

from toolcell.calls.dialects import DialectName, adapted_json, dialect_of
from toolcell.calls.schema import OF_RESULTS, without_names_of_results
from toolcell.errors import RegistrationError, warn_user
from toolcell.support.checks import brief, keywords_known
from toolcell_bridge.guest.tool_names import IN_PLACE_OF_DOT, python_path
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.plain import pack_value

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


class ToolDefinition:
    """Name, description and JSON Schema of one function, exactly as given: no key added, none reordered.

    What a schema says of names that only results have (`OF_RESULTS`) is not shown to models.
    """

    __slots__ = ("_checked_json", "_parameters_json", "description", "name")

    name: str
    description: str
    _checked_json: str
    _parameters_json: str

    @keywords_known
    def __init__(self, name: str, description: str, parameters: Mapping[str, Any] | None = None) -> None:
        given: object = parameters
        if isinstance(given, str | bytes | type):
            cure = "json.loads(...)" if isinstance(given, str | bytes) else "ToolDefinition.from_model(...)"
            raise RegistrationError(f"tool {name!r}: parameters must be a dict, not {brief(given)}; write {cure}")
        try:
            checked = shown = json.dumps(ANYTHING if parameters is None else parameters)
            if OF_RESULTS in checked:
                shown = json.dumps(without_names_of_results(parameters))
        except (TypeError, ValueError, RecursionError) as exc:
            raise RegistrationError(f"tool {name!r}: parameters are not JSON: {exc}") from exc
        set_once = object.__setattr__
        set_once(self, "name", name)
        set_once(self, "description", description)
        set_once(self, "_checked_json", checked)
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
        schema: dict[str, Any] = json.loads(self._checked_json)
        return schema

    @property
    def size_chars(self) -> int:
        """How many characters of a request it takes, about."""
        return len(self.name) + len(self.description) + len(self._parameters_json)

    @property
    def has_names_of_results(self) -> bool:
        """True when the two differ."""
        return self._checked_json != self._parameters_json

    def adapted(self, dialect: DialectName) -> dict[str, Any]:
        """Return `parameters` without what a provider would refuse a request for."""
        schema: dict[str, Any] = json.loads(adapted_json(self._parameters_json, dialect))
        return schema

    def to_openai(self, model: str = "", *, strict: bool = False) -> ProviderToolDef:
        """Shape: {"type": "function", "function": {"name", "description", "parameters"}}.

        `model`: Gemini and Mistral take other schemas. `strict`: OpenAI holds its model to the schema.
        """
        parameters = self.adapted("openai-strict" if strict else dialect_of(model))
        function = ProviderFunction(name=provider_name(self.name), description=self.description, parameters=parameters)
        if strict:
            function["strict"] = True
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolDefinition):
            return NotImplemented
        mine = (self.name, self.description, self.parameters)
        return mine == (other.name, other.description, other.parameters)

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
        pack_value([{"description": description, "parameters": schema}], "it")
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


def provider_name(name: str) -> str:
    """Return a tool's name as providers take it."""
    return name.replace(".", IN_PLACE_OF_DOT)


def check_name(name: object) -> None:
    """Refuse what no provider would accept, and the namespace that is the host's own.

    Raises:
        RegistrationError: names the tool and what is wrong with it.
    """
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or len(provider_name(name)) > MAX_NAME_CHARS:
        shown = f"^{NAME_PATTERN.pattern}$ and have at most {MAX_NAME_CHARS} characters, a dot counting twice"
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


def check_collisions(new: Iterable[str], tools: Mapping[str, object]) -> None:
    """Refuse names that a model or a script could take for one another. Two names of one tool may be alike.

    `tools`: what there will be, the new names among it, each with something that is equal for names of one tool.

    Raises:
        RegistrationError: two names differ in case or signs only, or a name is also a namespace.
    """
    TakenNames(tools).add(new, tools.__getitem__)
