"""The process backend meets every case of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.testing import BackendHarness, Case, contract_cases, contract_lacks

pytestmark = [
    pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True, scope="module"),
    pytest.mark.anyio,
    pytest.mark.isolation,
]


@pytest.fixture(scope="module")
async def harness(anyio_backend: Any) -> AsyncIterator[BackendHarness]:
    async with BackendHarness(ProcessBackend) as harness:
        yield harness


@pytest.mark.parametrize("case", contract_cases(ProcessBackend), ids=str)
async def test_the_process_backend_meets(case: Case, harness: BackendHarness) -> None:
    await case.run(harness)


async def test_the_process_backend_lacks_nothing() -> None:
    assert contract_lacks(ProcessBackend) == {}
