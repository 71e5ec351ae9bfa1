"""The seccomp profile of containers equals the guest's own policy, except for one known group of calls."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell.sandbox.docker.hardening import (
    BESIDE_GUESTS,
    MACHINES,
    UNTIL_GUEST,
    UNTIL_GUEST_RULES,
    container_profile,
)
from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY, SeccompAction
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
PROFILE = container_profile()
EARLY = {*UNTIL_GUEST.calls, *BESIDE_GUESTS.calls}
EARLY_RULES = {rule.call: rule for rule in UNTIL_GUEST_RULES}
EPERM, ENOSYS = 1, 38
ERRORS = {EPERM: SeccompAction.EPERM, ENOSYS: SeccompAction.ENOSYS, 0: SeccompAction.SKIP}

GROUPS: dict[str, list[dict[str, Any]]] = {}
for row in PROFILE["syscalls"]:
    for call in row["names"]:
        GROUPS.setdefault(call, []).append(row)


def decide(call: str, arguments: tuple[int, ...]) -> SeccompAction:
    """Decide as libseccomp does: by any row of the call whose tests all hold, else by the default."""
    for row in GROUPS.get(call, []):
        tests = row.get("args", [])
        assert all(test["op"] == "SCMP_CMP_MASKED_EQ" for test in tests)
        if all(arguments[test["index"]] & test["value"] == test["valueTwo"] for test in tests):
            if row["action"] == "SCMP_ACT_ALLOW":
                return SeccompAction.ALLOW
            return ERRORS[row["errnoRet"]]
    return SeccompAction.EPERM


def interesting(call: str) -> list[tuple[int, ...]]:
    """Return arguments at and around every value in a rule of this call, in both halves of the word."""
    rules = [rule for rule in (*GUEST_POLICY.rules, *UNTIL_GUEST_RULES) if rule.call == call]
    values: list[set[int]] = [{0, 1, 1 << 32} for _ in range(6)]
    for rule in rules:
        for test in (*rule.arguments, *((rule.skipped,) if rule.skipped else ())):
            for value in test.values:
                values[test.index] |= {value, value + 1, value | 1 << 32, value | 1 << 31}
    used = sorted({test.index for rule in rules for test in rule.arguments})
    return [
        tuple(chosen[used.index(at)] if at in used else 0 for at in range(6))
        for chosen in itertools.islice(itertools.product(*(sorted(values[at]) for at in used)), 4000)
    ]


def test_the_profile_in_the_tree_is_the_one_generated() -> None:
    written = json.loads((ROOT / "sandbox_images" / "seccomp.json").read_text(encoding="utf-8"))

    assert written == PROFILE


@each_row("machine", MACHINES)
def test_every_call_gets_the_guests_answer_or_is_in_the_group_for_starting(machine: str) -> None:
    for call, number in SYSCALL_NUMBERS[machine].items():
        for arguments in interesting(call):
            guest, container = GUEST_POLICY.decide(machine, number, arguments), decide(call, arguments)
            rule = EARLY_RULES.get(call)
            early = call in EARLY or (
                rule is not None and all(arguments[test.index] & test.mask in test.values for test in rule.arguments)
            )
            assert container is (SeccompAction.ALLOW if early else guest), (call, arguments)


def test_the_default_refusal_is_eperm() -> None:
    assert (PROFILE["defaultAction"], PROFILE["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", EPERM)


def test_other_machines_numbers_are_not_accepted_beside_the_native_ones() -> None:
    assert [each["architecture"] for each in PROFILE["archMap"]] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    assert all(each["subArchitectures"] == [] for each in PROFILE["archMap"])
    assert "architectures" not in PROFILE


def test_no_call_is_both_allowed_whatever_its_arguments_and_restricted() -> None:
    for call, rows in GROUPS.items():
        free = [row for row in rows if "args" not in row]
        assert len(free) <= 1, call
        assert not free or len(rows) == 1, call


def test_the_calls_for_starting_reach_nothing_outside_the_container() -> None:
    never = {"ptrace", "mount", "unshare", "setns", "bpf", "keyctl", "io_uring_setup", "open_by_handle_at", "socket"}

    assert not never & EARLY
    assert "execve" in EARLY


def test_an_unknown_machine_has_no_profile() -> None:
    with pytest.raises(KeyError):
        container_profile(["pdp11"])
