"""What all competitors have. Every method takes its own time, so that nothing around it is measured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from itertools import pairwise
from typing import ClassVar, Self

SERVER = r"""
import asyncio, sys
async def answer(reader, writer):
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello")
    except asyncio.IncompleteReadError:
        writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

NAP_S = 0.01
"""Duration of the tool `nap`."""

PATIENCE_S = 60
"""A kernel that takes longer is a failure."""


class NotAvailable(Exception):
    """This competitor has no such thing. The message says why."""


class WrongAnswer(Exception):
    """A script returned a wrong value, so its time means nothing."""


class Competitor(ABC):
    """One way to run a script that calls tools. It is open while it is measured."""

    measures: ClassVar[frozenset[str] | None] = None
    """Keys of the measurements that include this competitor. None: all of them."""

    command: Sequence[str] = ()
    """Arguments of Python for one line of code, from nothing to the end of the process."""

    imports: Sequence[str] = ()
    """Arguments of Python that import what a host needs."""

    kernel_name = ""
    """As Jupyter knows it."""

    def __init__(self) -> None:
        self.layers: Mapping[str, str] = {}
        """Live isolation layers of a run."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> object:
        return None

    @abstractmethod
    async def run(self) -> float:
        """Return the seconds from the request of `call_tool('echo', {'q': 1})` to its value."""

    async def burst(self, runs: int) -> list[float]:
        """Return the seconds of each of `runs` such runs without a pause. Enough workers are ready for all."""
        return [await self.run() for _ in range(runs)]

    @abstractmethod
    async def call(self, calls: int) -> list[float]:
        """Return the seconds of each round trip when one script makes `calls` calls after one another."""

    @abstractmethod
    async def pipeline(self, calls: int) -> float:
        """Return the seconds per call when one script makes `calls` calls at once."""

    @abstractmethod
    async def fan_out(self, calls: int) -> float:
        """Return the seconds until one script has the answers of `calls` simultaneous calls of `NAP_S` each."""

    @abstractmethod
    async def many(self, runs: int, clients: int) -> float:
        """Return the seconds for `runs` runs, requested by `clients` concurrent clients."""

    async def cold(self) -> float:
        """Return the seconds from nothing (host modules imported) to the first result."""
        return await self.run()

    @abstractmethod
    async def return_text(self, size_bytes: int) -> float:
        """Return the seconds from the script's first call to its `size_bytes` of text."""

    @abstractmethod
    async def return_records(self, records: int) -> float:
        """Return the seconds from the script's first call to its list of `records` dicts."""

    @abstractmethod
    def idle(self, count: int) -> AbstractAsyncContextManager[None]:
        """Keep `count` more idle workers or sandboxes, each ready for its first script."""

    @abstractmethod
    async def session(self, scripts: int) -> list[float]:
        """Return the seconds of each of `scripts` scripts `x + 1` that share their names."""

    async def prints(self, lines: int) -> float:
        """Return the seconds of a script that prints `lines` lines of 100 characters."""
        raise NotAvailable("its host gets no lines")

    async def requests(self, count: int) -> float:
        """Return the seconds of a script that sends `count` requests to a local server on one connection."""
        raise NotAvailable("its scripts send no requests")

    async def plan(self, steps: int) -> float:
        """Return the seconds of `steps` calls that a host makes at once, without a script."""
        raise NotAvailable("it has no plans")

    async def kernel(self) -> float:
        """Return the seconds from the start of a Jupyter kernel to the result of its first cell."""
        if not self.kernel_name:
            raise NotAvailable("it is no kernel")
        return await asyncio.to_thread(self._kernel)

    def _kernel(self) -> float:
        from jupyter_client.manager import KernelManager

        began = time.perf_counter()
        manager = KernelManager(kernel_name=self.kernel_name)
        manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=PATIENCE_S)
            client.execute_interactive("1", output_hook=lambda message: None, timeout=PATIENCE_S)
            return time.perf_counter() - began
        finally:
            client.stop_channels()
            manager.shutdown_kernel()


@contextmanager
def server() -> Iterator[int]:
    """Start an HTTP server in a process of its own; yields its port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def check(got: object, expected: object) -> None:
    """Raise `WrongAnswer` if a script returned a wrong value."""
    if got != expected:
        raise WrongAnswer(f"returned {got!r:.80}, not {expected!r:.80}")


def intervals(stamps: Sequence[float], calls: int) -> list[float]:
    """Return the round trips: the times between the moments (`stamps`) at which the tool was entered."""
    check(len(stamps), calls)
    return [later - earlier for earlier, later in pairwise(stamps)]
