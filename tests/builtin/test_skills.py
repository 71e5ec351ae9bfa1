"""The package skill: what the tools answer, folders with a SKILL.md, and scripts. See docs/builtin/skills.md."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from builtin.routes import by_code, by_model, by_plan
from rows import each_row
from toolcell import Runtime
from toolcell.builtin import HashEmbeddings, Skill, Skills, SqliteStore
from toolcell.builtin.skill import digest_of, parse_skill, slug
from toolcell.calls.result import ToolResult
from toolcell.errors import ToolError, UsageError
from toolcell.tools import RunContext, ToolRegistry

pytestmark = pytest.mark.anyio

CREATE = {
    "name": "Release notes",
    "description": "How to write release notes for users",
    "instructions": "1. Read the log.",
    "tags": ["writing"],
    "tools": ["file_read"],
    "references": ["style guide"],
}


@pytest.fixture
def store() -> SqliteStore:
    return SqliteStore(":memory:")


@pytest.fixture
def registry(store: SqliteStore) -> ToolRegistry:
    return ToolRegistry([Skills(store, HashEmbeddings())])


async def call(registry: ToolRegistry, tool: str, user_id: str = "", /, **args: Any) -> ToolResult:
    return await registry.dispatch(tool, args, context=RunContext(user_id=user_id) if user_id else None)


@pytest.mark.conforms("S18", "S-b2")
async def test_a_skill_is_created_found_and_changed_in_the_words_of_the_requirement(
    registry: ToolRegistry, store: SqliteStore
) -> None:
    assert (await call(registry, "skill_search", query="anything")).text == "no skills found matching query"
    created = await call(registry, "skill_create", "ada", **CREATE)
    (skill,) = await store.list_skills()
    assert created.text == f'created skill "Release notes" (id: {skill.id})'
    assert (skill.created_by, skill.tags, skill.tools, skill.references) == (
        "ada",
        ("writing",),
        ("file_read",),
        ("style guide",),
    )
    assert created.value["digest"] == digest_of(skill)

    found = await call(registry, "skill_search", query=CREATE["description"])
    assert found.text == (
        "1 skill(s) found:\n\n1. Release notes (score: 1.00)\n"
        f"   ID: {skill.id}\n   Description: How to write release notes for users\n   Tags: writing\n"
        "   References: style guide\n   Created by: ada\n   Instructions: 1. Read the log."
    )
    assert found.value[0] | {"score": 1.0} == created.value | {"score": 1.0}

    updated = await call(registry, "skill_update", id=skill.id, name="Notes", tags=[])
    assert updated.text == 'updated skill "Notes": name, tags'
    assert updated.value["digest"] != created.value["digest"]
    changed = await store.get_skill(skill.id)
    assert changed is not None
    assert (changed.name, changed.tags, changed.description, changed.tools) == (
        "Notes",
        (),
        skill.description,
        ("file_read",),
    )
    assert changed.embedding == skill.embedding
    await call(registry, "skill_update", id=skill.id, description="Something about whales")
    changed = await store.get_skill(skill.id)
    assert changed is not None
    assert changed.embedding != skill.embedding
    assert (await call(registry, "skill_update", id=skill.id)).text == "no changes specified"


@pytest.mark.conforms("S18")
async def test_nobody_is_unknown_and_an_unknown_id_is_said_to_be_one(registry: ToolRegistry) -> None:
    created = await call(registry, "skill_create", **CREATE)
    assert created.value["created_by"] == "unknown"
    for unknown in ("nope", "", "../x", "0190" + "0" * 28, "x" * 500):
        result = await call(registry, "skill_update", id=unknown, name="x")
        assert result.is_error
        assert result.text.startswith("skill not found: ")


@pytest.mark.conforms("S18")
async def test_the_five_nearest_are_found_the_best_first(registry: ToolRegistry) -> None:
    for number in range(7):
        await call(
            registry, "skill_create", **CREATE | {"name": f"n{number}", "description": f"about {'whale ' * number}tea"}
        )
    found = (await call(registry, "skill_search", query="tea about")).value
    assert len(found) == 5
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    assert found[0]["name"] == "n0"


@each_row(
    ("change", "said"),
    [
        ({"name": " "}, "name is required"),
        ({"description": ""}, "description is required"),
        ({"instructions": "\n"}, "instructions is required"),
        ({"name": "x" * 201}, "name has 201 characters, and may have 200"),
        ({"tags": ["x"] * 101}, "tags has 101 items, and may have 100"),
        ({"instructions": "x" * 100_001}, "instructions has 100001 characters"),
    ],
)
async def test_a_skill_that_is_none_is_refused(
    registry: ToolRegistry, store: SqliteStore, change: dict[str, Any], said: str
) -> None:
    assert said in (await call(registry, "skill_create", **CREATE | change)).text
    assert await store.list_skills() == []
    assert "query is required" in (await call(registry, "skill_search", query="")).text


# Folders

SKILL_MD = """\
---
name: csv-report
description: Turns a CSV file into a report. Use it for tables.
license: Apache-2.0
allowed-tools: file_read file_write
metadata:
  tags: [data, report]
  version: 1.2
---

# Steps

Run scripts/report.py.
"""

SCRIPT = """\
import helper, pathlib, sys
print(helper.greet(sys.argv[1]), pathlib.Path("data/x.txt").read_text(), __name__)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "csv-report"
    (made / "scripts").mkdir(parents=True)
    (made / "data").mkdir()
    (made / "SKILL.md").write_text(SKILL_MD)
    (made / "scripts" / "report.py").write_text(SCRIPT)
    (made / "helper.py").write_text("def greet(who): return f'hello {who}'\n")
    (made / "data" / "x.txt").write_text("data")
    return made


async def test_a_folder_is_imported_found_and_exported_as_it_was(
    store: SqliteStore, folder: Path, tmp_path: Path
) -> None:
    skills = Skills(store, HashEmbeddings(), folders=tmp_path / "kept")
    skill = await skills.import_folder(folder, created_by="hub.example/csv-report")
    assert (skill.name, skill.tools, skill.tags) == ("csv-report", ("file_read", "file_write"), ("data", "report"))
    assert skill.instructions == "# Steps\n\nRun scripts/report.py."
    assert [each.item.id for each in await skills.search("report of a table")] == [skill.id]
    found = (await call(ToolRegistry([skills]), "skill_search", query="report")).text
    assert "References: data/x.txt, helper.py, scripts/report.py" in found
    assert "Created by: hub.example/csv-report" in found

    assert await skills.export_folder(skill.id, tmp_path / "out") == "csv-report"
    for path in ("scripts/report.py", "helper.py", "data/x.txt"):
        assert (tmp_path / "out" / "csv-report" / path).read_bytes() == (folder / path).read_bytes()
    again = await skills.import_folder(tmp_path / "out" / "csv-report")
    assert digest_of(again) == digest_of(skill)


async def test_a_folder_that_is_imported_again_replaces_its_skill(
    store: SqliteStore, folder: Path, tmp_path: Path
) -> None:
    skills = Skills(store, HashEmbeddings(), folders=tmp_path / "kept")
    first = await skills.import_folder(folder)
    same = await skills.import_folder(folder)
    assert (same.id, digest_of(same), same.created_at) == (first.id, digest_of(first), first.created_at)

    (folder / "SKILL.md").write_text(SKILL_MD.replace("Run scripts/report.py.", "Count whales."))
    (folder / "helper.py").unlink()
    (folder / "data" / "x.txt").write_text("newer")
    newer = await skills.import_folder(folder)
    (kept,) = await store.list_skills()
    assert (kept.id, kept.instructions) == (first.id, "# Steps\n\nCount whales.") == (newer.id, newer.instructions)
    assert not (tmp_path / "kept" / first.id / "helper.py").exists()
    await skills.export_folder(first.id, tmp_path / "out")
    assert (tmp_path / "out" / "csv-report" / "data" / "x.txt").read_text() == "newer"

    other = await skills.import_folder(folder, created_by="somebody else")
    assert other.id != first.id and len(await store.list_skills()) == 2


async def test_a_skill_that_a_model_wrote_is_exported(
    registry: ToolRegistry, store: SqliteStore, tmp_path: Path
) -> None:
    created = await call(registry, "skill_create", "ada", **CREATE | {"instructions": "---\nname: x\n---\n: tricky"})
    skills = Skills(store, HashEmbeddings())
    name = await skills.export_folder(created.value["id"], tmp_path)
    read = parse_skill((tmp_path / name / "SKILL.md").read_bytes())
    assert (name, read.name, read.description) == ("release-notes", "release-notes", CREATE["description"])
    assert read.instructions == "---\nname: x\n---\n: tricky"
    with pytest.raises(ToolError, match="skill not found"):
        await skills.export_folder("nope", tmp_path)


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nname: x\ndescription: *b"

BAD = {
    "no front matter": ("# Steps", "must begin with front matter"),
    "no end": ("---\nname: x\n", "must begin with front matter"),
    "no name": ("---\ndescription: x\n---\n", "name in SKILL.md must be a text, not None"),
    "empty name": ("---\nname: ' '\ndescription: x\n---\n", "name in SKILL.md must be a text"),
    "number": ("---\nname: 5\ndescription: x\n---\n", "name in SKILL.md must be a text, not 5"),
    "a list": ("---\n- x\n---\n", "must be a mapping"),
    "object": ("---\nname: !!python/object/apply:os.system [id]\ndescription: x\n---\n", "is not YAML"),
    "aliases": (f"---\n{BOMB}\n---\n", "has an alias"),
    "twice": ("---\nname: x\nname: y\ndescription: x\n---\n", "has a key twice"),
    "broken": ("---\nname: [\n---\n", "is not YAML"),
    "brackets": ("---\nname: " + "[" * 10_000 + "\n---\n", "more than 200 opening brackets"),
    "deep": ("---\nname: " + "- " * 2000 + "\n---\n", "line 2 of SKILL.md is not YAML"),
    "nested": ("---\nname:\n" + "".join(f"{' ' * depth}- \n" for depth in range(150)) + "---\n", "must be a text"),
    "long": ("---\nname: " + "x" * 40_000 + "\n---\n", "40007 characters, and 16384 is the limit"),
    "long name": ("---\nname: " + "x" * 300 + "\ndescription: y\n---\n", "name in SKILL.md has 300 characters"),
}


@each_row("case", BAD)
def test_a_skill_md_that_is_none_says_what_is_wrong(case: str) -> None:
    text, said = BAD[case]
    with pytest.raises(UsageError) as caught:
        parse_skill(text.encode())
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_date_in_the_front_matter_does_no_harm_and_binary_is_refused() -> None:
    read = parse_skill(
        b"\xef\xbb\xbf---\r\nname: x\r\ndescription: y\r\nmetadata: {made: 2026-01-01}\r\n---\r\nSteps\r\n"
    )
    assert (read.name, read.instructions) == ("x", "Steps")
    with pytest.raises(UsageError, match="is not UTF-8"):
        parse_skill(b"---\nname: \xff\n---\n")


async def test_a_folder_with_links_or_too_much_in_it_is_refused(
    store: SqliteStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skills = Skills(store, HashEmbeddings(), folders=tmp_path / "kept")
    monkeypatch.setattr("toolcell.builtin.skill.MAX_FILES", 3)
    with pytest.raises(UsageError, match="a skill has at most 3 files"):
        await skills.import_folder(folder)
    monkeypatch.undo()
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="cannot be read: path escapes workspace: link"):
        await skills.import_folder(folder)
    with pytest.raises(UsageError, match="is not a directory"):
        await skills.import_folder(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"has no SKILL\.md"):
        await skills.import_folder(folder / "data")
    with pytest.raises(UsageError, match="give Skills a folders= for them"):
        (folder / "link").unlink()
        await Skills(store, HashEmbeddings()).import_folder(folder)
    assert await store.list_skills() == []


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[builtin\]'"):
        parse_skill(SKILL_MD.encode())


@each_row(("name", "expected"), [("A b/../c", "a-b-c"), ("文", "skill"), ("x" * 99, "x" * 64)])
def test_an_exported_folder_has_a_name_of_the_format(name: str, expected: str) -> None:
    assert slug(name) == expected


# Scripts, and every route


@pytest.fixture(scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    async with Runtime(record=tmp_path_factory.mktemp("audit") / "runs.db") as opened:
        yield opened


@pytest.mark.isolation
async def test_a_script_of_a_skill_runs_in_a_sandbox_as_it_was_imported(
    store: SqliteStore, folder: Path, tmp_path: Path, runtime: Runtime
) -> None:
    skills = Skills(store, HashEmbeddings(), folders=tmp_path / "kept", runtime=runtime)
    registry = ToolRegistry([skills])
    skill = await skills.import_folder(folder)
    ran = await call(registry, "skill_run", id=skill.id, script="scripts/report.py", arguments=["you"])
    assert ran.text == "hello you data __main__\n"
    assert (ran.value["exit_code"], ran.value["digest"]) == (0, digest_of(skill))
    failed = await call(registry, "skill_run", id=skill.id, script="scripts/report.py", arguments=["you", "3"])
    assert failed.text == "scripts/report.py: exit status 3\nhello you data __main__\n"
    raised = await call(registry, "skill_run", id=skill.id, script="scripts/report.py", arguments=["you", "x"])
    said, _, told = raised.text.partition("\n")
    assert said == "scripts/report.py: ValueError: invalid literal for int() with base 10: 'x'"
    assert told.startswith(
        'hello you data __main__\nTraceback (most recent call last):\n  File "scripts/report.py", line 4'
    )
    assert "runpy" not in told
    for script in ("../../etc/passwd", "data/x.txt", "gone.py", ""):
        refused = await call(registry, "skill_run", id=skill.id, script=script)
        assert refused.text.endswith("this skill has: helper.py, scripts/report.py")

    (tmp_path / "kept" / skill.id / "helper.py").write_text("def greet(who): return 'changed'")
    changed = await call(registry, "skill_run", id=skill.id, script="scripts/report.py", arguments=["you"])
    assert changed.text == "helper.py is not as it was imported; import the skill again"


def test_scripts_are_offered_only_with_a_runtime(store: SqliteStore, tmp_path: Path) -> None:
    registry = ToolRegistry([Skills(store, HashEmbeddings(), folders=tmp_path)])
    assert registry.names() == ["skill_search", "skill_create", "skill_update"]
    with pytest.raises(UsageError, match="folders="):
        Skills(store, HashEmbeddings(), runtime=Runtime())


@pytest.mark.isolation
@pytest.mark.conforms("S18")
async def test_every_tool_works_from_code_a_plan_and_a_model_and_the_audit_log_has_the_digest(
    registry: ToolRegistry, store: SqliteStore, runtime: Runtime
) -> None:
    created = await by_code(runtime, registry, "skill_create", CREATE, user_id="ada")
    assert created["value"]["created_by"] == "ada"
    planned = await by_plan(registry, "skill_search", {"query": CREATE["description"]})
    assert planned["value"][0]["id"] == created["value"]["id"]
    updated = await by_model(registry, "skill_update", {"id": created["value"]["id"], "name": "N"})
    assert updated == 'updated skill "N": name'
    assert "skill not found" in (await by_code(runtime, registry, "skill_update", {"id": "nope"}))["error"]

    records = [each.fields for each in Ledger(runtime.record.path).found()]
    assert created["value"]["digest"] in json.dumps(records, default=str)


def test_the_store_keeps_what_a_skill_is(store: SqliteStore) -> None:
    assert digest_of(Skill(name="a")) == digest_of(Skill(name="a"))
    assert len({digest_of(Skill(name="a")), digest_of(Skill(name="b")), digest_of(Skill(description="a"))}) == 3


@each_row(
    ("written", "names"),
    [
        ("file_read file_write", ("file_read", "file_write")),
        ("Read, Grep,Glob", ("Read", "Grep", "Glob")),
        ("Bash(git add:*), Bash(a, b) Read", ("Bash(git add:*)", "Bash(a, b)", "Read")),
        ("Bash(open", ("Bash(open",)),
        (", ,", ()),
        ("[Read, 'Bash(a b)']", ("Read", "Bash(a b)")),
    ],
)
def test_allowed_tools_are_separated_by_blanks_or_commas(written: str, names: tuple[str, ...]) -> None:
    value = written if written.startswith("[") else json.dumps(written)
    assert parse_skill(f"---\nname: x\ndescription: y\nallowed-tools: {value}\n---\nz".encode()).tools == names
