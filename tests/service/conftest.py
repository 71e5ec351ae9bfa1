"""What tests of the service share: an application in this process, and `toolcell serve` as a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.clock import Clock
from service_host import Served, client_of, registry
from toolcell.service import ServiceConfig, TenantConfig, create_app


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Client of a service with the tools of `service_host`, an audit log, and no tokens."""
    folder = tmp_path_factory.mktemp("service")
    config = ServiceConfig(state=folder / "state", defaults=TenantConfig(record=folder / "runs"))
    with client_of(create_app(config, registry=registry())) as client:
        yield client


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start `toolcell serve` on any free port; at the end every one that was started is ended."""
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Served:
            return stack.enter_context(Served(tmp_path, *flags, **options))

        yield start
