"""Skills as folders with a SKILL.md, the format that other agents read: front matter in YAML, then instructions.

Read from and written to a workspace: links, special files and names that lead outside are refused. Strangers write
these folders, so everything in them has a bound.

Source: the Agent Skills specification, agentskills.io/specification.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toolcell.builtin.stores.records import Skill
from toolcell.builtin.workspace import Workspace
from toolcell.errors import ToolError, UsageError
from toolcell.support.checks import brief, check_path
from toolcell.support.lazy import needed
from toolcell.support.text import for_terminal

SKILL_FILE: Final = "SKILL.md"
MAX_FILES: Final = 200
MAX_BYTES: Final = 10 * 1024 * 1024
MAX_FRONT_MATTER: Final = 16 * 1024
MAX_BRACKETS: Final = 200
"""Opening ones in the front matter. PyYAML takes time with the square of their depth: 100 s for 20,000."""
MAX_TEXT: Final = 100_000
MAX_NAME: Final = 200
MAX_DESCRIPTION: Final = 2000
_FRONT_MATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_OUTER_LINE: Final = re.compile(r"^(?P<key>[A-Za-z][A-Za-z0-9_-]{0,60}):[ \t]+(?P<value>[^\r\n]+)", re.MULTILINE)
_SLUG: Final = re.compile(r"[^a-z0-9]+")
_LISTED: Final = re.compile(r"(?:[^\s,(]|\([^)]*\)?)+")
"""A name in a list that is written as text: between blanks or commas, with what it has in parentheses."""
_REFERENCE: Final = re.compile(r"(.+)#sha256=([0-9a-f]{64})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SkillFolder:
    """What a folder holds."""

    name: str
    description: str
    instructions: str
    tools: tuple[str, ...] = ()
    """`allowed-tools`."""
    tags: tuple[str, ...] = ()
    model: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Everything but SKILL.md, by path."""

    @property
    def references(self) -> tuple[str, ...]:
        """Path and digest of each file."""
        return tuple(f"{path}#sha256={hashlib.sha256(data).hexdigest()}" for path, data in sorted(self.files.items()))


def read_reference(reference: str) -> tuple[str, str]:
    """Return path and digest of a file that came with a skill; the digest is empty for a reference to anything else."""
    match = _REFERENCE.fullmatch(reference)
    return (match[1], match[2]) if match else (reference, "")


def read_folder(path: str | os.PathLike[str]) -> SkillFolder:
    """Read a skill's folder.

    Raises:
        UsageError: there is no SKILL.md, it is not one, or the folder is larger than a skill may be.
    """
    check_path("the folder of a skill", path)
    where = Path(path)
    if not where.is_dir():
        raise UsageError(f"{str(where)!r:.200} is not a directory with a {SKILL_FILE}")
    workspace = Workspace(where)
    files: dict[str, bytes] = {}
    total = 0
    try:
        for entry in workspace.walk():
            if entry.kind == "directory":
                continue
            files[entry.path] = workspace.read(entry.path)
            total += len(files[entry.path])
            if len(files) > MAX_FILES or total > MAX_BYTES:
                raise UsageError(f"a skill has at most {MAX_FILES} files and {MAX_BYTES} bytes: {str(where)!r:.200}")
    except ToolError as exc:
        raise UsageError(f"the skill in {str(where)!r:.200} cannot be read: {exc.message}") from exc
    if SKILL_FILE not in files:
        raise UsageError(f"{str(where)!r:.200} has no {SKILL_FILE}")
    return parse_skill(files.pop(SKILL_FILE), files)


def parse_skill(text: bytes, files: Mapping[str, bytes] | None = None) -> SkillFolder:
    """Read the text of a SKILL.md.

    Raises:
        UsageError: it is not one; says what is wrong.
    """
    try:
        whole = text.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{SKILL_FILE} is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    match = _FRONT_MATTER.match(whole)
    if match is None:
        raise UsageError(f"{SKILL_FILE} must begin with front matter: a line ---, name and description, a line ---")
    facts = front_matter(match[1])
    more = facts.get("metadata")
    more = more if isinstance(more, dict) else {}  # whatever else stands there is somebody's own
    return SkillFolder(
        name=_text(facts, "name", MAX_NAME),
        description=_text(facts, "description", MAX_DESCRIPTION),
        instructions=_bounded("the instructions", whole[match.end() :].strip(), MAX_TEXT),
        tools=_names(facts.get("allowed-tools"), "allowed-tools"),
        tags=_names_if_any(more.get("tags")),
        model=str(facts.get("model") or "")[:MAX_NAME],
        files=dict(files or {}),
    )


def front_matter(text: str, *, is_mended: bool = False) -> dict[str, Any]:
    """Read YAML that is a mapping of plain values: no tags, no anchors, no key twice. A value with an unquoted `: ` is
    the text that its author meant.

    Raises:
        UsageError: it is something else.
    """
    if len(text) > MAX_FRONT_MATTER:
        raise UsageError(f"the front matter has {len(text)} characters, and {MAX_FRONT_MATTER} is the limit")
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise UsageError(f"the front matter has more than {MAX_BRACKETS} opening brackets")
    yaml = needed("yaml", "a skill as a folder")
    try:
        # An alias is a copy that costs nothing here and everything when it is written out.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise UsageError(f"the front matter of {SKILL_FILE} has an alias, which is not allowed")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if len(set(map(str, keys))) < len(keys):
            raise UsageError(f"the front matter of {SKILL_FILE} has a key twice")
        facts = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as exc:
        if not is_mended and (mended := _with_quoted_values(text)) != text:
            return front_matter(mended, is_mended=True)
        mark = getattr(exc, "problem_mark", None)
        where = f"line {mark.line + 2}" if mark is not None else "the front matter"
        said = for_terminal(str(getattr(exc, "problem", None) or exc))[:300]
        raise UsageError(f"{where} of {SKILL_FILE} is not YAML: {said}; quote the value") from exc
    if _has_huge_number(facts):
        raise UsageError(f"the front matter of {SKILL_FILE} has a number of more than 64 bits")
    if not isinstance(facts, dict):
        raise UsageError(f"the front matter of {SKILL_FILE} must be a mapping, not {brief(facts)}")
    return facts


def _with_quoted_values(text: str) -> str:
    """Return front matter in which values of the outermost keys are quoted where YAML takes plain text for more."""

    def quoted(match: re.Match[str]) -> str:
        value = match["value"].strip()
        is_mistaken = ": " in value or value.endswith(":") or value[:1] in ("@", "`", "%")
        if not is_mistaken or value[0] in "\"'[{|>&*!#":
            return match[0]
        return f"{match['key']}: '{value.replace(chr(39), chr(39) * 2)}'"

    return _OUTER_LINE.sub(quoted, text)


def _has_huge_number(value: object) -> bool:
    """Return whether a number is so long that Python refuses to write it: 0xfff..., or 1:1:1:... to the base of 60."""
    if isinstance(value, dict):
        return any(_has_huge_number(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set):
        return any(map(_has_huge_number, value))
    return isinstance(value, int) and abs(value) >= 1 << 64


def write_folder(skill: Skill, folder: Workspace, name: str, files: Mapping[str, bytes]) -> None:
    """Write a skill as the folder `name` below a workspace.

    Raises:
        ToolError: a file cannot be written.
    """
    yaml = needed("yaml", "a skill as a folder")
    facts: dict[str, Any] = {"name": slug(skill.name), "description": skill.description}
    if skill.tools:
        facts["allowed-tools"] = list(skill.tools)
    if skill.model:
        facts["model"] = skill.model
    title = {} if slug(skill.name) == skill.name else {"title": skill.name}
    facts["metadata"] = {**title, "tags": list(skill.tags), "created-by": skill.created_by, "id": skill.id}
    head = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    folder.write(f"{name}/{SKILL_FILE}", f"---\n{head}---\n\n{skill.instructions}\n".encode())
    for path, data in files.items():
        folder.write(f"{name}/{path}", data)


def slug(name: str) -> str:
    """Return a name as the format wants it: lower-case letters, digits and hyphens, 64 at most."""
    return _SLUG.sub("-", name.lower()).strip("-")[:64].strip("-") or "skill"


def _text(facts: Mapping[str, Any], key: str, most: int) -> str:
    value = facts.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{key} in {SKILL_FILE} must be a text, not {brief(value)}")
    return _bounded(f"{key} in {SKILL_FILE}", value.strip(), most)


def _bounded(what: str, text: str, most: int) -> str:
    if len(text) > most:
        raise UsageError(f"{what} has {len(text)} characters, and {most} is the limit")
    return for_terminal(text)


def _names_if_any(value: object) -> tuple[str, ...]:
    """Return names; none where something else stands, because metadata is anybody's."""
    try:
        return _names(value, "metadata.tags")
    except UsageError:
        return ()


def _names(value: object, what: str) -> tuple[str, ...]:
    names = _LISTED.findall(value) if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or len(names) > 100 or not all(isinstance(each, str | int) for each in names):
        raise UsageError(f"{what} in {SKILL_FILE} must be names, at most 100, not {brief(value)}")
    return tuple(for_terminal(str(each))[:MAX_NAME] for each in names)
