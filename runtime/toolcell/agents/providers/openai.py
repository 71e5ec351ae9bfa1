"""Models behind OpenAI's Chat Completions API, through the official SDK (`pip install toolcell[openai]`).

Translates messages and answers. The loop retries, so the SDK's own retries are off.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toolcell.agents.providers.provider import (
    CALL_FIELDS,
    FIELDS,
    REFUSED,
    Message,
    MessageUpdate,
    ModelResponse,
    OnUpdate,
    ProviderError,
    call_fields,
    reasoning_of,
    text_of,
)
from toolcell.agents.providers.retries import reported_error
from toolcell.agents.providers.sdk import SdkProvider, StreamAccumulator, fields_of
from toolcell.tools import ToolCall, ToolDefinition

_OWN_KEYS = frozenset({"is_error", "images", "extra", "finish_reason", "labels"})
"""Keys of our messages that the API does not know."""

_NEWER_NAMES = {"max_tokens": "max_completion_tokens"}

_END = re.compile(rb"(?:^|\n)data: ?\[DONE\]")

_PIECES = frozenset({"text", "summary", "thinking"})
"""Fields of the items of a list that come in pieces: of reasoning (OpenRouter, MiniMax) and of content (Mistral)."""


class OpenAIProvider(SdkProvider):
    """Any model that an `openai.AsyncOpenAI` client can reach."""

    package = "openai"
    client_class = "AsyncOpenAI"
    create_method = "chat.completions.create"
    stream_options: ClassVar[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def request(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], model: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Translate a request. `max_tokens` is sent under its newer name: many models refuse the old one."""
        options = {_NEWER_NAMES.get(name, name): value for name, value in options.items()}
        request = {**options, "model": model, "messages": to_openai(messages)}
        if tools:
            request["tools"] = [tool.to_openai(model) for tool in tools]
        return request

    def read_answer(self, answer: Any) -> ModelResponse:
        """Translate a completion, also one in which a server reports an error with status 200.

        Raises:
            ProviderError: it is an error, or not a completion.
        """
        completion = fields_of(answer)
        _raise_reported_error(completion)
        if not (choices := completion.get("choices")):
            raise ProviderError(
                f"the model's answer is not a completion with choices: {str(completion or answer)[:200]!r}"
            )
        choice = fields_of(choices[0])
        _raise_reported_error(choice)
        message = fields_of(choice.get("message"))
        calls = [_whole_call(fields_of(call)) for call in message.get("tool_calls") or ()]
        return _read_message(message, calls, choice.get("finish_reason"), completion.get("usage"))

    def accumulator(self, on_update: OnUpdate, tools: Sequence[ToolDefinition]) -> StreamAccumulator:
        return _CompletionAccumulator(on_update, frozenset(tool.name for tool in tools))


def to_openai(messages: Iterable[Message]) -> list[Message]:
    """Translate messages. A tool's answer cannot hold images in this API, so they follow in a user message."""
    sent: list[Message] = []
    images: list[Mapping[str, str]] = []
    for message in messages:
        if images and message.get("role") != "tool":
            sent.append(_image_message(images))
            images = []
        own = {key: value for key, value in message.items() if key not in _OWN_KEYS}
        match message.get("role"):
            case "assistant":
                own = _assistant_message(own, message.get("extra") or {})
            case "tool":
                own["tool_call_id"] = str(own.get("tool_call_id"))
            case _ if isinstance(own.get("content"), list):
                own["content"] = [_part(part) for part in own["content"]]
        sent += [own] if own else []
        images += message.get("images", ())
    return [*sent, _image_message(images)] if images else sent


def _assistant_message(own: Message, extra: Mapping[str, Any]) -> Message:
    """Return a message with what the provider needs back; an empty dict for an empty answer, which servers refuse."""
    fields, of_calls = dict(extra.get(FIELDS) or {}), extra.get(CALL_FIELDS) or {}
    parts, audio = fields.pop("content", None), fields.get("audio")
    if isinstance(audio, Mapping):  # the API takes no more of it back
        fields["audio"] = {"id": audio.get("id")}
    content = own.get("content")
    if parts and text_of(parts) == content:  # not if a processor has edited the text
        content = parts
    is_empty = isinstance(content, str) and not content.strip()
    calls = [_call(call, of_calls) for call in own.pop("tool_calls", None) or ()]
    if calls:
        return fields | own | {"content": None if content == "" else content, "tool_calls": calls}
    return {} if (is_empty or not content) and not audio else fields | own | {"content": content}


def _call(given: Any, of_calls: Mapping[str, Mapping[str, Any]]) -> Message:
    """Return a call with its own fields. Servers parse the arguments of earlier calls, and refuse what is not JSON."""
    call = ToolCall.read(given).to_openai()
    fields = {**call_fields(given), **of_calls.get(call["id"], {})}
    return fields | call | {"function": {**fields.get("function", {}), **call["function"]}}


def _part(part: Any) -> Any:
    """Return a part of a user's message; a picture as Anthropic's API has it is translated."""
    match part:
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}}
    return part


def _image_message(images: Iterable[Mapping[str, str]]) -> Message:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:{image['media_type']};base64,{image['data']}"}}
        for image in images
    ]
    return {"role": "user", "content": [{"type": "text", "text": "Images from the tools above:"}, *parts]}


def _read_message(message: Mapping[str, Any], calls: Sequence[Message], reason: Any, usage: Any) -> ModelResponse:
    """Read a whole message, which a completion has and a stream's chunks add up to."""
    reason = REFUSED if reason == "content_filter" else reason
    return ModelResponse.read({**message, "tool_calls": calls, "finish_reason": reason, "usage": usage})


def _whole_call(call: Mapping[str, Any]) -> Message:
    """Return a call in which nothing is missing: without a name the registry answers it with an error."""
    function = fields_of(call.get("function"))
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _raise_reported_error(body: Mapping[str, Any]) -> None:
    """Raise the error that a body with status 200 reports: `error`, or `object: "error"`."""
    error = body.get("error")
    if error is None and body.get("object") == "error":
        error = {name: body.get(name) for name in ("message", "type", "code")}
    if error:
        raise reported_error(error)


def _merge(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece of a streamed message to what came before: texts and lists grow, dicts are merged, the rest is set.

    Source: the deltas of OpenAI, OpenRouter, DeepSeek, Mistral and MiniMax.
    """
    for name, value in piece.items():
        match whole.get(name), value:
            case _, None:
                continue
            case str() as text, str() if name != "role":
                whole[name] = text + value
            case dict() as inner, Mapping():
                _merge(inner, value)
            case list() as items, list():
                _merge_items(items, value)
            case _, list():
                whole[name] = items = []
                _merge_items(items, value)
            case _:
                whole[name] = value


def _merge_items(items: list[Any], pieces: Iterable[Any]) -> None:
    for piece in pieces:
        if not (items and _goes_on(items[-1], piece)):
            items.append(dict(piece) if isinstance(piece, Mapping) else piece)
            continue
        growing = {name: value for name, value in piece.items() if name in _PIECES}
        items[-1].update({name: value for name, value in piece.items() if name not in growing and value is not None})
        _merge(items[-1], growing)


def _goes_on(item: Any, piece: Any) -> bool:
    """Return whether a piece continues an item: the same kind at the same index, which its signature ends."""
    if not isinstance(item, dict) or not isinstance(piece, Mapping) or "data" in piece:
        return False
    if any(item.get(name) != piece.get(name) for name in ("type", "index")):
        return False
    if item.get("id") and piece.get("id") and item["id"] != piece["id"]:
        return False
    grows = any(piece.get(name) for name in _PIECES)
    return not (item.get("signature") and grows) and (grows or "index" in piece)


@dataclass(slots=True)
class _PartialCall:
    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True when the arguments are a whole JSON object, so that more of them cannot follow."""
        return bool(self.arguments.strip()) and isinstance(
            ToolCall("", self.name, self.arguments).parsed_if_safe().arguments, Mapping
        )

    def read(self) -> Message:
        """Return the call as a whole message has it."""
        function = self.fields.get("function", {}) | {"name": self.name, "arguments": self.arguments}
        return self.fields | {"id": self.id, "function": function}


class _PartialCalls:
    """The calls of a stream. Servers tell them apart in different ways: by index, by id, or only by a new name."""

    def __init__(self, tools: frozenset[str]) -> None:
        self._tools = tools
        self._calls: list[_PartialCall] = []

    def add(self, piece: Mapping[str, Any]) -> MessageUpdate:
        """Take in one item of a delta's `tool_calls`, and return what it adds."""
        function = fields_of(piece.get("function"))
        name, arguments = function.get("name") or "", function.get("arguments")
        found = [each for each in (piece.get("id"), function.get("id")) if each not in (None, "")]
        ident, index = str(found[0]) if found else "", piece.get("index")
        call = self._continued(ident, index, name, arguments)
        if call is None:
            last = self._calls[-1].index if self._calls else 0
            call = _PartialCall(index if isinstance(index, int) else last)
            self._calls.append(call)
        call.id = call.id or ident
        call.fields |= call_fields({**piece, "function": function})
        if name != call.name:
            call.name += name
        if arguments is None or isinstance(arguments, str):
            is_repeated = bool(ident) and arguments == call.arguments and call.is_whole
            arguments = "" if is_repeated else arguments or ""
            call.arguments += arguments
        else:  # the whole object, not a piece of its text
            call.arguments = arguments = json.dumps(arguments, ensure_ascii=False)
        return MessageUpdate("arguments", arguments, call.id, call.name)

    def _continued(self, ident: str, index: Any, name: str, arguments: Any) -> _PartialCall | None:
        """Return the call that a piece belongs to; None if it begins one."""
        of_id = [call for call in self._calls if ident and call.id == ident]
        for call in reversed(of_id):
            if self._is_of_same_id(call, index, name, arguments):
                return call
        if of_id:
            return None
        at_index = [call for call in self._calls if call.index == index or not isinstance(index, int)]
        if not at_index:  # Nebius and Cerebras count the pieces: without id and name, a piece goes to the latest call
            return self._calls[-1] if self._calls and not ident and not name else None
        latest = at_index[-1]
        if not name:
            return latest  # some servers make up another id for each piece
        if ident and latest.id:
            return None
        if not latest.name:
            return latest
        # Without an id only the name is left: it is repeated, in pieces, or that of the next call.
        if name == latest.name:
            return None if latest.is_whole else latest
        return None if latest.arguments or latest.name in self._tools else latest

    def _is_of_same_id(self, call: _PartialCall, index: Any, name: str, arguments: Any) -> bool:
        """Return whether a piece with the id of `call` is of it: llama.cpp has given several calls one id."""
        is_at_index = call.index == index or not isinstance(index, int)
        if not name or not call.name:
            return True
        if name != call.name:
            return is_at_index and not call.arguments and call.name not in self._tools
        if is_at_index:  # some servers send the whole call once more at its end
            return not (call.is_whole and arguments) or arguments == call.arguments
        return bool(call.arguments.strip()) and not call.is_whole

    @property
    def are_whole(self) -> bool | None:
        """True when no call can have more arguments, and None without calls."""
        return all(call.is_whole for call in self._calls) if self._calls else None

    def read(self) -> list[Message]:
        """Return the calls, in the order of their indices. One that never got a name is the rest of the one before."""
        named: list[_PartialCall] = []
        for call in self._calls:
            if named and not call.name and not named[-1].is_whole:
                named[-1].arguments += call.arguments
            else:
                named.append(call)
        return [call.read() for call in sorted(named, key=lambda call: call.index)]


class _CompletionAccumulator(StreamAccumulator):
    """Builds a completion from stream chunks."""

    def __init__(self, on_update: OnUpdate, tools: frozenset[str]) -> None:
        super().__init__(on_update)
        self._message: dict[str, Any] = {}
        self._calls = _PartialCalls(tools)
        self._choice: Any = None
        self._finish_reason = ""
        self._has_ended = False
        self._usage: Any = None

    def opened(self, stream: Any) -> None:
        """Look for `[DONE]`, which the SDK does not pass on: some servers end with it alone, without a reason."""
        response = getattr(stream, "response", None)
        if response is not None:
            response.aiter_bytes = self._watching(response.aiter_bytes)

    def _watching(self, read: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
        async def aiter_bytes(*args: Any, **options: Any) -> AsyncIterator[bytes]:
            tail = b"\n"
            async for data in read(*args, **options):
                seen = tail + data
                self._has_ended = self._has_ended or _END.search(seen) is not None
                tail = seen[-16:]
                yield data

        return aiter_bytes

    def add(self, chunk: Any) -> None:
        data = fields_of(chunk)
        _raise_reported_error(data)
        self._usage = data.get("usage") or self._usage
        for choice in map(fields_of, data.get("choices") or ()):
            _raise_reported_error(choice)
            index = choice.get("index")
            self._choice = index if self._choice is None else self._choice
            if index not in (None, self._choice):
                continue  # another answer, as with n=2
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = dict(fields_of(choice.get("delta") or (None if self._message else choice.get("message"))))
            pieces = delta.pop("tool_calls", None) or ()
            text = text_of(delta.get("content")) + (delta.get("refusal") or "")
            thoughts = reasoning_of(delta)
            if isinstance(delta.get("content"), str) and isinstance(self._message.get("content"), list):
                delta["content"] = [{"type": "text", "text": delta["content"]}] if delta["content"] else None
            elif isinstance(delta.get("content"), list) and isinstance(said := self._message.get("content"), str):
                self._message["content"] = [{"type": "text", "text": said}] if said else []
            _merge(self._message, delta)
            self.report(MessageUpdate("reasoning", thoughts))
            self.report(MessageUpdate("text", text))
            for piece in pieces:
                self.report(self._calls.add(fields_of(piece)))

    @property
    def is_complete(self) -> bool:
        is_whole = bool(self._message.get("content")) if self._calls.are_whole is None else self._calls.are_whole
        return bool(self._finish_reason) or (self._has_ended and is_whole)

    def response(self) -> ModelResponse:
        return _read_message(self._message, self._calls.read(), self._finish_reason, self._usage)
