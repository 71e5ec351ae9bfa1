"""Many sandboxes in one container of the same trust domain: for answers in well under a millisecond.

What keeps them apart is what an unprivileged process can raise: Landlock with its signal scope, seccomp, rlimits, and a
tmpfs for each. What they share is said in `SHARED` and in each sandbox's layers. A container serves one backend, so
sandboxes of different Runtimes never meet in one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import anyio

from toolcell.config import MIB, Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import FROZEN_BYTES, ByteStream, Exit, Sample
from toolcell.sandbox.docker.backend import accepted, rlimits_for, settings_frame
from toolcell.sandbox.docker.engine import Engine
from toolcell.sandbox.docker.hardening import SCRATCH, SHARED_MEMORY, Blueprint, container_config, walls_of
from toolcell.sandbox.docker.shared.container import ForkedContainer
from toolcell.sandbox.docker.shared.remote_sandbox import RemoteSandbox
from toolcell_bridge.entry.shared_protocol import FREEZE, KILL

SLOTS = 16
"""Sandboxes that one container holds at once. When all are taken another container is started."""

OWN_PROCESSES = 4
"""The container's init, relay and forker, and one about to be forked."""

FILES_PER_SLOT = 16
"""Descriptors that the relay and the forker hold for each sandbox, with room to spare."""

OWN_FILES = 256
OWN_BYTES = 256 * MIB
"""For the interpreter, what it preloads and what the kernel keeps for the container."""

LINK_SHARED_MEMORY = f"import os; os.symlink({SCRATCH + '/shm'!r}, {SHARED_MEMORY!r})"
"""/dev is the container's own and root's: a link there cannot come with the image. Run once, by a root without any
capability, before anything else is in the container."""

KILL_S = 5.0
"""How long the container may take to say that a killed sandbox is gone. A domain is killed in one system call."""

SIGKILL = 9

SHARED: Mapping[str, str] = {
    "pid": "the container's, shared; signals kept apart by Landlock",
    "mount": "read-only image, sized tmpfs of its own",
    "ipc": "none of the kernel's; shared memory in its own tmpfs",
    "cgroup": "the container's, shared: memory, processes, cpu of all its sandboxes together",
}
"""Details of walls that this mode has once for a whole container."""


def slot_paths(count: int) -> list[str]:
    """Where the sandboxes' own file systems are mounted."""
    return [f"{SCRATCH}/slot{number}" for number in range(count)]


def forked_config(blueprint: Blueprint, limits: Limits, slots: int, processors: int) -> dict[str, Any]:
    """What a container for `slots` sandboxes is created with: the single one's walls, and room for all of them.

    Its own ceilings are the sum of what its sandboxes may use, so that none within its limits can starve another.
    """
    config = container_config(blueprint, limits)
    memory_bytes = slots * (limits.memory_bytes + limits.disk_bytes) + OWN_BYTES
    tmpfs = "rw,noexec,nosuid,nodev,size={},nr_inodes={},mode=1777,uid=0,gid=0"
    host = config["HostConfig"] | {
        # None of the daemon's making, which would be everybody's: /dev/shm leads each to its own.
        "IpcMode": "none",
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        # A warden for each beside its own.
        "PidsLimit": slots * (limits.processes + 1) + OWN_PROCESSES,
        "NanoCpus": int(min(blueprint.cpus * slots, processors) * 1e9),
        # Root's, so that no sandbox can close or date what others use; nobody but the container's own can list them.
        "Tmpfs": {path: tmpfs.format(limits.disk_bytes, limits.inodes) for path in slot_paths(slots)},
        "Ulimits": [
            row | {"Soft": files, "Hard": files} if row["Name"] == "nofile" else row
            for row in config["HostConfig"]["Ulimits"]
            for files in [max(limits.open_files, OWN_FILES + FILES_PER_SLOT * slots)]
        ],
    }
    host.pop("ShmSize", None)
    return config | {"HostConfig": host}


def can_hold(made_for: Limits, limits: Limits) -> bool:
    """The file systems and frames of a container made for `made_for` are as asked, and nothing else is more."""
    same = ("disk_bytes", "inodes", "frame_bytes")
    least = ("memory_bytes", "processes", "open_files")
    return all(getattr(made_for, name) == getattr(limits, name) for name in same) and all(
        getattr(limits, name) <= getattr(made_for, name) for name in least
    )


class ForkedSandbox:
    """One guest among others in a container."""

    def __init__(
        self, container: ForkedContainer, place: RemoteSandbox, limits: Limits, ident: str, required: frozenset[str]
    ) -> None:
        self._container = container
        self._place = place
        self._required = required
        self._memory_kills_before = container.container.meter.read().memory_kills
        self._memory_kills = 0
        self._is_killed = False
        self.id = ident
        self.stream: ByteStream = place.direct.stream if place.direct is not None else place
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "docker"

    @property
    def container_id(self) -> str:
        """For `docker inspect`."""
        return self._container.container.id

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run without a required one."""
        walls = walls_of(self._container.container.inspected)
        shared = SHARED if self._container.is_scoped else {**SHARED, "pid": "the container's, shared; signals pass"}
        walls |= {name: detail for name, detail in shared.items() if name in walls}
        self.layers = accepted(self._required, walls, layers)

    def is_alive(self) -> bool:
        """False once its end is known."""
        direct, container = self._place.direct, self._container.container
        return container.is_alive() and not (
            self._place.is_over or self._is_killed or (direct is not None and direct.has_hung_up())
        )

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of the run it is handed to: ceilings of its process; the rest is watched."""
        if limits is not self.limits:
            await self._container.lower(self._place, asdict(rlimits_for(limits)))

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
        if self._place.direct is not None:
            return self._place.direct.read_raw()
        return self._place.take_raw(1), self._place.take_raw(2)

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """What the container last said of it; asks anew unless `brief`."""
        place = self._place
        if not brief and not place.is_over:
            self._container.measure()
        end = place.end or Exit()
        return Sample(
            cpu_s=max(place.peak.cpu_s, end.cpu_s),
            peak_memory_bytes=place.peak.memory_bytes,
            processes=place.measured.processes,
            peak_processes=place.peak.processes,
            memory_kills=self._memory_kills,
        )

    def kill(self) -> None:
        """Have every process of it killed. Acknowledged by `ended`."""
        self._is_killed = True
        direct = self._place.direct
        if direct is None or not direct.pull(KILL):
            self._container.kill(self._place)

    def freeze(self) -> bool:
        """Have every process of it stopped where it is; False where the way to its warden is a long one, where it holds
        much, or the last slot."""
        direct, holds_much = self._place.direct, self._place.peak.memory_bytes > FROZEN_BYTES
        if direct is None or holds_much or not self._container.free or self._is_killed or not self.is_alive():
            return False
        return direct.pull(FREEZE)

    async def ended(self) -> Exit:
        """Wait until its first process has ended, at most a few seconds, and say how."""
        with anyio.move_on_after(KILL_S, shield=True):
            await self._place.wait_ended()
        end = self._place.end
        if end is None:
            return Exit()
        if end.signal == SIGKILL and not self._is_killed:
            # Neither we nor, without the right to, a guest: the kernel, for the container's memory.
            kills = self._container.container.meter.read().memory_kills
            self._memory_kills = max(0, kills - self._memory_kills_before)
        # What it peaked at was measured without the pages it shares with its parent; the kernel's figure has them.
        return replace(end, peak_memory_bytes=self._place.peak.memory_bytes)

    async def destroy(self) -> None:
        """Kill every process of it and have its files removed. Safe to call twice."""
        self.kill()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(KILL_S):
                await self._place.wait_ended()
            self._container.forget(self._place)
            if not self._place.is_over:
                # It is not known to be gone; with its container it is.
                await self._container.aclose()


class ForkedSandboxes:
    """The containers of one backend, and starting sandboxes in them."""

    def __init__(
        self,
        engine: Engine,
        blueprint: Blueprint,
        policy: Policy,
        preload: Sequence[str],
        required: frozenset[str],
        slots: int = SLOTS,
    ) -> None:
        self._engine, self._blueprint = engine, blueprint
        self._policy, self._preload, self._required = policy, tuple(preload), required
        self._slots = slots
        self.is_direct = True
        """Take the sandboxes' lines out of their container, where this process may."""
        self._processors = 0
        self._containers: list[tuple[Limits, ForkedContainer]] = []
        self._starting = anyio.Lock()
        self._count = itertools.count(1)

    async def start(self, limits: Limits) -> ForkedSandbox:
        """Fork one sandbox, in a container that has room for it.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        async with self._starting:
            container = self._with_room(limits) or await self._launch(limits)
            place = await container.open(asdict(rlimits_for(limits)))
        try:
            await place.wait_started()
        except BaseException:
            container.forget(place)
            raise
        return ForkedSandbox(container, place, limits, f"f{next(self._count)}", self._required)

    def _with_room(self, limits: Limits) -> ForkedContainer | None:
        for made_for, container in tuple(self._containers):
            if container.problem is not None:
                self._containers.remove((made_for, container))
                self._engine.soon(container.aclose)
            elif container.free > 0 and can_hold(made_for, limits):
                return container
            elif container.is_empty:
                # Made for limits that nobody asks for any more, or worn out.
                self._containers.remove((made_for, container))
                self._engine.soon(container.aclose)
        return None

    async def _launch(self, limits: Limits) -> ForkedContainer:
        client = self._engine.client
        if not self._processors:
            self._processors = max(1, int((await client.call(client.api.info)).get("NCPU") or 1))
        config = forked_config(self._blueprint, limits, self._slots, self._processors)
        container = ForkedContainer(await self._engine.launch(config, self._blueprint), self._engine)
        settings = settings_frame(
            limits,
            self._policy,
            self._preload,
            rlimits_for(limits),
            slots=slot_paths(self._slots),
            unscoped="landlock" not in self._required,
        )
        try:
            await self._link_shared_memory(container.container.id)
            await container.wait_ready(settings, is_direct=self.is_direct)
        except BaseException:
            await container.aclose()
            raise
        self._engine.soon(container.listen)
        self._containers.append((limits, container))
        return container

    async def _link_shared_memory(self, container: str) -> None:
        call, api = self._engine.client.call, self._engine.client.api
        command = ["python3", "-I", "-S", "-c", LINK_SHARED_MEMORY]
        made = await call(api.exec_create, container, command, user="0:0")
        words = await call(api.exec_start, made["Id"])
        if (await call(api.exec_inspect, made["Id"])).get("ExitCode"):
            raise SandboxUnavailable(f"a container could not be set up: {words.decode('utf-8', 'replace')[-500:]}")

    async def aclose(self) -> None:
        """Remove every container. Safe to call twice."""
        containers, self._containers = self._containers, []
        for _, container in containers:
            await container.aclose()
