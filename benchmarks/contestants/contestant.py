"""What a contestant must be able to do. Every method times itself, so that nothing around it is measured.

Knows no contestant. A method that a contestant cannot offer raises `NotOffered` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Protocol

NAP_S = 0.01
"""How long the tool `nap` takes, on every host."""


class NotOffered(Exception):
    """This contestant takes no part here; says why."""


class WrongAnswer(Exception):
    """A script ran and returned something else than it should have: its time means nothing."""


class Contestant(Protocol):
    """One way to run a script that calls tools. Open while it is measured."""

    name: str
    measures: frozenset[str] | None
    """Keys of the measurements it takes part in; None for all of them."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc_info: object) -> object: ...

    async def run(self) -> float:
        """Seconds from asking for `call_tool('echo', {'q': 1})` to having its value."""
        ...

    async def burst(self, runs: int) -> list[float]:
        """Seconds of each of `runs` such runs right after one another, with as many workers ready as there are runs."""
        ...

    async def call(self, calls: int) -> list[float]:
        """Seconds of each round trip when one script makes `calls` calls after one another."""
        ...

    async def pipeline(self, calls: int) -> float:
        """Seconds per call when one script makes `calls` calls at once."""
        ...

    async def fan_out(self, calls: int) -> float:
        """Seconds until one script has the answers of `calls` simultaneous calls that take `NAP_S` each."""
        ...

    async def many(self, runs: int, clients: int) -> float:
        """Seconds for `runs` runs asked for by `clients` concurrent clients."""
        ...

    async def cold(self) -> float:
        """Seconds from nothing (host modules imported) to the first result."""
        ...

    async def return_text(self, size_bytes: int) -> float:
        """Seconds from the script's start to having its `size_bytes` of text."""
        ...

    async def return_records(self, records: int) -> float:
        """Seconds from the script's start to having its list of `records` dicts."""
        ...

    def idle(self, count: int) -> AbstractAsyncContextManager[None]:
        """Have `count` more idle workers or sandboxes, each ready for a script that nobody ran in it before."""
        ...


def check(got: object, wanted: object) -> None:
    """Refuse a time that belongs to a wrong value."""
    if got != wanted:
        raise WrongAnswer(f"returned {got!r:.80}, not {wanted!r:.80}")


def intervals(stamps: Sequence[float], calls: int) -> list[float]:
    """Round trips from the moments at which the host's tool was entered: one call's entry to the next one's."""
    check(len(stamps), calls)
    return [later - earlier for earlier, later in pairwise(stamps)]
