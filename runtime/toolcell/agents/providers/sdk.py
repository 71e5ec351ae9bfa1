"""What every call to a model through an SDK needs: its client, and a stream read to its end."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar, Self

from anyio.lowlevel import current_token

from toolcell.agents.providers.provider import (
    DEFAULT_OPTIONS,
    Message,
    MessageUpdate,
    ModelResponse,
    OnUpdate,
    ProviderError,
)
from toolcell.agents.providers.retries import as_provider_error
from toolcell.errors import Misconfigured, UsageError
from toolcell.support.lazy import needed
from toolcell.support.text import whole_characters
from toolcell.tools import ToolDefinition


async def _until_the_loop_ends(client: Any) -> AsyncGenerator[Any, None]:
    """Yield a client each time, and close it with the event loop, which finishes its asynchronous generators."""
    try:
        while True:
            yield client
    finally:
        await client.close()


class SdkProvider(ABC):
    """Sends requests through an SDK's client. `async with` closes its connections as `aclose()` does."""

    package: ClassVar[str]
    """Name of the package of the SDK, which is also the name of toolcell's extra."""
    client_class: ClassVar[str]
    create_method: ClassVar[str]
    """The client's method that sends a request, by its path."""
    stream_options: ClassVar[Mapping[str, Any]] = {"stream": True}
    """What a request has besides when its answer is to be streamed."""

    def __init__(self, client: Any = None, *, supports_images: bool = True, **client_options: Any) -> None:
        # The loop retries. Retries in the SDK as well would multiply the attempts.
        self._makes_connections = client is None and "http_client" not in client_options
        self._client = (client or self._new_client(client_options)).with_options(max_retries=0)
        self._unused = {"": self._client}  # until the first event loop takes it
        self._clients: dict[Any, Any] = {}  # by event loop
        self.supports_images = supports_images

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any], /
    ) -> ModelResponse:
        """Request one response."""
        create, request = await self._prepared(messages, tools, model, options)
        return self.read_answer(await create(**request))

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        model: str,
        options: Mapping[str, Any],
        on_update: OnUpdate,
        /,
    ) -> ModelResponse:
        """Request one response as a stream."""
        create, request = await self._prepared(messages, tools, model, options)
        return await self.accumulator(on_update, tools).read(create(**request, **self.stream_options))

    async def _prepared(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        if not model:
            raise Misconfigured(f"{type(self).__name__} needs the name of a model: write Agent(provider, model=...)")
        create = attrgetter(self.create_method)(await self._client_here())
        return create, self.request(messages, tools, model, known_options(create, options))

    @abstractmethod
    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request into the method's keyword arguments."""

    @abstractmethod
    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate an answer."""

    @abstractmethod
    def accumulator(self, on_update: OnUpdate, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        """Return what builds the response from a stream."""

    @classmethod
    def _new_client(cls, options: Mapping[str, Any]) -> Any:
        sdk = needed(cls.package, cls.__name__, cls.package)
        try:
            return getattr(sdk, cls.client_class)(**options)
        except Exception as exc:  # no key, or an option that the SDK does not know
            said = str(exc).replace("\n", " ")
            raise UsageError(f"{cls.__name__} cannot be made: {said}; write {cls.__name__}(api_key=...)") from exc

    async def _client_here(self) -> Any:
        """Return the client with connections of this event loop: those of one that has ended fail."""
        if not self._makes_connections:
            return self._client
        if (loop := current_token()) not in self._clients:
            for ended in [each for each, client in [*self._clients.items()] if client.ag_frame is None]:
                self._clients.pop(ended, None)  # another thread may have removed it
            self._clients[loop] = _until_the_loop_ends(self._unused.pop("", None) or self._with_new_connections())
        return await anext(self._clients[loop])

    def _with_new_connections(self) -> Any:
        return self._client.with_options(http_client=import_module(self.package).DefaultAsyncHttpxClient())

    async def aclose(self) -> None:
        """Close the connections of this event loop, for which the next request makes new ones, or your own client.

        Connections of another event loop are closed when that one ends.
        """
        if not self._makes_connections:
            await self._client.close()
        elif (here := self._clients.pop(current_token(), None)) is not None:
            await here.aclose()

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


def fields_of(data: Any) -> Mapping[str, Any]:
    """Return what an object of an SDK was read from, unknown fields included; of anything else nothing.

    Servers send what the SDK's models do not expect, so nothing is validated.
    """
    if isinstance(data, Mapping):
        return data
    if callable(dump := getattr(data, "model_dump", None)):
        dumped: Mapping[str, Any] = dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
        return dumped
    return getattr(data, "__dict__", {})


class StreamAccumulator(ABC):
    """Builds one `ModelResponse` from the items of a stream, and reports what arrives."""

    def __init__(self, on_update: OnUpdate) -> None:
        self._on_update = on_update
        self._has_shown_text = False
        self._halves: dict[tuple[str, str], str] = {}
        """The first half of a character at the end of a text, until the other one comes."""

    async def read(self, opening: Awaitable[Any]) -> ModelResponse:
        """Open the stream, read it to its end, and return the response.

        Raises:
            ProviderError: the stream failed or ended early. It is not retryable once text was reported: the reader
                would see that text twice.
        """
        try:
            async with await opening as items:
                self.opened(items)
                async for item in items:
                    self.add(item)
        except Exception as exc:
            error = as_provider_error(exc)
            error.retryable = error.retryable and not self._has_shown_text
            raise error from exc
        if not self.is_complete:
            raise ProviderError("the model's stream ended before its answer did", retryable=not self._has_shown_text)
        return self.response()

    def report(self, update: MessageUpdate) -> None:
        """Report a piece of the message. A piece of a call's arguments may be empty, which names the call."""
        if self._halves or not update.piece.isascii():
            key = (update.kind, update.call_id)
            piece = whole = self._halves.pop(key, "") + update.piece
            if piece and "\ud800" <= piece[-1] <= "\udbff":
                whole, self._halves[key] = piece[:-1], piece[-1]
            update = replace(update, piece=whole_characters(whole))
        if update.piece or update.tool:
            self._has_shown_text = self._has_shown_text or update.kind == "text"
            self._on_update(update)

    def opened(self, stream: Any) -> None:  # noqa: B027
        """Look at the stream before its first item."""

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
