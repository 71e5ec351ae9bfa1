"""Apply, inside a container, every layer of isolation that a process without privileges can apply to itself.

They come on top of the daemon's isolation. A layer that this kernel lacks (gVisor has no Landlock) is not in the map
that `apply` returns: the host decides whether it is required.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolcell_bridge.isolation import capabilities, landlock, rlimits, seccomp
from toolcell_bridge.isolation.capabilities import last_capability
from toolcell_bridge.isolation.guest_paths import WORKSPACE, WRITABLE
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.seccomp_policy import Argument, Group, SeccompPolicy, SyscallRule
from toolcell_bridge.isolation.syscalls import PR_CAPBSET_READ, close_range, prctl

READ = ("/etc",)
READ_EXEC = ("/usr", "/lib", "/lib64", "/opt", "/packages", "/toolcell")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"

OWN_CGROUP = "/proc/self/cgroup"
CGROUPS = "/sys/fs/cgroup"
MEMORY_AND_PROCESSORS = {
    "": ("memory.max", "memory.high", "cpu.max"),
    "memory": ("memory.limit_in_bytes",),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
}
"""The limits that a library may want to know, by controller; "": all of cgroup v2. duckdb does not start where it sees
such a file, or `OWN_CGROUP`, and may not read it."""

NEEDED_LIMITS = frozenset({"RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_STACK"})
"""Without these the rlimits layer is not live. The container limits the others too, or its kernel (gVisor) does not
have them."""

_HIGHEST_LIMIT = 65_536
"""Most descriptors that a process here may ever have been allowed."""

_CLONE_PARENT = 0x8000

TRUNCATE_SINCE, SCOPES_SINCE = 3, 6
"""First Landlock ABIs that govern truncation, and that keep signals and abstract sockets inside."""

_ABSENT = (errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(slots=True)
class ContainerIsolation:
    """Prepared once, applied in each process that is to run a script."""

    abi: int
    """ABI version of Landlock; 0 where the kernel has none."""

    rows: list[tuple[int, int]]
    """A descriptor for each rule, and the rights beneath it."""

    program: seccomp.Program

    lacks: dict[str, str]
    """Layers that this kernel does not have, and why."""

    signals_kept_by: Literal["landlock", "seccomp", ""]
    """What keeps the signals of a script from all processes but its own. `seccomp`: all stay in the process group of
    the first one, which may signal itself and the group. Empty: nothing does."""

    @classmethod
    def prepare(
        cls, policy: SeccompPolicy, places: Sequence[tuple[str, int]] | None = None, *, is_shared: bool = False
    ) -> ContainerIsolation:
        """Ask this kernel what it has and open the paths of the rules.

        `places`: path and Landlock rights of everything that a script may read; None: the whole image. `is_shared`:
        other processes and files of the same user are there.

        Raises:
            OSError: the container's profile denies Landlock, which the kernel has.
        """
        lacks = dict[str, str]()
        try:
            abi = landlock.supported_abi()
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            abi, lacks["landlock"] = 0, str(error)
        rows: list[tuple[int, int]] = []
        if abi:
            devices = [(path, landlock.READ_FILE | landlock.WRITE_FILE) for path in DEVICES]
            limits = [(path, landlock.READ_FILE) for path in limit_files()]
            wanted = [*(image_places() if places is None else places), *devices, *limits]
            rows = [
                (os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in wanted if os.path.exists(path)
            ]
        policy = contained(policy)
        if is_shared:
            policy = instead_of_landlock(policy, abi)
        kept_by: Literal["landlock", "seccomp", ""] = "seccomp" if is_shared else ""
        return cls(abi, rows, seccomp.guest_program(policy), lacks, "landlock" if abi >= SCOPES_SINCE else kept_by)

    def apply(self, limits: RlimitPlan, writable: Sequence[str], keep: int) -> dict[str, str]:
        """Isolate this process and return the live layers. Closes descriptors from `keep` upwards.

        `writable`: existing directories that the script may write to.

        Raises:
            OSError, ValueError: a layer that this kernel has could not be applied; the caller must exit.
        """
        layers: dict[str, str] = {}
        loose = _lower_limits(limits)
        rlimits.use_processors(rlimits.choose_processors(limits.processors))
        if not NEEDED_LIMITS & set(loose):
            layers["rlimits"] = f"hard limits, but for {', '.join(loose)}" if loose else "hard limits"
        capabilities.set_no_new_privileges()
        layers["no_new_privs"] = "set"
        if (dropped := _drop_capabilities()) is not None:
            layers["capabilities"] = dropped
        capabilities.set_undumpable()
        if self.abi:
            self._restrict(writable)
            layers["landlock"] = f"ABI {self.abi}"
        _close_from(keep)
        seccomp.install(self.program)
        kept = "; signals kept inside" if self.signals_kept_by == "seccomp" else ""
        layers["seccomp"] = f"allowlist, {self.program.instructions} instructions, inside the container's profile{kept}"
        return layers

    def _restrict(self, writable: Sequence[str]) -> None:
        ruleset = landlock.create_ruleset(self.abi)
        try:
            for descriptor, rights in self.rows:
                landlock.add_rule(ruleset, descriptor, rights, self.abi)
            for path in writable:
                landlock.add_path(ruleset, path, landlock.READ_WRITE, self.abi)
            with suppress(OSError):  # it only grants
                landlock.add_path(ruleset, OWN_CGROUP, landlock.READ_FILE, self.abi)
            landlock.restrict_self(ruleset, self.abi)
        finally:
            os.close(ruleset)


def image_places() -> list[tuple[str, int]]:
    """Return what a script in an image of ours may read."""
    runtime = {path for path in (*READ_EXEC, *sys.path, sys.prefix) if os.path.isabs(path)}
    return [
        *((path, landlock.READ) for path in READ),
        *((path, landlock.READ_EXEC) for path in sorted(runtime)),
    ]


def limit_files() -> list[str]:
    """Return the files with the limits of this process's cgroups, and of the topmost ones, where there are any."""
    try:
        with open(OWN_CGROUP, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    found = list[str]()
    for _, controllers, path in rows:
        for controller in controllers.split(","):
            for name in MEMORY_AND_PROCESSORS.get(controller, ()):
                found += {f"{CGROUPS}/{controllers}/{name}", f"{CGROUPS}/{controllers}{path}/{name}"}
    return found


def contained(policy: SeccompPolicy) -> SeccompPolicy:
    """Return a guest's policy without CLONE_PARENT.

    The kernel refuses this flag to an init process, as a guest is in the process backend. In a container the guest's
    parent is ours, and a child given to that parent would outlive the guest.
    """
    rules = tuple(
        replace(rule, arguments=tuple(replace(each, mask=each.mask | _CLONE_PARENT) for each in rule.arguments))
        if rule.call == "clone"
        else rule
        for rule in policy.rules
    )
    return replace(policy, rules=rules)


METADATA = Group(
    "Landlock does not govern modes, owners and times, and files of the host belong to the same user; libraries that "
    "copy files set them, and take a refusal for a failure",
    ("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes",
     "futimesat", "utimensat"),
)  # fmt: skip

_OWNER = 0o700
LISTABLE = (
    SyscallRule("mkdir", "only folders that the watch of files can list", (Argument(1, (_OWNER,), _OWNER),)),
    SyscallRule("mkdirat", "only folders that the watch of files can list", (Argument(2, (_OWNER,), _OWNER),)),
    SyscallRule("umask", "only folders that the watch of files can list", (Argument(0, (0,), _OWNER),)),
)


def beside_other_files(policy: SeccompPolicy) -> SeccompPolicy:
    """Return a guest's policy for a file system that it shares with others of its user."""
    moved = {*METADATA.calls, *(rule.call for rule in LISTABLE)}
    allowed = tuple(
        replace(group, calls=tuple(call for call in group.calls if call not in moved)) for group in policy.allowed
    )
    return replace(policy, allowed=allowed, rules=(*policy.rules, *LISTABLE), skipped=(*policy.skipped, METADATA))


OWN_SIGNALS = (
    SyscallRule(
        "kill",
        "only its first process and the group, which nothing leaves",
        (Argument(0, (0, seccomp.OWN_PROCESS, seccomp.OWN_GROUP)),),
    ),
    SyscallRule("tgkill", "only threads of its first process", (Argument(0, (seccomp.OWN_PROCESS,)),)),
)
OTHER_SIGNALS = Group("a thread's number says nothing about whose it is", ("tkill",))
ONE_GROUP = Group("a process of a sandbox stays in its group; programs do not expect a refusal", ("setsid", "setpgid"))

_ACCESS, _TRUNCATE = 0o3, 0o1000
_UNGOVERNED = (_TRUNCATE, _ACCESS, _ACCESS | _TRUNCATE)
"""Landlock takes the flags of an open for reading and for writing alone: neither cutting a file that is opened for
reading, nor the access mode 3, which the kernel has for drivers, needs a right there."""
OWN_TRUNCATION = (
    SyscallRule(
        "open", "no cutting of what is only read", (Argument(1, _UNGOVERNED, _ACCESS | _TRUNCATE, is_excluded=True),)
    ),
    SyscallRule(
        "openat", "no cutting of what is only read", (Argument(2, _UNGOVERNED, _ACCESS | _TRUNCATE, is_excluded=True),)
    ),
)
TRUNCATION = Group("cuts a file by its path", ("truncate",))
HIDDEN_FLAGS = Group("its flags sit behind a pointer; libraries fall back to openat", ("openat2",))


def instead_of_landlock(policy: SeccompPolicy, abi: int) -> SeccompPolicy:
    """Return a guest's policy that refuses what newer ABIs of Landlock do. Sockets and drivers it refuses anyway."""
    rules, refused, skipped, missing = (list[Any]() for _ in range(4))
    if abi < SCOPES_SINCE:
        rules += OWN_SIGNALS
        refused.append(OTHER_SIGNALS)
        skipped.append(ONE_GROUP)
    if abi < TRUNCATE_SINCE:
        rules += OWN_TRUNCATION
        refused.append(TRUNCATION)
        missing.append(HIDDEN_FLAGS)
    moved = {rule.call for rule in rules} | {call for each in (*refused, *skipped, *missing) for call in each.calls}
    return replace(
        policy,
        allowed=tuple(
            replace(group, calls=tuple(call for call in group.calls if call not in moved)) for group in policy.allowed
        ),
        rules=(*policy.rules, *rules),
        refused=(*policy.refused, *refused),
        skipped=(*policy.skipped, *skipped),
        missing=(*policy.missing, *missing),
    )


def make_writable_directories() -> tuple[str, ...]:
    """Make the writable directories on the container's tmpfs and change to the workspace; returns their paths."""
    for path in WRITABLE:
        os.makedirs(path, 0o700, exist_ok=True)
    os.chdir(WORKSPACE)
    shared = (SHARED_MEMORY,) if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK) else ()
    return (*WRITABLE, *shared)


def _lower_limits(limits: RlimitPlan) -> list[str]:
    """Set every row of the plan; returns the names of those that this kernel does not enforce."""
    import resource

    loose = []
    for (name, value), (kind, _) in zip(limits.rows(), rlimits.numbered(limits), strict=True):
        try:
            rlimits.apply_numbered(((kind, value),))
        except (OSError, ValueError):  # gVisor refuses to touch those it does not count
            hard = resource.getrlimit(kind)[1]
            if hard == resource.RLIM_INFINITY or hard > value:
                loose.append(name)
    return loose


def _drop_capabilities() -> str | None:
    """Drop what this process holds and may ever hold; None when it still holds one.

    A process without CAP_SETPCAP keeps its bounding set. With no_new_privs, which is set, that gives it nothing.
    """
    with suppress(PermissionError):
        capabilities.drop_bounding()
    capabilities.drop_held()
    if capabilities.held_capabilities():
        return None
    bounding = [number for number in range(last_capability() + 1) if prctl(PR_CAPBSET_READ, number)]
    return "none, bounding set kept and of no use" if bounding else "none, bounding set empty"


def _close_from(first: int) -> None:
    try:
        close_range(first)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        os.closerange(first, _HIGHEST_LIMIT)
