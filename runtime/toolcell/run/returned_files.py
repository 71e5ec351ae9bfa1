"""`ReturnedFiles`: puts together the files that a guest returns, within the run's limits.

Nothing here touches a disk. Names and sizes are the guest's claims, and are checked before they are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolcell.config import Limits
from toolcell.results import OutputFile
from toolcell.support.text import for_terminal
from toolcell_bridge.guest.files import MAX_FILE_PROBLEMS, media_type
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.invisible import is_visible
from toolcell_bridge.wire.messages import FilePart, FileProblem

NAME_CHARS = 1024
Sink = Callable[[bytes], object]
"""Takes the content of returned files, piece by piece. Never raises."""

PROBLEMS = MAX_FILE_PROBLEMS + 100
"""Files that may be reported as missing or wrong, beyond those that may be returned, with what was displayed."""


@dataclass(slots=True)
class _Open:
    name: str
    media_type: str
    size: int = 0
    parts: list[bytes] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)
    """Digest of the parts so far: a large file is not hashed at once."""


class ReturnedFiles:
    """The files of the result that was set last."""

    def __init__(self, limits: Limits, sink: Sink | None = None) -> None:
        """`sink`: takes the content of the files, which is not kept here then."""
        self._limits, self._sink = limits, sink
        self._kept: dict[str, OutputFile] = {}
        self._open: _Open | None = None
        self._bytes = 0
        self._whole = 0
        """Kept files that have their data."""

    def forget(self) -> None:
        """Drop every file, finished or not: a new result was set."""
        self._kept.clear()
        self._open, self._bytes, self._whole = None, 0, 0

    def finished(self) -> tuple[OutputFile, ...]:
        """Return the files that arrived whole, and those that could not be sent."""
        return tuple(self._kept.values())

    def take_part(self, part: FilePart) -> None:
        """Take the next piece of a file.

        Raises:
            RemoteProtocolError: past a limit, or a bad name. Our own guest checks both first and reports them to the
                script.
        """
        file = self._open
        if file is None:
            check_name(part.name, part.media_type)
            file = self._open = _Open(part.name, part.media_type)
        self._bytes += len(part.data)
        if len(self._kept) >= self._limits.files + PROBLEMS or self._bytes > self._limits.files_bytes:
            raise RemoteProtocolError("more files than the run may return")
        (self._sink or file.parts.append)(part.data)
        file.size += len(part.data)
        file.digest.update(part.data)
        if part.last:
            self._open = None
            if self._whole >= self._limits.files:
                raise RemoteProtocolError("more files than the run may return")
            data = b"".join(file.parts)
            self._keep(OutputFile(file.name, file.media_type, file.size, data, file.digest.hexdigest()))

    def take_problem(self, problem: FileProblem) -> None:
        """Take note of a file that cannot be returned.

        Raises:
            RemoteProtocolError: too many, or absurdly long.
        """
        self._open = None
        if len(problem.name) > NAME_CHARS or len(problem.problem) > NAME_CHARS:
            raise RemoteProtocolError("a file's name or problem is too long")
        if len(self._kept) >= self._limits.files + PROBLEMS:
            raise RemoteProtocolError("more files than the run may return")
        name = for_terminal(problem.name).replace("\n", "\\n")
        said = for_terminal(problem.problem)
        self._keep(OutputFile(name, media_type(name, b""), size=problem.size, data=None, sha256=None, problem=said))

    def _keep(self, file: OutputFile) -> None:
        before = self._kept.get(file.name)
        self._whole += (file.data is not None) - (before is not None and before.data is not None)
        self._kept[file.name] = file


def check_name(name: str, kind: str) -> None:
    """Check that a returned file's name stays inside the folder in which somebody saves it.

    Raises:
        RemoteProtocolError: it is absolute, contains `..`, or is absurdly long; our own guest sends no such name.
    """
    parts = name.split("/")
    if not is_visible(name):
        raise RemoteProtocolError("a returned file's name has unprintable or invisible characters")
    if len(name) > NAME_CHARS or len(kind) > NAME_CHARS or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise RemoteProtocolError("a returned file's name is not a plain relative path")
    if not kind.isascii() or not kind.isprintable():
        raise RemoteProtocolError("a returned file's media type is not one")
