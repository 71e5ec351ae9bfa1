"""Landlock: which files this process may touch, whatever its mount namespace shows, and no TCP at all.

Never alone: stat, chdir, chmod and utime are not Landlock's, nor is UDP before ABI 10; the mount and network
namespaces and seccomp carry those. Everything the running kernel's ABI can restrict is restricted: there is no
"best effort" here.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from dataclasses import dataclass

from toolcell_bridge.isolation import Probe
from toolcell_bridge.isolation.capabilities import set_no_new_privileges
from toolcell_bridge.isolation.child_probe import attempt
from toolcell_bridge.isolation.syscalls import syscall

FLOOR_ABI = 1
"""Below it there is no Landlock. Mount and network namespaces carry what the low ABIs do not know."""

NEWEST_ABI = 10
"""What the tables below describe. A newer kernel is asked for this much, and its detail says so."""

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
RESOLVE_UNIX = 1 << 16

READ = READ_FILE | READ_DIR
READ_EXEC = READ | EXECUTE
READ_WRITE = (
    READ | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM
)
"""No EXECUTE, no device nodes, no sockets, no device ioctls."""

_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV | RESOLVE_UNIX
"""The kernel refuses a rule on a file that holds directory rights."""

# Source: include/uapi/linux/landlock.h. First ABI that knows the right -> the rights it added.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV, 9: RESOLVE_UNIX}
_NET_RIGHTS = {4: 0b0011, 10: 0b1100}  # bind and connect TCP; bind, connect and send UDP
_SCOPES = {6: 0b11}  # abstract unix sockets, signals

_RULESET_ATTRIBUTE = struct.Struct("=QQQ")
_PATH_ATTRIBUTE = struct.Struct("=Qi")
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_LOG_SAME_EXEC_OFF = 1
_LOG_FLAGS_SINCE = 7


@dataclass(frozen=True, slots=True)
class RulesetPlan:
    """What stays open. Everything else is closed, network and scopes included."""

    read: tuple[str, ...] = ()
    read_exec: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ()
    abi: int = FLOOR_ABI

    def rows(self) -> tuple[tuple[str, int], ...]:
        """The table: path, rights beneath it."""
        return (
            *((path, READ) for path in self.read),
            *((path, READ_EXEC) for path in self.read_exec),
            *((path, READ_WRITE) for path in self.read_write),
        )


@dataclass(frozen=True, slots=True)
class Handled:
    """Every right a ruleset governs; what is governed and not granted is refused."""

    fs: int
    net: int
    scopes: int

    def attribute(self) -> bytes:
        """Struct landlock_ruleset_attr. Older kernels take longer structs whose tail is zero."""
        return _RULESET_ATTRIBUTE.pack(self.fs, self.net, self.scopes)


@functools.cache
def handled(abi: int) -> Handled:
    """Everything ABI version `abi` can restrict."""

    def known(table: dict[int, int]) -> int:
        return sum(rights for since, rights in table.items() if since <= abi)

    return Handled(known(_FS_RIGHTS), known(_NET_RIGHTS), known(_SCOPES))


def abi_version() -> int:
    """Return the kernel's Landlock ABI.

    Raises:
        OSError: ENOSYS (kernel too old or built without), EOPNOTSUPP (not enabled at boot), or EPERM (a seccomp
            profile around us).
    """
    return syscall("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)


def supported_abi() -> int:
    """Return the ABI to plan with: the kernel's, capped at what the tables know.

    Raises:
        OSError: no Landlock, or below `FLOOR_ABI`.
    """
    version = abi_version()
    if version < FLOOR_ABI:
        raise OSError(errno.EOPNOTSUPP, f"landlock ABI {version} is below {FLOOR_ABI}")
    return min(version, NEWEST_ABI)


def prepare(plan: RulesetPlan) -> int:
    """Build the ruleset of `plan` and return its descriptor, which is close-on-exec.

    A rule is tied to the inode found now, so a directory on a fresh mount needs its rule added afterwards
    (`add_rule`). A path that does not exist is an error: a plan is exact or it is wrong.
    """
    ruleset = create_ruleset(plan.abi)
    try:
        for path, rights in plan.rows():
            add_path(ruleset, path, rights, plan.abi)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def create_ruleset(abi: int) -> int:
    """Create an empty ruleset that governs all ABI `abi` knows, and return its descriptor."""
    attribute = handled(abi).attribute()
    return syscall("landlock_create_ruleset", attribute, len(attribute), 0)


def add_path(ruleset: int, path: str, rights: int, abi: int) -> None:
    """Grant `rights` beneath `path`: one open, one rule, one close."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        add_rule(ruleset, fd, rights, abi)
    finally:
        os.close(fd)


def add_rule(ruleset: int, fd: int, rights: int, abi: int) -> None:
    """Grant `rights` beneath the inode `fd` is open on. O_PATH is enough, and may be opened once and reused."""
    granted = rights & handled(abi).fs
    try:
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, _PATH_ATTRIBUTE.pack(granted, fd), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Not a directory: the kernel then wants file rights only.
        attribute = _PATH_ATTRIBUTE.pack(granted & _FILE_RIGHTS, fd)
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, attribute, 0)


def restrict_self(ruleset: int, abi: int = FLOOR_ABI) -> None:
    """Put this thread and its descendants under `ruleset`, for good. The descriptor stays open.

    Needs no_new_privs. Only the calling thread is bound, so call it while single-threaded. From ABI 7 on refusals
    are kept out of the audit log: a guest that is refused in a loop must not fill the host's disk.
    """
    syscall("landlock_restrict_self", ruleset, _LOG_SAME_EXEC_OFF if abi >= _LOG_FLAGS_SINCE else 0)


def restrict(plan: RulesetPlan) -> None:
    """Build the ruleset of `plan` and put this thread under it: three system calls, and three more per path."""
    ruleset = prepare(plan)
    try:
        restrict_self(ruleset, plan.abi)
    finally:
        os.close(ruleset)


def probe() -> Probe:
    """Restrict a forked child to nothing and see that opening a directory then fails."""
    try:
        version = supported_abi()
    except OSError as error:
        return Probe("landlock", False, str(error), _FIXES.get(error.errno or 0, "needs Linux 5.13 or newer"))
    trial = attempt(lambda: _restrict_and_look(version))
    return Probe(
        "landlock", trial.ok, trial.detail, "" if trial.ok else "report this: the ABI was there but did not bind"
    )


_FIXES = {
    errno.ENOSYS: "needs Linux 5.13 or newer built with CONFIG_SECURITY_LANDLOCK=y",
    errno.EOPNOTSUPP: "boot with landlock in the lsm= list, e.g. lsm=landlock,lockdown,yama,integrity,apparmor",
    errno.EPERM: "a container's seccomp profile denies landlock_*: update the runtime or allow the three calls",
}


def _restrict_and_look(abi: int) -> str:
    set_no_new_privileges()
    ruleset = create_ruleset(abi)
    restrict_self(ruleset, abi)
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
    except PermissionError:
        kernel = abi_version()
        return f"ABI {abi}" if kernel == abi else f"ABI {abi} of the kernel's {kernel}"
    raise OSError(errno.EIO, "restricted to nothing, and / still opens")
