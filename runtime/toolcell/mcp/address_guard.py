"""Which URLs a login may lead to: a stranger's server names them. https to public addresses, or what the user named.

A host's addresses are looked up once, checked, and exactly these are connected to.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

import anyio
import httpx2
from mcp_types import INTERNAL_ERROR

from toolcell.egress.addresses import address_of, networks_of, refusal
from toolcell.egress.resolver import MAX_ADDRESSES, SystemResolver
from toolcell.errors import McpServerError, UsageError
from toolcell.support.asgi import is_loopback

OF_LOGIN = "toolcell_login"
"""Extension of a request that a login makes, and not MCP."""
FAILED = "toolcell_failed"
"""Extension of the answer to such a request that was refused or not answered: why. An exception would end the
connection with the server, and not only the login. Of a request of MCP: why its login failed; it is not sent."""
MAX_ANSWER_BYTES = 256 * 1024
ANSWER_S = 30.0
"""For one whole answer of an authorization server."""


def origin(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


class AddressGuard:
    """Decides about the URLs of one server's logins."""

    def __init__(self, url: str, issuer: str | None, private: Sequence[str]) -> None:
        """`issuer` and `private`: what the user configured, beside the server at `url` itself.

        Raises:
            UsageError: tokens would be sent to the server in clear.
        """
        server = httpx2.URL(url)
        self._private = {name.lower().rstrip(".") for name in private}
        self._networks = networks_of(private)
        self._is_local = is_loopback(server.host)
        self._configured = {origin(server)} | ({origin(httpx2.URL(issuer))} if issuer is not None else set())
        for each in (server, *([httpx2.URL(issuer)] if issuer is not None else ())):
            if each.scheme != "https" and not is_loopback(each.host) and not self._is_private(each.host):
                cure = f"use https://, or private=[{each.host!r}] in a network that you trust"
                raise UsageError(f"auth: tokens for {each.host} would be sent in clear over http://; {cure}")

    def _is_private(self, host: str) -> bool:
        address = address_of(host)
        inside = address is not None and any(
            each.version == address.version and address in each for each in self._networks
        )
        return inside or host.lower().rstrip(".") in self._private

    async def addresses(self, url: httpx2.URL) -> list[str] | None:
        """Return the checked addresses to connect to; None for a host that the user configured.

        Raises:
            McpServerError: the URL is refused, or its host is not known.
        """
        shown = f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"[:200]
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise McpServerError(f"the login leads to {shown}, which is not a plain https URL; it is refused")
        if origin(url) in self._configured or self._is_private(url.host):
            return None
        if is_loopback(url.host) and self._is_local:
            return None
        if url.scheme != "https":
            raise McpServerError(f"the login leads to {shown}, and http:// is refused; https:// is needed")
        try:
            found = (
                [url.host]
                if address_of(url.host) is not None
                else await SystemResolver().resolve(url.host, url.port or 443)
            )
        except (OSError, UnicodeError) as exc:
            raise McpServerError(f"the login leads to {shown}, and this host was not found: {exc}") from exc
        for each in found:
            reason = refusal(ip_address(each), self._networks)
            if reason is not None:
                cure = "if it is right, name its host in private=[...] or issuer=..."
                raise McpServerError(f"the login leads to {shown}, whose address is refused ({reason}); {cure}")
        return [*found[:MAX_ADDRESSES]]


class LoginTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of a login to checked addresses, and reads their answers whole, within bounds."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, guard: AddressGuard | None) -> None:
        """`guard`: None, when `inner` checks the addresses."""
        self._inner, self._guard = inner, guard

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request; a redirect is an answer like any other."""
        if (problem := request.extensions.get(FAILED)) is not None:
            error = {"code": INTERNAL_ERROR, "message": problem}
            return httpx2.Response(401, json={"jsonrpc": "2.0", "id": None, "error": error})
        if OF_LOGIN not in request.extensions:
            response = await self._inner.handle_async_request(request)
            return await _whole(response) if response.status_code in (401, 403) else response
        try:
            addresses = None if self._guard is None else await self._guard.addresses(request.url)
            return await _whole(await self._send_to(request, addresses))
        except McpServerError as exc:
            problem = str(exc)
        except httpx2.HTTPError as exc:
            reason = type(exc).__name__ if self._guard is not None else f"{exc}"
            problem = f"the login: {request.url.host[:200]} cannot be reached: {reason}"
        return httpx2.Response(503, extensions={FAILED: problem})

    async def _send_to(self, request: httpx2.Request, addresses: list[str] | None) -> httpx2.Response:
        request.extensions = {**request.extensions, "timeout": httpx2.Timeout(ANSWER_S).as_dict()}
        if addresses is None:
            return await self._inner.handle_async_request(request)
        return await send_to(self._inner, addresses, request)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def send_to(
    inner: httpx2.AsyncBaseTransport,
    addresses: Sequence[str],
    request: httpx2.Request,
    headers: Sequence[tuple[bytes, bytes]] | None = None,
) -> httpx2.Response:
    """Send a request to the first of the addresses that can be reached. `headers`: in place of its own.

    Raises:
        ConnectError: none can be reached.
    """
    failure: httpx2.ConnectError | None = None
    for address in addresses:
        try:
            return await inner.handle_async_request(_to(address, request, headers))
        except httpx2.ConnectError as exc:
            failure = exc
    raise failure or httpx2.ConnectError("the host has no address")


def _to(address: str, request: httpx2.Request, headers: Sequence[tuple[bytes, bytes]] | None) -> httpx2.Request:
    """Return a request to this address. `Host` header, SNI and the certificate's check keep the name."""
    extensions = {**request.extensions, "sni_hostname": request.url.host}
    url, given = request.url.copy_with(host=address), request.headers if headers is None else headers
    return httpx2.Request(request.method, url, headers=given, stream=request.stream, extensions=extensions)


async def _whole(response: httpx2.Response) -> httpx2.Response:
    """Return an answer with its body read, so that no stream is left open.

    Raises:
        ReadError: it is too long.
        ReadTimeout: it takes too long.
    """
    body = bytearray()
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    try:
        with anyio.fail_after(ANSWER_S):
            async for chunk in response.stream:
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise httpx2.ReadError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise httpx2.ReadTimeout(f"no whole answer in {ANSWER_S:g} s") from None
    finally:
        await response.aclose()
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in _OF_STREAM]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body))


_OF_STREAM = ("transfer-encoding", "content-length")
