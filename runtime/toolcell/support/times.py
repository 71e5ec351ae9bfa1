"""Read a moment that a person wrote (a date, a date and time, or a time ago), and write one for programs."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, tzinfo
from typing import Final

from toolcell.errors import UsageError

_LENGTH: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds_of(text: str) -> float | None:
    """Read a length of time such as 90m or 2d; return None when the text has another form."""
    match = _LENGTH.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] if match is not None else None


def parse_time(text: str, zone: tzinfo | None = None) -> int:
    """Read a date, a date and time, or a time ago such as 90m or 2d; return nanoseconds since the epoch, at least 0.

    `zone`: of a date or time that names none; None for the machine's own.

    Raises:
        UsageError: the text has another form.
    """
    text = text.strip()
    if (ago_s := seconds_of(text)) is not None:
        return max(0, time.time_ns() - int(ago_s * 1e9))
    try:
        at = datetime.fromisoformat(text)
        return max(0, int((at if at.tzinfo else at.replace(tzinfo=zone)).timestamp() * 1e9))
    except (ValueError, OverflowError, OSError) as exc:
        where = "" if zone is None else f" ({zone})"
        raise UsageError(f"{text!r} is not a time: want 2026-11-21, 2026-11-21T14:30{where}, or 90m or 2d ago") from exc


def time_of(at_ns: int) -> str:
    """Return a time in UTC as ISO 8601, with microseconds and zone. Times that no calendar has become the nearest."""
    return datetime.fromtimestamp(min(at_ns // 1000, _LAST_US) / 1e6, UTC).isoformat(timespec="microseconds")


_LAST_US: Final = 253_402_300_799 * 1_000_000
"""The end of the year 9999."""
