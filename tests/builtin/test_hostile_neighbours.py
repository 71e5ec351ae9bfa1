"""A process of this machine that may write in the workspace, and wants files that are outside of it or a broken tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolcell import Policy, Runtime
from toolcell.builtin import Shell, workspace
from toolcell.builtin.shell import copy_of
from toolcell.builtin.workspace import Workspace
from toolcell.errors import ToolError
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio


def test_the_directory_of_a_user_that_becomes_a_link_leads_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "key.txt").write_text("secret")
    files = Workspace(tmp_path / "work").subdirectory("user-ada")
    files.write("mine.txt", b"mine")
    files.root.rename(tmp_path / "work" / "gone")
    files.root.symlink_to(secret)
    for attack in (
        lambda: files.read("key.txt"),
        lambda: files.write("key.txt", b"changed"),
        lambda: files.delete("key.txt"),
        files.list,
        lambda: list(files.walk()),
        lambda: files.subdirectory("more"),
    ):
        with pytest.raises(ToolError, match="the workspace cannot be opened") as caught:
            attack()
        assert str(tmp_path) not in str(caught.value)
    assert [each.name for each in secret.iterdir()] == ["key.txt"]
    assert (secret / "key.txt").read_text() == "secret"


def test_a_huge_directory_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Workspace(tmp_path)
    for number in range(30):
        (tmp_path / f"{number}").touch()
    monkeypatch.setattr(workspace, "MAX_VISITED", 10)
    looked: list[str] = []
    kind = workspace._kind
    monkeypatch.setattr(workspace, "_kind", lambda mode: looked.append("") or kind(mode))  # type: ignore[func-returns-value]
    assert files.list().truncated
    assert len(looked) == 11


def test_a_workspace_of_very_many_directories_or_pipes_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcell.builtin.shell.MAX_FILES", 5)
    for kind, make in (("directories", os.mkdir), ("pipes", os.mkfifo)):
        files = Workspace(tmp_path / kind)
        for number in range(6):
            make(files.root / f"{number}")
        with pytest.raises(ToolError, match="more than 5 entries"):
            copy_of(files, 1000)


@pytest.mark.isolation
async def test_names_that_are_no_text_do_not_break_the_shell(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/odd\xff"
    os.mkdir(odd)
    Path(os.fsdecode(odd + b"/file")).write_text("x")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xfe")).write_text("x")
    (tmp_path / "two\nlines").mkdir()
    (tmp_path / "good").write_text("x")
    async with Runtime(policy=Policy(shell=True)) as runtime:
        result = await ToolRegistry([Shell(tmp_path, runtime)]).dispatch("shell_exec", {"command": "ls; mkdir new"})
    assert result.text == "good\n"
    assert sorted(result.value["left_out"]) == ["f\\udcfe", "odd\\udcff", "odd\\udcff/file", "two\nlines"]
    assert (tmp_path / "new").is_dir()
    assert os.path.isdir(odd)
