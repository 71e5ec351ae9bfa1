"""The host's end of a shared container, over the pipes of a plain process, without container and event loop."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import CallTool, Done, Hello, Log, Message, Result, RunScript, ToolReturn
from toolcell_bridge.wire.mux import Control, Data, Mux, StreamEnded

MIB = 1 << 20
ANSWER_S = 60.0
RLIMITS: Mapping[str, int] = {
    "cpu_s": 20,
    "address_space_bytes": 4096 * MIB,
    "processes": 65_536,
    "open_files": 128,
    "file_size_bytes": 64 * MIB,
}
START = "import sys; {before}; from toolcell_bridge.entry.container import main; main(['forked'])"
STRIDE = 4


class Container:
    """A proxy, a zygote and their sandboxes."""

    def __init__(self, home: Path, slots: int, before: str, **settings: object) -> None:
        self.slots = [home / f"slot{number}" for number in range(slots)]
        for slot in self.slots:
            slot.mkdir()
        code = START.format(before=f"sys.path[:] = {sys.path!r}; {before or 'pass'}")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
        )
        body = msgpack.packb(
            {"frame_bytes": 8 * MIB, "environment": {}, "preload": [], "slots": [str(slot) for slot in self.slots]}
            | settings
        )
        self._mux = Mux()
        self._controls: list[dict[str, Any]] = []
        self._ends: dict[int, dict[str, Any]] = {}
        self._last = 0
        self.received: dict[int, bytearray] = defaultdict(bytearray)
        self.ended: set[int] = set()
        self.unread: set[int] = set()
        """Channels that we pretend nobody reads."""
        self.write(len(body).to_bytes(4, "big") + body)

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def send_control(self, **message: object) -> None:
        self.write(self._mux.control(msgpack.packb(message)))

    def read(self, within_s: float = ANSWER_S) -> None:
        """Take what comes next.

        Raises:
            EOFError: the container has ended, with its last words.
            TimeoutError: nothing came.
        """
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if not select.select([self.process.stdout], [], [], within_s)[0]:
            raise TimeoutError("nothing came from the container")
        data = os.read(self.process.stdout.fileno(), 1 << 18)
        if not data:
            raise EOFError(os.read(self.process.stderr.fileno(), 1 << 16).decode())
        for event in self._mux.receive_data(data):
            match event:
                case Data(channel, piece):
                    self.received[channel] += piece
                    if channel not in self.unread:
                        self.write(self._mux.credit_for(channel, len(piece)))
                case StreamEnded(channel):
                    self.ended.add(channel)
                case Control(body):
                    self._handle_control(msgpack.unpackb(body, strict_map_key=False))

    def _handle_control(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._ends[message["ended"]] = message
        else:
            self._controls.append(message)

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The next control message that has this key."""
        while True:
            for message in self._controls:
                if kind in message:
                    self._controls.remove(message)
                    return message
            self.read()

    def begin(self, **rlimits: int) -> Guest:
        """One sandbox that has been forked."""
        self._last += 1
        for line in range(3):
            self._mux.open(self._last * STRIDE + line)
        self.send_control(open=self._last, rlimits={**RLIMITS, **rlimits}, direct=False)
        guest = Guest(self, self._last)
        if "started" not in (answer := self.wait_for_start(guest)):
            raise OSError(answer["why"])
        return guest

    def greet(self, guest: Guest) -> Guest:
        """Wait for its Hello."""
        hello = guest.next_message()
        assert isinstance(hello, Hello)
        guest.layers = hello.layers
        return guest

    def open(self, **rlimits: int) -> Guest:
        """One sandbox that has said Hello."""
        return self.greet(self.begin(**rlimits))

    def wait_for_start(self, guest: Guest) -> dict[str, Any]:
        while True:
            for message in self._controls:
                if guest.number in (message.get("started"), message.get("failed")):
                    self._controls.remove(message)
                    return message
            self.read()

    def kill(self, guest: Guest) -> dict[str, Any]:
        """Kill it and return what is reported of its end. Does no harm to one that has ended."""
        self.send_control(kill=guest.number)
        report = self.end_of(guest)
        self.send_control(close=guest.number)
        return report

    def end_of(self, guest: Guest) -> dict[str, Any]:
        """Wait for its end."""
        while guest.number not in self._ends:
            self.read()
        return self._ends[guest.number]

    def send(self, channel: int, data: bytes) -> None:
        self.write(self._mux.data(channel, data))

    def room(self, channel: int) -> int:
        return self._mux.room(channel)


class Guest:
    """One sandbox as the host talks to it."""

    def __init__(self, container: Container, number: int) -> None:
        self._container = container
        self._connection = Connection.host(max_frame_bytes=8 * MIB)
        self._runs = 0
        self.number = number
        self.channel = number * STRIDE
        self.layers: Mapping[str, str] = {}

    def next_message(self) -> Message:
        while (message := self._connection.next_message()) is None:
            data = self._container.received[self.channel]
            if data:
                self._connection.receive_data(bytes(data))
                data.clear()
            else:
                assert self.channel not in self._container.ended, "it ended before it said what was waited for"
                self._container.read()
        return message

    def begin(self, source: str) -> None:
        """Send a script and do not wait."""
        self._runs += 1
        run = RunScript(self._runs, source, {}, "echo", "off", MIB, 8, MIB, None, None)
        self._container.send(self.channel, self._connection.send(run))

    def run(self, source: str) -> Any:
        """Run a script whose tools echo; returns its result."""
        self.begin(source)
        value: Any = None
        while True:
            match self.next_message():
                case CallTool(id, _, args):
                    self._container.send(self.channel, self._connection.send(ToolReturn(id, args)))
                case Log():
                    pass
                case Result(result):
                    value = result
                case Done(ok, error):
                    assert ok, error
                    return value


@contextmanager
def running(home: Path, slots: int = 3, before: str = "", **settings: object) -> Iterator[Container]:
    """A container that is ready."""
    container = Container(home, slots, before, **settings)
    try:
        container.wait_for("ready")
        yield container
    finally:
        process = container.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.close()
        try:
            process.wait(ANSWER_S)
        finally:
            process.kill()
            process.stdout.close()
            process.stderr.close()


def tree(root: int) -> list[int]:
    """Living processes below `root`."""
    rows = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                rows[int(name)] = int(fields[1])
    found, queue = [], [root]
    while queue:
        parent = queue.pop()
        below = [pid for pid, its in rows.items() if its == parent]
        found += below
        queue += below
    return found


def children(pid: int) -> list[int]:
    """Living processes directly below `pid`."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def becomes_true(condition: Any, within_s: float = 60.0) -> bool:
    """True once `condition()` holds."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        select.select((), (), (), 0.005)
    return True
