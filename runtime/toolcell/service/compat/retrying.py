"""When a request that failed may be sent again, and after how long."""

from __future__ import annotations

import enum
import random
from typing import Final

import httpx

BACKOFF_MOST_S: Final = 60.0
JITTER: Final = 0.1
"""Of the delay, so that clients that failed together do not come back together."""


class Failure(enum.Enum):
    """What a failed attempt says about the script."""

    NOT_STARTED = "it has not started"
    UNKNOWN = "it may have run"
    FINAL = "sending it again cannot help"


def failure_of(problem: httpx.Response | Exception) -> Failure:
    """Say what an answer, or the lack of one, means."""
    match problem:
        case httpx.Response(status_code=503):
            return Failure.NOT_STARTED
        case httpx.Response(status_code=status):
            return Failure.UNKNOWN if status >= 500 else Failure.FINAL
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return Failure.NOT_STARTED
        case httpx.TimeoutException() | httpx.NetworkError() | httpx.RemoteProtocolError():
            return Failure.UNKNOWN
    return Failure.FINAL


def delay_s(attempt: int, first_s: float, retry_after: str | None, chance: float | None = None) -> float:
    """Return how long to wait after attempt number `attempt`, counting from 1. `chance`: from 0 to 1."""
    own = first_s * 2 ** (attempt - 1)
    asked = float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdigit() else 0.0
    chance = random.random() if chance is None else chance
    return float(min(max(own, asked), BACKOFF_MOST_S) * (1 + JITTER * chance))
