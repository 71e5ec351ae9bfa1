"""Points in time as people write and read them, in this machine's time zone."""

from __future__ import annotations

import re
import time
from datetime import datetime

from toolcell.errors import UsageError

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse(text: str) -> int:
    """Nanoseconds since the epoch of a date, a date and time, or a time ago such as 90m or 2d.

    Raises:
        UsageError: it is none of these.
    """
    if match := _AGO.fullmatch(text.strip()):
        return time.time_ns() - int(float(match[1]) * _SECONDS[match[2]] * 1e9)
    try:
        return int(datetime.fromisoformat(text.strip()).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError) as exc:
        raise UsageError(f"{text!r} is no time such as 2026-11-21, 2026-11-21T14:30, 90m or 2d") from exc


def show(at_ns: int, *, with_fraction: bool = False) -> str:
    """A point in time, in local time."""
    at = datetime.fromtimestamp(at_ns / 1e9)
    return at.strftime("%Y-%m-%d %H:%M:%S") + (f".{at.microsecond // 1000:03d}" if with_fraction else "")
