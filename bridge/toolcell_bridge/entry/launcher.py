"""First of two steps from a clean interpreter to a zygote: namespaces and a root of its own, then exec inside.

Started by the host as `python -I -S launcher.py FD`; the host imports nothing of it but a constant. Reads one plan
from the control socket, builds the root, clones a child into a full set of new namespaces, maps its ids, and stays
behind as that child's parent until it ends. The order matters:

1. a mount namespace (an ordinary user needs a user namespace around it), where the root is built with the rights of
   whoever started us, so that an interpreter in a closed home directory can still be bound;
2. pivot, so that nothing of the old root is left;
3. clone with every namespace flag. The mounts made so far become locked in the child: even all capabilities there
   cannot lift one;
4. the parent, outside, writes the child's id maps; the child becomes an id that owns nothing on the host;
5. exec of the same interpreter by its path inside, so that no path, module or heap page of the host side remains.
"""

from __future__ import annotations

import _socket
import marshal
import os
import select
import sys

MARSHAL_FORMAT = 2
"""Format of the plan. Every Python reads it, and has the reader built in: importing json takes as long as starting
Python."""

FAILED = b"!"
"""Before the text of an error. No map of msgpack, such as the zygote sends, begins with it."""

PLAN_BYTES = 256 * 1024

CGROUPS_ARE_MINE = b"k"
"""From the host on standard input, before it closes it."""

SIGCONT = 18
"""Sent by the kernel when the host ends: a launcher that is stopped then goes on, to clean up."""

STUCK_S = 0.5
"""How long a zygote may take to end when its host is gone. It takes milliseconds, unless it is stopped."""

PATIENCE_S = 60.0
"""How long killed processes may take to leave their cgroups: milliseconds, except on an overloaded machine."""


def main() -> None:
    """Run the launcher; exits with the zygote's status, or 1 after reporting an error on the control socket."""
    control = _socket.socket(fileno=int(sys.argv[1]))
    # What is built here is read by the ids of sandboxes, whatever the host's own umask. Scripts inherit it too.
    os.umask(0o022)
    try:
        plan = marshal.loads(control.recv(PLAN_BYTES))
        # Reachable no more after the pivot, and needed when the host was killed and cannot clean up.
        cgroups = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in plan["cgroups"]]
        pid = _launch(control, plan)
    except BaseException as exc:
        # Plain text for a person: this is the machine refusing, before any guest code exists.
        _report(control, exc)
        os._exit(1)
    control.close()
    status = _wait_for_zygote(pid)
    # A host that lives says when its cgroups are none of our business: it has removed them, or goes on to use them
    # with another zygote. One that is killed, or could not remove them, only closes.
    if os.read(0, 1) != CGROUPS_ARE_MINE:
        _remove_cgroups(cgroups, plan["cgroup_folder"])
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _report(control: _socket.socket, exc: BaseException) -> None:
    """Say what failed, as text. After the pivot there may be no module left to import."""
    control.send(FAILED + f"{type(exc).__name__}: {exc}".encode("utf-8", "replace"))


def _wait_for_zygote(pid: int) -> int:
    """Return its status. One that outlives its host is killed: somebody has stopped it, and it cannot end by itself."""
    zygote = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(zygote, select.POLLIN)
    waiting.register(0, select.POLLIN)  # the host says something there only when it is done, or it is gone
    waiting.poll()
    waiting.unregister(0)
    if not waiting.poll(STUCK_S * 1000):
        os.kill(pid, 9)
    return os.waitpid(pid, 0)[1]


def _launch(control: _socket.socket, plan: dict[str, object]) -> int:
    """Carry out steps 1 to 5 and return the zygote's pid."""
    sys.path.insert(0, os.path.abspath(os.path.join(__file__, "..", "..", "..")))
    from toolcell_bridge.isolation.procfs import id_map, prefer_in_oom_killer, write_maps
    from toolcell_bridge.isolation.root import ALL, build, clone
    from toolcell_bridge.isolation.syscalls import CLONE_NEWNS, CLONE_NEWUSER, PR_SET_PDEATHSIG, prctl, unshare

    ids: list[int] | None = plan["ids"]  # type: ignore[assignment]
    uid, gid = os.getuid(), os.getgid()
    if ids is None:
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        own = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        write_maps(own, "self", id_map(uid, uid), id_map(gid, gid), deny_setgroups=True)
        uids, gids = id_map(0, uid), id_map(0, gid)
    else:
        unshare(CLONE_NEWNS)
        uids = gids = id_map(0, ids[0], ids[1])
    prctl(PR_SET_PDEATHSIG, SIGCONT)  # a user namespace of its own would clear it
    # Survives the pivot: the procfs of the old root, through which maps are written from now on.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(proc, True)
    build(**plan["root"])  # type: ignore[arg-type]
    mapped = os.pipe2(os.O_CLOEXEC)
    pid = clone(ALL)
    if not pid:
        try:
            _become_zygote(mapped, plan, proc, control)
        except BaseException as exc:
            _report(control, exc)
            os._exit(1)
    prefer_in_oom_killer(str(pid), proc)  # and so all its sandboxes
    write_maps(proc, str(pid), uids, gids, deny_setgroups=ids is None)
    os.close(mapped[0])
    os.write(mapped[1], b"1")
    os.close(mapped[1])
    os.close(proc)
    return pid


def _become_zygote(mapped: tuple[int, int], plan: dict[str, object], proc: int, control: _socket.socket) -> None:
    from toolcell_bridge.isolation.syscalls import PR_SET_PDEATHSIG, prctl, sethostname, syscall

    os.close(mapped[1])
    if os.read(mapped[0], 1) != b"1":
        raise OSError("the id maps of the zygote could not be written")
    if plan["ids"] is not None:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    sethostname("sandbox")
    # A new uts namespace begins as a copy; glibc has no name for "no domain" but this one.
    syscall("setdomainname", b"(none)", 6)
    os.set_inheritable(control.fileno(), True)
    environment: dict[str, str] = plan["environment"]  # type: ignore[assignment]
    arguments: list[str] = plan["arguments"]  # type: ignore[assignment]
    # After the last change of credentials, which would clear it. The launcher is single-threaded, so this fires
    # when that process ends and not before.
    prctl(PR_SET_PDEATHSIG, 9)
    os.execve(arguments[0], [*arguments, str(control.fileno()), str(proc)], environment)


def _remove_cgroups(bases: list[int], folder: str) -> None:
    """Remove what a killed host left in the cgroup tree; every process in it has just died with the zygote."""
    import time

    deadline, wait_s = time.monotonic() + PATIENCE_S, 0.001
    left = bases
    while (left := [base for base in left if not _is_removed(base, folder)]) and time.monotonic() < deadline:
        time.sleep(wait_s)  # a process that has been killed leaves its cgroup a moment later
        wait_s = min(2 * wait_s, 0.1)


def _is_removed(base: int, folder: str) -> bool:
    """Remove `folder` with everything in it that is empty by now; True when it is gone."""
    try:
        home = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=base)
    except FileNotFoundError:
        return True
    try:
        for name in [entry.name for entry in os.scandir(home) if entry.is_dir(follow_symlinks=False)]:
            _is_rmdir_done(name, home)
    finally:
        os.close(home)
    return _is_rmdir_done(folder, base)


def _is_rmdir_done(name: str, parent: int) -> bool:
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
