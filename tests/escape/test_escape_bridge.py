"""Hostile bytes on the bridge: SECURITY.md, "bridge".

Each attack is first believed by an unsuspecting host at the other end of a socket. The last message before the bytes
is always honest, so that what is refused is the attack and not the guest's position in the conversation.
"""

from __future__ import annotations

import pytest

from escape.attack import MIB, Victim, outside, process_only
from escape.prologues import BASICS, BRIDGE

pytestmark = [pytest.mark.isolation, pytest.mark.conforms("Q-b5", "Q-b21", "T7")]

BRIDGE_IS_A_SOCKET = process_only("no descriptor can be sent along the two pipes of a container's bridge", "forked")

ILLEGAL = {
    "text": "b'HTTP/1.1 200 OK\\r\\n\\r\\n' * 100",
    "noise": "random.Random(1).randbytes(100_000)",
    "length 0": "raw(b'')",
    "length of all ones": "b'\\xff' * 8",
    "length just over the limit": "struct.pack('>I', (8 << 20) + 1)",
    "length of 2 GiB": "struct.pack('>I', 1 << 31)",
    "no array": "raw(msgpack.packb({'value': 1}))",
    "empty array": "raw(b'\\x90')",
    "unknown tag": "message(99, None)",
    "tag of the host": "message(3, 1, 'answer')",
    "tag that is no int": "message('21', None, [])",
    "tag that is a bool": "message(True, None)",
    "too few fields": "message(RESULT, None)",
    "too many fields": "message(RESULT, None, [], None)",
    "two messages in a frame": "raw(msgpack.packb([RESULT, 1, []]) * 2)",
    "half a message in a frame": "raw(msgpack.packb([RESULT, 'x' * 100, []])[:50])",
    "files that are no list": "message(RESULT, None, 'file')",
    "files that are no names": "message(RESULT, None, [1])",
    "call of a number": "message(CALL, 1, 5, {}, None)",
    "call with a list of arguments": "message(CALL, 1, 'touch', ['forged'], None)",
    "call with number keys": "raw(msgpack.packb([CALL, 1, 'touch', {1: 'forged'}, None]))",
    "call with bytes keys": "raw(msgpack.packb([CALL, 1, 'touch', {b'tag': 'forged'}, None]))",
    "call id 0": "message(CALL, 0, 'touch', {'tag': 'forged'}, None)",
    "call id below 0": "message(CALL, -1, 'touch', {'tag': 'forged'}, None)",
    "call id that is a float": "message(CALL, 1.0, 'touch', {'tag': 'forged'}, None)",
    "call id beyond 64 bit": "raw(bytes.fromhex('9511') + b'\\xcf' + b'\\xff' * 8 + msgpack.packb('touch') + b'\\x80\\xc0' + b'\\xc0')",
    "cancel of a call that never was": "message(CANCEL, 5)",
    "log to a third stream": "message(LOG, 3, 'x')",
    "log to stream 0": "message(LOG, 0, 'x')",
    "log that is bytes": "message(LOG, 1, b'x')",
    "log that is not UTF-8": "raw(b'\\x93\\x13\\x01\\xa2\\xff\\xfe')",
    "log with a surrogate": "raw(b'\\x93\\x13\\x01\\xa3\\xed\\xa0\\x80')",
    "extension type": "raw(msgpack.packb([RESULT, msgpack.ExtType(5, b'x'), []]))",
    "timestamp": "raw(msgpack.packb([RESULT, msgpack.Timestamp(1, 1), []]))",
    "long extension type": "raw(msgpack.packb([RESULT, ['x' * 1000, msgpack.ExtType(5, b'x' * 1000)], []]))",
    "reserved byte": "raw(b'\\x93\\x15\\xc1\\x90')",
    "depth 65": "raw(b'\\x93\\x15' + b'\\x91' * 65 + b'\\xc0' + b'\\x90')",
    "depth 100000": "raw(b'\\x93\\x15' + b'\\x91' * 100_000 + b'\\xc0' + b'\\x90')",
    "depth of maps": "raw(b'\\x93\\x15' + b'\\x81\\xa1k' * 3000 + b'\\xc0' + b'\\x90')",
    "list that announces 4 billion": "raw(b'\\x93\\x15\\xdd\\xff\\xff\\xff\\xff' + b'\\xc0' * 600)",
    "map that announces 4 billion": "raw(b'\\x93\\x15\\xdf\\xff\\xff\\xff\\xff' + b'\\xc0' * 600)",
    "short list that announces millions": "raw(b'\\x93\\x15\\xdd\\x00\\x7f\\xff\\xff')",
    "text that announces 4 billion": "raw(b'\\x93\\x15\\xdb\\xff\\xff\\xff\\xff' + b'x' * 600)",
    "two million elements": "raw(msgpack.packb([RESULT, [None] * (2 << 20), []]))",
    "a million empty lists, twice": "raw(msgpack.packb([RESULT, [[]] * (1 << 20), []]))",
    "progress with a million maps": "raw(msgpack.packb([PROGRESS, [{}] * (1 << 20)]))",
    "second hello": "message(16, 1, '9', '3', {'moat': 'live'})",
    "piece of one file in another": "message(PART, 'a', '', b'1', False) + message(PART, 'b', '', b'2', True)",
    "problem of one file in another": "message(PART, 'a', '', b'1', False) + message(PROBLEM, 'b', 1, 'x')",
    "done with a number": "message(DONE, 1, None)",
    "done with a list": "message(DONE, False, ['x'])",
}  # fmt: skip


@pytest.mark.parametrize("kind", ILLEGAL)
def test_illegal_bytes_end_the_run_as_a_protocol_error(kind: str, victim: Victim) -> None:
    source = (
        BRIDGE
        + f"""
import random
send(message(PROGRESS, "honest"))
send({ILLEGAL[kind]})
attempt(send, message(CALL, 7, "touch", {{"tag": "forged"}}, None) + message(RESULT, "forged", []) + message(DONE, True, None))
stay()
"""
    )
    plain = outside(source, bridge=True)
    assert plain.believed[0] == [20, "honest"]
    assert plain.received_bytes > 20

    inside = victim.run(source, limits={"wall_s": 10})
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
    source = (
        BRIDGE
        + f"""
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
    )
    assert outside(source, bridge=True).received_bytes > 22
    inside = victim.run(source)
    # Either what came first counts and the rest was never read, or the whole run is void.
    assert inside.outcome in ("ok", "protocol_error")
    assert inside.result.value in ("earned", None)
    assert (inside.result.files, inside.result.logs.text, inside.effects) == ((), "", [])
    assert inside.result.calls == ()
    victim.assert_healthy()


def test_a_thread_that_goes_on_after_the_script_calls_no_tool(victim: Victim) -> None:
    source = (
        BASICS
        + """
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
"""
    )
    assert outside(source).value
    inside = victim.run(source, limits={"tool_calls": 100_000})
    assert inside.outcome == "ok"
    assert len(inside.effects) <= len(inside.result.calls) <= len(inside.effects) + 20
    victim.assert_healthy()


def test_a_done_nobody_earned_proves_no_more_than_a_script_that_ended(victim: Victim) -> None:
    """The guest owns its word on how its code ended, and nothing else: no call, file or limit of it is believed."""
    source = (
        BRIDGE
        + """
send(message(CALL, 1, "touch", {"tag": "real"}, 10**9))
receive()
send(message(RESULT, {"calls": 99, "outcome": "ok", "cgroup": "live"}, ["no-such-file"]) + message(DONE, True, {"type": "x"}))
stay()
"""
    )
    assert outside(source, bridge=True).believed[-1][0] == 24
    inside = victim.run(source)
    assert inside.outcome == "ok"
    assert [(call.name, call.status) for call in inside.result.calls] == [("touch", "ok")]
    assert inside.effects == ["real"]
    assert inside.result.files == ()
    assert inside.result.usage.calls == 1


@pytest.mark.parametrize("claim", ["denied", "timeout", "MemoryLimit", "cancelled"])
def test_an_outcome_that_only_the_host_can_see_cannot_be_claimed(claim: str, victim: Victim) -> None:
    source = (
        BRIDGE
        + f"""
send(message(CALL, 1, "touch", {{"tag": "done before"}}, None))
receive()
claim = {{"type": {claim!r}, "message": "refused before it ran", "denied": True, "limit": "wall_s", "limit_value": 1.0,
         "used": 9.0, "signal": 9, "outcome": {claim!r}, "findings": [{{"line": 1, "message": "x" * 1000}}] * 1000}}
send(message(DONE, False, claim))
stay()
"""
    )
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
    source = (
        BRIDGE
        + """
for number in (1, 2, 3):
    send(message(CALL, number, "touch", {"tag": f"call {number}"}, None))
    receive()
send(message(CALL, replayed, "touch", {"tag": "replayed"}, None))
stay()
"""
    )
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
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_conversation_broken_off_anywhere_ends_the_run(kind: str, victim: Victim) -> None:
    source = BRIDGE + f"send(message(PROGRESS, 'honest'))\n{ENDINGS[kind]}"
    assert outside(source, bridge=True).believed[0] == [20, "honest"]
    inside = victim.run(source, limits={"wall_s": 0.4})
    assert inside.outcome in ("killed", "timeout", "protocol_error")
    assert inside.outcome != "ok"
    victim.assert_healthy()


@BRIDGE_IS_A_SOCKET
def test_descriptors_sent_along_are_not_taken(victim: Victim) -> None:
    """SCM_RIGHTS with honest messages: the host's table of descriptors stays as it was."""
    source = (
        BRIDGE
        + """
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
for number in range(20):
    socket.send_fds(bridge, [message(PROGRESS, number)], held)
    send(message(CALL, number + 1, "echo", {"text": "x"}, None))
    receive()
send(message(RESULT, "sent", []) + message(DONE, True, None))
stay()
"""
    )
    assert len(outside(source, bridge=True).believed) == 42
    inside = victim.run(source)
    assert (inside.outcome, inside.value) == ("ok", "sent")
    victim.assert_healthy()


@BRIDGE_IS_A_SOCKET
def test_a_descriptor_of_the_bridge_itself_in_flight_holds_nothing_open(victim: Victim) -> None:
    """A socket queued inside itself has no owner left but the kernel's collector."""
    source = (
        BRIDGE
        + """
left, right = socket.socketpair()
for each in (left, right, bridge):
    socket.send_fds(left, [b"x"], [each.fileno(), right.fileno(), bridge_descriptor()])
socket.send_fds(bridge, [message(RESULT, "knot", [])], [left.fileno(), right.fileno(), bridge.fileno()])
send(message(DONE, True, None))
stay()
"""
    )
    assert [21, "knot", []] in outside(source, bridge=True).believed
    for _ in range(5):
        assert victim.run(source).value == "knot"
    victim.assert_healthy()
