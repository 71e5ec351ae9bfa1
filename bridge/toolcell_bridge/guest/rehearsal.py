"""A dummy run before the first real one, against a host made of memory.

A forked child shares its pages with the zygote until it writes to them, and the first run writes to hundreds: about
a millisecond of page faults (measured, nested virtualisation). The rehearsal moves them to before the sandbox is
ready. It leaves nothing behind but copied pages.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, cast

from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Done, Hello, Plain, RunScript, ToolReturn

if TYPE_CHECKING:
    import socket

SCRIPT = """\
print("echo")
set_result(call_tool("echo", {"q": 1, "rows": rows}))
"""
"""What nearly every script does. Errors and formatted text besides cost each sandbox a sixth of its rehearsal more, and
saved those scripts that have them 30 page faults. Without the call, the rehearsal costs 30 page faults less, and a
script that makes one pays 30 of them and 0.3 ms of waiting (Python 3.12)."""

FAILS = "1 / 0"
"""Rehearsed in a zygote only: the interpreter makes what it shows errors with once, and children share that."""

ANSWER: list[Plain] = [{"q": 1, "rows": [1]}, None, "text", 0.5]


def script_message(source: str, seed: int | None = None) -> bytes:
    """Return the message of a script. With a seed it is repeatable."""
    return encode(
        RunScript(
            1,
            source,
            inputs={"rows": [1]},
            tools="echo",
            lint="off",
            result_bytes=1 << 20,
            files=8,
            files_bytes=1 << 20,
            seed=seed,
            clock=None if seed is None else 0.0,
        )
    )


class _Host:
    """The host's end and the socket in one. It reads nothing: what it says is written down before the run."""

    def __init__(self) -> None:
        self.script = self.answer = b""
        """What comes first, and what comes once the guest has sent something."""

    def fileno(self) -> int:
        return -1

    def sendall(self, data: bytes) -> None:
        self.script, self.answer = self.script + self.answer, b""

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, self.script = self.script, b""
        return data


class Rehearsal:
    """A guest and a host in one process, to be run any number of times."""

    def __init__(self, frame_bytes: int) -> None:
        self._host = _Host()
        self._channel = Channel(cast("socket.socket", self._host), Connection.guest(max_frame_bytes=frame_bytes))
        self._runner = Runner(self._channel, "/work")
        self._channel.send(Hello(PROTOCOL_VERSION, "rehearsal", "", {}))
        self._numbers = itertools.count(1)
        self._script, self._fails = map(script_message, (SCRIPT, FAILS))

    def run(self) -> None:
        """Run `SCRIPT` once through every layer of the guest; sys.stdout and sys.stderr are left pointing here.

        Raises:
            RuntimeError: it failed, so nothing else can be expected to work.
        """
        self._host.script, self._host.answer = self._script, encode(ToolReturn(next(self._numbers), ANSWER))
        done = self._answer()
        if not done.ok:
            raise RuntimeError(f"rehearsal failed: {done.error}")

    def fail(self) -> None:
        """Run a script that fails."""
        self._host.script, self._host.answer = self._fails, b""
        self._answer()

    def _answer(self) -> Done:
        main = sys.modules.get("__main__")
        self._runner.streams.capture()
        done = self._runner.answer(cast("RunScript", self._channel.next_request()))
        if main is not None:
            sys.modules["__main__"] = main
        return done
