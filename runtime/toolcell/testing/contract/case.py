"""A case of the backend contract: a name, a sentence, and a function that raises when the backend does not meet it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio

from toolcell.results import Outcome
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    ContractViolation,
    MakeBackend,
    expect_equal,
)

CASE_TIMEOUT_S = 90.0
"""Timeout of one case. No case needs that long: when it expires, something waits for ever."""

Check: TypeAlias = Callable[[BackendHarness], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One case of the contract. Call it with a function that makes a backend, or use `run` with an open harness."""

    name: str
    """`group.case`, as `skip` takes it."""
    description: str
    """What the backend must do, in one sentence."""
    check: Check = field(repr=False)

    def __str__(self) -> str:
        return self.name

    async def __call__(self, make_backend: MakeBackend) -> None:
        """Run the case on a new backend.

        Raises:
            ContractViolation: the backend does not meet the case.
        """
        async with BackendHarness(make_backend) as harness:
            await self.run(harness)

    async def run(self, harness: BackendHarness) -> None:
        """Run the case on a backend that other cases use too.

        Raises:
            ContractViolation: the backend does not meet the case.
        """
        try:
            with anyio.fail_after(CASE_TIMEOUT_S):
                await self.check(harness)
        except TimeoutError:
            raise ContractViolation(f"still waiting after {CASE_TIMEOUT_S:g} s") from None


class CaseGroup:
    """A group of cases, in the order of their definition."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def __call__(self, check: Check) -> Check:
        """Decorate a function `name_of_the_case(harness)`. Its docstring becomes the description."""
        self.cases.append(Case(f"{self.name}.{check.__name__}", (check.__doc__ or "").strip(), check))
        return check

    def value(self, name: str, description: str, source: str, wanted: object, **options: Any) -> None:
        """Add a case that is a script with this value."""

        async def check(harness: BackendHarness) -> None:
            expect_equal(await harness.value(source, **options), wanted, "the value")

        self.cases.append(Case(f"{self.name}.{name}", description, check))

    def ends(
        self,
        name: str,
        description: str,
        sources: Sequence[str],
        *outcomes: Outcome,
        limit: str | None = None,
        **limits: float,
    ) -> None:
        """Add a case of scripts that each end with one of these outcomes, by `limit` if it is given, under `limits`.

        The next run must succeed.
        """

        async def check(harness: BackendHarness) -> None:
            for source in sources:
                await harness.run(source, *outcomes, limit=limit, limits=LIMITS.model_copy(update=limits))
                expect_equal(await harness.value("set_result(call_tool('echo', q=1))"), 1, "the value of the next run")

        self.cases.append(Case(f"{self.name}.{name}", description, check))
