"""Floods of messages, and messages that never end: PROMISES.md, "bridge"."""

from __future__ import annotations

import pytest

from escape.attack import ENDED_S, GROWTH_BYTES, IS_PROCESS, MIB, Victim, outside
from escape.prologues import BRIDGE, over_the_bridge

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q-b21", "T7")]

FLOOD_S = 0.5 if IS_PROCESS else 1.5
"""A flood goes through three processes more on its way out of a container, all of which share the machine."""

FLOODS = {
    "progress": "message(PROGRESS, None)",
    "logs of one character": "message(LOG, 2, 'x')",
    "results": "message(RESULT, None, [])",
    "empty pieces of a file": "message(PART, 'a', '', b'', False)",
    "problems": "message(PROBLEM, 'a', 0, 'p')",
    "cancels of a call long answered": "message(CANCEL, 1)",
    "whole files and results in turn": "message(PART, 'a', '', b'x' * 10_000, True) + message(RESULT, None, [])",
    "lists that are slow to decode": "message(PROGRESS, [[]] * 50_000)",
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_legal_messages_stops_neither_the_clock_nor_the_other_runs(kind: str, victim: Victim) -> None:
    """While one guest floods, a run of another guest ends as usual. The flood ends at its limit."""
    source = f"""{BRIDGE}
send(message(CALL, 1, "echo", {{"text": "x"}}, None))
receive()
if isolated:
    send(message(CALL, 2, "meet", {{"place": "flood", "count": 1}}, None))
    receive()
wave = {FLOODS[kind]}
wave *= max(1, 200_000 // len(wave))
while True:
    send(wave)
"""
    assert outside(source, bridge=True, may_fail=True).received_bytes >= MIB

    honest = """
call_tool("meet", {"place": "flood", "count": 2})
set_result([call_tool("echo", {"text": str(number)}) for number in range(5)][-1])
"""
    flooding, other = victim.run_together(
        [(source, {}), (honest, {})],
        limits_of=[{"wall_s": FLOOD_S, "output_flood_bytes": MIB}, {"wall_s": 60.0}],
    )
    assert (other.outcome, other.value) == ("ok", "4")
    assert flooding.outcome in ("timeout", "protocol_error", "output_limit", "call_limit", "host_work_limit", "killed")
    assert flooding.result.usage.wall_s < ENDED_S
    assert flooding.growth_bytes < GROWTH_BYTES
    victim.assert_healthy()


def test_calls_past_the_limit_whose_refusals_nobody_reads_do_not_outlive_done(victim: Victim) -> None:
    """More refusals than a socket holds, then Done. The host does not wait for a guest that never reads them."""
    source = over_the_bridge("""
for number in (1, 2, 3):
    send(message(CALL, number, "echo", {"text": "x"}, None))
    receive()
send(b"".join(message(CALL, number, "echo", {"text": "x"}, None) for number in range(4, 900)))
if isolated:
    time.sleep(0.3)
send(message(DONE, True, None))
stay()
""")
    assert len(outside(source, bridge=True).believed) > 800
    inside = victim.run(source, limits={"tool_calls": 3, "wall_s": 1.0})
    assert inside.outcome in ("ok", "timeout", "call_limit", "protocol_error")
    assert inside.result.usage.wall_s < ENDED_S
    victim.assert_healthy()


@pytest.mark.parametrize("then", ["done", "silence", "end"])
def test_answers_that_are_never_read_hold_neither_memory_nor_the_run(then: str, victim: Victim) -> None:
    last = {
        "done": "send(message(DONE, True, None))\nstay()",
        "silence": "stay()",
        "end": "bridge.close()\nos._exit(0)",
    }[then]
    source = f"""{BRIDGE}
send(b"".join(message(CALL, number, "big", {{"size": 1_000_000}}, None) for number in range(1, 100)))
if isolated:
    time.sleep(0.2)
{last}
"""
    assert len(outside(source, bridge=True).believed) >= 99
    inside = victim.run(source, limits={"wall_s": 0.6})
    assert inside.outcome in ("ok", "timeout", "killed")
    assert inside.growth_bytes < GROWTH_BYTES
    victim.assert_healthy()


HOARDS = {
    "arguments of calls": "message(CALL, number, 'no_such_tool', {'text': 'x' * 4_000_000}, None)",
    "names of tools": "message(CALL, number, 'x' * 4_000_000, {}, None)",
    "names of files": "message(PART, f'{number}' + 'x' * 4_000_000, '', b'', True)",
    "media types": "message(PART, f'{number}', 'x' * 4_000_000, b'', True)",
    "problems with files": "message(PROBLEM, f'{number}', 0, 'x' * 4_000_000)",
    "names of problems": "message(PROBLEM, f'{number}' + 'x' * 4_000_000, 0, '')",
    "pieces voided by results": "message(PART, 'a', '', b'x' * 4_000_000, False) + message(RESULT, None, [])",
    "files voided by results": "message(PART, f'{number}', '', b'x' * 4_000_000, True) + message(RESULT, None, [])",
    "names that results announce": "message(RESULT, None, ['x' * 1_000_000] * 4)",
    "logs": "message(LOG, 1, 'x' * 4_000_000)",
}


@pytest.mark.parametrize("kind", HOARDS)
def test_nothing_a_guest_can_say_makes_the_host_hold_much(kind: str, victim: Victim) -> None:
    """40 messages of up to 4 MB each, of every kind from which the host keeps something."""
    source = f"""{BRIDGE}
for number in range(1, 41):
    send({HOARDS[kind]})
send(message(DONE, True, None))
stay()
"""
    assert outside(source, bridge=True, may_fail=True).received_bytes >= MIB
    inside = victim.run(source, limits={"wall_s": 2, "memory_bytes": 256 * MIB})
    assert inside.result.usage.wall_s < ENDED_S
    assert inside.growth_bytes < GROWTH_BYTES
    kept = sum(len(file.name) + len(file.media_type) + len(file.problem or "") for file in inside.result.files)
    assert kept < MIB
    victim.assert_healthy()


def test_findings_and_fields_of_a_claimed_error_are_cut(victim: Victim) -> None:
    source = over_the_bridge("""
big = "x" * 1_500_000
send(message(DONE, False, {"type": big, "message": big, "traceback": big, "findings": [{"message": big}], "line": -1,
                           "column": 1 << 63, "exit_code": "0", "extra": big}))
stay()
""")
    assert outside(source, bridge=True, may_fail=True).received_bytes > MIB
    inside = victim.run(source)
    assert inside.outcome in ("error", "protocol_error")
    assert inside.result.error is not None
    assert len(repr(inside.result.error)) < 150_000


def test_a_hundred_bad_runs_leave_the_host_as_it_was(victim: Victim) -> None:
    """Many sandboxes break the protocol, die or hang up. Afterwards the host has as many of everything as before."""
    noise = BRIDGE + "send(b'\\xff' * 100)\nstay()"
    assert outside(noise, bridge=True).received_bytes == 100
    victim.assert_healthy()
    for _ in range(5):
        inside = victim.run_together(
            [(noise, {}), ("import os\nos._exit(9)", {}), (BRIDGE + "bridge.close()\nos.close(3)\nstay()", {})] * 3,
            limits={"wall_s": 0.3},
        )
        assert {str(each.outcome) for each in inside} <= {"protocol_error", "killed", "timeout"}
    victim.assert_healthy()
