"""Hostile bytes on the bridge: PROMISES.md, "bridge".

Each attack is first believed by an unsuspecting host at the other end of a socket. The last message before the bytes
is always honest, so that what is refused is the attack and not the guest's position in the conversation.
"""

from __future__ import annotations

import pytest

from escape.attack import MIB, Victim, outside, process_only
from escape.prologues import BRIDGE, basics, over_the_bridge
from hostile.illegal_frames import FORGED, HONEST, ILLEGAL, ONE_OF_EACH

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q-b5", "Q-b21", "T7")]

BRIDGE_IS_A_SOCKET = process_only("no descriptor can be sent along the two pipes of a container's bridge")


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_illegal_bytes_end_the_run_as_a_protocol_error(kind: str, victim: Victim) -> None:
    """The whole table is walked without a sandbox in `tests/hostile/test_illegal_frames.py`."""
    source = f"""{BRIDGE}
send(bytes.fromhex(honest))
send(bytes.fromhex(illegal))
attempt(send, bytes.fromhex(forged))
stay()
"""
    sent = {"honest": HONEST.hex(), "illegal": ILLEGAL[kind].hex(), "forged": FORGED.hex()}
    plain = outside(source, bridge=True, **sent)
    assert plain.believed[0] == [20, "honest"]
    assert plain.received_bytes > 20

    inside = victim.run(source, limits={"wall_s": 10}, **sent)
    assert inside.outcome == "protocol_error"
    assert (inside.result.has_value, inside.result.calls, inside.effects) == (False, (), [])
    assert inside.growth_bytes < 200 * MIB
    victim.assert_healthy()


LATE = {
    "a call": "message(CALL, 1, 'touch', {'tag': 'forged'}, None)",
    "a result": "message(RESULT, 'forged', [])",
    "a second done": "message(DONE, False, {'type': 'Forged', 'message': 'm'})",
    "a file": "message(PART, 'forged', '', b'x', True)",
    "a log": "message(LOG, 1, 'forged')",
    "noise": "b'\\xff' * 5000",
    "everything at once": "(message(LOG, 1, 'forged') + message(CALL, 1, 'touch', {'tag': 'forged'}, None)) * 50",
}


@pytest.mark.parametrize("gap", ["in one write", "after a while"])
@pytest.mark.parametrize("kind", LATE)
def test_nothing_after_done_has_any_effect(kind: str, gap: str, victim: Victim) -> None:
    pause = "time.sleep(0.02)" if gap == "after a while" else ""
    source = f"""{BRIDGE}
first = message(RESULT, "earned", []) + message(DONE, True, None)
late = {LATE[kind]}
if {gap!r} == "in one write":
    send(first + late)
else:
    send(first)
    {pause}
    attempt(send, late)
stay()
"""
    assert outside(source, bridge=True).received_bytes > 22
    inside = victim.run(source)
    # Either what came first counts and the rest was never read, or the whole run is void.
    assert inside.outcome in ("ok", "protocol_error")
    assert inside.result.value in ("earned", None)
    assert (inside.result.files, inside.result.logs.text, inside.effects) == ((), "", [])
    assert inside.result.calls == ()
    victim.assert_healthy()


def test_a_thread_that_goes_on_after_the_script_calls_no_tool(victim: Victim) -> None:
    source = basics("""
import threading, time
def later():
    while True:
        if isolated:
            attempt(call_tool, "touch", {"tag": "late"})
        else:
            open("late", "w").close()
            time.sleep(0.01)
for _ in range(4):
    threading.Thread(target=later, daemon=True).start()
time.sleep(0.05)
set_result(True if isolated else os.path.exists("late"))
""")
    assert outside(source).value
    inside = victim.run(source, limits={"tool_calls": 100_000})
    assert inside.outcome == "ok"
    assert len(inside.effects) <= len(inside.result.calls) <= len(inside.effects) + 20
    victim.assert_healthy()


def test_a_done_nobody_earned_proves_no_more_than_a_script_that_ended(victim: Victim) -> None:
    """The host believes what the guest says about the end of its code, but nothing about calls, files or limits."""
    source = over_the_bridge("""
send(message(CALL, 1, "touch", {"tag": "real"}, 10**9))
receive()
send(message(RESULT, {"calls": 99, "outcome": "ok", "cgroup": "live"}, ["no-such-file"]) + message(DONE, True, {"type": "x"}))
stay()
""")
    assert outside(source, bridge=True).believed[-1][0] == 24
    inside = victim.run(source)
    assert inside.outcome == "ok"
    assert [(call.name, call.status) for call in inside.result.calls] == [("touch", "ok")]
    assert inside.effects == ["real"]
    assert inside.result.files == ()
    assert inside.result.usage.calls == 1


@pytest.mark.parametrize("claim", ["denied", "timeout", "MemoryLimit", "cancelled"])
def test_an_outcome_that_only_the_host_can_see_cannot_be_claimed(claim: str, victim: Victim) -> None:
    source = f"""{BRIDGE}
send(message(CALL, 1, "touch", {{"tag": "done before"}}, None))
receive()
claim = {{"type": {claim!r}, "message": "refused before it ran", "denied": True, "limit": "wall_s", "limit_value": 1.0,
         "used": 9.0, "signal": 9, "outcome": {claim!r}, "findings": [{{"line": 1, "message": "x" * 1000}}] * 1000}}
send(message(DONE, False, claim))
stay()
"""
    assert outside(source, bridge=True).believed[-1][2]["denied"] is True
    inside = victim.run(source)
    assert inside.effects == ["done before"]
    assert inside.outcome in ("error", "protocol_error")
    error = inside.result.error
    assert error is not None
    assert (error.limit, error.limit_value, error.used, error.signal) == (None, None, None, None)
    assert len(str(error.findings)) < 100_000


def test_a_result_larger_than_the_limit_is_not_taken_from_a_patched_guest(victim: Victim) -> None:
    source = BRIDGE + "send(message(RESULT, 'x' * 100_000, []) + message(DONE, True, None))\nstay()"
    assert outside(source, bridge=True).believed[0][1] == "x" * 100_000
    inside = victim.run(source, limits={"result_bytes": 10_000})
    assert inside.outcome != "ok"
    assert not inside.result.has_value


def test_call_ids_must_increase_and_no_answer_is_given_twice(victim: Victim) -> None:
    source = over_the_bridge("""
for number in (1, 2, 3):
    send(message(CALL, number, "touch", {"tag": f"call {number}"}, None))
    receive()
send(message(CALL, replayed, "touch", {"tag": "replayed"}, None))
stay()
""")
    for replayed in (1, 2, 3):
        assert len(outside(source, bridge=True, replayed=replayed).believed) == 4
        inside = victim.run(source, replayed=replayed)
        assert inside.outcome == "protocol_error"
        assert inside.effects == ["call 1", "call 2", "call 3"]


ENDINGS = {
    "closed": "bridge.close(); [attempt(os.close, each) for each in range(3, 100)]; time.sleep(600 if isolated else 0)",
    "shut for writing": "bridge.shutdown(socket.SHUT_WR); time.sleep(600 if isolated else 0)",
    "shut for reading": "bridge.shutdown(socket.SHUT_RD); send(message(CALL, 1, 'big', {'size': 10**6}, None)); stay()",
    "shut both ways": "bridge.shutdown(socket.SHUT_RDWR); time.sleep(600 if isolated else 0)",
    "half a length": "send(b'\\x00\\x00'); stay()",
    "half a length and the end": "send(b'\\x00\\x00'); bridge.shutdown(socket.SHUT_WR); stay()",
    "half a frame": "send(raw(b'x' * 5000)[:3000]); stay()",
    "half a frame and the end": "send(raw(b'x' * 5000)[:3000]); bridge.shutdown(socket.SHUT_WR); stay()",
    "a trickle": "[(send(bytes([each])), time.sleep(0.002)) for each in message(RESULT, 'slow', [])]; stay()",
    "a trickle of a long frame": "send(struct.pack('>I', 8 << 20)); [(send(b'x'), time.sleep(0.01)) for _ in range(200 if isolated else 3)]",
    "silence": "stay()",
    "another's bytes": "os.dup2(os.open('/dev/zero', os.O_RDONLY), bridge_descriptor()); stay()",
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_conversation_broken_off_anywhere_ends_the_run(kind: str, victim: Victim) -> None:
    source = BRIDGE + f"send(message(PROGRESS, 'honest'))\n{ENDINGS[kind]}"
    assert outside(source, bridge=True).believed[0] == [20, "honest"]
    inside = victim.run(source, limits={"wall_s": 0.4})
    assert inside.outcome in ("killed", "timeout", "protocol_error")
    assert inside.outcome != "ok"
    victim.assert_healthy()


@BRIDGE_IS_A_SOCKET
def test_descriptors_cannot_be_sent_along(victim: Victim) -> None:
    """SCM_RIGHTS with valid messages, to the host and to itself. A socket in flight inside itself has no owner."""
    source = f"""{BRIDGE}
import _socket, array
left, right = socket.socketpair()
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
def pass_on(through, data, descriptors):
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return attempt(_socket.socket.sendmsg, through, [data], [rights])
told = [pass_on(bridge, message(PROGRESS, number), held) for number in range(20)]
told += [pass_on(left, b"x", [left.fileno(), right.fileno(), bridge.fileno()])]
send(message(RESULT, sorted(set(told)), []) + message(DONE, True, None))
stay()
"""
    assert [21, ["ok"], []] in outside(source, bridge=True).believed
    inside = victim.run(source)
    assert (inside.outcome, inside.value) == ("ok", ["EPERM"])
    victim.assert_healthy()
