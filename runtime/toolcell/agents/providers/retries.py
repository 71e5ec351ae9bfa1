"""When a request to a model is sent again: which failures pass, and how long to wait."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import anyio

from toolcell.agents.providers.provider import ProviderError
from toolcell.errors import Misconfigured

T = TypeVar("T")

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""529 is Anthropic's 'overloaded'. 401 and 403 are not here: the same key gets the same refusal."""

TRANSIENT_ERRORS = frozenset(
    {
        "overloaded_error",
        "api_error",
        "rate_limit_error",
        "timeout_error",  # Anthropic
        "server_error",
        "rate_limit_exceeded",
        "server_overloaded",
        "timeout",  # OpenAI
    }
)
"""Passing errors by the name in their body: a stream that has begun with status 200 reports them so."""

MISUSE_STATUSES = frozenset({401, 403, 404})
"""The key, the model's name or the address is wrong: the developer has to change something."""

_CONNECTION_ERRORS = frozenset({"APIConnectionError", "APITimeoutError", "ConnectError", "ReadError", "ReadTimeout"})

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is sent, and how long to wait in between."""

    attempts: int = 3
    """Requests in all. With 1 there is no retry."""
    base_s: float = 0.5
    """Wait before the second attempt. Each later wait is twice as long."""
    max_s: float = 30.0
    """Longest wait, also when the provider asks for more."""
    jitter: float = 0.25
    """Fraction of the wait added at random, so that many clients do not retry at the same moment."""
    sleep: Sleep = anyio.sleep

    def wait_s(self, attempt: int, error: ProviderError) -> float:
        """Return the seconds to wait after `attempt`. The provider's `Retry-After` comes first."""
        if error.retry_after_s is not None:
            return min(error.retry_after_s, self.max_s)
        wait_s: float = min(self.base_s * 2 ** (attempt - 1), self.max_s)
        return wait_s * (1 + self.jitter * random.random())


async def send_with_retries(policy: RetryPolicy, send: Callable[[], Awaitable[T]]) -> T:
    """Send a request, and send it again while it fails for a passing reason.

    Raises:
        ProviderError: the last attempt failed, or the failure is permanent. Its cause is the provider's exception.
    """
    attempt = 1
    while True:
        try:
            return await send()
        except Misconfigured:
            raise
        except Exception as exc:
            error = as_provider_error(exc)
            if not error.retryable or attempt >= policy.attempts:
                raise error from (exc if error is not exc else exc.__cause__)
        await policy.sleep(policy.wait_s(attempt, error))
        attempt += 1


def as_provider_error(exc: Exception) -> ProviderError:
    """Translate any SDK's exception. Uses its HTTP status, headers and body, or else the name of its class."""
    if isinstance(exc, ProviderError):
        return exc
    status = getattr(exc, "status_code", None)
    headers: Mapping[str, str] = getattr(getattr(exc, "response", None), "headers", None) or {}
    reported = _error_in(getattr(exc, "body", None))
    is_transient = _is_transient(reported)
    words = reported.get("message", reported) if isinstance(reported, Mapping) else reported
    said = f"{exc}: {str(words)[:500]}" if words and str(words) not in str(exc) else str(exc)
    if isinstance(status, int):
        # The 429 of an account without credit: asking again does not help.
        is_used_up = isinstance(reported, Mapping) and "insufficient_quota" in (
            reported.get("code"),
            reported.get("type"),
        )
        is_passing = (status in TRANSIENT_STATUSES and not is_used_up) or (status < 400 and is_transient)
        is_retryable = {"true": True, "false": False}.get(headers.get("x-should-retry", "").lower(), is_passing)
        wait_s = _retry_after_s(headers)
        wait_s = _retry_delay_s(reported) if wait_s is None else wait_s
        return ProviderError(said, status=status, retryable=is_retryable, retry_after_s=wait_s)
    if isinstance(exc, json.JSONDecodeError):
        return ProviderError(f"the model's server sent what is not JSON: {exc}", retryable=True)
    is_connection = isinstance(exc, ConnectionError | TimeoutError) or type(exc).__name__ in _CONNECTION_ERRORS
    host = _host_of(exc) if is_connection else ""
    at = f" at {host}" if host else ""
    return ProviderError(
        f"{type(exc).__name__}{at}: {said}",
        retryable=is_connection or is_transient,
        retry_after_s=_retry_delay_s(reported),
    )


def _host_of(exc: Exception) -> str:
    """Return host and port of the request that failed, without a password; empty where the exception has no request."""
    try:
        request = getattr(exc, "request", None)
    except RuntimeError:  # of httpx, where there is none
        return ""
    netloc = getattr(getattr(request, "url", None), "netloc", b"")
    return netloc.decode() if isinstance(netloc, bytes) else ""


def reported_error(error: Any) -> ProviderError:
    """Return the error that the body of an answer with status 200 reports: text, or fields such as `message`."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    message, names = fields.get("message"), ", ".join(str(fields[key]) for key in ("type", "code") if fields.get(key))
    text = f"the model's server answered with an error: {message or 'no message'}"
    return ProviderError(
        f"{text} ({names})" if names else text, retryable=_is_transient(error), retry_after_s=_retry_delay_s(error)
    )


def _error_in(body: Any) -> Any:
    """Return the error of a body: under `error`, and with Gemini's compatible end in a list."""
    first = body[0] if isinstance(body, list) and body else body
    return first.get("error", first) if isinstance(first, Mapping) else first


def _retry_delay_s(error: Any) -> float | None:
    """Return the wait that Gemini asks for in its error's details.

    Shape: {"@type": ".../google.rpc.RetryInfo", "retryDelay": "34.07s"}.
    """
    details = error.get("details") if isinstance(error, Mapping) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, Mapping) and isinstance(delay := detail.get("retryDelay"), str):
            return _number(delay.removesuffix("s"))
    return None


def _is_transient(error: Any) -> bool:
    """Return whether an error passes, by the names and the status that its body gives it, under both APIs."""
    if not isinstance(error, Mapping):
        return False
    found = {str(error.get(key)) for key in ("type", "code", "status")}
    return not TRANSIENT_ERRORS.isdisjoint(found) or not {str(each) for each in TRANSIENT_STATUSES}.isdisjoint(found)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait that the server asks for: milliseconds, seconds or a date."""
    if (wait_s := _number(headers.get("retry-after-ms"))) is not None:
        return wait_s / 1000
    text = headers.get("retry-after", "")
    if (wait_s := _number(text)) is not None:
        return wait_s
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None
