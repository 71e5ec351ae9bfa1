"""Locks of files: one holder, gone with the descriptor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from toolcell.support.files import lock, take_lock

pytestmark = pytest.mark.quick


def test_one_holder_has_it_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = take_lock(path)
    assert held is not None and take_lock(path) is None
    os.close(held)
    again = take_lock(path)
    assert again is not None
    os.close(again)


def test_readers_share_it_and_keep_writers_out(tmp_path: Path) -> None:
    descriptors = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(3)]
    assert lock(descriptors[0], wait=False, shared=True) and lock(descriptors[1], wait=True, shared=True)
    assert not lock(descriptors[2], wait=False)
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_link_is_not_locked_and_a_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        take_lock(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(OSError, match="linux has no POSIX file locks"):
        take_lock(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
