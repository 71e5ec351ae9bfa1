"""Follow and control containers: one stream of events reports how they end, and a `DockerSandbox` controls each.

A container removes itself when it ends, so a question to the daemon afterwards would come too late.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import INTERRUPTED_S, Exit, Sample, Sandbox
from toolcell.sandbox.docker import reaper
from toolcell.sandbox.docker.attach import AttachedStream, attach
from toolcell.sandbox.docker.client import Conflict, EngineClient
from toolcell.sandbox.docker.hardening import (
    OWN_PROCESSES,
    Blueprint,
    daemon_layers,
    live_layers,
    resources,
    rlimits_for,
)
from toolcell.sandbox.docker.images.build import ensure_image
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.process.cgroup import Cgroup, CgroupFiles, V1Cgroup, V2Cgroup
from toolcell.support import daemon_threads, event_loop
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.guest.errors import ASK_SIGNAL
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL

# Measure what a container has used: from its cgroup where that is visible here, else from the daemon's answers.


CGROUPS = Path("/sys/fs/cgroup")


def find_cgroup(pid: int, container: str) -> Cgroup | None:
    """Find the cgroup of a container whose first process is `pid`; None when it is not visible here.

    The container's id must be in the path: with a remote daemon, `pid` is another process of this machine.
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as table:
            rows = [line.rstrip("\n").split(":", 2) for line in table]
    except OSError:
        return None
    named = {names: path for _, names, path in rows if container in path}
    if "" in named and (CGROUPS / "cgroup.controllers").exists():
        directory = Path(f"{CGROUPS}{_container_part(named[''], container)}")
        return V2Cgroup(container, str(directory), CgroupFiles()) if (directory / "pids.current").exists() else None
    found: dict[str, str] = {}
    for names, path in named.items():
        for controller in names.split(","):
            directory = Path(f"{CGROUPS}/{controller}{_container_part(path, container)}")
            if controller in ("memory", "pids", "cpuacct") and directory.is_dir():
                found[controller] = str(directory)
    return V1Cgroup(container, found, CgroupFiles()) if {"memory", "pids"} <= found.keys() else None


def _container_part(path: str, container: str) -> str:
    """Cut a path after the part that names the container: below it may be cgroups that the container made."""
    parts = path.split("/")
    named = next(number for number, part in enumerate(parts) if container in part)
    return "/".join(parts[: named + 1])


class UsageReader:
    """Measures one container. Usage before its guest said Hello does not count as the script's."""

    def __init__(self, cgroup: Cgroup | None, own_processes: int | None) -> None:
        """`own_processes`: number of processes that are not the script's; None where a count means nothing."""
        self._cgroup = cgroup
        self._own = own_processes
        self._cpu_before_s = 0.0
        self._refused_before = 0
        self._kills_before = 0
        self._sample = Sample()

    @property
    def is_local(self) -> bool:
        """The container can be measured without the daemon."""
        return self._cgroup is not None

    def pids(self) -> set[int]:
        """Return the processes inside, where they are visible here."""
        return self._cgroup.pids() if self._cgroup is not None else set()

    def kill(self) -> bool:
        """Kill everything inside, if this process may. It works at once, and also when the daemon is gone."""
        if self._cgroup is not None:
            with suppress(OSError):
                self._cgroup.kill()
                return True
        return False

    def set_baseline(self) -> None:
        """Take what has been used so far as the cost of starting, which does not count as the script's."""
        if self._cgroup is None:
            return
        try:
            usage = self._cgroup.usage()
        except (OSError, ValueError):
            return
        self._cpu_before_s = usage.cpu_s
        self._refused_before, self._kills_before = usage.refused_processes, usage.memory_kills

    def read(self, *, brief: bool = False) -> Sample:
        """Return what is known now."""
        if self._cgroup is None:
            return self._sample
        try:
            if brief:
                cpu_s, peak_bytes = self._cgroup.consumed()
                sample = self._with(cpu_s or 0.0, peak_bytes or 0, None)
                self._sample = replace(sample, refused_processes=self._refused(self._cgroup.count_refused()))
            else:
                self._record(self._cgroup.usage())
        except (OSError, ValueError):  # the cgroup is gone: keep what was read last
            pass
        return self._sample

    def _record(self, usage: Sample) -> None:
        sample = self._with(usage.cpu_s, usage.peak_memory_bytes, usage.processes)
        kills, refused = max(0, usage.memory_kills - self._kills_before), self._refused(usage.refused_processes)
        self._sample = replace(sample, memory_kills=kills, refused_processes=refused)

    def _refused(self, in_all: int) -> int:
        return max(0, in_all - self._refused_before) if self._own is not None else 0

    def _with(self, cpu_s: float, peak_bytes: int, processes: int | None) -> Sample:
        before = self._sample
        count = before.processes
        if processes is not None and self._own is not None:
            count = max(1, processes - self._own)
        return Sample(
            max(before.cpu_s, cpu_s - self._cpu_before_s),
            max(before.peak_memory_bytes, peak_bytes),
            processes=count,
            peak_processes=max(before.peak_processes, count),
            memory_kills=before.memory_kills,
            refused_processes=before.refused_processes,
        )

    def record_stats(self, stats: Mapping[str, Any], *, is_first: bool) -> None:
        """Record the daemon's answer to GET /containers/{id}/stats."""
        cpu_s = _number(stats, "cpu_stats", "cpu_usage", "total_usage") / 1e9
        if is_first:
            self._cpu_before_s = cpu_s
        memory = stats.get("memory_stats") or {}
        peak = int(memory.get("max_usage") or memory.get("usage") or 0)
        self._sample = self._with(cpu_s, peak, int(_number(stats, "pids_stats", "current")) or None)


def _number(stats: Mapping[str, Any], *keys: str) -> float:
    found: Any = stats
    for key in keys:
        found = (found or {}).get(key)
    return float(found or 0)


EVENT_NAMES = ["die", "died", "kill", "oom", "destroy", "remove"]
"""Events that matter here. Podman has its own names for two of them."""

END_S = 5.0
"""How long a killed container may take to be reported dead, and then removed."""

MEMORY_EVENT_S = 0.5
"""How long the "oom" event may take to arrive after a container died of SIGKILL."""

SIGNALLED = 128
SIGKILL = 9
ENDING = frozenset({"9", "15", "SIGKILL", "SIGTERM"})
"""Signals of `docker kill` and `docker stop`, as events name them."""


class ContainerState:
    """What the events have reported about one container so far."""

    def __init__(self) -> None:
        self.is_dead = False
        self.is_removed = False
        self.is_unobserved = False
        """The stream of events broke: no event will arrive."""
        self.exit_code: int | None = None
        self.memory_kills = 0
        self.is_killed = False
        """Somebody had the daemon kill or stop it: this host, or another one."""
        self.changed = ChangeEvent()

    async def wait_for(self, is_reached: Callable[[ContainerState], bool], within_s: float) -> bool:
        """Wait until `is_reached` holds. Return False when it does not in time, or when no event will arrive."""
        with anyio.move_on_after(within_s):
            while not is_reached(self) and not self.is_unobserved:
                await self.changed.wait()
        return is_reached(self)

    def record_event(self, action: str, attributes: dict[str, Any]) -> None:
        match action:
            case "oom":
                self.memory_kills += 1
            case "kill":
                self.is_killed = self.is_killed or str(attributes.get("signal")) in ENDING
            case "die" | "died":
                self.is_dead = True
                code = attributes.get("exitCode", attributes.get("containerExitCode"))
                with suppress(TypeError, ValueError):
                    self.exit_code = int(code) if code is not None else None
            case "destroy" | "remove":
                self.is_dead = self.is_removed = True
        self.changed.notify()


class Events:
    """The daemon's stream of events, read by a thread. Call `listen` again after the daemon was away."""

    def __init__(self, client: EngineClient, labels: dict[str, str]) -> None:
        self._client = client
        self._filters = {"type": ["container"], "event": EVENT_NAMES, "label": [f"{k}={v}" for k, v in labels.items()]}
        self._states: dict[str, ContainerState] = {}
        self._stream: Any = None
        self._opening = anyio.Lock()
        self.is_listening = False

    def follow(self, container: str) -> ContainerState:
        """Begin to record the events of a container. Call it before the container is started."""
        state = self._states.setdefault(container, ContainerState())
        state.is_unobserved = not self.is_listening
        return state

    def forget(self, container: str) -> None:
        self._states.pop(container, None)

    async def listen(self) -> None:
        """Open the stream, unless it is open.

        Raises:
            SandboxUnavailable: the daemon is gone.
        """
        async with self._opening:
            if self.is_listening:
                return
            stream = await self._client.call(self._client.api.events, filters=self._filters, decode=True)
            self._stream, self.is_listening = stream, True
        daemon_threads.start(self._read, stream, anyio.lowlevel.current_token(), name="toolcell-events")

    def _read(self, stream: Any, token: Any) -> None:
        with suppress(Exception):  # any error means that the stream has ended; the event loop may be gone as well
            try:
                for event in stream:
                    anyio.from_thread.run_sync(self._handle_event, event, token=token)
            finally:
                stream._response.close()
                anyio.from_thread.run_sync(self._mark_broken, stream, token=token)

    def _handle_event(self, event: dict[str, Any]) -> None:
        actor = event.get("Actor") or {}
        if (state := self._states.get(str(actor.get("ID") or event.get("id") or ""))) is not None:
            state.record_event(str(event.get("Action") or event.get("status") or ""), actor.get("Attributes") or {})

    def _mark_broken(self, stream: Any) -> None:
        if stream is self._stream:
            self.is_listening = False
            for state in self._states.values():
                state.is_unobserved = True
                state.changed.notify()

    async def aclose(self) -> None:
        """Close the stream; its thread ends."""
        stream, self._stream, self.is_listening = self._stream, None, False
        if stream is not None:
            with suppress(SandboxUnavailable):
                await self._client.call(stream.close)


class DockerSandbox(Sandbox):
    """One container with one guest."""

    stream: AttachedStream
    backend = "docker"
    interrupted_s = INTERRUPTED_S
    answer_s = 0.2
    """How long a script may take to say which line it is at: the daemon is in between."""

    def __init__(
        self,
        owner: Engine,
        name: str,
        container_id: str,
        stream: AttachedStream,
        state: ContainerState,
        *,
        blueprint: Blueprint,
        limits: Limits,
        required: frozenset[str],
    ) -> None:
        self._owner, self._blueprint, self._required = owner, blueprint, required
        self.id = f"d{next(owner.count)}"
        self.name, self.container_id = name, container_id
        self.stream = stream
        self.limits = self._current_limits = limits
        self.layers: Mapping[str, str] = {}
        self._is_asking = self._has_asked = False
        self.state = state
        self.inspected: Mapping[str, Any] = {}
        self.usage = UsageReader(None, None)
        self.is_killed = self.is_paused = False
        self._was_alive = False
        """The container was alive, as far as the host knew, when `kill` was called. Else something else killed it."""
        self._is_destroyed = self._is_interrupting = False
        self._interrupt_passed = ChangeEvent()

    async def inspect(self) -> None:
        """Ask the daemon what the container was really made with, and find out where its usage can be measured."""
        self.inspected = await self._owner.client.inspect(self.name)
        pid = int((self.inspected.get("State") or {}).get("Pid") or 0)
        cgroup = find_cgroup(pid, self.container_id) if self._owner.client.info.is_local and pid else None
        self.usage = UsageReader(cgroup, None if self._blueprint.is_gvisor else OWN_PROCESSES)

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
            self.usage.record_stats(await self._owner.client.stats(self.container_id), is_first=not self._has_asked)
            self._has_asked = True
        finally:
            self._is_asking = False

    async def read_on(self) -> None:
        """Read what the script writes, also when nobody receives from the bridge. Runs until it is cancelled."""
        await self.stream.read_on()

    def cpu_now(self) -> float | None:
        """Return the CPU seconds used so far where the container's cgroup is visible. Any thread may call it."""
        return self.usage.read(brief=True).cpu_s if self.usage.is_local else None

    def is_alive(self) -> bool:
        return not (self.is_killed or self.state.is_dead or self.stream.is_over)

    def kill(self) -> None:
        if self.is_killed or self.state.is_dead:
            return
        self.is_killed, self._was_alive = True, self._was_alive or not self.stream.is_over
        self.stream.expect_end()
        self.usage.kill()
        self._owner.run_in_background(self._owner.client.kill, self.name)

    def ask_line(self) -> bool:
        """Have the script write which line it is at. The daemon takes some milliseconds to pass that on."""
        self._owner.run_in_background(self._owner.client.kill, self.name, ASK_SIGNAL)
        return True

    def interrupt(self) -> None:
        """Interrupt the script of a session. The daemon takes some milliseconds to pass that on."""
        if not self._is_interrupting:
            self._is_interrupting = True
            self._owner.run_in_background(self._pass_on_interrupt)

    async def _pass_on_interrupt(self) -> None:
        try:
            await self._owner.client.kill(self.name, INTERRUPT_SIGNAL)
        finally:
            self._is_interrupting = False
            self._interrupt_passed.notify()

    async def interrupts_passed_on(self) -> None:
        """Wait until the daemon has passed the interrupt on. One that it passes on late would meet the next script."""
        if self._is_interrupting:
            await self._interrupt_passed.wait(END_S)

    async def pause(self) -> bool:
        """Stop every process inside until `unpause`; False when the daemon cannot. May be called again."""
        if not self.is_paused:
            self.is_paused = True
            try:
                await self._owner.client.call(self._owner.client.api.pause, self.name)
            except SandboxUnavailable:
                self.is_paused = False
        return self.is_paused

    async def unpause(self) -> None:
        """Let everything inside run again. A container that cannot is killed."""
        self.is_paused = False
        try:
            await self._owner.client.call(self._owner.client.api.unpause, self.name)
        except Conflict:  # it was not paused
            return
        except SandboxUnavailable:
            self.kill()

    def kill_now(self) -> None:
        """Kill the container from another thread. `kill` is called later, in the event loop."""
        if self.is_killed or self.state.is_dead:
            return
        self._was_alive = not self.stream.is_over
        self.usage.read()  # its cgroup is gone when the event loop looks
        if not self.usage.kill():
            # In a thread of its own: a daemon that is slow must not delay the deadlines of other containers.
            daemon_threads.start(self._owner.client.kill_now, self.name, name="toolcell-kill")

    async def ended(self) -> Exit:
        """Wait, at most a few seconds, until the container has ended; return how. Nothing else may read its stream."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as reading:
                reading.start_soon(self.stream.drain)
                is_dead = await self.state.wait_for(lambda state: state.is_dead, END_S)
                reading.cancel_scope.cancel()
            if not is_dead:
                await self._ask_daemon()
            state = self.state
            if state.exit_code == SIGNALLED + SIGKILL and not (self._was_alive or self._is_destroyed):
                await state.wait_for(lambda state: bool(state.memory_kills), MEMORY_EVENT_S)
        code, sample, problem = state.exit_code, self.usage.read(), ""
        if state.is_killed and not (self._was_alive or self._is_destroyed):
            code, problem = None, "somebody killed or stopped its container"
        elif code is None:
            problem = "the engine reports no end of its container"
        signal = code - SIGNALLED if code is not None and code > SIGNALLED else None
        code = code if signal is None else None
        return Exit(signal, code, cpu_s=sample.cpu_s, peak_memory_bytes=sample.peak_memory_bytes, problem=problem)

    async def _ask_daemon(self) -> None:
        with suppress(SandboxUnavailable):
            found = (await self._owner.client.inspect(self.name)).get("State") or {}
            if not found.get("Running"):
                self.state.record_event("oom" if found.get("OOMKilled") else "", {})
                self.state.record_event("die", {"exitCode": found.get("ExitCode")})

    async def destroy(self) -> None:
        """Kill and remove the container. Safe to call twice. Nothing is left of it, if the daemon answers."""
        if self._is_destroyed:
            return
        self._is_destroyed = self.is_killed = True
        with anyio.CancelScope(shield=True):
            self.stream.close()
            if not self.state.is_removed:
                await self._owner.remove(self.name)
                # When the container is removing itself already, the daemon answers at once and continues.
                await self.state.wait_for(lambda state: state.is_removed, END_S)
            self._owner.forget(self)


class Engine:
    """An open connection to a daemon, and everything this backend has there: image, events, containers.

    Every container is launched here, so that everything started is also cleaned up here.
    """

    def __init__(
        self, client: EngineClient, image: ImageRef, watcher: reaper.Watcher, tasks: TaskGroup, key: str
    ) -> None:
        self.client = client
        self.image = image
        self.count = itertools.count(1)
        self.key = key
        self._watcher = watcher
        self._tasks = tasks
        self._events = Events(client, {reaper.LABEL_BACKEND: key})
        self._living: set[DockerSandbox] = set()
        self._unremoved: set[str] = set()
        """Names of containers that could not be removed because the daemon was away."""
        self.labels: Mapping[str, str] = {reaper.LABEL_BACKEND: key, reaper.LABEL_HOST: str(reaper.own_identity())}
        """Of every container of this backend."""

    @classmethod
    async def open(
        cls, *, docker_host: str | None, image: str | None, packages: Sequence[str], runtime: str | None
    ) -> Engine:
        """Connect to the daemon, find the image, remove the containers of dead hosts, and begin to listen.

        Raises:
            SandboxUnavailable: there is no daemon, image or runtime of that name; the message says what to do.
        """
        client = await EngineClient.connect(docker_host)
        try:
            if runtime is not None and client.info.runtimes and runtime not in client.info.runtimes:
                known = ", ".join(client.info.runtimes)
                raise SandboxUnavailable(f"the daemon has no runtime {runtime!r} (it has {known}); see docs/docker.md")
            found = await daemon_threads.run_sync(ensure_image, client, image, tuple(packages))
            key = uuid.uuid4().hex
            watcher = await daemon_threads.run_sync(reaper.Watcher.spawn, key, docker_host)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.aclose()
            raise
        tasks = await anyio.create_task_group().__aenter__()
        engine = cls(client, found, watcher, tasks, key)
        try:
            await engine._remove_orphans()
            await engine._events.listen()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def _remove_orphans(self) -> None:
        me = reaper.own_identity()
        found = await self.client.list({reaper.LABEL_HOST: None})
        for container in reaper.orphans(found, me, is_local=self.client.info.is_local):
            await self.client.remove(container)

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run `function` in the background and ignore that the daemon is gone."""
        self._tasks.start_soon(self._run_quietly, function, *args)

    async def _run_quietly(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with suppress(SandboxUnavailable):
            await function(*args)

    async def launch(
        self,
        config: Mapping[str, Any],
        blueprint: Blueprint,
        limits: Limits,
        *,
        required: frozenset[str] = frozenset(),
        end_marker: bytes = b"",
    ) -> DockerSandbox:
        """Create, attach, start and inspect a container. `required`: its layers.

        Cancellation: what was made is removed.

        Raises:
            SandboxUnavailable: nothing of the container is left.
        """
        await self._events.listen()
        for unremoved in tuple(self._unremoved):
            self.run_in_background(self.remove, unremoved)
        name = f"toolcell-{uuid.uuid4().hex[:16]}"
        stream: AttachedStream | None = None
        state: ContainerState | None = None
        ident = ""
        try:
            ident = await self.client.create(config, name)
            state = self._events.follow(ident)
            stream = await attach(self.client, ident, end_marker=end_marker)
            container = DockerSandbox(
                self, name, ident, stream, state, blueprint=blueprint, limits=limits, required=required
            )
            await self.client.start(ident)
            await container.inspect()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._undo_launch(name, ident, stream, state)
            raise
        self._living.add(container)
        return container

    async def _undo_launch(
        self, name: str, ident: str, stream: AttachedStream | None, state: ContainerState | None
    ) -> None:
        if stream is not None:
            stream.close()
        # By name: the daemon may have created the container although its answer did not arrive.
        await self.remove(name)
        if state is not None and name not in self._unremoved:
            await state.wait_for(lambda state: state.is_removed, END_S)
        self._events.forget(ident)

    async def remove(self, name: str) -> None:
        """Remove a container now, or when the daemon is back."""
        try:
            await self.client.remove(name)
            self._unremoved.discard(name)
        except SandboxUnavailable:
            self._unremoved.add(name)

    def forget(self, container: DockerSandbox) -> None:
        self._living.discard(container)
        self._events.forget(container.container_id)

    async def aclose(self) -> None:
        """Remove every container of this backend. Safe to call twice.

        Cancellation: shielded; bounded by the timeout of the daemon's answers.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as destroying:
                for container in tuple(self._living):
                    destroying.start_soon(container.destroy)
            for name in tuple(self._unremoved):
                await self.remove(name)
        await event_loop.end_tasks(self._tasks)
        with anyio.CancelScope(shield=True):
            await self._events.aclose()
            await self.client.aclose()
            if self._unremoved:
                # The daemon is away. The watcher waits for it longer than a caller would.
                self._watcher.detach()
            else:
                await daemon_threads.run_sync(self._watcher.dismiss)
