"""`ForkedGuest` over a socket of the test: what it sends when, and whether it rehearses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolcell_bridge.guest import rehearsal
from toolcell_bridge.guest.runner import new_main
from toolcell_bridge.guest.script_end import ScriptFinalizer
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import Done, Hello, Log, Message, Result, RunScript

GUEST = """
import socket, sys
from toolcell_bridge.entry import forked_guest
bridge = socket.socket(fileno=int(sys.argv[1]))
guest = forked_guest.ForkedGuest(bridge, 1 << 20)
forked_guest.SCRIPT_WITHIN_MS = int(sys.argv[2])
rehearse = guest._rehearsal.run
def run():
    rehearse()
    open(sys.argv[3], "a").write("rehearsed ")
guest._rehearsal.run = run
guest.pack_hello({})
guest.serve(sys.argv[4])
"""


@pytest.fixture
def exchange(tmp_path: Path) -> Callable[[int], tuple[list[Message], str]]:
    """Run a script in a guest that waits for it for so many milliseconds; return its messages, and what it rehearsed."""

    def exchanged(within_ms: int) -> tuple[list[Message], str]:
        ours, theirs = socket.socketpair()
        note = tmp_path / "note"
        note.touch()
        with theirs:
            arguments = [str(theirs.fileno()), str(within_ms), str(note), str(tmp_path)]
            guest = subprocess.Popen([sys.executable, "-c", GUEST, *arguments], pass_fds=[theirs.fileno()])
        host, messages = Connection.host(max_frame_bytes=1 << 20), list[Message]()
        with ours, guest:
            while not messages or not isinstance(messages[-1], Done):
                if (message := host.next_message()) is None:
                    data = ours.recv(1 << 16)
                    assert data, "the guest hung up"
                    host.receive_data(data)
                    continue
                messages.append(message)
                if isinstance(message, Hello):
                    if not within_ms:
                        while not note.read_text():
                            os.sched_yield()
                    script = "print('printed')\nset_result(1)"
                    ours.sendall(host.send(RunScript(1, script, {}, "", "off", 1 << 20, 8, 1 << 20, None, None)))
            ours.close()
        return messages, note.read_text()

    return exchanged


@pytest.mark.parametrize(("waits_ms", "shown"), [(60_000, ""), (0, "rehearsed ")], ids=["a script waits", "none waits"])
def test_a_sandbox_rehearses_after_hello_if_no_script_waits_and_leaves_nothing_of_it(
    exchange: Callable[[int], tuple[list[Message], str]], waits_ms: int, shown: str
) -> None:
    messages, rehearsed = exchange(waits_ms)

    assert "".join(each.text for each in messages if isinstance(each, Log)) == "printed\n"
    assert any(isinstance(each, Result) for each in messages)
    assert rehearsed == shown


def test_a_rehearsal_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(rehearsal, "SCRIPT", "1 / 0")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        rehearsal.Rehearsal(1 << 20).run()


def test_the_end_of_a_script_that_is_rehearsed_ends_no_threads_of_its_process() -> None:
    is_over = threading.Event()
    threading.Thread(target=is_over.wait, daemon=True).start()
    try:
        ScriptFinalizer("/work").run(new_main, (), lambda _names: None)
        with ThreadPoolExecutor(1) as pool:  # none can be made after the interpreter's own end has begun
            assert pool.submit(int).result() == 0
    finally:
        is_over.set()


def test_a_zygote_imports_neither_dataclasses_nor_inspect() -> None:
    """They take a seventh of the time of its imports. Scripts have them loaded ahead, or import them."""
    program = (
        "import sys, toolcell_bridge.entry.zygote\nprint([n for n in ('dataclasses', 'inspect') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
