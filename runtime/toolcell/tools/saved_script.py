"""`SavedScript`: a script that was saved by name, with the schema of its inputs.

It is a tool of a registry, and may be kept as files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, Final

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.context import ToolContext
from toolcell.calls.definition import (
    MAX_NAME_CHARS,
    ToolDefinition,
    check_definition,
    check_name,
)
from toolcell.calls.options import ToolOptions
from toolcell.calls.result import ErrorCode, ToolResult
from toolcell.calls.schema_walk import ValueCheck
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.support.checks import brief, check_kind, check_path
from toolcell.support.files import read_regular_file, write_file
from toolcell.support.packing import text_digest
from toolcell.tools.code import CodeRuntime, CodeTool, run_code
from toolcell.tools.spec import RegisteredTool, RegistryState, ToolSpec, check_collisions
from toolcell.tools.stubs import is_identifier, mapping
from toolcell_bridge.guest.scripts import NOT_KEPT
from toolcell_bridge.guest.tool_names import provider_name
from toolcell_bridge.guest.tools import GUEST_NAMES
from toolcell_bridge.wire.frozen import frozen

MAX_SOURCE_BYTES: Final = 256 * 1024
MAX_DESCRIPTION_CHARS: Final = 4096
MAX_VERSION: Final = 99_999
MAX_SCRIPT_NAME_CHARS: Final = MAX_NAME_CHARS - len(f"_v{MAX_VERSION}")
"""Leaves room for the names of old versions."""

NO_INPUTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}

OLD_VERSION: Final = re.compile(r"_v[1-9][0-9]*\Z")
"""How the name of an old version of a script ends: `NAME_v1`."""
_UNSAVED: Final = frozenset({"preview", "revert", "orchestrates", "is_agent", "blocking", "exclusive_group"})
"""Options that are functions, or that do not fit a tool which runs others."""


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

    @property
    def digest(self) -> str:
        """The sha256 of what makes this another version than the one before, in hex."""
        about = [self.name, self.source, self.inputs, self.description, self.options]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

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
        return ToolOptions(orchestrates=True, label=f"Run {self.name}").changed(self.options)

    def values(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the script finds: each input, and the default or None for one that was not given."""
        properties = mapping(self.inputs.get("properties"))
        return {**{name: mapping(part).get("default") for name, part in properties.items()}, **args}


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
    known = ToolOptions().changed(options)
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


# Saved scripts as plain files: `NAME/v1.py` holds the source of version 1 of a script, `NAME/v1.json` all else. Several
# processes may save into one folder at once. A version belongs to whoever makes its source first, and it is saved when
# its JSON is there; a source without JSON is one that is being saved, or that a killed process left


FORMAT: Final = 1
MAX_FACTS_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of the JSON of one version, most of which is the schema of its inputs."""
MAX_SCRIPTS: Final = 10_000

_VERSION: Final = re.compile(r"v([1-9][0-9]{0,4})\.(py|json)")
_READABLE: Final = 0o644


_DICT: Final = {"type": "object"}
_TEXT: Final = {"type": "string"}
_MEMBERS: Final = {
    "format": {"type": "integer"},
    "name": _TEXT,
    "version": {"type": "integer"},
    "sha256": _TEXT,
    "description": _TEXT,
    "inputs": _DICT,
    "options": _DICT,
}
_FACTS: Final = ValueCheck(
    {
        "type": "object",
        "properties": {**_MEMBERS, "tools": {}},  # of versions saved before: schemas of tools, which nothing reads
        "required": [*_MEMBERS],
        "additionalProperties": False,
    }
)
"""What the JSON of a version holds."""


def _save_files(folder: str | os.PathLike[str], script: SavedScript) -> SavedScript:
    """Write a script as its next version, and return it; the latest version stays when the script is the same.

    Raises:
        UsageError: the folder cannot be read or written, or a version in it is damaged.
    """
    check_path("folder", folder)
    place = Path(folder) / script.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        while True:
            taken = _files_of(place)
            if (known := _the_same(place, script, taken)) is not None:
                return known
            made = replace(script, version=_next_version(place, script, taken))
            if made.version > MAX_VERSION:
                raise UsageError(f"script {script.name!r} has {MAX_VERSION} versions; save it under another name")
            if _claim(place, made) and _write_facts(place, made):
                return made
    except OSError as exc:
        raise UsageError(f"script {script.name!r} cannot be saved in {str(folder)!r:.200}: {exc.strerror}") from exc


def _the_same(place: Path, script: SavedScript, taken: dict[int, set[str]]) -> SavedScript | None:
    """Return the latest version if it is this script."""
    saved = [number for number, endings in taken.items() if endings == {"py", "json"}]
    if not saved or max(saved) < max(taken):
        return None
    latest = _read_version(place, script.name, max(saved))
    return latest if latest.digest == script.digest else None


def _next_version(place: Path, script: SavedScript, taken: dict[int, set[str]]) -> int:
    """Return the number of the next version: that of the same source, if another process is just saving it."""
    latest = max(taken, default=0)
    if taken.get(latest) == {"py"}:
        source = _read(place / f"v{latest}.py", MAX_SOURCE_BYTES, f"{place.name}/v{latest}.py")
        if source == script.source.encode():
            return latest
    return latest + 1


def _claim(place: Path, script: SavedScript) -> bool:
    """Write the source; False when another process was faster, and saves another one."""
    path, source = place / f"v{script.version}.py", script.source.encode()
    try:
        write_file(path, source, mode=_READABLE, replace=False)
    except FileExistsError:
        return _read(path, MAX_SOURCE_BYTES, f"{place.name}/{path.name}") == source
    return True


def _write_facts(place: Path, script: SavedScript) -> bool:
    facts = {
        "format": FORMAT,
        "name": script.name,
        "version": script.version,
        "sha256": text_digest(script.source),
        "description": script.description,
        "inputs": script.inputs,
        "options": script.options,
    }
    data = (json.dumps(facts, indent=1) + "\n").encode()
    if len(data) > MAX_FACTS_BYTES:
        raise UsageError(f"script {script.name!r}: its inputs have {len(data)} bytes; the limit is {MAX_FACTS_BYTES}")
    try:
        write_file(place / f"v{script.version}.json", data, mode=_READABLE, replace=False)
    except FileExistsError:
        return False
    return True


def load_scripts(folder: str | os.PathLike[str], name: str = "") -> dict[str, dict[int, SavedScript]]:
    """Return the scripts that were saved in a folder, or one: for each name, its versions by number.

    Raises:
        UsageError: the folder cannot be read, or a script in it is damaged; names it.
    """
    check_path("folder", folder)
    where, found = Path(folder), dict[str, dict[int, SavedScript]]()
    if not where.is_dir():
        raise UsageError(f"{str(where)!r:.200} is not a folder of saved scripts")
    try:
        every = [where / name] if name else where.iterdir()
        places = sorted(each for each in every if each.is_dir() and not each.name.startswith("."))
        if len(places) > MAX_SCRIPTS:
            raise UsageError(f"{str(where)!r:.200} has {len(places)} folders, and at most {MAX_SCRIPTS} are read")
        for place in places:
            saved = sorted(number for number, endings in _files_of(place).items() if "json" in endings)
            if saved:
                found[place.name] = {number: _read_version(place, place.name, number) for number in saved}
    except OSError as exc:
        raise UsageError(f"saved scripts in {str(where)!r:.200} cannot be read: {exc.strerror}") from exc
    return found


def _files_of(place: Path) -> dict[int, set[str]]:
    """Return the endings of the files of each version."""
    found = dict[int, set[str]]()
    for each in place.iterdir():
        if match := _VERSION.fullmatch(each.name):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def _read_version(place: Path, name: str, number: int) -> SavedScript:
    shown = f"{place.name}/v{number}"
    data = _read(place / f"v{number}.json", MAX_FACTS_BYTES, f"{shown}.json")
    try:
        facts = json.loads(data)
        if (problem := _FACTS.problem(facts)) is not None:
            raise ValueError(str(problem))
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{shown}.json is damaged: {exc!s:.200}; save the script again") from exc
    if (facts["format"], facts["name"], facts["version"]) != (FORMAT, name, number):
        found = f"{facts['name']!r:.80} version {facts['version']}, format {facts['format']}"
        raise UsageError(f"{shown}.json is that of {found}")
    try:
        source = _read(place / f"v{number}.py", MAX_SOURCE_BYTES, f"{shown}.py").decode()
        if text_digest(source) != facts["sha256"]:
            raise UsageError(f"{shown}.py is not as it was saved; save a changed script with save_script")
        check_script_name(name)
        script = saved_script(name, source, facts["inputs"], facts["description"], facts["options"])
    except UnicodeDecodeError as exc:
        raise UsageError(f"{shown}.py is not UTF-8") from exc
    except RegistrationError as exc:
        raise UsageError(f"{shown}.json is damaged: {exc}") from exc
    return replace(script, version=number)


def _read(path: Path, limit: int, shown: str) -> bytes:
    """Return the content of a regular file.

    Raises:
        UsageError: it is none, or too large.
    """
    try:
        data = read_regular_file(path, limit + 1)
    except OSError as exc:
        raise UsageError(f"{shown} cannot be read: {exc.strerror}") from exc
    if len(data) > limit:
        raise UsageError(f"{shown} has more than {limit} bytes")
    return data


# Saved scripts as tools of a registry: the latest version under its name, older ones as `NAME_v1` and so on. A call
# runs the script in a sandbox of its own, as a part of the run that calls it: under the rules, hooks, budget and labels
# of that run, with the tools that its caller may call


MAX_NESTED: Final = 4
"""Saved scripts that run inside one another. Each of them holds a sandbox."""


def save_version(
    script: SavedScript, state: RegistryState, target: ScriptTarget, folder: str | os.PathLike[str] | None
) -> tuple[SavedScript, Sequence[RegisteredTool]]:
    """Make the next version of a script, and write it into the folder. Return it, and the tools of all versions.

    Raises:
        RegistrationError: another tool has the name, or there are too many versions.
        UsageError: the folder cannot be read or written.
    """
    target.spec(script).compile()
    _check_free(script.name, state)
    sources = [tool.spec.source for tool in state.tools.values()]
    versions = {each.version: each for each in sources if isinstance(each, SavedScript) and each.name == script.name}
    if folder is not None:
        versions = load_scripts(folder, script.name).get(script.name, {}) if os.path.isdir(folder) else {}
        _check_next(script, versions, state, target)
        latest = _save_files(folder, script)
    elif versions and versions[max(versions)].digest == script.digest:
        latest = replace(script, version=max(versions))
    else:
        latest = replace(script, version=max(versions, default=0) + 1)
    if latest.version > MAX_VERSION:
        raise RegistrationError(f"script {script.name!r} has {MAX_VERSION} versions; save it under another name")
    return latest, _tools_of_versions({**versions, latest.version: latest}, state, target)


def tools_of(
    saved: Mapping[str, Mapping[int, SavedScript]], state: RegistryState, target: ScriptTarget
) -> list[RegisteredTool]:
    """Return saved scripts as tools.

    Raises:
        RegistrationError: the name of a script is taken by another tool.
    """
    for name in saved:
        _check_free(name, state)
    return [tool for versions in saved.values() for tool in _tools_of_versions(versions, state, target)]


def _check_free(name: str, state: RegistryState) -> None:
    known = state.tools.get(name)
    if known is not None and not isinstance(known.spec.source, SavedScript):
        raise RegistrationError(f"{name!r} is already the name of a tool; save the script under another name")


def _check_next(
    script: SavedScript, saved: Mapping[int, SavedScript], state: RegistryState, target: ScriptTarget
) -> None:
    """Refuse a script that could not be registered beside the other tools: nothing of it is to be written then."""
    versions, latest = {**saved}, max(saved, default=0)
    if not saved or saved[latest].digest != script.digest:
        versions[latest + 1] = script
    made = {tool.name: tool for tool in _tools_of_versions(versions, state, target)}
    check_collisions(made, {**state.tools, **made})


def _tools_of_versions(
    versions: Mapping[int, SavedScript], state: RegistryState, target: ScriptTarget
) -> list[RegisteredTool]:
    """Return the tools of one script's versions.

    Raises:
        RegistrationError: the name of an old version is taken.
    """
    made = []
    for number, script in sorted(versions.items()):
        tool = target.spec(script).compile(coercion=state.settings.coercion, extras=state.settings.extras)
        if number != max(versions):
            tool = tool.renamed(f"{script.name}_v{number}")  # rules about the name hold for it too
            known = state.tools.get(tool.name)
            source = script if known is None else known.spec.source
            if not (isinstance(source, SavedScript) and source.name == script.name):
                raise RegistrationError(f"{tool.name!r} is the name of a tool and of a version of {script.name!r}")
        made.append(tool)
    return made


class ScriptTarget:
    """Where saved scripts run, and what they may call there."""

    def __init__(self, runtime: CodeRuntime | None, tools: CallableTools | None) -> None:
        if runtime is not None:
            CodeTool(runtime).check("a saved script")
        if not (tools is None or hasattr(tools, "snapshot")):
            raise UsageError(
                f"tools= takes a ToolRegistry, not {type(tools).__name__}; some tools are registry.subset(...)"
            )
        self._runtime, self._tools = runtime, tools

    def spec(self, script: SavedScript) -> ToolSpec:
        """Return a script as a tool."""

        async def invoke(context: ToolContext) -> ToolResult:
            return await self._run(script, context)

        return ToolSpec(
            definition=script.definition,
            invoke=invoke,
            options=script.tool_options(),
            source=script,
        )

    async def _run(self, script: SavedScript, context: ToolContext) -> ToolResult:
        call, run = context.call, context.run
        _check_nesting(script, run)
        runtime = self._runtime or run.scope.runtime or call.registry.code_runtime
        if runtime is None:
            raise ToolError(
                f"script {script.name!r} has no Runtime to run in: give save_script or load_scripts runtime=..., or "
                "call it from a script or plan of a Runtime",
                code=ErrorCode.UNAVAILABLE,
            )
        run = run.within(scripts=(*run.scope.scripts, script.name))
        registry: Any = call.registry
        if self._tools is not None:  # other tools, under the rules and hooks of those who call
            run = run.within(
                hooks=(*run.scope.hooks, *registry.hooks), policies=(*run.scope.policies, *registry.policies)
            )
            registry = self._tools
        inputs = script.values(call.args)
        result = await run_code(runtime, registry, script.source, run, context.update, inputs=inputs)
        if result.error is not None:
            message = f"script {script.name} (version {script.version}): {result.message}"
            return replace(result, error=replace(result.error, message=message))
        if result.has_value:
            return result
        for warning in result.details["warnings"]:
            if warning.startswith(NOT_KEPT):  # whoever calls it must not take it for None
                message = f"script {script.name} (version {script.version}): {warning.removeprefix(NOT_KEPT)}"
                return ToolResult.fail(message, code=ErrorCode.TOO_LARGE)
        return replace(result, value=None, has_value=True)


def _check_nesting(script: SavedScript, run: RunContext) -> None:
    """Refuse a script that is running already further up, and too many inside one another.

    Raises:
        ToolError: it is one of these.
    """
    path = " -> ".join((*run.scope.scripts, script.name))
    if script.name in run.scope.scripts:
        raise ToolError(f"script {script.name!r} is already running further up: {path}")
    if len(run.scope.scripts) >= MAX_NESTED:
        raise ToolError(f"saved scripts may run {MAX_NESTED} deep inside one another, and this is one more: {path}")
