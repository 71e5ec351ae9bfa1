"""What is in the cache: list its entries, and remove those that were not used for longest.

An entry that a process uses has a shared lock (`cache.keep`), so it is never removed.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.sandbox.process.cache import default_cache_dir, is_in_use, lock_unused, private_directory
from toolcell.support import file_lock
from toolcell.support.atomic import remove_tree

ENVIRONMENTS: Final = "environments"
KINDS: Final = ("interpreters", "guest", "programs", "type-checker", ENVIRONMENTS)
"""Folders of the cache. A file that several entries have counts for the first of them."""

MAX_BYTES: Final = 10 << 30
"""The upper bound: whoever adds an environment removes what was not used for longest, until the rest fits."""

ABANDONED_S: Final = 3600.0
"""What is still under construction after this time was left by a process that was killed."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One directory of the cache."""

    path: Path
    kind: str
    content: str
    """What is in it, for a person to read."""
    used_ns: int
    """When it was last used, since the epoch."""
    size_bytes: int
    """What it takes on the disk, without the files that an entry before it has too."""
    in_use: bool
    """A process uses it now."""


@dataclass(slots=True)
class _Found:
    path: Path
    kind: str
    manifest: dict[str, Any]
    used_ns: int
    files: dict[tuple[int, int], int]
    """Device and inode to bytes."""


def default_cache() -> Path:
    """Return the cache of this user, which is made if it is missing.

    Raises:
        PackageError: it cannot be used, or others may write to it.
    """
    return private_directory(default_cache_dir())


def entries(cache: Path) -> list[CacheEntry]:
    """List what is in the cache, the entry that was last used first."""
    counted: set[tuple[int, int]] = set()
    listed = []
    for each in _find(cache):
        size = sum(taken for inode, taken in each.files.items() if inode not in counted)
        counted |= each.files.keys()
        listed.append(CacheEntry(each.path, each.kind, _content(each), each.used_ns, size, is_in_use(each.path)))
    return sorted(listed, key=lambda entry: -entry.used_ns)


def prune(cache: Path, *, max_bytes: int = MAX_BYTES, unused_s: float | None = None) -> int:
    """Remove entries that were not used for `unused_s`, and then the least recently used until the rest fits.

    Entries in use stay.

    Returns:
        How many bytes were freed.
    """
    found = sorted(_find(cache), key=lambda each: each.used_ns)
    owners = Counter(inode for each in found for inode in each.files)
    sizes = {inode: taken for each in found for inode, taken in each.files.items()}
    before = total = sum(sizes.values())
    oldest_ns = time.time_ns() - int(unused_s * 1e9) if unused_s is not None else 0
    for each in found:
        is_wanted = each.used_ns >= oldest_ns and total <= max_bytes
        if is_wanted or not _remove(each.path):
            continue
        owners.subtract(each.files.keys())
        total -= sum(taken for inode, taken in each.files.items() if not owners[inode])
    _remove_leftovers(cache)
    return before - total


def _find(cache: Path) -> list[_Found]:
    """Return the entries in the order of `KINDS`."""
    found = []
    for kind in KINDS:
        for path in _folders(cache / kind):
            with suppress(FileNotFoundError):  # removed meanwhile
                found.append(_Found(path, kind, _manifest(path), path.stat().st_mtime_ns, dict(_files(path))))
    # The interpreter that others are made of counts before them.
    return sorted(found, key=lambda each: (KINDS.index(each.kind), bool(each.manifest.get("packages"))))


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _manifest(entry: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


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


def _content(entry: _Found) -> str:
    manifest = entry.manifest
    if entry.kind == ENVIRONMENTS:
        return ", ".join(manifest.get("requirements", ()))
    return str(manifest.get("python", ""))


def _remove(entry: Path) -> bool:
    """Remove an entry unless a process uses it. It is gone at once for everybody who looks for it."""
    opened = lock_unused(entry)
    if opened is None:
        return False
    removed = entry.with_name(f".removed-{secrets.token_hex(8)}")
    try:
        entry.rename(removed)
    except OSError:
        return False
    finally:
        os.close(opened)
    remove_tree(removed)
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
            if not lock.with_suffix("").exists() and (opened := file_lock.take_lock(lock)) is not None:
                lock.unlink()
                os.close(opened)
