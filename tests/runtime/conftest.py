"""Tools and a runtime that the tests of this folder share. Each script still gets a fresh sandbox."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from toolcell import ExecutionResult, Limits, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.errors import ToolError

Run = Callable[..., ExecutionResult]


def make_registry() -> ToolRegistry:
    """A few tools that succeed, fail, wait and return every kind of value."""
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument unchanged."""
        return q

    @registry.tool
    async def web_search(query: str) -> list[dict[str, Any]]:
        """Search the web for current information."""
        return [{"title": "a", "score": 0.9}, {"title": "b", "score": 0.2}, {"title": "c"}]

    @registry.tool
    def add(a: int, b: int = 1) -> int:
        """Add two numbers, in a worker thread."""
        return a + b

    @registry.tool
    async def wait(seconds: float) -> float:
        """Wait for so many seconds and return them."""
        await anyio.sleep(seconds)
        return seconds

    @registry.tool
    async def fail(text: str) -> str:
        """Fail as a tool does whose words are meant to be read."""
        raise ToolError(text)

    @registry.tool
    async def crash(text: str) -> str:
        """Raise an exception that nobody planned."""
        raise ValueError(text)

    @registry.tool
    async def text(kind: str) -> str:
        """Return plain text that looks like something else."""
        return {"number": "123", "true": "true", "null": "null", "zeros": "007", "error": "error: none"}[kind]

    return registry


@pytest.fixture(scope="session")
def registry() -> ToolRegistry:
    return make_registry()


@pytest.fixture(scope="session")
def sync_runtime(registry: ToolRegistry) -> Iterator[SyncRuntime]:
    with SyncRuntime(registry, pool=PoolConfig(warm=1), limits=Limits(wall_s=10)) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def run(sync_runtime: SyncRuntime) -> Run:
    """Run a script in a fresh sandbox and return its result."""
    return sync_runtime.execute_code


async def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until `condition` holds; the run that makes it true is the event, polling is only how we see it."""
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.005)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
