"""`Client`: the methods of `Runtime` at a service, with the tools here: approval, drafts, sessions, plans, streams."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import Limits, Outcome, RunContext, Runtime, SandboxUnavailable, Suspension, ToolRegistry, UsageError
from toolcell.calls.context import ToolContext
from toolcell.errors import Misconfigured, SessionError, UnknownId
from toolcell.results import CommitResult, ExecutionResult
from toolcell.run.streaming import CallUpdated
from toolcell.service import Client, SyncClient, TenantConfig
from toolcell.service.client import ClientSession
from toolcell.service.socket.arguments import KEPT_OFFERS
from toolcell.sessions.session import Session
from toolcell.sync import SyncRuntime
from toolcell.tools import Approve, Deny, Edit, approval_hook

from .client_serving import serving, until

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.anyio]


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    server_tools = ToolRegistry()

    @server_tools.tool
    def at_the_service(n: int) -> int:
        """Return a number times a hundred, at the service."""
        return n * 100

    async with serving(tmp_path_factory.mktemp("state"), server_tools) as (url, _):
        yield url


class Shop:
    """Tools with effects, and a record of them."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []
        self.refunded: list[tuple[dict[str, Any], Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.registry = ToolRegistry()
        self.registry.tool(self.pay, requires_approval=True, revert=self.refund, preview=self.receipt)
        self.registry.tool(self.balance, read_only=True)
        self.registry.tool(self.who)

    def pay(self, to: str, euros: int = 1) -> dict[str, Any]:
        """Pay somebody an amount of money."""
        self.paid.append((to, euros))
        return {"receipt": len(self.paid)}

    def refund(self, args: dict[str, Any], result: Any) -> None:
        self.refunded.append((args, result))

    def receipt(self, to: str, euros: int = 1) -> dict[str, Any]:
        return {"receipt": "preview"}

    def balance(self) -> int:
        """Return how much money there is."""
        return 100

    def who(self, ctx: ToolContext) -> str:
        """Return for whom the call is made."""
        self.seen.append({"user": ctx.user_id, "custom": dict(ctx.custom), "run": ctx.run_id, "call": ctx.call_id})
        return ctx.secret("key")


PAY = "print(call_tool('pay', to='ada', euros=3)); set_result(call_tool('balance'))"

ELSEWHERE = {
    "execute_code": {"dry_run": "a Draft is an object of its process; the service keeps it: True or False"},
    "execute_plan": {"dry_run": "a dry run of a plan takes a Draft, which is an object of its process"},
    "session": {}, "stream": {}, "preflight": {}, "resume": {}, "commit": {"draft": "as for dry_run"}, "revert": {},
    "suspended_runs": {"async": "the service is asked"}, "interrupted_runs": {"async": "the service is asked"},
    "kept_sessions": {"async": "the service is asked"}, "forget_session": {"async": "the service is asked"},
    "waiting_drafts": "only the service uses it: its list of what waits has them",
    "calls_of_interrupted": "only the service uses it: its answer to an Idempotency-Key has them",
    "map": "its record and its retries read the journals of this process; gather several execute_code instead",
    "abandoned_threads": {}, "open": {}, "close": {}, "check_open": {},
}  # fmt: skip
"""Every public method of `Runtime`, and in what a `Client` differs, with the reason. A text: why there is none."""

REFUSED = {"map": ("1", [{}])}
"""What a `Client` has not, and says so."""

SESSION_ELSEWHERE = {
    "execute_code": {"dry_run": "as for Client.execute_code"},
    "can_be_put_down": "only the runtime uses it",
    "look": "only the runtime uses it",
}
"""The same of `Session`."""


def public_methods(kind: type) -> dict[str, Any]:
    return {name: each for name, each in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize(
    ("here", "there", "table"), [(Runtime, Client, ELSEWHERE), (Session, ClientSession, SESSION_ELSEWHERE)]
)
def test_every_method_is_there_with_the_same_parameters_or_named_with_a_reason(
    here: type, there: type, table: dict[str, Any]
) -> None:
    theirs = public_methods(there)
    for name, method in public_methods(here).items():
        reasons = table.get(name, {})
        if isinstance(reasons, str):
            assert name not in theirs or (there is Client and name in REFUSED)
            continue
        assert name in theirs, f"{there.__name__} has no {name}"
        mine, its = parameters(method), parameters(theirs[name])
        for parameter in mine.keys() | its.keys():
            if parameter not in reasons:
                kinds = [each[parameter].kind if parameter in each else None for each in (mine, its)]
                defaults = [each[parameter].default if parameter in each else None for each in (mine, its)]
                assert kinds[0] == kinds[1] and defaults[0] == defaults[1], f"{name}({parameter})"
        if "async" not in reasons:
            assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(theirs[name]), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_client_cannot_do_is_refused_with_what_to_do(name: str) -> None:
    for client in (Client("http://127.0.0.1:9"), SyncClient("http://127.0.0.1:9")):
        with pytest.raises(UsageError, match=f"{name} needs a Runtime in this process; .*execute_code"):
            getattr(client, name)(*REFUSED[name])


def test_the_sync_client_has_every_method_of_the_sync_runtime() -> None:
    assert public_methods(SyncRuntime).keys() <= public_methods(SyncClient).keys()
    for name, method in public_methods(SyncRuntime).items():
        assert parameters(method) == parameters(public_methods(SyncClient)[name]), name


async def test_an_approval_hook_of_the_client_is_asked_and_the_call_is_made_here(url: str) -> None:
    shop, asked = Shop(), []
    shop.registry.add_hook(approval_hook(lambda call: asked.append(dict(call.args)) or Approve()))
    async with Client(url, registry=shop.registry) as client:
        result = await client.execute_code(PAY)

    assert result.ok and result.value == 100 and result.logs.text == "{'receipt': 1}\n"
    assert (asked, shop.paid) == ([{"to": "ada", "euros": 3}], [("ada", 3)])


async def test_a_call_that_nobody_approves_is_not_made(url: str) -> None:
    shop = Shop()
    async with Client(url, registry=shop.registry) as client:
        result = await client.execute_code(PAY)
        denied = await client.execute_code(PAY, on_approval="deny")

    assert result.error is not None and "nobody approved this call" in result.error.message
    assert denied.outcome is Outcome.ERROR and shop.paid == []


async def test_a_suspended_run_is_resumed_with_other_arguments(url: str) -> None:
    shop = Shop()
    async with Client(url, registry=shop.registry) as client:
        waits = await client.execute_code(PAY, on_approval="suspend")
        assert waits.outcome is Outcome.SUSPENDED and waits.suspension is not None and shop.paid == []
        known = await client.suspended_runs()
        assert [each.run_id for each in known] == [waits.suspension.run_id]
        (call,) = waits.suspension.calls
        assert isinstance(known[0], Suspension) and call.args == {"to": "ada", "euros": 3}
        result = await client.resume(waits.suspension, {call.id: Edit({"to": "bob", "euros": 2})})
        again = await client.execute_code(PAY, on_approval="suspend")
        assert again.suspension is not None
        refused = await client.resume(again.suspension, {again.suspension.calls[0].id: Deny("too much")})

    assert result.value == 100 and shop.paid == [("bob", 2)]
    assert refused.error is not None and "too much" in refused.error.message


async def test_a_draft_is_committed_and_reverted_with_the_tools_here(url: str) -> None:
    shop = Shop()
    async with Client(url, registry=shop.registry) as client:
        draft = await client.execute_code(PAY, dry_run=True)
        assert [str(each) for each in draft.effects] == ['effect-1: pay(to="ada", euros=3)  (line 1)  needs approval']
        assert draft.logs.text == "{'receipt': 'preview'}\n" and shop.paid == []
        made = await client.commit(draft)
        assert made.ok and shop.paid == [("ada", 3)]
        undone = await client.revert(made)

    assert undone.ok and shop.refunded == [({"to": "ada", "euros": 3}, {"receipt": 1})]


async def test_an_unknown_draft_or_nothing_to_revert_is_the_error_that_a_runtime_raises(url: str) -> None:
    nothing = CommitResult("nobody", (), journal_id="nobody")
    async with Client(url, registry=Shop().registry) as client, Runtime() as runtime:
        for here in (client, runtime):
            with pytest.raises(UnknownId, match="there is no draft 0123456789abcdef"):
                await here.commit("0123456789abcdef")
            with pytest.raises(UnknownId, match="nothing of run nobody to revert"):
                await here.revert(nothing)


async def test_context_secrets_and_custom_data_stay_here_and_the_tools_see_them(url: str) -> None:
    from toolcell import Secrets

    shop = Shop()
    context = RunContext(user_id="u1", custom={"k": 1}, secrets=Secrets({"key": "hunter22"}))
    async with Client(url, registry=shop.registry) as client:
        result = await client.execute_code("set_result(call_tool('who'))", context=context)

    assert result.value == "[redacted]"  # the secret never leaves this process
    assert shop.seen == [{"user": "u1", "custom": {"k": 1}, "run": result.run_id, "call": "call_1"}]


async def test_a_session_keeps_state_files_and_what_waits(url: str) -> None:
    shop = Shop()
    async with Client(url, registry=shop.registry) as client, client.session("remote-1") as session:
        await session.execute_code("x = 40")
        assert (await session.execute_code("x + 2")).value == 42
        await session.put_files({"a.txt": "hello"})
        assert [(file.name, file.size) for file in await session.files()] == [("a.txt", 5)]
        assert await session.read_file("a.txt") == b"hello"
        assert session.id == "remote-1" and session.is_live
        waits = await session.execute_code("call_tool('pay', to='ada')", on_approval="suspend")
        assert waits.suspension is not None and isinstance(session.waiting, Suspension)
        done = await session.resume(waits.suspension, {waits.suspension.calls[0].id: Approve()})
        assert done.ok and session.waiting == "" and shop.paid == [("ada", 1)]
        async with await session.fork() as copy:
            assert (await copy.execute_code("x")).value == 40 and copy.id != session.id
        await session.put_down()
        assert (await session.execute_code("x")).value == 40
        await session.reset()
        assert (await session.execute_code("x")).error is not None
        with pytest.raises(UsageError, match="cannot be read"):
            await session.read_file("nothing")
    with pytest.raises(SessionError, match="not open"):
        await session.execute_code("1")


async def test_a_script_of_a_session_is_interrupted_from_another_task(url: str) -> None:
    began = asyncio.Event()
    async with Client(url) as client, client.session() as session:
        running = asyncio.create_task(
            session.execute_code("print('on', flush=True)\nwhile True: pass", on_log=lambda *_: began.set())
        )
        await began.wait()
        assert await session.interrupt()
        assert (await running).outcome is Outcome.CANCELLED
        assert not await session.interrupt()


async def test_without_a_registry_scripts_call_the_tools_of_the_service(url: str) -> None:
    async with Client(url) as client:
        assert (await client.execute_code("call_tool('at_the_service', n=2)")).value == 200


async def test_tools_of_both_are_called_when_that_is_asked_for(url: str) -> None:
    shop = Shop()
    script = "set_result([call_tool('at_the_service', n=2), call_tool('balance')])"
    async with Client(url, registry=shop.registry, server_tools=True) as client:
        assert (await client.execute_code(script)).value == [200, 100]
    async with Client(url, registry=shop.registry) as client:
        assert "unknown tool" in str((await client.execute_code(script)).error)


async def test_a_plan_runs_with_the_tools_here(url: str) -> None:
    shop = Shop()
    async with Client(url, registry=shop.registry) as client:
        rows = await client.execute_plan([{"tool": "balance", "args": {}}, {"tool": "pay", "args": {"to": "x"}}])
        waits = await client.execute_plan([{"tool": "pay", "args": {"to": "y"}}], on_approval="suspend")
        assert waits.suspension is not None
        done = await client.resume(waits.suspension, {waits.suspension.calls[0].id: Approve()})
        [wrong] = await client.execute_plan([{"tool": 1}])
        assert "unknown tool: 1" in wrong["error"]
        with pytest.raises(UsageError):
            await client.execute_plan([])

    assert [row["status"] for row in rows] == ["ok", "error"] and rows[0]["result"] == 100
    assert done.value[0]["result"] == {"receipt": 1} and shop.paid == [("y", 1)]


async def test_a_stream_has_prints_calls_and_the_result(url: str) -> None:
    script = "print('a'); call_tool('balance'); progress(1); call_tool('nope')"
    async with Client(url, registry=Shop().registry) as client:
        events = [event async for event in client.stream(script)]

    told = [(type(each).__name__, getattr(each, "tool", "")) for each in events]
    assert told == [
        ("LogPrinted", ""),
        ("CallStarted", "balance"),
        ("CallEnded", "balance"),
        ("ProgressReported", ""),
        ("CallStarted", "nope"),
        ("CallEnded", "nope"),
        ("RunFinished", ""),
    ]


async def test_a_stream_has_what_tools_here_report_in_a_run_there(url: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def count(ctx: ToolContext) -> int:
        """Count, and report it."""
        ctx.update("half way", details={"done": 1})
        return 2

    async with Client(url, registry=registry) as client:
        events = [event async for event in client.stream("call_tool('count')") if isinstance(event, CallUpdated)]

    assert [(each.tool, each.text, each.details) for each in events] == [("count", "half way", {"done": 1})]


async def test_leaving_a_stream_ends_the_run_at_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, service), Client(url) as client:
        async with client.stream("import time\nwhile True: print('x', flush=True); time.sleep(0.01)") as events:
            await anext(events)
        await until(lambda: len(service.runs) == 0)


async def test_cancelling_the_caller_ends_the_run_and_its_calls(tmp_path: Path) -> None:
    registry, began, ended = ToolRegistry(), asyncio.Event(), asyncio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until this is cancelled."""
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(tmp_path) as (url, service), Client(url, registry=registry) as client:
        running = asyncio.create_task(client.execute_code("call_tool('wait')"))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended.is_set() and len(service.runs) == 0


async def test_an_event_cancels_a_run_with_a_result(url: str) -> None:
    cancel = anyio.Event()
    async with Client(url) as client:
        result = await client.execute_code(
            "print('on', flush=True)\nwhile True: pass", cancel=cancel, on_log=lambda *_: cancel.set()
        )

    assert result.outcome is Outcome.CANCELLED and result.logs.text == "on\n"


async def test_what_a_callback_raises_comes_out_and_ends_the_run(tmp_path: Path) -> None:
    def on_log(stream: str, text: str) -> None:
        raise LookupError("stop it")

    async with serving(tmp_path) as (url, service), Client(url) as client:
        with pytest.raises(LookupError, match="stop it"):
            await client.execute_code("print('on', flush=True)\nwhile True: pass", on_log=on_log)
        assert len(service.runs) == 0


async def test_limits_may_be_lower_than_the_tenants_and_not_higher(url: str) -> None:
    async with Client(url) as client:
        result = await client.execute_code("while True: pass", limits=Limits(wall_s=0.5))
        with pytest.raises(UsageError, match="wall_s"):
            await client.execute_code("1", limits=Limits(wall_s=9000))
        with pytest.raises(UsageError, match="wall_s"):
            client_session = client.session(limits=Limits(wall_s=9000))
            await client_session.open()

    assert result.outcome is Outcome.TIMEOUT


async def test_a_tool_that_is_set_up_wrongly_raises_out_of_the_run(url: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    def broken() -> None:
        """Find out that a key is missing."""
        raise Misconfigured("set KEY first")

    async with Client(url, registry=registry) as client:
        with pytest.raises(Misconfigured, match="set KEY first"):
            await client.execute_code("call_tool('broken')")


async def test_a_saved_script_that_is_a_tool_here_runs_at_the_service(url: str) -> None:
    registry = ToolRegistry()
    async with Client(url, registry=registry) as client:
        registry.enable_code_execution(client)
        result = await registry.execute("execute_code", {"code": "set_result(40 + 2)"})

    assert not result.is_error and "42" in result.text


async def test_what_is_registered_later_can_be_called_in_the_next_run(url: str) -> None:
    registry = ToolRegistry()
    async with Client(url, registry=registry) as client:
        assert (await client.execute_code("call_tool('late')")).error is not None

        @registry.tool
        def late() -> int:
            """Return a number, for the tests."""
            return 5

        assert (await client.execute_code("call_tool('late')")).value == 5


@pytest.mark.slow
async def test_many_runs_of_one_client_go_on_at_once(url: str) -> None:
    registry, together = ToolRegistry(), asyncio.Event()
    waiting: list[int] = []

    @registry.tool
    async def meet(n: int) -> int:
        """Wait until eight calls wait."""
        waiting.append(n)
        if len(waiting) == 8:
            together.set()
        await together.wait()
        return n

    async with Client(url, registry=registry) as client:
        runs = [client.execute_code(f"set_result(call_tool('meet', n={n}))") for n in range(8)]
        results: list[ExecutionResult] = await asyncio.gather(*runs)

    assert [each.value for each in results] == list(range(8))


@pytest.mark.slow
async def test_runs_with_more_toolsets_than_the_service_keeps_go_on_at_once_and_in_turn(url: str) -> None:
    def toolset(n: int) -> ToolRegistry:
        registry = ToolRegistry()

        @registry.tool
        def number() -> int:
            """Return the number of its toolset."""
            return n

        return registry

    script = "set_result(call_tool('number'))"
    async with Client(url) as client:
        toolsets = [toolset(n) for n in range(2 * KEPT_OFFERS)]
        together = await asyncio.gather(*(client.execute_code(script, tools=each) for each in toolsets))
        in_turn = [await client.execute_code(script, tools=each) for each in toolsets]

    assert [each.value for each in together] == [each.value for each in in_turn] == list(range(2 * KEPT_OFFERS))


async def test_a_sync_client_runs_scripts_sessions_and_streams(url: str) -> None:
    await asyncio.to_thread(_use_sync_client, url)


def _use_sync_client(url: str) -> None:
    shop = Shop()
    with SyncClient(url, registry=shop.registry) as client:
        assert client.execute_code("set_result(call_tool('balance'))").value == 100
        assert [type(each).__name__ for each in client.stream("print(1)")] == ["LogPrinted", "RunFinished"]
        with client.session() as session:
            session.execute_code("x = 1")
            assert session.execute_code("x").value == 1
        assert isinstance(client.suspended_runs(), list) and isinstance(client.interrupted_runs(), list)
        assert isinstance(client.kept_sessions(), list)
        with pytest.raises(UsageError, match="no journal of a session named 'none'"):
            client.forget_session("none")
        assert client.execute_plan([{"tool": "balance", "args": {}}])[0]["result"] == 100


async def test_a_service_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"127\.0\.0\.1:9/v1/connect cannot be reached"):
        await Client("http://127.0.0.1:9", connect_s=5).open()


@pytest.mark.parametrize("url", ["", "localhost:8700", "ftp://x", "http://x/?token=1", "http://u:p@x", "http://x/#y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="url="):
        Client(url)


@pytest.mark.slow
def test_a_client_needs_asyncio_and_says_so() -> None:
    trio = pytest.importorskip("trio")

    async def main() -> None:
        with pytest.raises(UsageError, match="needs asyncio"):
            await Client("http://127.0.0.1:9").open()

    trio.run(main)


@pytest.mark.slow
def test_the_example_prints_what_it_shows() -> None:
    program = Path(__file__).parents[2] / "examples" / "tools_here_sandboxes_there.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok ['apple'] looked at 2 kinds ['in_stock', 'in_stock']\nin a session: 42\n"


@pytest.mark.slow
async def test_frames_go_to_scripts_at_a_service_and_come_back(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1, 2]}, index=["x", "y"])
    tools = ToolRegistry()
    tools.register("frame", "Returns a frame of two rows", None, lambda args: frame)
    defaults = TenantConfig(packages=("numpy", "pandas"))
    async with serving(tmp_path, defaults=defaults) as (url, _), Client(url, registry=tools) as client:
        result = await client.execute_code("set_result([df, call_tool('frame')])", inputs={"df": frame})
        assert result.ok, result.error
        for value in result.value:
            pandas.testing.assert_frame_equal(value.to_pandas(), frame)
