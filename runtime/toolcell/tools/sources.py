"""Where tools come from that nobody wrote in this program: parts of toolcell that are built on a registry.

They import the registry, so it cannot import them; it loads one by its name when it is asked for.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from toolcell.errors import RegistrationError, UsageError
from toolcell.tools.call import RunContext
from toolcell.tools.events import EventBus
from toolcell.tools.registry_state import RegistryState
from toolcell.tools.view import RegistryView

SOURCES: Mapping[str, tuple[str, str]] = {"mcp": ("toolcell.mcp.client", "mcp")}
"""Module and extra of each."""


class ConnectedRegistry(RegistryView):
    """The part of a registry that has tools from elsewhere, and ends the connections."""

    def __init__(self, state: RegistryState, events: EventBus, shared_run: RunContext) -> None:
        super().__init__(state, events, shared_run)
        self._sources: list[Any] = []
        self._connecting: set[str] = set()
        """Names of servers that are being connected with."""

    @abstractmethod
    def _check_open(self) -> None:
        """Check that tools may be registered."""

    async def add_mcp_server(self, name: str, **options: Any) -> Any:
        """Connect with an MCP server, and register its tools as `name.tool`. `close()` ends the connection.

        `options`: `command=[...]` with `env` and `cwd`, or `url=...` with `headers` or `auth`; `allow` and `deny`,
        globs over the server's names; `labels`, `timeout_s`, `approve`, `changed`, `broken`, `pins`, `elicitation`,
        `sampling`, `max_restarts`, `restart_window_s`, and those of `ToolOptions`. Returns an `McpClient` of
        `toolcell.mcp.client`.

        Raises:
            McpServerError: the server cannot be started or reached, or does not speak MCP.
            RegistrationError: there is a server of that name already.
            UsageError: an option is wrong, or the extra `mcp` is not installed.
        """
        self._check_open()
        name = str(name)
        if name in self._connecting or name in self.mcp_servers():
            raise RegistrationError(f"MCP server {name[:80]!r}: there is one of that name; close it, or choose another")
        self._connecting.add(name)
        try:
            source = await load_source("mcp").add_mcp_server(self, name, **options)
            self._sources.append(source)
        finally:
            self._connecting.discard(name)
        return source

    def mcp_servers(self) -> dict[str, Any]:
        """Return the `McpClient` of each server that was added and not closed, by name. `state` tells how it is."""
        return {source.name: source for source in self._sources if source.state != "closed"}

    async def close(self) -> None:
        """End the connections of `add_mcp_server`. Safe to call twice."""
        while self._sources:
            await self._sources.pop().close()


def load_source(kind: str) -> Any:
    """Return the module that connects a registry with such a source.

    Raises:
        UsageError: what it needs is not installed.
    """
    module, extra = SOURCES[kind]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.startswith("toolcell"):
            raise
        raise UsageError(f"{exc.name} is not installed; run: pip install 'toolcell[{extra}]'") from exc
