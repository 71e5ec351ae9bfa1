"""Loggers of a library that would log what nobody may read, kept quiet in one task."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

_QUIET: ContextVar[frozenset[str]] = ContextVar("toolcell_quiet_loggers", default=frozenset())


def _may_log(record: logging.LogRecord) -> bool:
    return record.name not in _QUIET.get()


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Let these loggers log nothing in this task until the block ends. Other tasks are not concerned."""
    token = _quieten(names)
    try:
        yield
    finally:
        _QUIET.reset(token)


def quiet_from_here(*names: str) -> None:
    """Let these loggers log nothing in the rest of this task."""
    _quieten(names)


def _quieten(names: Iterable[str]) -> Token[frozenset[str]]:
    for name in names:
        logging.getLogger(name).addFilter(_may_log)  # adding it again changes nothing
    return _QUIET.set(_QUIET.get().union(names))
