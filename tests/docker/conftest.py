"""An engine and the image of this tree's guest, or the reason why there is none. Nothing is downloaded here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import Client
from toolcell.sandbox.docker.images import build, reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.shared.direct_channel import DirectProxy


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
    found = reference.find_image(docker_client, reference.DEFAULT_IMAGE)
    if found is None:
        pytest.skip(f"the engine has no image {reference.DEFAULT_IMAGE}: {reference.HOW_TO_BUILD}")
    return found if found.is_current else build.renew(docker_client, found)


@pytest.fixture(params=["direct", "carried"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """For the forked mode: with the lines taken out of the relay, and with the relay carrying them as it does for a remote host."""
    if "docker" not in request.keywords:
        return ""
    if request.param == "carried":
        monkeypatch.setattr(DirectProxy, "find", lambda init_pid, inner_pid: None)
    elif os.geteuid() != 0:
        pytest.skip("only root may take descriptors out of a container's process")
    return str(request.param)
