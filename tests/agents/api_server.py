"""A local HTTP server that speaks OpenAI's and Anthropic's API, as far as a tool loop needs: plain and streaming."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from toolcell import RunContext

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and a body: JSON data, or a list of chunks to stream as server-sent events.

A `threading.Event` among the chunks is waited for; after that the client may be gone.
"""


NOTHING = object()
"""An empty body."""


class ApiServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append({"path": self.path, **body})
        self.server.headers_seen.append(dict(self.headers))
        status, headers, reply = self.server.replies.pop(0)
        streamed = isinstance(reply, list)
        if streamed and any(isinstance(each, threading.Event) for each in reply):
            self._send_slowly(reply)
            return
        content = b"".join(map(_event, reply)) if streamed else b"" if reply == NOTHING else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.send_header("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _send_slowly(self, reply: list[Any]) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with suppress(ConnectionError):
            for each in reply:
                if isinstance(each, threading.Event):
                    each.wait(60)
                else:
                    self.wfile.write(_event(each))

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


def _event(chunk: Any) -> bytes:
    if chunk == "[DONE]":
        return b"data: [DONE]\n\n"
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk)}\n\n".encode()


@contextmanager
def serving(*replies: Reply) -> Iterator[ApiServer]:
    """A server that gives these replies, one to each request."""
    server = ApiServer()
    server.replies = list(replies)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def heard_by(on_text: Callable[[str], object] | None) -> RunContext:
    """Return the context of a run of which `on_text` hears the text as it comes."""
    context = RunContext()
    if on_text is not None:
        context.events.subscribe(
            lambda event: on_text(event.update["text"]) if "text" in (event.update or ()) else None
        )
    return context


def ok(body: Any) -> Reply:
    return 200, {}, body


# OpenAI


def completion(content: str | None = None, *calls: tuple[str, str, str], finish: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": finish or ("tool_calls" if calls else "stop")}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return base | {"usage": usage}


def call_piece(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": function} | ({"id": call_id} if call_id else {})]}


# Anthropic


def message(*blocks: dict[str, Any], stop: str = "end_turn") -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": list(blocks),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 11, "output_tokens": 7},
    }


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def tool_use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def streamed_message(*blocks: tuple[dict[str, Any], list[dict[str, Any]]], stop: str | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message() | {"stop_reason": None}}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    if stop is not None:
        delta = {"stop_reason": stop, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}})
        events.append({"type": "message_stop"})
    return events
