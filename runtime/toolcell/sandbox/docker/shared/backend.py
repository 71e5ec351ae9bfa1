"""Many sandboxes in one container: for callers that trust their scripts alike and need answers below a millisecond.

The sandboxes are kept apart by what an unprivileged process can apply: Landlock with its signal scope, seccomp,
rlimits, and a tmpfs for each. What they share is listed in `SHARED` and in the layers of each sandbox. A container
serves one backend, so sandboxes of different Runtimes never meet in one container.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import anyio

from toolcell.config import MIB, Limits, Policy, fits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import BELOW, Exit, Sample
from toolcell.sandbox.docker.container import SIGKILL, Engine
from toolcell.sandbox.docker.hardening import (
    SCRATCH,
    SHARED_MEMORY,
    Blueprint,
    container_config,
    daemon_layers,
    live_layers,
    rlimits_for,
    settings_frame,
)
from toolcell.sandbox.docker.shared.container import RemoteSandbox, SharedContainer
from toolcell.sandbox.forked import SupervisedSandbox
from toolcell_bridge.entry.shared_protocol import KILL

SLOTS = 16
"""Sandboxes that one container holds at once. When all slots are taken, another container is started."""

OWN_PROCESSES = 4
"""The container's init, proxy and zygote, and one process that is just being forked."""

FILES_PER_SLOT = 16
"""Descriptors that the proxy and the zygote hold for each sandbox, with room to spare."""

OWN_FILES = 256
OWN_BYTES = 256 * MIB
"""Memory of the interpreter, of preloaded modules, and of the kernel's own data for the container."""

LINK_SHARED_MEMORY = f"import os; os.symlink({SCRATCH + '/shm'!r}, {SHARED_MEMORY!r})"
"""Code that makes the link in /dev. The image cannot contain it, because the container has a /dev of its own, which
belongs to root. It runs once, as a root without any capability, before anything else is in the container."""

CONTAINER_ENDED = "its container ended: somebody or the engine killed it"

OUT_OF_MEMORY = "its container ran out of memory, which other sandboxes in it held"

KILL_S = 5.0
"""How long the container may take to report that a killed sandbox is gone. One system call kills a sandbox."""

SHARED: Mapping[str, str] = {
    "pid": "the container's, shared; signals kept apart by Landlock",
    "mount": "read-only image, sized tmpfs of its own",
    "ipc": "none of the kernel's; shared memory in its own tmpfs",
    "cgroup": "the container's, shared: memory, processes, cpu of all its sandboxes together",
}
"""Details of layers that this mode has once for a whole container."""


def slot_paths(count: int) -> list[str]:
    """Return where the file systems of the sandboxes are mounted."""
    return [f"{SCRATCH}/slot{number}" for number in range(count)]


def shared_container_config(blueprint: Blueprint, limits: Limits, slots: int, processors: int) -> dict[str, Any]:
    """Return the body that creates a container for `slots` sandboxes: as for a single one, with room for all.

    The ceilings of the container are the sum over its sandboxes, so a sandbox within its limits cannot starve another.
    """
    config = container_config(blueprint, limits)
    memory_bytes = slots * (limits.memory_bytes + limits.disk_bytes) + OWN_BYTES
    tmpfs = "rw,noexec,nosuid,nodev,size={},nr_inodes={},mode=1777,uid=0,gid=0"
    host = config["HostConfig"] | {
        # The daemon's /dev/shm would be shared by all sandboxes. A link leads each sandbox to its own.
        "IpcMode": "none",
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        # Each sandbox has a supervisor beside its own processes.
        "PidsLimit": slots * (limits.processes + 1) + OWN_PROCESSES,
        "NanoCpus": int(min(blueprint.cpus * slots, processors) * 1e9),
        # They belong to root, so that no sandbox can change their mode or times. Only root can list them.
        "Tmpfs": {path: tmpfs.format(limits.disk_bytes, limits.inodes) for path in slot_paths(slots)},
        "Ulimits": [
            row | {"Soft": files, "Hard": files} if row["Name"] == "nofile" else row
            for row in config["HostConfig"]["Ulimits"]
            for files in [max(limits.open_files, OWN_FILES + FILES_PER_SLOT * slots)]
        ],
    }
    host.pop("ShmSize", None)
    return config | {"HostConfig": host}


class SharedSandbox(SupervisedSandbox):
    """One guest of a shared container."""

    def __init__(
        self, container: SharedContainer, remote: RemoteSandbox, limits: Limits, ident: str, required: frozenset[str]
    ) -> None:
        super().__init__(remote, remote.channel, ident=ident, limits=limits, required=required)
        self.container = container
        self._remote = remote
        self._memory_kills_before = container.container.usage.read().memory_kills
        self._memory_kills = self._memory_kills_then = 0
        self._memory_bytes = limits.memory_bytes
        self.backend = "docker"

    @property
    def container_id(self) -> str:
        """Id of the shared container, for `docker inspect`."""
        return self.container.container.id

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run when a required layer is missing."""
        from_daemon = daemon_layers(self.container.container.inspected)
        shared = SHARED if self.container.is_scoped else {**SHARED, "pid": "the container's, shared; signals pass"}
        from_daemon |= {name: detail for name, detail in shared.items() if name in from_daemon}
        self.layers = live_layers(self.required, from_daemon, layers)

    def is_alive(self) -> bool:
        """Return False once the end of the sandbox is known."""
        return self.container.container.is_alive() and super().is_alive()

    async def prepare(self, limits: Limits) -> None:
        """Lower the rlimits of the guest to those of the next run. The run's monitor enforces the other limits."""
        self._memory_bytes = limits.memory_bytes
        if limits is not self.limits:
            await self.container.lower(self._remote, asdict(rlimits_for(limits)))

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Return what the container last reported; ask for a new report unless `brief`."""
        remote = self._remote
        if not brief and not remote.is_over:
            self.container.measure()
        end = remote.end or Exit()
        return Sample(
            cpu_s=max(remote.peak.cpu_s, end.cpu_s),
            peak_memory_bytes=remote.peak.memory_bytes,
            processes=remote.usage.processes,
            peak_processes=remote.peak.processes,
            memory_kills=self._memory_kills,
        )

    def kill(self) -> None:
        """Kill every process of the sandbox, without waiting. `ended` waits for the end."""
        if not self.is_killed:  # what the kernel killed before, and not afterwards
            self.is_killed, self._memory_kills_then = True, self.container.container.usage.read().memory_kills
        if not self.channel.send_control(KILL):
            self.container.kill(self._remote)

    def cpu_now(self) -> float | None:
        """Return None: the container's reports arrive in the event loop."""
        return None

    async def pause(self) -> bool:
        """Have the supervisor stop every process until `unpause`; False where others could let them go on."""
        return self.container.is_scoped and await super().pause()

    async def ended(self) -> Exit:
        """Wait, at most a few seconds, until the sandbox has ended; return how."""
        with anyio.move_on_after(KILL_S, shield=True):
            await self._remote.wait_ended()
        end = self._remote.end
        if end is None:
            return Exit(problem="" if self.container.container.is_alive() else CONTAINER_ENDED)
        if end.signal == SIGKILL:
            # A guest may not send it. What came before the host's kill was the kernel's, for the container's memory.
            usage = self.container.container.usage
            kills = self._memory_kills_then if self.is_killed else usage.read().memory_kills
            self._memory_kills = max(0, kills - self._memory_kills_before)
            if self._memory_kills and end.peak_memory_bytes < BELOW * self._memory_bytes:
                self._memory_kills = 0
                return Exit(cpu_s=end.cpu_s, problem=OUT_OF_MEMORY)
            if self._memory_kills:
                return end
        # The reported peak leaves out pages shared with the parent. The kernel's figure in `end` includes them.
        return replace(end, peak_memory_bytes=self._remote.peak.memory_bytes)

    async def destroy(self) -> None:
        """Kill every process of the sandbox and remove its files. Safe to call twice."""
        self.kill()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(KILL_S):
                await self._remote.wait_ended()
            self.container.forget(self._remote)
            if not self._remote.is_over:
                # The container did not report the end in time. Removing the container ends the sandbox for certain.
                await self.container.aclose()


class SharedContainers:
    """The shared containers of one backend. It starts sandboxes in them."""

    def __init__(
        self,
        engine: Engine,
        blueprint: Blueprint,
        policy: Policy,
        preload: Sequence[str],
        required: frozenset[str],
    ) -> None:
        self._engine, self._blueprint = engine, blueprint
        self._policy, self._preload, self._required = policy, tuple(preload), required
        self._processors = 0
        self._containers: list[tuple[Limits, SharedContainer]] = []
        self._starting = anyio.Lock()
        self._count = itertools.count(1)

    async def start(self, limits: Limits) -> SharedSandbox:
        """Fork one sandbox, in a container that has room for it.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        async with self._starting:
            container = self._with_room(limits) or await self._launch(limits)
            remote = await container.open(asdict(rlimits_for(limits)))
        try:
            await remote.wait_started()
        except BaseException:
            container.forget(remote)
            raise
        return SharedSandbox(container, remote, limits, f"f{next(self._count)}", self._required)

    def _with_room(self, limits: Limits) -> SharedContainer | None:
        for made_for, container in tuple(self._containers):
            counted = made_for.model_copy(update={"cpu_s": limits.cpu_s})  # CPU time is counted for each sandbox
            if container.problem is not None:
                self._containers.remove((made_for, container))
                self._engine.run_in_background(container.aclose)
            elif container.free > 0 and fits(limits, counted):
                return container
            elif container.is_empty:
                # It was made for limits that no run asks for any more, or it has lost all its slots.
                self._containers.remove((made_for, container))
                self._engine.run_in_background(container.aclose)
        return None

    async def _launch(self, limits: Limits) -> SharedContainer:
        client = self._engine.client
        if not self._processors:
            self._processors = max(1, int((await client.call(client.api.info)).get("NCPU") or 1))
        config = shared_container_config(self._blueprint, limits, SLOTS, self._processors)
        launched = await self._engine.launch(config, self._blueprint)
        container = SharedContainer(launched, self._engine, own_bytes=OWN_BYTES, disk_bytes=limits.disk_bytes)
        settings = settings_frame(
            limits,
            self._policy,
            self._preload,
            rlimits_for(limits),
            slots=slot_paths(SLOTS),
            unscoped="landlock" not in self._required,
        )
        try:
            await self._link_shared_memory(container.container.id)
            await container.wait_ready(settings)
        except BaseException:
            await container.aclose()
            raise
        self._engine.run_in_background(container.read_in_background)
        self._containers.append((limits, container))
        return container

    async def _link_shared_memory(self, container: str) -> None:
        call, api = self._engine.client.call, self._engine.client.api
        command = ["python3", "-I", "-S", "-c", LINK_SHARED_MEMORY]
        made = await call(api.exec_create, container, command, user="0:0")
        output = await call(api.exec_start, made["Id"])
        if (await call(api.exec_inspect, made["Id"])).get("ExitCode"):
            raise SandboxUnavailable(f"a container could not be set up: {output.decode('utf-8', 'replace')[-500:]}")

    async def aclose(self) -> None:
        """Remove every container. Safe to call twice."""
        containers, self._containers = self._containers, []
        for _, container in containers:
            await container.aclose()
