"""toolcell: a fresh sandbox per run, all isolation layers of this machine, and tools in a real registry.

Runs have the default limits, except where the workload is larger than these allow.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

from benchmarks.competitors.competitor import NAP_S, Competitor, NotAvailable, check, intervals, server
from benchmarks.competitors.scripts import CPYTHON, ECHO, PRINTS, REQUESTS, counted
from toolcell import ExecutionResult, Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.config import MIB

MANY_CALLS = Limits(tool_calls=1_000_000, concurrent_calls=512)

BURST_POOL = 16
"""Warm sandboxes for a burst: twice its size, so that new ones are started when the burst is over."""

_MANY_ELEMENTS = {"message_elements": 2**20} if "message_elements" in Limits.model_fields else {}
"""An older tree, in a comparison, has another bound or none."""

LARGE_RESULT = Limits(frame_bytes=64 * MIB, result_bytes=32 * MIB, **_MANY_ELEMENTS)
"""`frame_bytes` is fixed when a sandbox starts, so the same zygote starts a new one for such a run."""


class Toolcell(Competitor):
    """A Runtime, with or without preloaded packages."""

    imports = ("-c", "from toolcell import Runtime")
    kernel_name = "toolcell-benchmark"
    command = ("-m", "toolcell", "run", "-c", "set_result(1)")

    def __init__(self, packages: Sequence[str] = ()) -> None:
        super().__init__()
        self.packages = tuple(packages)
        self.stamps: list[float] = []
        self.registry = self._tools()
        self._stack = AsyncExitStack()

    async def echo(self, q: int) -> dict[str, int]:
        """Return the argument."""
        self.stamps.append(time.perf_counter())
        return {"q": q}

    def _tools(self) -> ToolRegistry:
        registry = ToolRegistry()
        stamps = self.stamps
        registry.tool(self.echo)

        @registry.tool
        def plain(q: int) -> dict[str, int]:
            """Return the argument, from a thread."""
            stamps.append(time.perf_counter())
            return {"q": q}

        @registry.tool
        async def nap(q: int) -> dict[str, int]:
            """Return the argument a little later."""
            await anyio.sleep(NAP_S)
            return {"q": q}

        return registry

    def _runtime(self, pool: PoolConfig | None = None) -> Runtime:
        return Runtime(self.registry, packages=self.packages, preload=self.packages, pool=pool)

    async def __aenter__(self) -> Toolcell:
        self.runtime = await self._stack.enter_async_context(self._runtime())
        self._burst_runtime = await self._stack.enter_async_context(self._runtime(PoolConfig(warm=BURST_POOL)))
        result = await self.runtime.execute_code("set_result(1)")
        self._value(result)
        self.layers = result.isolation.layers
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._stack.__aexit__(*exc_info)

    @staticmethod
    def _value(result: ExecutionResult) -> Any:
        if not result.ok:
            raise RuntimeError(f"run ended with {result.outcome}: {result.error and result.error.message}")
        return result.value

    async def run(self) -> float:
        return await self._once(self.runtime)

    async def _once(self, runtime: Runtime) -> float:
        start = time.perf_counter()
        result = await runtime.execute_code(CPYTHON.once)
        took = time.perf_counter() - start
        check(self._value(result), ECHO)
        return took

    async def burst(self, runs: int) -> list[float]:
        return [await self._once(self._burst_runtime) for _ in range(runs)]

    async def call(self, calls: int) -> list[float]:
        self.stamps.clear()
        check(self._value(await self.runtime.execute_code(counted(CPYTHON.calls, calls), limits=MANY_CALLS)), calls)
        return intervals(self.stamps, calls)

    async def _since_mark(self, script: str, count: int, limits: Limits | None = None) -> tuple[float, Any]:
        self.stamps.clear()
        result = await self.runtime.execute_code(counted(script, count), limits=limits)
        end = time.perf_counter()
        return end - self.stamps[0], self._value(result)

    async def pipeline(self, calls: int) -> float:
        took, answers = await self._since_mark(CPYTHON.pipeline, calls, MANY_CALLS)
        check(answers, calls)
        return took / calls

    async def fan_out(self, calls: int) -> float:
        took, answers = await self._since_mark(CPYTHON.fan_out, calls)
        check(answers, calls)
        return took

    async def many(self, runs: int, clients: int) -> float:
        waiting = iter(range(runs))

        async def client() -> None:
            for _ in waiting:
                check(self._value(await self.runtime.execute_code(CPYTHON.once)), ECHO)

        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(clients):
                group.start_soon(client)
        return time.perf_counter() - start

    async def session(self, scripts: int) -> list[float]:
        taken = []
        async with self.runtime.session() as session:
            await session.execute_code(CPYTHON.first)
            for _ in range(scripts):
                start = time.perf_counter()
                result = await session.execute_code(CPYTHON.then)
                taken.append(time.perf_counter() - start)
                check(result.value, 2)
        return taken

    async def prints(self, lines: int) -> float:
        start = time.perf_counter()
        self._value(await self.runtime.execute_code(counted(PRINTS, lines)))
        return time.perf_counter() - start

    async def requests(self, count: int) -> float:
        try:
            from toolcell import Allow, Egress
        except ImportError as exc:
            raise NotAvailable("an older tree without requests of scripts") from exc
        many = Limits(wall_s=60, tool_calls=count + 10, egress_requests=count + 10)
        with server() as port:
            egress = Egress(Allow("http://127.0.0.1", ports=[port]))
            async with Runtime(self.registry, egress=egress, limits=many, pool=PoolConfig(warm=0)) as runtime:
                start = time.perf_counter()
                self._value(await runtime.execute_code(counted(REQUESTS, count).replace("PORT", str(port))))
                return time.perf_counter() - start

    async def plan(self, steps: int) -> float:
        given = [{"tool": "echo", "args": {"q": number}} for number in range(steps)]
        start = time.perf_counter()
        rows = await self.runtime.execute_plan(given)
        took = time.perf_counter() - start
        check(rows[-1]["result"], {"q": steps - 1})
        return took

    async def kernel(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["JUPYTER_DATA_DIR"] = folder
            install = [sys.executable, "-m", "toolcell", "kernel", "install", "--user", "--name", self.kernel_name]
            await anyio.run_process(install)
            return await super().kernel()

    async def cold(self) -> float:
        start = time.perf_counter()
        async with self._runtime() as runtime:
            result = await runtime.execute_code(CPYTHON.once)
            took = time.perf_counter() - start
        check(self._value(result), ECHO)
        return took

    async def return_text(self, size_bytes: int) -> float:
        took, text = await self._since_mark(CPYTHON.text, size_bytes, LARGE_RESULT)
        check(len(text), size_bytes)
        return took

    async def return_records(self, records: int) -> float:
        took, rows = await self._since_mark(CPYTHON.records, records, LARGE_RESULT)
        check((len(rows), rows[-1]["id"]), (records, records - 1))
        return took

    @asynccontextmanager
    async def idle(self, count: int) -> AsyncIterator[None]:
        async with self._runtime(PoolConfig(warm=count, cap=count + 1)):
            yield
