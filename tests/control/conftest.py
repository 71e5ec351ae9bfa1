"""Tools with a ledger of their effects, and runtimes that suspend and resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolcell import PoolConfig, SyncRuntime, ToolRegistry
from toolcell.errors import ToolError


class Effects:
    """A registry whose tools note each effect in `made`."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.registry = ToolRegistry()
        registry = self.registry

        @registry.tool(requires_approval=True)
        async def pay(to: str, euros: int = 1) -> str:
            """Send money to somebody."""
            self.made.append(["pay", to, euros])
            return f"paid {to} {euros}"

        @registry.tool
        async def write(text: str) -> int:
            """Append a line to a file."""
            self.made.append(["write", text])
            return len(self.made)

        @registry.tool(read_only=True)
        async def read(name: str) -> list[Any]:
            """Read a value that changes with every look at it."""
            self.made.append(["read", name])
            return [name, len(self.made)]

        @registry.tool
        async def fail(text: str) -> str:
            """Do half of the work and fail."""
            self.made.append(["fail", text])
            raise ToolError(text, details={"at": text})

        @registry.tool
        async def crash(text: str) -> str:
            """Raise an exception that nobody planned."""
            raise ValueError(text)

    def of(self, tool: str) -> list[Any]:
        """The effects of one tool."""
        return [effect for effect in self.made if effect[0] == tool]


@pytest.fixture
def effects() -> Effects:
    return Effects()


@pytest.fixture(scope="module")
def opened() -> Iterator[SyncRuntime]:
    """A runtime without a journal directory. Tests give it their own tools."""
    with SyncRuntime(pool=PoolConfig(warm=1)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals") / "runs"


@pytest.fixture(scope="module")
def durable(folder: Path) -> Iterator[SyncRuntime]:
    """A runtime whose journals are on disk."""
    with SyncRuntime(pool=PoolConfig(warm=1), record=folder / "runs.db") as runtime:
        yield runtime
