"""Saved scripts as plain files: `NAME/v1.py` holds the source of version 1 of a script, `NAME/v1.json` all else.

Several processes may save into one folder at once. A version belongs to whoever makes its source first, and it is
saved when its JSON is there; a source without JSON is one that is being saved, or that a killed process left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from toolcell.errors import RegistrationError, UsageError
from toolcell.support.atomic import write_file
from toolcell.support.checks import check_path
from toolcell.support.packing import text_digest
from toolcell.support.private_files import read_regular_file
from toolcell.tools.saved_script import (
    MAX_SOURCE_BYTES,
    MAX_VERSION,
    SavedScript,
    ToolThen,
    check_script_name,
    saved_script,
)

FORMAT: Final = 1
MAX_FACTS_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of the JSON of one version, most of which is the schemas of the tools."""
MAX_SCRIPTS: Final = 10_000

_VERSION: Final = re.compile(r"v([1-9][0-9]{0,4})\.(py|json)")
_READABLE: Final = 0o644


class _Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    parameters: dict[str, Any]
    returns: dict[str, Any] | None
    digest: str


class _Facts(BaseModel):
    """What the JSON of a version holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    name: str
    version: int
    sha256: str
    description: str
    inputs: dict[str, Any]
    options: dict[str, Any]
    tools: dict[str, _Tool]


def save(folder: str | os.PathLike[str], script: SavedScript) -> SavedScript:
    """Write a script as its next version, and return it; the latest version stays when the script is the same.

    Raises:
        UsageError: the folder cannot be read or written, or a version in it is damaged.
    """
    check_path("folder", folder)
    place = Path(folder) / script.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        while True:
            taken = _versions(place)
            if (known := _the_same(place, script, taken)) is not None:
                return known
            made = replace(script, version=_next_version(place, script, taken))
            if made.version > MAX_VERSION:
                raise UsageError(f"script {script.name!r} has {MAX_VERSION} versions; save it under another name")
            if _claim(place, made) and _write_facts(place, made, replace_it=False):
                return made
    except OSError as exc:
        raise UsageError(f"script {script.name!r} cannot be saved in {str(folder)!r:.200}: {exc.strerror}") from exc


def _the_same(place: Path, script: SavedScript, taken: dict[int, set[str]]) -> SavedScript | None:
    """Return the latest version if it is this script, with the tools as they are now."""
    saved = [number for number, endings in taken.items() if endings == {"py", "json"}]
    if not saved or max(saved) < max(taken):
        return None
    latest = _read_version(place, script.name, max(saved))
    if latest.digest != script.digest:
        return None
    if latest.tools != script.tools:
        latest = replace(latest, tools=script.tools)
        _write_facts(place, latest, replace_it=True)
    return latest


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


def _write_facts(place: Path, script: SavedScript, *, replace_it: bool) -> bool:
    tools = {
        name: {"parameters": each.parameters, "returns": each.returns, "digest": each.digest}
        for name, each in sorted(script.tools.items())
    }
    facts = {
        "format": FORMAT,
        "name": script.name,
        "version": script.version,
        "sha256": text_digest(script.source),
        "description": script.description,
        "inputs": script.inputs,
        "options": script.options,
        "tools": tools,
    }
    data = (json.dumps(facts, indent=1) + "\n").encode()
    if len(data) > MAX_FACTS_BYTES:
        raise UsageError(f"script {script.name!r}: its schemas have {len(data)} bytes; the limit is {MAX_FACTS_BYTES}")
    try:
        write_file(place / f"v{script.version}.json", data, mode=_READABLE, replace=replace_it)
    except FileExistsError:
        return False
    return True


def load_scripts(folder: str | os.PathLike[str], name: str = "") -> list[SavedScript]:
    """Return every version of every script in a folder, or of one: scripts by name, versions from the first.

    Raises:
        UsageError: the folder cannot be read, or a script in it is damaged; names it.
    """
    check_path("folder", folder)
    return list(_each(folder, name))


def _each(folder: str | os.PathLike[str], name: str) -> Iterator[SavedScript]:
    where = Path(folder)
    if not where.is_dir():
        raise UsageError(f"{str(where)!r:.200} is not a folder of saved scripts")
    try:
        every = [where / name] if name else where.iterdir()
        places = sorted(each for each in every if each.is_dir() and not each.name.startswith("."))
        if len(places) > MAX_SCRIPTS:
            raise UsageError(f"{str(where)!r:.200} has {len(places)} folders, and at most {MAX_SCRIPTS} are read")
        for place in places:
            saved = sorted(number for number, endings in _versions(place).items() if "json" in endings)
            yield from (_read_version(place, place.name, number) for number in saved)
    except OSError as exc:
        raise UsageError(f"saved scripts in {str(where)!r:.200} cannot be read: {exc.strerror}") from exc


def _versions(place: Path) -> dict[int, set[str]]:
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
        facts = _Facts.model_validate(json.loads(data))
    except (ValidationError, ValueError, RecursionError) as exc:
        said = exc.errors()[0]["loc"] if isinstance(exc, ValidationError) else str(exc)
        raise UsageError(f"{shown}.json is damaged: {said!s:.200}; save the script again") from exc
    if (facts.format, facts.name, facts.version) != (FORMAT, name, number):
        raise UsageError(f"{shown}.json is that of {facts.name!r:.80} version {facts.version}, format {facts.format}")
    try:
        source = _read(place / f"v{number}.py", MAX_SOURCE_BYTES, f"{shown}.py").decode()
        if text_digest(source) != facts.sha256:
            raise UsageError(f"{shown}.py is not as it was saved; save a changed script with save_script")
        check_script_name(name)
        script = saved_script(name, source, facts.inputs, facts.description, facts.options)
    except UnicodeDecodeError as exc:
        raise UsageError(f"{shown}.py is not UTF-8") from exc
    except RegistrationError as exc:
        raise UsageError(f"{shown}.json is damaged: {exc}") from exc
    tools = {each: ToolThen(tool.parameters, tool.returns) for each, tool in facts.tools.items()}
    if any(tools[each].digest != tool.digest for each, tool in facts.tools.items()):
        raise UsageError(f"{shown}.json is damaged: a digest is not that of its tool; save the script again")
    return replace(script, version=number, tools=tools)


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
