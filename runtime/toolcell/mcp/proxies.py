"""The proxies that the environment names, as other clients take them: `HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`."""

from __future__ import annotations

import urllib.request

import httpx2


def proxy_for(url: httpx2.URL) -> str | None:
    """Return the proxy of this environment for a URL, or None. Names may be in small letters, too."""
    found = urllib.request.getproxies()
    proxy = found.get(url.scheme) or found.get("all")
    if proxy is None or urllib.request.proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


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
        """Close every connection."""
        for transport in self._transports.values():
            await transport.aclose()
