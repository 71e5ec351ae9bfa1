"""`Sender`: sends requests that are allowed, and makes of answers what scripts get."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio

from toolcell.calls.uploads import Upload
from toolcell.egress.allowed_requests import AllowedRequests
from toolcell.egress.answers import AnswerBody, Inflater, inflater_for
from toolcell.egress.connector import exchange, tls_context
from toolcell.egress.failures import CERTIFICATE, CONNECT, LIMIT, PROTOCOL, REFUSED, RESET, TIMEOUT
from toolcell.egress.overrides import check_long_form
from toolcell.egress.request import HttpRequest
from toolcell.egress.rules import Allow
from toolcell.egress.run_requests import RunRequests
from toolcell.egress.streams import httpcore
from toolcell.errors import ToolError
from toolcell.support.log import quiet_loggers
from toolcell_bridge.wire.messages import PART_BYTES

DEFAULT_TIMEOUT_S: Final = 60.0
"""To connect, and between two pieces of an answer, when the library does not say."""

MAX_CONNECTIONS: Final = 100
"""Connections of one run."""
MAX_OF_ALL: Final = 500
"""Connections of all runs of a runtime. A host program often may have 1024 open files."""
KEPT_CONNECTIONS: Final = 20
KEPT_S: Final = 30.0

_TELLING = ("httpcore.connection", "httpcore.http11", "httpcore.proxy")
"""At level DEBUG, httpcore logs whole headers, and these have secrets."""


class Sender:
    """Sends the requests of one runtime. Used in one event loop."""

    def __init__(self, allowed: AllowedRequests) -> None:
        self._allowed = allowed
        self._connections = anyio.CapacityLimiter(MAX_OF_ALL)

    async def send(
        self, request: HttpRequest, rule: Allow, run: RunRequests, upload: Upload | None, *, can_keep: bool
    ) -> dict[str, Any]:
        """Send a request; return its answer with the first part of the body. `can_keep`: the run may read on.

        Raises:
            ToolError: it failed, or is more than the run or the rule may send.
        """
        body, headers = self._allowed.filled(request, rule, None if upload is None else upload.size)
        content: Any = body
        size = len(request.body)  # with placeholders: what a script is told does not depend on secrets
        await check_long_form(request, upload)
        if upload is not None:
            size, content = upload.size, _Pieces(upload)
        if rule.max_bytes is not None and size > rule.max_bytes:
            raise ToolError(f"{request}: the body has {size} bytes, and may have {rule.max_bytes}", code=LIMIT)
        timeout_s = min(request.timeout_s or DEFAULT_TIMEOUT_S, 86_400.0)
        run.count_request()
        run.count_bytes(size)
        await self._allowed.wait_for_turn(rule, timeout_s)
        if run.pool is None:
            run.pool = httpcore.AsyncConnectionPool(
                ssl_context=tls_context(),
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=KEPT_CONNECTIONS if can_keep else 0,
                keepalive_expiry=KEPT_S,
                network_backend=self._allowed.network(self._connections),
            )
        target = request.target
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=target.scheme.encode(),
                host=target.host.encode(),
                port=target.port,
                target=f"{target.path}{target.query}".encode(),
            ),
            headers=headers,
            content=content,
            extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)},
        )
        with self.failures(request):
            response = await exchange(run.pool, sent)
            return await self._answer(request, rule, run, response, can_keep=can_keep)

    async def _answer(
        self, request: HttpRequest, rule: Allow, run: RunRequests, response: httpcore.Response, *, can_keep: bool
    ) -> dict[str, Any]:
        """Return the answer with the first part of its body, and keep the rest."""
        is_over = False
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
            headers = [each for each in headers if each[0].lower() not in ("transfer-encoding", "connection")]
            length = next((value for name, value in headers if name.lower() == "content-length"), "")
            headers, inflater = self._readable(request.method, headers)
            received = 0

            def count(size: int) -> None:
                nonlocal received
                received += size
                run.count_bytes(size)
                if rule.max_bytes is not None and received > rule.max_bytes:
                    raise ToolError(f"{request}: the answer has more than {rule.max_bytes} bytes", code=LIMIT)

            pieces = aiter(response.aiter_stream())
            body = AnswerBody(pieces, response.aclose, count=count, echoes=self._allowed.echoes, inflater=inflater)
            # Whether it is short is not decided by a length that has secrets in it
            is_short = length.isdigit() and (bool(self._allowed.echoes) or int(length) <= PART_BYTES)
            try:
                first = await body.read(PART_BYTES, fill=is_short or not can_keep)
            except Exception:
                if body.failure is None:
                    raise
                first = b""  # there is an answer, and the library finds out when it reads the body
            if body.failure is not None and not can_keep:
                raise body.failure
            is_over = body.is_empty
            rest = None if is_over or not can_keep else await run.keep(body)
            if is_over and length and request.method != "HEAD" and self._allowed.echoes:
                headers.append(("Content-Length", str(len(first))))
            is_over = is_over or rest is not None
        finally:
            if not is_over:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        echoes = self._allowed.echoes
        return {
            "status": response.status,
            "reason": echoes.clean_text(response.extensions.get("reason_phrase", b"").decode("latin-1")),
            "version": response.extensions.get("http_version", b"HTTP/1.1").decode("latin-1").removeprefix("HTTP/"),
            "headers": [[echoes.clean_text(name), echoes.clean_text(value)] for name, value in headers],
            "body": first,
            "rest": rest,
        }

    def _readable(self, method: str, headers: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], Inflater | None]:
        """Return the headers of a body that is looked through for secrets, and what decompresses it."""
        encoding = ", ".join(value for name, value in headers if name.lower() == "content-encoding")
        if not self._allowed.echoes or (method == "HEAD" and not encoding):
            return headers, None
        inflater = None if method == "HEAD" else inflater_for(encoding)
        gone = {"content-length", "content-encoding"} if inflater is not None else {"content-length"}
        return [each for each in headers if each[0].lower() not in gone], inflater

    @contextmanager
    def failures(self, request: object) -> Iterator[None]:
        """Turn what the network raises into failures of the call, without secrets."""
        echoes = self._allowed.echoes
        try:
            with quiet_loggers(*_TELLING):
                yield
        except ToolError as exc:
            code = {"not_permitted": REFUSED, "unavailable": CONNECT}.get(exc.code, exc.code)
            raise ToolError(echoes.clean_text(exc.message), code=code, retryable=exc.retryable) from None
        except httpcore.TimeoutException as exc:
            raise self._failed(request, exc, TIMEOUT) from None
        except (httpcore.ConnectError, OSError) as exc:
            is_unproven = isinstance(exc.__context__, ssl.SSLCertVerificationError)
            raise self._failed(request, exc, CERTIFICATE if is_unproven else CONNECT) from None
        except httpcore.NetworkError as exc:
            raise self._failed(request, exc, RESET) from None
        except httpcore.ProtocolError as exc:
            raise self._failed(request, exc, PROTOCOL) from None

    def _failed(self, request: object, exc: Exception, code: str) -> ToolError:
        kind = type(exc).__name__
        text = self._allowed.echoes.clean_text(f"{request}: {kind}{f': {exc}' if str(exc) else ''}")
        return ToolError(text, code=code, retryable=code in (CONNECT, TIMEOUT))


class _Pieces:
    """Reads a long body from its file. No generator: trio warns of those that a broken connection leaves behind."""

    def __init__(self, upload: Upload) -> None:
        self._upload, self._place = upload, 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._upload.file.seek(self._place)
        if not (piece := self._upload.file.read(PART_BYTES)):
            raise StopAsyncIteration
        self._place += len(piece)
        return piece
