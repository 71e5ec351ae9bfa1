"""One name for each folder of a sandbox that links lead to, in a container that it shares.

The kernel knows the folders by a name of their own for each sandbox. A script that keeps such a name, in a session that
moves on to another sandbox, would not find it there.
"""

from __future__ import annotations

import os
import posixpath
from typing import Any


def use_links(real: str, named: str) -> None:
    """Have Python say `named` where the kernel says `real`, and the same for all that is in it."""
    getcwd, realpath = os.getcwd, posixpath.realpath

    def by_link(path: Any) -> Any:
        old, new = (os.fsencode(real), os.fsencode(named)) if isinstance(path, bytes) else (real, named)
        rest = path[len(old) :]
        return new + rest if path.startswith(old) and rest[:1] in (rest[:0], new[:1]) else path

    def getcwd_by_link() -> str:
        return str(by_link(getcwd()))

    def realpath_by_link(filename: Any, **options: Any) -> Any:
        return by_link(realpath(filename, **options))

    os.getcwd, os.getcwdb = getcwd_by_link, lambda: os.fsencode(getcwd_by_link())
    posixpath.realpath = realpath_by_link
