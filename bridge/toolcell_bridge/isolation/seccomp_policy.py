"""The seccomp policy: which system calls a guest may make, as tables.

There are four answers. Allowed, perhaps only with some arguments. Refused with EPERM: a call that is known and not
wanted; Python raises PermissionError. Answered with success and not made: a call whose effect a sandbox does not need,
and whose failure programs do not expect. ENOSYS: a call newer than the table, so that libc falls back to an older one.
Every call of `SYSCALL_NUMBERS` is in exactly one row; a test checks that.

No rule looks behind a pointer: another thread could change the memory after the check.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS
from toolcell_bridge.wire.frozen import frozen

_WORD = 0xFFFF_FFFF
_QUAD = 0xFFFF_FFFF_FFFF_FFFF


class SeccompAction(enum.Enum):
    """What the kernel does with a call."""

    ALLOW = "allow"
    EPERM = "EPERM"
    SKIP = "success, without making the call"
    ENOSYS = "ENOSYS"
    KILL = "kill the process"


@frozen
class Group:
    """Calls that share an answer and the reason for it."""

    reason: str
    calls: tuple[str, ...]


@frozen
class Argument:
    """One argument must be, after masking, one of `values`.

    The mask is 32 bits wide unless said otherwise, because the kernel reads these arguments as ints: comparing all
    64 bits would let `ioctl(fd, 1 << 32 | TIOCSTI)` through as an unknown number (CVE-2019-10063).
    """

    index: int
    values: tuple[int, ...]
    mask: int = _WORD
    is_excluded: bool = False
    """It must be none of `values`."""

    def fits(self, given: int) -> bool:
        """Return whether the argument may have this value."""
        return ((given & self.mask) in self.values) != self.is_excluded


@frozen
class SyscallRule:
    """A call allowed when every argument fits, and refused with EPERM otherwise."""

    call: str
    reason: str
    arguments: tuple[Argument, ...]
    skipped: Argument | None = None
    """Where not every argument fits but this one does, the call is answered with success and not made."""


@frozen
class SeccompPolicy:
    """A whole filter. Calls in none of the tables get ENOSYS."""

    allowed: tuple[Group, ...]
    rules: tuple[SyscallRule, ...]
    refused: tuple[Group, ...]
    missing: tuple[Group, ...]
    """Known calls answered with ENOSYS."""

    skipped: tuple[Group, ...] = ()
    """Known calls answered with success and not made."""

    note: str = ""
    """What the layer's description says of it."""

    def table(self, machine: str) -> dict[int, SeccompAction | SyscallRule]:
        """Every decided number of `machine`."""
        numbers = SYSCALL_NUMBERS[machine]
        return {
            **_rows(self.refused, SeccompAction.EPERM, numbers),
            **_rows(self.missing, SeccompAction.ENOSYS, numbers),
            **_rows(self.skipped, SeccompAction.SKIP, numbers),
            **_rows(self.allowed, SeccompAction.ALLOW, numbers),
            **{numbers[rule.call]: rule for rule in self.rules if rule.call in numbers},
        }

    def decide(self, machine: str, number: int, arguments: Sequence[int]) -> SeccompAction:
        """Answer one native call: what the compiled filter must say."""
        match self.table(machine).get(number, SeccompAction.ENOSYS):
            case SeccompAction() as action:
                return action
            case SyscallRule() as rule:
                if all(test.fits(arguments[test.index]) for test in rule.arguments):
                    return SeccompAction.ALLOW
                skips = rule.skipped is not None and rule.skipped.fits(arguments[rule.skipped.index])
                return SeccompAction.SKIP if skips else SeccompAction.EPERM


def _rows(groups: Iterable[Group], action: SeccompAction, numbers: Mapping[str, int]) -> dict[int, SeccompAction]:
    return {numbers[call]: action for group in groups for call in group.calls if call in numbers}


def _group(reason: str, calls: str) -> Group:
    return Group(reason, tuple(calls.split()))


ALLOWED = (
    _group(
        "files: the mount namespace and Landlock decide which",
        """read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close
        close_range lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink
        readlinkat getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat
        link linkat symlink symlinkat truncate ftruncate fallocate chmod fchmod fchmodat fchmodat2 chown
        fchown lchown fchownat umask utime utimes futimesat utimensat dup dup2 dup3 pipe pipe2
        getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr flistxattr listxattrat""",
    ),
    _group(
        "memory: PROT_EXEC included, importing an extension module maps it executable",
        "mmap munmap mremap mprotect brk madvise msync get_mempolicy",
    ),
    _group(
        "waiting: asyncio, selectors, threads",
        """poll ppoll select pselect6 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
        pause""",
    ),
    _group(
        "time",
        """clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getitimer setitimer alarm
        timer_create timer_settime timer_gettime timer_getoverrun timer_delete""",
    ),
    _group(
        "threads and processes: how many is the cgroup's business",
        """fork vfork exit exit_group wait4 waitid futex futex_waitv futex_wake futex_wait futex_requeue
        set_robust_list rseq set_tid_address membarrier sched_yield""",
    ),
    _group(
        "signals: its own pid namespace is all it can reach",
        """kill tkill tgkill rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigreturn
        sigaltstack restart_syscall""",
    ),
    _group(
        "reading about itself; sysinfo because glibc ignores its failure and would use garbage",
        """getpid getppid gettid getpgid getpgrp getsid setpgid setsid getuid geteuid getgid getegid getresuid
        getresgid getgroups capget getrlimit getrusage getpriority getcpu sched_getaffinity sched_getparam
        sched_getscheduler sched_getattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval uname
        sysinfo getrandom""",
    ),
    _group(
        "descriptors it already has: the bridge and its own socket pairs",
        "shutdown getsockname getpeername",
    ),
)

_SIGCHLD = 17
_NAMESPACE_FLAGS = 0x7E020080
_SOCK_FLAGS = 0o2004000  # SOCK_CLOEXEC | SOCK_NONBLOCK
_MSG_OOB = 0x1
_S_IFMT = 0o170000
_PLAIN_NODES = (0, 0o100000, 0o010000)  # regular twice, fifo

RULES = (
    SyscallRule(
        "clone",
        "threads and fork, never a namespace: CLONE_NEWTIME included, whose bit is not a signal",
        (Argument(0, (0,), _NAMESPACE_FLAGS),),
    ),
    SyscallRule(
        "rt_sigaction",
        "any signal but SIGCHLD: while it is ignored, the CPU time of ended children is counted nowhere",
        (Argument(0, (_SIGCHLD,), is_excluded=True),),
    ),
    SyscallRule(
        "socketpair",
        "AF_UNIX stream (asyncio, multiprocessing) and seqpacket; a datagram one could send to any named socket",
        (Argument(0, (1,)), Argument(1, (1, 5), _WORD & ~_SOCK_FLAGS), Argument(2, (0, 1))),
    ),
    SyscallRule(
        "sendto",
        "send() without an address; out-of-band data on unix sockets has freed the kernel's memory (CVE-2025-38236)",
        (Argument(4, (0,), _QUAD), Argument(3, (0,), _MSG_OOB)),
    ),
    SyscallRule("recvfrom", "not out of band", (Argument(3, (0,), _MSG_OOB),)),
    SyscallRule("recvmsg", "not out of band", (Argument(2, (0,), _MSG_OOB),)),
    SyscallRule(
        "getsockopt",
        "what the socket module asks; not SO_PEERPIDFD, a descriptor of the host's process",
        (Argument(1, (1,)), Argument(2, (3, 4, 7, 8, 20, 21, 30, 38, 39))),  # TYPE ERROR SND/RCVBUF/TIMEO ... DOMAIN
    ),
    SyscallRule(
        "setsockopt",
        "buffer sizes and timeouts; not SO_ATTACH_FILTER, nor any protocol's own options",
        (Argument(1, (1,)), Argument(2, (7, 8, 20, 21))),  # SO_SNDBUF SO_RCVBUF SO_RCVTIMEO SO_SNDTIMEO
    ),
    SyscallRule(
        "ioctl",
        "non-blocking, close-on-exec, bytes waiting, isatty, terminal size; nothing that drives a device",
        (Argument(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)),),
    ),
    SyscallRule(
        "fcntl",
        "duplicate and flags; not leases, notifications, owners or pipe sizes: on an inode that runs share, one run's "
        "lease is another's signal. Locks are not made, for the same reason; asking who holds one is refused",
        (Argument(1, (0, 1, 2, 3, 4, 1030, 1032, 1034)),),
        skipped=Argument(1, (6, 7, 37, 38)),  # F_SETLK F_SETLKW F_OFD_SETLK F_OFD_SETLKW
    ),
    SyscallRule(
        "prctl",
        "reading, and naming threads; not dumpable, seccomp or the parent-death signal that ends it with its host",
        (Argument(0, (2, 3, 7, 15, 16, 21, 23, 27, 30, 37, 39, 42, 51)),),
    ),
    SyscallRule(
        "arch_prctl",
        "asking for vector state and shadow stacks; the segment bases are set by clone",
        (Argument(0, (0x1021, 0x1022, 0x1023, 0x3001, 0x5005)),),
    ),
    SyscallRule(
        "prlimit64",
        "reading only: the host sets limits from outside, and nothing may race it",
        (Argument(2, (0,), _QUAD),),
    ),
    SyscallRule(
        "renameat2",
        "with RENAME_NOREPLACE or RENAME_EXCHANGE; RENAME_WHITEOUT leaves a character device behind",
        (Argument(4, (0,), _WORD & ~0b11),),
    ),
    SyscallRule("mknod", "fifos and plain files, no devices", (Argument(1, _PLAIN_NODES, _S_IFMT),)),
    SyscallRule("mknodat", "fifos and plain files, no devices", (Argument(2, _PLAIN_NODES, _S_IFMT),)),
)

REFUSED = (
    _group("there is nothing to execute in its root", "execve execveat uselib"),
    _group(
        "a new socket reaches past the bridge: TCP, vsock, netlink, crypto", "socket connect bind listen accept accept4"
    ),
    _group("batched socket calls hide an address behind each pointer", "sendmmsg recvmmsg"),
    _group(
        "descriptors in flight are counted per user of the machine, and past the limit all of that user's are refused",
        "sendmsg",
    ),
    _group(
        "io_uring and kernel aio make calls this filter never sees",
        """io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit io_cancel io_getevents
        io_pgetevents""",
    ),
    _group("namespaces", "unshare setns listns"),
    _group(
        "mounts",
        """mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
        mount_setattr statmount listmount""",
    ),
    _group("file handles pass by the mount namespace", "open_by_handle_at name_to_handle_at lookup_dcookie"),
    _group(
        "other processes' memory, descriptors and state",
        """ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd
        pidfd_send_signal get_robust_list rt_sigqueueinfo rt_tgsigqueueinfo""",
    ),
    _group("kernel programs and counters", "bpf perf_event_open userfaultfd uretprobe uprobe"),
    _group("its own isolation", "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self capset"),
    _group("security labels", "lsm_get_self_attr lsm_set_self_attr lsm_list_modules"),
    _group("keyrings are in no namespace", "keyctl add_key request_key"),
    _group("anonymous files: executable memory and memory outside the tmpfs limit", "memfd_create memfd_secret"),
    _group(
        "pages of shared read-only files would sit by reference in pipes; every caller falls back to read and write",
        "splice tee vmsplice sendfile copy_file_range",
    ),
    _group(
        "watching or probing inodes of the runtime, which all runs share",
        """inotify_init inotify_init1 inotify_add_watch inotify_rm_watch fanotify_init fanotify_mark mincore cachestat
        readahead""",
    ),
    _group("stalls the whole machine", "sync syncfs sync_file_range"),
    _group(
        "metadata nothing here needs: xattrs are memory outside the disk limit",
        """setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_getattr
        file_setattr""",
    ),
    _group(
        "identity",
        "setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups personality",
    ),
    _group(
        "scheduling and limits, which are the host's",
        """sched_setaffinity sched_setparam sched_setscheduler sched_setattr setpriority ioprio_set ioprio_get
        setrlimit rseq_slice_yield""",
    ),
    _group(
        "placing, pinning and sealing memory",
        """mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages mlock mlock2 mlockall munlock munlockall
        remap_file_pages pkey_mprotect pkey_alloc pkey_free mseal map_shadow_stack""",
    ),
    _group(
        "System V and POSIX message objects: nothing in Python uses them",
        """shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink
        mq_timedsend mq_timedreceive mq_notify mq_getsetattr""",
    ),
    _group(
        "the machine: its clock, names, modules, swap, accounting and ports",
        """clock_settime clock_adjtime settimeofday adjtimex sethostname setdomainname init_module finit_module
        delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl quotactl_fd syslog vhangup iopl
        ioperm modify_ldt set_thread_area get_thread_area ustat sysfs""",
    ),
    _group(
        "numbers no kernel answers any more",
        """_sysctl create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg afs_syscall tuxcall security
        vserver epoll_ctl_old epoll_wait_old""",
    ),
)

SKIPPED = (
    _group("waits for a disk; a sandbox's own files are in memory, all others are the host's", "fsync fdatasync"),
    _group(
        "a lock on an inode that runs share is a signal; a sandbox's own files are its own, and programs such as HDF5 "
        "take a refusal for a failure",
        "flock",
    ),
    _group("reads and drops pages of files that all runs share; it is advice, so nobody relies on it", "fadvise64"),
)

MISSING = (_group("its flags sit behind a pointer; glibc falls back to clone, whose flags we can see", "clone3"),)

EPOLL = _group(
    "its watches are counted per user of the machine, with one limit for all sandboxes and the host",
    "epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2",
)
"""The standard library waits with poll as well. Some packages wait with nothing else: polars, whatever has tokio in it,
trio."""

GUEST_POLICY = SeccompPolicy(ALLOWED, RULES, (*REFUSED, EPOLL), MISSING, SKIPPED)
"""What a guest runs under that has the standard library only."""

PACKAGES_POLICY = SeccompPolicy((*ALLOWED, EPOLL), RULES, REFUSED, MISSING, SKIPPED)
"""What a guest with packages runs under."""

PROGRAMS = _group(
    "the programs of a shell, of which its root has a few; each inherits the filter and everything else",
    "execve",
)

_SET_XATTR = _group(
    "programs that copy permissions take EPERM for a failure; ENOSYS is none", "setxattr lsetxattr fsetxattr"
)

_OTHERWISE = frozenset((*PROGRAMS.calls, *_SET_XATTR.calls))

PROGRAMS_POLICY = SeccompPolicy(
    (*ALLOWED, EPOLL, PROGRAMS, _group("a shell waits for its jobs with SIGCHLD", "rt_sigaction")),
    (
        *(rule for rule in RULES if rule.call not in ("rt_sigaction", "arch_prctl")),
        SyscallRule(
            "arch_prctl",
            "as for every guest, and the dynamic loader of a program sets its thread's segment base",
            (Argument(0, (0x1002, 0x1021, 0x1022, 0x1023, 0x3001, 0x5005)),),
        ),
    ),
    refused=tuple(Group(each.reason, tuple(call for call in each.calls if call not in _OTHERWISE)) for each in REFUSED),
    missing=(*MISSING, _SET_XATTR),
    skipped=SKIPPED,
    note=", programs of a shell may be executed",
)
"""What a guest that may execute programs runs under: `Policy(shell=True)`.

Beside execve it allows a handler for SIGCHLD. A script that ignores SIGCHLD hides the CPU time of its ended children
where there is no cgroup; `wall_s` and `processes` bound it there.
"""
