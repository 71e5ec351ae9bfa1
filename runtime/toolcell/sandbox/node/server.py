"""`NodeServer`: on a node, a process backend and the port on which callers reach its sandboxes."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio

from toolcell.config import Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker.backend import DockerBackend
from toolcell.sandbox.node.connection import NodeConnection, NodeService, context_of_node
from toolcell.sandbox.process import packages as environments
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.process.child_probe import Probe
from toolcell.sandbox.process.probes import probe_all
from toolcell.sandbox.process.root_filesystem import interpreter


def missing_layers(probes: Iterable[Probe], required: Collection[str]) -> str:
    """Say which required layers are not live on this node, why, and what to do; nothing if all are."""
    return "; ".join(
        f"layer {each.name} is not live: {each.detail}; {each.fix}"
        for each in probes
        if each.name in required and each.live is False
    )


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a caller wants on its nodes."""

    policy: dict[str, Any]
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    tls: bool = False
    sandboxes: Literal["process", "docker"] = "process"
    image: str | None = None


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens, and what it can do."""

    host: str
    port: int
    key: bytes = field(repr=False)
    unsupported: dict[str, str]
    certificate: str = field(default="", repr=False)
    """Certificate of its TLS, as PEM; empty without TLS."""


class NodeServer:
    """Listens until it is stopped. Its event loop runs in a thread: the process belongs to Ray."""

    def __init__(self, host: str, settings: NodeSettings) -> None:
        self._host, self._settings = host, settings
        self._ready: Future[NodeAddress] = Future()
        self._stop: Any = None
        self._thread = threading.Thread(target=self._main, name="toolcell-node", daemon=True)

    def start(self) -> NodeAddress:
        """Start to listen.

        Raises:
            SandboxUnavailable: this node cannot start sandboxes; the message says why.
            PackageError: its packages cannot be had.
        """
        self._thread.start()
        return self._ready.result()

    def stop(self) -> None:
        """End every sandbox, and wait for that."""
        if self._stop is not None:
            self._stop()
        self._thread.join(30.0)

    def _main(self) -> None:
        try:
            anyio.run(self._serve, backend="asyncio")
        except BaseException as exc:
            if not self._ready.done():
                self._ready.set_exception(exc)

    async def _serve(self) -> None:
        backend = self._backend()
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        tls: tuple[ssl.SSLContext | None, str] = context_of_node() if self._settings.tls else (None, "")

        async def always(_: bytes) -> Backend:
            return backend

        service = NodeService(always, os.urandom(32), tls[0])
        await backend.open()
        try:
            server = await loop.create_server(lambda: NodeConnection(service), self._host, 0, family=socket.AF_INET)
            try:
                self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
                port = server.sockets[0].getsockname()[1]
                self._ready.set_result(NodeAddress(self._host, port, service.key, dict(backend.unsupported), tls[1]))
                await stopped.wait()
            finally:
                server.close()
        finally:
            await backend.close()  # its sandboxes end, and with them the tasks of their connections
            if service.tasks:
                await asyncio.wait(service.tasks, timeout=10.0)

    def _backend(self) -> ProcessBackend | DockerBackend:
        wanted = self._settings
        policy = Policy(**wanted.policy)
        if wanted.sandboxes == "docker":
            return DockerBackend(wanted.image, policy=policy, packages=wanted.packages, preload=wanted.preload)
        if missing := missing_layers(probe_all(), policy.require):
            raise SandboxUnavailable(missing)
        environment: Path | None = None
        if wanted.packages:
            environment = environments.resolve(list(wanted.packages), python=interpreter(None).executable).path
        return ProcessBackend(policy=policy, packages=environment, preload=wanted.preload)
