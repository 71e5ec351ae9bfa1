"""`Skills`: instructions that an agent writes down, finds by their description, and shares as folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from toolcell.builtin.file import in_thread
from toolcell.builtin.package import ToolPackage, offered, required_text, run_script
from toolcell.builtin.stores.protocols import STORES, SkillStore
from toolcell.builtin.stores.records import Scored, Skill, now
from toolcell.builtin.workspace import Workspace
from toolcell.calls.call import ScriptRuntime
from toolcell.errors import ToolError, UsageError
from toolcell.support.checks import brief, check_does, check_path
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider, embed_texts
from toolcell.support.lazy import needed
from toolcell.support.text import for_terminal, one_line
from toolcell.tools import ErrorCode, ToolContext, ToolResult, ToolSpec

# Skills as folders with a SKILL.md, the format that other agents read: front matter in YAML, then instructions.
#
# Read from and written to a workspace: links, special files and names that lead outside are refused. Strangers write
# these folders, so everything in them has a bound.
#
# Source: the Agent Skills specification, agentskills.io/specification.


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
        name=_fact(facts, "name", MAX_NAME),
        description=_fact(facts, "description", MAX_DESCRIPTION),
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


def _fact(facts: Mapping[str, Any], key: str, most: int) -> str:
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


TOP: Final = 5
MAX_ITEMS: Final = 100
NO_SKILL: Final = "skill not found: "
_IMPORTED: Final = uuid.UUID("6c0f4c0e-3f0b-4b57-9d0e-5a3b8a1c7d21")
"""The namespace of the ids of imported skills: a folder that is imported again is the same skill."""

RUN_SCRIPT: Final = """
import os, runpy, sys, traceback
os.chdir(FOLDER)
sys.path.insert(0, os.getcwd())
sys.argv = [SCRIPT, *ARGUMENTS]
try:
    runpy.run_path(SCRIPT, run_name="__main__")
    code = 0
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
except Exception as error:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != SCRIPT:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    raise
set_result(code)
"""

_SKILL: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "name": {"type": "string"},
        "created_by": {"type": "string"},
        "digest": {"type": "string"},
    },
}


class Skills(ToolPackage):
    """Tools for skills in a store."""

    package = "skill"
    needs = ("Store", "EmbeddingProvider")

    def __init__(
        self,
        store: SkillStore,
        embeddings: EmbeddingProvider,
        *,
        folders: str | os.PathLike[str] | Workspace | None = None,
        runtime: ScriptRuntime | None = None,
    ) -> None:
        """`folders`: a directory for the files of imported skills. With a `runtime` too, `skill_run` runs their
        scripts.

        Raises:
            UsageError: there is a `runtime` and no `folders`, or an argument is of another kind.
        """
        check_does("Skills(store)", store, SkillStore, STORES)
        check_does("Skills(embeddings)", embeddings, EmbeddingProvider, PROVIDERS)
        if runtime is not None and folders is None:
            raise UsageError("the scripts of skills are in folders=: give the directory that holds them")
        self._store, self._embeddings, self._runtime = store, embeddings, runtime
        self._folders = folders if folders is None or isinstance(folders, Workspace) else Workspace(folders)

    def to_specs(self) -> list[ToolSpec]:
        """Return the specs; `skill_run` only with a runtime."""
        return [spec for spec in super().to_specs() if self._runtime is not None or spec.definition.name != "skill_run"]

    @offered(
        read_only=True,
        idempotent=True,
        returns={"type": "array", "items": _SKILL},
    )
    async def skill_search(self, query: str) -> ToolResult:
        """Find skills: instructions for a kind of task. Search before you begin a task of some size.

        Args:
            query: What you want to do.
        """
        found = await self.search(query)
        if not found:
            return ToolResult.ok("no skills found matching query", value=[])
        text = f"{len(found)} skill(s) found:\n\n" + "\n\n".join(_lines(found))
        return ToolResult.ok(text, value=[plain(each.item) | {"score": round(each.score, 4)} for each in found])

    async def search(self, query: str, top_k: int = TOP) -> list[Scored[Skill]]:
        """Return the skills whose descriptions are nearest to `query`.

        Raises:
            ToolError: `query` is empty.
        """
        return await self._store.search_skills(await self._embed(_text("query", query, MAX_DESCRIPTION)), top_k)

    @offered(returns=_SKILL)
    async def skill_create(
        self,
        name: str,
        description: str,
        instructions: str,
        ctx: ToolContext,
        tags: list[str] | None = None,
        tools: list[str] | None = None,
        model: str = "",
        references: list[str] | None = None,
    ) -> ToolResult:
        """Write down how a kind of task is done, so that skill_search finds it.

        Args:
            name: A short name.
            description: What the skill does and when to use it. Searches look at this.
            instructions: The steps.
            tags: Words to sort skills by.
            tools: Names of the tools that the steps use.
            model: The model that the steps are for; empty for any.
            references: Names of documents that belong to it.
        """
        skill = Skill(
            name=_text("name", name, MAX_NAME),
            description=_text("description", description, MAX_DESCRIPTION),
            instructions=_text("instructions", instructions, MAX_TEXT),
            tags=_list("tags", tags),
            tools=_list("tools", tools),
            references=_list("references", references),
            model=for_terminal(model)[:MAX_NAME],
            created_by=for_terminal(ctx.user_id)[:MAX_NAME] or "unknown",
        )
        await self._create(skill)
        return ToolResult.ok(f'created skill "{skill.name}" (id: {skill.id})', value=plain(skill))

    async def _create(self, skill: Skill) -> None:
        await self._store.use_embeddings(self._embeddings.name(), self._embeddings.dimensions())
        await self._store.create_skill(replace(skill, embedding=await self._embed(skill.description)))

    @offered(idempotent=True, returns=_SKILL)
    async def skill_update(
        self,
        id: str,
        name: str | None = None,
        description: str | None = None,
        instructions: str | None = None,
        tags: list[str] | None = None,
        tools: list[str] | None = None,
        model: str | None = None,
        references: list[str] | None = None,
    ) -> ToolResult:
        """Change a skill. Only the fields that are given change; a list is replaced.

        Args:
            id: The skill's id, from skill_search.
            name: A new name.
            description: A new description.
            instructions: New steps.
            tags: New tags.
            tools: New tools.
            model: Another model; empty for any.
            references: New references.
        """
        skill = await self._get(id)
        texts = (
            ("name", name, MAX_NAME),
            ("description", description, MAX_DESCRIPTION),
            ("instructions", instructions, MAX_TEXT),
        )
        changes: dict[str, Any] = {key: _text(key, text, most) for key, text, most in texts if text is not None}
        changes |= {key: _list(key, items) for key, items in (("tags", tags), ("tools", tools)) if items is not None}
        if model is not None:
            changes["model"] = for_terminal(model)[:MAX_NAME]
        if references is not None:
            changes["references"] = _list("references", references)
        if not changes:
            return ToolResult.ok("no changes specified", value=plain(skill))
        new = replace(skill, **changes, updated_at=now())
        if new.description != skill.description:
            new = replace(new, embedding=await self._embed(new.description))
        if not await self._store.update_skill(new):
            raise ToolError(NO_SKILL + one_line(id, 80))
        return ToolResult.ok(f'updated skill "{new.name}": {", ".join(changes)}', value=plain(new))

    @offered(returns={"type": "object", "properties": {"exit_code": {"type": "integer"}, "stdout": {"type": "string"}}})
    async def skill_run(self, id: str, script: str, ctx: ToolContext, arguments: list[str] | None = None) -> ToolResult:
        """Run a Python script that came with a skill, in a sandbox with the skill's files.

        Args:
            id: The skill's id, from skill_search.
            script: Its path, one of the skill's references, as in scripts/convert.py.
            arguments: What the script finds in sys.argv[1:].
        """
        assert self._runtime is not None
        skill = await self._get(id)
        known = dict(map(read_reference, skill.references))
        if not known.get(script) or not script.endswith(".py"):
            scripts = [path for path, digest in known.items() if digest and path.endswith(".py")]
            raise ToolError(f"no script {one_line(script, 80)}; this skill has: {', '.join(scripts) or 'none'}")
        files = await in_thread(self._files_of, skill)
        result = await run_script(
            self._runtime,
            "script",
            RUN_SCRIPT,
            ctx,
            files=[(f"{slug(skill.name)}/{path}", data) for path, data in files.items()],
            inputs={
                "FOLDER": slug(skill.name),
                "SCRIPT": script,
                "ARGUMENTS": [str(each) for each in arguments or []],
                "SKILL": {"id": skill.id, "digest": digest_of(skill), "script": known[script]},
            },
        )
        value = {
            "exit_code": result.value if type(result.value) is int else 1,
            "stdout": result.logs.stdout,
            "stderr": result.logs.stderr,
            "script": known[script],
            "digest": digest_of(skill),
            "run_id": result.run_id,
        }
        text = result.logs.text or "(no output)"
        if not result.ok or value["exit_code"]:
            error = result.error
            why = f"exit status {value['exit_code']}" if error is None else f"{error.type}: {error.message}"
            return ToolResult.fail(f"{script}: {one_line(why, 500)}", output=text, facts=value)
        return ToolResult.ok(text, value=value)

    def _files_of(self, skill: Skill) -> dict[str, bytes]:
        """Return the files that came with a skill, as they were when it was imported."""
        assert self._folders is not None
        found = {}
        for path, digest in map(read_reference, skill.references):
            if digest:
                found[path] = self._folders.read(f"{skill.id}/{path}")
                if hashlib.sha256(found[path]).hexdigest() != digest:
                    raise ToolError(f"{one_line(path, 80)} is not as it was imported; import the skill again")
        return found

    async def import_folder(self, path: str | os.PathLike[str], *, created_by: str = "import") -> Skill:
        """Store the skill in a folder with a SKILL.md, and keep its files in `folders`.

        A skill of the same name that `created_by` gave before is replaced, and keeps its id.

        Raises:
            UsageError: the folder is not a skill, or it has files and there is no `folders` to keep them in.
        """
        read = await in_thread(read_folder, path)
        if read.files and self._folders is None:
            raise UsageError(
                f"the skill {read.name!r:.80} has {len(read.files)} files; give Skills a folders= for them"
            )
        skill = Skill(
            id=str(uuid.uuid5(_IMPORTED, json.dumps([created_by, read.name]))),
            name=read.name,
            description=read.description,
            instructions=read.instructions,
            tools=read.tools,
            tags=read.tags,
            model=read.model,
            references=read.references,
            created_by=created_by,
        )
        earlier = await self._store.get_skill(skill.id)
        for name, data in read.files.items():
            assert self._folders is not None
            await in_thread(self._folders.write, f"{skill.id}/{name}", data)
        if earlier is None:
            await self._create(skill)
            return skill
        skill = replace(skill, created_at=earlier.created_at)
        if not await self._store.update_skill(replace(skill, embedding=await self._embed(skill.description))):
            await self._create(skill)  # somebody deleted it meanwhile
        earlier_files = {path for path, digest in map(read_reference, earlier.references) if digest}
        await in_thread(self._delete_files, skill.id, earlier_files - {*read.files})
        return skill

    def _delete_files(self, skill_id: str, paths: Iterable[str]) -> None:
        """Delete files that the skill has no longer."""
        for path in paths:
            if self._folders is not None:
                with contextlib.suppress(ToolError):  # it is gone
                    self._folders.delete(f"{skill_id}/{path}")

    async def export_folder(self, skill_id: str, directory: str | os.PathLike[str]) -> str:
        """Write a skill as a folder with a SKILL.md below `directory`, and return the folder's name.

        Raises:
            ToolError: there is no such skill, or a file of it is missing or changed.
        """
        skill = await self._get(skill_id)
        files = await in_thread(self._files_of, skill) if self._folders is not None else {}
        await in_thread(write_folder, skill, Workspace(directory), slug(skill.name), files)
        return slug(skill.name)

    async def _get(self, skill_id: str) -> Skill:
        try:
            skill = await self._store.get_skill(skill_id)
        except UsageError:  # no store has an id of this form
            skill = None
        if skill is None:
            raise ToolError(NO_SKILL + one_line(skill_id, 80))
        return skill

    async def _embed(self, text: str) -> list[float]:
        return (await embed_texts(self._embeddings, [text]))[0]


def digest_of(skill: Skill) -> str:
    """Return a digest of what a skill says. It goes into the answers of the tools, and so into the audit log."""
    facts = [
        skill.name,
        skill.description,
        skill.instructions,
        skill.tools,
        skill.model,
        skill.tags,
        skill.references,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plain(skill: Skill) -> dict[str, Any]:
    """Return a skill as data, with its digest and who made it."""
    return {
        "id": skill.id,
        "name": skill.name,
        "description": skill.description,
        "instructions": skill.instructions,
        "tags": list(skill.tags),
        "tools": list(skill.tools),
        "model": skill.model,
        "references": list(skill.references),
        "created_by": skill.created_by,
        "digest": digest_of(skill),
        "created_at": skill.created_at,
        "updated_at": skill.updated_at,
    }


def _lines(found: list[Scored[Skill]]) -> Iterator[str]:
    for number, (skill, score) in enumerate(((each.item, each.score) for each in found), 1):
        tags = f"   Tags: {', '.join(skill.tags)}\n" if skill.tags else ""
        references = f"   References: {', '.join(read_reference(each)[0] for each in skill.references)}\n"
        yield (
            f"{number}. {skill.name} (score: {score:.2f})\n   ID: {skill.id}\n   Description: {skill.description}\n"
            f"{tags}{references if skill.references else ''}   Created by: {skill.created_by or 'unknown'}\n"
            f"   Instructions: {skill.instructions}"
        )


def _text(what: str, text: str, most: int) -> str:
    return required_text(what, for_terminal(text).strip(), most)


def _list(what: str, items: list[str] | None) -> tuple[str, ...]:
    if items is not None and (len(items) > MAX_ITEMS or any(len(each) > MAX_NAME + 100 for each in items)):
        raise ToolError(
            f"{what} has {len(items)} items, and may have {MAX_ITEMS} of {MAX_NAME + 100} characters each",
            code=ErrorCode.INVALID_ARGUMENTS,
        )
    return tuple(for_terminal(each) for each in items or ())
