"""Which walls this machine lets us raise: each tried for real, with the reason and the remedy when it fails.

The trying is done by a small clean interpreter, because a host process has threads and most walls cannot be taken
down again. Says nothing of which walls are required.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import toolcell
import toolcell_bridge
from toolcell.sandbox.process import cgroup_manager
from toolcell_bridge.isolation import Probe, capabilities, landlock, rlimits, seccomp
from toolcell_bridge.isolation.child_probe import ChildProbe, attempt
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

_TIMEOUT_S = 20.0
_STAGING = ("/tmp", "/mnt", "/run", "/dev/shm")
_SCRIPT = "import sys; sys.path[:0] = sys.argv[1:]; from toolcell.sandbox.process.probes import main; main()"


def probe_all() -> tuple[Probe, ...]:
    """Try every wall and return one probe per name of `NAMES`, in that order. Blocks for about a tenth of a second."""
    import subprocess  # not needed by the process it starts

    if sys.platform != "linux":
        return _none("the process backend needs Linux", "use the Docker backend")
    homes = {str(Path(path).resolve().parent) for path in (*toolcell.__path__, *toolcell_bridge.__path__)}
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT, *homes]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True)
        return tuple(Probe(**row) for row in json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        return _none(f"the probing process failed: {error} {said.decode(errors='replace')[-500:]}".strip(), "")


def main() -> None:
    """Print every probe as JSON. Runs alone in its interpreter, single-threaded."""
    rows = [dataclasses.asdict(probe) for probe in _probe_here()]
    sys.stdout.write(json.dumps(rows))


def _none(detail: str, fix: str) -> tuple[Probe, ...]:
    return tuple(Probe(name, False, detail, fix) for name in NAMES)


def _probe_here() -> list[Probe]:
    user = attempt(_try_user)
    fix = "" if user.ok else user_namespace_fix(user, machine_facts())
    return [
        Probe("user", user.ok, user.detail, fix),
        *(_namespace(name, action, user, fix) for name, action in _NAMESPACES.items()),
        landlock.probe(),
        seccomp.probe(),
        capabilities.probe_capabilities(),
        capabilities.probe_no_new_privileges(),
        rlimits.probe(),
        cgroup_manager.probe(),
    ]


def _namespace(name: str, action: Callable[[], str], user: ChildProbe, user_fix: str) -> Probe:
    if not user.ok:
        return Probe(name, False, "made inside a user namespace, which cannot be had", user_fix)
    trial = attempt(action)
    if trial.ok:
        return Probe(name, True, trial.detail)
    if trial.code == errno.EINVAL:
        return Probe(name, False, trial.detail, f"needs a kernel built with {_OPTIONS[name]}")
    return Probe(name, False, trial.detail, _FIX_CONTAINER if machine_facts().filtered else _FIX_APPARMOR)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What decides whether a user namespace can be had. None where the kernel has no such switch."""

    unprivileged_clone: int | None
    """Debian's and Ubuntu's kernel.unprivileged_userns_clone."""

    apparmor_restricts: int | None
    """Ubuntu's kernel.apparmor_restrict_unprivileged_userns."""

    max_user_namespaces: int | None
    filtered: bool
    """A seccomp filter is on us already: a container."""

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
    "a container's seccomp profile denies it: run the container with --security-opt seccomp=unconfined and"
    " --security-opt apparmor=unconfined, require fewer layers, or use the Docker backend"
)
_FIX_APPARMOR = (
    "AppArmor restricts unprivileged user namespaces: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, a"
    " profile for this interpreter that grants userns, or run as root"
)


def user_namespace_fix(trial: ChildProbe, facts: MachineFacts) -> str:
    """Say what most likely stands in the way, given how the attempt failed."""
    if facts.max_user_namespaces == 0 or trial.code == errno.ENOSPC:
        return "`sysctl user.max_user_namespaces=15000`; or the limit of nested namespaces is reached"
    if trial.code == errno.EINVAL:
        return "needs a kernel built with CONFIG_USER_NS=y"
    if facts.filtered:
        return _FIX_CONTAINER
    if facts.unprivileged_clone == 0 and not facts.root:
        return "`sysctl kernel.unprivileged_userns_clone=1`, or run as root"
    if facts.apparmor_restricts == 1 and not facts.root:
        return _FIX_APPARMOR
    return "a security module or a chroot denies it: run outside the chroot, or see the kernel log"


def _switch(name: str) -> int | None:
    text = _text(f"/proc/sys/{name}").strip()
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _try_user() -> str:
    """Enter, map our own id, and use a capability: AppArmor lets the first two through and refuses the third."""
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
    """Go as far as the backend does: private mounts, a tmpfs, and a root of our own."""
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


def _try_ipc() -> str:
    return _enter(CLONE_NEWIPC, "ipc")


def _try_uts() -> str:
    before = _enter(CLONE_NEWUTS, "uts")
    sethostname("toolcell")
    if os.uname().nodename != "toolcell":
        raise OSError(errno.EIO, "the host name did not change")
    return before


def _try_cgroup_namespace() -> str:
    return _enter(CLONE_NEWCGROUP, "cgroup")


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
    "ipc": _try_ipc,
    "uts": _try_uts,
    "cgroup_ns": _try_cgroup_namespace,
}
_OPTIONS = {
    "pid": "CONFIG_PID_NS=y",
    "mount": "CONFIG_NAMESPACES=y, and a root that pivot_root can leave (not an initramfs)",
    "net": "CONFIG_NET_NS=y",
    "ipc": "CONFIG_IPC_NS=y",
    "uts": "CONFIG_UTS_NS=y",
    "cgroup_ns": "CONFIG_CGROUPS=y",
}
