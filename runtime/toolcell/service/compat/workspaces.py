"""`Workspaces`: the files of sessions, in a folder for each. A run gets a copy, and what it leaves replaces it.

No sandbox sees these folders. Nothing here follows a link or opens a path that a script named: a folder is written
whole, under names that were checked, and then takes the place of the one before.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from toolcell import daemon_threads
from toolcell.errors import StoreError

FOLDER_MODE: Final = 0o750
FILE_MODE: Final = 0o640
_NEW, _OLD = ".new-", ".old-"
"""Before a session's name. No session has a name with a dot."""


class Workspaces:
    """The workspaces below one folder. Runs of one session use theirs one after the other."""

    def __init__(self, root: Path, ttl_s: float, *, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since the epoch."""
        self.root, self._ttl_s, self._now = root, ttl_s, now
        self._locks: dict[str, anyio.Lock] = {}
        self._users: Counter[str] = Counter()
        """Runs that use a workspace, or wait for it."""
        self._deletions: Counter[str] = Counter()
        """Of workspaces in use: what a run leaves is dropped when its workspace was deleted meanwhile."""

    def open(self) -> None:
        """Make the folder, and clean up what a process that was killed left half written.

        Raises:
            StoreError: it cannot be made or written.
        """
        try:
            self.root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            for left in [*self.root.glob(f"{_NEW}*"), *self.root.glob(f"{_OLD}*")]:
                name = left.name.removeprefix(_OLD)
                if left.name != name and not (self.root / name).exists():
                    left.rename(self.root / name)  # killed between the two renames
                else:
                    shutil.rmtree(left)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as exc:
            raise StoreError(f"the folder of the workspaces, {self.root}, cannot be used: {exc.strerror}") from exc

    @asynccontextmanager
    async def use(self, session: str) -> AsyncIterator[SessionFolder]:
        """Wait for one's turn with a workspace."""
        lock = self._locks.setdefault(session, anyio.Lock())
        self._users[session] += 1
        try:
            async with lock:
                yield SessionFolder(self, session, self._deletions[session])
        finally:
            self._users[session] -= 1
            if not self._users[session]:
                del self._users[session], self._locks[session]
                self._deletions.pop(session, None)

    def is_deleted(self, session: str, since: int) -> bool:
        """True when a workspace was deleted after its user had read this number of deletions."""
        return self._deletions[session] != since

    async def delete(self, session: str) -> None:
        """Delete a workspace, also while a run uses it: that run leaves nothing. An unknown one is no error."""
        if self._users[session]:
            self._deletions[session] += 1
            await daemon_threads.run_sync(shutil.rmtree, self.root / session, True)
        else:
            async with self.use(session):
                await daemon_threads.run_sync(shutil.rmtree, self.root / session, True)

    async def evict(self) -> list[str]:
        """Delete the workspaces that nobody used for too long, and return their names."""
        before = self._now() - self._ttl_s
        old = [name for name in await daemon_threads.run_sync(self._older, before) if not self._users[name]]
        for name in old:
            await self.delete(name)
        return old

    def _older(self, before: float) -> list[str]:
        with os.scandir(self.root) as entries:
            return [each.name for each in entries if each.name[0] != "." and _changed_at(each) < before]

    # What a workspace does in a thread.

    def load(self, session: str) -> dict[str, bytes]:
        """Return the files of a workspace by name."""
        folder, files = self.root / session, {}
        for where, _, names in os.walk(folder):
            for name in names:
                path = Path(where, name)
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
        return files

    def save(self, session: str, files: Mapping[str, bytes], is_deleted: Callable[[], bool]) -> None:
        """Replace a workspace by these files."""
        new, old, folder = self.root / f"{_NEW}{session}", self.root / f"{_OLD}{session}", self.root / session
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(FOLDER_MODE)
            for name, content in files.items():
                _write(new, name, content)
            os.utime(new, (self._now(), self._now()))
            if is_deleted():
                return
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


class SessionFolder:
    """One workspace, for the one run whose turn it is."""

    def __init__(self, place: Workspaces, session: str, deletions: int) -> None:
        self._place, self._session, self._deletions = place, session, deletions

    async def files(self) -> dict[str, bytes]:
        """Return what is in it.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return await daemon_threads.run_sync(self._place.load, self._session)
        except OSError as exc:
            raise StoreError(f"the workspace of session {self._session!r} cannot be read: {exc.strerror}") from exc

    async def replace(self, files: Mapping[str, bytes]) -> None:
        """Keep these files and no others. When the workspace was deleted meanwhile, it stays deleted.

        Raises:
            StoreError: they cannot be written; what was there before is still there.
        """
        try:
            await daemon_threads.run_sync(self._place.save, self._session, files, self._is_deleted)
        except (OSError, ValueError) as exc:
            said = exc.strerror if isinstance(exc, OSError) else exc
            raise StoreError(f"the workspace of session {self._session!r} cannot be written: {said}") from exc

    def _is_deleted(self) -> bool:
        return self._place.is_deleted(self._session, self._deletions)


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file below a folder of ours. The folder is new, so no link is in it."""
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r:.80} leaves it")
    for depth in range(1, len(parts)):
        folder.joinpath(*parts[:depth]).mkdir(FOLDER_MODE, exist_ok=True)
    path = folder.joinpath(*parts)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE), "wb") as file:
        file.write(content)


def _changed_at(entry: os.DirEntry[str]) -> float:
    try:
        told = entry.stat(follow_symlinks=False)
    except OSError:  # deleted meanwhile
        return float("inf")
    return told.st_mtime if stat.S_ISDIR(told.st_mode) else float("inf")
