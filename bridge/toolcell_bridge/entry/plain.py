"""The guest over one inherited socket, without isolation.

For backends that isolate the process themselves, and for test doubles. The workspace is the directory in which it is
started; raw output goes to descriptors 1 and 2.

    python -P -s -B -m toolcell_bridge.entry.plain SOCKET FRAME_BYTES [LIMIT=VALUE...]

Limits are those of setrlimit: NOFILE=256 AS=1073741824 ...
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from toolcell_bridge import __version__
from toolcell_bridge.guest import surroundings
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.rehearsal import Rehearsal
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello


def main(arguments: Sequence[str]) -> None:
    """Send Hello, run scripts until the host hangs up, and exit. Never returns."""
    bridge, frame_bytes, *limits = arguments
    sock = socket.socket(fileno=int(bridge))
    sock.set_inheritable(False)
    _point_at_null(0)
    surroundings.install()
    Rehearsal(int(frame_bytes)).run()
    channel = Channel(sock, Connection.guest(max_frame_bytes=int(frame_bytes)))
    channel.stay_here()
    layers = {"rlimits": _lower(limits)} if limits else {}
    channel.send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], layers))
    Runner(channel, os.path.realpath(".")).serve()
    os._exit(0)  # no atexit hooks, no threads joined, nothing of the script's run again


def _point_at_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _lower(limits: Sequence[str]) -> str:
    """Set each NAME=VALUE, never above what there is, and name them."""
    import resource  # not on Windows

    for limit in limits:
        name, _, value = limit.partition("=")
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        least = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(kind, (least, least))
    return ", ".join(limit.partition("=")[0] for limit in limits)


if __name__ == "__main__":
    main(sys.argv[1:])
