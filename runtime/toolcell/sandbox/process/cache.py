"""This user's cache directory: what sandboxes are built from (interpreters, guest packages, package environments)."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from toolcell.errors import PackageError, SandboxUnavailable
from toolcell.support import daemon_threads, files
from toolcell.support.files import make_private_folder, new_directory, remove_tree


def default_cache_dir() -> Path:
    """Return the cache directory of this user: $XDG_CACHE_HOME/toolcell, or ~/.cache/toolcell, which is made for this.

    A user of a container often has no home that can be written; then it is in the directory for temporary files.
    """
    usual = platformdirs.user_cache_path("toolcell", appauthor=False)
    if not os.environ.get("XDG_CACHE_HOME"):
        with suppress(OSError):  # the home may be none at all, such as /dev/null
            make_private_folder(usual)
            if os.access(usual, os.W_OK):
                return usual
        with suppress(OSError):  # if nothing here can be written, the error that follows says so
            return Path(tempfile.gettempdir()) / f"toolcell-cache-{os.geteuid()}"
    return usual


def entry_key(facts: Sequence[object]) -> str:
    """Return the name of the entry that was made of these facts: it changes when one of them does."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def facts_of(paths: Iterable[Path]) -> list[object]:
    """Return what changes with files: their places, times and sizes."""
    facts: list[object] = []
    for path in paths:
        try:
            status = path.stat()
            facts += [str(path), status.st_mtime_ns, status.st_size]
        except OSError:
            facts.append("absent")
    return facts


def copy_file(source: Path, target: Path, mode: int = 0o555) -> None:
    """Copy a file into an entry. It has no set-uid: a copy has the rights of nobody."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def made_entry(entry: Path, what: str, fill: Callable[[Path], object]) -> Path:
    """Keep an entry, which `fill` makes if it is not there, and return it. `what`: what it is, for the error.

    Like whoever adds a package environment, it removes what is then too much: in a thread, for this may be called on
    the event loop, and one walk through the cache is for all that a start adds meanwhile.

    Raises:
        SandboxUnavailable: the cache cannot be written.
    """
    try:
        if not keep(entry):
            with new_directory(entry) as building:
                fill(building)
                for folder, _, _ in os.walk(building):  # sandboxes have another user id
                    os.chmod(folder, 0o755)
            keep(entry)
            _prune_later(entry.parent.parent)
    except OSError as exc:
        raise SandboxUnavailable(
            f"{what} cannot be kept in {entry.parent.parent}: {exc}; set XDG_CACHE_HOME to a directory that can be "
            "written"
        ) from exc
    return entry


_kept: dict[Path, int] = {}
"""Descriptors of the entries that this process uses, each with a shared lock."""


def keep(entry: Path) -> bool:
    """Keep an entry from being removed while this process lives, and note its use. False: it is not there."""
    known = _kept.get(entry)
    if known is None or not _is_at(known, entry):
        try:
            opened = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            return False
        with suppress(OSError):  # a file system without locks: nothing is removed from it either
            files.lock(opened, wait=True, shared=True)
        if not _is_at(opened, entry):  # removed before it was locked
            os.close(opened)
            return False
        if known is not None:
            os.close(known)
        _kept[entry] = opened
    note_use(entry)
    return True


def lock_unused(entry: Path) -> int | None:
    """Lock an entry that nobody uses: who looks for it waits until the descriptor is closed. None: it is in use."""
    try:
        opened = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError:
        return None
    with suppress(OSError):
        if files.lock(opened, wait=False) and _is_at(opened, entry):
            return opened
    os.close(opened)
    return None


def note_use(entry: Path) -> None:
    """Set the time of an entry's last use: its modification time."""
    with suppress(OSError):
        os.utime(entry)


def _is_at(opened: int, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), place.lstat())
    except OSError:
        return False


def private_directory(path: Path) -> Path:
    """Make the cache directory, and return where it is. Refuse one in which another user could place code.

    What is checked is what was opened, and what is returned is its place: a name may lead elsewhere the next time.

    Raises:
        PackageError: it cannot be made, or is a link, or others may write to it or put another one in its place.
    """
    try:
        make_private_folder(path)
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError as exc:
        why = "it is a link" if path.is_symlink() else exc.strerror
        raise PackageError(
            f"cannot use {path} as the package cache: {why}; set XDG_CACHE_HOME to a directory that can be written"
        ) from exc
    try:
        status = os.fstat(opened)
        place = _place_of(opened, path)
    finally:
        os.close(opened)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PackageError(f"cannot use {path} as the package cache: others may write to it; want mode 0700, our own")
    if (above := _open_to_others(place)) is not None:
        raise PackageError(
            f"cannot use {path} as the package cache: others may put another directory in the place of {above}; set "
            "XDG_CACHE_HOME to a directory of your own"
        )
    return place


def _place_of(opened: int, path: Path) -> Path:
    """Return where an open directory is.

    Raises:
        PackageError: its name leads to another one already.
    """
    try:
        place = Path(os.readlink(f"/proc/self/fd/{opened}"))
    except OSError:  # macOS
        place = path.resolve()
    if not _is_at(opened, place):
        raise PackageError(f"cannot use {path} as the package cache: it was moved while it was looked at")
    return place


def _open_to_others(place: Path) -> Path | None:
    """Return what another user may replace on the way to a directory: it is in one to which everybody may write."""
    for directory in (place, *place.parents):
        above = directory.parent.stat()
        is_ours = directory.lstat().st_uid in (0, os.geteuid())
        if above.st_mode & stat.S_IWOTH and not (above.st_mode & stat.S_ISVTX and is_ours):
            return directory
    return None


# What is in the cache: remove the entries that were not used for longest.
#
# An entry that a process uses has a shared lock (`cache.keep`), so it is never removed.

ENVIRONMENTS: Final = "environments"
KINDS: Final = ("interpreters", "guest", "programs", "type-checker", ENVIRONMENTS)
"""Folders of the cache."""

MAX_BYTES: Final = 10 << 30
"""The upper bound: whoever adds an entry removes what was not used for longest, until the rest fits."""

ABANDONED_S: Final = 3600.0
"""What is still under construction after this time was left by a process that was killed."""


@dataclass(slots=True)
class _Found:
    path: Path
    used_ns: int
    """When it was last used, since the epoch."""
    files: dict[tuple[int, int], int]
    """Device and inode to bytes."""


def prune(cache: Path, *, max_bytes: int = MAX_BYTES) -> int:
    """Remove the least recently used entries until the rest fits. Entries in use stay.

    Returns:
        How many bytes were freed.
    """
    found = sorted(_find(cache), key=lambda each: each.used_ns)
    owners = Counter(inode for each in found for inode in each.files)
    sizes = {inode: taken for each in found for inode, taken in each.files.items()}
    before = total = sum(sizes.values())
    for each in found:
        if total <= max_bytes or not _remove(each.path):
            continue
        owners.subtract(each.files.keys())
        total -= sum(taken for inode, taken in each.files.items() if not owners[inode])
    _remove_leftovers(cache)
    return before - total


_pruning: dict[Path, threading.Thread] = {}


def _prune_later(cache: Path) -> None:
    """Have a thread prune a cache, unless one does. The next entry makes up for one that the process ended."""
    if (pruning := _pruning.get(cache)) is None or not pruning.is_alive():
        with suppress(MemoryError, RuntimeError):  # there can be no more threads: the next entry is in time
            _pruning[cache] = daemon_threads.start(prune, cache, name="toolcell-cache")


def _find(cache: Path) -> list[_Found]:
    found = []
    for kind in KINDS:
        for path in _folders(cache / kind):
            with suppress(OSError):  # removed meanwhile
                found.append(_Found(path, path.stat().st_mtime_ns, dict(_files(path))))
    return found


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _files(path: Path) -> Iterator[tuple[tuple[int, int], int]]:
    pending = [str(path)]
    while pending:
        status = os.lstat(pending[-1])
        yield (status.st_dev, status.st_ino), status.st_blocks * 512
        with os.scandir(pending.pop()) as inside:
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    yield (status.st_dev, status.st_ino), status.st_blocks * 512


def _remove(entry: Path) -> bool:
    """Rename an entry unless a process uses it: it is gone at once for everybody. `_remove_leftovers` removes it."""
    opened = lock_unused(entry)
    if opened is None:
        return False
    try:
        entry.rename(entry.with_name(f".removed-{secrets.token_hex(8)}"))
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def _remove_leftovers(cache: Path) -> None:
    """Remove what killed processes left, and locks of environments that are gone."""
    for kind in KINDS:
        for path in (cache / kind).glob(".*"):
            with suppress(OSError):
                if path.name.startswith(".removed-") or time.time() - path.lstat().st_mtime > ABANDONED_S:
                    remove_tree(path)
    for lock in (cache / ENVIRONMENTS).glob("*.lock"):
        with suppress(OSError):
            if not lock.with_suffix("").exists() and (opened := files.take_lock(lock)) is not None:
                lock.unlink()
                os.close(opened)
