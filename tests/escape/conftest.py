"""One host process for all attacks; it is started again whenever an attack took it down."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from escape.attack import Victim


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    """A host with default limits and the default policy."""
    host = Victim()
    yield host
    host.close()


@pytest.fixture
def listener() -> Iterator[int]:
    """A TCP port of this machine's loopback that accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]
