"""`Connections`: the MCP servers whose tools a registry has.

The client imports the registry, so nothing here can import it; it is loaded by its name when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from toolcell.errors import RegistrationError, UsageError


class Connections:
    """Servers by name, and their ends."""

    def __init__(self) -> None:
        self._clients: list[Any] = []
        self._connecting: set[str] = set()
        """Names of servers that are being connected with."""

    async def connect(self, registry: object, name: str, options: Mapping[str, Any]) -> Any:
        """Connect with a server, and register its tools.

        Raises:
            RegistrationError: there is a server of that name already.
            UsageError: the extra `mcp` is not installed.
        """
        name = str(name)
        if name in self._connecting or name in self.open():
            raise RegistrationError(f"MCP server {name[:80]!r}: there is one of that name; close it, or choose another")
        self._connecting.add(name)
        try:
            client = await _client_module().add_mcp_server(registry, name, **options)
            self._clients.append(client)
        finally:
            self._connecting.discard(name)
        return client

    def open(self) -> dict[str, Any]:
        """Return the clients that are not closed, by name."""
        return {client.name: client for client in self._clients if client.state != "closed"}

    async def close(self) -> None:
        """End every connection. Safe to call twice."""
        while self._clients:
            await self._clients.pop().close()


def _client_module() -> Any:
    """Return the module that connects a registry with a server.

    Raises:
        UsageError: what it needs is not installed.
    """
    try:
        return importlib.import_module("toolcell.mcp.client")
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("toolcell"):
            raise
        raise UsageError(f"{exc.name} is not installed; run: pip install 'toolcell[mcp]'") from exc
