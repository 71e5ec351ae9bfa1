"""`toolcell mcp`: serve execute_code and a catalogue of tools to MCP clients, over stdio or HTTP."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import typer

from toolcell.cli import exits
from toolcell.cli.arguments import read_token
from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.execution import showing_warnings
from toolcell.cli.flags import command
from toolcell.cli.mcp_servers import McpFlags
from toolcell.cli.run import RuntimeFlags
from toolcell.config import Limits, PoolConfig
from toolcell.errors import UsageError
from toolcell.support.event_loop import end_signals

if TYPE_CHECKING:
    from toolcell.mcp.server import McpServer


TOKEN_VARIABLE = "TOOLCELL_MCP_TOKEN"


@dataclass(frozen=True, slots=True)
class HttpFlags:
    """Flags of a server over HTTP."""

    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", help="Serve over HTTP instead of stdio.")
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help=f"File with the bearer token that clients need; or ${TOKEN_VARIABLE}."
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="HOST", help="Another Host header to accept.")
    ] = None
    allow_origin: Annotated[
        list[str] | None, typer.Option("--allow-origin", metavar="URL", help="Origin of a web page that may connect.")
    ] = None

    async def serve(self, make_options: Callable[[], dict[str, Any]], servers: McpFlags, **kinds: bool) -> None:
        from toolcell.mcp.http import StaticToken, http_app, parse_address, serve_http
        from toolcell.support.asgi import allow_connections, listening

        host, port = parse_address(self.http or "")
        token = read_token(self.token_file, TOKEN_VARIABLE)
        verifier = StaticToken(token) if token or self.token_file is not None else None
        hosts, origins = tuple(self.allow_host or ()), tuple(self.allow_origin or ())
        allow_connections()
        with closing(listening(host, port)) as listener:
            async with _opened(make_options(), servers, **kinds) as server:
                app = http_app(server, host, verifier=verifier, hosts=hosts, origins=origins)
                await serve_http(server, app, listener, lambda url: typer.echo(f"serving {url}", err=True))


def mcp(
    action: Annotated[
        Literal["serve", "login"], typer.Argument(help="login: log in to the servers of --mcp and --mcp-config.")
    ] = "serve",
    *,
    session: Annotated[
        bool, typer.Option("--session", help="Keep variables and files between the scripts of a client.")
    ] = False,
    expose_tools: Annotated[
        bool, typer.Option("--expose-tools", help="Also offer each tool to the client, beside execute_code.")
    ] = False,
    over_http: HttpFlags,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    servers: McpFlags,
    limits: Limits,
) -> None:
    """Serve execute_code and the tools to an MCP client, over stdin and stdout, or to many over HTTP.

    Output of tools goes to stderr. The server ends when its client closes stdin, and at SIGTERM and Ctrl-C.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UsageError("toolcell mcp needs the MCP SDK: pip install 'toolcell[mcp]'")
    if action == "login":
        anyio.run(_log_in, servers)
        return
    make = partial(_options, settings, builtins, limits)
    if over_http.http is not None:
        with redirect_stdout(sys.stderr):
            run_until_signal(partial(over_http.serve, make, servers, keeps_state=session, exposes_tools=expose_tools))
        return
    if over_http.token_file is not None or over_http.allow_host or over_http.allow_origin:
        raise UsageError("--token-file, --allow-host and --allow-origin are about HTTP; add --http HOST:PORT")
    from toolcell.mcp.stdio import protocol_streams, serve_stdio

    with protocol_streams() as (reader, writer):
        options = make()

        async def serve() -> None:
            kinds = {"keeps_state": session, "exposes_tools": expose_tools, "has_one_client": True}
            async with _opened(options, servers, **kinds) as server:
                await serve_stdio(server, reader, writer)

        run_until_signal(serve)


async def _log_in(servers: McpFlags) -> None:
    """Connect with each server, asking a person to log in where it wants that, and keep the tokens.

    Raises:
        UsageError: no server is named.
    """
    registry = servers.with_registry(None)
    if registry is None:
        raise UsageError("toolcell mcp login: name a server, with --mcp NAME=URL or --mcp-config FILE")
    async with servers.connected(registry, asks=True) as is_complete:
        for name, client in registry.mcp_servers().items():
            typer.echo(f"{name}: connected, {len(client.tool_names)} tools")
    if not is_complete:
        raise typer.Exit(exits.UNAVAILABLE)


def _options(settings: RuntimeFlags, builtins: BuiltinFlags, limits: Limits) -> dict[str, Any]:
    return settings.options(builtins) | {"limits": limits, "pool": PoolConfig(warm=1)}


@asynccontextmanager
async def _opened(options: dict[str, Any], servers: McpFlags, **kinds: bool) -> AsyncIterator[McpServer]:
    """Open a runtime with the tools of `servers`, and its own server."""
    from toolcell.mcp.server import McpServer
    from toolcell.runtime import Runtime

    registry = servers.with_registry(options["registry"])
    options = options | {"registry": registry}
    async with opened_dependencies(), servers.connected(registry), Runtime(**options) as runtime:
        yield McpServer(runtime, **kinds)


def run_until_signal(serve: Callable[[], Awaitable[None]]) -> None:
    """Serve until the end, or until SIGTERM or SIGINT; then everything is closed in order."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_at_signal, tasks.cancel_scope)
            await serve()
            tasks.cancel_scope.cancel()

    with showing_warnings():
        anyio.run(main)


async def _cancel_at_signal(scope: anyio.CancelScope) -> None:
    async for _ in end_signals():
        scope.cancel()
        return


register = command(mcp)
