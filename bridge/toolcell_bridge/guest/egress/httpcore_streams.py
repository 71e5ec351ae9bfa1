"""What httpcore takes for streams of its network backends, blocking and in asyncio."""

from __future__ import annotations

from typing import Any

from toolcell_bridge.guest.egress.connection import EgressFailed, HttpConnection, Steps
from toolcell_bridge.guest.egress.host_calls import HostCalls
from toolcell_bridge.guest.egress.http_socket import Translate


class HttpStream:
    """A connection to a host and a port, for blocking code."""

    def __init__(self, calls: HostCalls, peer: tuple[str, int], translate: Translate) -> None:
        self._calls, self._translate = calls, translate
        self._http = HttpConnection(*peer)

    def _run(self, steps: Steps[Any]) -> Any:
        try:
            return self._calls.run(steps)
        except EgressFailed as exc:
            raise self._translate(exc) from None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes of the answer; none at its end."""
        return self._http.take(max_bytes) or self._run(self._http.read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Take bytes of a request. It is sent when its answer is read, for only then its timeout is known."""
        self._run(self._http.write(buffer))

    def close(self) -> None:
        """Close the connection."""
        self._calls.drop(self._http.close())

    def start_tls(self, *_settings: Any, **_more_settings: Any) -> HttpStream:
        """Go on as `https`. The host verifies the certificate, whatever the settings are."""
        self._http.scheme = "https"
        return self

    def get_extra_info(self, info: str) -> Any:
        """Return what is known of the connection."""
        return _extra_info(self._http, info)


class AsyncHttpStream:
    """A connection to a host and a port, for asyncio."""

    def __init__(self, calls: HostCalls, peer: tuple[str, int], translate: Translate) -> None:
        self._calls, self._translate = calls, translate
        self._http = HttpConnection(*peer)

    async def _run(self, steps: Steps[Any]) -> Any:
        try:
            return await self._calls.run_async(steps)
        except EgressFailed as exc:
            raise self._translate(exc) from None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes of the answer; none at its end."""
        return self._http.take(max_bytes) or await self._run(self._http.read(max_bytes, timeout))

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Take bytes of a request. It is sent when its answer is read, for only then its timeout is known."""
        await self._run(self._http.write(buffer))

    async def aclose(self) -> None:
        """Close the connection."""
        self._calls.drop(self._http.close())

    async def start_tls(self, *_settings: Any, **_more_settings: Any) -> AsyncHttpStream:
        """Go on as `https`. The host verifies the certificate, whatever the settings are."""
        self._http.scheme = "https"
        return self

    def get_extra_info(self, info: str) -> Any:
        """Return what is known of the connection."""
        return _extra_info(self._http, info)


def _extra_info(http: HttpConnection, info: str) -> Any:
    """Return what is known of a connection. It has no object of TLS, so HTTP/2 is never negotiated."""
    if info == "is_readable":
        return http.is_readable
    return http.peer if info == "server_addr" else None
