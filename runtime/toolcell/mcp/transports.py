"""How bytes reach an MCP server: the pipes of a process that the host starts, or HTTP. Both bounded.

What a server sends is not trusted: a message has a largest size and a largest structure, a connection a largest number
of lines that are not messages, and what answers no request a pace. Nobody who writes waits for the server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.abc import Process
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    REQUEST_TIMEOUT,
    ErrorData,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from pydantic_core import from_json

from toolcell.calls.values import count_values
from toolcell.egress import Egress
from toolcell.egress.echoes import Echoes
from toolcell.egress.request import HttpRequest
from toolcell.egress.urls import parse_url
from toolcell.errors import McpServerError, ToolError
from toolcell.mcp.address_guard import LoginTransport, send_to
from toolcell.mcp.broken_tools import ToolPages
from toolcell.mcp.http_bounds import MAX_MESSAGE_BYTES, BoundedTransport, ReplacedStream, is_stand_in
from toolcell.mcp.http_refusals import ANSWER_LOST, NOT_A_MESSAGE
from toolcell.mcp.login import Login
from toolcell.mcp.structure import (
    MAX_ASKED_ELEMENTS,
    MAX_CHECKED,
    MAX_ELEMENTS,
    TOO_MANY,
    TOO_MANY_CHECKED,
    at_most,
    cut_lists,
    elements,
    has_too_many,
    let_others_run,
    with_whole_characters,
)
from toolcell.mcp.traffic import WRITE_S, Flooded, Outbox, Traffic
from toolcell.support.text import clean

# The proxies that the environment names, as other clients take them: `HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`.


def proxy_for(url: httpx2.URL) -> str | None:
    """Return the proxy of this environment for a URL, or None. Names may be in small letters, too."""
    found = urllib.request.getproxies()
    proxy = found.get(url.scheme) or found.get("all")
    if proxy is None or _is_excepted(url, found.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excepted(url: httpx2.URL, exceptions: str) -> bool:
    """Whether `NO_PROXY` names the host: itself or a domain that it is in, also with its port, or its network."""
    port = url.port or (443 if url.scheme == "https" else 80)
    host = f"[{url.host}]" if ":" in url.host else url.host
    if urllib.request.proxy_bypass(url.host) or urllib.request.proxy_bypass(f"{host}:{port}"):
        return True
    try:
        address = ipaddress.ip_address(url.host)
    except ValueError:
        return False
    return any(address in network for network in _networks(exceptions))


def _networks(exceptions: str) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for each in exceptions.replace(",", " ").split():
        try:
            yield ipaddress.ip_network(each, strict=False)
        except ValueError:
            continue


class ProxyTransport(httpx2.AsyncBaseTransport):
    """Sends each request directly or through the proxy that the environment has for its host."""

    def __init__(self) -> None:
        self._transports: dict[str | None, httpx2.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request.

        Raises:
            ConnectError: the proxy cannot be used.
        """
        proxy = proxy_for(request.url)
        if proxy not in self._transports:
            try:
                self._transports[proxy] = httpx2.AsyncHTTPTransport(proxy=proxy)
            except (ValueError, ImportError, httpx2.InvalidURL) as exc:
                raise httpx2.ConnectError(f"the proxy of the environment cannot be used: {exc}") from exc
        return await self._transports[proxy].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


# `AllowedTransport`: requests that an `Egress` allows, to checked addresses, with the secrets of its rules.


TURN_S = 60.0
"""Most that a request waits for its turn, where a rule has a rate."""


class AllowedTransport(httpx2.AsyncBaseTransport):
    """Sends what the rules allow. Proxies of the environment are not used."""

    def __init__(self, egress: Egress) -> None:
        self._allowed = egress.allowed
        self._inner = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request; a redirect is an answer like any other.

        Raises:
            ConnectError: no rule allows it, or there is no connection.
        """
        try:
            target = parse_url(str(request.url))
            asked = HttpRequest(
                method=request.method, target=target, headers=tuple(request.headers.multi_items()), body=b""
            )
            rule = self._allowed.judge_unasked(asked)
            _, headers = self._allowed.filled(asked, rule, int(request.headers.get("content-length", "0")))
            await self._allowed.wait_for_turn(rule, TURN_S)
            addresses = await self._allowed.addresses_of(target)
        except ToolError as exc:
            raise httpx2.ConnectError(exc.message) from None
        return without_secrets(await send_to(self._inner, addresses, request, headers), self._allowed.echoes)

    async def aclose(self) -> None:
        await self._inner.aclose()


def without_secrets(response: httpx2.Response, echoes: Echoes) -> httpx2.Response:
    """Return an answer in which placeholders are in the place of secrets. Compressed ones are refused elsewhere."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    if not echoes:
        return response
    headers = [(name, echoes.clean_text(value)) for name, value in response.headers.multi_items()]
    return httpx2.Response(
        response.status_code,
        headers=[each for each in headers if each[0].lower() != "content-length"],
        stream=ReplacedStream(_cleaned(response.stream, echoes), response.stream),
        extensions=response.extensions,
    )


async def _cleaned(pieces: AsyncIterable[bytes], echoes: Echoes) -> AsyncIterator[bytes]:
    held = b""
    async for piece in pieces:
        data = echoes.clean(held + piece)
        ends = len(data) - echoes.held_back(data)
        held = data[ends:]
        if ends:
            yield data[:ends]
    if held:
        yield held


STOP_S = 2.0
"""What a server may take to end after its input was closed."""
END_S = 20.0
"""What its supervisor may take after it was told to: milliseconds, but for a machine that stands still."""
MAX_SAID_BYTES = 500
"""Most bytes of what a server writes to stderr, in a message about its end."""
MAX_KEPT_BYTES = 8 * 1024
"""Most bytes of what a server writes to stderr: a secret that is hidden in it is there whole."""
MAX_ID_DIGITS = 18
CONNECT_S = 30.0

Item = tuple["SessionMessage | Exception | None", int]
"""What a server sent, and its bytes, if they are known; None is a line without a message."""
Streams = tuple[MemoryObjectReceiveStream["SessionMessage | Exception"], Outbox]


class ProcessTransport:
    """Starts a server as a process, and speaks with it over its stdin and stdout."""

    host = ""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str | None, hide: Callable[[str], str] = str
    ) -> None:
        """`hide` takes secrets out of what the server writes to stderr."""
        self._command, self._env, self._cwd, self._hide = list(command), dict(env), cwd, hide
        self.ended = anyio.Event()
        """It cannot be spoken with any more."""
        self.listing = ToolPages()
        self._stderr = b""
        self._problem = ""
        self._has_spoken = False
        """It sent a message of the protocol."""
        self._process: Process | None = None

    @property
    def problem(self) -> str:
        """Why the server cannot be spoken with any more, with the last line that it wrote to stderr."""
        status = self._process.returncode if self._process is not None else None
        lines = self._hide(clean(self._stderr.decode("utf-8", "replace"))).strip().splitlines()
        said = lines[-1][-MAX_SAID_BYTES:].strip() if lines else ""
        ended = self._problem or ("its output ended" if status is None else f"it ended with exit status {status}")
        if not said and not self._problem and not self._has_spoken:
            said = "it sent no message of MCP; is it a server that speaks over stdin and stdout?"
        return f"{ended}: {said}" if said else ended

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Streams]:
        """Start the server; at the end of the block nothing of it is left.

        Raises:
            McpServerError: there is no such program.
        """
        env = get_default_environment() | self._env
        if shutil.which(self._command[0], path=env.get("PATH")) is None:
            raise McpServerError(f"there is no program {self._command[0]!r} on the PATH")
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(os.getpid())]
        try:
            process = await anyio.open_process(
                [*supervisor, *self._command], env=env, cwd=self._cwd, start_new_session=True
            )
        except OSError as exc:
            raise McpServerError(f"{self._command[0]!r} cannot be started: {exc}") from exc
        self._process = process
        traffic = Traffic(repr(self._command[0]), self.listing)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_stderr, process)
            try:
                async with bounded(self._items(process), self._write, traffic, self._give_up, _packed) as streams:
                    try:
                        yield streams
                    finally:
                        with anyio.CancelScope(shield=True):
                            await _stop(process)
            finally:
                tasks.cancel_scope.cancel()

    def _give_up(self, problem: str) -> None:
        self._problem = self._problem or problem
        self.ended.set()

    async def _items(self, process: Process) -> AsyncGenerator[Item]:
        assert process.stdout is not None
        buffer = bytearray()
        try:
            async for chunk in process.stdout:
                *lines, rest = chunk.split(b"\n")
                for each in lines:
                    line = bytes(buffer + each)
                    buffer.clear()
                    message = await _message(line)
                    self._has_spoken = self._has_spoken or isinstance(message, SessionMessage)
                    yield message, len(line)
                buffer += rest
                if len(buffer) > MAX_MESSAGE_BYTES:
                    self._give_up(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
                    return
            with anyio.move_on_after(STOP_S):
                await process.wait()
        finally:
            self.ended.set()

    async def _write(self, message: SessionMessage, line: bytes | None) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(line or b"")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.ended.set()
            raise anyio.ClosedResourceError from None

    async def _read_stderr(self, process: Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in process.stderr:
                self._stderr = (self._stderr + chunk)[-MAX_KEPT_BYTES:]


def _packed(message: SessionMessage) -> bytes:
    return message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"


_FIRST = re.compile(rb'\s*\{(?:\s*"jsonrpc"\s*:\s*"2\.0"\s*,)?\s*"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")\s*,')
_LAST = re.compile(rb',\s*"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_ASKS = re.compile(rb'\s*\{(?:\s*"(?:jsonrpc|id)"\s*:\s*(?:\d+|"[^"\\]*")\s*,){0,2}\s*"method"\s*:')
MAX_PARSED_AGAIN = 1 << 20
"""Most bytes of a message that is parsed again for its id alone."""
_ENDS_BYTES = 256
"""First and last bytes of a message, in which its id may stand when the message itself is not parsed."""


def _ident_at_ends(line: bytes) -> int | str | None:
    found = _FIRST.match(line[:_ENDS_BYTES]) or _LAST.search(line[-_ENDS_BYTES:])
    return None if found is None else json.loads(found[1].decode("utf-8", "replace"))


def _asks(line: bytes) -> bool:
    """Return whether a message that is not parsed is a request or notification: its id is none of ours."""
    return _ASKS.match(line[:_ENDS_BYTES]) is not None


class Unread(ValueError):
    """A message of the server that is not read."""

    def __init__(self, why: str, ident: int | str | None = None) -> None:
        """`ident`: that of a request, which is answered with why."""
        super().__init__(why)
        self.ident = ident


async def _message(line: bytes) -> SessionMessage | Exception | None:
    """Return the message of a line, an error in the place of an answer that cannot be used, or None for no message."""
    if not line.strip():
        return None
    if await elements(line) > MAX_ELEMENTS:
        if (ident := _ident_at_ends(line)) is None:
            return Unread(TOO_MANY)
        return Unread(TOO_MANY, ident) if _asks(line) else _error(ident, f"its answer cannot be used: {TOO_MANY}")
    await let_others_run()
    try:
        # Not `validate_json`, which makes what is in it for each kind of message.
        message = jsonrpc_message_adapter.validate_python(from_json(line, cache_strings="none"), by_name=False)
    except ValueError as exc:
        if (mended := await with_whole_characters(line)) != line:
            return await _message(mended)
        return _failed_answer(line) or exc
    return SessionMessage(message)


SDK_CODES = (CONNECTION_CLOSED, REQUEST_TIMEOUT)
"""By which the SDK says that a connection was closed, and that a request took too long. Servers use them for errors of
their own."""
OF_SERVER = -1_000_000
"""Added to such a code of a server."""


_LOST = ("SSE stream ", "server answered a request with 202 ")
"""How the SDK's errors begin for an answer that did not come. A server that says the same gains nothing."""


def _mended(item: SessionMessage) -> SessionMessage | Exception:
    """Return a message that the SDK may read: no error of a server passes for one of the SDK's own."""
    message = item.message
    if isinstance(message, JSONRPCResponse):
        cut_lists(message.result)
        if has_too_many({**message.result, "tools": None}):  # `ToolPages` checks each tool alone
            return _error(message.id, f"its answer cannot be used: {TOO_MANY_CHECKED}")
    elif not isinstance(message, JSONRPCError):
        params, ident = message.params or {}, message.id if isinstance(message, JSONRPCRequest) else None
        if count_values(params, MAX_ASKED_ELEMENTS) > MAX_ASKED_ELEMENTS:
            return Unread(f"its params hold more than {MAX_ASKED_ELEMENTS} values", ident)
        return Unread(TOO_MANY_CHECKED, ident) if has_too_many(params) else item
    elif message.error.message.startswith(_LOST):
        message.error.code = ANSWER_LOST
    elif message.error.code in SDK_CODES:
        message.error.code += OF_SERVER
    return item


def _failed_answer(line: bytes) -> SessionMessage | None:
    """Return an error in place of an answer that is none, if it says which request it is about: nobody waits for it."""
    if at_most(line) > MAX_CHECKED or len(line) > MAX_PARSED_AGAIN:
        ident = None if _asks(line) else _ident_at_ends(line)
        return None if ident is None else _error(ident, NOT_A_MESSAGE, ANSWER_LOST)
    try:
        found = json.loads(line.decode("utf-8", "replace"), parse_int=lambda text: int(text[: MAX_ID_DIGITS + 1]))
    except (ValueError, RecursionError):
        return None
    ident = found.get("id") if isinstance(found, dict) and "method" not in found else None
    if not isinstance(ident, int | str) or isinstance(ident, bool):
        return None
    return _error(ident, NOT_A_MESSAGE, ANSWER_LOST)


def _error(ident: int | str, text: str, code: int = INTERNAL_ERROR) -> SessionMessage:
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=ident, error=ErrorData(code=code, message=text)))


async def _stop(process: Process) -> None:
    """Let the server end by itself, then have its supervisor end it."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    # SIGCONT: one that somebody has stopped ends too. Killed, it would leave what the server has started.
    for signals, patience_s in (((), STOP_S), ((signal.SIGTERM, signal.SIGCONT), END_S), ((signal.SIGKILL,), STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            for number in signals:
                process.send_signal(number)
        with anyio.move_on_after(patience_s):
            await process.wait()
            break
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.aclose()


class HttpTransport:
    """Speaks with a server over streamable HTTP."""

    def __init__(
        self, url: str, headers: Mapping[str, str], login: Login | None = None, egress: Egress | None = None
    ) -> None:
        """`login` gives requests their token. `egress`: which requests are allowed."""
        self._url, self._headers, self._login, self._egress = url, dict(headers), login, egress
        place = httpx2.URL(url)
        self.host = f"{place.host}:{place.port}" if place.port else place.host
        """Without the rest of the URL, which may hold a token."""
        self.ended = anyio.Event()
        self.listing = ToolPages()
        self.problem = "the connection was lost"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Connect; at the end of the block the server's session is closed."""
        timeout = httpx2.Timeout(CONNECT_S, read=None)
        egress = self._egress
        sender: httpx2.AsyncBaseTransport = ProxyTransport()
        if egress is not None:
            sender = AllowedTransport(egress)
        transport: httpx2.AsyncBaseTransport = BoundedTransport(sender, self.host, self._note, self._take)
        if self._login is not None:
            self._login.begin_connection()
            transport = LoginTransport(transport, self._login.guard if egress is None else None)
        headers = self._headers | {"accept-encoding": "identity"}
        self._items, items = anyio.create_memory_object_stream[Item](0)
        async with (
            self._items,
            items,
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, auth=self._login) as http,
            streamable_http_client(self._url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as (read, write),
            anyio.create_task_group() as tasks,
            bounded(
                (each async for each in items),
                lambda message, _: write.send(message),
                Traffic(self.host, self.listing),
                self._give_up,
            ) as streams,
        ):
            tasks.start_soon(self._hand_on, read)
            try:
                yield streams
            finally:
                tasks.cancel_scope.cancel()

    async def _hand_on(self, read: AsyncIterable[SessionMessage | Exception]) -> None:
        """Hand on what the SDK itself says of its requests."""
        async with self._items:
            async for item in read:
                if not is_stand_in(item):
                    await self._items.send((item, 0))

    async def _take(self, ident: Any, data: bytes) -> SessionMessage | Exception | None:
        """Read a message, and hand it on. `ident`: of the request that it answers; None where nobody waits for it."""
        item = await _message(data)
        if ident is not None:
            match item:
                case None:
                    item = _error(ident, "its answer is empty", ANSWER_LOST)
                case Unread(ident=None):
                    item = _error(ident, f"its answer cannot be used: {item}")
                case Exception() if not isinstance(item, Unread):
                    item = _error(ident, NOT_A_MESSAGE, ANSWER_LOST)
                case SessionMessage(message=JSONRPCResponse() | JSONRPCError() as answer):
                    answer.id = ident  # null in errors about a request that was not understood
        if item is not None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._items.send((item, len(data)))
        return item

    def _note(self, problem: str) -> None:
        self.problem = problem

    def _give_up(self, problem: str) -> None:
        self._note(problem)
        self.ended.set()


@asynccontextmanager
async def bounded(
    items: AsyncGenerator[Item],
    write: Callable[[SessionMessage, bytes | None], Awaitable[None]],
    traffic: Traffic,
    give_up: Callable[[str], None],
    pack: Callable[[SessionMessage], bytes | None] = lambda message: None,
) -> AsyncIterator[Streams]:
    """Yield streams of messages: what is read has its pace, and what is written is waited for by nobody."""
    to_session, from_server = anyio.create_memory_object_stream[Any](0)
    outbox = Outbox(give_up, pack)

    async def relay() -> None:
        with to_session, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            try:
                async with aclosing(items):
                    async for item, size in items:
                        if isinstance(item, SessionMessage):
                            item = _mended(item)
                        if isinstance(item, Unread) and item.ident is not None:
                            await outbox.send(_error(item.ident, f"the request was not read: {item}"))
                        await traffic.admit(item, size)
                        if item is not None:
                            await to_session.send(item)
            except Flooded as exc:
                give_up(str(exc))

    async def relay_out() -> None:
        try:
            async for message, packed in outbox.messages():
                with anyio.fail_after(WRITE_S):
                    traffic.note_sending(message)
                    await write(message, packed)
                    traffic.note_written(message)
        except TimeoutError:
            give_up(f"it has not read what it was sent for {WRITE_S:g} s")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass

    with to_session, from_server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay)
            tasks.start_soon(relay_out)
            try:
                yield from_server, outbox
            finally:
                tasks.cancel_scope.cancel()
