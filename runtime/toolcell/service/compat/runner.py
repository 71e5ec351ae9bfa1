"""`HttpRunner`: runs scripts in a sandbox service that speaks `POST /execute`. The tools stay here."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack, closing
from typing import Any, Final

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette

from toolcell.asgi import HttpServer, bracketed, listening
from toolcell.config import MIB, settings_of
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.lifetime import Lifetime, OpenedInBlock
from toolcell.service.compat.callbacks import PATH, CallbackDispatch, CallingRun
from toolcell.service.compat.retrying import Failure, delay_s, failure_of
from toolcell.service.compat.runner_options import CodeFile, CodeRequest, CodeResult, RunnerOptions
from toolcell.service.compat.settings import split_address
from toolcell.text import cut_bytes
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.registry import registry_of
from toolcell.tools.run_state import new_id

ANSWER_BYTES: Final = 50 * MIB
GRACE_S: Final = 15.0
"""Waited for the answer beyond the script's own time, so that the logs of a timeout arrive."""
DELETE_S: Final = 5.0
COMPLETED: Final = "execution completed"
CANCELLED: Final = "execution cancelled"
IDEMPOTENT: Final = "toolcell-idempotent"
_EVERY: Final = ("", "0.0.0.0", "::")


class HttpRunner(OpenedInBlock):
    """Sends scripts to a service, and answers their tool calls from a registry."""

    def __init__(
        self,
        url: str,
        options: RunnerOptions | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url`: of the service, such as http://sandbox:9000. `transport`: of httpx, for a proxy or a test."""
        if not str(url).startswith(("http://", "https://")):
            raise UsageError(f"HttpRunner takes the URL of a service, such as http://sandbox:9000, not {url!r:.80}")
        self._url = url.rstrip("/")
        self.options = settings_of(RunnerOptions, options, "options")
        self._transport = transport
        self._callbacks = CallbackDispatch(checks_tokens=self.options.callback_token)
        self._base = self.options.callback_external.rstrip("/")
        self._starting = anyio.Lock()
        self._server: HttpServer | None = None
        self._lifetime = Lifetime("HttpRunner", self._open)

    @property
    def callback_app(self) -> Starlette:
        """Answers tool calls; serve it yourself with `callback_external`."""
        return self._callbacks.app

    @property
    def callback_url(self) -> str:
        """Where the service sends tool calls; empty before the first script."""
        return f"{self._base}{PATH}" if self._base else ""

    async def open(self) -> None:
        """Get ready. No server is started yet."""
        await self._lifetime.open()

    async def close(self) -> None:
        """End the callback server and the connections."""
        await self._lifetime.close()

    async def _open(self, stack: AsyncExitStack) -> None:
        self._base = self.options.callback_external.rstrip("/")
        token = {"authorization": f"Bearer {self.options.token}"} if self.options.token else {}
        client = httpx.AsyncClient(transport=self._transport, trust_env=False, headers=token, follow_redirects=False)
        self._http = await stack.enter_async_context(client)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)
        self._server = None
        stack.push_async_callback(self._stop_callbacks)

    # Running

    async def run(
        self,
        request: CodeRequest | str,
        tools: CallableTools | Iterable[Any] | None = None,
        *,
        context: RunContext | None = None,
    ) -> CodeResult:
        """Run a script with `tools` as what it may call.

        Raises:
            UsageError: the service refused the request; nothing ran.
            SandboxUnavailable: the service could not be reached, or may have run the script and its answer was lost.

        Cancellation: stops waiting, and the script's calls are refused; the service ends the script.
        """
        self._lifetime.check()
        request = CodeRequest(request) if isinstance(request, str) else request
        await self._start_callbacks()
        ident = request.execution_id or new_id()
        given = registry_of(tools, "tools=").snapshot()
        run = CallingRun(ident, given, RunContext(run_id=ident) if context is None else context)
        session = request.session_id or new_id()
        how = CANCELLED
        self._callbacks.begin(run)
        try:
            answer = await self._execute(self._body(request, run, session), request)
            how = COMPLETED
        finally:
            self._callbacks.end(run, how)
        if not request.session_id:
            await self._delete(session)
        return self._result(answer)

    def _body(self, request: CodeRequest, run: CallingRun, session: str) -> bytes:
        body = {
            "execution_id": run.execution_id,
            "callback_url": self.callback_url,
            "callback_token": run.token,
            "code": request.code,
            "runtime": request.runtime,
            "session_id": session,
            "timeout": request.timeout_s or self.options.timeout_s,
            "files": [
                {"name": each.name, "mime": each.mime, "data": base64.b64encode(each.data or b"").decode("ascii")}
                for each in request.files
            ],
        }
        return json.dumps(body, allow_nan=False).encode()

    async def _execute(self, body: bytes, request: CodeRequest) -> dict[str, Any]:
        """Send a request, and again where that is safe."""
        limit_s = (request.timeout_s or self.options.timeout_s) + GRACE_S
        last: httpx.Response | Exception
        for attempt in range(1, self.options.max_retries + 1):
            try:
                last = await self._sent(body, limit_s)
                if last.status_code == 200:
                    return _object(last)
            except httpx.HTTPError as exc:
                last = exc
            failure = failure_of(last)
            if failure is Failure.FINAL:
                raise UsageError(f"the sandbox refused the request: {_told(last)}")
            if failure is Failure.UNKNOWN and not await self._is_idempotent(last):
                raise SandboxUnavailable(f"sandbox failed, and the script may have run: {_told(last)}; not sent again")
            if attempt < self.options.max_retries:
                after = last.headers.get("retry-after") if isinstance(last, httpx.Response) else None
                await anyio.sleep(delay_s(attempt, self.options.retry_delay_s, after))
        raise SandboxUnavailable(f"sandbox unreachable after {self.options.max_retries} attempts: {_told(last)}")

    async def _sent(self, body: bytes, limit_s: float) -> httpx.Response:
        timeout = httpx.Timeout(limit_s, connect=min(10.0, limit_s))
        headers = {"content-type": "application/json"}
        async with self._http.stream(
            "POST", f"{self._url}/execute", content=body, headers=headers, timeout=timeout
        ) as response:
            whole = bytearray()
            async for piece in response.aiter_bytes():
                whole += piece
                if len(whole) > ANSWER_BYTES:
                    raise SandboxUnavailable(f"the sandbox answered with more than {ANSWER_BYTES} bytes")
        return httpx.Response(response.status_code, headers=_plain(response.headers), content=bytes(whole))

    async def _is_idempotent(self, last: httpx.Response | Exception) -> bool:
        """Ask whether the service runs each execution_id once. Only then a request that may have run is sent again."""
        if self.options.assume_idempotent or (isinstance(last, httpx.Response) and IDEMPOTENT in last.headers):
            return True
        for attempt in range(1, self.options.max_retries + 1):
            try:
                answer = await self._http.get(f"{self._url}/health", timeout=5.0)
                return IDEMPOTENT in answer.headers
            except httpx.HTTPError:  # it may just be starting again
                if attempt < self.options.max_retries:
                    await anyio.sleep(delay_s(attempt, self.options.retry_delay_s, None))
        return False

    async def _delete(self, session: str) -> None:
        """Delete a workspace that no other script will use. The service forgets it anyway when it is old."""
        with anyio.move_on_after(DELETE_S), contextlib.suppress(httpx.HTTPError):
            await self._http.delete(f"{self._url}/workspace/{session}")

    def _result(self, answer: dict[str, Any]) -> CodeResult:
        logs, _ = cut_bytes(str(answer.get("logs") or ""), self.options.max_output_bytes)
        files = answer.get("files")
        found = [self._file(each) for each in files if isinstance(each, dict)] if isinstance(files, list) else []
        code = answer.get("exit_code")
        return CodeResult(
            output=str(answer.get("output") or ""),
            logs=logs,
            exit_code=code if isinstance(code, int) else 0,
            error=str(answer.get("error") or ""),
            files=tuple(found),
            raw=answer,
        )

    def _file(self, each: dict[str, Any]) -> CodeFile:
        data: bytes | None = None
        if isinstance(text := each.get("data"), str):
            try:
                data = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                data = None
        if data is not None and len(data) > self.options.max_file_bytes:
            data = None
        return CodeFile(str(each.get("name", "")), str(each.get("mime", "")), data)

    # The callback server

    async def _start_callbacks(self) -> None:
        async with self._starting:
            if self._base:
                return
            _check_asyncio()
            host, port = split_address(self.options.callback_addr)
            advertised = self.options.callback_advertise
            if host in _EVERY and not advertised:
                raise UsageError(
                    f"callback_addr={self.options.callback_addr!r} is no address that the service can call; say which "
                    'is: callback_advertise="10.0.0.5"'
                )
            listener = listening(host or "0.0.0.0", port)
            self._server, self._server_ended = _server_of(self._callbacks.app), anyio.Event()
            self._tasks.start_soon(self._serve, self._server, listener)
            where, actual = listener.getsockname()[:2]
            self._base = f"http://{_with_port(advertised, actual) if advertised else f'{bracketed(where)}:{actual}'}"

    async def _serve(self, server: HttpServer, listener: socket.socket) -> None:
        with closing(listener), anyio.CancelScope(shield=True):  # it ends its connections when it is told to exit
            await server.serve([listener])
        self._server_ended.set()

    async def _stop_callbacks(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            await self._server_ended.wait()


def _server_of(app: Starlette) -> HttpServer:
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    return HttpServer(config)


def _check_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError as exc:
        cure = "serve callback_app yourself and name its URL: callback_external=..."
        raise UsageError(f"the callback server needs asyncio; {cure}") from exc


def _with_port(address: str, port: int) -> str:
    host, colon, own = address.rpartition(":")
    has_port = bool(colon) and own.isdigit() and (":" not in host or host.endswith("]"))
    return address if has_port else f"{bracketed(address)}:{port}"


def _plain(headers: httpx.Headers) -> dict[str, str]:
    """Drop what was about the encoding of the body: it is decoded."""
    return {name: value for name, value in headers.items() if name not in ("content-encoding", "content-length")}


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        said = response.json()
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise SandboxUnavailable("the sandbox answered 200 without a JSON object; the script may have run")
    return said


def _told(problem: httpx.Response | Exception) -> str:
    if isinstance(problem, httpx.Response):
        return f"sandbox returned {problem.status_code}: {problem.text[:500]}"
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
