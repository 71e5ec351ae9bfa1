"""What the stores in SQL share with their databases: transactions on worker threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from toolcell.support import daemon_threads

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class Transaction:
    """One transaction. Statements mark each parameter with `?`, and have no other question or percent mark."""

    def __init__(self, connection: Any, mark: str = "?") -> None:
        """`mark`: what the database's library writes for a parameter."""
        self._connection = connection
        self._mark = mark

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        found: Rows = self._execute(sql, parameters).fetchall()
        return found

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Make a change, and return how many rows it changed."""
        return int(self._execute(sql, parameters).rowcount)

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Make one change for each row of parameters."""
        self._connection.cursor().executemany(sql.replace("?", self._mark), parameters)

    def _execute(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._connection.execute(sql.replace("?", self._mark), parameters)


class Database(ABC):
    """Runs functions of a transaction on a worker thread. What a function raises undoes what it did."""

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one state of the database."""
        return await daemon_threads.run_sync(self.in_transaction, work, False)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` alone: no other process writes meanwhile."""
        return await daemon_threads.run_sync(self.in_transaction, work, True)

    async def close(self) -> None:
        await daemon_threads.run_sync(self.disconnect)

    @abstractmethod
    def in_transaction(self, work: Callable[[Transaction], T], is_write: bool) -> T:
        """Run `work` in this thread."""

    @abstractmethod
    def disconnect(self) -> None:
        """Let go of files and connections, in this thread."""


def marks(count: int) -> str:
    return ", ".join("?" * count)
