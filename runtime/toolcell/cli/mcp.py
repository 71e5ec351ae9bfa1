"""`toolcell mcp`: serve execute_code and a catalogue of tools to MCP clients, over stdio or HTTP."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
import typer

from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.flags import with_flags
from toolcell.cli.run import NamingCommand, RuntimeFlags
from toolcell.cli.terminal import reporting
from toolcell.config import Limits, PoolConfig
from toolcell.errors import UsageError


def register(app: typer.Typer, name: str) -> None:
    """Add the command."""
    app.command(name, cls=NamingCommand)(reporting(with_flags(mcp)))


def mcp(
    *,
    session: Annotated[
        bool, typer.Option("--session", help="Keep variables and files between the scripts of a client.")
    ] = False,
    expose_tools: Annotated[
        bool, typer.Option("--expose-tools", help="List each tool for the client too, beside execute_code.")
    ] = False,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    limits: Limits,
) -> None:
    """Serve execute_code and the tools to an MCP client, over stdin and stdout.

    What tools print goes to stderr. The server ends when its client closes stdin, and at SIGTERM and Ctrl-C.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("toolcell mcp needs the MCP SDK: pip install 'toolcell[mcp]'")
    from toolcell.mcp.stdio import protocol_streams, serve_stdio

    with protocol_streams() as (reader, writer):
        options = settings.options(builtins) | {"limits": limits, "pool": PoolConfig(warm=1)}

        async def serve() -> None:
            from toolcell.mcp.server import McpServer
            from toolcell.runtime import Runtime

            async with opened_dependencies(), Runtime(**options) as runtime:
                server = McpServer(runtime, keeps_state=session, exposes_tools=expose_tools, has_one_client=True)
                await serve_stdio(server, reader, writer)

        run_until_signal(serve)


def run_until_signal(serve: Callable[[], Awaitable[None]]) -> None:
    """Serve until the end, or until SIGTERM or SIGINT; then everything is closed in order."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_at_signal, tasks.cancel_scope)
            await serve()
            tasks.cancel_scope.cancel()

    anyio.run(main)


async def _cancel_at_signal(scope: anyio.CancelScope) -> None:
    if sys.platform == "win32":
        return  # event loops cannot wait for signals there; Ctrl-C ends the command at once
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
