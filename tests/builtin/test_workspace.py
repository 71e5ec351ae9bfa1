"""A workspace is never left, whatever paths and links say and whoever changes them meanwhile. See docs/builtin/files.md."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from held import descriptors
from rows import each_row
from toolcell.builtin import beneath, workspace
from toolcell.builtin.workspace import Glob, Workspace
from toolcell.errors import ToolError, UsageError

pytestmark = pytest.mark.quick

SECRET = "the host's own"
ESCAPED = "path escapes workspace: there/secret.txt"


@pytest.fixture(params=["openat2", "walk"])
def lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to open a path."""
    if request.param == "openat2" and not beneath.has_openat2():
        pytest.skip("this kernel has no openat2")
    monkeypatch.setattr(beneath, "has_openat2", lambda: request.param == "openat2")
    return str(request.param)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def files(tmp_path: Path, outside: Path, lookup: str) -> Iterator[Workspace]:
    """A workspace prepared with every link and special file that a trick needs."""
    made = Workspace(tmp_path / "work")
    root = made.root
    (root / "notes.txt").write_text("mine")
    (root / "inner").mkdir()
    (root / "inner" / "deep.txt").write_text("deep")
    for name, target in {
        "absolute": outside / "secret.txt", "absolute-folder": outside, "up": "../outside/secret.txt",
        "up-folder": "../outside", "root": "/", "proc": "/proc/self/root", "descriptor": "/proc/self/fd/0",
        "cwd": "/proc/self/cwd", "parent": "..", "inner/up-two": "../../outside", "inner/winding": "../inner/../../outside",
        "chain-a": "chain-b", "chain-b": "up-folder", "loop-a": "loop-b", "loop-b": "loop-a", "nowhere": "../new.txt",
        "self-absolute": root / "notes.txt",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    os.link(outside / "secret.txt", root / "hard")
    os.mkfifo(root / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    here = os.open(root, os.O_RDONLY)
    try:
        listening.bind(f"/proc/self/fd/{here}/socket")
    finally:
        os.close(here)
        listening.close()
    yield made
    assert (outside / "secret.txt").read_text() == SECRET
    assert sorted(path.name for path in outside.iterdir()) == ["empty", "secret.txt"]
    assert not (made.root.parent / "new.txt").exists()


TRICKS = {
    "/etc/passwd": "absolute paths not allowed: /etc/passwd",
    "//etc/passwd": "absolute paths not allowed: //etc/passwd",
    "/": "absolute paths not allowed: /",
    "/proc/self/environ": "absolute paths not allowed: /proc/self/environ",
    "C:\\Windows\\win.ini": "absolute paths not allowed: C:\\Windows",
    "C:/Windows/win.ini": "absolute paths not allowed: C:/Windows",
    "..": "path traversal not allowed: ..",
    "../outside/secret.txt": "path traversal not allowed: ../outside/secret.txt",
    "inner/../../outside/secret.txt": "path traversal not allowed: inner/../../outside",
    "./../outside/secret.txt": "path traversal not allowed: ./../outside",
    "inner/..": "path traversal not allowed: inner/..",
    "inner/../notes.txt": "path traversal not allowed: inner/../notes.txt",
    "nowhere-yet/../../outside/secret.txt": "path traversal not allowed",
    "..\\outside\\secret.txt": "path traversal not allowed",
    "inner\\..\\..\\outside": "path traversal not allowed",
    "inner\\deep.txt": "path has a backslash",
    "....//....//outside/secret.txt": "No such file or directory",
    "%2e%2e/outside/secret.txt": "No such file or directory",
    "..%2foutside%2fsecret.txt": "No such file or directory",
    "\uff0e\uff0e/outside/secret.txt": "No such file or directory",
    "~/secret.txt": "No such file or directory",
    "$HOME/secret.txt": "No such file or directory",
    "": "path is required",
    "  ": "path is required",
    ".": "path is the workspace itself",
    "./.": "path is the workspace itself",
    "notes.txt\0.png": "path has a backslash or a character that cannot be shown",
    "notes.txt\nfile\tother.txt": "path has a backslash or a character that cannot be shown",
    "\u202etxt.exe": "path has a backslash or a character that cannot be shown",
    "\ud800": "path has a backslash or a character that cannot be shown",
    "a" * 256: "path is too long",
    "a/" * 3000: "path is too long",
    "absolute": "path escapes workspace: absolute",
    "absolute-folder/secret.txt": "path escapes workspace: absolute-folder/secret.txt",
    "up": "path escapes workspace: up",
    "up-folder/secret.txt": "path escapes workspace: up-folder/secret.txt",
    "root/etc/passwd": "path escapes workspace: root/etc/passwd",
    "proc/etc/passwd": "path escapes workspace: proc/etc/passwd",
    "descriptor": "path escapes workspace: descriptor",
    "cwd/pyproject.toml": "path escapes workspace: cwd/pyproject.toml",
    "parent/outside/secret.txt": "path escapes workspace: parent/outside/secret.txt",
    "inner/up-two/secret.txt": "path escapes workspace: inner/up-two/secret.txt",
    "inner/winding/secret.txt": "path escapes workspace: inner/winding/secret.txt",
    "chain-a/secret.txt": "path escapes workspace: chain-a/secret.txt",
    "self-absolute": "path escapes workspace: self-absolute",
    "nowhere": "path escapes workspace: nowhere",
    "loop-a": "Too many levels of symbolic links",
    "loop-a/x": "Too many levels of symbolic links",
    "hard": "a hard link: the file has 2 names",
    "fifo": "not a regular file",
    "socket": "not a regular file",
    "inner": "is a directory",
    "notes.txt/x": "Not a directory",
}


@pytest.mark.conforms("S4")
@pytest.mark.conforms("S-b3")
@each_row("path", TRICKS, ids=lambda path: repr(path)[:40])
def test_a_trick_does_not_read_outside_of_the_workspace(files: Workspace, path: str) -> None:
    with pytest.raises(ToolError) as caught:
        files.read(path)
    assert TRICKS[path] in str(caught.value)
    assert str(files.root) not in str(caught.value)
    assert "\n" not in str(caught.value)


OF_THE_MACHINE = ("root/", "proc/", "cwd/", "descriptor")
"""Tricks that lead to real files of this machine are only read: where the code is wrong, a test that wrote would do it."""

WRITABLE = [path for path, text in TRICKS.items() if "No such file" not in text and not path.startswith(OF_THE_MACHINE)]


@pytest.mark.conforms("S-b3")
@each_row("path", WRITABLE, ids=lambda path: repr(path)[:40])
def test_a_trick_does_not_write_outside_of_the_workspace(files: Workspace, path: str) -> None:
    before = sorted(path.name for path in files.root.iterdir())
    with pytest.raises(ToolError):
        files.write(path, b"overwritten")
    assert sorted(path.name for path in files.root.iterdir()) == before


@pytest.mark.conforms("S-b3")
@each_row(
    "path",
    ["", ".", "/", "..", "up-folder/empty", "absolute-folder/empty", "parent/outside/empty", "inner"],
)
def test_a_trick_does_not_delete_outside_of_the_workspace_nor_the_workspace(files: Workspace, path: str) -> None:
    with pytest.raises(ToolError):
        files.delete(path)
    assert files.read("inner/deep.txt") == b"deep"


@pytest.mark.parametrize(
    "path", ["up-folder", "absolute-folder", "root", "parent", "inner/up-two", "proc", "notes.txt", "fifo"]
)
def test_nothing_outside_of_the_workspace_is_listed(files: Workspace, path: str) -> None:
    with pytest.raises(ToolError, match=r"path escapes workspace|Not a directory"):
        files.list(path)


def test_a_listing_follows_no_link(files: Workspace) -> None:
    listed = {entry.path: entry.kind for entry in files.list(pattern="**").entries}
    assert not [path for path in listed if "secret" in path]
    assert listed["up-folder"] == listed["root"] == "link"
    assert listed["fifo"] == listed["socket"] == "other"
    assert listed["inner/deep.txt"] == "file"


def test_nothing_that_is_looked_for_leaves_a_descriptor_open(files: Workspace) -> None:
    paths = sorted({entry.path for entry in files.list(pattern="**").entries} | {"nothing", "notes.txt/below"})
    before = descriptors()
    for path in paths:
        for use in (files.list, files.read, files.delete):
            with suppress(ToolError):
                use(path)
    assert descriptors() - before == {}


def test_links_inside_the_workspace_work(files: Workspace) -> None:
    (files.root / "to-notes").symlink_to("notes.txt")
    (files.root / "to-inner").symlink_to("inner")
    (files.root / "inner" / "back").symlink_to("../inner/./../notes.txt")
    assert files.read("to-notes") == b"mine"
    assert files.read("to-inner/deep.txt") == b"deep"
    assert files.read("inner/back") == b"mine"
    assert files.facts("to-inner").kind == "directory"
    files.write("to-inner/new/file.txt", b"new")
    assert (files.root / "inner/new/file.txt").read_bytes() == b"new"
    with pytest.raises(ToolError, match="a symbolic link; delete it first"):
        files.write("to-notes", b"replaced")
    files.delete("to-notes")
    assert files.read("notes.txt") == b"mine"


def test_removing_a_link_or_a_hard_link_leaves_what_it_points_to(files: Workspace, outside: Path) -> None:
    for name in ("up", "up-folder", "hard", "fifo"):
        files.delete(name)
        assert not os.path.lexists(files.root / name)


@pytest.mark.parametrize("name", ["a..b.txt", "..notes", "notes..", "...", "-rf", "über 文.txt", "a\u00a0b", "*"])
def test_an_unusual_name_is_an_ordinary_file(files: Workspace, name: str) -> None:
    files.write(f"sub/{name}", b"x")
    assert files.read(f"sub/{name}") == b"x"
    assert [entry.path for entry in files.list("sub").entries] == [name]


SWAPPER = """\
import ctypes, os, sys
root, outside = sys.argv[1:]
os.chdir(root)
os.mkdir("there")
open("there/secret.txt", "w").write("mine")
os.symlink(outside, "other")
print("ready", flush=True)
libc = ctypes.CDLL(None)
while True:
    libc.renameat2(-100, b"there", -100, b"other", 2)  # exchanges the two
"""


@pytest.mark.conforms("S-b3")
def test_a_racing_process_that_swaps_a_directory_for_a_link_gains_nothing(files: Workspace, outside: Path) -> None:
    attacker = subprocess.Popen(
        [sys.executable, "-I", "-c", SWAPPER, str(files.root), str(outside)], stdout=subprocess.PIPE, text=True
    )
    seen: set[str] = set()
    try:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        for count, action in enumerate(itertools.cycle((_read, _write, _delete, _list))):
            seen.add(action(files))
            if count > 400 and {"mine", ESCAPED} <= seen:
                break
    finally:
        attacker.kill()
        attacker.communicate()
    assert SECRET not in seen


def _read(files: Workspace) -> str:
    return _said(lambda: files.read("there/secret.txt").decode())


def _write(files: Workspace) -> str:
    return _said(lambda: files.write("there/secret.txt", b"mine"))


def _delete(files: Workspace) -> str:
    return _said(lambda: files.delete("there/empty"))


def _list(files: Workspace) -> str:
    return _said(lambda: " ".join(entry.path for entry in files.list("there").entries))


def _said(action: Callable[[], str | None]) -> str:
    try:
        return action() or ""
    except ToolError as exc:
        return str(exc)


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(files: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ToolError, match=r"write error: notes.txt: No space left on device"):
        files.write("notes.txt", b"half")
    assert files.read("notes.txt") == b"mine"
    assert not [name for name in os.listdir(files.root) if name.startswith(workspace.DRAFT)]


def test_a_write_keeps_the_mode_and_drops_set_uid(files: Workspace) -> None:
    (files.root / "notes.txt").chmod(0o4750)
    files.write("notes.txt", b"new")
    assert (files.root / "notes.txt").stat().st_mode & 0o7777 == 0o750


def test_a_file_past_the_size_limit_is_neither_read_nor_written(tmp_path: Path) -> None:
    small = Workspace(tmp_path / "work", max_file_bytes=10)
    small.write("exact", b"x" * 10)
    with pytest.raises(ToolError, match="write error: more: 11 bytes, and 10 is the limit"):
        small.write("more", b"x" * 11)
    with open(small.root / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ToolError, match="read error: sparse: 1099511627776 bytes, and 10 is the limit"):
        small.read("sparse")
    assert sorted(os.listdir(small.root)) == ["exact", "sparse"]


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "8M"])
def test_a_size_limit_that_is_none_is_refused(tmp_path: Path, given: object) -> None:
    with pytest.raises(UsageError, match="max_file_bytes must be a positive number"):
        Workspace(tmp_path / "work", max_file_bytes=given)  # type: ignore[arg-type]


def test_a_workspace_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        Workspace(tmp_path / "file" / "work")


@each_row(
    ("pattern", "path", "expected"),
    [
        ("*", "a.py", True), ("*", "src/a.py", False), ("*.py", "a.py", True), ("*.py", "a.pyc", False),
        ("**", "a", True), ("**", "a/b/c", True), ("**/*.py", "a.py", True), ("**/*.py", "x/y/a.py", True),
        ("src/**/*.py", "src/a.py", True), ("src/**/*.py", "src/x/y/a.py", True), ("src/**/*.py", "lib/a.py", False),
        ("src/*/a.py", "src/x/a.py", True), ("src/*/a.py", "src/x/y/a.py", False), ("a?[0-9].txt", "ab3.txt", True),
        ("[!a]*", "b", True), ("[!a]*", "a", False), ("**/a/**/b", "x/a/y/z/b", True), ("**/a/**/b", "x/b", False),
        ("./src/*", "src/a", True), ("A*", "a", False), ("[", "[", True), ("[z-a]", "q", False),
    ],
)  # fmt: skip
def test_a_pattern_means_what_it_means_elsewhere(pattern: str, path: str, expected: bool) -> None:
    assert Glob(pattern).matches(path) is expected


@each_row("pattern", ["", "/etc/*", "../*", "a/../b", "x" * 501, "a/" * 40])
def test_a_pattern_that_leaves_the_directory_or_has_no_end_is_refused(pattern: str) -> None:
    with pytest.raises(ToolError, match="a pattern"):
        Glob(pattern)


def test_a_listing_with_too_many_entries_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_ENTRIES", 3)
    made = Workspace(tmp_path / "work")
    for number in range(4):
        made.write(f"{number}.txt", b"")
    listed = made.list()
    assert [entry.path for entry in listed.entries] == ["0.txt", "1.txt", "2.txt"]
    assert listed.truncated


@each_row(("root", "message"), [("", "not an empty text"), (5, "must be str or PathLike, not 5")])
def test_a_workspace_of_no_path_is_refused(root: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workspace(root)
