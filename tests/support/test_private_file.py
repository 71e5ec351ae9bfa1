"""Regular files, and private ones: of keys, of tokens, of whoever else keeps a secret in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from toolcell.audit import keys
from toolcell.errors import AuditError
from toolcell.mcp.tokens import TokenFile
from toolcell.support.files import make_own_folder, read_regular_file, write_file

pytestmark = pytest.mark.quick


def test_the_beginning_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "a", 3) == b"123"


def test_a_pipe_or_a_link_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file(tmp_path / "pipe", 3)
    with pytest.raises(OSError, match="symbolic link"):
        read_regular_file(tmp_path / "link", 3)
    assert read_regular_file(tmp_path / "link", 3, may_be_link=True) == b"123"


def test_an_own_folder_may_be_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    make_own_folder(tmp_path / "link")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no folder whose files may be without names")
def test_a_file_has_no_name_before_it_is_whole() -> None:
    """So that nothing is left of it when its process is killed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seen = list[list[str]]()
        write_file(Path(folder, "a"), b"12345", may_replace=lambda: seen.append(os.listdir(folder)) or True)
        assert (seen, os.listdir(folder), Path(folder, "a").read_bytes()) == ([[]], ["a"], b"12345")


def private(path: Path) -> None:
    read_regular_file(path, 100, is_private=True)


def token(path: Path) -> None:
    TokenFile(path).load()


def key(path: Path) -> None:
    try:
        keys.load_signer(path)
    except AuditError as exc:
        raise PermissionError(f"{exc}") from exc


@pytest.mark.parametrize("read", [private, token, key])
@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o660])
def test_a_private_file_that_others_can_use_is_refused(tmp_path: Path, read: Callable[[Path], None], mode: int) -> None:
    (tmp_path / "a").touch(0o600)
    (tmp_path / "a").chmod(mode)
    with pytest.raises(PermissionError, match=rf"has mode {mode:04o}: it must be yours and have mode 0600"):
        read(tmp_path / "a")


@pytest.mark.parametrize("read", [private, token, key])
def test_a_private_file_of_another_user_is_refused(
    tmp_path: Path, read: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to user"):
        read(tmp_path / "a")
