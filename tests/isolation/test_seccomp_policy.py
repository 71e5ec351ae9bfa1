"""The policy as data: one decision for each call, and the decisions that the security requirements name."""

from __future__ import annotations

import pytest

from rows import each_row
from toolcell_bridge.isolation.seccomp_policy import (
    ALLOWED,
    EPOLL,
    GUEST_POLICY,
    MISSING,
    PACKAGES_POLICY,
    PROGRAMS_POLICY,
    REFUSED,
    RULES,
    SKIPPED,
    SeccompAction,
    SeccompPolicy,
)
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS

pytestmark = pytest.mark.quick

MACHINES = sorted(SYSCALL_NUMBERS)
EVERY_CALL = frozenset().union(*SYSCALL_NUMBERS.values())
ROWS = [call for group in (*ALLOWED, EPOLL, *REFUSED, *MISSING, *SKIPPED) for call in group.calls] + [
    rule.call for rule in RULES
]

NEVER = [
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "userfaultfd",
    "bpf",
    "perf_event_open",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "kcmp",
    "pidfd_getfd",
    "pidfd_open",
    "pidfd_send_signal",
    "keyctl",
    "add_key",
    "request_key",
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "memfd_create",
    "memfd_secret",
    "execve",
    "execveat",
    "open_by_handle_at",
    "name_to_handle_at",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "reboot",
    "swapon",
    "swapoff",
    "acct",
    "quotactl",
    "syslog",
    "personality",
    "modify_ldt",
    "vmsplice",
    "fanotify_init",
    "fanotify_mark",
    "inotify_init1",
    "inotify_add_watch",
    "lookup_dcookie",
    "sched_setscheduler",
    "sched_setattr",
    "sched_setparam",
    "sched_setaffinity",
    "setpriority",
    "socket",
    "connect",
    "bind",
    "listen",
    "accept",
    "accept4",
    "setuid",
    "setgid",
    "setresuid",
    "setresgid",
    "setgroups",
    "seccomp",
    "capset",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "setrlimit",
    "splice",
    "sendmsg",
    "sendmmsg",
    "epoll_create1",
    "epoll_ctl",
]


def numbered(machine: str, call: str) -> int | None:
    return SYSCALL_NUMBERS[machine].get(call)


def test_every_call_of_both_tables_is_decided_exactly_once() -> None:
    assert sorted(ROWS) == sorted(EVERY_CALL)


@each_row("machine", MACHINES)
@each_row("call", NEVER)
def test_a_call_that_reaches_past_the_sandbox_is_refused_whatever_its_arguments(machine: str, call: str) -> None:
    number = numbered(machine, call)
    if number is None:
        assert machine == "aarch64"  # its table has no legacy calls
        return
    assert {GUEST_POLICY.decide(machine, number, [fill] * 6) for fill in (0, 1, 2**64 - 1)} == {SeccompAction.EPERM}


@each_row("machine", MACHINES)
def test_clone3_looks_absent_because_its_flags_cannot_be_seen(machine: str) -> None:
    assert GUEST_POLICY.decide(machine, numbered(machine, "clone3") or -1, [0] * 6) is SeccompAction.ENOSYS


@each_row("machine", MACHINES)
@each_row("number", [334 + 60, 472, 600, 10_000, 0x40000000, 0x40000000 | 39, 0xFFFFFFFF])
def test_a_number_newer_than_the_table_looks_absent(machine: str, number: int) -> None:
    assert GUEST_POLICY.decide(machine, number, [0] * 6) is SeccompAction.ENOSYS


CLONE_THREAD = 0x3D0F00  # what glibc passes for pthread_create
SIGCHLD = 17

ARGUMENTS = [
    ("clone", [CLONE_THREAD], True),
    ("clone", [SIGCHLD], True),
    ("rt_sigaction", [SIGCHLD], False),
    ("rt_sigaction", [SIGCHLD | 1 << 32], False),
    ("rt_sigaction", [15], True),
    *(("clone", [SIGCHLD | flag], False) for flag in (1 << 7, 1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29)),
    ("clone", [SIGCHLD | 1 << 30], False),
    ("socketpair", [1, 1], True),
    ("socketpair", [1, 0o2004001], True),
    ("socketpair", [1, 5], True),
    ("socketpair", [1, 2], False),  # datagram: could be sent to any named socket
    ("socketpair", [2, 1], False),
    ("socketpair", [16, 1], False),
    ("sendto", [3, 4096, 1, 0, 0], True),
    ("sendto", [3, 4096, 1, 0, 4096], False),
    ("sendto", [3, 4096, 1, 0, 1 << 32], False),
    ("ioctl", [0, 0x5421], True),
    ("ioctl", [0, 0x5412], False),  # TIOCSTI types into the terminal
    ("ioctl", [0, 1 << 32 | 0x5412], False),  # CVE-2019-10063
    ("ioctl", [0, 0x541C], False),  # TIOCLINUX
    ("ioctl", [0, 1 << 32 | 0x5421], True),  # the kernel sees FIONBIO too
    ("fcntl", [3, 3], True),  # F_GETFL
    ("fcntl", [3, 5], False),  # F_GETLK
    ("fcntl", [3, 6], False),  # F_SETLK
    ("fcntl", [3, 1024], False),  # F_SETLEASE
    ("fcntl", [3, 1026], False),  # F_NOTIFY
    ("prctl", [15], True),
    ("prctl", [4], False),  # PR_SET_DUMPABLE
    ("prctl", [22], False),  # PR_SET_SECCOMP
    ("prctl", [1], False),  # PR_SET_PDEATHSIG
    ("prlimit64", [0, 7, 0, 4096], True),
    ("prlimit64", [0, 7, 4096, 0], False),
    ("prlimit64", [0, 7, 1 << 40, 0], False),
    ("mknodat", [0, 0, 0o010600], True),
    ("mknodat", [0, 0, 0o100600], True),
    ("mknodat", [0, 0, 0o020600], False),
    ("mknodat", [0, 0, 0o060600], False),
    ("renameat2", [0, 0, 0, 0, 1], True),
    ("renameat2", [0, 0, 0, 0, 2], True),
    ("renameat2", [0, 0, 0, 0, 4], False),  # RENAME_WHITEOUT
    ("renameat2", [0, 0, 0, 0, 1 << 32 | 5], False),
    ("getsockopt", [3, 1, 3], True),
    ("getsockopt", [3, 1, 77], False),  # SO_PEERPIDFD
    ("setsockopt", [3, 1, 7], True),
    ("setsockopt", [3, 1, 26], False),  # SO_ATTACH_FILTER
    ("setsockopt", [3, 6, 1], False),
]


@each_row("machine", MACHINES)
@each_row(("call", "arguments", "allowed"), ARGUMENTS)
def test_arguments_decide_between_what_python_needs_and_what_reaches_out(
    machine: str, call: str, arguments: list[int], allowed: bool
) -> None:
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    assert (GUEST_POLICY.decide(machine, SYSCALL_NUMBERS[machine][call], padded) is SeccompAction.ALLOW) == allowed


@each_row("machine", MACHINES)
def test_packages_add_epoll_and_nothing_else(machine: str) -> None:
    for call, number in SYSCALL_NUMBERS[machine].items():
        for fill in (0, 1, 2**64 - 1):
            answers = [policy.decide(machine, number, [fill] * 6) for policy in (GUEST_POLICY, PACKAGES_POLICY)]
            different = [SeccompAction.EPERM, SeccompAction.ALLOW]
            assert answers == different if call in EPOLL.calls else answers[0] is answers[1], call


@each_row("machine", MACHINES)
@each_row("call", ["fsync", "fdatasync", "fadvise64", "flock"])
def test_what_would_wait_for_a_disk_of_the_host_is_answered_and_not_made(machine: str, call: str) -> None:
    assert GUEST_POLICY.decide(machine, SYSCALL_NUMBERS[machine][call], [0] * 6) is SeccompAction.SKIP


@each_row("machine", MACHINES)
@each_row("command", [6, 7, 37, 38, 1 << 32 | 6])
def test_record_locks_are_answered_and_not_made(machine: str, command: int) -> None:
    assert (
        GUEST_POLICY.decide(machine, SYSCALL_NUMBERS[machine]["fcntl"], [3, command, 0, 0, 0, 0]) is SeccompAction.SKIP
    )


def test_every_row_says_why() -> None:
    assert all(len(row.reason) > 3 for row in (*ALLOWED, EPOLL, *REFUSED, *MISSING, *SKIPPED, *RULES))


def decided(policy: SeccompPolicy, machine: str, call: str) -> list[SeccompAction]:
    return [policy.decide(machine, SYSCALL_NUMBERS[machine][call], [fill] * 6) for fill in (0, 1, 2**64 - 1)]


@each_row("machine", MACHINES)
def test_a_guest_that_may_execute_programs_gets_execve_and_what_a_program_needs_to_start(machine: str) -> None:
    for call in SYSCALL_NUMBERS[machine]:
        if decided(PROGRAMS_POLICY, machine, call) != decided(PACKAGES_POLICY, machine, call):
            assert call in {"execve", "rt_sigaction", "setxattr", "lsetxattr", "fsetxattr", "arch_prctl"}, call
    assert decided(PROGRAMS_POLICY, machine, "execve") == [SeccompAction.ALLOW] * 3
    assert decided(PROGRAMS_POLICY, machine, "setxattr") == [SeccompAction.ENOSYS] * 3


@each_row("machine", MACHINES)
@each_row("call", [call for call in NEVER if call not in ("execve", *EPOLL.calls)])
def test_a_guest_that_may_execute_programs_is_refused_what_every_guest_is(machine: str, call: str) -> None:
    if call in SYSCALL_NUMBERS[machine]:
        assert set(decided(PROGRAMS_POLICY, machine, call)) == {SeccompAction.EPERM}
