"""pydantic-monty: a Rust interpreter of a Python subset in pooled worker processes. Its tools are bare functions.

Its blocking client is the fastest, so most measurements use it. Parallel calls need the asyncio client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any

from benchmarks.competitors.competitor import NAP_S, Competitor, NotAvailable, check, intervals
from benchmarks.competitors.scripts import ECHO, MONTY, counted

try:
    import pydantic_monty
except ImportError:
    pydantic_monty = None


class MontyPool(Competitor):
    """A Monty pool. With `max_checkouts_per_worker=1` every run gets a fresh worker."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._stamps: list[float] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> MontyPool:
        if pydantic_monty is None:
            raise NotAvailable("pydantic-monty is not installed")
        self._pool = self._stack.enter_context(pydantic_monty.Monty(**self._options))
        self._burst_pool: Any = None
        self._async_pool = await self._stack.enter_async_context(pydantic_monty.AsyncMonty(**self._options))
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._stack.__aexit__(*exc_info)

    def _call_tool(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        self._stamps.append(time.perf_counter())
        return args

    async def _call_tool_later(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        if name == "nap":
            await asyncio.sleep(NAP_S)
        else:
            self._stamps.append(time.perf_counter())
        return args

    def _feed(self, pool: Any, script: str) -> tuple[Any, float]:
        """Return the value and the moment it arrived. Giving the worker back is not measured."""
        with pool.checkout() as session:
            value = session.feed_run(script, external_lookup={"call_tool": self._call_tool})
            return value, time.perf_counter()

    async def run(self) -> float:
        start = time.perf_counter()
        value, end = self._feed(self._pool, MONTY.once)
        check(value, ECHO)
        return end - start

    async def burst(self, runs: int) -> list[float]:
        if self._burst_pool is None:
            self._burst_pool = self._stack.enter_context(
                pydantic_monty.Monty(**self._options | {"max_processes": 2 * runs})
            )
        taken = []
        for _ in range(runs):
            start = time.perf_counter()
            value, end = self._feed(self._burst_pool, MONTY.once)
            taken.append(end - start)
            check(value, ECHO)
        return taken

    async def call(self, calls: int) -> list[float]:
        self._stamps.clear()
        check(self._feed(self._pool, counted(MONTY.calls, calls))[0], calls)
        return intervals(self._stamps, calls)

    async def _gather(self, script: str, calls: int) -> float:
        self._stamps.clear()
        async with self._async_pool.checkout() as session:
            answers = await session.feed_run(
                counted(script, calls), external_lookup={"call_tool": self._call_tool_later}
            )
            end = time.perf_counter()
        check(answers, calls)
        return end - self._stamps[0]

    async def pipeline(self, calls: int) -> float:
        return await self._gather(MONTY.pipeline, calls) / calls

    async def fan_out(self, calls: int) -> float:
        return await self._gather(MONTY.fan_out, calls)

    async def many(self, runs: int, clients: int) -> float:
        # Its default of one worker per core is slow with several clients, so the pool has two for each client.
        with ExitStack() as stack:
            pool = stack.enter_context(pydantic_monty.Monty(**self._options | {"max_processes": 2 * clients}))
            threads = stack.enter_context(ThreadPoolExecutor(clients))
            list(threads.map(lambda _: self._feed(pool, MONTY.once), range(clients)))
            start = time.perf_counter()
            for value, _ in threads.map(lambda _: self._feed(pool, MONTY.once), range(runs)):
                check(value, ECHO)
            return time.perf_counter() - start

    async def session(self, scripts: int) -> list[float]:
        taken = []
        with self._pool.checkout() as session:
            session.feed_run(MONTY.first)
            for _ in range(scripts):
                start = time.perf_counter()
                value = session.feed_run(MONTY.then)
                taken.append(time.perf_counter() - start)
                check(value, 2)
        return taken

    async def cold(self) -> float:
        start = time.perf_counter()
        with pydantic_monty.Monty(**self._options) as pool:
            value, end = self._feed(pool, MONTY.once)
        check(value, ECHO)
        return end - start

    def _large(self, script: str, count: int) -> tuple[float, Any]:
        self._stamps.clear()
        value, end = self._feed(self._pool, counted(script, count))
        return end - self._stamps[0], value

    async def return_text(self, size_bytes: int) -> float:
        took, text = self._large(MONTY.text, size_bytes)
        check(len(text), size_bytes)
        return took

    async def return_records(self, records: int) -> float:
        took, rows = self._large(MONTY.records, records)
        check((len(rows), rows[-1]["id"]), (records, records - 1))
        return took

    @asynccontextmanager
    async def idle(self, count: int) -> AsyncIterator[None]:
        with pydantic_monty.Monty(**self._options | {"min_processes": count, "max_processes": count}):
            yield


class PrestartedMonty(MontyPool):
    """Fresh workers that were started before the first run.

    A Monty pool replaces a used worker when the next run needs one, so the time of a fresh worker includes a process
    start. This competitor shows the time without it. No pool of Monty's can keep that up.
    """

    measures = frozenset({"run"})
    BATCH = 8

    def __init__(self) -> None:
        super().__init__(min_processes=self.BATCH, max_processes=self.BATCH, max_checkouts_per_worker=1)
        self._unused = 0

    async def __aenter__(self) -> PrestartedMonty:
        if pydantic_monty is None:
            raise NotAvailable("pydantic-monty is not installed")
        return self

    async def run(self) -> float:
        if not self._unused:
            await self._stack.aclose()
            self._pool = self._stack.enter_context(pydantic_monty.Monty(**self._options))
            self._unused = self.BATCH
        self._unused -= 1
        return await super().run()
