"""`python -m benchmarks.service_load`: many clients at `toolcell serve`, a tenth of their scripts hostile, for minutes.

Every answer is checked: a script that behaves gets its value, a hostile one the outcome of what it does or a timeout,
and a refusal is 503 with Retry-After. Before, the service, the library and
the library with a journal take turns with ordinary scripts, for their ratios.

`--tenants`: how long a polite tenant waits, alone and beside a tenant all of whose scripts are hostile.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

TOOLS = 'def double(number: int) -> int:\n    """Return twice the number."""\n    return 2 * number\n'
ORDINARY = "total = sum(call_tool('double', number=n) for n in range(3))\nset_result(total + x)"
GARBAGE = r"""
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, b'\xff' * 100)
    except OSError: pass
while True: pass
"""
HOSTILE = {
    "while True: pass": {"cpu_limit"},
    "x = bytearray(1 << 30); x[:] = b'1' * len(x)": {"memory_limit", "error"},
    "import os\nwhile True: os.fork()": {"process_limit", "error", "cpu_limit", "killed"},
    "while True: print('x' * 10000)": {"output_limit", "cpu_limit"},
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": {"ok", "killed"},  # the kernel spares an init
    GARBAGE: {"protocol_error", "cpu_limit", "error", "killed"},
    "def deep(n): return deep(n + 1)\ndeep(0)": {"error"},
    "for _ in range(10**6): call_tool('double', number=1)": {"call_limit", "host_work_limit", "error"},
}
"""Script to the outcomes that it may have, besides timeout: the machine may be slow."""
LIMITS: dict[str, Any] = {"wall_s": 2.0, "cpu_s": 1.0, "memory_bytes": 256 << 20}
HEAD = "POST /v1/execute HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SHARE = 0.1
"""Share of hostile scripts."""
PAIR_S = 10.0
"""How long each turn of the comparison takes."""


class Tally:
    """What came of the requests."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        """Seconds of ordinary scripts that ran, from the request to its answer."""
        self.ended: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.refused = 0


def requests(seed: int, share: float) -> Iterator[tuple[str, int]]:
    """Return scripts and their input, without end."""
    chance = random.Random(seed)
    hostile = itertools.cycle(HOSTILE)
    for number in itertools.count():
        yield (next(hostile) if chance.random() < share else ORDINARY), number


def check(tally: Tally, source: str, number: int, result: dict[str, Any], took_s: float) -> None:
    """Compare an answer with what the script does."""
    outcome = result["outcome"]
    tally.ended[outcome] += 1
    if source == ORDINARY:
        tally.seconds.append(took_s)
        if (outcome, result.get("value")) != ("ok", 6 + number):
            tally.wrong.append(f"{outcome} {result.get('value')!r} {result.get('error')}"[:300])
    elif outcome not in HOSTILE[source] | {"timeout"}:
        tally.wrong.append(f"{outcome} of {source[:40]!r}: {result.get('error')}"[:300])


async def client(port: int, seed: int, share: float, until: float, tally: Tally, token: str = "") -> None:
    """Send requests over one connection, one after the other."""
    head = f"{HEAD}Authorization: Bearer {token}\r\n" if token else HEAD
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for source, number in requests(seed, share):
        started = time.perf_counter()
        if started >= until:
            break
        body = json.dumps({"code": source, "inputs": {"x": number}, "limits": LIMITS}).encode()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, headers, answer = await response(reader)
        if status == 200:
            check(tally, source, number, json.loads(answer), time.perf_counter() - started)
        elif status == 503 and "retry-after" in headers:
            tally.refused += 1
            await asyncio.sleep(float(headers["retry-after"]))
        else:
            tally.wrong.append(f"{status} {answer[:200]!r}")
    writer.close()


async def response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read an answer that has a Content-Length."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def through_service(port: int, clients: int, seconds: float, share: float, seed: int, token: str = "") -> Tally:
    """Send requests from many clients at once."""
    tally, until = Tally(), time.perf_counter() + seconds
    await asyncio.gather(*(client(port, seed + each, share, until, tally, token) for each in range(clients)))
    return tally


async def with_library(clients: int, seconds: float, concurrent: int, journal: str | None = None) -> float:
    """Return the ordinary scripts a second of a Runtime in this process, with as many places as the service has.

    `journal`: a directory; the service always has one.
    """
    registry = ToolRegistry()
    namespace: dict[str, Any] = {}
    exec(TOOLS, namespace)
    registry.tool(namespace["double"])
    done, places = 0, asyncio.Semaphore(concurrent)
    options: dict[str, Any] = {"limits": Limits(**LIMITS), "pool": PoolConfig(cap=concurrent)}
    options["record"] = f"{journal}/runs.db" if journal else None
    async with Runtime(registry, **options) as runtime:
        await runtime.execute_code("1")
        until = time.perf_counter() + seconds

        async def one() -> None:
            nonlocal done
            while time.perf_counter() < until:
                async with places:
                    result = await runtime.execute_code(ORDINARY, inputs={"x": 1}, limits=Limits(**LIMITS))
                assert result.value == 7, result
                done += 1

        await asyncio.gather(*(one() for _ in range(clients)))
    return done / seconds


@contextmanager
def service(folder: Path, places: int, *arguments: str) -> Iterator[tuple[psutil.Process, int]]:
    """Start `toolcell serve`; yields its process and port."""
    (folder / "tools.py").write_text(TOOLS)
    (folder / "service.toml").write_text(
        f'concurrent_runs = {places}\nqueued_runs = 1000\n[defaults]\ntools = ["{folder / "tools.py"}"]\n'
        f"concurrent_runs = {places}\nqueued_runs = 1000\nqueue_s = 60\npool = {{ cap = {places} }}\n"
        "[tenants.default]\n[tenants.polite]\n[tenants.hostile]\n"
    )
    command = [sys.executable, "-m", "toolcell", "serve", "--config", str(folder / "service.toml"), *arguments]
    process = subprocess.Popen(
        [*command, "--state", str(folder / "state"), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "serving http://" in line, line
        yield psutil.Process(process.pid), int(line.rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(30)


def library_turn(clients: int, places: int, has_journal: bool) -> float:
    """Return the library's scripts a second, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(clients), str(places), folder if has_journal else ""]
        command = [sys.executable, "-m", "benchmarks.service_load", "--library", *given]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_of(process: psutil.Process) -> float:
    """Return the memory of the host process, in MiB; sandboxes and zygotes have their own."""
    return float(process.memory_full_info().uss) / (1 << 20)


def compare(port: int, clients: int, places: int, rounds: int) -> None:
    """Print the scripts a second of the service, the library, and the library with a journal, by turns."""
    ratios: dict[str, list[float]] = {"library": [], "library with a journal": []}
    for each in range(rounds):
        served = len(asyncio.run(through_service(port, clients, PAIR_S, 0.0, each)).seconds) / PAIR_S
        row = f"  serve {served:.0f}/s"
        for name, has_journal in (("library", False), ("library with a journal", True)):
            direct = library_turn(clients, places, has_journal)
            ratios[name].append(served / direct)
            row += f", {name} {direct:.0f}/s ({served / direct:.2f})"
        print(row, flush=True)
    for name, found in ratios.items():
        print(f"serve / {name}, median: {statistics.median(found):.2f}")


def load(process: psutil.Process, port: int, clients: int, minutes: float) -> bool:
    """Print what came of each minute, and of all; return False if an answer was wrong."""
    whole, ended_at, memories = Tally(), time.monotonic() + 60 * minutes, []
    while (left := ended_at - time.monotonic()) > 0.5:
        tally = asyncio.run(through_service(port, clients, min(60.0, left), SHARE, int(left * 1000)))
        for name in ("seconds", "wrong"):
            getattr(whole, name).extend(getattr(tally, name))
        whole.ended += tally.ended
        whole.refused += tally.refused
        memories.append(memory_of(process))
        print(f"  {sum(tally.ended.values())} answers, {memories[-1]:.1f} MiB", flush=True)
    if not whole.seconds:
        print("no answers")
        return False
    ordered = sorted(whole.seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    print(f"answers: {dict(whole.ended.most_common())}; refused for the moment: {whole.refused}")
    print(f"ordinary scripts: p50 {p50:.3f} s, p99 {p99:.3f} s; memory {min(memories):.1f} to {max(memories):.1f} MiB")
    for each in whole.wrong[:10]:
        print(f"WRONG {each}")
    print(f"wrong answers: {len(whole.wrong)}")
    return not whole.wrong


def tenants(clients: int, places: int, minutes: float) -> bool:
    """Print how long the scripts of a polite tenant take, alone and beside a hostile one; False if one was wrong."""
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.sqlite"
        store = TokenDatabase(path)
        polite, hostile = (store.create(name, [Scope.EXECUTE]).text for name in ("polite", "hostile"))
        with service(Path(folder), places, "--tokens", str(path)) as (_, port):
            for name, others in (("alone", 0), ("beside a hostile one", clients)):

                async def both(others: int = others) -> Tally:
                    work = [through_service(port, clients, 60 * minutes, 0.0, 1, polite)]
                    work += [through_service(port, others, 60 * minutes, 1.0, 2, hostile)] if others else []
                    return (await asyncio.gather(*work))[0]

                asyncio.run(through_service(port, 1, 1.0, 0.0, 3, polite))  # its zygote and its pool are there
                tally = asyncio.run(both())
                took = sorted(tally.seconds)
                p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
                print(f"polite tenant {name}: {len(took)} answers, p50 {p50:.3f} s, p99 {p99:.3f} s")
                for each in tally.wrong[:10]:
                    print(f"WRONG {each}")
                is_right = is_right and not tally.wrong
    return is_right


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_load", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with the library")
    parser.add_argument("--places", type=int, default=4 * (os.cpu_count() or 1), help="scripts that run at once")
    parser.add_argument("--tenants", action="store_true", help="a polite tenant alone, and beside a hostile one")
    parser.add_argument("--library", nargs=3, metavar=("CLIENTS", "PLACES", "JOURNAL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        clients, places, journal = options.library
        print(asyncio.run(with_library(int(clients), PAIR_S, int(places), journal or None)))
        return
    if options.tenants:
        sys.exit(not tenants(options.clients, options.places, options.minutes))
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), options.places) as (process, port):
        if options.rounds:
            compare(port, options.clients, options.places, options.rounds)
        is_right = load(process, port, options.clients, options.minutes)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
