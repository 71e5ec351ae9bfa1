"""Measure what a request of a script costs beside the same library in plain Python, against the same server.

    python -m benchmarks.egress [--rounds N] [--requests N] [--json]

Each round sends the requests of every library once in a sandbox and once outside, in random order, so that a
disturbance hits all of them alike. A row has the median request of the median round, and the processor time of a
request: of the sandbox and the host together, without the server's. `call_tool` is the same request without a library;
its counterpart outside is httpx in asyncio, with which the host sends.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import anyio

from toolcell import Allow, Egress, Limits, PoolConfig, Runtime, ToolRegistry

SERVER = """
import asyncio
async def answer(reader, writer):
    try:
        while await reader.readuntil(b"\\r\\n\\r\\n"):
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\nContent-Length: 5\\r\\n\\r\\nhello")
    except asyncio.IncompleteReadError:
        writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

LIBRARIES = {
    "call_tool": "def send(): call_tool('http', method='GET', url=URL, headers=[], body=b'')",
    "http.client": """
import http.client
connection = http.client.HTTPConnection(URL.split("/")[2])
def send():
    connection.request("GET", "/")
    connection.getresponse().read()
""",
    "requests": "import requests\nclient = requests.Session()\ndef send(): client.get(URL).content",
    "httpx": "import httpx\nclient = httpx.Client()\ndef send(): client.get(URL).content",
}
"""Each defines `send`, which makes one request on a connection that is kept."""

WARM_UP = 5
TIMED = f"""
import statistics, time
for _ in range({WARM_UP}):
    send()
taken, began = [], time.process_time()
for _ in range(REQUESTS):
    start = time.perf_counter()
    send()
    taken.append(time.perf_counter() - start)
found = [statistics.median(taken), (time.process_time() - began) / REQUESTS]
"""

ASYNC_HTTPX = """
import asyncio, httpx, statistics, time
async def main():
    async with httpx.AsyncClient() as client:
        await client.get(URL)
        taken, began = [], time.process_time()
        for _ in range(REQUESTS):
            start = time.perf_counter()
            await client.get(URL)
            taken.append(time.perf_counter() - start)
        return [statistics.median(taken), (time.process_time() - began) / REQUESTS]
found = asyncio.run(main())
"""

Samples = dict[tuple[str, str], list[tuple[float, float]]]
"""Library and place -> wall and processor time of a request in each round, in seconds."""


def registry() -> ToolRegistry:
    """Return the tool that tells the host's processor time."""
    tools = ToolRegistry()

    @tools.tool
    async def host_s() -> float:
        """Return the processor time that the host has used, in seconds."""
        return time.process_time()

    return tools


async def inside(runtime: Runtime, library: str, given: dict[str, Any]) -> tuple[float, float]:
    """Return wall and processor time of a request in a sandbox."""
    timed = f"{LIBRARIES[library]}\nbegan_s = tools.host_s()\n{TIMED}\nset_result([*found, tools.host_s() - began_s])"
    result = await runtime.execute_code(timed, inputs=given)
    assert result.ok, result.error
    wall_s, cpu_s, host_s = result.value
    return wall_s, cpu_s + host_s / (given["REQUESTS"] + WARM_UP)


async def outside(library: str, given: dict[str, Any]) -> tuple[float, float]:
    """Return wall and processor time of a request in plain Python."""
    body = ASYNC_HTTPX if library == "call_tool" else f"{LIBRARIES[library]}\n{TIMED}"
    source = f"URL, REQUESTS = {given['URL']!r}, {given['REQUESTS']}\n{body}\nprint(*found)"
    done = await anyio.run_process([sys.executable, "-c", source])
    wall_s, cpu_s = map(float, done.stdout.split())
    return wall_s, cpu_s


async def measure(rounds: int, requests: int) -> Samples:
    """Return the samples of every library in both places."""
    samples: Samples = {(library, place): [] for library in LIBRARIES for place in ("inside", "outside")}
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220
        assert server.stdout is not None
        port = int(server.stdout.readline())
        given = {"URL": f"http://127.0.0.1:{port}/", "REQUESTS": requests}
        many = requests + 10
        try:
            async with Runtime(
                registry(),
                packages=["requests", "httpx"],
                egress=Egress(Allow("http://127.0.0.1", ports=[port])),
                limits=Limits(wall_s=60, tool_calls=many, egress_requests=many),
                pool=PoolConfig(warm=0),
            ) as runtime:
                for _ in range(rounds):
                    for library, place in random.sample(list(samples), len(samples)):
                        one = inside(runtime, library, given) if place == "inside" else outside(library, given)
                        samples[library, place].append(await one)
        finally:
            server.terminate()
    return samples


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    samples = anyio.run(measure, options.rounds, options.requests)
    rows = {
        library: {
            f"{place}_{what}_ms": statistics.median(row[number] for row in samples[library, place]) * 1000
            for place in ("inside", "outside")
            for number, what in enumerate(("wall", "cpu"))
        }
        for library in LIBRARIES
    }
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'milliseconds':14}{'sandbox':>10}{'outside':>10}{'sandbox CPU':>14}{'outside CPU':>14}")
    for library, row in rows.items():
        times = f"{row['inside_wall_ms']:10.2f}{row['outside_wall_ms']:10.2f}"
        print(f"{library:14}{times}{row['inside_cpu_ms']:14.2f}{row['outside_cpu_ms']:14.2f}")


if __name__ == "__main__":
    main()
