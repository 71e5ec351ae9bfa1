"""`python -m benchmarks.service_connections`: ten thousand connections at `toolcell serve`, and who is still served.

Connections are opened and kept without a request. Those past the service's limit are answered with 503 and closed; a
client that was there before goes on, and its answers are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.service_load import HEAD, memory_of, response, service

COUNT = 10_000
AT_ONCE = 200
ASKED = 30
"""Requests of the client that is served, before and while the others are there."""
WAIT_S = 10.0


async def hold(port: int, count: int) -> tuple[list[asyncio.StreamWriter], collections.Counter[str]]:
    """Open connections; return those that were kept, and what became of all."""
    kept: list[asyncio.StreamWriter] = []
    became: collections.Counter[str] = collections.Counter()
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            try:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, local_addr=(f"127.0.1.{number % 8}", 0)
                )
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                status, _, _ = await asyncio.wait_for(response(reader), WAIT_S)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
                became[type(exc).__name__] += 1
                return
            became[str(status)] += 1
            kept.append(writer)

    await asyncio.gather(*(one(number) for number in range(count)))
    return kept, became


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[float]:
    """Return how long runs of a small script took, in seconds."""
    took = []
    for number in range(ASKED):
        body = json.dumps({"code": "x", "inputs": {"x": number}}).encode()
        began = time.perf_counter()
        writer.write(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, _, answer = await response(reader)
        took.append(time.perf_counter() - began)
        assert status == 200, answer
        assert json.loads(answer)["value"] == number
    return took


async def measure(port: int, count: int) -> None:
    """Print what became of the connections."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before = await ask(reader, writer)
    began = time.perf_counter()
    kept, became = await hold(port, count)
    print(f"{count} connections in {time.perf_counter() - began:.0f} s, answered: {dict(became.most_common())}")
    while_there = await ask(reader, writer)
    for name, took in (("before", before), ("while they are there", while_there)):
        print(f"  a run {name}: p50 {statistics.median(took) * 1e3:.1f} ms, slowest {max(took) * 1e3:.1f} ms")
    for each in (*kept, writer):
        each.close()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_connections", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of this process and of the service
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), 4) as (process, port):
        without = memory_of(process)
        asyncio.run(measure(port, options.count))
        print(f"memory of the service: {without:.1f} MiB before, {memory_of(process):.1f} MiB after")


if __name__ == "__main__":
    main()
