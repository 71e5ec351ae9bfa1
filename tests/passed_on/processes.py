"""The processes of one test: those of other tests, such as a host that a whole session of tests attacks, may go on."""

from __future__ import annotations

import psutil

_others: set[psutil.Process] = set()


def begin() -> None:
    """Take note of the processes that are there before a test."""
    _others.clear()
    _others.update(psutil.Process().children())


def own_children() -> list[psutil.Process]:
    """Return the processes below this one that have come since, and those below them."""
    own = [each for each in psutil.Process().children() if each not in _others]
    return [*own, *(below for each in own for below in each.children(recursive=True))]
