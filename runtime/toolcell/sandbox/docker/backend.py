"""The Docker backend: sandboxes as hardened containers, each started ahead of need and removed after one run.

The kernel and the daemon enforce the limits; this module passes the values.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

from toolcell.config import Limits, Policy, names_of
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import INTERRUPTED_S, Backend, Exit, Sample, Sandbox
from toolcell.sandbox.docker.attach import AttachedStream
from toolcell.sandbox.docker.container import Container, ContainerState, Engine
from toolcell.sandbox.docker.hardening import (
    Blueprint,
    container_config,
    daemon_layers,
    is_gvisor,
    live_layers,
    required_layers,
    resources,
    rlimits_for,
    settings_frame,
)
from toolcell.sandbox.docker.images.reference import SHELL_IMAGE
from toolcell.sandbox.interpreter import FEW_ARENAS, ONE_THREAD, hashing

END_MARKER_BYTES = 16


class DockerSandbox(Container, Sandbox):
    """One container with one guest."""

    stream: AttachedStream
    backend = "docker"
    interrupted_s = INTERRUPTED_S
    answer_s = 0.2
    """How long a script may take to say which line it is at: the daemon is in between."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        container_id: str,
        stream: AttachedStream,
        state: ContainerState,
        *,
        blueprint: Blueprint,
        limits: Limits,
        ident: str,
        required: frozenset[str],
    ) -> None:
        super().__init__(engine, name, container_id, stream, state)
        self._blueprint, self._required = blueprint, required
        self._current_limits = limits
        self._is_asking = self._has_asked = False
        self.id = ident
        self.limits = limits
        self.layers: Mapping[str, str] = {}

    @property
    def outside_layers(self) -> Mapping[str, str]:
        """Layers that it has from outside, of which its guest does not tell."""
        return daemon_layers(self.inspected)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run when a required layer is missing."""
        self.layers = live_layers(self._required, self.outside_layers, layers)
        self.usage.set_baseline()
        self._ask_usage()

    async def prepare(self, limits: Limits) -> None:
        """Lower the limits from outside to those of the next run."""
        wanted = resources(self._blueprint, limits)
        if wanted != resources(self._blueprint, self._current_limits, starting=self._current_limits is self.limits):
            await self._owner.client.update(self.container_id, wanted)
        if limits is not self._current_limits:
            self._lower_cpu(limits)
        self._current_limits = limits

    def _lower_cpu(self, limits: Limits) -> None:
        """Lower the CPU limit of the processes, where this host may. Elsewhere only the run's monitor enforces it."""
        import resource  # not on Windows, where no process of a container is visible

        value = rlimits_for(limits, self._blueprint).cpu_s
        for pid in self.usage.pids():
            with suppress(OSError, ValueError):
                resource.prlimit(pid, resource.RLIMIT_CPU, (value, value))

    def read_output(self) -> tuple[bytes, bytes]:
        """Take the raw output so far. A container has one stream for it, so all of it counts as descriptor 2's."""
        return b"", self.stream.take_output()

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure the container from its cgroup where that is visible; else return the daemon's last answer."""
        measured = self.usage.read(brief=brief)
        if not brief:
            self._ask_usage()
        kills = self.state.memory_kills
        return replace(measured, memory_kills=kills) if kills > measured.memory_kills else measured

    def _ask_usage(self) -> None:
        if not self.usage.is_local and not self._is_asking and self.is_alive():
            self._is_asking = True
            self._owner.run_in_background(self._take_stats)

    async def _take_stats(self) -> None:
        try:
            stats = await self._owner.client.stats(self.container_id)
            self.usage.record_stats(stats, is_first=not self._has_asked)
            self._has_asked = True
        finally:
            self._is_asking = False

    async def read_on(self) -> None:
        """Read what the script writes, also when nobody receives from the bridge. Runs until it is cancelled."""
        await self.stream.read_on()

    def cpu_now(self) -> float | None:
        """Return the CPU seconds used so far where the container's cgroup is visible. Any thread may call it."""
        return self.usage.read(brief=True).cpu_s if self.usage.is_local else None

    async def ended(self) -> Exit:
        """Wait, at most a few seconds, until the container has ended; return how."""
        end = await super().ended()
        sample = self.usage.read()
        return replace(end, cpu_s=sample.cpu_s, peak_memory_bytes=sample.peak_memory_bytes)


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
        self._count = itertools.count(1)

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
        make = partial(
            DockerSandbox, blueprint=blueprint, limits=limits, ident=f"d{next(self._count)}", required=self._required
        )
        sandbox = await engine.launch(make, container_config(blueprint, limits), blueprint, end_marker=end_marker)
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
