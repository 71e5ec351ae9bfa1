"""A dummy run before the first real one, against a host made of memory.

A forked child shares its pages with the zygote until it writes to them, and the first run writes to hundreds: about
a millisecond of page faults (measured, nested virtualisation). The rehearsal moves them to before the sandbox is
ready. It leaves nothing behind but copied pages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from toolcell_bridge.guest import output
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, CallTool, Hello, RunScript, ToolReturn

if TYPE_CHECKING:
    import socket

SCRIPT = """\
rows = call_tool("echo", {"q": 1, "rows": rows})
kept = [row for row in rows if row]
print("kept", len(kept))
try:
    kept[9]
except IndexError as error:
    text = f"{error!r:>8}"
set_result({"kept": kept, "text": text})
"""


class _Echo:
    """The host's end and the socket in one: every call is answered with its arguments."""

    def __init__(self, frame_bytes: int) -> None:
        self._host = Connection.host(max_frame_bytes=frame_bytes)
        self._answers = bytearray()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._answers.clear()

    def ask(self, run: RunScript) -> None:
        self._answers += self._host.send(run)

    def sendall(self, data: bytes) -> None:
        self._host.receive_data(data)
        while (message := self._host.next_message()) is not None:
            if isinstance(message, CallTool):
                self._answers += self._host.send(ToolReturn(message.id, [message.args, None, "text", 0.5]))

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = bytes(self._answers[:size])
        del self._answers[:size]
        return data


class Rehearsal:
    """A guest and a host in one process, to be run any number of times."""

    def __init__(self, frame_bytes: int) -> None:
        self._echo = _Echo(frame_bytes)
        connection = Connection.guest(max_frame_bytes=frame_bytes)
        self._channel = Channel(cast("socket.socket", self._echo), connection)
        self._runner = Runner(self._channel, "/work")
        self._channel.send(Hello(PROTOCOL_VERSION, "rehearsal", "", {}))

    def run(self) -> None:
        """Run `SCRIPT` once through every layer of the guest; sys.stdout and sys.stderr are left pointing here.

        Raises:
            RuntimeError: it failed, so nothing else can be expected to work.
        """
        main = sys.modules.get("__main__")
        output.capture(self._channel)
        self._echo.ask(
            RunScript(
                1,
                SCRIPT,
                inputs={"rows": [1]},
                tools=["echo"],
                lint="off",
                result_bytes=1 << 20,
                files=8,
                files_bytes=1 << 20,
                seed=None,
                clock=None,
            )
        )
        done = self._runner.answer(cast("RunScript", self._channel.next_request()))
        if not done.ok:
            raise RuntimeError(f"rehearsal failed: {done.error}")
        repeat = sys.modules.get("toolcell_bridge.guest.determinism")
        if repeat is not None and repeat.is_rehearsed:
            repeat.rehearse()
        if main is not None:
            sys.modules["__main__"] = main
