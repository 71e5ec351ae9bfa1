"""Compile a policy into a classic BPF program and install it on this process.

The program checks the machine first, so that int 0x80 and x32 meet no rule written for other numbers, then finds the
call's number by binary search. Since Linux 5.11 the kernel runs a program once per number and caches those that are
allowed whatever their arguments, so only the few calls with argument rules pay for it at run time.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import struct
from collections.abc import Sequence

from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY, Argument, SeccompAction, SeccompPolicy, SyscallRule
from toolcell_bridge.isolation.syscall_numbers import native_machine
from toolcell_bridge.isolation.syscalls import syscall
from toolcell_bridge.wire.frozen import frozen

# Source: include/uapi/linux/audit.h.
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Source: include/uapi/linux/seccomp.h.
ACTIONS = {
    SeccompAction.ALLOW: 0x7FFF0000,
    SeccompAction.EPERM: 0x00050000 | errno.EPERM,
    SeccompAction.SKIP: 0x00050000,  # an error of zero: the call returns 0
    SeccompAction.ENOSYS: 0x00050000 | 38,  # Linux's ENOSYS, whatever machine compiles this
    SeccompAction.KILL: 0x80000000,
}
_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1

# Source: include/uapi/linux/bpf_common.h.
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_JEQ = 0x15
_JGE = 0x35
_RETURN = 0x06

# Offsets in struct seccomp_data. Both machines are little-endian: the low word of an argument comes first.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16

_INSTRUCTION = struct.Struct("=HBBI")
_OPERAND = 4
"""Offset in it."""
_FARTHEST = 255
"""Conditional jumps hold their distance in a byte."""

MAX_INSTRUCTIONS = 4096
"""BPF_MAXINSNS. The kernel also bounds the sum over all filters of a process, at 32768."""

OWN_PROCESS, OWN_GROUP = 0x7FFF_FFFE, 0x8000_0002
"""In a policy: the id of the process that installs it, and this id negated, which is that of its group. The kernel
gives no process such a number."""

_Answer = SeccompAction | SyscallRule


class _Assembler:
    """Builds a program from its end, so that every jump target exists before the jump to it.

    A position counts instructions from the end; equal instructions with equal targets are written once.
    """

    def __init__(self) -> None:
        self._reversed: list[bytes] = []
        self._known: dict[tuple[int, int, int, int], int] = {}

    def program(self) -> bytes:
        return b"".join(reversed(self._reversed))

    def end_with(self, action: SeccompAction) -> int:
        """Return the position of an instruction that answers."""
        return self._emit(_RETURN, ACTIONS[action])

    def then(self, code: int, operand: int, following: int) -> int:
        """Return the position of an instruction that goes on to `following`."""
        key = (code, operand, following, following)
        if key not in self._known:
            if following != len(self._reversed):
                self._emit(_JUMP, len(self._reversed) - following)
            self._known[key] = self._emit(code, operand)
        return self._known[key]

    def branch(self, code: int, operand: int, yes: int, no: int) -> int:
        """Return the position of a conditional jump."""
        if yes == no:
            return yes
        key = (code, operand, yes, no)
        if key not in self._known:
            no = self._within_reach(no, spare=1)
            yes = self._within_reach(yes, spare=0)
            here = len(self._reversed)
            self._known[key] = self._emit(code, operand, here - yes, here - no)
        return self._known[key]

    def _within_reach(self, target: int, spare: int) -> int:
        if len(self._reversed) + spare - target <= _FARTHEST:
            return target
        return self._emit(_JUMP, len(self._reversed) - target)

    def _emit(self, code: int, operand: int, yes: int = 0, no: int = 0) -> int:
        self._reversed.append(_INSTRUCTION.pack(code, yes, no, operand))
        return len(self._reversed)


def compile_filter(policy: SeccompPolicy, machine: str) -> bytes:
    """Return `policy` for `machine` as an array of struct sock_filter."""
    assembler = _Assembler()
    answers = {action: assembler.end_with(action) for action in SeccompAction}
    table = policy.table(machine)
    rules = {rule: _compile_rule(assembler, rule, answers) for rule in policy.rules if rule in table.values()}
    spans = _spans(table)
    targets = [(first, answers[a] if isinstance(a, SeccompAction) else rules[a]) for first, a in spans]
    load_number = assembler.then(_LOAD, _NUMBER, _compile_search(assembler, targets))
    native = assembler.branch(_JEQ, AUDIT_ARCHITECTURES[machine], load_number, answers[SeccompAction.KILL])
    assembler.then(_LOAD, _ARCHITECTURE, native)
    program = assembler.program()
    if len(program) > MAX_INSTRUCTIONS * _INSTRUCTION.size:
        raise ValueError(f"filter too long: {len(program) // _INSTRUCTION.size} > {MAX_INSTRUCTIONS} instructions")
    return program


def _spans(table: dict[int, _Answer]) -> list[tuple[int, _Answer]]:
    """Cut all numbers into runs of one answer: (first number, answer), ascending, the first at 0.

    Everything past the table is ENOSYS, x32's 0x40000000 and up included.
    """
    every = ((number, table.get(number, SeccompAction.ENOSYS)) for number in range(max(table) + 2))
    return [next(run) for _, run in itertools.groupby(every, key=lambda row: row[1])]


def _compile_search(assembler: _Assembler, targets: Sequence[tuple[int, int]]) -> int:
    """Return the position of a balanced tree of comparisons over (first value, position)."""
    if len(targets) == 1:
        return targets[0][1]
    middle = len(targets) // 2
    upper = _compile_search(assembler, targets[middle:])
    return assembler.branch(_JGE, targets[middle][0], upper, _compile_search(assembler, targets[:middle]))


def _compile_rule(assembler: _Assembler, rule: SyscallRule, answers: dict[SeccompAction, int]) -> int:
    """Return the position that answers a call with an argument rule."""
    refused = answers[SeccompAction.EPERM]
    if rule.skipped is not None:
        refused = _compile_argument(assembler, rule.skipped, answers[SeccompAction.SKIP], refused)
    position = answers[SeccompAction.ALLOW]
    for test in reversed(rule.arguments):
        position = _compile_argument(assembler, test, position, refused)
    return position


def _compile_argument(assembler: _Assembler, test: Argument, fits: int, refused: int) -> int:
    low = _ARGUMENTS + 8 * test.index
    listed, position = (refused, fits) if test.is_excluded else (fits, refused)
    for value in sorted(test.values, reverse=True):
        position = assembler.branch(_JEQ, value, listed, position)
    if (mask := test.mask & 0xFFFFFFFF) != 0xFFFFFFFF:
        position = assembler.then(_AND, mask, position)
    position = assembler.then(_LOAD, low, position)
    if high_mask := test.mask >> 32:
        # Values are below 2**32, so the upper half must be zero.
        position = assembler.branch(_JEQ, 0, position, refused)
        if high_mask != 0xFFFFFFFF:
            position = assembler.then(_AND, high_mask, position)
        position = assembler.then(_LOAD, low + 4, position)
    return position


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


@frozen
class Program:
    """A filter laid out in memory for the kernel. Made once in a parent, valid in every fork."""

    address: int
    """Address of a struct sock_fprog."""

    instructions: int
    code: ctypes.Array[ctypes.c_char]
    """The instructions."""

    own: tuple[tuple[int, bool], ...]
    """Offsets in `code` of the installing process's id, and whether it is negated."""

    header: object
    """What `address` points to."""


def prepare(filters: bytes) -> Program:
    """Lay an array of struct sock_filter out for `install`."""
    code = ctypes.create_string_buffer(filters, len(filters))
    length = len(filters) // _INSTRUCTION.size
    header = _SockFprog(length, ctypes.addressof(code))
    operands = enumerate(operand for _, _, _, operand in _INSTRUCTION.iter_unpack(filters))
    own = tuple(
        (_INSTRUCTION.size * number + _OPERAND, operand == OWN_GROUP)
        for number, operand in operands
        if operand in (OWN_PROCESS, OWN_GROUP)
    )
    return Program(ctypes.addressof(header), length, code, own, header)


def guest_program(policy: SeccompPolicy = GUEST_POLICY) -> Program:
    """Return a guest's policy for this machine, ready to install."""
    return prepare(compile_filter(policy, native_machine()))


def install(program: Program) -> None:
    """Install the filter on every thread of this process, irrevocably. Needs no_new_privs.

    Raises:
        OSError: nothing was installed.
    """
    for offset, is_group in program.own:
        pid = os.getpid()
        struct.pack_into("=I", program.code, offset, -pid & 0xFFFF_FFFF if is_group else pid)
    if (stray := syscall("seccomp", _SET_MODE_FILTER, _FLAG_TSYNC, program.address)) != 0:
        raise OSError(errno.EBUSY, f"seccomp: thread {stray} runs under another filter and could not be joined")
