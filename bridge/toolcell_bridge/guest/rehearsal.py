"""A dummy run before the first real one, against a host made of memory.

A forked child shares its pages with the zygote until it writes to them, and the first run writes to hundreds: about
a millisecond of page faults (measured, nested virtualisation). Rehearsing moves them to before the sandbox says
that it is ready. Leaves nothing behind but warm pages.
"""

from __future__ import annotations

import sys
from typing import cast

from toolcell_bridge.connection import Connection
from toolcell_bridge.guest import output
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.messages import PROTOCOL_VERSION, CallTool, Hello, Run, ToolReturn

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

    def ask(self, run: Run) -> None:
        self._answers += self._host.send(run)

    def sendall(self, data: bytes) -> None:
        self._host.receive_data(data)
        while (message := self._host.next_message()) is not None:
            if isinstance(message, CallTool):
                self._answers += self._host.send(ToolReturn(message.id, [message.args, None, "text", 0.5]))

    def recv(self, size: int) -> bytes:
        data = bytes(self._answers[:size])
        del self._answers[:size]
        return data


def rehearse(frame_bytes: int) -> None:
    """Run `SCRIPT` once through every layer of the guest."""
    echo = _Echo(frame_bytes)
    channel = Channel(cast("object", echo), Connection.guest(max_frame_bytes=frame_bytes))  # type: ignore[arg-type]
    output.capture(channel)
    channel.send(Hello(PROTOCOL_VERSION, "rehearsal", "", {}))
    echo.ask(Run(1, SCRIPT, {"rows": [1]}, ["echo"], "off", 1 << 20, 8, 1 << 20, None, None))
    request = channel.next_request()
    done = Runner(channel, "/work").run(cast("Run", request))
    channel.send(done)
    if not done.ok:
        raise RuntimeError(f"rehearsal failed: {done.error}")
    sys.modules.pop("__main__", None)
