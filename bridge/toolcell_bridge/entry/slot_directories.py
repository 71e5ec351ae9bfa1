"""Directories for the files of sandboxes that have no mount namespace: one sandbox uses a directory at a time."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

RELEASE_INTERVAL_S = 0.002
RELEASE_CHECKS = 100
"""How often and how long to wait until the kernel has released the files of an ended sandbox."""

MOST = 65_536
"""Sandboxes that a host may have at once."""


@dataclass(frozen=True, slots=True)
class SlotDirectory:
    """A directory for the files of one sandbox at a time."""

    path: str
    room: tuple[int, int] | None = None
    """Free blocks and inodes while it is not used; None when it is not a file system of its own."""


class SlotDirectories(Protocol):
    """Where a zygote gets them."""

    @property
    def count(self) -> int:
        """How many sandboxes can have one at the same time."""
        ...

    def take(self) -> SlotDirectory:
        """Return one that nobody uses.

        Raises:
            OSError: there is none.
        """
        ...

    def put_back(self, directory: SlotDirectory, is_clean: bool) -> None:
        """Take it back after its sandbox has ended. `is_clean`: nothing is left in it."""
        ...


class FixedDirectories:
    """A given number of directories, each a file system of its own where the container has mounted one."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._free = [SlotDirectory(path, room_in(path)) for path in paths]
        self.count = len(self._free)

    def take(self) -> SlotDirectory:
        """Return the directory that has been free for longest and has all its room.

        The kernel releases the inodes of an ended guest's Landlock domain some milliseconds after the guest.
        """
        for _ in range(RELEASE_CHECKS):
            for directory in self._free:
                if room_in(directory.path) == directory.room:
                    self._free.remove(directory)
                    return directory
            if not self._free:
                break
            select.select((), (), (), RELEASE_INTERVAL_S)
        raise OSError("no slot is free")

    def put_back(self, directory: SlotDirectory, is_clean: bool) -> None:
        """Keep it for another sandbox. One that is not clean is not used again."""
        if is_clean:
            self._free.append(directory)


class FreshDirectories:
    """A new directory below `base` for each sandbox."""

    count = MOST

    def __init__(self, base: str) -> None:
        self._base = base
        self._number = 0

    def take(self) -> SlotDirectory:
        """Make one."""
        self._number += 1
        path = f"{self._base}/{self._number}"
        os.mkdir(path, 0o700)
        return SlotDirectory(path)

    def put_back(self, directory: SlotDirectory, is_clean: bool) -> None:
        """Remove it. One that is not clean is left to the host, which removes `base`."""
        if is_clean:
            os.rmdir(directory.path)


def room_in(path: str) -> tuple[int, int] | None:
    """Return the free blocks and inodes of the file system mounted at `path`; None when none is mounted there."""
    if not os.path.ismount(path):
        return None
    room = os.statvfs(path)
    return room.f_bfree, room.f_ffree
