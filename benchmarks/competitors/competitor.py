"""The Protocol of all competitors. Every method takes its own time, so that nothing around it is measured.

A method that a competitor does not have raises `NotAvailable` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Protocol

NAP_S = 0.01
"""Duration of the tool `nap`."""


class NotAvailable(Exception):
    """This competitor cannot be measured here. The message says why."""


class WrongAnswer(Exception):
    """A script returned a wrong value, so its time means nothing."""


class Competitor(Protocol):
    """One way to run a script that calls tools. It is open while it is measured."""

    name: str
    measures: frozenset[str] | None
    """Keys of the measurements that include this competitor. None: all of them."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc_info: object) -> object: ...

    async def run(self) -> float:
        """Return the seconds from the request of `call_tool('echo', {'q': 1})` to its value."""
        ...

    async def burst(self, runs: int) -> list[float]:
        """Return the seconds of each of `runs` such runs without a pause. Enough workers are ready for all."""
        ...

    async def call(self, calls: int) -> list[float]:
        """Return the seconds of each round trip when one script makes `calls` calls after one another."""
        ...

    async def pipeline(self, calls: int) -> float:
        """Return the seconds per call when one script makes `calls` calls at once."""
        ...

    async def fan_out(self, calls: int) -> float:
        """Return the seconds until one script has the answers of `calls` simultaneous calls of `NAP_S` each."""
        ...

    async def many(self, runs: int, clients: int) -> float:
        """Return the seconds for `runs` runs, requested by `clients` concurrent clients."""
        ...

    async def cold(self) -> float:
        """Return the seconds from nothing (host modules imported) to the first result."""
        ...

    async def return_text(self, size_bytes: int) -> float:
        """Return the seconds from the script's first call to its `size_bytes` of text."""
        ...

    async def return_records(self, records: int) -> float:
        """Return the seconds from the script's first call to its list of `records` dicts."""
        ...

    def idle(self, count: int) -> AbstractAsyncContextManager[None]:
        """Keep `count` more idle workers or sandboxes, each ready for its first script."""
        ...


def check(got: object, expected: object) -> None:
    """Raise `WrongAnswer` if a script returned a wrong value."""
    if got != expected:
        raise WrongAnswer(f"returned {got!r:.80}, not {expected!r:.80}")


def intervals(stamps: Sequence[float], calls: int) -> list[float]:
    """Return the round trips: the times between the moments (`stamps`) at which the tool was entered."""
    check(len(stamps), calls)
    return [later - earlier for earlier, later in pairwise(stamps)]
