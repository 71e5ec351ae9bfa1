"""The files in the workspace of a session. They are put there, listed and read by scripts of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from toolcell.config import Limits
from toolcell.control.controlled import ControlledRuntime
from toolcell.control.scripts import Script
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult
from toolcell.run.input_files import FileContent, FileInput, guest_files
from toolcell.sessions.state import NO_HANDLERS, SessionState
from toolcell.sessions.turn import SessionTurn
from toolcell.tools.call import RunContext

LISTING = (
    '[[__import__("os").path.relpath(__import__("os").path.join(folder, name), OUTPUT_DIR), '
    '__import__("os").lstat(__import__("os").path.join(folder, name)).st_size] '
    'for folder, _, names in __import__("os").walk(OUTPUT_DIR) for name in names]'
)
"""Lists the files of the workspace, and defines no name."""


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A file in the workspace of a session, as the guest says."""

    name: str
    size: int


class SessionWorkspace(ABC):
    """The part of a session that reads and writes files."""

    limits: Limits
    _host: ControlledRuntime
    _state: SessionState
    _context: RunContext | None

    @abstractmethod
    def _exclusively(self) -> SessionTurn:
        """Wait for one's turn."""

    async def put_files(self, files: Iterable[FileInput] | Mapping[str, FileContent]) -> None:
        """Write files to the workspace, over those of the same name.

        Raises:
            UsageError: a file cannot be read or sent, or there is no room for it.
        """
        script = Script("", None, guest_files(files), self._without_files(), "off", None, None)
        async with self._exclusively():
            result = await self._state.run(script, self._host._tools([]), self._context, NO_HANDLERS, "ask")
        if result.error is not None:
            raise UsageError(f"the files were not written: {result.error.message}")

    async def files(self) -> tuple[SessionFile, ...]:
        """List the files in the workspace, by name. Names and sizes are the guest's claims."""
        result = await self._read(LISTING, self._without_files())
        rows = result.value if isinstance(result.value, list) else []
        found = [SessionFile(row[0], row[1]) for row in rows if _is_file(row)]
        return tuple(sorted(found, key=lambda file: file.name))

    async def read_file(self, name: str) -> bytes:
        """Return the content of a file in the workspace.

        Raises:
            UsageError: there is no such file, or it is larger than `files_bytes`.
        """
        result = await self._read(f"set_result(None, files=[{name!r}])")
        if result.error is not None:
            raise UsageError(f"{name!r:.80} cannot be read: {result.error.message}")
        found = result.files[0] if len(result.files) == 1 else None
        if found is None or found.data is None:
            problem = found.problem if found is not None else f"it stands for {len(result.files)} files"
            raise UsageError(f"{name!r:.80} cannot be read: {problem}")
        return found.data

    def _without_files(self) -> Limits:
        """Return the limits of a script of ours: it may return no file."""
        return self.limits.model_copy(update={"files": 0})

    async def _read(self, source: str, limits: Limits | None = None) -> ExecutionResult:
        script = Script(source, None, (), limits or self.limits, "off", None, None)
        async with self._exclusively():
            return await self._state.read(script, self._host._tools([]), self._context)


def _is_file(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int
