"""Raises, inside a container, every wall that a process without privilege can raise around itself.

The container's own walls are the daemon's; these stand behind them. A layer that this kernel lacks (gVisor has no
Landlock) is left out of the map that `raise_here` returns: the host decides whether it can do without.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolcell_bridge.isolation import capabilities, landlock, rlimits, seccomp
from toolcell_bridge.isolation.apply import PLACES, WORKSPACE
from toolcell_bridge.isolation.capabilities import last_capability
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY, Argument, SeccompPolicy
from toolcell_bridge.isolation.syscall_numbers import native_machine
from toolcell_bridge.isolation.syscalls import PR_CAPBSET_READ, close_range, prctl

READ = ("/etc",)
READ_EXEC = ("/usr", "/lib", "/lib64", "/opt", "/packages", "/toolcell")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"

NEEDED_LIMITS = frozenset({"RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_STACK"})
"""Without these there is no rlimits layer. The others bound what a kernel of its own (gVisor) does not have, or what
the container bounds too."""

_LAST_DESCRIPTOR = 0x7FFF_FFFF
"""Descriptors are ints; gVisor takes nothing beyond for a range's end."""

_HIGHEST_LIMIT = 65_536
"""Most descriptors that a process here may ever have been allowed."""

_CLONE_PARENT = 0x8000

_ABSENT = (errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(slots=True)
class ContainerIsolation:
    """Prepared once; raised in each process that is to run a script."""

    abi: int
    """Of Landlock; 0 where the kernel has none."""

    rows: list[tuple[int, int]]
    """Descriptors opened for rules, and the rights beneath each."""

    program: seccomp.Program

    @classmethod
    def prepare(cls, extra: Sequence[str] = ()) -> ContainerIsolation:
        """Look at this kernel and open what rules will be about. `extra`: further readable directories.

        Raises:
            OSError: Landlock is there and is denied, which is a mistake in the container's profile.
        """
        abi = _landlock_abi()
        rows: list[tuple[int, int]] = []
        if abi:
            runtime = {path for path in (*READ_EXEC, *extra, *sys.path, sys.prefix) if os.path.isabs(path)}
            wanted = [
                *((path, landlock.READ) for path in READ),
                *((path, landlock.READ_EXEC) for path in sorted(runtime)),
                *((path, landlock.READ_FILE | landlock.WRITE_FILE) for path in DEVICES),
            ]
            rows = [
                (os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in wanted if os.path.exists(path)
            ]
        return cls(abi, rows, seccomp.prepare(seccomp.compile_filter(contained_policy(), native_machine())))

    def raise_here(self, limits: RlimitPlan, places: Sequence[str], keep: int) -> dict[str, str]:
        """Shut this process in; returns the layers that are live. Descriptors from `keep` upwards are closed.

        `places`: directories, made beforehand, that may be written to, with what may stand in them.

        Raises:
            OSError, ValueError: a wall that this kernel has did not go up; the caller must exit.
        """
        layers: dict[str, str] = {}
        loose = _lower_limits(limits)
        if not NEEDED_LIMITS & set(loose):
            layers["rlimits"] = f"hard limits, but for {', '.join(loose)}" if loose else "hard limits"
        capabilities.set_no_new_privileges()
        layers["no_new_privs"] = "set"
        if _drop_capabilities():
            layers["capabilities"] = "none, bounding set empty"
        capabilities.set_undumpable()
        if self.abi:
            self._restrict(places)
            layers["landlock"] = f"ABI {self.abi}"
        _close_from(keep)
        seccomp.install(self.program)
        layers["seccomp"] = f"allowlist, {self.program.instructions} instructions, inside the container's profile"
        return layers

    def _restrict(self, places: Sequence[str]) -> None:
        ruleset = landlock.create_ruleset(self.abi)
        try:
            for descriptor, rights in self.rows:
                landlock.add_rule(ruleset, descriptor, rights, self.abi)
            for place in places:
                landlock.add_path(ruleset, place, landlock.READ_WRITE, self.abi)
            landlock.restrict_self(ruleset, self.abi)
        finally:
            os.close(ruleset)


def contained_policy() -> SeccompPolicy:
    """The guest's policy, and no child may be given to the guest's parent.

    The kernel refuses that to an init, which a guest is in a sandbox of its own, and to nobody else; here the parent is
    ours, and such a child would be none that ends with its maker.
    """
    rules = tuple(
        replace(rule, arguments=tuple(_without_parent(each) for each in rule.arguments))
        if rule.call == "clone"
        else rule
        for rule in GUEST_POLICY.rules
    )
    return replace(GUEST_POLICY, rules=rules)


def _without_parent(argument: Argument) -> Argument:
    return replace(argument, mask=argument.mask | _CLONE_PARENT)


def make_places() -> tuple[str, ...]:
    """Make the workspace and its neighbours on the container's tmpfs, and go there; returns what may be written to."""
    for place in PLACES:
        os.makedirs(place, 0o700, exist_ok=True)
    os.chdir(WORKSPACE)
    shared = (SHARED_MEMORY,) if os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK) else ()
    return (*PLACES, *shared)


def _landlock_abi() -> int:
    try:
        return landlock.supported_abi()
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise


def _lower_limits(limits: RlimitPlan) -> list[str]:
    """Set every row of the plan; returns the names of those that this kernel would not hold to it."""
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


def _drop_capabilities() -> bool:
    """Give up what there is; True when nothing is left and nothing can come back."""
    capabilities.drop_held()
    bounding = [number for number in range(last_capability() + 1) if prctl(PR_CAPBSET_READ, number)]
    return not bounding and capabilities.held_capabilities() == 0


def _close_from(first: int) -> None:
    try:
        close_range(first, _LAST_DESCRIPTOR)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        os.closerange(first, _HIGHEST_LIMIT)
