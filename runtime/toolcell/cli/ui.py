"""`toolcell ui`: look at an audit log in a browser on this machine."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from toolcell.cli.audit_terminal import Dir, KeyFiles, known_keys, record_of
from toolcell.cli.flags import command
from toolcell.errors import UsageError

if TYPE_CHECKING:
    import socket

    from toolcell.audit import RecordDatabase, Verifier


def ui(
    directory: Dir = None,
    *,
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0 is any free one.")] = 0,
    key: KeyFiles = None,
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME", help="Backend of replays: process or docker.")
    ] = "process",
) -> None:
    """Show the runs of a log in a browser: scripts, calls, output, limits, and whether the log was changed.

    It listens on this machine only, and prints an address with a token: whoever has the address sees the log.
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UsageError("toolcell ui needs its web server: pip install 'toolcell[service]'")
    from toolcell.support.asgi import listening

    path = record_of(directory)
    path.id()
    with closing(listening("127.0.0.1", port)) as listener:
        anyio.run(_serve, path, known_keys(key), backend, listener)


async def _serve(path: RecordDatabase, keys: list[Verifier], backend: str, listener: socket.socket) -> None:
    from toolcell.service.viewer.app import serve_log

    await serve_log(path, keys, listener, backend=backend, on_address=typer.echo)


register = command(ui)
