"""A journal whose file is made with the first call: a run that has made none needs nothing to be carried on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from toolcell.control.journal_file import LABELS, PAST, RUN, JournalFile
from toolcell.errors import ResumeError

BEFORE = (RUN, PAST, LABELS)
"""Records that wait in memory for the first one of another kind."""


class LateJournalFile(JournalFile):
    """A journal of a run that begins. Making a file costs more than most scripts do."""

    def __init__(self, path: Path, marks: Path | None = None, key: bytes = b"") -> None:
        self.path = path
        self._fd, self._size, self._mark = -1, 0, None
        self._marks, self._key = marks, key
        self._waiting: list[tuple[Any, ...]] | None = []

    def write(self, *fields: Any) -> None:
        """Append one record.

        Raises:
            OSError: it could not be written.
        """
        if self._waiting is not None:
            if fields[0] in BEFORE:
                self._waiting.append(fields)
                return
            waiting = self._make()
            for each in waiting:
                super().write(*each)
            self._waiting = None
        super().write(*fields)

    def remove(self) -> None:
        """Remove the file, if it was made."""
        if self._waiting is None:
            super().remove()

    def _make(self) -> list[tuple[Any, ...]]:
        waiting = self._waiting or []
        try:
            super().__init__(self.path, self._marks, self._key)
            self.check_new()
        except ResumeError as exc:  # ids are random: somebody made the file on purpose
            raise OSError(errno.EEXIST, str(exc), str(self.path)) from exc
        return waiting
