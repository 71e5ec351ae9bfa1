"""Models behind OpenAI's Chat Completions API, through the official SDK (`pip install toolcell[openai]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toolcell.agents.providers.provider import REFUSED, Message, ModelResponse, OnText, ProviderError, read_usage
from toolcell.agents.providers.retries import reported_error
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator
from toolcell.tools import NO_USAGE, ToolCall, ToolDefinition

_OWN_KEYS = frozenset({"is_error", "images", "extra", "finish_reason", "labels"})
"""Keys of our messages that the API does not know."""

EXTRA = "extra_content"
"""Field of a call: what Gemini's compatible end signs, and refuses to go on without."""

_NEWER_NAMES = {"max_tokens": "max_completion_tokens"}


class OpenAIProvider(SdkProvider):
    """Any model that an `openai.AsyncOpenAI` client can reach."""

    package = "openai"
    client_class = "AsyncOpenAI"
    stream_options: ClassVar[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def create_method(self, client: Any) -> Callable[..., Awaitable[Any]]:
        """Return the method behind POST /v1/chat/completions."""
        method: Callable[..., Awaitable[Any]] = client.chat.completions.create
        return method

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request. `max_tokens` is sent under its newer name: many models refuse the old one."""
        options = {_NEWER_NAMES.get(name, name): value for name, value in options.items()}
        request = {**options, "model": model, "messages": to_openai(messages)}
        if tools:
            request["tools"] = [tool.to_openai() for tool in tools]
        return request

    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate a completion, also one in which a server reports an error with status 200.

        Raises:
            ProviderError: it is an error, or not a completion.
        """
        _raise_reported_error(answer)
        choices = getattr(answer, "choices", None)
        if not choices:
            raise ProviderError(f"the model's answer is not a completion with choices: {str(answer)[:200]!r}")
        choice = choices[0]
        _raise_reported_error(choice)
        message, usage = choice.message, read_usage(getattr(answer, "usage", None))
        text = _text_of(getattr(message, "content", None))
        made = getattr(message, "tool_calls", None) or ()
        calls, extra = tuple(map(_read_call, made)), _extra([getattr(call, EXTRA, None) for call in made])
        if refusal := getattr(message, "refusal", None):
            return ModelResponse(text or refusal, calls, REFUSED, usage, extra)
        return ModelResponse(text, calls, _finish_reason(choice.finish_reason or "stop"), usage, extra)

    def accumulator(self, on_text: OnText, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        """Return what builds a completion from stream chunks."""
        return _CompletionAccumulator(on_text, frozenset(tool.name for tool in tools))


def to_openai(messages: Iterable[Message]) -> list[Message]:
    """Translate messages. A tool's answer cannot hold images in this API, so they follow in a user message."""
    sent: list[Message] = []
    images: list[Mapping[str, str]] = []
    for message in messages:
        if images and message.get("role") != "tool":
            sent.append(_image_message(images))
            images = []
        own = {key: value for key, value in message.items() if key not in _OWN_KEYS}
        if calls := own.get("tool_calls"):  # servers parse the arguments of earlier calls, and refuse what is not JSON
            own["tool_calls"] = [ToolCall.read(call).to_openai() for call in calls]
            for call, content in zip(own["tool_calls"], message.get("extra", {}).get(EXTRA, ()), strict=False):
                call |= {EXTRA: content} if content else {}
        sent.append(own)
        images += message.get("images", ())
    return [*sent, _image_message(images)] if images else sent


def _image_message(images: Iterable[Mapping[str, str]]) -> Message:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:{image['media_type']};base64,{image['data']}"}}
        for image in images
    ]
    return {"role": "user", "content": [{"type": "text", "text": "Images from the tools above:"}, *parts]}


def _extra(contents: Sequence[Any]) -> dict[str, Any]:
    """Return what the message has to keep of its calls, in their order."""
    return {EXTRA: list(contents)} if any(contents) else {}


def _finish_reason(reason: str) -> str:
    return REFUSED if reason == "content_filter" else reason


def _raise_reported_error(body: Any) -> None:
    """Raise the error that a body with status 200 reports: `error`, or `object: "error"`."""
    error = getattr(body, "error", None)
    if error is None and getattr(body, "object", None) == "error":
        error = {name: getattr(body, name, None) for name in ("message", "type", "code")}
    if error:
        raise reported_error(error)


def _text_of(content: Any) -> str:
    """Return the text of a message's content: text, a list of parts, or nothing. Thoughts are not part of it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part if isinstance(part, Mapping) else vars(part) for part in content if not isinstance(part, str)]
    texts = [part.get("text") for part in parts if part.get("type", "text") in ("text", "output_text")]
    return "".join(text for text in texts if isinstance(text, str))


def _read_call(call: Any) -> ToolCall:
    function = getattr(call, "function", None)
    name, arguments = getattr(function, "name", None), getattr(function, "arguments", None)
    return ToolCall(getattr(call, "id", None) or "", name or "", arguments or "")


@dataclass(slots=True)
class _PartialCall:
    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    extra: Any = None

    @property
    def is_whole(self) -> bool:
        """True when the arguments are a whole JSON object, so that more of them cannot follow."""
        return isinstance(ToolCall("", self.name, self.arguments).parsed_if_safe().arguments, Mapping)


class _PartialCalls:
    """The calls of a stream. Servers tell them apart in different ways: by index, by id, or only by a new name."""

    def __init__(self, tools: frozenset[str]) -> None:
        self._tools = tools
        self._calls: list[_PartialCall] = []

    def add(self, piece: Any) -> None:
        """Take in one item of a delta's `tool_calls`."""
        function = getattr(piece, "function", None)
        name, arguments = getattr(function, "name", None) or "", getattr(function, "arguments", None)
        ident = getattr(piece, "id", None) or getattr(function, "id", None) or ""
        index = getattr(piece, "index", None)
        call = self._continued(ident, index, name)
        if call is None:
            last = self._calls[-1].index if self._calls else 0
            call = _PartialCall(index if isinstance(index, int) else last)
            self._calls.append(call)
        call.id = call.id or ident
        call.extra = getattr(piece, EXTRA, None) or call.extra
        if name != call.name:
            call.name += name
        if isinstance(arguments, str):
            call.arguments += arguments
        elif arguments is not None:  # the whole object, not a piece of its text
            call.arguments = json.dumps(arguments, ensure_ascii=False)

    def _continued(self, ident: str, index: Any, name: str) -> _PartialCall | None:
        """Return the call that a piece belongs to; None if it begins one."""
        for call in reversed(self._calls):
            if ident and call.id == ident:
                return call
        at_index = [call for call in self._calls if call.index == index or not isinstance(index, int)]
        if not at_index:
            return None
        latest = at_index[-1]
        if not name:
            return latest  # some servers make up another id for each piece
        if ident and latest.id:
            return None
        if not latest.name:
            return latest
        # Without an id only the name is left: it is repeated, in pieces, or that of the next call.
        if name == latest.name:
            return None if latest.arguments and latest.is_whole else latest
        return None if latest.arguments or latest.name in self._tools else latest

    def read(self) -> tuple[tuple[ToolCall, ...], dict[str, Any]]:
        """Return the calls, in the order of their indices, and what the message has to keep of them."""
        ordered = sorted(self._calls, key=lambda call: call.index)
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in ordered)
        return calls, _extra([call.extra for call in ordered])


class _CompletionAccumulator(StreamAccumulator):
    """Builds a completion from stream chunks."""

    def __init__(self, on_text: OnText, tools: frozenset[str]) -> None:
        super().__init__(on_text)
        self._text = ""
        self._calls = _PartialCalls(tools)
        self._finish_reason = ""
        self._is_refused = False
        self._usage = NO_USAGE

    def add(self, chunk: Any) -> None:
        _raise_reported_error(chunk)
        if (usage := getattr(chunk, "usage", None)) is not None:
            self._usage = read_usage(usage)
        for choice in getattr(chunk, "choices", None) or ():
            _raise_reported_error(choice)
            self._finish_reason = getattr(choice, "finish_reason", None) or self._finish_reason
            delta = getattr(choice, "delta", None)
            if text := _text_of(getattr(delta, "content", None)):
                self._text += text
                self.show(text)
            if refusal := getattr(delta, "refusal", None):
                self._text += refusal
                self._is_refused = True
                self.show(refusal)
            for piece in getattr(delta, "tool_calls", None) or ():
                self._calls.add(piece)

    @property
    def is_complete(self) -> bool:
        return bool(self._finish_reason)

    def response(self) -> ModelResponse:
        reason = REFUSED if self._is_refused else _finish_reason(self._finish_reason)
        calls, extra = self._calls.read()
        return ModelResponse(self._text, calls, reason, self._usage, extra)
