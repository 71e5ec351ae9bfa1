"""The commands that a notebook's `!` may begin print what the machine's own print."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import pytest

from toolcell_bridge.guest import workspace_commands

pytestmark = pytest.mark.quick

COMMANDS = (
    "ls", "ls -a", "ls -A sub", "ls -1F", "ls -R", "ls -r", "ls *.csv", "ls a.csv sub", "ls sub *.txt", "ls --color=auto",
    "pwd", "cat a.csv", "cat a.csv sub/b.txt", "cat *.csv | wc -l", "cat a.csv | head -n 1 | wc -c",
    "head a.csv", "head -n 2 a.csv", "head -2 a.csv", "head -n2 a.csv sub/b.txt", "tail -n 1 a.csv", "tail -3 a.csv", "head -n 0 a.csv",
    "wc a.csv", "wc -l a.csv", "wc -l a.csv sub/b.txt", "wc -lw a.csv sub/b.txt", "wc latin.txt", "cat a.csv | wc",
    "echo two  words 'and three'", "echo -n x", "echo *.csv", "mkdir new", "mkdir -p new/er", "cat nothing.txt",
    "head nothing.txt", "ls a.csv | cat", "ls # all",
)  # fmt: skip

NOT_KNOWN = (
    "", "rm a.csv", "ls; pwd", "ls && pwd", "ls > x", "cat < a.csv", "ls $HOME", "ls `pwd`", "ls &", "echo 'open", "|",
    "pip download x", "pip list --outdated", "python script.py", "ls |", "ls --sort=size", "head -c 5 a.csv", "wc -L a.csv", "ls | grep a", "cat -n a.csv",
)  # fmt: skip


def folder_in(path: Path) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "a.csv").write_text("x,y\n" + "".join(f"{n},{n * n}\n" for n in range(20)))
    (path / "sub" / "b.txt").write_text("no newline at the end")
    (path / "c.txt").write_text("")
    (path / "latin.txt").write_bytes(b"caf\xe9\n")
    (path / ".hidden").write_text("x")
    return path


def test_a_command_prints_what_the_machines_own_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = folder_in(tmp_path / "theirs" / "x"), folder_in(tmp_path / "ours" / "x")
    monkeypatch.chdir(ours)
    expected, printed = {}, {}
    for line in COMMANDS:
        done = subprocess.run(
            ["sh", "-c", line], cwd=theirs, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        )  # fmt: skip
        expected[line] = done.stdout.replace(str(theirs), str(ours)).replace("cannot open 'nothing.txt' for reading", "nothing.txt"), bool(done.returncode)  # fmt: skip
        text, code = workspace_commands.run(line)
        printed[line] = text, bool(code)

    assert printed == expected


def test_sizes_and_times_are_in_the_long_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_in(tmp_path / "x"))
    text, _ = workspace_commands.run("ls -lh")

    assert [line.split()[0] for line in text.splitlines()] == [
        "total",
        "-rw-r--r--",
        "-rw-r--r--",
        "-rw-r--r--",
        "drwxr-xr-x",
    ]
    assert text.splitlines()[1].split()[3] == "120"


def test_packages_and_the_version_of_python_are_told() -> None:
    version = importlib.metadata.version("pytest")
    assert workspace_commands.run("pip freeze")[0].count(f"\npytest=={version}\n") == 1
    lines = workspace_commands.run("pip list")[0].splitlines()
    assert lines[0].split() == ["Package", "Version"] and ["pytest", version] in [each.split() for each in lines]
    assert workspace_commands.run("pip show PyTest") == (f"Name: pytest\nVersion: {version}\n", 0)
    assert workspace_commands.run("pip show no-such-package")[1] == 1
    assert workspace_commands.run("python --version") == (f"Python {platform.python_version()}\n", 0)


def test_what_only_a_shell_knows_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_in(tmp_path / "x"))
    for line in NOT_KNOWN:
        with pytest.raises(workspace_commands.NotKnown):
            print(line, workspace_commands.run(line))
