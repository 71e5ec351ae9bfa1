"""Fixtures: an engine, and an image with this tree's guest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import build, reference
from toolcell.sandbox.docker.images.reference import ImageRef


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
