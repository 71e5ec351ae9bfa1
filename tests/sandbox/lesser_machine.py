"""Run a program as on a machine with less isolation, by a seccomp filter around it. The program is not told.

    python lesser_machine.py '{"without": ["namespaces"], "abi": 2}' python program.py

`without`: "namespaces" are refused as by a container with Docker's defaults; "landlock" is what no kernel before 5.13 has.
`abi`: the newest Landlock ABI that the kernel owns up to; it refuses the rights of newer ones, as an older kernel does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import Any

from toolcell_bridge.isolation import capabilities, landlock, seccomp
from toolcell_bridge.isolation.seccomp_policy import Argument, Group, SeccompPolicy, SyscallRule
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS, native_machine
from toolcell_bridge.isolation.syscalls import syscall

EVERY = frozenset().union(*SYSCALL_NUMBERS.values())
LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
NAMESPACES = ("unshare", "setns", "mount", "umount2", "pivot_root")
NEW_NAMESPACES = SyscallRule("clone", "as Docker's profile", (Argument(0, (0,), 0x7E020000),))

# Source: include/uapi/linux/seccomp.h and landlock.h.
_NEW_LISTENER = 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION = struct.Struct("=QII iIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_CONTINUE = 1
_USER_NOTIFICATION, _ALLOW = 0x7FC00000, 0x7FFF0000
_VERSION = 1


def on(script: str, **machine: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python script on a lesser machine."""
    return subprocess.run(
        [sys.executable, __file__, json.dumps(machine), sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def answers(script: str, **machine: Any) -> Any:
    """Return what the last line of a script's output says, as JSON."""
    done = on(script, **machine)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def refuse(without: list[str]) -> None:
    """Refuse the system calls of some layers to this process and all that it starts."""
    denied = NAMESPACES if "namespaces" in without else ()
    absent = LANDLOCK if "landlock" in without else ()
    rules = (NEW_NAMESPACES,) if denied else ()
    others = tuple(EVERY - {*denied, *absent, *(rule.call for rule in rules), "clone3"})
    policy = SeccompPolicy(
        (Group("others", others),), rules, (Group("denied", denied),), (Group("absent", (*absent, "clone3")),)
    )
    seccomp.install(seccomp.prepare(seccomp.compile_filter(policy, native_machine())))


def listen_for_rulesets() -> int:
    """Have every creation of a Landlock ruleset answered by whoever reads the descriptor that this returns."""
    instruction = struct.Struct("=HBBI")
    number = SYSCALL_NUMBERS[native_machine()]["landlock_create_ruleset"]
    code = b"".join(
        instruction.pack(*each)
        for each in ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, _USER_NOTIFICATION), (0x06, 0, 0, _ALLOW))
    )
    program = seccomp.prepare(code)
    return syscall("seccomp", 1, _NEW_LISTENER, program.address)


def answer_as(abi: int, listener: int, child: int) -> None:
    """Answer as a kernel of this ABI, until the program has ended."""
    poll, ended = select.poll(), os.pidfd_open(child)
    for descriptor in (listener, ended):
        poll.register(descriptor, select.POLLIN)
    handled = landlock.handled(abi)
    known = handled.fs, handled.net, handled.scopes
    while all(descriptor != ended for descriptor, _ in poll.poll()):
        received = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, received)
        except FileNotFoundError:  # who asked is gone
            continue
        ident, pid, _, _, _, _, *arguments = _NOTIFICATION.unpack(received)
        value, error, flags = 0, 0, _CONTINUE
        if arguments[2] == _VERSION:
            value, flags = min(abi, landlock.abi_version()), 0
        else:
            with suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(arguments[0])
                asked = struct.unpack("=QQQ", memory.read(arguments[1]).ljust(24, b"\0")[:24])
                if any(wanted & ~has for wanted, has in zip(asked, known, strict=True)):
                    error, flags = -errno.EINVAL, 0
        with suppress(FileNotFoundError):
            fcntl.ioctl(listener, _SEND, _RESPONSE.pack(ident, value, error, flags))


def main() -> None:
    """Become the program, or wait for it and answer for its kernel."""
    machine, command = json.loads(sys.argv[1]), sys.argv[2:]
    capabilities.set_no_new_privileges()
    if "abi" not in machine:
        refuse(machine.get("without", []))
        os.execv(command[0], command)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        if machine.get("without"):
            refuse(machine["without"])
        socket.send_fds(theirs, [b"x"], [listener := listen_for_rulesets()])
        os.close(listener)
        os.execv(command[0], command)
    theirs.close()
    _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    answer_as(machine["abi"], listener, child)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
