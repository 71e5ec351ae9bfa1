"""Asking a model again when it was busy; never when it said no."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from toolcell.agents.providers.provider import ProviderError

T = TypeVar("T")

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""529 is Anthropic's 'overloaded'. 401 and 403 are not here: asking again with the same key changes nothing."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long apart."""

    attempts: int = 3
    """In all; 1 never asks again."""
    base_s: float = 0.5
    max_s: float = 30.0
    jitter: float = 0.25
    """Fraction of the wait added at random, so that many clients do not come back at once."""
    sleep: Sleep = anyio.sleep

    def wait_s(self, attempt: int, error: ProviderError) -> float:
        """Seconds before the next attempt; what the provider asked for, if it did."""
        if error.retry_after_s is not None:
            return min(error.retry_after_s, self.max_s)
        wait_s: float = min(self.base_s * 2 ** (attempt - 1), self.max_s)
        return wait_s * (1 + self.jitter * random.random())


async def ask(policy: RetryPolicy, request: Callable[[], Awaitable[T]]) -> T:
    """Make a request, again while its failure is transient.

    Raises:
        ProviderError: it failed for good; the provider's own exception is its cause.
    """
    attempt = 1
    while True:
        try:
            return await request()
        except Exception as exc:
            error = as_provider_error(exc)
            if not error.retryable or attempt >= policy.attempts:
                raise error from (exc if error is not exc else exc.__cause__)
        await policy.sleep(policy.wait_s(attempt, error))
        attempt += 1


def as_provider_error(exc: Exception) -> ProviderError:
    """Any SDK's exception, by what they have in common: a status, headers, or the name of a connection failure."""
    if isinstance(exc, ProviderError):
        return exc
    status = getattr(exc, "status_code", None)
    if isinstance(status, int):
        retry_after_s = _retry_after_s(getattr(exc, "response", None))
        return ProviderError(
            str(exc), status=status, retryable=status in TRANSIENT_STATUSES, retry_after_s=retry_after_s
        )
    is_connection = isinstance(exc, ConnectionError | TimeoutError) or type(exc).__name__ in _CONNECTION_ERRORS
    return ProviderError(f"{type(exc).__name__}: {exc}", retryable=is_connection)


_CONNECTION_ERRORS = frozenset({"APIConnectionError", "APITimeoutError", "ConnectError", "ReadError", "ReadTimeout"})


def _retry_after_s(response: Any) -> float | None:
    headers = getattr(response, "headers", None)
    text = headers.get("retry-after") if headers is not None else None
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:  # a date: rare, and the usual backoff does as well
        return None
