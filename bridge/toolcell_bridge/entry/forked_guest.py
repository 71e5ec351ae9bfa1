"""The guest of a forked sandbox: say that it is there, rehearse while nobody waits, and run scripts."""

from __future__ import annotations

import os
import select
import socket
import sys
from typing import NoReturn

from toolcell_bridge import __version__
from toolcell_bridge.entry.fork_handlers import HANDLERS
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.rehearsal import ANSWER, SCRIPT, Rehearsal, script_message
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.isolation.guest_paths import WORKSPACE
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello, ToolReturn

SCRIPT_WITHIN_MS = 1
"""A script that waits for a sandbox comes within this time after Hello, and then does not wait for a rehearsal. Where
runs follow each other, a longer time saves page faults (5 ms: 100 a run) and costs the runs more than it saves: they
come to code that nobody has run."""


WARM_UPS = 32
"""Rehearsals in a zygote. The interpreter specialises code that has run a dozen times, and children share it: a tenth
fewer page faults in each child's first run (349 against 389, five interleaved rounds)."""


class ForkedGuest:
    """What is the same for every sandbox of a zygote. Made there: a child copies each page that it writes to."""

    def __init__(self, bridge: socket.socket, frame_bytes: int) -> None:
        """`bridge` has the descriptor at which each child has a bridge of its own."""
        self._bridge, self._connection = bridge, Connection.guest(max_frame_bytes=frame_bytes)
        self._channel = Channel(bridge, self._connection)
        self._runner = Runner(self._channel, WORKSPACE)
        self._rehearsal = Rehearsal(frame_bytes)
        self._poll = select.poll()
        self._poll.register(bridge, select.POLLIN)

    def warm_up(self) -> None:
        """Rehearse in the zygote. The interpreter specialises code that runs often, and children share that."""
        streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
        self._rehearsal.run()
        self._rehearsal.fail()
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]

    def try_out(self, *, is_repeatable: bool) -> None:
        """Serve one script as a sandbox does, with all messages of the host on the bridge beforehand. The process must
        exit afterwards."""
        host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each message is received by itself
        os.dup2(guest.fileno(), self._bridge.fileno())
        for message in (script_message(SCRIPT, 0 if is_repeatable else None), encode(ToolReturn(1, ANSWER))):
            host.send(message)
        host.shutdown(socket.SHUT_WR)
        self._serve(self._runner, is_copied=True)

    def pack_hello(self, layers: dict[str, str]) -> None:
        """Make what `serve` sends first. In a zygote where all have the same layers: it costs a child 0.15 ms."""
        self._hello = self._connection.send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], layers))

    def serve(self, workspace: str = WORKSPACE, *, is_copied: bool = False) -> NoReturn:
        """Send Hello, run scripts until the host hangs up, and exit. Isolation is already applied.

        `is_copied`: the pages that it will write to are its own already.
        """
        self._serve(self._runner if workspace == WORKSPACE else Runner(self._channel, workspace), is_copied)
        os._exit(0)  # no atexit hooks, no threads joined, nothing of the script's run again

    def _serve(self, runner: Runner, is_copied: bool) -> None:
        HANDLERS.register()
        self._channel.stay_here()
        self._bridge.sendall(self._hello)
        if not is_copied and not self._poll.poll(SCRIPT_WITHIN_MS):
            self._rehearsal.run()
        runner.serve()
