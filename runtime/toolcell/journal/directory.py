"""The directory of journals: it belongs to this user alone, holds the key of the tokens, and forgets what is old."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from toolcell.errors import ResumeError, UsageError
from toolcell.journal.file import JournalFile
from toolcell.journal.marks import remove_old_marks
from toolcell.support.atomic import write_file
from toolcell.support.private_files import make_private_folder, open_to_others, read_regular_file

KEY: Final = "key"
KEY_BYTES: Final = 32

SUFFIX: Final = ".journal"
"""Suffix of the file of a run."""

MAP_SUFFIX: Final = ".items.map"
"""Suffix of the file of a `Runtime.map`. No run's name has a dot, so its mark is nobody else's."""


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
    if problem := open_to_others(folder.stat()):
        raise UsageError(
            f"{folder} is for scripts, arguments, answers and the key of the tokens, and it {problem}; "
            f"chown it, and chmod 700 {folder}"
        )


def shared_key(folder: Path) -> bytes:
    """Return the key of a directory; the first process makes it.

    Raises:
        UsageError: others can use it.
        OSError: it cannot be made or read, or is not a key.
    """
    path = folder / KEY
    if not os.path.lexists(path):
        with suppress(FileExistsError):
            write_file(path, os.urandom(KEY_BYTES), replace=False)
    try:
        key = read_regular_file(path, KEY_BYTES + 1, is_private=True)
    except PermissionError as exc:
        raise UsageError(f"the key of the tokens, {path}, cannot be used: it {exc.strerror}; chmod 600 {path}") from exc
    if len(key) != KEY_BYTES:  # anybody could sign with an empty one
        size = path.stat().st_size
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
