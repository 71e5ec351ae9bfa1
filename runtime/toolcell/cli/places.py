"""Folders and files that a command writes: what can be wrong with them is found out before anything runs."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from toolcell.errors import UsageError
from toolcell.results import OutputFile

MOST_OF_A_NAME: Final = 1000
"""Files in a folder that begin as the name that a script has chosen."""


@contextmanager
def output_folder(folder: Path | None) -> Iterator[None]:
    """Make the folder of `--output-dir`. What was made and stays empty is removed at the end.

    Raises:
        UsageError: it cannot be made, or no file can be written there.
    """
    made = _missing(folder)
    try:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _check_writable(folder)
            except OSError as exc:
                raise UsageError(f"--output-dir {folder}: no file can be written there: {exc.strerror}") from exc
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
        if path.is_file():
            with open(path, "rb+") as file:
                if not begins_with.startswith(start := file.read(len(begins_with))):
                    raise OSError(errno.EINVAL, f"it is another kind of file, which begins with {start!r}")
        elif path.exists():
            if begins_with:
                raise OSError(errno.EINVAL, "it is not a regular file")
        else:
            _check_writable(path.parent)
    except OSError as exc:
        raise UsageError(f"{flag} {path}: it cannot be written: {exc.strerror}") from exc


def save_files(files: tuple[OutputFile, ...], folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Write the files that a script returned below `folder`; return their paths by name, and what was not written.

    The script chose the names: none may leave the folder or be written through a link, and nothing that is there is
    overwritten: `chart.png` is then saved as `chart.1.png`.
    """
    saved: dict[str, Path] = {}
    problems: list[str] = []
    for file in files:
        if file.data is not None:
            try:
                saved[file.name] = _save(file.name, file.data, folder)
            except UsageError as exc:
                problems.append(str(exc))
    return saved, problems


def _save(name: str, data: bytes, folder: Path) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or set(parts) & {"..", ""} or "\\" in name or "\0" in name:
        raise UsageError(f"the script returned a file named {name!r}, which leaves {folder}: not saved")
    place = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts[:-1]:
            place /= part
            if place.is_symlink():
                raise UsageError(f"{place} is a link, which may leave {folder}: {name!r} not saved")
            place.mkdir(exist_ok=True)
        return _write_new(place, parts[-1], data)
    except OSError as exc:
        raise UsageError(f"cannot save {name!r} in {folder}: {exc.strerror}") from exc


def _write_new(place: Path, name: str, data: bytes) -> Path:
    """Write a file under the first name that is free."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix
    for number in range(MOST_OF_A_NAME):
        target = place / (f"{stem}.{number}{suffix}" if number else name)
        try:
            descriptor = os.open(target, flags, 0o644)
        except FileExistsError:
            continue
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        return target
    raise OSError(errno.EEXIST, f"{MOST_OF_A_NAME} files of this name are there already")


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
