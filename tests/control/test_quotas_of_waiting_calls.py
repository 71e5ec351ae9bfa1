"""A call that waits for somebody counts once against a quota, on each route, and so does a preflight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.client_serving import serving
from service_host import registry as registry_of_service
from toolcell import Quota, QuotaExceeded, Quotas, Runtime, ToolRegistry
from toolcell.service import Client, TenantConfig
from toolcell.tools import Approve

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]


SCRIPT = "call_tool('read', number=1); call_tool('pay'); call_tool('read', number=2)"


def paying() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def read(number: int) -> int:
        """Read a number from somewhere."""
        return number

    @registry.tool(requires_approval=True)
    async def pay() -> str:
        """Pay what is due to somebody."""
        return "paid"

    return registry


def approved(waiting: Any) -> dict[str, Any]:
    return {each.id: Approve() for each in waiting.calls}


async def test_what_was_decided_about_once_counts_each_further_time() -> None:
    quotas = Quotas(Quota(calls=100))
    async with Runtime(paying(), quotas=quotas) as runtime:
        twice = "call_tool('pay'); call_tool('pay')"
        first = await runtime.execute_code(twice, on_approval="suspend")
        assert first.suspension is not None
        second = await runtime.resume(first.suspension, approved(first.suspension))
        assert second.suspension is not None
        assert (await runtime.resume(second.suspension, approved(second.suspension))).ok
    assert quotas.used("")["calls"] == 2


@pytest.mark.slow
async def test_a_preflight_counts_as_a_run_also_over_a_websocket(tmp_path: Path) -> None:
    async with Runtime(paying(), quotas=Quotas(Quota(runs=1))) as runtime:
        assert len((await runtime.preflight(SCRIPT)).calls) == 3
        with pytest.raises(QuotaExceeded):
            await runtime.preflight(SCRIPT)

    limited = {"defaults": TenantConfig(quota=Quota(runs=2))}
    async with serving(tmp_path / "state", registry_of_service(), **limited) as (url, _), Client(url) as client:
        await client.preflight("1")
        assert (await client.execute_code("1", preflight=True)).ok  # which is one run, and no second one
        with pytest.raises(QuotaExceeded):
            await client.preflight("1")
