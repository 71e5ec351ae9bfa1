"""Give HTTP libraries connections that the host makes: each is changed right after its import.

That is not isolation: a script may undo it and gains nothing, for a sandbox has no network.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.egress.connection import ONLY_HTTP, Cause, EgressFailed
from toolcell_bridge.guest.egress.host_calls import HostCalls
from toolcell_bridge.guest.egress.http_socket import HttpSocket, socket_error
from toolcell_bridge.guest.errors import NO_SOCKETS
from toolcell_bridge.guest.placeholder import GuestDryRun
from toolcell_bridge.guest.surroundings import CHANGES

NO_PROXY: Final = EgressFailed(Cause.CONNECT, ONLY_HTTP + "leave out proxies and their environment variables")


class _Installed:
    """What connections make their calls with."""

    calls: HostCalls | None = None


def install(channel: Channel, dry_run: GuestDryRun | None) -> Callable[[str], None]:
    """Change the libraries that are imported, and the others when they are; return the script's `install_package`.

    `dry_run`: of the script that begins.
    """
    if _Installed.calls is None:
        _Installed.calls = HostCalls(channel)
        CHANGES.update(LIBRARIES)
        for name, change in LIBRARIES.items():
            if name in sys.modules:
                change(sys.modules[name])
        _explain_names()
    _Installed.calls.dry_run = dry_run
    return install_package


def install_package(name: str) -> None:
    """Install a package, such as "humanize>=4", and what it depends on; nothing where it can be imported already.

    Raises:
        RuntimeError: it may not be installed, or cannot be; the message says why.
        OSError: it does not fit into the sandbox's disk.
    """
    from toolcell_bridge.guest.egress import packages  # loads zipfile

    packages.install(_calls(), name)


def _calls() -> HostCalls:
    assert _Installed.calls is not None
    return _Installed.calls


def _explain_names() -> None:
    """Say where names are looked up how requests are meant: libraries show that error in their own."""
    look_up = socket.getaddrinfo

    def getaddrinfo(*args: Any, **options: Any) -> Any:
        try:
            return look_up(*args, **options)
        except socket.gaierror as exc:
            raise socket.gaierror(exc.errno, NO_SOCKETS) from None

    socket.getaddrinfo = getaddrinfo


def _change_http_client(client: ModuleType) -> None:
    """Change what urllib and pandas send with."""

    def translate(failed: EgressFailed) -> Exception:
        if failed.cause is Cause.PROTOCOL:
            error: Exception = client.RemoteDisconnected(failed.message)
            return error
        return socket_error(failed)

    def connect(self: Any) -> None:
        sys.audit("http.client.connect", self, self.host, self.port)
        if self._tunnel_host:
            raise translate(NO_PROXY)
        self.sock = HttpSocket(_calls(), (self.host, self.port), self.timeout, translate, asks_at_once=True)

    def connect_tls(self: Any) -> None:
        connect(self)
        self.sock.start_tls()

    client.__dict__["HTTPConnection"].connect = connect
    if "HTTPSConnection" in client.__dict__:
        client.__dict__["HTTPSConnection"].connect = connect_tls


def _change_urllib3(connection: ModuleType) -> None:
    """Change what requests sends with."""
    new_connection_error = connection.__dict__["NewConnectionError"]

    def new_socket(self: Any) -> HttpSocket:
        def translate(failed: EgressFailed) -> Exception:
            if failed.cause is Cause.CONNECT:
                error: Exception = new_connection_error(self, failed.message)
                return error
            return socket_error(failed)

        sys.audit("http.client.connect", self, self.host, self.port)
        if self._tunnel_host:
            raise translate(NO_PROXY)
        return HttpSocket(_calls(), (self.host, self.port), self.timeout, translate, asks_at_once=False)

    def connect_tls(self: Any) -> None:
        self.sock = new_socket(self)
        self.sock.start_tls()
        self.is_verified = True  # by the host

    connection.__dict__["HTTPConnection"]._new_conn = new_socket
    connection.__dict__["HTTPSConnection"].connect = connect_tls


def _change_waiting(wait: ModuleType) -> None:
    """Change how urllib3 sees that a connection was closed, and botocore that it may send a body."""
    wait_for_socket = wait.__dict__["poll_wait_for_socket"]

    def wait_for(sock: Any, *args: Any, **options: Any) -> Any:
        return sock.is_readable if isinstance(sock, HttpSocket) else wait_for_socket(sock, *args, **options)

    wait.__dict__["wait_for_socket"] = wait_for


def _httpcore_errors(module: ModuleType) -> Callable[[EgressFailed], Exception]:
    """Return what a backend of httpcore raises in place of a failure. `module`: of the backend."""
    errors = sys.modules[f"{module.__name__.partition('.')[0]}._exceptions"].__dict__
    by_cause = {
        Cause.CONNECT: errors["ConnectError"],
        Cause.CERTIFICATE: errors["ConnectError"],
        Cause.TIMEOUT: errors["ReadTimeout"],
        Cause.PROTOCOL: errors["RemoteProtocolError"],
        Cause.RESET: errors["ReadError"],
        Cause.BROKEN: errors["ReadError"],
    }

    def translate(failed: EgressFailed) -> Exception:
        error: Exception = by_cause[failed.cause](failed.message)
        return error

    return translate


def _change_httpcore(backend: ModuleType) -> None:
    """Change what blocking clients of httpx send with."""
    from toolcell_bridge.guest.egress.httpcore_streams import HttpStream

    translate = _httpcore_errors(backend)

    def connect_tcp(self: Any, host: str, port: int, **_options: Any) -> HttpStream:
        return HttpStream(_calls(), (host, port), translate)

    backend.__dict__["SyncBackend"].connect_tcp = connect_tcp


def _change_async_httpcore(backend: ModuleType) -> None:
    """Change what asyncio clients of httpx send with."""
    from toolcell_bridge.guest.egress.httpcore_streams import AsyncHttpStream

    translate = _httpcore_errors(backend)

    async def connect_tcp(self: Any, host: str, port: int, **_options: Any) -> AsyncHttpStream:
        return AsyncHttpStream(_calls(), (host, port), translate)

    backend.__dict__["AnyIOBackend"].connect_tcp = connect_tcp


def _change_aiohttp(connector: ModuleType) -> None:
    """Change what clients of aiohttp send with."""
    from toolcell_bridge.guest.egress.aiohttp_transport import AiohttpTransport

    errors = sys.modules["aiohttp.client_exceptions"].__dict__

    async def create_connection(self: Any, request: Any, *_settings: Any) -> Any:
        def translate(failed: EgressFailed) -> Exception:
            error: Exception
            if failed.cause is Cause.CONNECT:
                error = errors["ClientConnectorError"](request.connection_key, socket_error(failed))
            elif failed.cause is Cause.CERTIFICATE:
                error = errors["ClientConnectorCertificateError"](request.connection_key, socket_error(failed))
            elif failed.cause is Cause.TIMEOUT:
                error = errors["SocketTimeoutError"](failed.message)
            elif failed.cause is Cause.PROTOCOL:
                error = errors["ServerDisconnectedError"](failed.message)
            else:
                error = errors["ClientOSError"](*socket_error(failed).args)
            return error

        def fail(failed: EgressFailed) -> None:
            error = translate(failed)
            protocol.set_exception(error)  # for who waits for an answer
            protocol.connection_lost(socket_error(failed))  # for who reads one
            protocol.set_exception(error)  # for who waits for it later

        if request.proxy is not None:
            raise translate(NO_PROXY)
        protocol = self._factory()
        scheme = "https" if request.is_ssl() else "http"
        protocol.connection_made(AiohttpTransport(_calls(), (request.host, request.port), scheme, protocol, fail))
        return protocol

    connector.__dict__["TCPConnector"]._create_connection = create_connection


LIBRARIES: Final[dict[str, Callable[[ModuleType], None]]] = {
    "http.client": _change_http_client,
    "urllib3.connection": _change_urllib3,
    "urllib3.util.wait": _change_waiting,
    "pip._vendor.urllib3.connection": _change_urllib3,
    "pip._vendor.urllib3.util.wait": _change_waiting,
    "httpcore._backends.sync": _change_httpcore,
    "httpcore._backends.anyio": _change_async_httpcore,
    "httpcore2._backends.sync": _change_httpcore,
    "httpcore2._backends.anyio": _change_async_httpcore,
    "aiohttp.connector": _change_aiohttp,
}
"""What is done to each module after its import."""
