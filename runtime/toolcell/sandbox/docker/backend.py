"""The Docker backend: sandboxes as hardened containers, each started ahead of need and removed after one run.

The kernel and the daemon enforce the limits; this module passes the values.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar

from toolcell.config import Limits, Policy, names_of
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.sandbox.docker.container import Engine
from toolcell.sandbox.docker.hardening import (
    Blueprint,
    container_config,
    is_gvisor,
    required_layers,
    rlimits_for,
    settings_frame,
)
from toolcell.sandbox.docker.images.reference import SHELL_IMAGE
from toolcell.sandbox.interpreter import FEW_ARENAS, ONE_THREAD, hashing

END_MARKER_BYTES = 16


class DockerBackend(Backend):
    """Starts sandboxes as containers of a Docker or Podman daemon."""

    name: ClassVar[str] = "docker"
    isolates: ClassVar[bool] = True

    def __init__(
        self,
        image: str | None = None,
        *,
        runtime: str | None = None,
        policy: Policy | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        docker_host: str | None = None,
        cpus: float = 1.0,
    ) -> None:
        """Describe the containers; `open` connects to the daemon.

        Args:
            image: None is the image that `toolcell images build` makes.
            runtime: a name that the daemon knows, "runsc" for gVisor.
            cpus: processors that one sandbox may keep busy.

        Raises:
            UsageError: `cpus` is too small, or packages are given beside a shell.
        """
        if policy is not None and policy.shell and packages:
            raise UsageError("packages= does not go with shell=True in Docker; give image= one that has both")
        if cpus < 0.01:
            raise UsageError(f"cpus must be at least 0.01, not {cpus}")
        self.policy: Policy = policy or Policy()
        self._image = image or (SHELL_IMAGE if self.policy.shell else None)
        self._runtime = runtime
        self.packages, self.preload = names_of(packages, "packages"), names_of(preload, "preload")
        self._docker_host, self._cpus = docker_host, cpus
        self._required = required_layers(self.policy, runtime)
        self._engine: Engine | None = None
        self._blueprint: Blueprint | None = None

    @property
    def fixed(self) -> frozenset[str]:
        """Limits that cannot change after a container was created. A run with other values gets a new container."""
        # The daemon cannot change rlimits of running processes; under gVisor it can change nothing.
        unchangeable = ("memory_bytes", "processes", "cpu_s", "cpu_cores") if is_gvisor(self._runtime) else ()
        return frozenset({"open_files", *unchangeable})

    @property
    def lacks(self) -> Mapping[str, str]:
        """Cases of the backend contract (`toolcell.testing`) that this runtime cannot meet, with the reasons."""
        if not is_gvisor(self._runtime):
            return {}
        return {
            "limits.inodes": "gVisor does not count the files of a tmpfs",
            "limits.processes": "gVisor reports a refused fork to the script only",
            "limits.lowered_for_one_run": "gVisor's own memory for each process meets the memory limit first",
        }

    @property
    def engine(self) -> Engine:
        """The open connection to the daemon.

        Raises:
            SandboxUnavailable: the backend is not open.
        """
        if self._engine is None:
            raise SandboxUnavailable("the docker backend is not open")
        return self._engine

    async def open(self) -> None:
        """Connect to the daemon and find the image.

        Raises:
            SandboxUnavailable: there is no daemon, image or runtime of that name; the message says what to do.
        """
        engine = await Engine.open(
            docker_host=self._docker_host, image=self._image, packages=self.packages, runtime=self._runtime
        )
        self._blueprint = Blueprint(
            image=engine.image.id,
            runtime=self._runtime,
            cpus=self._cpus,
            labels=engine.labels,
            executes=self.policy.shell,
            environment=ONE_THREAD | FEW_ARENAS | hashing(self.policy.hash_seed),
        )
        self._engine = engine

    async def start(self, limits: Limits) -> Sandbox:
        """Start one sandbox and send its guest the settings.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        engine, blueprint = self.engine, self._blueprint
        assert blueprint is not None
        # Random, so that a script cannot write it: a script that did would cut its own output short.
        end_marker = b"\0" + secrets.token_bytes(END_MARKER_BYTES - 1)
        config = container_config(blueprint, limits)
        sandbox = await engine.launch(config, blueprint, limits, required=self._required, end_marker=end_marker)
        try:
            rlimits = rlimits_for(limits, blueprint)
            await sandbox.stream.send(settings_frame(limits, self.policy, self.preload, rlimits, end_marker))
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    async def close(self) -> None:
        """Remove everything that the backend started. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()
