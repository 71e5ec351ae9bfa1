"""Serve an ASGI application with uvicorn on a socket of one's own. Shared by everything over HTTP."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from toolcell.errors import UsageError


class HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Port 0 is any free one.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).partition(" (while")[0]
        cure = "; choose another port, or 0 for any free one" if exc.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot listen on {bracketed(host)}:{port}: {reason}{cure}") from exc


def url_of(listener: socket.socket, path: str = "") -> str:
    """Return the URL of a path on a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(host)}:{port}{path}"
