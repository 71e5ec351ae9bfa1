"""Connect to the web: look a host up once, check every address it has, and connect to one of exactly these.

A name that has another address a moment later (DNS rebinding) changes nothing: the checked address is the one that is
connected to. `Host` header, SNI and the certificate's check keep the name. This module follows no redirects.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

import anyio

from toolcell.egress.addresses import IPAddress, address_of
from toolcell.errors import MissingPackage, ToolError

try:
    import httpcore as httpcore  # for the modules beside this one
    import httpx
except ModuleNotFoundError as exc:
    raise MissingPackage("requests to the network need httpx: pip install 'toolcell[egress]'") from exc

MAX_ADDRESSES = 4
"""Most addresses of one host, that are tried one after the other."""


class Resolver(Protocol):
    """Looks up the addresses of hosts."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`, of both families, as text.

        Raises:
            OSError: the host is not known, or nobody can be asked.
        """
        ...


class AddressRules(Protocol):
    """Decides about the addresses of hosts."""

    def check_address(self, host: str, address: IPAddress) -> None:
        """Check an address of `host`.

        Raises:
            ToolError: nobody connects to it.
        """
        ...


class SystemResolver:
    """Asks the operating system."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return every address of `host`."""
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens every connection of a transport, and only to addresses that the rules allow."""

    def __init__(self, policy: AddressRules, resolver: Resolver) -> None:
        self._policy = policy
        self._resolver = resolver
        self._sockets = httpcore.AnyIOBackend()

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
        """
        failure: Exception | None = None
        for address in await self._checked(host, port):
            try:
                return await self._sockets.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        assert failure is not None
        raise failure

    async def _checked(self, host: str, port: int) -> list[str]:
        """Return the addresses to try. One refused address refuses the host: it is what an attacker would add."""
        try:
            found = [host] if address_of(host) is not None else await self._resolver.resolve(host, port)
        except (OSError, UnicodeError) as exc:
            raise ToolError(f"the host {host} was not found: {exc}", code="unavailable", retryable=True) from exc
        addresses = [address_of(text) for text in found]
        if not addresses or None in addresses:
            raise ToolError(f"the host {host} has no address", code="unavailable", retryable=True)
        for address in addresses:
            assert address is not None
            self._policy.check_address(host, address)
        return [str(address) for address in addresses][:MAX_ADDRESSES]

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: a URL never leads to a socket file."""
        raise ToolError(f"the socket file {path} is refused", code="not_permitted")

    async def sleep(self, seconds: float) -> None:
        """Wait between two tries."""
        await anyio.sleep(seconds)


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._response.aiter_stream():
            yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


class GuardedTransport(httpx.AsyncBaseTransport):
    """An httpx transport whose connections all go through `GuardedBackend`. Proxies and `.netrc` are not used."""

    def __init__(self, policy: AddressRules, resolver: Resolver | None = None) -> None:
        backend = GuardedBackend(policy, resolver or SystemResolver())
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls_context(), max_keepalive_connections=0, network_backend=backend
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its redirects are answers like any other."""
        url = request.url
        response = await self._pool.handle_async_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(response.status, headers=response.headers, stream=_ResponseStream(response))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the settings of TLS: certificates are checked, by `SSL_CERT_FILE` or `SSL_CERT_DIR` where one is set.

    Making them takes 20 ms, so they are made once.
    """
    return httpx.create_ssl_context()
