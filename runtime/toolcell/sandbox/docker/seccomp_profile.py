"""Turn the guest's system call policy into a seccomp profile that Docker and Podman load.

A container starts with more rights than a guest: its runtime, its init and the interpreter come first, and then the
guest applies its own, narrower filter. The calls that those need are the one group that the profile has beyond the
policy, beside those of processes that are not guests; none of them reaches outside the container. Sub-architectures are
left out, so int 0x80 and x32 end the thread that tries them.

Source: moby/profiles seccomp.go and opencontainers/runtime-spec config-linux.md.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from typing import Any

from toolcell_bridge.isolation.seccomp_policy import EPOLL, GUEST_POLICY, Argument, Group, SyscallRule

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
    "processes of a container that are not guests wait for children and with epoll, and pass descriptors; guests with "
    "packages wait with epoll too",
    (*EPOLL.calls, "sendmsg", "rt_sigaction"),
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
    calls = tuple(call for call in group.calls if call not in early)
    return _row(calls, group.reason, "SCMP_ACT_ERRNO", errno.EPERM)


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
