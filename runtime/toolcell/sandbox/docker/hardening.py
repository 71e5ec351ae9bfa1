"""Describe a sandbox's container: how it is created, which settings its guest gets, and which layers are live.

`container_config` turns limits into the body of POST /containers/create. `daemon_layers` reads back what the daemon
made of it, and `live_layers` adds the layers that the guest applied itself. All functions are pure.
"""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import msgpack

from toolcell.config import MIB, Layer, Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.seccomp_policy import EPOLL, GUEST_POLICY, Argument, Group, SyscallRule

# Turn the guest's system call policy into a seccomp profile that Docker and Podman load.
#
# A container starts with more rights than a guest: its runtime, its init and the interpreter come first, and then
# the guest applies its own, narrower filter. The calls that those need are the one group that the profile has
# beyond the policy, beside those of processes that are not guests; none of them reaches outside the container. Sub-
# architectures are left out, so int 0x80 and x32 end the thread that tries them.
#
# Source: moby/profiles seccomp.go and opencontainers/runtime-spec config-linux.md.

MACHINES = ("x86_64", "aarch64")

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

_ENOSYS = 38
"""Linux's number, whichever machine generates the profile."""

UNTIL_GUEST = Group(
    "until the guest has its own filter: runc's last steps, init, the dynamic loader, Python, and the isolation",
    (
        "execve",
        "landlock_create_ruleset",
        "landlock_add_rule",
        "landlock_restrict_self",
        "seccomp",
        "capset",
        "setrlimit",
        "prlimit64",
        "setpriority",
        "sched_setaffinity",
    ),
)

BESIDE_GUESTS = Group(
    "processes of a container that are not guests wait for children; guests with packages wait with epoll",
    (*EPOLL.calls, "rt_sigaction"),
)
"""Each guest's own filter decides these for the guest."""

UNTIL_GUEST_RULES = (
    SyscallRule(
        "prctl",
        "no_new_privs, securebits, ambient and bounding sets, dumpable, parent-death signal, subreaper",
        (Argument(0, (1, 4, 24, 28, 36, 38, 47)),),
    ),
    SyscallRule("arch_prctl", "the dynamic loader sets the thread's segment base", (Argument(0, (0x1002,)),)),
    SyscallRule(
        "ioctl", "init puts its child in the foreground of a terminal, if there is one", (Argument(1, (0x5410,)),)
    ),
)


def container_profile(machines: Sequence[str] = MACHINES) -> dict[str, Any]:
    """Return the profile for containers on any of `machines`.

    Raises:
        KeyError: there is no table for a machine.
    """
    early = {*UNTIL_GUEST.calls, *BESIDE_GUESTS.calls}
    free = (*GUEST_POLICY.allowed, UNTIL_GUEST, BESIDE_GUESTS)
    allowed = [_row(group.calls, group.reason, "SCMP_ACT_ALLOW") for group in free]
    rules = [row for rule in (*GUEST_POLICY.rules, *UNTIL_GUEST_RULES) if rule.call not in early for row in _rows(rule)]
    refused = [_refusal(group, early) for group in GUEST_POLICY.refused]
    missing = [_row(group.calls, group.reason, "SCMP_ACT_ERRNO", _ENOSYS) for group in GUEST_POLICY.missing]
    skipped = [_row(group.calls, group.reason, "SCMP_ACT_ERRNO", 0) for group in GUEST_POLICY.skipped]
    return {
        # Also for a call whose argument rules do not match: EPERM, as in the guest's own filter.
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "archMap": [{"architecture": _ARCHITECTURES[machine], "subArchitectures": []} for machine in machines],
        "syscalls": [row for row in (*allowed, *rules, *refused, *missing, *skipped) if row["names"]],
    }


def _refusal(group: Group, early: set[str]) -> dict[str, Any]:
    return _row(tuple(call for call in group.calls if call not in early), group.reason, "SCMP_ACT_ERRNO", errno.EPERM)


def _row(names: Sequence[str], reason: str, action: str, errno_returned: int | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"names": list(names), "action": action, "comment": reason}
    if errno_returned is not None:
        row["errnoRet"] = errno_returned
    return row


def _rows(rule: SyscallRule) -> list[dict[str, Any]]:
    """Return a row per combination of values: libseccomp joins rows of a call with "or", and arguments with "and"."""
    combinations = itertools.product(*(argument.values for argument in rule.arguments))
    allowed = [
        _row((rule.call,), rule.reason, "SCMP_ACT_ALLOW")
        | {"args": [_test(argument, value) for argument, value in zip(rule.arguments, values, strict=True)]}
        for values in combinations
    ]
    if rule.skipped is None:
        return allowed
    return allowed + [
        _row((rule.call,), rule.reason, "SCMP_ACT_ERRNO", 0) | {"args": [_test(rule.skipped, value)]}
        for value in rule.skipped.values
    ]


def _test(argument: Argument, value: int) -> dict[str, Any]:
    return {"index": argument.index, "value": argument.mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


GUEST_USER = "65534:65534"
SCRATCH = "/sandbox"
SHARED_MEMORY = "/dev/shm"

SHARED_MEMORY_BYTES = 64 * MIB
"""Most that /dev/shm gets, out of `disk_bytes`; as much as Docker gives. It is a separate file system because a path
below /dev cannot be a link into the workspace."""

SHARED_MEMORY_INODES = 256

SHARED_MEMORY_SHARE = 4
"""/dev/shm gets this fraction (a quarter) of `disk_bytes`."""

GVISOR_TMP = "/tmp"
"""gVisor mounts a file system without any limit there, unless the container's configuration mounts one."""

GVISOR_TMP_SHARE = 16

OWN_PROCESSES = 2
"""Processes that count towards a container's ceiling and are not the script's: the init, and the guest's parent. The
parent ends the guest when the host hangs up."""

GVISOR_PROCESSES = 512
"""Threads that gVisor itself may use. The host counts them in addition to a number for each process of the guest."""

GVISOR_PER_PROCESS = 4

START_PROCESSES = 32
"""Ceiling of processes while a container starts: the runtime's threads count until the guest takes over."""

START_FILES = 64
"""Ceiling of descriptors while a container starts; the guest lowers it to `open_files`."""

STOP_S = 1

MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys",
)  # fmt: skip
"""Docker's own list and a little more, given explicitly because the default of some daemons is shorter. All of /sys
is masked: links and sizes there describe the host's disks and cards, and Landlock restricts neither readlink() nor
stat()."""

READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

CONTAINER_LAYERS: frozenset[Layer] = frozenset(
    {"pid", "mount", "net", "ipc", "uts", "landlock", "seccomp", "capabilities", "no_new_privs", "rlimits", "cgroup"}
)
"""Layers that a container must have unless the policy says otherwise. A daemon seldom gives a user namespace. Whether
it gives a cgroup namespace depends on the kernel's cgroup version."""

SHELL_ENVIRONMENT = {"PATH": "/usr/bin:/usr/local/bin", "SHELL": "/usr/bin/sh"}
"""Environment of scripts in the image `toolcell/shell`."""

NOT_UNDER_GVISOR: frozenset[Layer] = frozenset({"landlock"})
"""gVisor's kernel has no Landlock; gVisor itself stands between a guest's file names and the host's."""

GUEST_LAYERS = frozenset({"landlock", "seccomp", "capabilities", "no_new_privs", "rlimits"})
"""Layers that only the guest can apply. It names them in its Hello, before any foreign code runs. For every other layer
the daemon's word counts."""

SHARED_ID_PROCESSES = 65_536
"""RLIMIT_NPROC of a guest. The kernel counts a user id over the whole machine, and all containers have the same one,
so this limit must never be the one that refuses. The container's own ceiling refuses."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What containers of one backend have in common."""

    image: str
    runtime: str | None = None
    """The name that the daemon has for it, for example "runsc". None is the daemon's default."""
    cpus: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    executes: bool = False
    """Scripts may execute programs of the image."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the interpreter before the guest takes over, for example PYTHONHASHSEED."""

    @property
    def is_gvisor(self) -> bool:
        """gVisor gives the container a kernel of its own."""
        return is_gvisor(self.runtime)


def is_gvisor(runtime: str | None) -> bool:
    return runtime is not None and "runsc" in runtime


def required_layers(policy: Policy, runtime: str | None) -> frozenset[str]:
    """Return the layers without which no code runs: those of the policy, else the defaults of the runtime."""
    if "require" in policy.model_fields_set:
        return frozenset(policy.require)
    return CONTAINER_LAYERS - (NOT_UNDER_GVISOR if is_gvisor(runtime) else frozenset())


@cache
def seccomp_text() -> str:
    """Return our seccomp profile in the form that the daemon expects."""
    return json.dumps(container_profile(MACHINES), separators=(",", ":"))


def container_config(blueprint: Blueprint, limits: Limits) -> dict[str, Any]:
    """Return the body of POST /containers/create."""
    return {
        "Image": blueprint.image,
        "User": GUEST_USER,
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{name}={value}" for name, value in blueprint.environment.items()],
        "Labels": dict(blueprint.labels),
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        # When the attached host goes away, the guest's stdin ends, and the guest ends with it.
        "StdinOnce": True,
        "Tty": False,
        "NetworkDisabled": True,
        "StopTimeout": STOP_S,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(blueprint, limits),
    }


def _host_config(blueprint: Blueprint, limits: Limits) -> dict[str, Any]:
    config: dict[str, Any] = {
        "AutoRemove": True,
        "Init": True,
        "NetworkMode": "none",
        "IpcMode": "private",
        "ShmSize": _shared_memory_bytes(limits),
        "PidMode": "",
        "UTSMode": "",
        "CgroupnsMode": "private",
        "Privileged": False,
        "PublishAllPorts": False,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={seccomp_text()}"],
        "MaskedPaths": list(MASKED),
        "ReadonlyPaths": list(READ_ONLY),
        "Binds": [],
        "Mounts": [],
        "Devices": [],
        "Tmpfs": _tmpfs(blueprint, limits),
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "OomKillDisable": False,
        "Ulimits": ulimits(limits, blueprint.executes),
        **resources(blueprint, limits, starting=True),
    }
    if blueprint.runtime is not None:
        config["Runtime"] = blueprint.runtime
    return config


def _shared_memory_bytes(limits: Limits) -> int:
    return min(SHARED_MEMORY_BYTES, limits.disk_bytes // SHARED_MEMORY_SHARE)


def _tmpfs(blueprint: Blueprint, limits: Limits) -> dict[str, str]:
    """Return the mounts that can be written to. Together they are no larger than `disk_bytes`."""
    owner = "mode=700,uid={},gid={}".format(*GUEST_USER.split(":"))
    shared = _shared_memory_bytes(limits)
    mounts = {SCRATCH: (limits.disk_bytes - shared, limits.inodes), SHARED_MEMORY: (shared, SHARED_MEMORY_INODES)}
    if blueprint.is_gvisor:
        rest = limits.disk_bytes - shared
        own = rest // GVISOR_TMP_SHARE
        mounts |= {SCRATCH: (rest - own, limits.inodes), GVISOR_TMP: (own, limits.inodes)}
    return {
        path: f"rw,noexec,nosuid,nodev,size={size},nr_inodes={inodes},{owner}"
        for path, (size, inodes) in mounts.items()
    }


def ulimits(limits: Limits, executes: bool = False) -> list[dict[str, Any]]:
    """Return the rlimits of every process of the container. The guest lowers its own further."""
    core = plan_rlimits(limits, 0, is_counted=True, executes=executes).core_bytes
    rows = {"core": core, "nofile": max(limits.open_files, START_FILES), "memlock": 0, "msgqueue": 0}
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in rows.items()]


def resources(blueprint: Blueprint, limits: Limits, *, starting: bool = False) -> dict[str, int]:
    """Return the ceilings that can be changed on a live container."""
    processes = limits.processes + OWN_PROCESSES
    if blueprint.is_gvisor:
        processes = GVISOR_PROCESSES + GVISOR_PER_PROCESS * limits.processes
    return {
        "Memory": limits.memory_bytes,
        # Memory and swap together: equal means no swap.
        "MemorySwap": limits.memory_bytes,
        "PidsLimit": max(processes, START_PROCESSES) if starting else processes,
        "NanoCpus": int(min(blueprint.cpus, limits.cpu_cores or blueprint.cpus) * 1e9),
    }


def daemon_layers(inspected: Mapping[str, Any]) -> dict[str, str]:
    """Return the layers that the daemon gives this container, read from what it was really made with."""
    host = inspected.get("HostConfig") or {}
    config = inspected.get("Config") or {}
    layers: dict[str, str] = {}
    if host.get("Privileged") or host.get("CapAdd"):
        return layers
    user = str(config.get("User") or "")
    if user and not user.startswith(("0", "root")) and host.get("UsernsMode") not in ("", "host", None):
        layers["user"] = f"user namespace {host.get('UsernsMode')}"
    if host.get("PidMode", "") in ("", "private"):
        layers["pid"] = "own, with an init" if host.get("Init") else "own"
    if host.get("ReadonlyRootfs") and not host.get("Binds") and not host.get("Mounts"):
        layers["mount"] = "read-only image, sized tmpfs"
    if host.get("NetworkMode") == "none":
        layers["net"] = "loopback only"
    if host.get("IpcMode") in ("private", "none"):
        layers["ipc"] = str(host["IpcMode"])
    if host.get("UTSMode", "") in ("", "private"):
        layers["uts"] = "own hostname"
    if host.get("CgroupnsMode") == "private":
        layers["cgroup_ns"] = "own root"
    if host.get("Memory") and host.get("Memory") == host.get("MemorySwap") and (host.get("PidsLimit") or 0) > 0:
        layers["cgroup"] = "the daemon's: memory without swap, processes, cpu"
    return layers


def live_layers(
    required: frozenset[str], from_daemon: Mapping[str, str], from_guest: Mapping[str, str]
) -> dict[str, str]:
    """Join the layers of the daemon with those that the guest applied.

    Raises:
        SandboxUnavailable: a required layer is missing.
    """
    layers = {**from_daemon, **{name: detail for name, detail in from_guest.items() if name in GUEST_LAYERS}}
    if missing := sorted(required - layers.keys()):
        raise SandboxUnavailable(
            f"required isolation is not live in the container: {', '.join(missing)}; `toolcell doctor` says why"
        )
    return layers


def rlimits_for(limits: Limits, blueprint: Blueprint) -> RlimitPlan:
    """Return the per-process limits inside a container.

    A container counts the memory of one sandbox. gVisor counts processes per container, so there NPROC refuses.
    """
    processes = limits.processes + OWN_PROCESSES if blueprint.is_gvisor else SHARED_ID_PROCESSES
    return plan_rlimits(limits, processes, is_counted=True, executes=blueprint.executes)


def settings_frame(
    limits: Limits, policy: Policy, preload: Sequence[str], rlimits: RlimitPlan, end_marker: bytes = b""
) -> bytes:
    """Return the first frame that a guest in a container reads."""
    body: bytes = msgpack.packb(
        {
            "frame_bytes": limits.frame_bytes,
            "environment": (SHELL_ENVIRONMENT if policy.shell else {}) | policy.environment(),
            "executes": policy.shell,
            "rlimits": asdict(rlimits),
            "preload": [*PRELOAD[policy.lint], *preload],
            "lint": policy.lint,
            "end_marker": end_marker,
        }
    )
    return len(body).to_bytes(4, "big") + body
