"""A process between the host and a server that it started: it ends with the host, and ends everything below it.

Run as a file, with the host's process id and the command: `python supervisor.py PID COMMAND...`. Imports nothing of
toolcell. A server such as `npx` starts processes of its own; they become children of this one when theirs ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127


class _Stop(BaseException):
    pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


def _stop_without(host: int) -> None:
    if os.getppid() != host:
        raise _Stop


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _end_all() -> None:
    """Kill everything below. Those whose parent was killed become children, and are killed in the next round."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)


def main(host: int, command: list[str]) -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    status, server = 0, 0
    try:
        signal.signal(signal.SIGCONT, lambda *_: _stop_without(host))
        # Of all signals this one also reaches a process that somebody has stopped.
        _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
        _stop_without(host)  # it may have been killed before
        server = os.fork()
        if not server:
            _exec(command)
        for descriptor in (0, 1):
            os.close(descriptor)
        while True:
            pid, code = os.wait()
            if pid == server:
                status, server = os.waitstatus_to_exitcode(code), 0
                break
    except _Stop:
        pass
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        signal.signal(number, signal.SIG_IGN)
    if server:
        os.kill(server, signal.SIGKILL)
    _end_all()
    return status if status >= 0 else 128 - status


def _exec(command: list[str]) -> NoReturn:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"{command[0]}: {exc.strerror}\n".encode())
    os._exit(NOT_FOUND)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
