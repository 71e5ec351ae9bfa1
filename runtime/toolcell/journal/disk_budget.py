"""`DiskBudget`: how many bytes and files a directory of journals may have: it must not fill the disk of others."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_AGAIN_S: Final = 0.5
"""While a directory is full, look so often whether something was removed."""


class DiskBudget:
    """The budget of one directory. What is written is counted; what was removed is found when it is full."""

    def __init__(self, folder: Path, most_bytes: int, most_files: int, forget_old: Callable[[], None]) -> None:
        """`forget_old`: removes what is kept no longer."""
        self._folder, self._most_bytes, self._most_files, self._forget_old = folder, most_bytes, most_files, forget_old
        self._bytes = self._files = 0
        self._looked_at = -LOOK_AGAIN_S
        self._lock = threading.Lock()
        self._look()

    def check(self, size: int, files: int = 0) -> None:
        """Check that there is room for so much.

        Raises:
            OSError: EDQUOT: there is not.
        """
        with self._lock:
            self._check(size, files)

    def take(self, size: int, files: int = 0) -> None:
        """Count what is about to be written.

        Raises:
            OSError: as from `check`.
        """
        with self._lock:
            self._check(size, files)
            self._bytes += size
            self._files += files

    def _check(self, size: int, files: int) -> None:
        if not self._has_room(size, files) and time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
            self._forget_old()
            self._look()
        if not self._has_room(size, files):
            kept = f"{self._bytes} bytes in {self._files} files are kept of runs, drafts and sessions"
            most = f"there may be {self._most_bytes} in {self._most_files}"
            cure = "decide about what waits, or forget sessions"
            raise OSError(errno.EDQUOT, f"{kept}, and {most}; {cure}")

    def _has_room(self, size: int, files: int) -> bool:
        return self._bytes + size <= self._most_bytes and self._files + files <= self._most_files

    def _look(self) -> None:
        self._bytes = self._files = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    self._bytes += entry.stat(follow_symlinks=False).st_size
                except OSError:  # removed just now
                    continue
                self._files += 1
        self._looked_at = time.monotonic()
