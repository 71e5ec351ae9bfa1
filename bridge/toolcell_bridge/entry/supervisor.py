"""The supervisor of one sandbox among many in a container: start the guest, wait for its end, kill what is left.

A container has no privileges, so a sandbox gets neither a pid namespace nor a user id of its own. The supervisor
replaces both. It adopts every orphan below it. It is in a Landlock domain that scopes signals, and the guest's domain
lies inside: the supervisor's kill(-1) reaches every process of this sandbox and no other, at once, also those that
are forking, and no guest can signal a supervisor, the zygote or another sandbox. Where Landlock has no scopes, the
guest's seccomp filter holds it in one process group and keeps its signals there: the supervisor signals the group.
A guest cannot send anything to its supervisor: that reads the zygote's socket, the control pipe, and the kernel's
reports of ended children.

The workspace is not a file system of its own, so the supervisor measures the files, which the kernel does not bound.

The control pipe comes from the owner of the sandbox, which may be the host itself. `FREEZE` on it stops every process
of the sandbox until `THAW`; anything unknown, or the end of the pipe, kills them.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgpack

from toolcell_bridge.entry.fork_handlers import HANDLERS
from toolcell_bridge.entry.preparation import BRIDGE, FIRST_FREE
from toolcell_bridge.entry.process_usage import descendants
from toolcell_bridge.entry.supervisor_protocol import ASK, FREEZE, INTERRUPT, THAW
from toolcell_bridge.guest.errors import ASK_SIGNAL
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL
from toolcell_bridge.isolation import landlock, rlimits
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation
from toolcell_bridge.isolation.capabilities import set_no_new_privileges, set_undumpable
from toolcell_bridge.isolation.procfs import prefer_in_oom_killer
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    close_range,
    prctl,
    syscall,
)

DIRECTORIES = ("work", "tmp", "shm")

NICE = 19
"""The nice value of guests: the supervisor and the zygote run first and can end a guest, however many
processes it has. The share of the container itself is its cgroup's."""

KILL_PASSES = 2000
KILL_INTERVAL_S = 0.001

SignalAll = Callable[[int], None]
"""Sends a signal to all processes of the sandbox at once."""

GuestStreams = tuple[int, int, int]
"""Descriptors of a guest's bridge, stdout and stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSlot:
    """What the supervisor and the guest of one sandbox are given."""

    directory: str
    """A directory that no other sandbox uses."""

    zygote: int
    """The supervisor's socket to the zygote."""

    control: int
    """The control pipe."""

    streams: GuestStreams
    rlimits: RlimitPlan
    room: FileRoom
    """What its files may take: the directory is not a file system that bounds them."""


def scope_signals(abi: int) -> None:
    """Enter a Landlock domain that scopes signals and abstract sockets, and restricts nothing else."""
    # A ruleset that does not handle REFER denies it.
    attribute = landlock.Handled(landlock.REFER, 0, landlock.handled(abi).scopes).attribute()
    ruleset = syscall("landlock_create_ruleset", attribute, len(attribute), 0)
    try:
        landlock.add_path(ruleset, "/", landlock.REFER, abi)
        landlock.restrict_self(ruleset, abi)
    finally:
        os.close(ruleset)


def supervise(
    slot: SandboxSlot, isolation: ContainerIsolation, guest: Callable[[dict[str, str], str], NoReturn]
) -> NoReturn:
    """Run one sandbox from its start to its end, in a fresh fork of the zygote. Never returns.

    `guest` runs in the sandbox once isolation is applied. It is given the live layers and its workspace.
    """
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # if it is stopped when the zygote is killed, it goes on, to clean up
        rules = (descriptor for descriptor, _ in isolation.rows)
        wake = _close_inherited((slot.zygote, slot.control, *slot.streams, *rules))
        set_no_new_privileges()
        adopt_orphans(is_needed=bool(isolation.signals_kept_by))
        if isolation.signals_kept_by == "landlock":
            scope_signals(isolation.abi)
        pid = HANDLERS.fork()
        if pid == 0:
            _become_guest(slot, isolation, guest)
        for descriptor in slot.streams:
            os.close(descriptor)
        os.write(slot.zygote, msgpack.packb({"pid": pid}))
        signal_all: SignalAll | None = None
        if isolation.signals_kept_by:
            signal_all = signal_domain if isolation.signals_kept_by == "landlock" else partial(signal_group, pid)
        why = _wait_for_end(slot, wake, pid, signal_all)
        report = _end_everything(pid, slot, signal_all) | {"why": why}
        os.write(slot.zygote, msgpack.packb(report))
        code = 0
    except BaseException as exc:
        os.write(2, f"the supervisor of a sandbox: {type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(code)


def adopt_orphans(*, is_needed: bool) -> None:
    """Become the parent of every orphan below. gVisor of 2022 cannot: its container ends with its one sandbox."""
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    except OSError:
        if is_needed:
            raise


def _close_inherited(keep: Sequence[int]) -> int:
    """Close the zygote's descriptors except `keep`. Return a pipe that is written to whenever a child ends."""
    first = FIRST_FREE
    for descriptor in sorted(keep):
        if descriptor > first:
            close_range(first, descriptor - 1)
        first = descriptor + 1
    close_range(first)
    wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    return wake


def _wait_for_end(slot: SandboxSlot, wake: int, guest: int, signal_all: SignalAll | None) -> str:
    """Reap children until the guest's first process has ended or must be killed; returns why this supervisor kills it.

    The first process is not reaped: its number, which is the group's, stays taken.
    """
    poll = select.poll()
    for descriptor in (slot.zygote, slot.control, wake):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(INTERVAL_MS)}
        if not ready and (why := excess(slot.directory, slot.room)):
            return why
        if wake in ready:
            os.read(wake, 4096)
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == guest:
                    return ""
                os.waitpid(ended.si_pid, os.WNOHANG)
        if slot.zygote in ready:
            return ""
        if slot.control in ready:
            if (word := os.read(slot.control, 1)) == ASK:
                os.kill(guest, ASK_SIGNAL)  # not reaped yet, so the number is still the guest's
            elif word == INTERRUPT:
                os.kill(guest, INTERRUPT_SIGNAL)
            elif word == FREEZE and signal_all is not None:
                signal_all(signal.SIGSTOP)
            elif word == THAW and signal_all is not None:
                signal_all(signal.SIGCONT)
            else:
                return ""


def _end_everything(guest: int, slot: SandboxSlot, signal_all: SignalAll | None) -> dict[str, object]:
    """Kill and reap every process that is left, empty the directory, and report how the guest ended.

    Raises:
        RuntimeError: nothing keeps the guest's processes together, and it forks faster than they can be found.
    """
    status: int | None = None
    for _ in range(KILL_PASSES):
        signal_all(signal.SIGKILL) if signal_all is not None else _kill_descendants()
        try:
            # Those that are kept together are all killed: wait for the last. Otherwise search again.
            while (found := os.waitpid(-1, 0 if signal_all is not None else os.WNOHANG))[0]:
                status = found[1] if found[0] == guest else status
        except ChildProcessError:
            break
        select.select((), (), (), KILL_INTERVAL_S)
    else:
        raise RuntimeError("a sandbox forks faster than its processes can be found")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ended": -1 if status is None else status,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_memory_bytes": used.ru_maxrss * 1024,
        "is_clean": empty(slot.directory),
    }


def signal_domain(number: int) -> None:
    """Signal every process of this process's Landlock domain except itself."""
    try:
        # The kernel holds one lock here: a forking child is in the list, or its fork fails because of the signal.
        os.kill(-1, number)
    except (ProcessLookupError, PermissionError):
        return


def signal_group(guest: int, number: int) -> None:
    """Signal every process of the group of a guest that is not reaped yet, and the guest, which may not lead it yet."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            send(guest, number)  # the kernel holds one lock here too: see `signal_domain`


def _kill_descendants() -> None:
    """Kill the processes that one pass finds below this one. Used where nothing keeps them together."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _become_guest(
    slot: SandboxSlot, isolation: ContainerIsolation, guest: Callable[[dict[str, str], str], NoReturn]
) -> NoReturn:
    """Apply isolation and run the guest. Never returns."""
    try:
        # Its own session. Otherwise kill(0, ...) goes to the supervisor.
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(PermissionError):  # a seccomp profile that is not ours denies it
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        _prefer_in_oom_killer()
        writable = _enter_directories(slot)
        layers = isolation.apply(slot.rlimits, writable, BRIDGE + 1)
        if isolation.signals_kept_by == "landlock":
            layers["landlock"] += ", signals and abstract sockets kept inside"
        guest(layers, writable[0])
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}".encode())
    finally:
        os._exit(1)


def _prefer_in_oom_killer() -> None:
    # Root owns /proc/self while the process is undumpable, as the zygote is.
    prctl(PR_SET_DUMPABLE, 1)
    prefer_in_oom_killer("/proc/self")
    set_undumpable()


def _enter_directories(slot: SandboxSlot) -> tuple[str, ...]:
    """Make this sandbox's directories, go there, and put its descriptors in place.

    The random name is made here, after the fork, so that no later sandbox inherits it from the zygote. Landlock does
    not stop stat, chmod and utime, but they need a path.
    """
    home = f"{slot.directory}/{os.urandom(16).hex()}"
    os.mkdir(home, 0o700)
    writable = tuple(f"{home}/{name}" for name in DIRECTORIES)
    for path in writable:
        os.mkdir(path, 0o700)
    os.chdir(writable[0])
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), *zip(slot.streams, (BRIDGE, 1, 2), strict=True)):
        os.dup2(source, target, inheritable=target < BRIDGE)
    return writable


def empty(directory: str) -> bool:
    """Remove everything in `directory`, however deep, closed or numerous; True when nothing is left.

    Subdirectories are unpacked into `directory` itself, one at a time: no path gets long, and each is visited once.
    """
    where = os.fsencode(directory)
    number = 0
    try:
        while entries := os.listdir(where):
            for name in entries:
                path = os.path.join(where, name)
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for inner in os.listdir(path):
                    number += 1
                    _move_out(os.path.join(path, inner), os.path.join(where, b"left-%d" % number))
                os.rmdir(path)
    except OSError:
        return False
    return True


def _move_out(path: bytes, to: bytes) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        # Moving a directory rewrites its "..", so it must be writable.
        os.chmod(path, 0o700)
        os.rename(path, to)
    else:
        os.unlink(path)


def lower_limits(pid: int, plan: RlimitPlan, kinds: Sequence[int]) -> None:
    """Lower rlimits of a running process. An ended process is ignored."""
    for kind, value in rlimits.numbered(plan):
        if kind in kinds:
            try:
                resource.prlimit(pid, kind, (value, value))
            except (ProcessLookupError, ValueError, PermissionError):
                continue


INTERVAL_MS = 250
"""How often the files of a sandbox are measured."""

BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system."""

OWN_FOLDERS = 4
"""The sandbox's home and the folders that are made in it before a script runs."""


@dataclass(frozen=True, slots=True)
class FileRoom:
    """What the files of one sandbox may take."""

    disk_bytes: int
    inodes: int


def excess(directory: str, room: FileRoom) -> str:
    """Return what is too much in `directory`, or an empty string. The script may change it meanwhile.

    Links are not followed and no mode is changed: the script could put a link to a file of the host in the way.
    """
    used_bytes = count = 0
    folders = [os.fsencode(directory)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    used_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if used_bytes > room.disk_bytes:
                        return f"its files took more than disk_bytes={room.disk_bytes} bytes"
                    if count > room.inodes + OWN_FOLDERS:
                        return f"it had more than inodes={room.inodes} files and folders"
        except FileNotFoundError:  # removed or renamed meanwhile
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "its folders were nested too deep to be measured"
            if error.errno != errno.ENOTDIR:
                return f"its files could not be measured: {error.strerror}"
    return ""
