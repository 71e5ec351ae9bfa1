"""System calls that a guest must not make: PROMISES.md, "kernel"."""

from __future__ import annotations

import os
import platform
from typing import Any

import pytest

from escape.attack import IS_CONTAINED, IS_PROCESS, PATIENCE_S, Victim, full_only, outside
from escape.prologues import RAW, raw
from escape.refused_calls import NOT_ON_EVERY_MACHINE, REFUSED, ROOT_ONLY
from rows import each_row
from toolcell_bridge.isolation.guest_paths import GUEST_ID

pytestmark = [
    pytest.mark.quick,
    pytest.mark.isolation,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers and the machine code here are x86-64's"),
]

TRY_EVERY_CALL = raw("""
def one(row):
    value = call(*row)
    if value == 0 and row[0] == 56:
        os._exit(0)
    return value

set_result({name: in_child(lambda: one(row)) for name, row in rows.items()})
""")


@pytest.fixture(scope="module")
def reached_outside() -> dict[str, Any]:
    value: dict[str, Any] = outside(TRY_EVERY_CALL, rows=REFUSED).value
    return value


@pytest.fixture(scope="module")
def reached_inside(victim: Victim) -> dict[str, Any]:
    rows = {name: list(row) for name, row in REFUSED.items()}
    limits = {"wall_s": PATIENCE_S - 5, "cpu_s": PATIENCE_S}  # a process for each call
    value: dict[str, Any] = victim.run(TRY_EVERY_CALL, limits=limits, rows=rows).value
    return value


@each_row("name", REFUSED)
def test_a_call_outside_the_table_is_refused_before_the_kernel_looks_at_it(
    name: str, reached_outside: dict[str, Any], reached_inside: dict[str, Any]
) -> None:
    excused = name in NOT_ON_EVERY_MACHINE or (name in ROOT_ONLY and os.geteuid() != 0)
    assert reached_outside[name] not in ("EPERM", "ENOSYS") or excused
    assert reached_inside[name] in ("EPERM", "ENOSYS")


INT_0X80 = f"""{RAW}
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("53" "b8") + number.to_bytes(4, "little") + bytes.fromhex("31db 31c9 31d2 cd80 5b c3"))
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
"""


@pytest.mark.parametrize("number", [20, 102, 359], ids=["getpid", "socketcall", "socket"])
def test_the_32_bit_gate_kills_whoever_knocks(number: int, victim: Victim) -> None:
    source = INT_0X80 + "set_result(in_child(function))"
    assert isinstance(outside(source, number=number).value, int)
    assert victim.run(source, number=number).value == "signal 31"


def test_a_script_that_uses_the_32_bit_gate_itself_is_reported_as_killed(victim: Victim) -> None:
    source = INT_0X80 + "function()\nset_result('reached')"
    assert outside(source, number=20).value == "reached"
    inside = victim.run(source, number=20)
    assert (inside.outcome, inside.result.has_value) == ("killed", False)
    assert inside.result.error is not None
    assert inside.result.error.signal == 31


def test_a_32_bit_code_segment_does_not_open_the_32_bit_calls(victim: Victim) -> None:
    """A far return into the compatibility segment, `int 0x80` there, and back, without a C library."""
    source = f"""{RAW}
import mmap
libc.mmap.restype = ctypes.c_void_p
low = libc.mmap(ctypes.c_void_p(0), ctypes.c_size_t(8192), 7, 0x62, -1, ctypes.c_long(0))  # MAP_32BIT
assert low < 1 << 31
stack = low + 8192 - 64
there, back = low + 128, low + 256
code = bytes.fromhex("53 55 4154 4889e5")  # push rbx, rbp, r12; mov rbp, rsp
code += b"\\xbc" + stack.to_bytes(4, "little")  # mov esp, stack
code += bytes.fromhex("6a23 68") + there.to_bytes(4, "little") + bytes.fromhex("48cb")  # push 0x23; push there; retfq
narrow = bytes.fromhex("b8 14000000 cd80 6a33 68") + back.to_bytes(4, "little") + b"\\xcb"  # getpid; far return to 0x33
wide = bytes.fromhex("4889ec 415c 5d 5b c3")
ctypes.memmove(low, code, len(code))
ctypes.memmove(there, narrow, len(narrow))
ctypes.memmove(back, wide, len(wide))
set_result(in_child(ctypes.CFUNCTYPE(ctypes.c_int)(low)))
"""
    assert isinstance(outside(source).value, int)
    assert victim.run(source).value == "signal 31"


def test_x32_numbers_lead_nowhere(victim: Victim) -> None:
    """Most kernels are built without x32, so a plain process may get ENOSYS too."""
    source = f"""{RAW}
numbers = [39, 41, 56, 101, 165, 272, 425, 512, 520, 521, 536, 547]
set_result([in_child(lambda: call(0x40000000 | number, 0, 0, 0, 0, 0)) for number in numbers])
"""
    assert all(isinstance(each, int) or each.startswith(("E", "signal")) for each in outside(source).value)
    # A container's own filter knows one architecture and ends whoever speaks for another.
    assert set(victim.run(source).value) == ({"ENOSYS"} if IS_PROCESS else {"signal 31"})


@full_only("the user id is the host program's; test_container_profile.py looks at the rest")
def test_privilege_state_is_empty_and_locked(victim: Victim) -> None:
    source = raw("""
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()
libc.capget(header, sets)
set_result({
    "capabilities": list(sets),
    "bounding": [number for number in range(64) if libc.prctl(23, number, 0, 0, 0) == 1],
    "ambient": [number for number in range(41) if libc.prctl(47, 1, number, 0, 0) == 1],
    "securebits": libc.prctl(27, 0, 0, 0, 0),
    "no_new_privs": libc.prctl(39, 0, 0, 0, 0),
    "seccomp": libc.prctl(21, 0, 0, 0, 0),
    "dumpable": libc.prctl(3, 0, 0, 0, 0),
    "keep": libc.prctl(7, 0, 0, 0, 0),
    "groups": sorted(set(os.getgroups()) - {65534}),
    "is root": 0 in (*os.getresuid(), *os.getresgid()),
})
""")
    privileged = outside(source).value
    assert privileged["dumpable"] == 1
    assert privileged["securebits"] == 0

    inside = victim.run(source).value
    # An ordinary user cannot give up groups; the one that is not nobody's in there is the sandbox's own.
    assert set(inside.pop("groups")) <= {GUEST_ID}
    assert inside == {
        "capabilities": [0] * 6,
        "bounding": [],
        "ambient": [],
        # Setting them takes a capability, and a container's first process has none already.
        "securebits": 0b1110_1111 if IS_PROCESS else 0,
        "no_new_privs": 1,
        "seccomp": 2,
        "dumpable": 0,
        "keep": 0,
        "is root": False,
    }


def test_limits_cannot_be_raised_or_lowered_from_inside(victim: Victim) -> None:
    source = f"""{RAW}
import resource
kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
set_result([attempt(resource.setrlimit, kind, resource.getrlimit(kind)) for kind in kinds])
"""
    assert set(outside(source).value) == {"ok"}
    assert set(victim.run(source).value) == {"ValueError"}  # what Python makes of EPERM here


def test_every_limit_is_finite_and_soft_equals_hard(victim: Victim) -> None:
    source = raw("""
import resource
names = ["CPU", "AS", "NPROC", "NOFILE", "FSIZE", "STACK", "CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "NICE", "RTPRIO"]
set_result({name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names})
""")
    assert any(hard == -1 or hard != soft for soft, hard in outside(source).value.values())
    limits = victim.run(source).value
    assert all(soft == hard >= 0 for soft, hard in limits.values())
    assert limits["CORE"] == limits["MEMLOCK"] == [0, 0]


def test_a_child_cannot_be_given_to_the_parent_of_the_sandbox(victim: Victim) -> None:
    """CLONE_PARENT makes a child the sibling of its creator: a child of the zygote, not of the namespace's init."""
    source = f"""{RAW}
def clone():
    parent = os.getppid()
    child = call(56, 0x8000 | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child if isinstance(child, str) else "made"
set_result(clone())
"""
    assert outside(source).value == "made"
    assert victim.run(source).value == ("EINVAL" if IS_PROCESS and not IS_CONTAINED else "EPERM")


def test_out_of_band_data_on_unix_sockets_is_out_of_reach(victim: Victim) -> None:
    """No program uses MSG_OOB on AF_UNIX, and it was a way into the kernel (CVE-2025-38236)."""
    source = f"""{RAW}
import _socket, socket
left, right = socket.socketpair()
set_result([
    attempt(left.send, b"x", socket.MSG_OOB),
    attempt(_socket.socket.sendmsg, left, [b"x"], [], socket.MSG_OOB),
    attempt(right.recv, 1, socket.MSG_OOB),
    attempt(right.recvmsg, 1, 0, socket.MSG_OOB),
])
"""
    assert outside(source).value[:2] == ["ok", "ok"]
    assert set(victim.run(source).value) <= {"EPERM", "EOPNOTSUPP"}
