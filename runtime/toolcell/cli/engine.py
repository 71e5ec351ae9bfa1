"""One command's connection to the container engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolcell.errors import SandboxUnavailable

if TYPE_CHECKING:
    from toolcell.sandbox.docker import EngineClient

LOCAL = "unix:///var/run/docker.sock"

GET_ENGINE = (
    "install Docker (Debian: apt install docker.io) or Podman and start its service, or set DOCKER_HOST to where one is"
)


def host() -> str:
    return os.environ.get("DOCKER_HOST") or LOCAL


@contextmanager
def engine() -> Iterator[EngineClient]:
    """Connect to the engine. The client library is slow to import, so it is not imported when the socket is missing.

    Raises:
        SandboxUnavailable: there is no engine, or it does not answer.
    """
    where = host()
    if where.startswith("unix://") and _is_missing(Path(where.removeprefix("unix://"))):
        raise SandboxUnavailable(f"there is no container engine at {where}: {GET_ENGINE}")
    from toolcell.sandbox.docker import EngineClient

    client = EngineClient.connect_now()
    try:
        yield client
    finally:
        client.api.close()


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except PermissionError:  # the client reports it better
        return False
