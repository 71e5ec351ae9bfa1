"""`logger_of`: a logger whose records say each text of somebody else on one line.

A line break in the name of a tool, or in what an exception says, would begin a line that looks like another record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from toolcell.support.text import as_one_line, for_terminal

_FORMATTER = logging.Formatter()

# Calls that fail are the model's business first: a program that configures no logging is not shown them.
logging.getLogger("toolcell").addHandler(logging.NullHandler())


def logger_of(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.addFilter(_on_one_line)  # adding it again changes nothing
    return logger


def _on_one_line(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, str) and not record.msg.isprintable():
        record.msg = as_one_line(record.msg)
    if isinstance(record.args, tuple):
        record.args = tuple(map(_loggable, record.args))
    if record.exc_info and not record.exc_text:
        trace = for_terminal(_FORMATTER.formatException(record.exc_info))
        record.exc_text = "\n".join(f"  {line}" for line in trace.split("\n"))
    return True


def _loggable(value: Any) -> Any:
    """Return what `%s` shows of a value. Numbers stay what they are."""
    if isinstance(value, str | BaseException):
        text = str(value)
        return value if text.isprintable() else as_one_line(text)
    return value


# Loggers of a library that would log what nobody may read, kept quiet in one task.

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
