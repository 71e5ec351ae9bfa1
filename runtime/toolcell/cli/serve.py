"""`toolcell serve`: sandboxes for agents elsewhere, over HTTP."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.execution import showing_warnings
from toolcell.cli.flags import command
from toolcell.cli.mcp_servers import McpFlags
from toolcell.cli.run import record_config, record_path, split
from toolcell.config import Limits, PoolConfig
from toolcell.errors import UsageError
from toolcell.support import daemon_threads


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Flags for the settings of access."""

    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", envvar="TOOLCELL_TOKENS", help="Token store of `toolcell tokens`."),
    ] = None
    oidc: Annotated[
        str | None, typer.Option("--oidc", metavar="ISSUER", help="Accept JWTs from this issuer (https://...).")
    ] = None
    audience: Annotated[
        str | None, typer.Option("--audience", metavar="NAME", help="Audience that JWTs must have (claim aud).")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate with its chain, PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxies",
            metavar="ADDRESS",
            help="A proxy, or network, whose X-Forwarded-For is trusted.",
        ),
    ] = None

    def settings(self, base: Any) -> dict[str, Any]:
        """Return the settings that were given. `base` has those of the configuration file.

        Raises:
            UsageError: flags that belong together are not.
        """
        given: dict[str, Any] = {
            "tokens": self.tokens,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "trusted_proxies": tuple(self.trusted_proxies) if self.trusted_proxies else None,
        }
        if (self.oidc is None) != (self.audience is None):
            raise UsageError("--oidc ISSUER and --audience NAME belong together: JWTs for other services are not taken")
        if self.oidc is not None:
            own = base.oidc.model_dump() if base.oidc is not None else {}
            given["oidc"] = own | {"issuer": self.oidc, "audience": self.audience}
        return {name: value for name, value in given.items() if value is not None}


MAX_LINES = 10_000
"""Of the log that wait to be written."""
SWITCH_S = 0.0005
"""How long a thread keeps the interpreter from the event loop. Python's default, 5 ms, is a quarter of a small run."""
YOUNG_OBJECTS = (5_000, 5, 50)
"""New objects after which the garbage collector looks, and how often at older ones. With Python's default, (700, 10,
10), it looks at each row of large data again and again."""
END_S = 1.0
"""What the last of them may take."""


@dataclass(frozen=True, slots=True)
class TenantFlags:
    """Flags for what every tenant has."""

    tools: Annotated[
        list[str] | None, typer.Option("--tools", "-t", metavar="FILE|MODULE", help="Tools that scripts may call.")
    ] = None
    packages: Annotated[
        list[str] | None, typer.Option("--packages", "-p", metavar="NAME", help="A package that scripts may import.")
    ] = None
    preload: Annotated[
        list[str] | None, typer.Option("--preload", metavar="MODULE", help="A module imported before a script starts.")
    ] = None
    backend: Annotated[str | None, typer.Option("--backend", metavar="NAME", help="process or docker.")] = None
    record: Annotated[
        str | None,
        typer.Option(
            "--record", metavar="DIR", help="Folder of the records, NAME.db for each tenant, and not the state."
        ),
    ] = None
    record_config: Annotated[
        Path | None, typer.Option("--record-config", metavar="FILE", help="Settings of the records, as TOML.")
    ] = None
    warm: Annotated[int | None, typer.Option("--warm", metavar="N", help="Sandboxes started in advance.")] = None

    def settings(self, servers: McpFlags, limits: Limits) -> dict[str, Any]:
        given = {
            "tools": tuple(self.tools or ()),
            "packages": split(self.packages),
            "preload": split(self.preload),
            "backend": self.backend,
            "record": record_path(self.record),
            "record_config": record_config(self.record_config),
            "mcp": {name: {"approve": servers.mcp_approve, **each} for name, each in servers.servers().items()},
            "pool": PoolConfig(warm=self.warm) if self.warm is not None else None,
            "limits": limits if limits.model_fields_set else None,
        }
        return {name: each for name, each in given.items() if each}


def serve(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings of service and tenants, as TOML.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="PORT", help="Port; 0 is any free one.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="Folder for suspended runs and sessions.")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option("--drain-s", metavar="SECONDS", help="Time for current runs to finish at SIGTERM.")
    ] = None,
    package_index: Annotated[
        str | None,
        typer.Option("--package-index", metavar="URL", help="Where packages come from: URL, or 'URL @ADDRESS'."),
    ] = None,
    tenants: TenantFlags,
    builtins: BuiltinFlags,
    servers: McpFlags,
    access: AccessFlags,
    limits: Limits,
) -> None:
    """Serve /v1/execute, sessions, runs and tools over HTTP. Flags override the settings of --config.

    On 127.0.0.1, local programs need no token. To listen on another address, the service needs --tokens or --oidc.
    SIGTERM lets runs finish; a second one ends the service at once.
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UsageError("toolcell serve needs its web server: pip install 'toolcell[service]'")
    from toolcell.service.config import ServiceConfig

    base = ServiceConfig.from_toml(config) if config is not None else ServiceConfig()
    own = {"host": host, "port": port, "state": state, "drain_s": drain_s, "package_index": package_index}
    settings = _settings_above(base, own | access.settings(base), tenants.settings(servers, limits))
    with redirect_stdout(sys.stderr):
        registry = builtins.with_tools(None, settings.defaults.backend)
        _prefer_the_event_loop()
        with showing_warnings(), _request_log() as lines:
            anyio.run(_serve, settings, registry, lines.say)


def _prefer_the_event_loop() -> None:
    """Let threads at work on large data, and passes of the garbage collector, hold the event loop for less time."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # what is loaded stays
    gc.set_threshold(*YOUNG_OBJECTS)


class _Lines(logging.Handler):
    """Writes the lines of a service to stderr, in a thread: whoever does not read them keeps no request waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = daemon_threads.start(self._write, name="toolcell-log")

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, text: str | None) -> None:
        """Write a line; None is the last one. When too many wait, it is dropped."""
        with suppress(queue.Full):
            self._texts.put_nowait(text)

    def end(self) -> None:
        """Wait for what is left, for a short while."""
        self.say(None)
        self._thread.join(END_S)

    def _write(self) -> None:
        while (text := self._texts.get()) is not None:
            with suppress(OSError):  # past `sys.stderr`, whose lock would be held while nobody reads
                os.write(2, f"{text}\n".encode())


@contextmanager
def _request_log() -> Iterator[_Lines]:
    """Write one line of JSON for each request."""
    logger, lines = logging.getLogger("toolcell.service.request_log"), _Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        lines.end()


def _settings_above(base: Any, own: dict[str, Any], tenant: dict[str, Any]) -> Any:
    """Return the settings of a configuration file with the flags that were given above them."""
    given = {name: each for name, each in own.items() if each is not None}
    given["defaults"] = base.defaults.model_copy(update=tenant)
    return type(base)(**{name: getattr(base, name) for name in base.model_fields_set} | given)


async def _serve(settings: Any, registry: Any, say: Callable[[str], None]) -> None:
    from toolcell.service.app import create_app
    from toolcell.service.server import check_host
    from toolcell.service.server import serve as serve_app
    from toolcell.service.service import Service
    from toolcell.support.asgi import allow_connections, listening

    service = Service(settings, registry)
    check_host(service, settings.host)
    allow_connections()
    with closing(listening(settings.host, settings.port)) as listener:
        async with opened_dependencies():
            await serve_app(create_app(service), listener, say)


register = command(serve)
