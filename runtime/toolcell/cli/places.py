"""Folders and files that a command writes: what can be wrong with them is found out before anything runs."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolcell.errors import UsageError


@contextmanager
def output_folder(flag: str, folder: Path | None) -> Iterator[None]:
    """Make a folder that is written to at the end. What was made and stays empty is removed again.

    Raises:
        UsageError: it cannot be made, or no file can be written there.
    """
    made = _missing(folder)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _check_writable(folder)
    except OSError as exc:
        _remove_empty(made)
        raise UsageError(f"{flag} {folder}: no file can be written there: {exc.strerror}") from exc
    try:
        yield
    finally:
        _remove_empty(made)


@contextmanager
def kept_if_taken(folder: Path | None) -> Iterator[None]:
    """Remove what the block has made of an empty folder, if the block fails."""
    made = _missing(folder)
    try:
        yield
    except BaseException:
        _remove_empty(made)
        raise


def check_output_file(flag: str, path: Path, begins_with: bytes = b"") -> None:
    """Check that a file can be written later, without a trace. `begins_with`: what one that is there has to be.

    Raises:
        UsageError: it cannot, or it is something else.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists():
            with open(os.open(path, os.O_RDWR | os.O_NONBLOCK), "rb") as file:
                if not begins_with.startswith(start := file.read(len(begins_with))):
                    raise OSError(errno.EINVAL, f"it is another kind of file, which begins with {start!r}")
        else:
            _check_writable(path.parent)
    except OSError as exc:
        raise UsageError(f"{flag} {path}: it cannot be written: {exc.strerror}") from exc


def _missing(folder: Path | None) -> list[Path]:
    """Return what is not there of a folder and those above it, outer first."""
    if folder is None:
        return []
    return [each for each in reversed((folder, *folder.parents)) if not os.path.lexists(each)]


def _check_writable(folder: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".toolcell-", dir=folder)
    os.close(descriptor)
    os.unlink(name)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for each in reversed(folders):
            each.rmdir()
