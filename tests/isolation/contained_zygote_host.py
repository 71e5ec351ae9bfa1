"""The host's end of a zygote of the profile `container`, without container and event loop."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from toolcell_bridge.entry.supervisor_protocol import KILL
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import CallTool, Done, Hello, Log, Message, Result, RunScript, ToolReturn

MIB = 1 << 20
ANSWER_S = 60.0
RLIMITS: Mapping[str, int] = {
    "cpu_s": 20,
    "address_space_bytes": 4096 * MIB,
    "processes": 65_536,
    "open_files": 128,
    "file_size_bytes": 64 * MIB,
}
ROOM: Mapping[str, int] = {"disk_bytes": 64 * MIB, "inodes": 100_000}
START = "import sys; {before}; from toolcell_bridge.entry.contained_zygote import main; main(int(sys.argv[1]))"
READABLE = ("/usr", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix, *(path for path in sys.path if path))


class Zygote:
    """A zygote and its sandboxes."""

    def __init__(self, home: Path, before: str, **settings: object) -> None:
        self.base = home / "base"
        self.base.mkdir(mode=0o700)
        code = START.format(before=f"sys.path[:] = {sys.path!r}; {before or 'pass'}")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-s", "-B", "-c", code, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd="/")
        self._reports: list[dict[str, Any]] = []
        self._last = 0
        self._guests: list[Guest] = []
        self.send(
            {
                "frame_bytes": 8 * MIB,
                "environment": {},
                "preload": [],
                "base": str(self.base),
                "sys_path": sys.path,
                "readable": READABLE,
            }
            | settings
        )

    def send(self, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.control, [msgpack.packb(message)], descriptors)

    def wait_for(self, kind: str, number: int | None = None) -> dict[str, Any]:
        """The next report that has this key, about this sandbox.

        Raises:
            EOFError: the zygote has ended, with its last words.
            TimeoutError: nothing came.
        """
        while True:
            for report in self._reports:
                if kind in report and number in (None, report[kind]):
                    self._reports.remove(report)
                    return report
            if not select.select([self.control], [], [], ANSWER_S)[0]:
                raise TimeoutError("nothing came from the zygote")
            if not (data := self.control.recv(1 << 16)):
                raise EOFError("the zygote has ended")
            report = msgpack.unpackb(data)
            if "error" in report:
                raise EOFError(report["error"])
            self._reports.append(report)

    def begin(self) -> Guest:
        """One sandbox that has been forked."""
        self._last += 1
        bridge, guest_bridge = socket.socketpair()
        (out, guest_out), (err, guest_err), (guest_control, control) = os.pipe(), os.pipe(), os.pipe()
        theirs = (guest_bridge.detach(), guest_out, guest_err, guest_control)
        guest = Guest(self._last, bridge, (out, err), control)
        self._guests.append(guest)
        self.send({"open": guest.number, "rlimits": dict(RLIMITS), "room": dict(ROOM)}, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.wait_for("started", guest.number)
        return guest

    def greet(self, guest: Guest) -> Guest:
        """Wait for its Hello."""
        hello = guest.next_message()
        assert isinstance(hello, Hello)
        guest.layers = hello.layers
        return guest

    def open(self) -> Guest:
        """One sandbox that has said Hello."""
        return self.greet(self.begin())

    def kill(self, guest: Guest) -> dict[str, Any]:
        """Kill it and return what is reported of its end. Does no harm to one that has ended."""
        guest.kill()
        return self.end_of(guest)

    def end_of(self, guest: Guest) -> dict[str, Any]:
        """Wait for its end."""
        if guest.end is None:
            guest.end = self.wait_for("ended", guest.number)
        return guest.end

    def close(self) -> None:
        """Hang up on the zygote and every sandbox, and wait for the end."""
        self.control.close()
        for guest in self._guests:
            guest.close()
        try:
            self.process.wait(ANSWER_S)
        finally:
            self.process.kill()


class Guest:
    """One sandbox as the host talks to it."""

    def __init__(self, number: int, bridge: socket.socket, output: tuple[int, int], control: int) -> None:
        self._connection = Connection.host(max_frame_bytes=8 * MIB)
        self._runs = 0
        self._bridge, self._output, self._control = bridge, output, control
        self.number = number
        self.layers: Mapping[str, str] = {}
        self.end: dict[str, Any] | None = None

    def kill(self) -> None:
        if self.end is None:
            try:
                os.write(self._control, KILL)
            except BrokenPipeError:  # its supervisor has ended
                return

    def close(self) -> None:
        self._bridge.close()
        for descriptor in (*self._output, self._control):
            os.close(descriptor)

    def raw_output(self) -> list[bytes]:
        """What it has written to descriptors 1 and 2."""
        return [os.read(descriptor, 1 << 16) for descriptor in self._output]

    def next_message(self) -> Message:
        while (message := self._connection.next_message()) is None:
            self._bridge.settimeout(ANSWER_S)
            data = self._bridge.recv(1 << 18)
            assert data, "it ended before it said what was waited for"
            self._connection.receive_data(data)
        return message

    def begin(self, source: str) -> None:
        """Send a script and do not wait."""
        self._runs += 1
        run = RunScript(self._runs, source, {}, "echo", "off", MIB, 8, MIB, None, None)
        self._bridge.sendall(self._connection.send(run))

    def run(self, source: str) -> Any:
        """Run a script whose tools echo; returns its result."""
        self.begin(source)
        value: Any = None
        while True:
            match self.next_message():
                case CallTool(id, _, args):
                    self._bridge.sendall(self._connection.send(ToolReturn(id, args)))
                case Log():
                    pass
                case Result(result):
                    value = result
                case Done(ok, error):
                    assert ok, error
                    return value


@contextmanager
def running(home: Path, before: str = "", **settings: object) -> Iterator[Zygote]:
    """A zygote that is ready."""
    zygote = Zygote(home, before, **settings)
    try:
        zygote.wait_for("ready")
        yield zygote
    finally:
        zygote.close()


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


def becomes_true(condition: Any, within_s: float = 60.0) -> bool:
    """True once `condition()` holds."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        select.select((), (), (), 0.005)
    return True
