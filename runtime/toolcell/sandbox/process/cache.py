"""This user's cache directory: what sandboxes are built from (interpreters, guest packages, package environments)."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import platformdirs

from toolcell.errors import PackageError


def default_cache_dir() -> Path:
    """Return the cache directory of this user: $XDG_CACHE_HOME/toolcell, or ~/.cache/toolcell.

    A user of a container often has no home that can be written; then it is in the directory for temporary files.
    """
    usual = platformdirs.user_cache_path("toolcell", appauthor=False)
    above = next(path for path in (usual, *usual.parents) if path.exists())
    if os.environ.get("XDG_CACHE_HOME") or os.access(above, os.W_OK):
        return usual
    try:
        return Path(tempfile.gettempdir()) / f"toolcell-cache-{os.geteuid()}"
    except OSError:  # nothing here can be written; the error that follows says so
        return usual


def private_directory(path: Path) -> Path:
    """Make the cache directory. Refuse one in which another user could place code.

    Raises:
        PackageError: it cannot be made, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as exc:
        raise PackageError(
            f"cannot use {path} as the package cache: {exc.strerror}; set XDG_CACHE_HOME to a directory that can be "
            "written"
        ) from exc
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PackageError(f"cannot use {path} as the package cache: others may write to it; want mode 0700, our own")
    return path.resolve()
