"""Measure a message's round trip between two processes. No sandbox in another process can be faster."""

from __future__ import annotations

import os
import socket
import time

MESSAGE = b"x" * 50


def floors(rounds: int, pause_s: float) -> dict[str, list[float]]:
    """Return round trips over a socket pair: on one CPU and on two, busy and after a pause."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        f"{where}, {when}": round_trips(rounds, cpus[0], peer, pause)
        for where, peer in (("one CPU", cpus[0]), ("two CPUs", cpus[-1]))
        for when, pause in (("busy", 0.0), ("after a pause", pause_s))
    }


def round_trips(rounds: int, own_cpu: int, peer_cpu: int, pause_s: float) -> list[float]:
    """Return the seconds of each of `rounds` round trips to a process on `peer_cpu`."""
    before = os.sched_getaffinity(0)
    near, far = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        near.close()
        os.sched_setaffinity(0, {peer_cpu})
        while data := far.recv(64):
            far.send(data)
        os._exit(0)
    far.close()
    os.sched_setaffinity(0, {own_cpu})
    try:
        return [_round_trip(near, pause_s) for _ in range(rounds)]
    finally:
        os.sched_setaffinity(0, before)
        near.close()
        os.waitpid(pid, 0)


def _round_trip(near: socket.socket, pause_s: float) -> float:
    time.sleep(pause_s)
    start = time.perf_counter()
    near.send(MESSAGE)
    near.recv(64)
    return time.perf_counter() - start
