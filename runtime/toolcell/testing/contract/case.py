"""What a promise of the contract is: a name, a sentence, and a function that breaks when a backend does not keep it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from toolcell.testing.harness import BackendHarness, Broken, MakeBackend

PATIENCE_S = 90.0
"""For one promise. Far more than any needs: running into it means that something waits for ever."""

Check: TypeAlias = Callable[[BackendHarness], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One promise. Call it with a way to make a backend, or use `on` with an open stand."""

    name: str
    """`group.promise`: what `skip` takes."""
    promise: str
    check: Check = field(repr=False)

    def __str__(self) -> str:
        return self.name

    async def __call__(self, make_backend: MakeBackend) -> None:
        """Try it on a backend of its own.

        Raises:
            Broken: the backend does not keep the promise.
        """
        async with BackendHarness(make_backend) as stand:
            await self.on(stand)

    async def on(self, stand: BackendHarness) -> None:
        """Try it on a backend that other promises are tried on too.

        Raises:
            Broken: the backend does not keep the promise.
        """
        try:
            with anyio.fail_after(PATIENCE_S):
                await self.check(stand)
        except TimeoutError:
            raise Broken(f"still waiting after {PATIENCE_S:g} s") from None


class Promises:
    """The promises of one module, in the order they are written."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.cases: list[Case] = []

    def __call__(self, check: Check) -> Check:
        """Decorate a function `name_of_the_promise(stand)`; its docstring is the promise."""
        self.cases.append(Case(f"{self.group}.{check.__name__}", (check.__doc__ or "").strip(), check))
        return check
