"""`AllowedTransport`: requests that an `Egress` allows, to checked addresses, with the secrets of its rules."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from toolcell.egress import Egress
from toolcell.egress.echoes import Echoes
from toolcell.egress.request import HttpRequest
from toolcell.egress.urls import parse_url
from toolcell.errors import ToolError
from toolcell.mcp.address_guard import send_to

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
            size = int(request.headers.get("content-length", "0"))
            _, headers = self._allowed.filled(asked, rule, size)
            await self._allowed.wait_for_turn(rule, TURN_S)
            addresses = await self._allowed.addresses_of(target)
        except ToolError as exc:
            raise httpx2.ConnectError(exc.message) from None
        response = await send_to(self._inner, addresses, request, headers)
        return without_secrets(response, self._allowed.echoes)

    async def aclose(self) -> None:
        """Close every connection."""
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
        stream=_Cleaned(response.stream, echoes),
        extensions=response.extensions,
    )


class _Cleaned(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, echoes: Echoes) -> None:
        self._inner, self._echoes = inner, echoes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held = b""
        async for piece in self._inner:
            data = self._echoes.clean(held + piece)
            ends = len(data) - self._echoes.held_back(data)
            held = data[ends:]
            if ends:
                yield data[:ends]
        if held:
            yield held

    async def aclose(self) -> None:
        await self._inner.aclose()
