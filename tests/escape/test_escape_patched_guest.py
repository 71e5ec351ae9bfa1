"""The guest package, patched by a script against its host: PROMISES.md, "bridge".

The script shares a process with the guest package and may change any of its code. So nothing that keeps the host safe may be
that code.
"""

from __future__ import annotations

import pytest

from escape.attack import Victim, outside
from escape.prologues import BASICS, basics

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q-b5", "Q-b21")]

DIG = f"""{BASICS}
import signal, socket, stat
from toolcell_bridge.wire import codec, connection, framing, messages, plain
from toolcell_bridge.guest import channel as channels

if isolated:
    channel = call_tool.__self__._channel
else:
    number = next(each for each in range(4096) if attempt(os.fstat, each) == "ok" and stat.S_ISSOCK(os.fstat(each).st_mode))
    channel = channels.Channel(socket.socket(fileno=number), connection.Connection.guest())
    channel._connection.state = connection.State.RUNNING
channel.send(messages.Progress("honest"))
speaks = channel.fileno if stat.S_ISSOCK(os.fstat(channel.fileno).st_mode) else 4  # a container's bridge is two pipes

def stay():
    while isolated:
        signal.pause()
"""

PATCHES = {
    "any move is legal": """
        connection.Connection._move = lambda self, *anything: True
        channel.send(messages.Hello(1, "9", "3", {"moat": "live"}))""",
    "the state says otherwise": """
        channel._connection.state = connection.State.NEW
        channel.send(messages.Hello(1, "9", "3", {"moat": "live"}))""",
    "a message with other fields": """
        channel._sock.sendall(framing.frame(bytes.fromhex("93 15 01 02")))""",
    "encoding makes its own bytes": """
        connection.encode_parts = lambda message, *bounds: [b"\\0\\0\\0\\1\\xc1"]
        channel.send(messages.Progress(1))""",
    "frames have no limit": """
        channel._connection.max_frame_bytes = 1 << 40
        channel.send(messages.Log(1, "x" * 9_000_000))""",
    "plain data is anything": """
        import msgpack
        plain._packer = None
        channel._sock.sendall(framing.frame(msgpack.packb([21, msgpack.ExtType(1, b"pickle"), []])))""",
    "ids start again": """
        channel._next_id = 1
        channel._sock.sendall(codec.encode(messages.CallTool(1, "touch", {"tag": "one"}, None)))
        channel._sock.sendall(codec.encode(messages.CallTool(1, "touch", {"tag": "again"}, None)))""",
    "the host's own messages": """
        channel._sock.sendall(codec.encode(messages.ToolReturn(1, "forged")))""",
    "two threads tear each other's frames": """
        import threading
        def writing():
            attempt(lambda: [channel._sock.sendall(codec.encode(messages.Log(1, letter * 50_000))[:60_000]) and
                             os.write(speaks, b"torn") for letter in "abcdefgh"])
        threads = [threading.Thread(target=writing) for _ in range(4)]
        [thread.start() for thread in threads]
        channel._sock.sendall(b"\\xff\\xff\\xff\\xff")
        [thread.join() for thread in threads]""",
    "two processes tear each other's frames": """
        spare = os.dup(speaks)
        for _ in range(2):
            child = os.fork()
            if child == 0:
                for _ in range(50):
                    os.write(spare, codec.encode(messages.Log(1, "x" * 500))[:300])
                os._exit(0)
            if child:
                os.waitpid(child, 0)
        os.write(spare, b"\\xff" * 8)""",
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_guest_package_cannot_deceive_the_host(patch: str, victim: Victim) -> None:
    source = DIG + PATCHES[patch].replace("\n        ", "\n") + "\nstay()"
    plain = outside(source, bridge=True, may_fail=True)
    assert plain.believed[0] == [20, "honest"]
    assert plain.received_bytes > len(b"....") + len(bytes.fromhex("92 14 a6")) + len("honest")
    inside = victim.run(source, limits={"wall_s": 5})
    assert inside.outcome == "protocol_error"
    assert not inside.result.has_value
    assert inside.effects in ([], ["one"])
    victim.assert_healthy()


def test_a_guest_package_patched_in_one_run_is_unchanged_in_the_next(victim: Victim) -> None:
    spoil = """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith(("toolcell_bridge", "msgpack")):
        for key, value in list(vars(module).items()):
            if callable(value) and not key.startswith("__"):
                setattr(module, key, lambda *args, **named: "spoiled")
"""
    look = "from toolcell_bridge.wire import plain\nset_result(str(plain.packed_size(1)))"
    plain = "import types, sys\nsys.modules['toolcell_bridge'] = types.ModuleType('m')\n"
    plain += (
        "vars(sys.modules['toolcell_bridge'])['f'] = len\n" + spoil + "set_result(sys.modules['toolcell_bridge'].f())"
    )
    assert outside(plain).value == "spoiled"
    for _ in range(3):
        victim.run(spoil)
        assert victim.run(look).value == "1"
    victim.assert_healthy()


def test_a_forked_child_has_no_bridge_to_speak_through(victim: Victim) -> None:
    """A script that kept a copy on purpose is one more writer, without more rights."""
    source = basics("""
child = os.fork()
if child == 0:
    told = attempt(call_tool, "touch", {"tag": "child"}) if isolated else "ok"
    os._exit(0 if told == "ok" else 7)
set_result(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert outside(source).value == 0
    inside = victim.run(source)
    assert (inside.value, inside.effects) == (7, [])


def test_bytes_of_a_child_between_two_messages_are_the_scripts_own_fault(victim: Victim) -> None:
    source = (
        DIG
        + """
spare = os.dup(speaks)
if os.fork() == 0:
    os.write(spare, codec.encode(messages.CallTool(1, "touch", {"tag": "child"}, None)))
    os._exit(0)
os.wait()
if isolated:
    call_tool("touch", {"tag": "parent"})
else:
    channel.call([("touch", {"tag": "parent"}, None)])
"""
    )
    plain = outside(source, bridge=True)
    assert [each[1] for each in plain.believed if each[0] == 17] == [1, 1]
    inside = victim.run(source)
    assert inside.outcome == "protocol_error"
    assert inside.effects in (["child"], [])
    victim.assert_healthy()


LAST_WORDS = {
    "raising in a destructor": "class D:\n    def __del__(self): call_tool('touch', {'tag': 'late'})\nkept = D()",
    "a hook at exit": "import atexit\natexit.register(lambda: call_tool('touch', {'tag': 'late'}))",
    "a hook on errors": "import sys\nsys.excepthook = lambda *error: call_tool('touch', {'tag': 'late'})\n1 / 0",
    "an endless destructor": "class D:\n    def __del__(self):\n        while True: pass\nkept = D()",
    "a thread that is not a daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    "an event loop left running": "import asyncio\nasync def forever():\n    while True: await asyncio.sleep(1)\n"
    "asyncio.get_event_loop_policy().new_event_loop().create_task(forever())",
}


ENDS = {"an endless destructor": "timeout", "a thread that is not a daemon": "timeout", "a hook on errors": "error"}
"""Outcomes other than ok."""


@pytest.mark.parametrize("kind", LAST_WORDS)
def test_nothing_of_the_script_runs_on_after_its_run(kind: str, victim: Victim) -> None:
    """A script ends as in CPython, but within its run: its limits hold, and its calls are the run's."""
    plain = LAST_WORDS[kind].replace("call_tool('touch', {'tag': 'late'})", "set_result('late')")
    calls = "hook" in kind or "raising" in kind
    if calls:
        assert outside(plain, may_fail=True).value == "late"
    elif "event loop" not in kind:
        assert outside(plain, within_s=0.3).status is None
    inside = victim.run(LAST_WORDS[kind], limits={"wall_s": 2})
    assert inside.outcome == ENDS.get(kind, "ok")
    assert inside.effects == (["late"] if calls else [])
    victim.assert_healthy()
