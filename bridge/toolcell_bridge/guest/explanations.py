"""Readable refusals for what the kernel refuses anyway.

Seccomp turns every attempt to execute a program into EPERM, and some library functions hide that behind a return
code. These replacements say it in words. They are manners, not a wall: a script may take them away and gains nothing.
"""

from __future__ import annotations

import _posixsubprocess  # type: ignore[import-not-found, unused-ignore]
import errno
import os
from typing import Any, NoReturn

MESSAGE = "blocked: use call_tool() instead; nothing can be executed in the sandbox"

EXECUTES = ("system", "posix_spawn", "posix_spawnp", "execv", "execve")


def refuse(*_args: Any, **_options: Any) -> NoReturn:
    """Stand in for a function that would start a program."""
    raise PermissionError(errno.EPERM, MESSAGE)


def explain() -> None:
    """Put the refusals in place. Before `subprocess` is first imported, which copies one of them."""
    for name in EXECUTES:
        setattr(os, name, refuse)
    _posixsubprocess.fork_exec = refuse


def install_package(name: str) -> None:
    """Make sure a package can be imported.

    There is no network in a sandbox: what can be imported is what its host listed.

    Raises:
        RuntimeError: it cannot; the message says who can change that.
    """
    import importlib.metadata
    import importlib.util

    wanted = str(name).partition("=")[0].partition("<")[0].partition(">")[0].partition("[")[0].strip()
    try:
        if importlib.util.find_spec(wanted.replace("-", "_")) is not None:
            return
        importlib.metadata.distribution(wanted)
    except (ImportError, ValueError):
        raise RuntimeError(
            f"pip install {name} failed: a sandbox has no network; the program that runs this script chooses its "
            f"packages, with Runtime(packages=[{wanted!r}])"
        ) from None
