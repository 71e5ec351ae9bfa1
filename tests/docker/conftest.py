"""An engine and the image of this tree's guest, or the reason why there is none. Nothing is downloaded here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker import image_build, images
from toolcell.sandbox.docker.client import Client
from toolcell.sandbox.docker.images import ImageRef


@pytest.fixture(scope="session")
def docker_client() -> Iterator[Client]:
    """The engine that DOCKER_HOST names, else the local one."""
    try:
        client = Client.connect_now()
    except SandboxUnavailable as exc:
        pytest.skip(str(exc))
    yield client
    client.api.close()


@pytest.fixture(scope="session")
def docker_image(docker_client: Client) -> ImageRef:
    """The default image. One with an older guest is built anew on its own base, which takes seconds."""
    found = images.find_image(docker_client, images.DEFAULT_IMAGE)
    if found is None:
        pytest.skip(f"the engine has no image {images.DEFAULT_IMAGE}: {images.HOW_TO_BUILD}")
    return found if found.is_current else image_build.renew(docker_client, found)
