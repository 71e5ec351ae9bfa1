"""What a sandbox's container is made with, and which walls a container that exists really has.

`container_config` is a pure function from limits to the body of POST /containers/create; `walls_of` reads back what the
daemon made of it. Both sides of every wall are here to be compared in one look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from toolcell.config import MIB, Layer, Limits, Policy
from toolcell.sandbox.docker.seccomp_profile import MACHINES, container_profile

LABEL_MODE = "io.toolcell.mode"

GUEST_USER = "65534:65534"
SCRATCH = "/sandbox"
SHARED_MEMORY = "/dev/shm"

SHARED_MEMORY_BYTES = MIB
"""Most of it for semaphores and small segments, out of `disk_bytes`: a path below /dev cannot be a link into the
workspace."""

SHARED_MEMORY_INODES = 256

SHARED_MEMORY_SHARE = 8
"""It gets no more than one part in so many of `disk_bytes`."""

GVISOR_TMP = "/tmp"
"""gVisor puts a file system of its own there, without any limit, unless it is told what it is to be."""

GVISOR_TMP_SHARE = 16

OWN_PROCESSES = 2
"""What counts towards a container's ceiling without being the script's: its init, and the guest's parent, which ends
it when the host hangs up (in the forked mode, which forks the guests)."""

GVISOR_PROCESSES = 512
"""What gVisor's own threads may take, and a share for each process of the guest: on the host both are counted."""

GVISOR_PER_PROCESS = 4

START_PROCESSES = 32
"""Ceiling while a container starts: the runtime's threads are counted in it until the guest takes over."""

START_FILES = 64
"""Ceiling of descriptors while a container starts; the guest lowers it to `open_files`."""

STOP_S = 1

MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys",
)  # fmt: skip
"""Docker's own list and a little more: told explicitly, for daemons whose default is shorter. Of /sys all: links and
sizes there tell of the host's disks and cards, and no Landlock keeps anybody from readlink() and stat()."""

READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

CONTAINER_LAYERS: frozenset[Layer] = frozenset(
    {
        "pid", "mount", "net", "ipc", "uts", "landlock", "seccomp", "capabilities", "no_new_privs", "rlimits", "cgroup"
    }
)  # fmt: skip
"""What a container must have unless the policy says otherwise: a daemon seldom gives a user namespace, and whether it
gives a cgroup namespace depends on the kernel's cgroup version."""

NOT_UNDER_GVISOR: frozenset[Layer] = frozenset({"landlock"})
"""Its kernel has none; it is itself the wall between a guest's file names and the host's."""

Mode = Literal["single", "forked"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What containers of one backend have in common."""

    image: str
    mode: Mode = "single"
    runtime: str | None = None
    """As the daemon names it, e.g. "runsc"; None is the daemon's default."""
    cpus: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the interpreter before the guest takes over, e.g. PYTHONHASHSEED."""

    @property
    def is_gvisor(self) -> bool:
        """The container has a kernel of its own."""
        return is_gvisor(self.runtime)


def is_gvisor(runtime: str | None) -> bool:
    """A runtime by that name is gVisor's."""
    return runtime is not None and "runsc" in runtime


def required_layers(policy: Policy, runtime: str | None) -> frozenset[str]:
    """The layers without which nothing runs: the caller's choice where he made one."""
    if "require" in policy.model_fields_set:
        return frozenset(policy.require)
    return CONTAINER_LAYERS - (NOT_UNDER_GVISOR if is_gvisor(runtime) else frozenset())


@cache
def seccomp_text() -> str:
    """Our profile as the daemon takes it."""
    return json.dumps(container_profile(MACHINES), separators=(",", ":"))


def container_config(blueprint: Blueprint, limits: Limits, *, command: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole of what a container is created with."""
    return {
        "Image": blueprint.image,
        "Cmd": list(command or (blueprint.mode,)),
        "User": GUEST_USER,
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{name}={value}" for name, value in blueprint.environment.items()],
        "Labels": dict(blueprint.labels),
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        # When the attached host goes away the guest's stdin ends, and with it the guest.
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
        "NanoCpus": int(blueprint.cpus * 1e9),
        "Ulimits": ulimits(limits),
        **resources(blueprint, limits, starting=True),
    }
    if blueprint.runtime is not None:
        config["Runtime"] = blueprint.runtime
    return config


def _shared_memory_bytes(limits: Limits) -> int:
    return min(SHARED_MEMORY_BYTES, limits.disk_bytes // SHARED_MEMORY_SHARE)


def _tmpfs(blueprint: Blueprint, limits: Limits) -> dict[str, str]:
    """Every place that can be written to: together no larger than `disk_bytes`."""
    owner = "mode=700,uid={},gid={}".format(*GUEST_USER.split(":"))
    shared = _shared_memory_bytes(limits)
    places = {SCRATCH: (limits.disk_bytes - shared, limits.inodes), SHARED_MEMORY: (shared, SHARED_MEMORY_INODES)}
    if blueprint.is_gvisor:
        rest = limits.disk_bytes - shared
        own = rest // GVISOR_TMP_SHARE
        places |= {SCRATCH: (rest - own, limits.inodes), GVISOR_TMP: (own, limits.inodes)}
    return {
        place: f"rw,noexec,nosuid,nodev,size={size},nr_inodes={inodes},{owner}"
        for place, (size, inodes) in places.items()
    }


def ulimits(limits: Limits) -> list[dict[str, Any]]:
    """Per-process ceilings from the first process on; the guest lowers its own further."""
    rows = {"core": 0, "nofile": max(limits.open_files, START_FILES), "memlock": 0, "msgqueue": 0}
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in rows.items()]


def resources(blueprint: Blueprint, limits: Limits, *, starting: bool = False) -> dict[str, int]:
    """The ceilings that a live container can be given anew."""
    processes = limits.processes + OWN_PROCESSES
    if blueprint.is_gvisor:
        processes = GVISOR_PROCESSES + GVISOR_PER_PROCESS * limits.processes
    return {
        "Memory": limits.memory_bytes,
        # Memory and swap together: equal means no swap.
        "MemorySwap": limits.memory_bytes,
        "PidsLimit": max(processes, START_PROCESSES) if starting else processes,
    }


def walls_of(inspected: Mapping[str, Any]) -> dict[str, str]:
    """The layers that the daemon says this container has, by what it was really made with."""
    host = inspected.get("HostConfig") or {}
    config = inspected.get("Config") or {}
    walls: dict[str, str] = {}
    if host.get("Privileged") or host.get("CapAdd"):
        return walls
    user = str(config.get("User") or "")
    if user and not user.startswith(("0", "root")) and host.get("UsernsMode") not in ("", "host", None):
        walls["user"] = f"user namespace {host.get('UsernsMode')}"
    if host.get("PidMode", "") in ("", "private"):
        walls["pid"] = "own, with an init" if host.get("Init") else "own"
    if host.get("ReadonlyRootfs") and not host.get("Binds") and not host.get("Mounts"):
        walls["mount"] = "read-only image, sized tmpfs"
    if host.get("NetworkMode") == "none":
        walls["net"] = "loopback only"
    if host.get("IpcMode") in ("private", "none"):
        walls["ipc"] = str(host["IpcMode"])
    if host.get("UTSMode", "") in ("", "private"):
        walls["uts"] = "own hostname"
    if host.get("CgroupnsMode") == "private":
        walls["cgroup_ns"] = "own root"
    if host.get("Memory") and host.get("Memory") == host.get("MemorySwap") and (host.get("PidsLimit") or 0) > 0:
        walls["cgroup"] = "the daemon's: memory without swap, processes, cpu"
    return walls
