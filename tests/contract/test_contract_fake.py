"""The fake backend meets every case of the contract that needs no isolation."""

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


@each_row("case", contract_cases(FakeBackend), ids=str)
async def test_the_fake_meets(case: Case, harness: BackendHarness) -> None:
    await case.run(harness)


async def test_what_the_fake_lacks_is_named_with_a_reason() -> None:
    lacks = contract_lacks(FakeBackend)

    assert {name.partition(".")[0] for name in lacks} == {"isolation", "limits", "single_use"}
    assert all(lacks.values())
    assert {case.name for case in contract_cases()} == {case.name for case in contract_cases(FakeBackend)} | set(lacks)
