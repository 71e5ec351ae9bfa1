"""`make_private_folder`: a folder that nobody else may open, with those above it that were missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, each for its owner alone, whatever the umask is.

    `mkdir(mode=, parents=True)` gives the mode to the last one only. What is there stays as it is.

    Raises:
        OSError: one cannot be made, or is not a folder.
    """
    if folder.is_dir():
        return
    for each in reversed((folder, *folder.parents)):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            pass
        except OSError:
            if not each.is_dir():  # such as a file system that can only be read
                raise
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
