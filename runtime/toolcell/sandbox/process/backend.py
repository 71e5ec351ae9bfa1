"""The process backend: sandboxes as isolated processes, the default on Linux.

It starts a zygote, and for each sandbox makes descriptors and a cgroup and requests a fork.
"""

from __future__ import annotations

import errno
import functools
import itertools
import marshal
import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import msgpack

from toolcell.config import MIB, Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import INTERRUPTED_S, Backend, Exit, Sample, Sandbox
from toolcell.sandbox.interpreter import hashing, imported_ahead, plan_rlimits, start
from toolcell.sandbox.process import cgroup_manager, programs, root_filesystem
from toolcell.sandbox.process.cgroup import MOST_KEPT_AHEAD, REMEMBERED_BYTES, Cgroup
from toolcell.sandbox.process.cgroup_manager import CgroupManager, NoLocation
from toolcell.sandbox.process.process_watch import GONE, TreeWatch, signal_all, tree_of
from toolcell.sandbox.process.root_filesystem import RootFilesystem
from toolcell.sandbox.process.zygote import ENVIRONMENT, ForkedSandbox, ZygoteHandle, Zygotes, exit_of
from toolcell.sandbox.shortages import check_layers, describe, unavailable
from toolcell.sandbox.stream import SocketStream, open_pipe, read_available
from toolcell.support import daemon_threads, event_loop
from toolcell_bridge.entry.launcher import CGROUPS_ARE_MINE, MARSHAL_FORMAT
from toolcell_bridge.guest.errors import ASK_SIGNAL
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.guest.own_signals import ENDED_BY
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.wire.frozen import frozen, replaced


@frozen
class IdBlock:
    """A block of ids outside, for the sandboxes of one zygote."""

    first: int
    count: int


SLOTS = 4096
"""Blocks that there are on a machine with all ids."""

_STRIDE = 1021
"""Slots between the zygotes of one host, odd: so each has another one, and none of a host with a pid close to ours."""

_zygotes = itertools.count()


def _of_first_process(end: Exit) -> Exit:
    """Return how a first process of a pid namespace ended, whose exit code may name a signal: see `own_signals`."""
    if end.code is None or not ENDED_BY < end.code <= ENDED_BY + signal.SIGRTMAX:
        return end
    return replace(end, signal=end.code - ENDED_BY, code=None)


def next_slot() -> int:
    """Choose a number for the ids of one more zygote; two hosts seldom choose the same.

    Every input is read at each call: a forked child has another pid, and goes on with the count of its parent.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # hosts in two containers may have one pid
    except OSError:
        namespace = 0
    return (os.getpid() + _STRIDE * next(_zygotes) + 2654435761 * namespace) % SLOTS  # Knuth's multiplicative hash


def id_block(slot: int) -> IdBlock | None:
    """Choose ids that own nothing on this machine; None for an ordinary user, who has one id only.

    They are far above the ids of people and containers, 64 Ki apart per zygote. In a user namespace with fewer ids they
    are the highest ones.
    """
    if os.geteuid() != 0:
        return None
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            ranges = [list(map(int, line.split())) for line in table]
    except OSError:
        ranges = [[0, 0, 2**32 - 1]]
    first, _, count = max(ranges, key=lambda row: row[2])
    if first + count > 0x7FFFFFFF:
        return IdBlock(0x70000000 + slot % SLOTS * 65536, 65536)
    if count > 2 * 65536:
        return IdBlock(first + count - 65536, 65536)
    return IdBlock(first + count - 1, 1)


class NamespacedProcess(ForkedSandbox):
    """One forked sandbox, init of a pid namespace of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.pidfd = -1
        self.is_abandoned = False
        """Nobody waits for its start any more."""

    async def wait_ended(self, within_s: float) -> bool:
        """Wait until it has been reaped or its zygote is gone, at most about so long; True when it is so."""
        if not self.is_over:
            await self.changed.wait(within_s)
        return self.is_over


class NamespacedZygote(ZygoteHandle[NamespacedProcess]):
    """A zygote in namespaces of its own. Use `spawn` to make one."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, id_count: int) -> None:
        super().__init__(process, control)
        self.id_count = id_count
        self._numbers = itertools.count(1)
        """Of its own sandboxes: from them follow user ids, which no two that live may share."""
        self.problems: Mapping[str, str] = {}

    @classmethod
    def spawn(
        cls,
        root: RootFilesystem,
        preload: tuple[Sequence[str], Sequence[str]],
        slot: int,
        hash_seed: int | None,
        cgroups: tuple[Sequence[str], str],
        programs: Sequence[str] | None = None,
    ) -> NamespacedZygote:
        """Start the launcher and send it the plan. `preload`: modules that must be importable, and may be.
        `cgroups`: base directories, and our folder in each, which the launcher removes if the host is killed.
        `programs`: all that scripts may execute; empty: whatever they can read. None: nothing.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: it could not be sent its plan.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        block = id_block(slot)
        try:
            with theirs:
                process = subprocess.Popen(
                    [root.executable, "-I", "-S", "-B", root.launcher, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={"LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        environment = ENVIRONMENT | hashing(hash_seed)
        code = (
            f"{start(root.sys_path)}; from toolcell_bridge.entry.zygote import main; "
            "main(int(sys.argv[1]), int(sys.argv[2]))"
        )
        plan = {
            "root": asdict(root.root),
            "ids": None if block is None else [block.first, block.count],
            "cgroups": list(cgroups[0]),
            "cgroup_folder": cgroups[1],
            "environment": environment,
            "arguments": [root.interpreter, "-P", "-s", "-S", "-B", "-c", code],
        }
        zygote = cls(process, ours, 1 if block is None else block.count)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)
        zygote.send_first(marshal.dumps(plan, MARSHAL_FORMAT))
        config: dict[str, Any] = {"preload": [*preload[0]], "ahead": [*preload[1]], "sys_path": [*root.sys_path]}
        config |= {"executes": programs is not None, "programs": [*(programs or ())]}
        config |= {"own_ids": zygote.id_count > 1}
        zygote.send_first(msgpack.packb(config))
        return zygote

    async def wait_ready(self) -> Mapping[str, Any]:
        """Do what every zygote does, and take note of what could not be preloaded."""
        message = await super().wait_ready()
        self.problems = message["problems"]
        return message

    def _handle(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        match message:
            case {"started": number}:
                self._take_started(number, descriptors)
            case {"failed": number, "errno": shortage, "why": why}:
                self._unanswered.pop(number, None)
                if (child := self._children.pop(number, None)) is not None:
                    child.fail(describe(shortage, why))
            case {"exited": number, "status": status, "cpu_s": cpu_s, "peak_memory_bytes": peak}:
                if (child := self._children.pop(number, None)) is not None:
                    child.end = _of_first_process(exit_of(status, cpu_s, peak))
                    child.changed.notify()

    def _take_started(self, number: int, descriptors: list[int]) -> None:
        """Give a child its pidfd. One that nobody waits for is killed."""
        self._unanswered.pop(number, None)
        child = self._children.get(number)
        if child is None or child.is_abandoned:
            for descriptor in descriptors:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        elif not descriptors:
            # The kernel drops a descriptor that finds no place in our table. The child ends when its bridge closes.
            del self._children[number]
            child.fail(describe(errno.EMFILE, ""))
        else:
            child.pidfd, child.has_started = descriptors[0], True
            child.changed.notify()

    async def fork(self, settings: bytes, descriptors: Sequence[int]) -> NamespacedProcess:
        """Request a sandbox. `settings`: packed. `descriptors` are sent with the request; the caller closes them.

        Raises:
            SandboxUnavailable: the request could not be sent; names the shortage.
        """
        child = NamespacedProcess(next(self._numbers))
        # Where there are several ids, 0 is the zygote's own.
        outer_id = 0 if self.id_count == 1 else 1 + child.number % (self.id_count - 1)
        request = {"id": child.number, "outer_id": outer_id, "settings": settings, "descriptors": len(descriptors)}
        await self._request(child, request, descriptors)
        return child

    async def wait_started(self, child: NamespacedProcess) -> None:
        """Do what every zygote does.

        Cancellation: the child is killed as soon as the zygote reports it.
        """
        try:
            await super().wait_started(child)
        finally:
            child.is_abandoned = not child.has_started

    async def aclose(self, remove_cgroups: Callable[[], bool] = lambda: True) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        `remove_cgroups` runs after its control socket has closed. The launcher removes what this function cannot.
        Cancellation: shielded, and bounded: what does not exit by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            await self._hang_up()
            if not remove_cgroups():
                self._close_descriptors()
                self._mark_dead("the zygote was closed")
                return
            if self._process.stdin is not None and not self._process.stdin.closed:
                with suppress(OSError):
                    os.write(self._process.stdin.fileno(), CGROUPS_ARE_MINE)
            self._close_descriptors()
            await self._wait_exited()
            self.kill()


class ProcessBackend(Backend):
    """Starts sandboxes by forking a zygote."""

    name: ClassVar[str] = "process"
    isolates: ClassVar[bool] = True
    descriptors_per_sandbox: ClassVar[int] = 4

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        packages: Path | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
        program: str = "",
    ) -> None:
        """`program`: the only one that scripts may execute, as they see it. With `Policy(shell=True)` they may many."""
        self.policy: Policy = policy or Policy()
        self._program, self._executes = program, self.policy.shell or bool(program)
        self._packages = packages
        self.preload = tuple(preload)
        self.python = python
        self._environment = (programs.ENVIRONMENT if self.policy.shell else {}) | self.policy.environment()
        self.absent: Mapping[str, str] = {}
        """Layers that this kernel does not have and the policy does not require, and why. Known once it is open."""
        self._zygotes = Zygotes(self._start_zygote)
        self._spawned: NamespacedZygote | None = None
        """Not waited for yet."""
        self._count = itertools.count(1)
        self._cgroups: CgroupManager | NoLocation | None = None
        self._settings: tuple[Limits, bytes] | None = None
        """What was last asked of the zygote: nearly all sandboxes of a runtime have the same limits."""

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Limits that cannot be held on this machine, with the reason and what to do. Known once it is open."""
        manager = self._cgroups
        if isinstance(manager, CgroupManager):
            why = "the cgroup hierarchy has no cpu controller that this process may use"
            return {} if manager.processors is not None else {"cpu_cores": f"{why}; mount it, or leave cpu_cores out"}
        return {"cpu_cores": f"there is no cgroup: {manager.reason}; {manager.fix}"} if manager is not None else {}

    def spawn(self) -> None:
        """Start the zygote's process and do not wait for it: the first half of `open`, without an event loop.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: there is no interpreter for guests, or the launcher died.
        """
        self._cgroups, self._settings = cgroup_manager.discover(), None
        if isinstance(self._cgroups, CgroupManager):
            self._cgroups.reap_orphans()
        self._spawned = self._spawn_zygote()

    def kill_spawned(self) -> None:
        """Kill the zygote of `spawn`, instead of `open`."""
        if self._spawned is not None:
            self._spawned.kill()
            self._spawned = None
            self._close_cgroups()

    async def open(self) -> None:
        """Start the zygote, or wait for the one of `spawn`.

        Raises:
            SandboxUnavailable: isolation cannot be set up here; the message says why and what to do.
        """
        await self._zygotes.open()
        try:
            if self._spawned is None:
                self.spawn()
            await self._zygotes.living()
        except BaseException as exc:
            await self.close()
            if isinstance(exc, OSError):
                raise unavailable(exc) from exc
            raise

    def _spawn_zygote(self) -> NamespacedZygote:
        # Always in the guest package, so that a run may choose a lint profile. Preloaded only if every run has one.
        extras = ("RestrictedPython",)
        preload = (*PRELOAD[self.policy.lint], *self.preload)
        manager = self._cgroups
        where = manager.directories if isinstance(manager, CgroupManager) else ((), "")
        root = root_filesystem.build(self._packages, extras, self.python, self.policy.shell)
        return NamespacedZygote.spawn(
            root,
            (preload, imported_ahead(self._packages)),
            next_slot(),
            self.policy.hash_seed,
            where,
            programs=[self._program, root.loader] if self._program else [] if self.policy.shell else None,
        )

    async def _start_zygote(self, frame_bytes: int) -> NamespacedZygote:
        zygote, self._spawned = self._spawned or self._spawn_zygote(), None
        ready = await zygote.wait_ready()
        try:
            manager = self._cgroups
            lacks = {**ready["lacks"], **({"cgroup": manager.reason} if isinstance(manager, NoLocation) else {})}
            has_cgroup = isinstance(manager, CgroupManager)
            check_layers(self.policy.require, {*ready["layers"], *(["cgroup"] if has_cgroup else [])}, lacks)
            if zygote.problems:
                problems = "; ".join(f"{name}: {why}" for name, why in zygote.problems.items())
                raise SandboxUnavailable(f"preloading failed: {problems}")
        except SandboxUnavailable:
            zygote.kill()
            raise
        zygote.start_s = self.start_s
        self.absent = ready["lacks"]
        return zygote

    async def start(self, limits: Limits) -> ProcessSandbox:
        """Fork one sandbox.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        return await self._zygotes.fork(functools.partial(self._fork_one, limits))

    async def _fork_one(self, limits: Limits, zygote: NamespacedZygote) -> ProcessSandbox:
        """Make what a sandbox needs, and request it. Descriptors: four here, until it is destroyed."""
        with ExitStack() as theirs, ExitStack() as ours:
            bridge, guest_bridge = socket.socketpair()
            ours.enter_context(bridge)
            theirs.enter_context(guest_bridge)
            out, guest_out = open_pipe(ours, theirs)
            err, guest_err = open_pipe(ours, theirs)
            written = [guest_out, guest_err]
            ident = f"p{next(self._count)}"
            cgroup = self._make_cgroup(ident, limits)
            if cgroup is not None:
                ours.callback(cgroup.remove)
                for entry in cgroup.entries:
                    written.append(os.open(entry, os.O_WRONLY | os.O_CLOEXEC))
                    theirs.callback(os.close, written[-1])
            if self._settings is None or self._settings[0] is not limits:
                self._settings = limits, self._pack_settings(limits, cgroup is not None)
            manager = self._cgroups if isinstance(self._cgroups, CgroupManager) else None
            child = await zygote.fork(self._settings[1], [guest_bridge.fileno(), *written])
            sandbox = ProcessSandbox(
                child,
                SocketStream(bridge),
                output=(out, err),
                limits=limits,
                ident=ident,
                required=self.policy.require,
                cgroup=cgroup,
                cgroups=manager,
            )
            ours.pop_all()
        try:
            await zygote.wait_started(child)
            sandbox.watch_end()
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def _pack_settings(self, limits: Limits, has_cgroup: bool) -> bytes:
        settings = {
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "frame_bytes": limits.frame_bytes,
            "environment": self._environment,
            "rlimits": asdict(rlimits_for(limits, has_cgroup, executes=self._executes)),
        }
        packed: bytes = msgpack.packb(settings)
        return packed

    def _make_cgroup(self, name: str, limits: Limits) -> Cgroup | None:
        if not isinstance(self._cgroups, CgroupManager):
            return None
        try:
            return self._cgroups.create(name, limits.memory_bytes, limits.processes, limits.cpu_cores)
        except OSError as exc:
            raise SandboxUnavailable(
                f"a cgroup for the sandbox could not be made: {describe(exc.errno, str(exc))}"
            ) from exc

    def _close_cgroups(self) -> bool:
        """Remove every cgroup; False when a process in one does not die."""
        manager, self._cgroups = self._cgroups, None
        return manager.close() if isinstance(manager, CgroupManager) else True

    async def close(self) -> None:
        try:
            await self._zygotes.close(lambda zygote: zygote.aclose(self._close_cgroups))
        finally:
            self._close_cgroups()


# One sandbox of the process backend: its limits, its measurements and its end.

END_S = 5.0
"""How long a killed sandbox may take to be reaped. The kernel does it in well under a millisecond."""

REPORT_STEPS, REPORT_STEP_S = 20, 0.1
"""How long the zygote may take to report the end of a sandbox that is dead. In steps: when this process itself stands
still for a while, that is one of them."""

THREADS = 4
"""That make the kernel forget names at the same time."""

FROZEN_BYTES = 32 * MIB
"""Most memory that a sandbox may have used and still be frozen."""

LOWERED = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE")
"""Limits of a running sandbox that are lowered to those of its run."""

NPROC_FACTOR = 2
"""RLIMIT_NPROC is this many times the cgroup's limit, so that the cgroup refuses first: it counts refusals. The kernel
counts every fork in progress for RLIMIT_NPROC, also those about to be refused, so a fork bomb is briefly far above."""


def rlimits_for(limits: Limits, has_cgroup: bool, *, executes: bool = False) -> RlimitPlan:
    """Choose the per-process limits of a sandbox. `executes`: its script may execute programs."""
    processes = limits.processes * (NPROC_FACTOR if has_cgroup else 1)
    return plan_rlimits(limits, processes, is_counted=has_cgroup, executes=executes)


class ProcessSandbox(Sandbox):
    """One forked child of the zygote."""

    def __init__(
        self,
        child: NamespacedProcess,
        stream: SocketStream,
        output: tuple[int, int],
        limits: Limits,
        ident: str,
        required: frozenset[str],
        cgroup: Cgroup | None,
        cgroups: CgroupManager | None,
    ) -> None:
        self._child = child
        self._output = output
        self._closed = False
        """Its descriptors are closed."""
        self.id = ident
        self.stream: SocketStream = stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "process"
        self._required = required
        self._end = select.poll()
        self._sample = Sample()
        self._tree: TreeWatch | None = None
        self._cgroup, self._cgroups = cgroup, cgroups
        self._scope_type = event_loop.scope_type()

    @property
    def outside_layers(self) -> Mapping[str, str]:
        return {"cgroup": self._cgroups.description} if self._cgroups is not None else {}

    def watch_end(self) -> None:
        """Start to watch for its end. Call it when its pidfd is known."""
        self._end.register(self._child.pidfd, select.POLLIN)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        check_layers(self._required, layers.keys() | ({"cgroup"} if self._cgroup is not None else set()), {})
        self.layers = {**layers, **self.outside_layers}
        if self._cgroups is None:
            # Without a cgroup the watch is what bounds memory: a start that cannot have one fails.
            with suppress(*GONE):
                self._tree = TreeWatch(self.pid, self.limits.memory_bytes)
        elif self._cgroup is not None:
            # What the end of a run reads is opened now, while nobody waits.
            self._cgroup.keep_open(True, most=MOST_KEPT_AHEAD)
            self.sample(brief=True)

    @functools.cached_property
    def pid(self) -> int:
        """Its process id in our namespace. Valid until the zygote reports that it was reaped."""
        with open(f"/proc/self/fdinfo/{self._child.pidfd}", encoding="ascii") as info:
            return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))

    def is_alive(self) -> bool:
        """Whether it still runs. Its pidfd becomes readable when it ends, before the zygote reports it."""
        return not self._child.is_over and not self._closed and not self._end.poll(0)

    async def prepare(self, limits: Limits) -> None:
        if limits is self.limits or self._closed:
            return
        if self._cgroup is not None and self._cgroups is not None:
            self._cgroup.set_limits(limits.memory_bytes, limits.processes)
            if limits.cpu_cores != self.limits.cpu_cores:
                self._cgroups.set_processors(self._cgroup, limits.cpu_cores)
        elif self._tree is not None:
            self._tree.memory_bytes = limits.memory_bytes
        for name, value in rlimits_for(limits, self._cgroup is not None).rows():
            if name in LOWERED:
                resource.prlimit(self.pid, getattr(resource, name), (value, value))

    def read_output(self) -> tuple[bytes, bytes]:
        if self._closed:  # the numbers may be those of another sandbox's bridge
            return b"", b""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        if self._cgroup is None:
            return self._tree.look() if self._tree is not None else self._sample
        try:
            if brief:
                cpu_s, peak_memory_bytes = self._cgroup.consumed()
                self._sample = Sample(
                    cpu_s or 0.0,
                    peak_memory_bytes or 0,
                    processes=self._sample.processes,
                    peak_processes=self._sample.peak_processes,
                    memory_kills=self._sample.memory_kills,
                    refused_processes=self._cgroup.count_refused(),
                )
                return self._sample
            usage = self._cgroup.usage()
        except OSError:
            return self._sample
        self._sample = replaced(usage, peak_processes=max(usage.peak_processes, self._sample.peak_processes))
        return self._sample

    def measure_often(self, is_often: bool) -> None:
        """Make measurements cheaper, at the cost of some descriptors while few sandboxes ask for it; until `pause`."""
        if self._cgroup is not None:
            self._cgroup.keep_open(is_often)

    def kill(self) -> None:
        """Kill every process inside at once: the child is init of its pid namespace."""
        if self._can_be_signalled():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    kill_now = kill

    def _can_be_signalled(self) -> bool:
        # A destroyed one has no pidfd any more: its number may be that of another sandbox.
        return self._child.pidfd >= 0 and self._child.end is None and not self._closed

    def ask_line(self) -> bool:
        """Have the main thread of the script write its frames to descriptor 2."""
        self._signal(ASK_SIGNAL)
        return True

    interrupted_s = INTERRUPTED_S

    def interrupt(self) -> None:
        self._signal(INTERRUPT_SIGNAL)

    def _signal(self, number: int) -> None:
        if self._can_be_signalled():
            with suppress(OSError):
                signal.pidfd_send_signal(self._child.pidfd, number)

    def cpu_now(self) -> float | None:
        """Return the CPU seconds that its process tree has used. Any thread may call it."""
        if self._cgroup is None:
            return self._tree.look().cpu_s if self._tree is not None else None
        try:
            return self._cgroup.consumed()[0]
        except OSError:
            return None

    async def pause(self) -> bool:
        """Stop every process inside until `unpause` or the end; False when some may go on.

        Signals stop also a process whose host dies: its zygote ends with the host, and the kernel kills what is below.
        """
        self.stream.expect_nothing()
        self.measure_often(False)
        return self._stop_all(True)

    async def unpause(self) -> None:
        self._stop_all(False)

    def freeze(self) -> bool:
        """Stop everything inside. False when something may go on, and when the next run may need the memory."""
        if self._cgroup is None or self._sample.peak_memory_bytes > FROZEN_BYTES:
            return False
        self.stream.expect_nothing()
        return self._stop_all(True)

    def _stop_all(self, is_paused: bool) -> bool:
        cgroup, number = self._cgroup, signal.SIGSTOP if is_paused else signal.SIGCONT
        if not self._can_be_signalled():
            return False
        try:
            if cgroup is not None and cgroup.freeze(is_paused):
                return True
            signal.pidfd_send_signal(self._child.pidfd, number)  # a fork in progress is counted already, or fails
            if cgroup is None:
                return signal_all(lambda: tree_of(self.pid), number)
            return cgroup.count_processes() == 1 or signal_all(cgroup.pids, number)
        except OSError:
            return False

    async def ended(self) -> Exit:
        """Wait until its main process has ended, at most a few seconds; returns how it ended."""
        child = self._child
        if child.pidfd < 0:
            return Exit(problem=child.problem or "it was never started")
        with self._scope_type(shield=True):
            for _ in range(REPORT_STEPS):
                if await child.wait_ended(REPORT_STEP_S):
                    break
            if self.is_alive():
                await child.wait_ended(END_S)
        return child.end or Exit(problem=child.problem or "its zygote did not report how it ended")

    async def destroy(self) -> None:
        """Kill every process inside and free every resource. Safe to call twice.

        Cancellation: shielded, and bounded: a cgroup that will not empty is left to `ProcessBackend.close`.
        """
        self.kill()
        self.stream.close()
        await self.ended()
        if not self._closed:
            self._closed = True
            if self._cgroup is not None:
                await self._remove(self._cgroup)
            for descriptor in (*self._output, self._child.pidfd):
                if descriptor >= 0:
                    os.close(descriptor)

    async def _remove(self, cgroup: Cgroup) -> None:
        if self._sample.peak_memory_bytes > REMEMBERED_BYTES:
            # Without memory or processes there is no thread for it. The names stay until memory is short.
            with anyio.CancelScope(shield=True), suppress(OSError, RuntimeError, MemoryError):
                await daemon_threads.run_sync(cgroup.drop_names, limiter=_forgetting())
        if not cgroup.remove():
            with anyio.move_on_after(END_S, shield=True):
                await self._empty(cgroup)

    @staticmethod
    async def _empty(cgroup: Cgroup) -> None:
        """Remove a cgroup whose processes were killed; the kernel needs a moment to remove them."""
        wait_s = 0.001
        while not cgroup.remove():
            cgroup.kill()
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.1)


_forgets: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("toolcell_forgetting_names")


def _forgetting() -> anyio.CapacityLimiter:
    """Return what bounds the threads that drop names. The default limiter is the program's, which may use it up."""
    try:
        return _forgets.get()
    except LookupError:
        _forgets.set(made := anyio.CapacityLimiter(THREADS))
        return made
