"""Describe a sandbox's container: how it is created, which settings its guest gets, and which layers are live.

`container_config` turns limits into the body of POST /containers/create. `daemon_layers` reads back what the daemon
made of it, and `live_layers` adds the layers that the guest applied itself. All functions are pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

import msgpack

from toolcell.config import MIB, Layer, Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.seccomp_profile import MACHINES, container_profile
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan

LABEL_MODE = "io.toolcell.mode"

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
parent ends the guest when the host hangs up; in a shared container it forks the guests."""

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

Mode = Literal["single", "forked"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What containers of one backend have in common."""

    image: str
    mode: Mode = "single"
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
    """Return whether a runtime of this name is gVisor's."""
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
        "Cmd": [blueprint.mode],
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
    missing = sorted(required - layers.keys())
    if missing:
        raise SandboxUnavailable(
            f"required isolation is not live in the container: {', '.join(missing)}; `toolcell doctor` says why"
        )
    return layers


def rlimits_for(limits: Limits, blueprint: Blueprint | None = None) -> RlimitPlan:
    """Return the per-process limits inside a container, or of one sandbox of a shared container without `blueprint`.

    A container counts the memory of one sandbox. gVisor counts processes per container, so there NPROC refuses.
    """
    has_own_kernel = blueprint is not None and blueprint.is_gvisor
    processes = limits.processes + OWN_PROCESSES if has_own_kernel else SHARED_ID_PROCESSES
    is_alone = blueprint is not None
    executes = blueprint is not None and blueprint.executes
    return plan_rlimits(limits, processes, is_counted=is_alone, executes=executes)


def settings_frame(
    limits: Limits,
    policy: Policy,
    preload: Sequence[str],
    rlimits: RlimitPlan,
    end_marker: bytes = b"",
    **extra: object,
) -> bytes:
    """Return the first frame that a guest in a container reads, in either mode."""
    body: bytes = msgpack.packb(
        {
            "frame_bytes": limits.frame_bytes,
            "environment": (SHELL_ENVIRONMENT if policy.shell else {}) | policy.environment(),
            "executes": policy.shell,
            "rlimits": asdict(rlimits),
            "preload": [*PRELOAD[policy.lint], *preload],
            "lint": policy.lint,
            "end_marker": end_marker,
            **extra,
        }
    )
    return len(body).to_bytes(4, "big") + body
