"""What every call to a model needs: retries, error translation, an SDK client, and a stream read to its end."""

from __future__ import annotations

import importlib
import inspect
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Self, TypeVar

import anyio

from toolcell.agents.providers.provider import DEFAULT_OPTIONS, Message, ModelResponse, OnText, ProviderError
from toolcell.errors import UsageError
from toolcell.tools import ToolDefinition

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
    status, headers = getattr(exc, "status_code", None), _headers_of(exc)
    body = getattr(exc, "body", None)
    is_transient = _is_transient(body.get("error", body) if isinstance(body, Mapping) else body)
    if isinstance(status, int):
        is_retryable = _should_retry(headers, status in TRANSIENT_STATUSES or (status < 400 and is_transient))
        return ProviderError(str(exc), status=status, retryable=is_retryable, retry_after_s=_retry_after_s(headers))
    is_connection = isinstance(exc, ConnectionError | TimeoutError) or type(exc).__name__ in _CONNECTION_ERRORS
    said = f"{exc}: {body[:500]}" if isinstance(body, str) and body not in str(exc) else str(exc)
    host = _host_of(exc) if is_connection else ""
    at = f" at {host}" if host else ""
    return ProviderError(f"{type(exc).__name__}{at}: {said}", retryable=is_connection or is_transient)


def _host_of(exc: Exception) -> str:
    """Return host and port of the request that failed, without a password; empty where the exception has no request."""
    try:
        request = getattr(exc, "request", None)
    except RuntimeError:  # of httpx, where there is none
        return ""
    netloc = getattr(getattr(request, "url", None), "netloc", b"")
    return netloc.decode() if isinstance(netloc, bytes) else ""


def _headers_of(exc: Exception) -> Mapping[str, str]:
    headers: Mapping[str, str] | None = getattr(getattr(exc, "response", None), "headers", None)
    return headers if headers is not None else {}


def reported_error(error: Any) -> ProviderError:
    """Return the error that the body of an answer with status 200 reports: text, or fields such as `message`."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    message, names = fields.get("message"), ", ".join(str(fields[key]) for key in ("type", "code") if fields.get(key))
    text = f"the model's server answered with an error: {message or 'no message'}"
    return ProviderError(f"{text} ({names})" if names else text, retryable=_is_transient(error))


def _is_transient(error: Any) -> bool:
    """Return whether an error passes, by the names and the status that its body gives it, under both APIs."""
    if not isinstance(error, Mapping):
        return False
    found = {str(error.get(key)) for key in ("type", "code", "status")}
    return not TRANSIENT_ERRORS.isdisjoint(found) or not {str(each) for each in TRANSIENT_STATUSES}.isdisjoint(found)


def _should_retry(headers: Mapping[str, str], default: bool) -> bool:
    """Return what the server says about another attempt, or else `default`."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").lower(), default)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait that the server asks for: milliseconds, seconds or a date."""
    if (wait_s := _number(headers.get("retry-after-ms"))) is not None:
        return wait_s / 1000
    text = headers.get("retry-after")
    if text is None:
        return None
    if (wait_s := _number(text)) is not None:
        return wait_s
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, until.timestamp() - time.time())


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


class SdkProvider(ABC):
    """Sends requests through an SDK's client. `async with` closes the client's connections, and so does `aclose()`."""

    package: ClassVar[str]
    """Name of the package of the SDK, which is also the name of toolcell's extra."""
    client_class: ClassVar[str]
    stream_options: ClassVar[Mapping[str, Any]] = {"stream": True}
    """What a request has besides when its answer is to be streamed."""

    def __init__(self, client: Any = None, *, supports_images: bool = True, **client_options: Any) -> None:
        # The loop retries. Retries in the SDK as well would multiply the attempts.
        self._client = (client or self._new_client(client_options)).with_options(max_retries=0)
        self.supports_images = supports_images

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """Request one response."""
        create = self.create_method(self._client)
        return self.read_answer(await create(**self.request(messages, tools, model, known_options(create, options))))

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_text: OnText,
        /,
    ) -> ModelResponse:
        """Request one response as a stream."""
        create = self.create_method(self._client)
        request = self.request(messages, tools, model, known_options(create, options))
        return await self.accumulator(on_text, tools).read(create(**request, **self.stream_options))

    @abstractmethod
    def create_method(self, client: Any) -> Callable[..., Awaitable[Any]]:
        """Return the client's method that sends a request."""

    @abstractmethod
    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request into the method's keyword arguments."""

    @abstractmethod
    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate an answer."""

    @abstractmethod
    def accumulator(self, on_text: OnText, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        """Return what builds the response from a stream."""

    @classmethod
    def _new_client(cls, options: Mapping[str, Any]) -> Any:
        try:
            sdk = importlib.import_module(cls.package)
        except ImportError as exc:
            needs = f"{cls.__name__} needs the {cls.package} package: pip install 'toolcell[{cls.package}]'"
            raise UsageError(needs) from exc
        try:
            return getattr(sdk, cls.client_class)(**options)
        except Exception as exc:  # no key, or an option that the SDK does not know
            said = str(exc).replace("\n", " ")
            raise UsageError(f"{cls.__name__} cannot be made: {said}; write {cls.__name__}(api_key=...)") from exc

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def known_options(method: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` as keyword arguments of `method`.

    SDKs add and remove parameters: an option that `method` does not know goes into the request's body. What nobody
    asked for is not sent.
    """
    if options is DEFAULT_OPTIONS:
        return {}
    parameters = inspect.signature(method).parameters.values()
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    known = {name: value for name, value in options.items() if name in names}
    unknown = {name: value for name, value in options.items() if name not in names}
    if unknown:
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
