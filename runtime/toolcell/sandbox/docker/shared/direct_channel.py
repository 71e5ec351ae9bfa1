"""Taking a sandbox's lines out of its container's relay, so that nothing stands between host and guest.

What Docker relays passes two processes of its own; on the way to a guest and back that costs more than the guest. A
host on the daemon's machine that may trace the relay (root, usually) can have its descriptors instead. Everybody else
does without: the lines are carried over the attached stream.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress

from toolcell.sandbox.stream import SocketStream, read_available
from toolcell_bridge.isolation.syscalls import syscall

KINDS = [stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFIFO, stat.S_IFIFO]
"""A bridge, what is written raw to descriptors 1 and 2, and the leash of the sandbox's warden."""


class DirectChannel:
    """Our ends of one sandbox's lines."""

    def __init__(self, bridge: socket.socket, raw: Sequence[int], leash: int) -> None:
        self.stream = SocketStream(bridge)
        self._raw = tuple(raw)
        self._leash = leash
        self._end = select.poll()
        self._end.register(bridge, select.POLLRDHUP)
        self._is_closed = False

    def has_hung_up(self) -> bool:
        """Nobody holds the other end of the bridge any more."""
        return self._is_closed or bool(self._end.poll(0))

    def read_raw(self) -> tuple[bytes, bytes]:
        """Take what was written raw so far, without waiting."""
        return (b"", b"") if self._is_closed else (read_available(self._raw[0]), read_available(self._raw[1]))

    def pull(self, what: bytes) -> bool:
        """Tell the sandbox's warden how it ends; False when it is gone."""
        self.stream.rest()
        try:
            return not self._is_closed and os.write(self._leash, what) > 0
        except OSError:
            return False

    def close(self) -> None:
        """Close all, which ends the sandbox. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self.stream.close()
            for descriptor in (*self._raw, self._leash):
                os.close(descriptor)


class DirectProxy:
    """The relay process of one container, as seen from here."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    @classmethod
    def find(cls, init_pid: int, inner_pid: int) -> DirectProxy | None:
        """The child of a container's first process that is `inner_pid` inside; None where it cannot be seen."""
        try:
            with open(f"/proc/{init_pid}/task/{init_pid}/children", encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in children or [init_pid]:
                pidfd = os.pidfd_open(pid)
                # Looked at after it was opened, so that it is the same process.
                if _inner_pid(pid) == inner_pid:
                    return cls(pidfd)
                os.close(pidfd)
        except (OSError, ValueError, AttributeError):
            return None
        return None

    def take(self, ends: Sequence[int]) -> DirectChannel | None:
        """Take a bridge and its pipes; None when we may not, or when they are something else."""
        taken: list[int] = []
        try:
            for number in ends:
                taken.append(syscall("pidfd_getfd", self._pidfd, number, 0))
                os.set_inheritable(taken[-1], False)
            kinds = [stat.S_IFMT(os.fstat(descriptor).st_mode) for descriptor in taken]
            if kinds == KINDS:
                bridge = socket.socket(fileno=taken[0])
                if (bridge.family, bridge.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                    for descriptor in taken[1:]:
                        os.set_blocking(descriptor, False)
                    return DirectChannel(bridge, taken[1:3], taken[3])
                bridge.detach()
        except OSError:
            pass
        for descriptor in taken:
            os.close(descriptor)
        return None

    def close(self) -> None:
        """Forget it. Safe to call twice."""
        if self._pidfd >= 0:
            with suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = -1


def _inner_pid(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next((int(line.split()[-1]) for line in file if line.startswith("NSpid:")), 0)
