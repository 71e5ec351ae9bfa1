"""What the kernel counts per user of the machine or once for all: PROMISES.md, "what sandboxes share in the kernel".

An ordinary user's sandboxes, the zygote and the host are one user to the kernel. What one sandbox takes from such a
counter is missing to all others.
"""

from __future__ import annotations

import platform
import secrets
from pathlib import Path

import pytest

from escape.attack import Victim, outside, process_only
from escape.prologues import RAW
from toolcell import SyncRuntime, ToolRegistry

pytestmark = [
    pytest.mark.quick,
    pytest.mark.isolation,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's"),
]

PREPARE = f"""{RAW}
import _socket, array, fcntl, socket, struct
left, right = socket.socketpair()
page = ctypes.create_string_buffer(8192)
name = ctypes.create_string_buffer(b"toolcell-counter")
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))
own = os.open("own", os.O_RDWR | os.O_CREAT)
address = ctypes.addressof
"""

TAKEN = {
    "descriptors in flight": ["attempt(_socket.socket.sendmsg, left, [b'x'], [rights])", "call(307, -1, BAD, 1, 0)"],
    "epoll watches": ["call(213, 1)", "call(291, 0)", "call(233, -1, 1, 0, BAD)"],
    "inotify instances and watches": ["call(253)", "call(294, 0)", "call(254, -1, BAD, 1)"],
    "fanotify groups and marks": ["call(300, 0x200, 0)"],
    "directory notifications": ["attempt(fcntl.fcntl, os.open('.', os.O_RDONLY), 1026, 0)"],
    "pages of larger pipes": ["attempt(fcntl.fcntl, os.pipe()[1], 1031, 1 << 18)"],
    "contexts of kernel aio": ["call(206, 1, address(page))"],
    "memory and workers of io_uring": ["call(425, 1, address(page))"],
    "locked memory": ["call(149, address(page), 4096)", "call(325, address(page), 4096, 0)"],
    "keys": ["call(248, BAD, BAD, BAD, 1, -4)", "call(250, 0, -3, 1)"],
    "message queues": ["call(68, 0x70011CE2, 0)", "call(240, BAD, 0o102, 0o600, 0)"],
    "System V semaphores and memory": ["call(64, 0x70011CE2, 1, 0)", "call(29, 0x70011CE2, 4096, 0)"],
    "leases": ["attempt(fcntl.fcntl, own, 1024, 1)"],
    "namespaces": ["call(272, 0x10000000)", "in_child(lambda: call(272, 0x10000000))"],
    "performance events": ["call(298, BAD, 0, -1, -1, 0)"],
    "kernel programs": ["call(321, 0, BAD, 8)"],
    "anonymous files": ["call(319, address(name), 0)"],
}

MAY_BE_OFF = frozenset({"fanotify groups and marks", "memory and workers of io_uring", "namespaces", "keys",
                        "performance events", "kernel programs", "locked memory"})  # fmt: skip
"""An administrator or a missing privilege may refuse these to everybody."""


@pytest.mark.parametrize("counter", TAKEN)
def test_a_sandbox_takes_nothing_from_a_counter_that_the_machine_shares(counter: str, victim: Victim) -> None:
    source = PREPARE + f"set_result([{', '.join(TAKEN[counter])}])"
    assert "EPERM" not in outside(source).value or counter in MAY_BE_OFF
    assert set(victim.run(source).value) == {"EPERM"}


LOCKS = (
    PREPARE
    + """
record = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
found = os.fstat(own)
place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
set_result([attempt(fcntl.flock, own, 2), *(attempt(fcntl.fcntl, own, command, record) for command in (6, 7, 37, 38)),
            attempt(fcntl.fcntl, own, fcntl.F_GETLK, record), call_tool("locked", {"place": place})])
"""
)


def test_a_lock_of_a_script_is_no_lock_of_the_kernel() -> None:
    registry = ToolRegistry()

    @registry.tool
    def locked(place: str) -> bool:
        """Return whether the kernel knows a lock on an inode of a device, such as 00:2f:5."""
        return f" {place} " in Path("/proc/locks").read_text()

    with SyncRuntime(registry) as runtime:
        assert runtime.execute_code(LOCKS).value == [*["ok"] * 5, "EPERM", False]


TIMERS = f"""{RAW}
wanted, made = 500, 0
timer = ctypes.c_int()
event = (ctypes.c_int * 16)(0, 0, 0, 1)  # SIGEV_NONE
while made < wanted and call(222, 1, ctypes.addressof(event), ctypes.addressof(timer)) == 0:
    made += 1
"""


@process_only("containers are one user to the kernel, which counts queued signals and timers per user")
def test_each_sandbox_has_its_own_queued_signals_and_timers(victim: Victim) -> None:
    assert outside(TIMERS + "set_result(made)").value == 500
    taker = TIMERS + "call_tool('meet', {'place': 'taken', 'count': 2})\nset_result(made)"
    other = "call_tool('meet', {'place': 'taken', 'count': 2})\n" + TIMERS + "set_result(made)"
    made = [inside.value for inside in victim.run_together([(taker, {}), (other, {})])]
    assert made[0] == made[1] < 100


PROCESSES = """
import os, signal, sys
children = []
try:
    while len(children) < 20:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    pass
"""


def test_each_sandbox_has_its_own_number_of_processes(victim: Victim) -> None:
    taker = PROCESSES + "call_tool('meet', {'place': 'taken', 'count': 2})\nset_result(len(children))"
    other = "call_tool('meet', {'place': 'taken', 'count': 2})\n" + PROCESSES + "set_result(len(children))"
    runs = victim.run_together([(taker, {}), (other, {})], limits={"processes": 24})
    assert [inside.value for inside in runs] == [20, 20]


PIPES = """
import os, signal
def take():
    held = []
    try:
        while True:
            held.append(os.pipe())
    except OSError:
        return held
held = take()
for _ in range(children):
    if os.fork() == 0:
        os.closerange(4, 256)
        take()
        signal.pause()
"""


def test_pipes_that_one_sandbox_holds_stop_no_other(victim: Victim) -> None:
    """Past a bound per user the kernel gives new pipes less room. They still work, and so does all output."""
    taker = PIPES + "call_tool('meet', {'place': 'taken', 'count': 2})\nset_result(len(held))"
    other = """
import os
call_tool("meet", {"place": "taken", "count": 2})
read, write = os.pipe()
os.write(write, b"x" * 4096)
for _ in range(100):
    os.write(1, b"y" * 4095 + b"\\n")
set_result(len(os.read(read, 8192)))
"""
    taken, told = victim.run_together([(taker, {"children": 40}), (other, {"children": 0})], limits={"wall_s": 60})
    assert taken.value > 50
    assert (told.outcome, told.value) == ("ok", 4096)
    assert len(told.result.logs.text) > 16 * 1024
    victim.assert_healthy()


def test_no_sandbox_waits_for_a_disk_or_moves_pages_of_shared_files(victim: Victim) -> None:
    """A call that reached the kernel would say that there is no such descriptor."""
    source = RAW + "set_result([attempt(os.fsync, 999), attempt(os.fdatasync, 999), call(221, 999, 0, 0, 4)])"
    assert outside(source).value == ["EBADF", "EBADF", "EBADF"]
    assert victim.run(source).value == ["ok", "ok", 0]


LOOKUPS = """
import os
folder = os.path.dirname(os.__file__)
for number in range(wanted):
    try:
        os.stat(f"{folder}/{salt}-{number}-{'x' * 200}")
    except OSError:
        pass
set_result("looked up")
"""


@process_only("an engine removes its containers' cgroups itself")
def test_names_that_do_not_exist_are_forgotten_after_the_run(victim: Victim) -> None:
    """The kernel remembers each name that was looked up in vain; afterwards nobody would be charged for it."""
    wanted = 60_000
    inside = victim.run(LOOKUPS, wanted=wanted, salt=secrets.token_hex(8), limits={"wall_s": 60})
    assert inside.value == "looked up"
    if "cgroup" not in inside.result.isolation.layers:
        return  # charged to nobody in the first place; PROMISES.md says so
    before = remembered_names()
    victim.run(LOOKUPS, wanted=wanted, salt=secrets.token_hex(8), limits={"wall_s": 60})
    victim.assert_healthy()
    assert remembered_names() - before < wanted // 2


def remembered_names() -> int:
    """Names without a file that the kernel has in memory, of the whole machine."""
    with open("/proc/sys/fs/dentry-state", encoding="ascii") as state:
        return int(state.read().split()[4])
