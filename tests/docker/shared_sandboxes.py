"""Shared containers for tests, and the common beginning of attack scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.reaper import LABEL_BACKEND
from toolcell.sandbox.docker.shared.backend import SharedSandbox

from .docker_sandboxes import LIMITS, containers_of

ECHO = "set_result(call_tool('echo', {'q': 1}))"

TRY = """
import errno, os
def refused(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
"""


def tools() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument as it was given, whatever it is."""
        return q

    return registry


@asynccontextmanager
async def running(image: ImageRef, **options: Any) -> AsyncIterator[tuple[Runtime, DockerBackend]]:
    backend = DockerBackend(image.id, mode="forked", **options)
    async with Runtime(tools(), backend=backend, limits=LIMITS, pool=PoolConfig(warm=2)) as runtime:
        yield runtime, backend


async def greeted(backend: DockerBackend, limits: Limits = LIMITS) -> tuple[GuestConnection, SharedSandbox]:
    sandbox = await backend.start(limits)
    assert isinstance(sandbox, SharedSandbox)
    connection = GuestConnection(sandbox)
    await connection.hello()
    return connection, sandbox


async def containers(backend: DockerBackend) -> list[str]:
    return await containers_of(backend.engine.client, LABEL_BACKEND, backend.engine.key)
