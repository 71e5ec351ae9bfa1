"""The proxies that the environment names, as other clients take them: `HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`."""

from __future__ import annotations

import ipaddress
import urllib.request
from collections.abc import Iterator

import httpx2


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
        """Close every connection."""
        for transport in self._transports.values():
            await transport.aclose()
