"""What every call to a model needs: retries, error translation, an SDK client, and a stream read to its end."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import anyio

from toolcell.agents.providers.provider import DEFAULT_OPTIONS, ModelResponse, OnText, ProviderError

T = TypeVar("T")

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""529 is Anthropic's 'overloaded'. 401 and 403 are not here: the same key gets the same refusal."""

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
        except Exception as exc:
            error = as_provider_error(exc)
            if not error.retryable or attempt >= policy.attempts:
                raise error from (exc if error is not exc else exc.__cause__)
        await policy.sleep(policy.wait_s(attempt, error))
        attempt += 1


def as_provider_error(exc: Exception) -> ProviderError:
    """Translate any SDK's exception. Uses its HTTP status and headers, or else the name of its class."""
    if isinstance(exc, ProviderError):
        return exc
    status = getattr(exc, "status_code", None)
    if isinstance(status, int):
        wait_s = _retry_after_s(getattr(exc, "response", None))
        return ProviderError(str(exc), status=status, retryable=status in TRANSIENT_STATUSES, retry_after_s=wait_s)
    is_connection = isinstance(exc, ConnectionError | TimeoutError) or type(exc).__name__ in _CONNECTION_ERRORS
    return ProviderError(f"{type(exc).__name__}: {exc}", retryable=is_connection)


def _retry_after_s(response: Any) -> float | None:
    headers = getattr(response, "headers", None)
    text = headers.get("retry-after") if headers is not None else None
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:  # The header may also hold a date. That is rare, and the usual wait is good enough.
        return None


class SdkProvider:
    """Owns an SDK's client. `async with` closes the client's connections, and so does `aclose()`."""

    def __init__(self, client: Any, supports_images: bool) -> None:
        # The loop retries. Retries in the SDK as well would multiply the attempts.
        self._client = client.with_options(max_retries=0)
        self.supports_images = supports_images

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def known_options(method: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` as keyword arguments of `method`.

    SDKs add and remove parameters. An option that `method` does not know goes into the request's body. Only
    `DEFAULT_OPTIONS` that `method` does not know are dropped, because no caller asked for them.
    """
    parameters = inspect.signature(method).parameters.values()
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    known = {name: value for name, value in options.items() if name in names}
    unknown = {name: value for name, value in options.items() if name not in names}
    if unknown and options is not DEFAULT_OPTIONS:
        known["extra_body"] = {**unknown, **(known.get("extra_body") or {})}
    return known


class StreamAccumulator(ABC):
    """Builds one `ModelResponse` from the items of a stream, and passes text on as it arrives."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
        self._has_shown_text = False

    async def read(self, opening: Awaitable[Any]) -> ModelResponse:
        """Open the stream, read it to its end, and return the response.

        Raises:
            ProviderError: the stream failed or ended early. It is not retryable once text was passed on: the reader
                would see that text twice.
        """
        try:
            async with await opening as items:
                async for item in items:
                    self.add(item)
        except Exception as exc:
            error = as_provider_error(exc)
            error.retryable = error.retryable and not self._has_shown_text
            raise error from exc
        if not self.is_complete:
            raise ProviderError("the model's stream ended before its answer did", retryable=not self._has_shown_text)
        return self.response()

    def show(self, text: str) -> None:
        """Pass a piece of text on."""
        self._has_shown_text = True
        self._on_text(text)

    @abstractmethod
    def add(self, item: Any) -> None:
        """Take in one item of the stream."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """True when the stream held everything up to its end."""

    @abstractmethod
    def response(self) -> ModelResponse:
        """Return the response. Only valid when the stream is complete."""
