"""What an MCP server refuses over HTTP, as an error that says so: the status, what it wrote, a session that is gone."""

from __future__ import annotations

import json
import secrets
from typing import Any

import anyio
import httpx2
from mcp_types import INTERNAL_ERROR

from toolcell.support.text import clean

SESSION_GONE = -(10**9) - secrets.randbelow(10**9)
"""Code of our own: the server does not know the session any more, and has not carried out the request. It differs in
each process: a server that sent it itself would have a call made twice that it has carried out."""
ANSWER_LOST = SESSION_GONE - 1
"""Code of our own: the request was sent, and no answer came that can be read. It may have been carried out."""
NOT_A_MESSAGE = "its answer is not a message of JSON-RPC 2.0"
GONE_STATUSES = frozenset({404, 410})
"""What a server says of a session that it does not know. Many say 400 with the word, as examples of SDKs do."""
GATEWAY_STATUSES = frozenset({502, 503, 504})
"""What a gateway says when it has no answer of the server behind it."""
MAX_SAID_BYTES = 2**16
"""Most bytes of a refusal's body that are read."""
MAX_SAID_CHARS = 200
PROBE_S = 3.0
OLD_TRANSPORT = (
    "it speaks the older HTTP+SSE transport, and this client streamable HTTP: look for another URL of it, often "
    "one that ends with /mcp"
)


async def explained(
    request: httpx2.Request, response: httpx2.Response, inner: httpx2.AsyncBaseTransport
) -> httpx2.Response:
    """Return a refusal whose body is an error of JSON-RPC with the status in it, where somebody waits for an answer."""
    asked = message_of(request)
    if not isinstance(asked, dict) or "id" not in asked:
        return response
    if response.status_code < 400:
        kind = response.headers.get("content-type", "").lower()
        if (
            kind.startswith(("application/json", "text/event-stream"))
            or response.status_code == 202
            or response.has_redirect_location
        ):
            return response
        await response.aclose()
        said = f"HTTP {response.status_code}, and its answer is " + (
            f"{clean(kind)[:100]!r}, not JSON" if kind else "empty"
        )
        return _with_body(response, error_body(asked["id"], ANSWER_LOST, said))
    body = await _beginning(response)
    error = json_value(body)
    is_other = len(body) == MAX_SAID_BYTES or (isinstance(error, dict) and error.get("id") == asked["id"])
    names_session = response.status_code == 400 and b"session" in body.lower() and not is_other
    is_session_gone = (names_session or response.status_code in GONE_STATUSES) and "mcp-session-id" in request.headers
    is_error = isinstance(error, dict) and error.get("jsonrpc") == "2.0" and isinstance(error.get("error"), dict)
    if is_error and not is_session_gone:
        return _with_body(response, body)
    message = f"HTTP {response.status_code} {httpx2.codes.get_reason_phrase(response.status_code)}".rstrip()
    if said := _refusal_text(body, response.headers.get("content-type", "")):
        message += f": {said}"
    may_be_old = asked.get("method") == "initialize" and response.status_code in (400, 404, 405)
    if may_be_old and await _is_old(request, inner):
        message += f"; {OLD_TRANSPORT}"
    code = ANSWER_LOST if response.status_code in GATEWAY_STATUSES else INTERNAL_ERROR
    return _with_body(response, error_body(asked["id"], SESSION_GONE if is_session_gone else code, message))


def error_body(ident: Any, code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": message}}).encode()


def message_of(request: httpx2.Request) -> Any:
    """Return the message that a request sends, or None."""
    if request.method != "POST":
        return None
    try:
        return json.loads(request.content)
    except (ValueError, httpx2.StreamError):
        return None


async def _beginning(response: httpx2.Response) -> bytes:
    body = bytearray()
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    try:
        with anyio.move_on_after(PROBE_S):
            async for chunk in response.stream:
                body += chunk
                if len(body) >= MAX_SAID_BYTES:
                    break
    except httpx2.HTTPError:
        pass
    finally:
        await response.aclose()
    return bytes(body[:MAX_SAID_BYTES])


def json_value(text: str | bytes) -> Any:
    """Return the value that JSON text stands for; None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _refusal_text(body: bytes, kind: str) -> str:
    """Return the words of a refusal: a text, a JSON string, or the text of a JSON object that is called so."""
    text = body.decode("utf-8", "replace")
    if "json" in kind.lower():
        found = json_value(text)
        while isinstance(found, dict):
            found = next(
                (found[key] for key in ("message", "error_description", "error", "detail") if key in found), ""
            )
        text = found if isinstance(found, str) else ""
    elif not kind.lower().startswith("text/plain"):
        return ""
    return clean(" ".join(text.split()))[:MAX_SAID_CHARS]


async def _is_old(request: httpx2.Request, inner: httpx2.AsyncBaseTransport) -> bool:
    """Whether the first event that the server sends at this address is the one by which the older transport begins."""
    kept = {name: value for name, value in request.headers.items() if name.lower() in ("host", "authorization")}
    probe = httpx2.Request("GET", request.url, headers=kept | {"accept": "text/event-stream"})
    probe.extensions = {"timeout": httpx2.Timeout(PROBE_S).as_dict()}
    try:
        with anyio.move_on_after(PROBE_S):
            response = await inner.handle_async_request(probe)
            try:
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                async for chunk in response.stream:
                    return b"event: endpoint" in chunk or b"event:endpoint" in chunk
            finally:
                await response.aclose()
    except httpx2.HTTPError:
        pass
    return False


def _with_body(response: httpx2.Response, body: bytes) -> httpx2.Response:
    dropped = ("content-length", "content-type", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in dropped]
    return httpx2.Response(response.status_code, headers=[*headers, ("content-type", "application/json")], content=body)
