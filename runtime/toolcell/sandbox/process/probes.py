"""Find out which isolation layers work on this machine: try each, and give reason and remedy when it fails.

A small clean interpreter does this, because a host process has threads and most layers cannot be taken off again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import toolcell_bridge
from toolcell._version import FOLDER
from toolcell.sandbox.process import cgroup_manager
from toolcell.sandbox.process.cgroup_manager import CgroupManager, NoLocation
from toolcell.sandbox.process.child_probe import ChildProbe, Probe, attempt
from toolcell_bridge.isolation import capabilities, landlock, rlimits, seccomp
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.seccomp_policy import SeccompAction
from toolcell_bridge.isolation.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_root,
    sethostname,
    syscall,
    umount2,
    unshare,
)

NAMES = (
    "user",
    "pid",
    "mount",
    "net",
    "ipc",
    "uts",
    "cgroup_ns",
    "landlock",
    "seccomp",
    "capabilities",
    "no_new_privs",
    "rlimits",
    "cgroup",
)

_TIMEOUT_S = 300.0
"""Far more than an emulated machine needs."""
_SECCOMP_GET_ACTION_AVAIL = 2
_STAGING = ("/tmp", "/mnt", "/run", "/dev/shm")
_SCRIPT = "import sys; sys.path[:0] = sys.argv[1:]; from toolcell.sandbox.process.probes import main; main()"


def probe_all() -> tuple[Probe, ...]:
    """Try every layer; returns one probe for each of `NAMES`, in that order. Blocks for about a tenth of a second."""
    import subprocess  # not needed by the process it starts

    if sys.platform != "linux":
        return tuple(Probe(name, False, "the process backend needs Linux", "use the Docker backend") for name in NAMES)
    homes = {str(Path(path).resolve().parent) for path in (FOLDER, *toolcell_bridge.__path__)}
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT, *homes]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
        return tuple(Probe(**row) for row in json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        why = f"the probing process failed: {error} {said.decode(errors='replace')[-500:]}".strip()
        return tuple(Probe(name, None, why) for name in NAMES)


def main() -> None:
    """Print every probe as JSON. Runs alone in its interpreter, single-threaded."""
    sys.stdout.write(json.dumps([dataclasses.asdict(probe) for probe in _probe_here()]))


def _probe_here() -> list[Probe]:
    user = attempt(_try_user)
    fix = "" if user.ok else user_namespace_fix(user, machine_facts())
    found = [
        Probe("user", user.ok, user.detail, fix),
        *(probe_namespace(name, action, user, fix) for name, action in _NAMESPACES.items()),
        probe_landlock(),
        _probe("seccomp", _try_seccomp, "needs Linux 4.14 or newer with CONFIG_SECCOMP_FILTER=y, on x86_64 or aarch64"),
        _probe("capabilities", _try_capabilities, "needs CAP_SETPCAP, or user namespaces (see the fix for `user`)"),
        _probe("no_new_privs", _try_no_new_privileges, "needs Linux 3.5 or newer"),
        _probe("rlimits", _try_rlimits, "a seccomp profile around this process denies prlimit64"),
        _probe_cgroup(),
    ]
    if is_under_gvisor():
        return [each if each.live else dataclasses.replace(each, fix=GVISOR_HAS_NOT) for each in found]
    return found


def _probe(name: str, action: Callable[[], str], fix: str) -> Probe:
    tried = attempt(action)
    return Probe(name, tried.ok, tried.detail, "" if tried.ok else fix)


def probe_namespace(name: str, action: Callable[[], str], user: ChildProbe, user_fix: str) -> Probe:
    """Try one kind of namespace. Without user namespaces it is not tried: `user_fix` is then the remedy."""
    if not user.ok:
        return Probe(name, False, "made inside a user namespace, which is not available", user_fix)
    tried = attempt(action)
    if tried.ok:
        return Probe(name, True, tried.detail)
    if tried.code == errno.EINVAL:
        return Probe(name, False, tried.detail, f"needs a kernel built with {_OPTIONS[name]}")
    return Probe(name, False, tried.detail, _FIX_CONTAINER if machine_facts().filtered else _FIX_APPARMOR)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What decides whether a user namespace can be made. None where the kernel has no such switch."""

    unprivileged_clone: int | None
    """Debian's and Ubuntu's kernel.unprivileged_userns_clone."""

    apparmor_restricts: int | None
    """Ubuntu's kernel.apparmor_restrict_unprivileged_userns."""

    max_user_namespaces: int | None
    filtered: bool
    """This process already has a seccomp filter, as in a container."""

    root: bool


def machine_facts() -> MachineFacts:
    """Read the switches from /proc."""
    return MachineFacts(
        unprivileged_clone=_switch("kernel/unprivileged_userns_clone"),
        apparmor_restricts=_switch("kernel/apparmor_restrict_unprivileged_userns"),
        max_user_namespaces=_switch("user/max_user_namespaces"),
        filtered="\nSeccomp:\t2\n" in _text("/proc/self/status"),
        root=os.geteuid() == 0,
    )


_FIX_CONTAINER = (
    'a container\'s seccomp profile denies it: use Policy(profile="container"), or start the container with the flags '
    "for the profile full in docs/containers.md"
)
_FIX_APPARMOR = (
    "AppArmor restricts unprivileged user namespaces: `sudo toolcell doctor --fix` writes a profile that grants them to"
    " this interpreter; or run as root"
)


def user_namespace_fix(tried: ChildProbe, facts: MachineFacts) -> str:
    """Return the most likely remedy, given how the attempt failed."""
    if facts.max_user_namespaces == 0 or tried.code == errno.ENOSPC:
        return "`sysctl user.max_user_namespaces=15000`; or the limit of nested namespaces is reached"
    if tried.code == errno.EINVAL:
        return "needs a kernel built with CONFIG_USER_NS=y"
    if facts.filtered:
        return _FIX_CONTAINER
    if facts.unprivileged_clone == 0 and not facts.root:
        return "`sysctl kernel.unprivileged_userns_clone=1`, or run as root"
    if facts.apparmor_restricts == 1 and not facts.root:
        return _FIX_APPARMOR
    return "a security module or a chroot denies it: run outside the chroot, or see the kernel log"


GVISOR_HAS_NOT = (
    "gVisor is the kernel here, which has neither Landlock nor the mounts that keep files from a script: run this "
    'program outside gVisor, and its scripts inside, with DockerBackend(runtime="runsc")'
)


def is_under_gvisor() -> bool:
    """Whether gVisor is this process's kernel.

    Source: pkg/sentry/syscalls/linux/linux64.go, which gives a constant for its version.
    """
    return os.uname()[2:4] == ("4.4.0", "#1 SMP Sun Jan 10 15:06:54 PST 2016")


def _switch(name: str) -> int | None:
    text = _text(f"/proc/sys/{name}").strip()
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _try_user() -> str:
    """Enter, map our own id, and use a capability: AppArmor allows the first two and refuses the third."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{file}").write_text(text)
    unshare(CLONE_NEWUTS)
    return "entered and mapped"


def _try_pid() -> str:
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    inner = attempt(lambda: str(os.getpid()))
    if inner.detail != "1":
        raise OSError(errno.EIO, f"first process has pid {inner.detail}")
    return "first process is pid 1"


def _try_mount() -> str:
    """Do what the backend does: private mounts, a tmpfs, and a root of our own."""
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    staging = next(path for path in _STAGING if os.path.isdir(path))
    mount("tmpfs", staging, "tmpfs", 0, "size=64k,mode=755")
    os.chdir(staging)
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    if os.listdir("/"):
        raise OSError(errno.EIO, "the old root is still there after pivot_root")
    return "own root by pivot_root"


def _try_net() -> str:
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    interfaces = [line.partition(":")[0].strip() for line in _text("/proc/self/net/dev").splitlines()[2:]]
    if any(name != "lo" for name in interfaces):
        raise OSError(errno.EIO, f"interfaces still there: {interfaces}")
    return "no interface but lo, which is down"


def _try_uts() -> str:
    before = _enter(CLONE_NEWUTS, "uts")
    sethostname("toolcell")
    if os.uname().nodename != "toolcell":
        raise OSError(errno.EIO, "the host name did not change")
    return before


def _enter(flag: int, kind: str) -> str:
    link = f"/proc/self/ns/{kind}"
    before = os.stat(link).st_ino
    unshare(CLONE_NEWUSER | flag)
    if os.stat(link).st_ino == before:
        raise OSError(errno.EIO, "unshare succeeded and changed nothing")
    return "entered"


_NAMESPACES: dict[str, Callable[[], str]] = {
    "pid": _try_pid,
    "mount": _try_mount,
    "net": _try_net,
    "ipc": partial(_enter, CLONE_NEWIPC, "ipc"),
    "uts": _try_uts,
    "cgroup_ns": partial(_enter, CLONE_NEWCGROUP, "cgroup"),
}
_OPTIONS = {
    "pid": "CONFIG_PID_NS=y",
    "mount": "CONFIG_NAMESPACES=y, and a root that pivot_root can leave (not an initramfs)",
    "net": "CONFIG_NET_NS=y",
    "ipc": "CONFIG_IPC_NS=y",
    "uts": "CONFIG_UTS_NS=y",
    "cgroup_ns": "CONFIG_CGROUPS=y",
}


def probe_landlock() -> Probe:
    """Restrict a child to nothing and check that opening a directory then fails."""
    try:
        abi = landlock.supported_abi()
    except OSError as error:
        return Probe("landlock", False, str(error), _LANDLOCK_FIXES.get(error.errno or 0, "needs Linux 5.13 or newer"))
    return _probe("landlock", lambda: _try_landlock(abi), "report this: the ABI is there but does not restrict")


_LANDLOCK_FIXES = {
    errno.ENOSYS: "needs Linux 5.13 or newer built with CONFIG_SECURITY_LANDLOCK=y",
    errno.EOPNOTSUPP: "boot with landlock in the lsm= list, e.g. lsm=landlock,lockdown,yama,integrity,apparmor",
    errno.EPERM: "a container's seccomp profile denies landlock_*: update the runtime or allow the three calls",
}


def _try_landlock(abi: int) -> str:
    capabilities.set_no_new_privileges()
    landlock.restrict_self(landlock.create_ruleset(abi), abi)
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
    except PermissionError:
        kernel = landlock.abi_version()
        return f"ABI {abi}" if kernel == abi else f"ABI {abi} of the kernel's {kernel}"
    raise OSError(errno.EIO, "restricted to nothing, and / still opens")


def _try_seccomp() -> str:
    """Install the guest's filter and check that it refuses a call."""
    program = seccomp.guest_program()
    kill = ctypes.c_uint32(seccomp.ACTIONS[SeccompAction.KILL])
    syscall("seccomp", _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(kill))
    capabilities.set_no_new_privileges()
    seccomp.install(program)
    try:
        syscall("unshare", 0)
    except PermissionError:
        return f"filter of {program.instructions} instructions"
    raise OSError(errno.EIO, "the filter is installed, and unshare still answers")


def _try_capabilities() -> str:
    """Drop everything. A process without CAP_SETPCAP enters a user namespace first, or keeps a bounding set."""
    try:
        if not capabilities.held_capabilities() >> capabilities.CAP_SETPCAP & 1:
            unshare(CLONE_NEWUSER)
    except OSError:  # none may be made: EPERM, or ENOSPC where their number is limited to 0
        capabilities.set_no_new_privileges()
        capabilities.drop_held()
        return "none held; the bounding set stays, and is of no use with no_new_privs"
    capabilities.drop_all()
    return f"0 to {capabilities.last_capability()} dropped, securebits locked"


def _try_no_new_privileges() -> str:
    capabilities.set_no_new_privileges()
    return "set and read back"


def _try_rlimits() -> str:
    import resource

    plan = RlimitPlan(
        cpu_s=60, address_space_bytes=1 << 32, processes=64, open_files=64, file_size_bytes=1 << 20, stack_bytes=1 << 20
    )
    rlimits.apply(plan)
    for name, value in plan.rows():
        soft, hard = resource.getrlimit(getattr(resource, name))
        if soft != hard or not 0 <= soft <= value:
            raise OSError(f"{name} reads back as {soft}/{hard} after setting {value}")
    return f"{len(plan.rows())} limits, soft equal to hard"


def _probe_cgroup() -> Probe:
    manager = cgroup_manager.discover()
    if isinstance(manager, NoLocation):
        return Probe("cgroup", False, manager.reason, manager.fix)
    try:
        return _probe("cgroup", lambda: _join_cgroup(manager), "the directory can be made but not entered")
    finally:
        manager.close()


def _join_cgroup(manager: CgroupManager) -> str:
    """Make a cgroup, enter it, and check that it lists this process."""
    cgroup = manager.create("probe", memory_bytes=64 * 1024 * 1024, processes=4)
    for entry in cgroup.entries:
        Path(entry).write_text("0", encoding="ascii")
    if cgroup.pids() != {os.getpid()}:
        raise OSError(errno.EIO, "joined a cgroup that does not list us")
    return manager.description
