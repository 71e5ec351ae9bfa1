"""`SavedScript`: a script that was saved by name, with the schema of its inputs and the tools as they were then.

Checks and data only. `script_folder` keeps saved scripts as files, `script_tools` makes tools of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from typing import Any, Final

from toolcell.calls.definition import ToolDefinition, check_definition
from toolcell.calls.names import MAX_NAME_CHARS, check_name, provider_name
from toolcell.calls.options import ToolOptions
from toolcell.errors import RegistrationError, UsageError
from toolcell.support.checks import brief, check_kind
from toolcell.tools.adapters import with_options
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.stubs import is_identifier, mapping
from toolcell_bridge.guest.tools import GUEST_NAMES
from toolcell_bridge.wire.frozen import frozen

MAX_SOURCE_BYTES: Final = 256 * 1024
MAX_DESCRIPTION_CHARS: Final = 4096
MAX_VERSION: Final = 99_999
MAX_SCRIPT_NAME_CHARS: Final = MAX_NAME_CHARS - len(f"_v{MAX_VERSION}")
"""Leaves room for the names of old versions."""

NO_INPUTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}

_WORD: Final = re.compile(r"\w+")
OLD_VERSION: Final = re.compile(r"_v[1-9][0-9]*\Z")
"""How the name of an old version of a script ends: `NAME_v1`."""
_UNSAVED: Final = frozenset({"preview", "revert", "orchestrates", "is_agent", "blocking", "exclusive_group"})
"""Options that are functions, or that do not fit a tool which runs others."""


@frozen
class ToolThen:
    """A tool as it was when a script was saved."""

    parameters: Mapping[str, Any]
    returns: Mapping[str, Any] | None

    @property
    def digest(self) -> str:
        """The sha256 of both schemas, in hex."""
        return _digest([self.parameters, self.returns])


@frozen
class SavedScript:
    """One version of a saved script."""

    name: str
    source: str = field(repr=False)
    inputs: Mapping[str, Any] = field(default_factory=lambda: NO_INPUTS, repr=False)
    """JSON Schema of the arguments, which are names in the script."""
    description: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `ToolOptions` that it was saved with, as JSON."""
    version: int = 1
    tools: Mapping[str, ToolThen] = field(default_factory=dict, repr=False)
    """The tools whose names its text mentions, as they were when it was saved."""

    @property
    def digest(self) -> str:
        """The sha256 of what makes this another version than the one before, in hex."""
        return _digest([self.name, self.source, self.inputs, self.description, self.options])

    @property
    def definition(self) -> ToolDefinition:
        """What a model sees."""
        return ToolDefinition(self.name, self.description, self.inputs)

    def tool_options(self) -> ToolOptions:
        """Return the options as a registry has them.

        Raises:
            RegistrationError: there is no such option.
            UsageError: an option has a wrong value.
        """
        return with_options(ToolOptions(orchestrates=True, label=f"Run {self.name}"), self.options)

    def values(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the script finds: each input, and the default or None for one that was not given."""
        properties = mapping(self.inputs.get("properties"))
        absent = {name: mapping(part).get("default") for name, part in properties.items()}
        return {**absent, **args}


def saved_script(
    name: str, source: str, inputs: object, description: str | None, options: Mapping[str, Any]
) -> SavedScript:
    """Return what a caller wants to save, checked.

    Raises:
        RegistrationError: the name, the inputs, the description or an option is wrong.
        UsageError: the source is not text, empty or too large.
    """
    check_script_name(name)
    check_source(name, source)
    check_kind("description", description, str, type(None))
    text = f"Run the saved script {name}." if description is None else description
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise RegistrationError(
            f"script {name!r}: the description has {len(text)} characters; the limit is {MAX_DESCRIPTION_CHARS}"
        )
    script = SavedScript(name, source, inputs_schema(name, inputs), text, _saved_options(name, options))
    check_definition(script.definition)
    script.tool_options()
    return script


def check_script_name(name: object) -> None:
    """Refuse what is not a tool's name, is the name of an old version, or is too long for the names of those.

    Raises:
        RegistrationError: says which names there may be.
    """
    check_name(name)
    if len(provider_name(str(name))) > MAX_SCRIPT_NAME_CHARS:
        raise RegistrationError(
            f"script {name!r}: its name must have at most {MAX_SCRIPT_NAME_CHARS} characters, a dot counting twice"
        )
    if OLD_VERSION.search(str(name)):
        raise RegistrationError(f"script {name!r}: a name with _v and a number is that of an old version; rename it")


def check_source(name: str, source: object) -> None:
    """Refuse a source that is not text, empty, too large, or not to be written as UTF-8.

    Raises:
        UsageError: names the script and the limit.
    """
    check_kind("source", source, str)
    assert isinstance(source, str)
    if not source.strip():
        raise UsageError(f"script {name!r}: the source is empty")
    try:
        size = len(source.encode())
    except UnicodeEncodeError as exc:
        raise UsageError(f"script {name!r}: the source is not UTF-8: {exc.reason} at {exc.start}") from exc
    if size > MAX_SOURCE_BYTES:
        raise UsageError(f"script {name!r}: the source has {size} bytes, and at most {MAX_SOURCE_BYTES} are taken")


def inputs_schema(name: str, inputs: object) -> Mapping[str, Any]:
    """Return the schema of a script's inputs: given as a JSON Schema, or as a pydantic model, dataclass or TypedDict.

    Raises:
        RegistrationError: it is neither, or a script could not use a property as a name.
    """
    if inputs is None:
        return NO_INPUTS
    from toolcell.calls.type_schema import record_schema

    schema = record_schema(inputs) if isinstance(inputs, type) else inputs
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        kinds = 'a JSON Schema of "type": "object", a pydantic model, a dataclass or a TypedDict'
        raise RegistrationError(f"script {name!r}: inputs must be {kinds}, not {brief(inputs)}")
    plain = ToolDefinition(name, "Inputs of a script.", schema)
    check_definition(plain)
    for each in mapping(plain.parameters.get("properties")):
        if not is_identifier(each) or each in GUEST_NAMES:
            taken = "is a name that every script finds" if each in GUEST_NAMES else "is not a Python name"
            raise RegistrationError(f"script {name!r}: the input {each[:80]!r} {taken}; call it something else")
    return plain.checked_parameters


def _saved_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON: sets as sorted lists."""
    known = with_options(ToolOptions(), options)
    if wrong := sorted(options.keys() & _UNSAVED):
        raise RegistrationError(f"script {name!r}: a saved script cannot have the option {', '.join(wrong)}")
    plain = dict[str, Any]()
    for each in fields(known):
        if each.name in options:
            value = getattr(known, each.name)
            plain[each.name] = sorted(map(str, value)) if isinstance(value, frozenset) else value
    try:
        return dict(json.loads(json.dumps(plain, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise RegistrationError(f"script {name!r}: an option cannot be saved: {exc}") from exc


def tools_mentioned(source: str, tools: Iterable[RegisteredTool]) -> dict[str, ToolThen]:
    """Return the tools whose names occur in a text. The text is not parsed: it may be a stranger's."""
    words = frozenset(_WORD.findall(source))
    return {
        tool.name: ToolThen(tool.definition.parameters, tool.options.returns)
        for tool in tools
        if words.issuperset(_WORD.findall(tool.name.replace("-", "_"))) or tool.name in source
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
