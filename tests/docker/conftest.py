"""Fixtures: an engine, and an image with this tree's guest."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from toolcell import PoolConfig, SyncRuntime
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import build, reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.shared.backend import DirectProxy

from .docker_sandboxes import LIMITS
from .shared_sandboxes import tools


@pytest.fixture(scope="session")
def docker_client() -> Iterator[EngineClient]:
    """The engine at DOCKER_HOST, else the local one."""
    client = EngineClient.connect_now()
    yield client
    client.api.close()


@pytest.fixture(scope="session")
def docker_image(docker_client: EngineClient) -> ImageRef:
    """The default image. An image with an older guest is rebuilt on its own base, which takes seconds."""
    found = reference.find_image(docker_client, reference.DEFAULT_IMAGE)
    assert found is not None, "a test that wants an engine carries the mark docker"
    return found if found.is_current else build.build_python(docker_client, found.base, tag=found.tag)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a shared container is used: over direct channels, or through its proxy as by a remote host."""
    way = getattr(request, "param", "direct")
    if "docker" not in request.keywords:
        return ""
    if way == "carried":
        monkeypatch.setattr(DirectProxy, "find", lambda init_pid, inner_pid: None)
    elif os.geteuid() != 0:
        pytest.skip("only root may take descriptors out of a container's process")
    return str(way)


@pytest.fixture
def runtime(docker_image: ImageRef, way: str) -> Iterator[SyncRuntime]:
    """A runtime in the forked mode."""
    backend = DockerBackend(docker_image.id, mode="forked")
    with SyncRuntime(tools(), backend=backend, limits=LIMITS, pool=PoolConfig(warm=2)) as runtime:
        yield runtime
