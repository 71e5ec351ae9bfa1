"""Two tools for the adapters' tests, one of the program's registry and one of the framework, and what they leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from toolcell import ToolRegistry
from toolcell.audit import Index

PEOPLE = {"Bern": 134_000, "Basel": 173_000}
KM2 = {"Bern": 51.6, "Basel": 23.9}


def area(city: str) -> float:
    """Return the area of a city in square kilometres."""
    return KM2[city]


def registry_of_cities(seen: list[str]) -> ToolRegistry:
    """Return a registry with `population` and `secret`, which nobody may call. Its hook notes every call in `seen`."""
    registry = ToolRegistry()

    @registry.tool
    def population(city: str) -> int:
        """Return the number of people who live in a city."""
        return PEOPLE[city]

    @registry.tool
    def secret() -> str:
        """Return what no script may have."""
        raise AssertionError("this tool is refused")

    registry.blacklist("secret")
    registry.before_call(lambda call: seen.append(call.name))
    return registry


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that the processes that were started in the block are gone soon after it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    for _ in range(600):
        left = set(psutil.Process().children(recursive=True)) - before
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {left}")


def audited_calls(directory: Path) -> list[str]:
    """Return the tools that were called, from the audit log, in order."""
    with Index(directory / "runs.db") as index:
        return [call.tool for run in reversed(index.runs()) for call in index.load(run).calls]
