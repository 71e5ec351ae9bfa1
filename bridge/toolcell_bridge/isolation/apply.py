"""Raises every wall around the current process, in the one order that works, and says which are up.

`AppliedIsolation` is prepared once in the zygote and raised in each freshly forked child, before any guest code.
`IsolationPlan` is the whole of what may vary; the constants are the policy. If any step fails the child must exit:
nothing here degrades by itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from toolcell_bridge.isolation import capabilities, landlock, namespaces, rlimits, seccomp
from toolcell_bridge.isolation.namespaces import IdRange
from toolcell_bridge.isolation.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    PR_SET_DUMPABLE,
    PR_SET_SECUREBITS,
    close_range,
    mount,
    prctl,
    unshare,
)

SCRATCH = "/sandbox"
"""The one tmpfs of a sandbox: one filesystem, so one size limit holds for everything that can be written."""

WORKSPACE = f"{SCRATCH}/work"
PLACES = (WORKSPACE, f"{SCRATCH}/tmp", f"{SCRATCH}/shm")
LINKS = (("/tmp", PLACES[1]), ("/dev/shm", PLACES[2]), ("/work", WORKSPACE))
"""Where programs look for them; links in the read-only root, so that they cost nothing per sandbox."""

GUEST_ID = 1000
"""What the script of an ordinary user's sandbox sees as its uid and gid."""


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """What differs from sandbox to sandbox, in the form the system calls take.

    Made before the fork: each page a child is the first to touch costs it 3 us, so it does no work that can be done
    where the pages are warm.
    """

    outer_id: int
    """Id in the zygote's namespace; distinct per live sandbox where the zygote has a range."""

    scratch: str
    """Mount options of the tmpfs."""

    rlimits: tuple[tuple[int, int], ...]
    """Number in the resource module, value for soft and hard."""

    ruleset: int
    """Descriptor of a Landlock ruleset, complete but for the tmpfs. Building it in the child cost 0.4 ms."""


class AppliedIsolation:
    """Everything about the walls that is the same for all sandboxes of one zygote."""

    def __init__(self, read: Sequence[str], read_exec: Sequence[str], devices: Sequence[str], own_ids: bool) -> None:
        """`own_ids`: the zygote has a range of ids, one for each sandbox.

        Without one, all sandboxes share an id and each needs a user namespace of its own, so that RLIMIT_NPROC counts
        it alone.
        """
        self._own_ids = own_ids
        self._abi = landlock.supported_abi()
        rows = [
            *((path, landlock.READ) for path in read),
            *((path, landlock.READ_EXEC) for path in read_exec),
            *((path, landlock.READ_FILE | landlock.WRITE_FILE) for path in devices),
        ]
        self._rows = [(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in rows]
        self._program = seccomp.guest_program()
        if own_ids:
            # Inherited by every child: it saves each some forty system calls. Permitted capabilities stay until
            # the child drops them; with the set-uid fix-up locked off, that is an explicit step and not a side effect.
            capabilities.drop_bounding()
            prctl(PR_SET_SECUREBITS, capabilities.LOCKED_SECUREBITS)
        self.layers = {
            "user": "own unprivileged id, nested namespaces refused",
            "pid": "own init",
            "mount": "private read-only root, no /proc",
            "net": "empty, loopback down",
            "ipc": "private",
            "uts": "own hostname",
            "cgroup_ns": "own root",
            "landlock": f"ABI {self._abi}",
            "seccomp": f"allowlist, {self._program.instructions} instructions",
            "capabilities": "none, securebits locked",
            "no_new_privs": "set",
            "rlimits": "hard limits",
        }

    def plan(self, outer_id: int, disk_bytes: int, inodes: int, limits: rlimits.RlimitPlan) -> IsolationPlan:
        """Get everything ready for one sandbox; the ruleset is the caller's to close.

        Raises:
            ValueError: a limit is negative, which would mean unlimited.
        """
        scratch = f"size={disk_bytes},nr_inodes={inodes},mode=700,uid={outer_id},gid={outer_id}"
        rows = rlimits.numbered(limits)
        ruleset = landlock.create_ruleset(self._abi)
        for descriptor, rights in self._rows:
            landlock.add_rule(ruleset, descriptor, rights, self._abi)
        return IsolationPlan(outer_id, scratch, rows, ruleset)

    def raise_around(self, plan: IsolationPlan, proc: int, keep: int) -> None:
        """Shut this process in. Descriptors from `keep` upwards are closed; `proc` is one of a procfs that shows it.

        Raises:
            OSError: a wall did not go up; the caller must exit.
        """
        unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWCGROUP)
        mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, plan.scratch)
        os.setresgid(plan.outer_id, plan.outer_id, plan.outer_id)
        os.setresuid(plan.outer_id, plan.outer_id, plan.outer_id)
        if not self._own_ids:
            _enter_user_namespace(plan.outer_id, proc)
            capabilities.drop_bounding()
        # After the last user namespace: set before, RLIMIT_NPROC counts every process of the id on the machine.
        rlimits.apply_numbered(plan.rlimits)
        for place in PLACES:
            os.mkdir(place, 0o700)
        os.chdir(WORKSPACE)
        capabilities.drop_capabilities()
        capabilities.set_no_new_privileges()
        capabilities.set_undumpable()
        for place in PLACES:
            # Beneath each, not beneath all: the three themselves can be neither removed nor moved.
            landlock.add_path(plan.ruleset, place, landlock.READ_WRITE, self._abi)
        landlock.restrict_self(plan.ruleset, self._abi)
        close_range(keep)
        seccomp.install(self._program)


def _enter_user_namespace(outer_id: int, proc: int) -> None:
    """Move into a user namespace that owns none of the others.

    The mounts, the pid and ipc namespaces were made under the zygote's namespace, so even a guest that got back
    every capability of its own namespace would have none over them.
    """
    unshare(CLONE_NEWUSER)
    # The change of ids made /proc/self root's; the maps must be written by us.
    prctl(PR_SET_DUMPABLE, 1)
    ids = IdRange(GUEST_ID, outer_id)
    namespaces.write_maps(proc, "self", ids, ids, deny_setgroups=True)
    namespaces.forbid_nested(proc)
