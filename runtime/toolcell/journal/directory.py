"""The directory of journals: it belongs to this user alone, holds the key of the tokens, and forgets what is old."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from toolcell.errors import ResumeError, UsageError
from toolcell.journal.file import JournalFile
from toolcell.journal.marks import remove_old_marks
from toolcell.support.private_folder import make_private_folder

KEY: Final = "key"
KEY_BYTES: Final = 32

SUFFIX: Final = ".journal"
"""Of the file of a run."""

MAP_SUFFIX: Final = ".items.map"
"""Of the file of a `Runtime.map`. No run's name has a dot, so its mark is nobody else's."""


def item_run(name: str, index: int) -> str:
    """Return the id of the run of an item of a map."""
    return f"{name}-{index}"


def _is_of_a_map(path: Path) -> bool:
    """Return whether this is the journal of an item whose map is there."""
    name, _, index = path.stem.rpartition("-")
    return path.suffix == SUFFIX and index.isdigit() and path.with_name(f"{name}{MAP_SUFFIX}").exists()


def make_private(folder: Path) -> None:
    """Make the directory, or check that nobody else can use the one that is there.

    Raises:
        UsageError: others can read or write it, or it belongs to somebody else.
        OSError: it cannot be made.
    """
    make_private_folder(folder)
    _check_private(folder.stat(), folder, "0700")


def _check_private(found: os.stat_result, path: Path, wanted: str) -> None:
    mode, what = stat.S_IMODE(found.st_mode), "scripts, arguments, answers and the key of the tokens"
    if mode & 0o077:
        raise UsageError(f"others may use {path} (mode {mode:04o}), which is for {what}: chmod {wanted} {path}")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}, and is for {what} of user {os.geteuid()}: chown it")


def shared_key(folder: Path) -> bytes:
    """Return the key of a directory; the first process makes it.

    Raises:
        UsageError: others can use it.
        OSError: it cannot be made or read, or is no key.
    """
    path = folder / KEY
    if not os.path.lexists(path):
        part = path.with_name(f"{KEY}.{os.getpid()}.{os.urandom(4).hex()}")
        part.touch(mode=0o600)
        part.write_bytes(os.urandom(KEY_BYTES))
        try:
            os.link(part, path)  # whole, or not at all
        except FileExistsError:
            pass
        part.unlink()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        _check_private(found, path, "0600")
        key = file.read(KEY_BYTES + 1)
        size = found.st_size
    if len(key) != KEY_BYTES:  # anybody could sign with an empty one
        raise OSError(f"its key has {size} bytes and not {KEY_BYTES}; remove {path}, which makes its tokens void")
    return key


def remove_old(folder: Path, marks: Path, before: float) -> None:
    """Remove journals of runs, sessions, drafts and maps that nobody uses and were not written since, and old marks.

    The journal of an item stays as long as its map: without it the item would look like one that never began.
    """
    endings = (f"*{MAP_SUFFIX}", f"*{SUFFIX}", "*.session", "*.draft")
    for state in folder.glob("session.*.state"):  # by value, beside the file of its session
        if not state.with_name(f"{state.name.rsplit('.', 2)[0]}.session").exists():
            state.unlink(missing_ok=True)
    for path in (each for ending in endings for each in folder.glob(ending)):
        try:
            if path.lstat().st_mtime >= before or _is_of_a_map(path):
                continue
            file = JournalFile(path)
        except (ResumeError, OSError):  # under way, removed by another process just now, or no journal
            continue
        path.unlink(missing_ok=True)
        file.close()
    remove_old_marks(marks, before)
