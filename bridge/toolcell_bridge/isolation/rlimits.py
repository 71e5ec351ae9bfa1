"""Per-process limits, soft equal to hard, so that nothing inside can raise them again.

Each limits one process, except NPROC, and none counts tmpfs and shared memory. The cgroup is the true limit; these are
the second layer, and the only one where there is no cgroup.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TypeAlias

from toolcell_bridge.wire.frozen import frozen

RlimitRows: TypeAlias = tuple[tuple[int, int], ...]
"""Number in the resource module, value for soft and hard."""

_STACK_BYTES = 8 * 1024 * 1024
"""What distributions give the main thread; glibc sizes every thread's stack from it."""

NO_PIPED_CORE = 1
"""A limit of 0 does not stop a core dump that goes to a program, such as systemd-coredump; this value stops that too.
Source: vfs_coredump in Linux fs/coredump.c, since 2.6.24; files below one page are not written at all."""

_PENDING_SIGNALS = 64
"""Queued signals and POSIX timers. Zero would break timer_create and thread cancellation."""


@frozen
class RlimitPlan:
    """What one sandbox process may use. Plain integers, decided by the host."""

    cpu_s: int
    address_space_bytes: int
    processes: int
    """Counted per user namespace and uid when set after entering a new user namespace, else across the whole host."""

    open_files: int
    file_size_bytes: int
    stack_bytes: int = _STACK_BYTES

    core_bytes: int = 0
    """`NO_PIPED_CORE` where programs are executed: each begins dumpable again."""

    processors: int | None = None
    """Processors that it may use at most, so that libraries start no more threads than `processes` allow; None: all."""

    def rows(self) -> tuple[tuple[str, int], ...]:
        """The table: name in the resource module, value for soft and hard."""
        return (
            ("RLIMIT_CPU", self.cpu_s),
            ("RLIMIT_AS", self.address_space_bytes),
            ("RLIMIT_NPROC", self.processes),
            ("RLIMIT_NOFILE", self.open_files),
            ("RLIMIT_FSIZE", self.file_size_bytes),
            ("RLIMIT_STACK", self.stack_bytes),
            ("RLIMIT_CORE", self.core_bytes),
            ("RLIMIT_MEMLOCK", 0),
            ("RLIMIT_MSGQUEUE", 0),
            ("RLIMIT_SIGPENDING", _PENDING_SIGNALS),
            ("RLIMIT_NICE", 0),
            ("RLIMIT_RTPRIO", 0),
        )


def choose_processors(most: int | None) -> tuple[int, ...]:
    """Return the numbers of the processors that one sandbox may use; none when it may use all that there are.

    They are chosen by chance, and stand beside each other. Libraries ask the kernel for this set before they start
    threads; environment variables would have to be known for each library, and some have none.
    """
    if most is None:
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) <= most:
        return ()
    first = int.from_bytes(os.urandom(4), "little")
    return tuple(allowed[(first + number) % len(allowed)] for number in range(most))


def use_processors(numbers: tuple[int, ...]) -> None:
    """Use only these processors from now on; none: those that were used. A set that no longer is there is ignored."""
    if numbers:
        with suppress(OSError):
            os.sched_setaffinity(0, numbers)


def apply(plan: RlimitPlan) -> None:
    """Set every row on this process. A value above the present hard limit becomes that limit: never looser than asked.

    Raises:
        ValueError: a value is negative; RLIM_INFINITY is -1, and nothing here is unlimited.
        OSError: the kernel refused a row.
    """
    apply_numbered(numbered(plan))


def numbered(plan: RlimitPlan) -> RlimitRows:
    """The table with the resource module's numbers for its names: what can be worked out ahead of `apply_numbered`.

    Raises:
        ValueError: a value is negative; RLIM_INFINITY is -1, and nothing here is unlimited.
    """
    import resource  # not on Windows

    for name, value in plan.rows():
        if value < 0:
            raise ValueError(f"{name}: {value} would mean unlimited")
    return tuple((getattr(resource, name), value) for name, value in plan.rows())


def apply_numbered(rows: RlimitRows) -> None:
    """Set every row of `numbered` on this process; see `apply`."""
    import resource

    for kind, value in rows:
        try:
            resource.setrlimit(kind, (value, value))
        except ValueError:  # above the hard limit, and we may not raise it
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
