"""How far each journal had got, as this machine saw it. Kept outside the directory of the journals.

Whoever puts back an older copy of a journal, such as a backup, would have calls made a second time. The mark tells: a
journal that does not hold the record at its mark is not carried on. Another machine has no mark and does not notice.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

import platformdirs

from toolcell.support.log import logger_of
from toolcell.support.private_files import make_private_folder

logger = logger_of("toolcell.control")

_MARK: Final = struct.Struct(">QI")
"""Size of the journal after its last record, and that record's checksum."""


class Mark:
    """The mark of one journal, open."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        make_private_folder(path.parent)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

    def read(self) -> tuple[int, int] | None:
        """Return size and checksum; None: the journal was never written on this machine."""
        data = os.pread(self._fd, _MARK.size, 0)
        return _MARK.unpack(data) if len(data) == _MARK.size else None

    def set(self, size: int, checksum: int) -> None:
        """Note how far the journal got. A failure is passed over: the journal is what counts."""
        with suppress(OSError):
            os.pwrite(self._fd, _MARK.pack(size, checksum), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def open_mark(folder: Path | None, name: str) -> Mark | None:
    """Open the mark of a journal. None where there is no place for marks: an older copy is not noticed then."""
    if folder is None:
        return None
    try:
        return Mark(folder / f"{name}.mark")
    except OSError as exc:
        logger.warning("older copies of the journal of run %s would not be noticed: %s", name, exc)
        return None


def marks_directory(key: bytes) -> Path:
    """Return where the marks of the directory with this key are: in the user's state directory."""
    name = hashlib.sha256(b"marks" + key).hexdigest()[:16]
    return platformdirs.user_state_path("toolcell", appauthor=False) / "journal-marks" / name


def remove_old_marks(folder: Path, before: float) -> None:
    """Remove the marks of journals that were not written since."""
    for path in folder.glob("*.mark"):
        with suppress(OSError):
            if path.lstat().st_mtime < before:
                path.unlink()
