"""Connect to the web, and only to addresses that were checked.

`Host` header, SNI and the certificate's check keep the name. This module follows no redirects.
"""

from __future__ import annotations

import functools
import math
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import anyio

from toolcell.egress.resolver import CheckAddress, Resolver, SystemResolver, checked_addresses
from toolcell.egress.streams import AnswerStream, TcpStream, httpcore, httpx
from toolcell.support.event_loop import TimeSlice


async def exchange(pool: httpcore.AsyncConnectionPool, request: httpcore.Request) -> httpcore.Response:
    """Send a request on connections of a `GuardedBackend`; return its answer as soon as the head is there."""
    response = await pool.handle_async_request(request)
    response.extensions["network_stream"].end_head()
    return response


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens every connection of a transport, and only to addresses that the rules allow."""

    def __init__(
        self, check: CheckAddress, resolver: Resolver | None, connections: anyio.CapacityLimiter | None = None
    ) -> None:
        """`resolver`: None for the system's. `connections`: how many there may be, with those of others."""
        self._check = check
        self._resolver = resolver or SystemResolver()
        self._connections = connections or anyio.CapacityLimiter(math.inf)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of the checked addresses of `host`.

        Raises:
            ToolError: one of its addresses is refused, or the host is not known.
            ConnectTimeout: looking it up and trying its addresses took longer than `timeout` together.
        """
        many = "" if self._connections.available_tokens else ": too many are open"
        failure: Exception = httpcore.ConnectTimeout(f"no connection within {timeout} s{many}")

        def release() -> None:
            with suppress(RuntimeError):  # it was released before
                self._connections.release_on_behalf_of(release)

        try:
            with anyio.fail_after(timeout):
                await self._connections.acquire_on_behalf_of(release)
                for address in await checked_addresses(self._check, self._resolver, host, port):
                    try:
                        return AnswerStream(await TcpStream.connect(address, port), release)
                    except OSError as exc:
                        failure = httpcore.ConnectError(str(exc))
        except TimeoutError:
            pass
        except BaseException:
            release()
            raise
        release()
        raise failure


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        turn = TimeSlice()
        async for piece in self._response.aiter_stream():
            await turn.give_way()  # a server may send single bytes
            yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


class GuardedTransport(httpx.AsyncBaseTransport):
    """An httpx transport whose connections all go through `GuardedBackend`. Proxies and `.netrc` are not used."""

    def __init__(self, check: CheckAddress, resolver: Resolver | None = None) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls_context(), max_keepalive_connections=0, network_backend=GuardedBackend(check, resolver)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its redirects are answers like any other."""
        url = request.url
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        response = await exchange(self._pool, sent)
        return httpx.Response(response.status, headers=response.headers, stream=_ResponseStream(response))

    async def aclose(self) -> None:
        await self._pool.aclose()


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the settings of TLS: certificates are checked, by `SSL_CERT_FILE` or `SSL_CERT_DIR` where one is set.

    Making them takes 20 ms, so they are made once.
    """
    return httpx.create_ssl_context()
