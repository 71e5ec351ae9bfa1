"""Landlock: restrict which files this process may touch, whatever its mount namespace shows, and forbid TCP.

Landlock is never the only layer. It does not govern stat, chdir, chmod and utime, nor UDP before ABI 10; the mount
and network namespaces and seccomp do. Everything that the running kernel's ABI can restrict is restricted.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Iterable, Sequence

from toolcell_bridge.isolation.syscalls import syscall
from toolcell_bridge.wire.frozen import frozen

FLOOR_ABI = 1
"""Below it there is no Landlock. Mount and network namespaces restrict what the low ABIs do not know."""

NEWEST_ABI = 10
"""The newest ABI in the tables below. A newer kernel is asked for this one."""

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


@frozen
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


def create_ruleset(abi: int, rules: Sequence[bytes] = ()) -> int:
    """Create a ruleset that governs all ABI `abi` knows, with these `rules`; return its descriptor."""
    attribute = handled(abi).attribute()
    ruleset = syscall("landlock_create_ruleset", attribute, len(attribute), 0)
    try:
        for rule in rules:
            syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def rules(rows: Iterable[tuple[int, int]], abi: int) -> tuple[bytes, ...]:
    """Return rules for any number of rulesets, from descriptors and rights: what the kernel takes in `add_rule`."""
    ruleset = create_ruleset(abi)
    try:
        return tuple(add_rule(ruleset, descriptor, rights, abi) for descriptor, rights in rows)
    finally:
        os.close(ruleset)


def add_path(ruleset: int, path: str, rights: int, abi: int) -> None:
    """Grant `rights` beneath `path`: one open, one rule, one close."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        add_rule(ruleset, fd, rights, abi)
    finally:
        os.close(fd)


def add_rule(ruleset: int, fd: int, rights: int, abi: int) -> bytes:
    """Grant `rights` beneath the inode that `fd` is open on; return the rule as the kernel took it.

    A descriptor opened with O_PATH can be used many times. A rule is tied to this inode: a directory on a fresh mount
    needs its own.
    """
    granted = rights & handled(abi).fs
    attribute = _PATH_ATTRIBUTE.pack(granted, fd)
    try:
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, attribute, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Not a directory: the kernel then wants file rights only.
        attribute = _PATH_ATTRIBUTE.pack(granted & _FILE_RIGHTS, fd)
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, attribute, 0)
    return attribute


def restrict_self(ruleset: int, abi: int = FLOOR_ABI) -> None:
    """Restrict this thread and its descendants by `ruleset`, irrevocably. The descriptor stays open.

    Needs no_new_privs. Only the calling thread is bound, so call it while single-threaded. From ABI 7 on refusals
    are kept out of the audit log: a guest that is refused in a loop must not fill the host's disk.
    """
    syscall("landlock_restrict_self", ruleset, _LOG_SAME_EXEC_OFF if abi >= _LOG_FLAGS_SINCE else 0)
