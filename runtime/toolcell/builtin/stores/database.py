"""What the stores in SQL share with their databases: transactions on worker threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class Transaction(Protocol):
    """One transaction. Statements mark each parameter with `?`."""

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Return all rows of a query."""

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Make a change, and return how many rows it changed."""

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Make one change for each row of parameters."""


class Database(Protocol):
    """Runs functions of a transaction on a worker thread. What a function raises undoes what it did."""

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one state of the database."""

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` alone: no other process writes meanwhile."""

    async def close(self) -> None:
        """Let go of files and connections."""


def marks(count: int) -> str:
    """Return marks for so many parameters."""
    return ", ".join("?" * count)
