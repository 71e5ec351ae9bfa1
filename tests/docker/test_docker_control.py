"""Suspended runs are carried on, and scripts repaired, in containers too."""

from __future__ import annotations

import pytest

from control.conftest import Effects
from control.test_control_everywhere import carry_on
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.images.reference import ImageRef

pytestmark = pytest.mark.docker


def test_runs_are_carried_on_in_containers(docker_image: ImageRef) -> None:
    assert carry_on(Effects(), backend=DockerBackend(docker_image.id)).value[1:] == ["paid x 1", ["a", "b"]]
