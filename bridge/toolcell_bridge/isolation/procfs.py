"""What is written into a procfs: id maps, no nested user namespaces, and whom the kernel kills first."""

from __future__ import annotations

import errno
import os

OOM_SCORE = "1000"
"""The highest: like all memory there is. Children inherit it. Who raises it needs no privilege."""


def prefer_in_oom_killer(who: str, proc: int | None = None) -> None:
    """Have process `who`, a folder of a procfs, killed before others where memory is short: guests, and not their host.

    Does nothing where the kernel lets nobody choose.
    """
    try:
        _write(proc, f"{who}/oom_score_adj", OOM_SCORE)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise


def id_map(inside: int, outside: int, count: int = 1) -> str:
    """Return the line that says: `count` ids, `inside` onwards, stand for `outside` onwards in the parent namespace."""
    return f"{inside} {outside} {count}"


def write_maps(proc: int, who: str, uids: str, gids: str, deny_setgroups: bool) -> None:
    """Write the id maps, lines of `id_map`, of process `who` ("self" or a pid) below `proc`, a descriptor of a procfs.

    `deny_setgroups` must be true for a writer without privilege in the parent namespace, and comes first: a
    process that could drop a group could gain what that group is denied (user_namespaces(7)).
    """
    if deny_setgroups:
        _write(proc, f"{who}/setgroups", "deny")
    _write(proc, f"{who}/uid_map", uids)
    _write(proc, f"{who}/gid_map", gids)


def forbid_nested(proc: int) -> None:
    """Set this user namespace's own limit of user namespaces to 0."""
    _write(proc, "sys/user/max_user_namespaces", "0")


def _write(proc: int | None, path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
