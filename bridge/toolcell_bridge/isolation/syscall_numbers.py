"""The system call numbers of the two machines we run on, whole.

Whole, because the filter answers "known and not allowed" differently from "newer than this table". Knows nothing
of what is allowed.

Shape: each line is the number of its first name, then names in counting order.
Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64), up to Linux 7.1.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping
from types import MappingProxyType

_X86_64 = """
0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
15 rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
29 shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
44 sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
56 clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl
73 flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
88 symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace
102 getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid
115 getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset
127 rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat
137 statfs fstatfs sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler
145 sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock
151 mlockall munlockall vhangup modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync
163 acct settimeofday mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm create_module
175 init_module delete_module get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall
184 tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr
195 llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity
204 sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area
212 lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address
219 restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
227 clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
236 vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
245 mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
254 inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat
263 unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list
274 get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create
284 eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2
294 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark
302 prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv
311 process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create
320 kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
330 pkey_alloc pkey_free statx io_pgetevents rseq uretprobe uprobe
424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
432 fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2
442 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret
448 process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake
455 futex_wait futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
463 setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr listns
471 rseq_slice_yield
"""

_AARCH64 = """
0 io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
11 listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
20 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
30 ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
42 nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
55 fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
70 pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync
83 fdatasync sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset
92 personality exit exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep
102 getitimer setitimer kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun
110 timer_settime timer_delete clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace
118 sched_setparam sched_setscheduler sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity
124 sched_yield sched_get_priority_max sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill
131 tgkill sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo
139 rt_sigreturn setpriority getpriority reboot setregid setgid setreuid setuid setresuid getresuid setresgid
150 getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups setgroups uname sethostname
162 setdomainname getrlimit setrlimit getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid
173 getppid getuid geteuid getgid getegid gettid sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive
184 mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl shmat shmdt
198 socket socketpair bind listen accept connect getsockname getpeername sendto recvfrom setsockopt getsockopt
210 shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl clone execve mmap fadvise64
224 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind
236 get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4 recvmmsg
260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
269 sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp
278 getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
288 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
432 fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2
442 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret
448 process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake
455 futex_wait futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
463 setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr listns
471 rseq_slice_yield
"""


def _numbers(table: str) -> Mapping[str, int]:
    rows = (line.split() for line in table.split("\n") if line)
    return MappingProxyType({name: int(first) + i for first, *names in rows for i, name in enumerate(names)})


SYSCALL_NUMBERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"x86_64": _numbers(_X86_64), "aarch64": _numbers(_AARCH64)}
)
"""Machine name to call name to number."""


@functools.cache
def native_machine() -> str:
    """Name the machine whose numbers this process uses, as `SYSCALL_NUMBERS` spells it.

    Raises:
        OSError: not 64-bit x86 or Arm. A 32-bit Python on a 64-bit kernel uses another table, so it is refused too.
    """
    machine = os.uname().machine if hasattr(os, "uname") else ""
    if machine not in SYSCALL_NUMBERS or struct.calcsize("P") != 8:
        raise OSError(
            f"no system call table for {machine or 'this machine'} with {struct.calcsize('P') * 8}-bit pointers"
        )
    return machine
