"""The tools of the package file: what a model reads, what code gets, and whose directory it is. See docs/builtin/files.md."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from builtin.routes import by_code, by_model, by_plan
from toolcell import Runtime
from toolcell.builtin import Files
from toolcell.builtin.file import directory_of
from toolcell.calls.result import ToolResult
from toolcell.errors import UsageError
from toolcell.tools import RunContext, ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def registry(work: Path) -> ToolRegistry:
    return ToolRegistry([Files(work)])


async def call(registry: ToolRegistry, name: str, **args: Any) -> ToolResult:
    return await registry.dispatch(name, args)


@pytest.mark.conforms("EX-12")
def test_a_workspace_path_is_all_that_the_package_needs(work: Path) -> None:
    registry = ToolRegistry([Files(str(work))])
    assert registry.names() == ["file_read", "file_write", "file_list", "file_delete", "file_stat"]
    assert work.is_dir()


@pytest.mark.conforms("S5", "S-b2")
async def test_each_tool_answers_in_the_words_of_its_requirement_and_with_a_value(
    registry: ToolRegistry, work: Path
) -> None:
    written = await call(registry, "file_write", path="notes/todo.txt", content="milk\n")
    assert (written.text, written.value) == ("Written 5 bytes to todo.txt", {"path": "notes/todo.txt", "size": 5})
    empty = await call(registry, "file_write", path="notes/empty", content="")
    assert empty.text == "Written 0 bytes to empty"

    read = await call(registry, "file_read", path="notes/todo.txt")
    assert read.text == "milk\n"
    assert read.value == {
        "path": "notes/todo.txt",
        "text": "milk\n",
        "encoding": "utf-8",
        "offset": 0,
        "chars": 5,
        "size": 5,
        "truncated": False,
    }
    assert (await call(registry, "file_read", path="notes/empty")).text == ""

    (work / "b").mkdir()
    listed = await call(registry, "file_list")
    assert listed.text == "dir\tb\ndir\tnotes"
    assert [row["name"] for row in listed.value["entries"]] == ["b", "notes"]
    assert (await call(registry, "file_list", path="notes")).text == "file\tempty\nfile\ttodo.txt"
    assert (await call(registry, "file_list", path="b")).text == ""
    assert (await call(registry, "file_list", pattern="**/*.txt")).text == "file\tnotes/todo.txt"

    os.utime(work / "notes/todo.txt", (0, 1_700_000_000))
    facts = await call(registry, "file_stat", path="notes/todo.txt")
    assert facts.value == {"name": "todo.txt", "size": 5, "type": "file", "modified": "2023-11-14T22:13:20Z"}
    assert json.loads(facts.text) == facts.value
    assert (await call(registry, "file_stat", path="b")).value["type"] == "directory"

    assert (await call(registry, "file_delete", path="notes/todo.txt")).text == "Deleted todo.txt"
    assert (await call(registry, "file_delete", path="b/")).text == "Deleted b"
    assert not (work / "b").exists()


@pytest.mark.conforms("S5")
@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("file_read", {"path": "gone"}, "read error: gone: No such file or directory"),
        ("file_write", {"path": "sub", "content": ""}, "write error: sub: is a directory"),
        ("file_write", {"path": "file/x", "content": ""}, "mkdir error: file/x: Not a directory"),
        ("file_list", {"path": "gone"}, "list error: gone: No such file or directory"),
        ("file_delete", {"path": "sub"}, "delete error: sub: Directory not empty"),
        ("file_delete", {"path": "gone"}, "delete error: gone: No such file or directory"),
        ("file_stat", {"path": "gone"}, "stat error: gone: No such file or directory"),
        ("file_read", {"path": "file", "offset": -1}, "read error: offset must be at least 0"),
        ("file_write", {"path": "x", "content": "é", "encoding": "base64"}, "write error: the content is not base64"),
        ("file_write", {"path": "x", "content": "Ā", "encoding": "latin-1"}, "write error: latin-1 has no '\\u0100'"),
        ("file_list", {"pattern": "../*"}, "a pattern is relative"),
    ],
)
async def test_an_error_says_what_was_tried_and_names_no_path_of_the_host(
    registry: ToolRegistry, work: Path, name: str, args: dict[str, Any], expected: str
) -> None:
    (work / "sub" / "full").mkdir(parents=True)
    (work / "file").touch()
    result = await call(registry, name, **args)
    assert result.is_error
    assert result.text.startswith(expected)
    assert str(work) not in result.text


@pytest.mark.conforms("S5", "S-b3")
async def test_long_text_is_cut_for_the_model_and_code_reads_on(registry: ToolRegistry, work: Path) -> None:
    whole = "".join(f"line {number}\n" for number in range(2000))
    (work / "long.txt").write_text(whole)
    read = await call(registry, "file_read", path="long.txt")
    assert read.text == whole[:8000] + "\n... (truncated)"
    assert read.value["text"] == whole
    page = await call(registry, "file_read", path="long.txt", offset=8000, limit=100)
    assert page.text == whole[8000:8100] + "\n... (truncated)"
    assert (page.value["text"], page.value["truncated"]) == (whole[8000:8100], True)
    end = await call(registry, "file_read", path="long.txt", offset=len(whole) - 10, limit=100)
    assert end.text == whole[-10:]
    past = await call(registry, "file_read", path="long.txt", offset=10**9)
    assert (past.text, past.value["truncated"]) == ("", False)


@pytest.mark.conforms("S-b3")
@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("grüße".encode(), "grüße", "utf-8"),
        ("grüße".encode("utf-8-sig"), "grüße", "utf-8-sig"),
        ("grüße".encode("utf-16"), "grüße", "utf-16"),
        ("grüße €".encode("cp1252"), "grüße €", "windows-1252"),
        (b"a\r\nb\rc", "a\r\nb\rc", "utf-8"),
    ],
)
async def test_text_of_another_encoding_is_recognised(
    registry: ToolRegistry, work: Path, data: bytes, text: str, encoding: str
) -> None:
    (work / "text").write_bytes(data)
    read = await call(registry, "file_read", path="text")
    assert (read.value["text"], read.value["encoding"]) == (text, encoding)


@pytest.mark.conforms("S-b3")
async def test_a_binary_file_is_read_and_written_as_base64(registry: ToolRegistry, work: Path) -> None:
    data = bytes(range(256))
    refused = await call(registry, "file_write", path="x", content="no base64!", encoding="base64")
    assert refused.text.startswith("write error: the content is not base64")
    await call(registry, "file_write", path="x", content=base64.b64encode(data).decode(), encoding="base64")
    assert (work / "x").read_bytes() == data
    assert (await call(registry, "file_read", path="x")).text == (
        'read error: x: binary file of 256 bytes; read it with encoding "base64"'
    )
    assert base64.b64decode((await call(registry, "file_read", path="x", encoding="base64")).value["text"]) == data


async def test_a_name_with_a_line_break_is_one_line_of_the_listing(registry: ToolRegistry, work: Path) -> None:
    (work / "a\nfile\tb").touch()
    assert (await call(registry, "file_list")).text == "file\ta\\nfile\\tb"


async def test_each_user_has_a_directory_of_their_own(work: Path) -> None:
    registry = ToolRegistry([Files(work, per_user=True)])
    users = ["ada", "Ada", "../ada", "", "ada/../bob", "x" * 300, "\udc80"]
    for user in users:
        result = await registry.dispatch(
            "file_write",
            {"path": "mine.txt", "content": user.encode("utf-8", "replace").decode()},
            context=RunContext(user_id=user),
        )
        if not user:
            assert result.text == "each user has a workspace of their own, and this run is for no user"
    assert len(list(work.iterdir())) == len(users) - 1
    read = await registry.dispatch("file_read", {"path": "mine.txt"}, context=RunContext(user_id="ada"))
    assert read.text == "ada"
    assert (work / "user-ada" / "mine.txt").read_text() == "ada"


async def test_a_link_in_the_place_of_a_users_directory_is_refused(work: Path, tmp_path: Path) -> None:
    registry = ToolRegistry([Files(work, per_user=True)])
    (work / directory_of("eve")).symlink_to(tmp_path)
    result = await registry.dispatch("file_list", {}, context=RunContext(user_id="eve"))
    assert result.is_error
    assert "work" not in result.text.replace("workspace", "")


def test_a_workspace_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        Files(tmp_path / "file")


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as opened:
        yield opened


@pytest.mark.isolation
@pytest.mark.conforms("S-b2", "S4")
async def test_every_tool_works_from_code_a_plan_and_a_model(registry: ToolRegistry, runtime: Runtime) -> None:
    steps = [
        ("file_write", {"path": "a/b.txt", "content": "x"}),
        ("file_read", {"path": "a/b.txt"}),
        ("file_list", {"path": "a"}),
        ("file_stat", {"path": "a/b.txt"}),
        ("file_delete", {"path": "a/b.txt"}),
    ]
    coded = [await by_code(runtime, registry, *step) for step in steps]
    planned = [await by_plan(registry, *step) for step in steps]
    read = [await by_model(registry, *step) for step in steps]
    assert coded[1]["value"]["text"] == planned[1]["value"]["text"] == read[1] == "x"
    assert coded[2] == planned[2]
    assert read[0] == "Written 1 bytes to b.txt"
    assert read[2] == "file\tb.txt"
    assert read[4] == "Deleted b.txt"
    outside = ("file_read", {"path": "../secret"})
    said = "path traversal not allowed: ../secret"
    assert said in (await by_code(runtime, registry, *outside))["error"]
    assert said in str((await by_plan(registry, *outside))["error"])
    assert said in await by_model(registry, *outside)
