"""`python -m benchmarks.sessions`: scripts of a session beside a bare read-eval loop, and the memory of idle sessions.

The loop is a plain Python process that reads a source in a frame of the bridge, evaluates it and answers with the text
of the value. Nothing isolates it. All have their turn in each round. `--profile` lists the function calls of a script.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import anyio

from benchmarks import memory
from benchmarks.count_calls import CallCounter, Calls, registry, steady_runtime
from benchmarks.measurements import MIB
from toolcell import PoolConfig, Runtime
from toolcell.sessions.session import Session
from toolcell_bridge.wire.framing import FrameReader, frame

SOURCE = "1+1"
ROUNDS = 200
PAUSE_S = 0.02
WARM_UP = 5
IDLE = 50
POLL_S = 0.1
WATCHED_S = 2.0
"""How long idle sessions are watched."""

LOOP = """
import socket, sys
from toolcell_bridge.wire.framing import FrameReader, frame
bridge, reader, names = socket.socket(fileno=int(sys.argv[1])), FrameReader(), {}
while data := bridge.recv(65536):
    reader.receive_data(data)
    while (body := reader.next_frame()) is not None:
        bridge.sendall(frame(repr(eval(body.decode(), names)).encode()))
"""

Turn = Callable[[], Awaitable[None]]


@contextmanager
def bare_loop() -> Iterator[Turn]:
    """Start the loop; yields what sends it `SOURCE` and waits for the answer."""
    near, far = socket.socketpair()
    descriptor = far.fileno()
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(descriptor)], pass_fds=[descriptor])
    far.close()
    reader = FrameReader()

    async def turn() -> None:
        near.sendall(frame(SOURCE.encode()))
        while (body := reader.next_frame()) is None:
            reader.receive_data(near.recv(65536))
        assert bytes(body) == b"2"

    try:
        yield turn
    finally:
        near.close()
        process.wait()


def script_of(session: Session) -> Turn:
    """Return what runs `SOURCE` in the session."""

    async def turn() -> None:
        result = await session.execute_code(SOURCE)
        assert result.value == 2, result.error

    return turn


async def measure(rounds: int, pause_s: float) -> dict[str, list[float]]:
    """Time the three in turn, in seconds."""
    samples: dict[str, list[float]] = {}
    async with (
        Runtime(pool=PoolConfig(warm=0)) as runtime,
        runtime.session(restore="journal") as kept,
        runtime.session(restore="empty") as empty,
    ):
        with bare_loop() as loop:
            turns = {"bare loop": loop, "session, empty": script_of(empty), "session, journal": script_of(kept)}
            for number in range(WARM_UP + rounds):
                for name, turn in turns.items():
                    await asyncio.sleep(pause_s)
                    start = time.perf_counter()
                    await turn()
                    took = time.perf_counter() - start
                    if number >= WARM_UP:
                        samples.setdefault(name, []).append(took)
    return samples


async def count(restore: Literal["empty", "journal"] = "empty", rounds: int = 11) -> tuple[Calls, CallCounter]:
    """Count the function calls of one script in the host; the median of several, and what the last one called."""
    found = []
    async with steady_runtime(registry(), looks=True) as runtime, runtime.session(restore=restore) as session:
        for number in range(WARM_UP + rounds):
            counter = CallCounter()
            counter.start()
            result = await session.execute_code(SOURCE)
            calls = counter.stop()
            assert result.value == 2, result.error
            if number >= WARM_UP:
                found.append(calls)
    return sorted(found, key=lambda calls: calls.python)[len(found) // 2], counter


async def idle(number: int) -> dict[str, float]:
    """Measure sessions that idle after one script: the memory of all, and the time that each step takes for all."""
    figures: dict[str, float] = {}
    async with Runtime(pool=PoolConfig(warm=0, cap=number + 2)) as runtime:
        sessions = [runtime.session(idle_s=3600) for _ in range(number)]
        used = memory.used_bytes()
        with timed(figures, "opened, one script in each"):
            for session in sessions:
                await session.open()
                await session.execute_code("x = 40")
        with timed(figures, "paused"):
            while not all(session.is_paused for session in sessions):  # noqa: ASYNC110 - a session sets no event
                await anyio.sleep(POLL_S)
        below = memory.descendants()
        before_ticks = memory.cpu_ticks(below | {os.getpid()})
        await anyio.sleep(WATCHED_S)
        ticks = memory.cpu_ticks(below | {os.getpid()}) - before_ticks
        figures["CPU s in 10 s, all and host"] = ticks / os.sysconf("SC_CLK_TCK") * 10 / WATCHED_S
        figures["MiB, processes of all"] = memory.pss_bytes(below) * MIB
        figures["MiB, host"] = memory.pss_bytes([os.getpid()]) * MIB
        figures["MiB, by the machine"] = max(0, memory.used_bytes() - used) * MIB
        figures["descriptors of the host"] = len(os.listdir("/proc/self/fd"))
        with timed(figures, "put down"):
            for session in sessions:
                await session.put_down()
        with timed(figures, "brought back, with a script"):
            for session in sessions:
                assert (await session.execute_code("x + 2")).value == 42
        with timed(figures, "closed"):
            for session in sessions:
                await session.close()
    return figures


@contextmanager
def timed(figures: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that a block takes."""
    start = time.perf_counter()
    yield
    figures[f"s, {name}"] = time.perf_counter() - start


def main() -> None:
    """Print the figures, or with `--profile` the functions that a script of a session calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--sessions", type=int, default=IDLE, metavar="N", help="how many idle sessions")
    parser.add_argument("--profile", choices=["empty", "journal"], help="list the function calls of one script")
    options = parser.parse_args()
    if options.profile:
        calls, counter = anyio.run(count, options.profile)
        print(f"{calls.python:g} Python, {calls.c:g} C")
        for number, name in counter.names():
            print(f"{number:5} {name}")
        return
    memory.raise_descriptor_limit()
    for pause_s, when, rounds in ((0.0, "in a row", options.rounds), (PAUSE_S, "after 20 ms", options.rounds // 4)):
        samples = anyio.run(measure, max(1, rounds), pause_s)
        floor = statistics.median(samples["bare loop"])
        for name, took in samples.items():
            p50 = statistics.median(took)
            print(f"{name + ', ' + when:44} {p50 * 1e6:8.0f} us {p50 / floor:8.1f} x")
    for restore in ("empty", "journal"):
        calls, _ = anyio.run(count, restore)
        print(f"{'calls of a script, ' + restore:44} {calls.python:8.0f} Python {calls.c:8.0f} C")
    print(f"{options.sessions} idle sessions:")
    for name, figure in anyio.run(idle, options.sessions).items():
        print(f"    {name:40} {figure:8.1f}")


if __name__ == "__main__":
    main()
