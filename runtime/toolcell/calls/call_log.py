"""What Python's log says of a call: bounded, on one line, and without the run's secrets."""

from __future__ import annotations

import logging

from toolcell.calls.call import Call
from toolcell.calls.result import Status, ToolResult
from toolcell.calls.values import bounded_json
from toolcell.support.log import logger_of
from toolcell.support.text import one_line

logger = logger_of("toolcell.tools")

MAX_LOGGED_CHARS = 500
MAX_REDACTED_CHARS = 20_000
"""Looked through for secrets to show `MAX_LOGGED_CHARS` of it. A secret that is cut in two here is not shown."""

MAX_NAME_CHARS = 80


def log_start(call: Call) -> None:
    """Log a call that begins."""
    logger.info("tool %s started: %s", _name(call), args_for_log(call))


def log_end(call: Call, result: ToolResult) -> None:
    """Log how a call ended."""
    duration_ms = result.meta.duration_ms
    if result.is_error:
        message = one_line(result.message, MAX_LOGGED_CHARS)
        level = logging.INFO if result.status is Status.CANCELLED else logging.WARNING
        logger.log(level, "tool %s failed after %.1f ms: %s", _name(call), duration_ms, message)
    elif result.status is Status.PENDING:
        logger.info("tool %s started (async) after %.1f ms", _name(call), duration_ms)
    else:
        logger.info("tool %s completed in %.1f ms, %d characters", _name(call), duration_ms, len(result.output))


def args_for_log(call: Call) -> str:
    """Return the beginning of what a call was made with."""
    args = call.raw_args
    text = args[:MAX_REDACTED_CHARS] if isinstance(args, str) else bounded_json(args, MAX_REDACTED_CHARS, "")
    return one_line(call.run.secrets.redact(text), MAX_LOGGED_CHARS)


def _name(call: Call) -> str:
    return one_line(call.name, MAX_NAME_CHARS)
