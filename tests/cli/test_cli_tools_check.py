"""`toolcell tools check`: which saved scripts today's tools break, and how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import (
    Limits,
    PackageError,
    PoolConfig,
    Runtime,
    SandboxUnavailable,
    ToolcellError,
    ToolRegistry,
    UsageError,
)
from toolcell.control import check_scripts
from toolcell.control.saved_script_check import example_inputs
from toolcell.testing import FakeBackend
from toolcell.tools.saved_script import saved_script

THEN = """
from toolcell import ToolRegistry
registry = ToolRegistry()
HIT = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}

@registry.tool(name="web.search", returns={"type": "array", "items": HIT})
def search(query: str, limit: int = 10):
    "Search the web for pages."

@registry.tool
def mail(to: str, text: str):
    "Send somebody a mail."

@registry.tool
def gone(x: int):
    "A tool that is taken away later."
"""
TODAY = """
from toolcell import ToolRegistry
registry = ToolRegistry()
HIT = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

@registry.tool(name="web.search", returns={"type": "array", "items": HIT})
def search(query: str, limit: str = "10", language: str = "en"):
    "Search the web for pages, in a language."

@registry.tool
def mail(to: str, body: str, priority: int):
    "Send somebody a mail."
"""
SCRIPTS = {
    "fine": "tools.web.search(query=q)",
    "limited": "tools.web.search(query=q, limit=3)",
    "titles": "[hit['title'] for hit in tools.web.search(query=q)]",
    "mails": "call_tool('mail', {'to': q,\n 'text': 'x'})",
    "removed": "x = 1\ntools.gone(x=x)",
    "by_name": "call_tool('gone', x=1)",
    "dynamic": "name = 'mail'\ncall_tool(name, to=q)",
    "wrong_before": "tools.web.search(query=3)",
    "no_calls": "'mail ' + q",
    "unreadable": "def (:",
    "not_compiled": "x = 1\nbreak",
    "returns": "if q:\n    return 'mail'",
}
INPUTS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


def registry_of(text: str) -> ToolRegistry:
    names: dict[str, Any] = {"__name__": "tools_file"}
    exec(text, names)
    found: ToolRegistry = names["registry"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved")
    registry = registry_of(THEN)
    for name, source in SCRIPTS.items():
        registry.save_script(name, source, inputs=INPUTS, folder=where / "scripts")
    (where / "then.py").write_text(THEN)
    (where / "today.py").write_text(TODAY)
    return where


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolcell", "tools", "check", str(folder / "scripts"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, Any]:
    pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
    done = check(folder, "--tools", str(folder / "today.py"), "--json")
    assert done.returncode == 1, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


@pytest.mark.isolation
@each_row(
    ("name", "status", "line", "said"),
    [
        ("limited", "breaks", 1, "Expected `str"),
        ("titles", "breaks", 1, "title"),
        ("mails", "breaks", 1, "priority"),
        ("removed", "breaks", 2, "there is no tool of this name"),
        ("by_name", "breaks", 1, "there is no tool of this name"),
        ("unreadable", "breaks", 1, "could not be read: SyntaxError: invalid syntax"),
        ("not_compiled", "breaks", 2, "could not be read: SyntaxError: 'break' outside loop"),
    ],
)
def test_what_a_change_of_the_tools_does_to_a_script_is_reported_with_its_line(
    reports: dict[str, Any], name: str, status: str, line: int | None, said: str
) -> None:
    report = reports[name]
    assert report["status"] == status, report
    assert any(said in found["message"] and found["line"] == line for found in report["findings"]), report


@pytest.mark.isolation
def test_a_script_that_uses_nothing_of_what_has_changed_is_ok(reports: dict[str, Any]) -> None:
    found = {name: (reports[name]["status"], reports[name]["findings"]) for name in ("fine", "dynamic", "no_calls")}
    assert found == dict.fromkeys(found, ("ok", []))


@pytest.mark.slow
@pytest.mark.isolation
def test_all_versions_are_checked_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
    registry = registry_of(THEN)
    registry.save_script("fine", SCRIPTS["titles"], inputs=INPUTS, folder=tmp_path / "scripts")
    registry.save_script("fine", SCRIPTS["fine"], inputs=INPUTS, folder=tmp_path / "scripts")
    done = check(tmp_path, "--tools", str(folder / "then.py"), "--all-versions")
    assert (done.returncode, done.stdout.split()) == (0, ["ok", "fine", "v1", "ok", "fine", "v2"])
    assert check(tmp_path, "--tools", str(folder / "today.py")).returncode == 0
    assert check(tmp_path, "--tools", str(folder / "today.py"), "--all-versions").returncode == 1


@pytest.mark.isolation
def test_a_strict_check_fails_for_a_script_that_is_not_read_whole(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
    registry_of(THEN).save_script("many", "tools.gone(x=1)\n" * 2_000, folder=tmp_path / "scripts")
    done = check(tmp_path, "--tools", str(folder / "then.py"))
    assert done.returncode == 0 and done.stdout.startswith("may break  many v1\n")
    assert check(tmp_path, "--tools", str(folder / "then.py"), "--strict").returncode == 1


def test_a_wrong_folder_or_tools_file_is_a_usage_error(folder: Path, tmp_path: Path) -> None:
    missing = check(tmp_path, "--tools", str(folder / "today.py"))
    assert missing.returncode == 2 and "not a folder of saved scripts" in missing.stderr
    assert check(folder, "--tools", str(tmp_path / "none.py")).returncode == 2
    assert check(folder).returncode == 2


@pytest.mark.isolation
@each_row(
    ("error", "fails"),
    [
        (UsageError("no ty here"), "scripts"),
        (PackageError("no packages here"), "scripts"),
        (SandboxUnavailable("no sandbox here"), "scripts"),
        (SandboxUnavailable("no second sandbox"), "types"),
    ],
)
def test_what_a_check_raises_comes_out_as_it_is(error: ToolcellError, fails: str, tmp_path: Path) -> None:
    pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")

    class Failing(FakeBackend):
        async def start(self, limits: Limits) -> Any:
            raise error

    def runtime(*tools: ToolRegistry, **options: Any) -> Runtime:
        if fails == ("types" if options else "scripts"):
            options = {"backend": Failing([]), "pool": PoolConfig(warm=0), "allow_unisolated": True}
        return Runtime(*tools, **options)

    ToolRegistry().save_script("f", "1", folder=tmp_path)
    with pytest.raises(type(error), match=str(error)):
        anyio.run(check_scripts, tmp_path, ToolRegistry(), runtime)


def test_inputs_are_checked_as_values_of_their_types() -> None:
    properties = {
        "a": {"type": "integer"},
        "b": {"type": "array"},
        "c": {"type": ["string", "null"]},
        "d": {},
        "e": {"type": "number", "default": 1},
        "f": {"type": "string"},
    }
    schema = {"type": "object", "properties": properties, "required": ["a", "b", "c"]}
    script = saved_script("f", "1", schema, None, {})
    assert example_inputs(script) == {"a": 0, "b": [], "c": None, "d": None, "e": 0.0, "f": None}
