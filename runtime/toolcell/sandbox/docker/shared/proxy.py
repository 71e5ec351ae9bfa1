"""Take a sandbox's descriptors out of its container's proxy, so that no process stands between host and guest.

Bytes on the attached stream pass two processes of Docker, which costs more time than the guest itself takes. A host on
the daemon's machine that may trace the proxy (usually root) can have the proxy's descriptors instead. For every other
host the proxy carries the bytes over the attached stream.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

from toolcell.sandbox.forked import SupervisorChannel
from toolcell_bridge.isolation.syscalls import syscall

FILE_TYPES = [stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFIFO, stat.S_IFIFO]
"""Types of a bridge, of raw output on descriptors 1 and 2, and of the control pipe of the sandbox's supervisor."""


class DirectProxy:
    """The proxy process of one container, as the host sees it."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    @classmethod
    def find(cls, init_pid: int, inner_pid: int) -> DirectProxy | None:
        """Find the child of a container's first process that is `inner_pid` inside; None when it is not visible."""
        try:
            with open(f"/proc/{init_pid}/task/{init_pid}/children", encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in children or [init_pid]:
                pidfd = os.pidfd_open(pid)
                # Compared after the pidfd was opened, so that both belong to the same process.
                if _inner_pid(pid) == inner_pid:
                    return cls(pidfd)
                os.close(pidfd)
        except (OSError, ValueError, AttributeError):
            return None
        return None

    def take(self, descriptors: Sequence[int]) -> SupervisorChannel | None:
        """Copy a sandbox's descriptors out of the proxy; None when the host may not, or they are something else."""
        taken: list[int] = []
        try:
            for number in descriptors:
                taken.append(syscall("pidfd_getfd", self._pidfd, number, 0))
                os.set_inheritable(taken[-1], False)
            types = [stat.S_IFMT(os.fstat(descriptor).st_mode) for descriptor in taken]
            if types == FILE_TYPES:
                bridge = socket.socket(fileno=taken[0])
                if (bridge.family, bridge.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                    for descriptor in taken[1:]:
                        os.set_blocking(descriptor, False)
                    return SupervisorChannel(bridge, taken[1:3], taken[3])
                bridge.detach()
        except OSError:
            pass
        for descriptor in taken:
            os.close(descriptor)
        return None

    def close(self) -> None:
        """Close the pidfd. Safe to call twice."""
        if self._pidfd >= 0:
            with suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = -1


def _inner_pid(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next((int(line.split()[-1]) for line in file if line.startswith("NSpid:")), 0)
