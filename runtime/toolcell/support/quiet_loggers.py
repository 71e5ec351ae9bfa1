"""Loggers of a library that would log what nobody may read, kept quiet in one task."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_QUIET: ContextVar[frozenset[str]] = ContextVar("toolcell_quiet_loggers", default=frozenset())


def _may_log(record: logging.LogRecord) -> bool:
    return record.name not in _QUIET.get()


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Let these loggers log nothing in this task until the block ends. Other tasks are not concerned."""
    for name in names:
        logging.getLogger(name).addFilter(_may_log)  # adding it again changes nothing
    token = _QUIET.set(_QUIET.get().union(names))
    try:
        yield
    finally:
        _QUIET.reset(token)
