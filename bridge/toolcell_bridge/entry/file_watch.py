"""Measure the files of a sandbox whose workspace is not a file system of its own, so the kernel does not bound it."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

INTERVAL_MS = 250
"""How often the files of a sandbox are measured."""

BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system."""

OWN_FOLDERS = 4
"""The sandbox's home and the folders that are made in it before a script runs."""


@dataclass(frozen=True, slots=True)
class FileRoom:
    """What the files of one sandbox may take."""

    disk_bytes: int
    inodes: int


def excess(directory: str, room: FileRoom) -> str:
    """Return what is too much in `directory`, or an empty string. The script may change it meanwhile.

    Links are not followed and no mode is changed: the script could put a link to a file of the host in the way.
    """
    used_bytes = count = 0
    folders = [os.fsencode(directory)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    status = entry.stat(follow_symlinks=False)
                    used_bytes += status.st_blocks * BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if used_bytes > room.disk_bytes:
                        return f"its files took more than disk_bytes={room.disk_bytes} bytes"
                    if count > room.inodes + OWN_FOLDERS:
                        return f"it had more than inodes={room.inodes} files and folders"
        except FileNotFoundError:  # removed or renamed meanwhile
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "its folders were nested too deep to be measured"
            if error.errno != errno.ENOTDIR:
                return f"its files could not be measured: {error.strerror}"
    return ""
