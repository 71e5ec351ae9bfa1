"""One sandbox among many in a container: a warden, and the guest it watches.

There are no privileges in a container, so no pid namespace and no user id of its own for each sandbox. The warden
stands in for both. It adopts every orphan below it, and it sits in a Landlock domain that ends signals at its border:
the guest's domain lies inside, so the warden's kill(-1) reaches every process of this sandbox and no other, at once,
also those that fork in that moment, while no guest can signal a warden, the parent or another sandbox. Nothing a guest
says reaches a warden: it hears its parent, its leash, and of deaths from the kernel.

The leash is a pipe from whoever owns the sandbox, which may be the host itself: `FREEZE` stops every process of it
where it is, anything else or the end of the pipe ends it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgpack

from toolcell_bridge.entry.shared_protocol import FREEZE
from toolcell_bridge.isolation import landlock, rlimits
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation
from toolcell_bridge.isolation.capabilities import set_no_new_privileges, set_undumpable
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    close_range,
    prctl,
    syscall,
)

BRIDGE = 3
WORKSPACE_FD = 4
"""Descriptors of a guest, after the standard three. Links of the image's make /work and /tmp lead to what is below the
second: the same links for everybody, and each process finds its own directories behind them."""

FIRST_FREE = 10
"""Everything the parent and the wardens have stays above what a guest finds in place."""

SCOPES_SINCE = 6
"""First Landlock ABI that keeps signals inside."""

PLACES = ("work", "tmp", "shm")

OOM_SCORE = b"500"
"""When the container is out of memory, the kernel is to take a guest, never a warden or the parent."""

NICE = 19
"""Of guests. It counts within the container alone, whose share of the machine is its cgroup's: however many processes a
guest has, the warden, the relay and the forker come first, and with them the end of the guest."""

STUBBORN_PASSES = 2000
LOOK_AGAIN_S = 0.001

Lines = tuple[int, int, int]
"""A guest's bridge and what its descriptors 1 and 2 will be."""


@dataclass(frozen=True, slots=True)
class SandboxSlot:
    """Where a sandbox will be: all that its processes need to know."""

    slot: str
    """A directory, usually a sized tmpfs, that this sandbox has to itself while it lives."""

    control: int
    """The warden's line to the parent."""

    leash: int
    lines: Lines
    plan: RlimitPlan
    is_scoped: bool
    """Signals end at the border of a Landlock domain."""


def scope_signals(abi: int) -> None:
    """Enter a domain that no signal leaves, nor connection to an abstract socket, and that restricts nothing else."""
    # Every ruleset denies renaming from one directory to another, unless it handles that right and grants it.
    scopes = landlock.handled(abi).scopes
    attribute = landlock.Handled(landlock.REFER, 0, scopes).attribute()
    ruleset = syscall("landlock_create_ruleset", attribute, len(attribute), 0)
    try:
        landlock.add_path(ruleset, "/", landlock.REFER, abi)
        landlock.restrict_self(ruleset, abi)
    finally:
        os.close(ruleset)


def guard(seat: SandboxSlot, walls: ContainerIsolation, guest: Callable[[dict[str, str], str], NoReturn]) -> NoReturn:
    """The warden's whole life, in a fresh fork of the parent.

    `guest`: what the sandbox does once its walls are up, given the live layers and its workspace.
    """
    code = 1
    try:
        wake = _leave_the_parent((seat.control, seat.leash, *seat.lines, *(descriptor for descriptor, _ in walls.rows)))
        set_no_new_privileges()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if seat.is_scoped:
            scope_signals(walls.abi)
        pid = os.fork()
        if pid == 0:
            _become_guest(seat, walls, guest)
        for descriptor in seat.lines:
            os.close(descriptor)
        os.write(seat.control, msgpack.packb({"pid": pid}))
        status = _wait_for_end(seat, wake, pid)
        report = _end_everything(pid, status, seat)
        os.write(seat.control, msgpack.packb(report))
        code = 0
    finally:
        os._exit(code)


def _leave_the_parent(keep: Sequence[int]) -> int:
    """Close all that is the parent's but `keep`; returns a pipe that every death of a child fills."""
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


def _wait_for_end(seat: SandboxSlot, wake: int, guest: int) -> int | None:
    """Reap orphans until the guest's first process is dead, or it is to die; returns its status if it has one."""
    poll = select.poll()
    for descriptor in (seat.control, seat.leash, wake):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == guest:
                    return found[1]
        if seat.control in ready:
            return None
        if seat.leash in ready:
            if os.read(seat.leash, 1) != FREEZE or not seat.is_scoped:
                return None
            signal_domain(signal.SIGSTOP)


def _end_everything(guest: int, status: int | None, seat: SandboxSlot) -> dict[str, object]:
    """Kill and reap all that is left, empty the slot, and say how it ended.

    Raises:
        RuntimeError: there are no scopes, and it forks faster than its processes can be found.
    """
    for _ in range(STUBBORN_PASSES):
        signal_domain(signal.SIGKILL) if seat.is_scoped else _kill_family()
        try:
            # Killed for certain or only looked for: wait for the last, or look again.
            while (found := os.waitpid(-1, 0 if seat.is_scoped else os.WNOHANG))[0]:
                status = found[1] if found[0] == guest else status
        except ChildProcessError:
            break
        select.select((), (), (), LOOK_AGAIN_S)
    else:
        raise RuntimeError("a sandbox forks faster than its processes can be found")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ended": -1 if status is None else status,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_memory_bytes": used.ru_maxrss * 1024,
        "is_clean": empty(seat.slot),
    }


def signal_domain(number: int) -> None:
    """Signal every process of this one's Landlock domain but itself."""
    try:
        # Under one lock of the kernel's: a fork is either in the list or fails for the signal that waits for it.
        os.kill(-1, number)
    except (ProcessLookupError, PermissionError):
        return


def _kill_family() -> None:
    """Without scopes: kill what one look finds below this process."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def process_row(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat from the third on, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return None


def descendants(root: int) -> list[int]:
    """Every process below `root`, from one look at the table of processes."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (row := process_row(int(name))) is not None:
            below.setdefault(int(row[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = below.pop(queue.pop(), [])
        found += children
        queue += children
    return found


def _become_guest(
    seat: SandboxSlot, walls: ContainerIsolation, guest: Callable[[dict[str, str], str], NoReturn]
) -> NoReturn:
    """The guest's life. Never returns."""
    try:
        # Its own session, or kill(0, ...) would be addressed to the warden.
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(PermissionError):  # another profile than ours around the container
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        _offer_to_oom_killer()
        places = _settle_in(seat)
        layers = walls.raise_here(seat.plan, places, WORKSPACE_FD + 1)
        if seat.is_scoped:
            layers["landlock"] += ", signals and abstract sockets kept inside"
        guest(layers, places[0])
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}".encode())
    finally:
        os._exit(1)


def _offer_to_oom_killer() -> None:
    # /proc/self is root's while the process cannot be dumped, as its parent could not.
    prctl(PR_SET_DUMPABLE, 1)
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, OOM_SCORE)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
    set_undumpable()


def _settle_in(seat: SandboxSlot) -> tuple[str, ...]:
    """Make this sandbox's directories and put its descriptors in place.

    The name is drawn here: nothing the parent ever knew, and so nothing a later sandbox inherits, helps to guess it.
    Landlock does not stop stat, chmod and utime, but they need a path.
    """
    home = f"{seat.slot}/{os.urandom(16).hex()}"
    os.mkdir(home, 0o700)
    places = tuple(f"{home}/{name}" for name in PLACES)
    for place in places:
        os.mkdir(place, 0o700)
    os.chdir(places[0])
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    inside = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for source, target in ((null, 0), *zip(seat.lines, (BRIDGE, 1, 2), strict=True), (inside, WORKSPACE_FD)):
        os.dup2(source, target, inheritable=target < BRIDGE)
    return places


def empty(slot: str) -> bool:
    """Remove all that is in `slot`, however deep, closed or numerous; True when nothing is left.

    Directories are unpacked into the slot itself, one at a time: no path grows long, and each is visited once.
    """
    where = os.fsencode(slot)
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
        # Moving a directory rewrites its "..", for which it must be writable.
        os.chmod(path, 0o700)
        os.rename(path, to)
    else:
        os.unlink(path)


def above(descriptor: int) -> int:
    """Move a descriptor out of the way of the guests' numbers."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
    os.close(descriptor)
    return moved


def lower(pid: int, plan: RlimitPlan, kinds: Sequence[int]) -> None:
    """Lower ceilings of a running process; one that is gone needs none."""
    for kind, value in rlimits.numbered(plan):
        if kind in kinds:
            try:
                resource.prlimit(pid, kind, (value, value))
            except (ProcessLookupError, ValueError, PermissionError):
                continue
