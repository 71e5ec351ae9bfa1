"""The fake backend meets the contract, but for what needs isolation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rows import each_row
from toolcell.testing import BackendHarness, Case, FakeBackend, contract_cases, contract_lacks

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]


@pytest.fixture(scope="module")
async def harness(anyio_backend: Any) -> AsyncIterator[BackendHarness]:
    async with BackendHarness(FakeBackend) as harness:
        yield harness


OF_THE_GUEST = {"values", "calls", "hostile"}
"""Groups that test what runs inside, which is the same in all backends: here every third of their cases."""
CASES = [case for case in contract_cases(FakeBackend) if case.name.partition(".")[0] not in OF_THE_GUEST]
CASES += [case for case in contract_cases(FakeBackend) if case not in CASES][::3]


@each_row("case", CASES, ids=str)
async def test_the_fake_meets(case: Case, harness: BackendHarness) -> None:
    await case.run(harness)


async def test_what_the_fake_lacks_is_named_with_a_reason() -> None:
    lacks = contract_lacks(FakeBackend)

    assert {name.partition(".")[0] for name in lacks} == {"isolation", "limits", "single_use"}
    assert all(lacks.values())
    assert {case.name for case in contract_cases()} == {case.name for case in contract_cases(FakeBackend)} | set(lacks)
