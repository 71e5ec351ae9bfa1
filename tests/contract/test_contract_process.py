"""The process backend meets every case of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.testing import BackendHarness, Case, contract_cases, contract_lacks

pytestmark = pytest.mark.isolation

OF_THE_LOOP = ("calls", "cancelling", "hostile", "deaths", "life")
"""What the host waits for in its own way on each event loop. The other groups test guest and kernel."""

CASES = [
    pytest.param(loop, case, id=f"{case}-{loop}")
    for loop, only in {"asyncio": (), "trio": OF_THE_LOOP}.items()
    for case in contract_cases(ProcessBackend, only=only)
]


@pytest.fixture(scope="module")
async def harness(anyio_backend: Any) -> AsyncIterator[BackendHarness]:
    async with BackendHarness(ProcessBackend) as harness:
        yield harness


@pytest.mark.anyio
@pytest.mark.conforms("Q29")
@pytest.mark.parametrize(("anyio_backend", "case"), CASES, indirect=["anyio_backend"], scope="module")
async def test_the_process_backend_meets(case: Case, harness: BackendHarness) -> None:
    await case.run(harness)


def test_the_process_backend_lacks_nothing() -> None:
    assert contract_lacks(ProcessBackend) == {}
