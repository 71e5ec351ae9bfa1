"""The compiled filter, run by an interpreter of classic BPF, says what the policy says."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.isolation.seccomp import AUDIT_ARCHITECTURES, MAX_INSTRUCTIONS, compile_filter
from toolcell_bridge.isolation.seccomp_policy import (
    ALLOWED,
    GUEST_POLICY,
    MISSING,
    RULES,
    Argument,
    Group,
    SeccompAction,
    SeccompPolicy,
    SyscallRule,
)
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS

pytestmark = pytest.mark.quick

MACHINES = sorted(SYSCALL_NUMBERS)
ANSWERS = {
    0x7FFF0000: SeccompAction.ALLOW,
    0x00050001: SeccompAction.EPERM,
    0x00050026: SeccompAction.ENOSYS,
    0x00050000: SeccompAction.SKIP,
    0x80000000: SeccompAction.KILL,
}
WORD, QUAD = 2**32 - 1, 2**64 - 1
PROGRAMS = {machine: compile_filter(GUEST_POLICY, machine) for machine in MACHINES}


def interpret(program: bytes, architecture: int, number: int, arguments: Sequence[int]) -> tuple[SeccompAction, int]:
    """Run a filter as kernel/bpf does; returns its answer and how many instructions it took."""
    data = struct.pack("<IIQ6Q", number, architecture, 0xDEAD_BEEF, *(value & QUAD for value in arguments))
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = at = steps = 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        steps += 1
        match operation:
            case 0x20:
                assert operand % 4 == 0
                accumulator = struct.unpack_from("<I", data, operand)[0]
            case 0x54:
                accumulator &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += yes if accumulator == operand else no
            case 0x35:
                at += yes if accumulator >= operand else no
            case 0x06:
                return ANSWERS[operand], steps
            case _:
                raise AssertionError(f"instruction {operation:#x} is not one seccomp accepts from us")


def interesting(machine: str) -> Iterator[list[int]]:
    """Argument lists around every value, mask and boundary a rule mentions."""
    seeds = {0, 1, WORD, QUAD, 1 << 32, 1 << 63, 0x7E020080}
    for rule in RULES:
        for test in (*rule.arguments, *((rule.skipped,) if rule.skipped else ())):
            near = {value + offset for value in test.values for offset in (-1, 0, 1)} | {test.mask, ~test.mask & QUAD}
            seeds |= near | {value | 1 << 32 for value in near}
    for seed in sorted(value & QUAD for value in seeds):
        yield [seed] * 6
        for index in range(6):
            yield [seed if each == index else 0 for each in range(6)]
            yield [seed if each == index else 1 for each in range(6)]


@each_row("machine", MACHINES)
def test_every_number_of_the_machine_gets_the_policys_answer(machine: str) -> None:
    table, architecture = GUEST_POLICY.table(machine), AUDIT_ARCHITECTURES[machine]
    for number in range(max(table) + 600):
        for arguments in ([0] * 6, [QUAD] * 6):
            expected = GUEST_POLICY.decide(machine, number, arguments) if number in table else SeccompAction.ENOSYS
            assert interpret(PROGRAMS[machine], architecture, number, arguments)[0] is expected, number


@pytest.mark.slow
@each_row("machine", MACHINES)
@each_row("call", [rule.call for rule in RULES])
def test_every_rule_gets_the_policys_answer_for_arguments_around_its_values(machine: str, call: str) -> None:
    number = SYSCALL_NUMBERS[machine].get(call)
    if number is None:
        return
    rule = GUEST_POLICY.table(machine)[number]
    narrow = SeccompPolicy((), (rule,), (), ()) if isinstance(rule, SyscallRule) else GUEST_POLICY
    for arguments in interesting(machine):
        expected = narrow.decide(machine, number, arguments)
        assert interpret(PROGRAMS[machine], AUDIT_ARCHITECTURES[machine], number, arguments)[0] is expected, arguments


@pytest.mark.slow
@given(number=st.integers(0, WORD), arguments=st.lists(st.integers(0, QUAD), min_size=6, max_size=6))
@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_and_no_arguments_make_filter_and_policy_differ(
    machine: str, number: int, arguments: list[int]
) -> None:
    answer, _ = interpret(PROGRAMS[machine], AUDIT_ARCHITECTURES[machine], number, arguments)
    assert answer is GUEST_POLICY.decide(machine, number, arguments)


@each_row("machine", MACHINES)
@each_row("architecture", [0x40000003, 0x40000028, 0xC000003E, 0xC00000B7, 0, 0xC00000F3])
def test_a_call_through_another_architecture_kills_the_process(machine: str, architecture: int) -> None:
    if architecture == AUDIT_ARCHITECTURES[machine]:
        return
    answers = {interpret(PROGRAMS[machine], architecture, number, [0] * 6)[0] for number in range(500)}
    assert answers == {SeccompAction.KILL}


def test_x32_numbers_look_absent() -> None:
    native = AUDIT_ARCHITECTURES["x86_64"]
    answers = {interpret(PROGRAMS["x86_64"], native, 0x40000000 | number, [0] * 6)[0] for number in range(600)}
    assert answers == {SeccompAction.ENOSYS}


@each_row("machine", MACHINES)
def test_the_filter_stays_short(machine: str) -> None:
    assert len(PROGRAMS[machine]) // 8 < 256
    table = GUEST_POLICY.table(machine)
    plain = [number for number, answer in table.items() if answer is SeccompAction.ALLOW]
    steps = [interpret(PROGRAMS[machine], AUDIT_ARCHITECTURES[machine], number, [0] * 6)[1] for number in plain]
    assert max(steps) <= 12


@pytest.mark.slow
def test_jumps_farther_than_a_byte_still_arrive() -> None:
    """A policy several times longer than the reach of one conditional jump."""
    choice = random.Random(7)
    calls = sorted(SYSCALL_NUMBERS["x86_64"])
    rules = tuple(
        SyscallRule(call, "long", tuple(Argument(i, tuple(choice.randrange(WORD) for _ in range(4))) for i in range(3)))
        for call in calls[::3]
    )
    policy = SeccompPolicy((Group("odd ones", tuple(calls[1::3])),), rules, (Group("rest", tuple(calls[2::3])),), ())
    program = compile_filter(policy, "x86_64")

    assert 1000 < len(program) // 8 < MAX_INSTRUCTIONS
    for number, answer in policy.table("x86_64").items():
        for _ in range(2):
            fits = (
                [choice.choice(test.values) for test in answer.arguments]
                if isinstance(answer, SyscallRule)
                else [0] * 3
            )
            for arguments in ([*fits, 0, 0, 0], [*fits[:2], fits[2] ^ 1, 0, 0, 0]):
                expected = policy.decide("x86_64", number, arguments)
                assert interpret(program, AUDIT_ARCHITECTURES["x86_64"], number, arguments)[0] is expected


def test_a_policy_that_does_not_fit_the_kernel_is_refused() -> None:
    tests = tuple(Argument(i, tuple(range(0, 2000, 2))) for i in range(6))
    rules = tuple(SyscallRule(call, "huge", tests[i:]) for i, call in enumerate(("read", "write", "open")))
    with pytest.raises(ValueError, match="filter too long"):
        compile_filter(SeccompPolicy(ALLOWED, rules, (), MISSING), "x86_64")
