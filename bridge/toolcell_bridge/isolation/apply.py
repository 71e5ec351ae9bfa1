"""Apply every layer of isolation to the current process, in the one order that works.

`SandboxIsolation` is prepared once in the zygote and applied in each freshly forked child, before any guest code.
`IsolationPlan` holds everything that may vary; the constants are the policy. If any step fails, the child must exit:
no layer is ever left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from toolcell_bridge.isolation import capabilities, landlock, rlimits, seccomp
from toolcell_bridge.isolation.guest_paths import GROUP, GUEST_ID, IDENTITIES, PASSWD, SCRATCH, WORKSPACE, WRITABLE
from toolcell_bridge.isolation.procfs import forbid_nested, id_map, write_maps
from toolcell_bridge.isolation.seccomp_policy import SeccompPolicy
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
from toolcell_bridge.wire.frozen import frozen

IDENTITY_BYTES = 2 * 4096
IDENTITY_INODES = 3
"""What they add to the room of the tmpfs, so that the limits are the script's."""


@frozen
class IsolationPlan:
    """What differs from sandbox to sandbox, in the form that the system calls take.

    Made before the fork: each page that a child writes to first costs 3 us, so the zygote does what it can.
    """

    outer_id: int
    """Id in the zygote's namespace; distinct per live sandbox where the zygote has a range."""

    scratch: str
    """Mount options of the tmpfs."""

    identities: tuple[tuple[str, bytes], ...]
    """Path and content of the files below `IDENTITIES`."""

    rlimits: rlimits.RlimitRows

    processors: tuple[int, ...]
    """Those that it may use; none: all."""

    ruleset: int
    """Descriptor of a Landlock ruleset without the tmpfs's rules; -1 where the kernel has no Landlock. Building all of
    it in the child cost 0.4 ms."""


class SandboxIsolation:
    """What is the same for all sandboxes of one zygote, prepared once."""

    def __init__(
        self,
        read: Sequence[str],
        read_exec: Sequence[str],
        devices: Sequence[str],
        own_ids: bool,
        policy: SeccompPolicy,
    ) -> None:
        """`own_ids`: the zygote has a range of ids, one for each sandbox.

        Without a range, all sandboxes share an id. Each then needs its own user namespace, so that RLIMIT_NPROC counts
        its processes alone.
        """
        self._own_ids = own_ids
        self.lacks: dict[str, str] = {}
        """Layers that this kernel does not have, and why. Whether they are required is the host's to decide."""
        self._abi = 0
        try:
            self._abi = landlock.supported_abi()
        except OSError as error:
            self.lacks["landlock"] = str(error)
        rows = [
            *((path, landlock.READ) for path in read),
            *((path, landlock.READ_EXEC) for path in read_exec),
            *((path, landlock.READ_FILE | landlock.WRITE_FILE) for path in devices),
        ]
        opened = [(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in rows if self._abi]
        self._rules = landlock.rules(opened, self._abi) if self._abi else ()
        self._program = seccomp.guest_program(policy)
        if own_ids:
            # Inherited by every child, which saves each some forty system calls. Permitted capabilities stay until the
            # child drops them: with the set-uid fix-up locked off, changing ids does not drop them.
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
            **({"landlock": f"ABI {self._abi}"} if self._abi else {}),
            "seccomp": f"allowlist, {self._program.instructions} instructions{policy.note}",
            "capabilities": "none, securebits locked",
            "no_new_privs": "set",
            "rlimits": "hard limits",
        }

    def plan(
        self, outer_id: int, disk_bytes: int, inodes: int, limits: rlimits.RlimitRows, processors: int | None = None
    ) -> IsolationPlan:
        """Prepare everything for one sandbox. The caller calls `release` once it has forked."""
        identities: tuple[tuple[str, bytes], ...] = ()
        if self._own_ids:
            disk_bytes, inodes = disk_bytes + IDENTITY_BYTES, inodes + IDENTITY_INODES
            files = (("passwd", PASSWD), ("group", GROUP))
            identities = tuple((f"{IDENTITIES}/{name}", text.format(outer_id).encode()) for name, text in files)
        scratch = f"size={disk_bytes},nr_inodes={inodes},mode=700,uid={outer_id},gid={outer_id}"
        ruleset = landlock.create_ruleset(self._abi, self._rules) if self._abi else -1
        return IsolationPlan(outer_id, scratch, identities, limits, rlimits.choose_processors(processors), ruleset)

    def release(self, plan: IsolationPlan) -> None:
        """Close what was opened for a plan."""
        if self._abi:
            os.close(plan.ruleset)

    def apply(self, plan: IsolationPlan, proc: int, keep: int) -> None:
        """Isolate this process. Closes descriptors from `keep` upwards. `proc` is one of a procfs that shows it.

        Raises:
            OSError: a layer could not be applied; the caller must exit.
        """
        unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWCGROUP)
        mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, plan.scratch)
        if plan.identities:
            _write_files(IDENTITIES, plan.identities)
        os.setresgid(plan.outer_id, plan.outer_id, plan.outer_id)
        os.setresuid(plan.outer_id, plan.outer_id, plan.outer_id)
        if not self._own_ids:
            _enter_user_namespace(plan.outer_id, proc)
            capabilities.drop_bounding()
        # After the last user namespace: set before, RLIMIT_NPROC counts every process of the id on the machine.
        rlimits.apply_numbered(plan.rlimits)
        rlimits.use_processors(plan.processors)
        for path in WRITABLE:
            os.mkdir(path, 0o700)
        os.chdir(WORKSPACE)
        capabilities.drop_capabilities()
        capabilities.set_no_new_privileges()
        capabilities.set_undumpable()
        if self._abi:
            if plan.identities:
                landlock.add_path(plan.ruleset, IDENTITIES, landlock.READ, self._abi)
            for path in WRITABLE:
                # A rule for each and none for the whole tmpfs: the three can be neither removed nor moved.
                landlock.add_path(plan.ruleset, path, landlock.READ_WRITE, self._abi)
            landlock.restrict_self(plan.ruleset, self._abi)
        close_range(keep)
        seccomp.install(self._program)


def _write_files(folder: str, files: tuple[tuple[str, bytes], ...]) -> None:
    os.mkdir(folder, 0o755)
    for path, content in files:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)


def _enter_user_namespace(outer_id: int, proc: int) -> None:
    """Enter a user namespace that owns none of the other namespaces.

    The zygote's user namespace owns the mount, pid and ipc namespaces. A guest that regained every capability in its
    own user namespace would have none over them.
    """
    unshare(CLONE_NEWUSER)
    # After the change of ids root owns /proc/self, but this process has to write the maps.
    prctl(PR_SET_DUMPABLE, 1)
    ids = id_map(GUEST_ID, outer_id)
    write_maps(proc, "self", ids, ids, deny_setgroups=True)
    forbid_nested(proc)
