"""Sandboxes as containers: one hardened container for each, made ahead of need and thrown away after its run.

Puts together an engine, limits and the guest's settings. Enforcement is the kernel's and the daemon's; this file says
how much. The forked mode, many sandboxes in one container, is `forked`'s.
"""

from __future__ import annotations

import itertools
import resource
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Literal

import msgpack

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Exit, Sample, Sandbox
from toolcell.sandbox.docker.engine import Container, Engine
from toolcell.sandbox.docker.hardening import (
    OWN_PROCESSES,
    Blueprint,
    container_config,
    is_gvisor,
    required_layers,
    resources,
    walls_of,
)
from toolcell.sandbox.interpreter import ADDRESS_SLACK_BYTES, ONE_THREAD, hashing
from toolcell_bridge.guest.lint import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan

if TYPE_CHECKING:
    from toolcell.sandbox.docker.shared.backend import ForkedSandboxes

SHARED_ID_PROCESSES = 65_536
"""RLIMIT_NPROC counts a user id over the whole machine, and all containers have the same: it must never be what
refuses. The container's own ceiling does."""

FENCE_BYTES = 16

GUEST_LAYERS = frozenset({"landlock", "seccomp", "capabilities", "no_new_privs", "rlimits"})
"""What only the guest can raise, and says in its Hello before any foreign code runs. All else is the daemon's word."""


def rlimits_for(limits: Limits, blueprint: Blueprint | None = None) -> RlimitPlan:
    """Per-process ceilings inside a container. gVisor counts user ids for itself, so there it is they that refuse."""
    has_own_kernel = blueprint is not None and blueprint.is_gvisor
    return RlimitPlan(
        cpu_s=ceil(limits.cpu_s) + 1,
        address_space_bytes=limits.memory_bytes + ADDRESS_SLACK_BYTES,
        processes=limits.processes + OWN_PROCESSES if has_own_kernel else SHARED_ID_PROCESSES,
        open_files=limits.open_files,
        file_size_bytes=limits.disk_bytes,
    )


def settings_frame(
    limits: Limits, policy: Policy, preload: Sequence[str], rlimits: RlimitPlan, fence: bytes = b"", **more: object
) -> bytes:
    """The first frame that a guest in a container reads, in either mode."""
    body: bytes = msgpack.packb(
        {
            "frame_bytes": limits.frame_bytes,
            "environment": policy.environment(),
            "rlimits": asdict(rlimits),
            "preload": [*PRELOAD[policy.lint], *preload],
            "lint": policy.lint,
            "fence": fence,
            **more,
        }
    )
    return len(body).to_bytes(4, "big") + body


def accepted(required: frozenset[str], walls: Mapping[str, str], said: Mapping[str, str]) -> dict[str, str]:
    """All live layers: the daemon's walls and those that the guest raised.

    Raises:
        SandboxUnavailable: a required one is missing.
    """
    layers = {**walls, **{name: detail for name, detail in said.items() if name in GUEST_LAYERS}}
    missing = sorted(required - layers.keys())
    if missing:
        raise SandboxUnavailable(
            f"required isolation is not live in the container: {', '.join(missing)}; `toolcell doctor` says why"
        )
    return layers


class DockerSandbox:
    """One container with one guest."""

    def __init__(
        self,
        container: Container,
        engine: Engine,
        blueprint: Blueprint,
        limits: Limits,
        ident: str,
        required: frozenset[str],
    ) -> None:
        self._container = container
        self._engine = engine
        self._blueprint = blueprint
        self._required = required
        self._held_to = limits
        self._is_asking = False
        self._has_asked = False
        self._end = Exit()
        self.id = ident
        self.stream = container.stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "docker"

    @property
    def container_id(self) -> str:
        """For `docker inspect`."""
        return self._container.id

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run without a required one."""
        self.layers = accepted(self._required, walls_of(self._container.inspected), layers)
        self._container.meter.begin()
        self._ask_daemon()

    def is_alive(self) -> bool:
        """False once its end is known."""
        return self._container.is_alive()

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of the run it is handed to, from outside."""
        wanted = resources(self._blueprint, limits)
        if wanted != resources(self._blueprint, self._held_to, starting=self._held_to is self.limits):
            await self._engine.client.update(self._container.id, wanted)
        if limits is not self._held_to:
            self._lower_cpu(limits)
        self._held_to = limits

    def _lower_cpu(self, limits: Limits) -> None:
        """Where its processes are ours to touch; elsewhere the watch alone holds it to less than it was made with."""
        value = rlimits_for(limits).cpu_s
        for pid in self._container.meter.pids():
            with suppress(OSError, ValueError):
                resource.prlimit(pid, resource.RLIMIT_CPU, (value, value))

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw so far. A container has one such stream: all of it counts as descriptor 2's."""
        return b"", self.stream.take_output()

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now, from its cgroup where that is visible; else what the daemon last said."""
        container = self._container
        measured = container.meter.read(brief=brief)
        if not brief:
            self._ask_daemon()
        kills = container.fate.memory_kills
        return replace(measured, memory_kills=kills) if kills > measured.memory_kills else measured

    def _ask_daemon(self) -> None:
        if not self._container.meter.is_local and not self._is_asking and self.is_alive():
            self._is_asking = True
            self._engine.soon(self._take_stats)

    async def _take_stats(self) -> None:
        try:
            stats = await self._engine.client.stats(self._container.id)
            self._container.meter.take_stats(stats, is_first=not self._has_asked)
            self._has_asked = True
        finally:
            self._is_asking = False

    def kill(self) -> None:
        """Have every process inside killed at once."""
        self._container.kill()

    def freeze(self) -> bool:
        """It is destroyed right after its run."""
        return False

    async def ended(self) -> Exit:
        """Wait until it has ended, at most a few seconds, and say how."""
        end = await self._container.ended()
        sample = self._container.meter.read()
        return replace(end, cpu_s=sample.cpu_s, peak_memory_bytes=sample.peak_memory_bytes)

    async def destroy(self) -> None:
        """Kill and remove the container. Safe to call twice."""
        await self._container.destroy()


class DockerBackend:
    """Starts sandboxes as containers of a Docker or Podman daemon."""

    name: ClassVar[str] = "docker"
    isolates: ClassVar[bool] = True

    def __init__(
        self,
        image: str | None = None,
        *,
        runtime: str | None = None,
        mode: Literal["single", "forked"] = "single",
        policy: Policy | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        docker_host: str | None = None,
        cpus: float = 1.0,
    ) -> None:
        """`image`: None is the one that `toolcell images build` makes. `runtime`: as the daemon names it, "runsc" for
        gVisor. `cpus`: processors that one container may keep busy.

        Raises:
            UsageError: there is no such mode, not under this runtime, or no processor.
        """
        if mode not in ("single", "forked"):
            raise UsageError(f'mode must be "single" or "forked", not {mode!r}')
        if mode == "forked" and is_gvisor(runtime):
            raise UsageError(
                f'mode="forked" does not go with runtime={runtime!r}: it keeps sandboxes apart with Landlock, which '
                f'gVisor has not; use mode="single" under gVisor, or leave the runtime out'
            )
        if cpus < 0.01:
            raise UsageError(f"cpus must be at least 0.01, not {cpus}")
        self._image, self._runtime, self._mode = image, runtime, mode
        self._policy = policy or Policy()
        self._packages, self._preload = tuple(packages), tuple(preload)
        self._docker_host, self._cpus = docker_host, cpus
        self._required = required_layers(self._policy, runtime)
        self._engine: Engine | None = None
        self._blueprint: Blueprint | None = None
        self._forked: ForkedSandboxes | None = None
        self._count = itertools.count(1)

    @property
    def fixed(self) -> frozenset[str]:
        """Limits that a container keeps as it was made; a run that wants others gets a container of its own."""
        if self._mode == "forked":
            return frozenset()
        # Ceilings of its processes are not the daemon's to change; under gVisor nothing is.
        unchangeable = ("memory_bytes", "processes", "cpu_s") if is_gvisor(self._runtime) else ()
        return frozenset({"open_files", *unchangeable})

    @property
    def lacks(self) -> Mapping[str, str]:
        """Promises of the contract (`toolcell.testing`) that this runtime cannot keep, and why."""
        if not is_gvisor(self._runtime):
            return {}
        return {
            "limits.inodes": "gVisor does not count the files of a tmpfs",
            "limits.processes": "gVisor refuses a fork and tells nobody; the script's own error is all there is",
            "limits.lowered_for_one_run": "gVisor's own memory for each process meets the memory limit first",
        }

    @property
    def engine(self) -> Engine:
        """The open connection.

        Raises:
            SandboxUnavailable: it is not open.
        """
        if self._engine is None:
            raise SandboxUnavailable("the docker backend is not open")
        return self._engine

    async def open(self) -> None:
        """Reach the daemon and get ready.

        Raises:
            SandboxUnavailable: no daemon, no image, no such runtime; says what to do.
        """
        engine = await Engine.open(
            docker_host=self._docker_host, image=self._image, packages=self._packages, runtime=self._runtime
        )
        self._blueprint = Blueprint(
            image=engine.image.id,
            mode=self._mode,
            runtime=self._runtime,
            cpus=self._cpus,
            labels=engine.labels(self._mode),
            environment=ONE_THREAD | hashing(self._policy.hash_seed),
        )
        self._engine = engine
        if self._mode == "forked":
            from toolcell.sandbox.docker.shared.backend import ForkedSandboxes

            self._forked = ForkedSandboxes(engine, self._blueprint, self._policy, self._preload, self._required)

    async def start(self, limits: Limits) -> Sandbox:
        """Start one container and tell its guest what to be.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        engine, blueprint = self.engine, self._blueprint
        assert blueprint is not None
        if self._forked is not None:
            return await self._forked.start(limits)
        # Random, so that a script cannot guess it: it could only cut its own output short.
        fence = b"\0" + secrets.token_bytes(FENCE_BYTES - 1)
        container = await engine.launch(container_config(blueprint, limits), blueprint, fence=fence)
        try:
            rlimits = rlimits_for(limits, blueprint)
            await container.stream.send(settings_frame(limits, self._policy, self._preload, rlimits, fence))
        except BaseException:
            await container.destroy()
            raise
        return DockerSandbox(container, engine, blueprint, limits, f"d{next(self._count)}", self._required)

    async def close(self) -> None:
        """Remove everything it started. Safe to call twice."""
        engine, self._engine = self._engine, None
        sandboxes, self._forked = self._forked, None
        if sandboxes is not None:
            await sandboxes.aclose()
        if engine is not None:
            await engine.aclose()
