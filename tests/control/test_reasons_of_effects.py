"""An effect of a dry run says why a person has to look at it: a `Flow` with "ask", on each route to a draft, up to its commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.client_serving import serving
from toolcell import Agent, Flow, Policy, RunContext, Runtime, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.control import Draft
from toolcell.service import Client, TenantConfig

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

REASON = 'needs approval: it sends to "public", and this run has read "private"'
PAID = {"to": "mallory", "euros": 9000}
READ, PAY = "call_tool('mail')\n", f"call_tool('pay', {PAID})"


def office() -> tuple[ToolRegistry, list[str]]:
    registry, made = ToolRegistry(), list[str]()

    @registry.tool(sends="public")
    async def pay(to: str, euros: int) -> str:
        """Send money to somebody."""
        made.append(to)
        return f"paid {to}"

    @registry.tool(read_only=True, reads="private")
    async def mail() -> str:
        """Read a mail of the user."""
        return "secret"

    return registry, made


async def drafted(route: str, runtime: Runtime, draft: Draft) -> None:
    """Collect the payment of a run that has read something private."""
    match route:
        case "script":
            await runtime.execute_code(READ + PAY, dry_run=draft)
        case "plan":
            await runtime.execute_plan([{"tool": "mail"}, {"tool": "pay", "args": PAID}], dry_run=draft)
        case "script after script":
            async with runtime.session() as session:
                await session.execute_code(READ)
                await session.execute_code(PAY, dry_run=draft)
        case "stream":
            async with runtime.stream(READ + PAY, dry_run=draft) as stream:
                async for _ in stream:
                    pass
        case "batch":
            context = RunContext().having(draft)
            runtime.registry.policy.add_flow(*runtime.policy.flows)
            await runtime.registry.execute_batch([("mail", {}), ("pay", PAID)], context=context)
        case "agent":
            runtime.registry.policy.add_flow(*runtime.policy.flows)
            model = ScriptedModel([calls(("mail", {})), calls(("pay", PAID)), "done"])
            await Agent(model, tools=runtime.registry).run("go", context=RunContext().having(draft))


@pytest.mark.parametrize("route", ["script", "plan", "script after script", "stream", "batch", "agent"])
async def test_an_effect_says_on_each_route_why_a_person_has_to_look_at_it(route: str, tmp_path: Path) -> None:
    registry, made = office()
    policy = Policy(flows=[Flow("private", "public", "ask")])
    async with Runtime(registry, policy=policy, record=tmp_path / "runs.db") as runtime:
        draft = Draft()
        await drafted(route, runtime, draft)
        assert [each.reason for each in draft.effects] == [REASON] and REASON in str(draft)
        assert made == []
        done = await runtime.commit(draft, approve=[each.id for each in draft.effects])
    assert (done.effects[0].status, made) == ("made", ["mallory"]), done


@pytest.mark.parametrize("route", ["script", "plan", "script after script"])
async def test_a_reason_that_came_after_the_draft_is_not_approved_with_it(route: str) -> None:
    registry, made = office()
    async with Runtime(registry) as runtime:
        draft = Draft()
        await drafted(route, runtime, draft)
        assert [each.reason for each in draft.effects] == [""]
        registry.policy.add_flow(Flow("private", "public", "ask"))
        done = await runtime.commit(draft, approve="all")
    assert (done.effects[0].status, made) == ("refused", []) and "the draft did not show that" in done.effects[0].error


async def test_an_effect_says_so_over_the_service(tmp_path: Path) -> None:
    registry, made = office()
    tenant: dict[str, Any] = {"policy": Policy(flows=[Flow("private", "public", "ask")])}
    settings = {"defaults": TenantConfig(**tenant)}
    async with serving(tmp_path / "state", registry, **settings) as (url, _), Client(url) as client:
        result = await client.execute_code(READ + PAY, dry_run=True)
        assert [each.reason for each in result.effects] == [REASON] and REASON in str(result)
        assert (await client.commit(result, approve="all")).ok
    assert made == ["mallory"]
