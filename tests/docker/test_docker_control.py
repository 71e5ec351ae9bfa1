"""Suspended runs are carried on, and scripts repaired, in containers too."""

from __future__ import annotations

from typing import Literal

import pytest

from control.conftest import Effects
from control.test_control_everywhere import carry_on
from control.test_held_runs import SAME, carried_on, held, resume, suspended
from toolcell import PoolConfig, SyncRuntime
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.images.reference import ImageRef

pytestmark = pytest.mark.docker


def test_runs_are_carried_on_in_containers(docker_image: ImageRef) -> None:
    assert carry_on(Effects(), backend=DockerBackend(docker_image.id)).value[1:] == ["paid x 1", ["a", "b"]]


@pytest.mark.parametrize("mode", ["single", "forked"])
def test_runs_are_held_in_containers(docker_image: ImageRef, mode: Literal["single", "forked"]) -> None:
    """The script reads a clock that no journal repeats, so only its own container can go on with it."""
    backend = DockerBackend(docker_image.id, mode=mode)
    effects, other = Effects(), Effects()
    with SyncRuntime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        result, left = suspended(runtime, effects), suspended(runtime, other, SAME)
        assert held(runtime) == 2
        assert resume(runtime, effects, result).ok
        (run,) = runtime.runtime.sandboxes.held_runs._runs.values()
        assert run.connection is not None
        runtime._opened().run_sync(run.connection.sandbox.kill)
        carried_on(runtime, other, left)
        assert suspended(runtime, effects).ok is False and held(runtime) == 1
    assert held(runtime) == 0
