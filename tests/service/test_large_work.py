"""What large data costs is charged to its tenant on every route. Past its allowance, it waits while others are served."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client_serving import serving, until
from service_host import registry
from toolcell import RunContext, Runtime, ToolRegistry
from toolcell.calls.run_state import Secrets
from toolcell.errors import SandboxUnavailable
from toolcell.service import Client, admission, bodies
from toolcell.service.admission import Admission, Share
from toolcell.service.authentication import LOOPBACK_TENANT
from toolcell.service.config import TenantConfig
from toolcell.service.service import Service
from toolcell.service.socket.connection import PART_BYTES
from toolcell.service.socket.messages import MESSAGES
from toolcell.support import daemon_threads
from toolcell.support.loop_thread import LoopThread
from toolcell.support.token_bucket import TokenBucket

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

ROWS = list(range(20_000))
CALL = "try: call_tool('double', number=[*range(20_000)])\nexcept ToolError: pass"
EVENTS = {"Accept": "text/event-stream"}
WAIT_S = 120.0


async def read_newest(http: httpx.AsyncClient, client: Client) -> None:
    newest = (await http.get("/v1/runs", params={"limit": 1})).json()["runs"][0]
    await http.get(f"/v1/runs/{newest['id']}")


Route = Callable[[httpx.AsyncClient, Client], Awaitable[Any]]


def post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Route:
    return lambda http, client: http.post(f"/v1/{path}", json=body, headers=headers)


ROUTES: dict[str, Route] = {
    "inputs": post("execute", {"code": "len(rows)", "inputs": {"rows": ROWS}}),
    "unknown members": post("execute", {"code": "1", **{f"m{number}": 0 for number in ROWS}}),
    "arguments of a call": post("execute", {"code": CALL}),
    "a recorded run": read_newest,
    "a value": post("execute", {"code": "[*range(20_000)]"}),
    "a stream": post("execute", {"code": CALL}, EVENTS),
    "a plan": post("plan", {"steps": [{"tool": f"no{number}", "args": {}} for number in range(5_000)]}),
    "a session": post("sessions/one/execute", {"code": "len(rows)", "inputs": {"rows": ROWS}}),
    "a call of a session": post("sessions/one/execute", {"code": CALL}),
    "a decision": post("suspended/none/decide", {"decisions": {}, **{f"m{number}": 0 for number in ROWS}}),
    "a commit": post("drafts/none/commit", {"approve": [str(number) for number in ROWS]}),
    "a call of a client": lambda http, client: client.execute_code(CALL),
    "a client": lambda http, client: client.execute_code("len(rows)", inputs={"rows": 4 * ROWS}),
}


PLACES = len(ROUTES) - 1  # reading takes none


class Charges(TokenBucket):
    """Notes what a tenant is charged, and never makes it wait."""

    seconds = 0.0

    def take(self, now: float, count: float = 1) -> float:
        Charges.seconds += count
        return 0.0


async def test_large_data_is_charged_to_its_tenant_on_every_route(tmp_path: Path) -> None:
    async with serving(tmp_path, registry()) as (url, service), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        service.admission.queue.large[LOOPBACK_TENANT] = Charges(1.0, 1.0)
        await http.post("/v1/sessions", json={"name": "one"})
        async with Client(url) as client:
            for name, ask in ROUTES.items():
                Charges.seconds = 0.0
                await ask(http, client)
                assert Charges.seconds > 0, name


IN_A_RUN = {"_finished", "_looked_through", "_choose_tools", "_input_files", "_parsed"}
"""What a run has done with its large data: its result and calls, its catalogue and files, texts of tools as data."""
LARGE_RUN = """
search_tools("number", limit=1)
call_tool("numbers", text="x" * 300_000)
call_tool("ask")
"""


async def test_what_a_run_does_with_its_large_data_is_charged(tmp_path: Path) -> None:
    charged = list[str]()

    class Named(daemon_threads.Account):
        def timed(self, function: Any, *args: Any) -> Any:
            charged.append(getattr(getattr(function, "func", function), "__name__", ""))  # `func`: of a partial
            return super().timed(function, *args)

    tools, seconds = ToolRegistry(), list[float]()
    for number in range(100):
        tools.register(f"tool_{number}", f"Tool of number {number}.", {"type": "object"}, lambda args: None)

    tools.register("numbers", "Return numbers as JSON.", {"type": "object"}, lambda args: str([*range(20_000)]))

    @tools.tool(requires_approval=True)
    async def ask() -> None:
        """Wait for an approval."""

    async with Runtime(tools, record=tmp_path / "audit") as runtime:
        daemon_threads.account.set(Named(seconds.append))
        context = RunContext(secrets=Secrets({"key": "hunter2-hunter2"}))
        files = {"a.txt": b"x" * 200_000}
        result = await runtime.execute_code(LARGE_RUN, context=context, files=files, on_approval="suspend")

    assert result.outcome == "suspended", result
    assert set(charged) >= IN_A_RUN, charged
    assert len(seconds) == len(charged)


def overspend(service: Service) -> None:
    service.admission.queue.charge(LOOPBACK_TENANT, 1_000, time.monotonic())


async def test_past_its_allowance_a_tenant_waits_on_every_route_while_another_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "QUIET_S", 0.0)
    async with serving(tmp_path, registry()) as (url, service), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        await http.post("/v1/sessions", json={"name": "one"})
        overspend(service)
        assert (await http.post("/v1/execute", json={"code": "1"})).json()["value"] == 1, "alone, it does not wait"
        async with Client(url) as client:
            queue = service.admission.queue
            async with service.admission.slot("other"):
                asked = [asyncio.ensure_future(ask(http, client)) for ask in ROUTES.values()]
                await until(lambda: queue.waiting == PLACES, WAIT_S)
                async with service.admission.slot("other"):
                    assert not any(each.done() for each in asked)
            await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)


async def test_who_goes_or_closes_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, registry()) as (url, service):
        queue = service.admission.queue
        async with httpx.AsyncClient(base_url=url) as http, Client(url) as client:
            await http.post("/v1/sessions", json={"name": "one"})
            overspend(service)
            async with service.admission.slot("other"):
                asked = [asyncio.ensure_future(ask(http, client)) for ask in ROUTES.values()]
                await until(lambda: queue.waiting == PLACES, WAIT_S)
                for each in asked:
                    each.cancel()
                await until(lambda: queue.counts(LOOPBACK_TENANT) == (0, 0), WAIT_S)
        assert (queue.running, queue.waiting, service.receiving.held_bytes) == (0, 0, 0)


async def test_a_run_under_way_gets_the_long_answer_of_a_tool_past_the_allowance(tmp_path: Path) -> None:
    tools = ToolRegistry()

    @tools.tool
    async def page(number: int) -> str:
        """Return the text of a page."""
        overspend(services[0])
        return "x" * 1000 * number

    async with serving(tmp_path, registry()) as (url, service), Client(url, registry=tools) as client:
        services = [service]
        async with service.admission.slot("other"):
            result = await asyncio.wait_for(client.execute_code("len(call_tool('page', number=200))"), WAIT_S)
        assert result.value == 200_000, result.error


async def test_what_follows_a_long_request_that_waits_is_served_and_the_end_of_its_client_noticed(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, registry(), grace_s=0.1) as (url, service):
        queue = service.admission.queue
        async with Client(url) as client, client.session() as session:
            overspend(service)
            async with service.admission.slot("other"):
                long = asyncio.ensure_future(client.execute_code("len(x)", inputs={"x": "y" * 3_000_000}))
                await until(lambda: queue.waiting == 1, WAIT_S)
                await asyncio.wait_for(session.interrupt(), WAIT_S)
                long.cancel()
                await until(lambda: (queue.waiting, service.receiving.held_bytes) == (0, 0), WAIT_S)
                long = asyncio.ensure_future(client.execute_code("len(x)", inputs={"x": "y" * 3_000_000}))
                await until(lambda: queue.waiting == 1, WAIT_S)
                await client.close()
                await until(
                    lambda: (queue.waiting, service.receiving.held_bytes, len(service.callers)) == (0, 0, 0), WAIT_S
                )
                await asyncio.gather(long, return_exceptions=True)


async def test_what_a_loop_of_another_thread_does_for_a_tenant_takes_no_lock_of_this_one() -> None:
    daemon_threads.account.set(daemon_threads.Account(one=asyncio.Lock()))
    other = LoopThread()
    try:
        assert await asyncio.to_thread(other.call, account) is daemon_threads.NOBODY
    finally:
        other.stop()


async def account() -> daemon_threads.Account:
    return daemon_threads.account.get()


async def test_a_large_request_has_one_deadline_and_a_key_that_was_answered_needs_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, registry()) as (url, service), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        slot, deadlines = service.admission.slot, list[tuple[float, float]]()

        def noted(tenant: str, until: float = math.inf) -> Any:
            deadlines.append((until, service.admission.deadline(tenant)))
            return slot(tenant, until)

        monkeypatch.setattr(service.admission, "slot", noted)
        body, key = {"code": "len(rows)", "inputs": {"rows": ROWS}}, {"Idempotency-Key": "one"}
        first = await http.post("/v1/execute", json=body, headers=key)
        (parsed, before_the_body), (run, _) = deadlines
        assert first.json()["value"] == len(ROWS) and run <= before_the_body and parsed == math.inf
        overspend(service)
        async with slot("other"):
            again = await http.post("/v1/execute", json=body, headers=key)
        assert again.json() == first.json() and len(deadlines) == 2


async def test_a_request_whose_body_took_the_allowance_is_carried_out_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = bodies._parsed_large

    def read_long(*given: Any) -> Any:
        overspend(services[0])
        return read(*given)

    monkeypatch.setattr(bodies, "_parsed_large", read_long)
    defaults = TenantConfig(queue_s=2)
    async with (
        serving(tmp_path, registry(), defaults=defaults) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
    ):
        services, body = [service], {"code": "len(rows)", "inputs": {"rows": ROWS}}
        async with service.admission.slot("other"):
            answer, stream = [await http.post("/v1/execute", json=body, headers=headers) for headers in ({}, EVENTS)]
        assert answer.json()["value"] == len(ROWS) and stream.status_code == 503, "the next one waits for its turn"


async def test_a_request_whose_message_took_the_allowance_is_carried_out_while_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MESSAGES.decode

    def read_long(message: bytes) -> Any:
        if len(message) > 2 * PART_BYTES:
            overspend(services[0])
        return read(message)

    async with (
        serving(tmp_path, registry(), defaults=TenantConfig(queue_s=2)) as (url, service),
        Client(url) as client,
    ):
        services, rows = [service], {"rows": "x" * 3 * PART_BYTES}
        await client.execute_code("1")
        monkeypatch.setattr(type(MESSAGES), "decode", lambda self, message: read_long(message))
        async with service.admission.slot("other"):
            assert (await client.execute_code("len(rows)", inputs=rows)).value == 3 * PART_BYTES
            with pytest.raises(SandboxUnavailable, match="no place became free"):
                await client.execute_code("len(rows)", inputs=rows)


async def test_each_tenant_has_one_piece_of_large_work_in_the_line(tmp_path: Path) -> None:
    admission, done = Admission(1, 1, lambda tenant: Share(1, 1)), list[str]()

    async def work(tenant: str) -> None:
        daemon_threads.account.set(admission.account(tenant))
        await daemon_threads.run_large(done.append, tenant)

    await asyncio.gather(*(asyncio.create_task(work(tenant)) for tenant in [*"aaaaaaaa", "b"]))
    assert done.index("b") <= 2 and len(done) == 9


async def test_a_read_waits_no_longer_than_queue_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "QUIET_S", 0.0)
    defaults = TenantConfig(queue_s=0.05)
    async with (
        serving(tmp_path, registry(), defaults=defaults) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http,
        Client(url) as client,
    ):
        overspend(service)
        async with service.admission.slot("other"):
            refused = await http.get("/v1/runs")
            page = await http.get("/runs")
            with pytest.raises(SandboxUnavailable, match="one tenant may take"):
                await client.suspended_runs()
        assert refused.status_code == 503 and "one tenant may take" in refused.json()["detail"]
        assert page.status_code == 503 and "one tenant may take" in page.text
        assert (await http.get("/v1/runs")).status_code == 200


async def test_reading_a_run_from_the_record_is_charged(tmp_path: Path) -> None:
    async with serving(tmp_path, registry()) as (url, service), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        run_id = (await http.post("/v1/execute", json={"code": "1"})).json()["run_id"]
        tenant, charged = await service.tenants.get(LOOPBACK_TENANT), list[float]()
        daemon_threads.account.set(daemon_threads.Account(charged.append))
        await tenant.recorded.detail(run_id)
        await tenant.recorded.load(run_id)
        assert len(charged) == 2


async def test_the_page_of_a_recorded_run_is_charged(tmp_path: Path) -> None:
    async with serving(tmp_path, registry()) as (url, service), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        service.admission.queue.large[LOOPBACK_TENANT] = Charges(1.0, 1.0)
        await http.post("/v1/execute", json={"code": "1"})
        (newest,) = (await http.get("/v1/runs")).json()["runs"]
        Charges.seconds = 0.0
        page = await http.get(f"/runs/{newest['chain']}/{newest['seq']}")
        assert page.status_code == 200, page.text
        assert Charges.seconds > 0
