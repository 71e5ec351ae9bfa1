"""`McpServer` as clients of the official SDK see it, with the protocol of sessions and with the one without."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from rows import each_row
from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.calls.arguments import ArgumentChecker
from toolcell.calls.result import File, ToolResult
from toolcell.journal.approval_tokens import make_token
from toolcell.mcp.content import IN_PART, answer, question, readable_only
from toolcell.mcp.listing import code_text
from toolcell.mcp.server import INSTRUCTIONS, McpServer
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, PendingCall
from toolcell.tools import Approve, Deny, ToolContext

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(params=["legacy", "auto"])
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def make_registry() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers and return the sum."""
        return a + b

    @registry.tool(requires_approval=True)
    async def pay(amount: int) -> str:
        """Pay an amount of money to somebody."""
        return f"paid {amount}"

    return registry


@asynccontextmanager
async def connected(
    mode: str, registry: ToolRegistry | None = None, decide: str = "", **options: Any
) -> AsyncIterator[Client]:
    """`decide`: what the client's user says; empty for a client that cannot ask."""
    asked: list[str] = []

    async def ask(ctx: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"decision": decide, "reason": "too much"})

    async def note(params: types.LoggingMessageNotificationParams) -> None:
        logs.append((params.level, params.data))

    logs: list[tuple[str, Any]] = []
    clients: dict[str, Any] = {"elicitation_callback": ask} if decide else {}
    if mode != "legacy":
        clients["log_level"] = "debug"
    pool, limits = PoolConfig(warm=1), Limits(wall_s=600, tool_calls=20)
    async with (
        Runtime(registry or make_registry(), pool=pool, limits=limits) as runtime,
        McpServer(runtime, has_one_client=True, **options) as server,
        Client(server.server, mode=mode, logging_callback=note, **clients) as client,
    ):
        noted: Any = client
        noted.asked, noted.logs = asked, logs
        yield client


def text_of(result: types.CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))


async def test_a_script_is_answered_with_text_data_files_and_pictures(mode: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    script = """
print("begun")
progress("half way")
open("chart.png", "wb").write(png)
open("rows.csv", "w").write("a,b")
open("raw.bin", "wb").write(b"\\xff")
set_result({"sum": call_tool("add", a=1, b=2)}, files=["chart.png", "rows.csv", "raw.bin"])
"""
    async with connected(mode) as client:
        script = f"import base64\npng = base64.b64decode({base64.b64encode(PNG)!r})\n{script}"
        result = await client.call_tool("execute_code", {"code": script}, progress_callback=note)
        logs = client.logs  # type: ignore[attr-defined]

    image, rows, raw = result.content[1:]
    assert isinstance(image, types.ImageContent) and base64.b64decode(image.data) == PNG
    assert isinstance(rows, types.EmbeddedResource) and isinstance(rows.resource, types.TextResourceContents)
    assert (rows.resource.text, rows.resource.uri.endswith("/rows.csv")) == ("a,b", True)
    assert isinstance(raw, types.EmbeddedResource) and isinstance(raw.resource, types.BlobResourceContents)
    assert result.structured_content["value"] == {"sum": 3} and not result.is_error
    assert result.structured_content["calls"] == [{"tool": "add", "status": "ok", "line": 9}]
    assert '"sum": 3' in text_of(result) and "begun" in text_of(result)
    assert told == [(1, "half way"), (2, "calls add")]
    assert logs == [("info", "begun\n")]


PAYMENTS = {
    "long": ({"note": "rent " * 600, "to": "attacker", "euros": 99999, "pad": "x" * 1500}, False),
    "short": ({"note": "rent\n  to=\x1b]", "to": "attacker", "euros": 99999, "pad": "x"}, True),
}


@pytest.mark.slow
@each_row("kind", PAYMENTS)
async def test_a_question_shows_every_argument_and_what_it_cuts_cannot_be_approved(mode: str, kind: str) -> None:
    args, is_whole = PAYMENTS[kind]
    registry, made = ToolRegistry(), list[Any]()

    @registry.tool(requires_approval=True)
    async def send(note: str, to: str, euros: int, pad: str) -> str:
        """Send money to somebody, with a note."""
        made.append(to)
        return "sent"

    async with connected(mode, registry, decide="approve") as client:
        result = await client.call_tool("execute_code", {"code": f"call_tool('send', {args!r})"})
        (asked,) = client.asked  # type: ignore[attr-defined]
    async with connected(mode, registry) as client:
        told = await client.call_tool("execute_code", {"code": f"call_tool('send', {args!r})"})

    lines = asked.splitlines()
    assert lines[2:4] == ['  to="attacker"', "  euros=99999"] and len(lines) == 7 + (not is_whole)
    assert "\x1b" not in asked and ("(3000 characters, sha256 " in lines[1]) is not is_whole
    assert made == ["attacker"] * is_whole and ("Not all of it is shown" in asked) is not is_whole
    assert is_whole or "a form cannot show all of its arguments" in text_of(result)
    assert 'to="attacker", euros=99999' in text_of(told), "also where a model is told"
    assert told.structured_content["suspension"]["calls"][0]["args"] == args  # all of it can be read


@pytest.mark.parametrize("size", [997, 998])
def test_nothing_is_approved_that_no_form_has_shown_whole(size: int) -> None:
    args = {"data": b"x" * size}
    call = PendingCall("call_1", "send", args, line=1, digest="0" * 64)
    is_whole = question(call).requested_schema["properties"]["decision"]["enum"] == ["approve", "deny"]
    token = make_token(b"k" * 32, token_id="t", run="run", source="", tools="", expires=0, calls=[call])
    assert is_whole is (size == 997)

    decided = readable_only({"call_1": Approve(), "call-1": Approve(), "other": Approve(), "no": Deny("no")}, token)

    assert decided["call_1"] == (Approve() if is_whole else Deny(IN_PART))
    assert decided["call-1"] == decided["other"] == Deny(IN_PART) and decided["no"] == Deny("no")
    assert readable_only({"call_1": Approve()}, "0" * 32) == {"call_1": Deny(IN_PART)}, "the id of a run shows nothing"


async def test_cancelling_a_call_ends_its_script_and_the_tools_that_it_called(mode: str) -> None:
    registry, begun, ended = ToolRegistry(), anyio.Event(), anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until the call is given up."""
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with connected(mode, registry) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.call_tool, "execute_code", {"code": "call_tool('wait')"})
        await begun.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.fail_after(60):
            await ended.wait()


@pytest.mark.parametrize(("decide", "said"), [("approve", "paid 3"), ("deny", "too much")])
async def test_the_client_s_user_decides_about_a_call(mode: str, decide: str, said: str) -> None:
    async with connected(mode, decide=decide) as client:
        listed = [tool.name for tool in (await client.list_tools()).tools]
        result = await client.call_tool("execute_code", {"code": "call_tool('pay', amount=3)"})
        refused = await client.call_tool("resume", {"token": "x", "decisions": {}})
        asked = client.asked  # type: ignore[attr-defined]

    assert said in text_of(result) and result.is_error is (decide == "deny")
    assert asked == ["A script wants to call pay:\n  amount=3\nLine 1 of the script.\nneeds approval"]
    assert "resume" not in listed  # a model may not answer in the place of a person who can be asked
    assert refused.is_error and "asks its user" in text_of(refused)


async def test_a_client_that_cannot_ask_gets_a_token_and_resumes_with_it_once(mode: str) -> None:
    async with connected(mode) as client:
        code = "pay = call_tool('pay', amount=3)\n(pay, call_tool('add', a=1, b=1))"
        waiting = await client.call_tool("execute_code", {"code": code})
        suspension = waiting.structured_content["suspension"]
        given = {"token": suspension["token"], "decisions": {suspension["calls"][0]["id"]: "approve"}}
        result = await client.call_tool("resume", given)
        again = await client.call_tool("resume", given)

    assert waiting.structured_content["outcome"] == "suspended" and suspension["token"] in text_of(waiting)
    assert suspension["calls"][0]["args"] == {"amount": 3}
    assert result.structured_content["value"] == ["paid 3", 2]
    assert again.is_error


async def test_tools_are_the_client_s_own_if_the_server_shows_them(mode: str) -> None:
    async with connected(mode, decide="approve", exposes_tools=True) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        added = await client.call_tool("add", {"a": 1, "b": 2})
        wrong = await client.call_tool("add", {"a": "x", "b": 2})
        paid = await client.call_tool("pay", {"amount": 3})
        asked = client.asked  # type: ignore[attr-defined]

    assert set(listed) == {"execute_code", "search_tools", "describe_tools", "add", "pay"}
    assert listed["add"].input_schema["required"] == ["a", "b"]
    assert (text_of(added), added.is_error, added.structured_content) == ("3", False, {"result": 3})
    assert listed["add"].output_schema is not None and listed["add"].output_schema["required"] == ["result"]
    assert wrong.is_error and "must be integer" in text_of(wrong)
    assert "paid 3" in text_of(paid) and len(asked) == 1 and paid.structured_content == {"result": "paid 3"}


async def test_a_client_hears_the_progress_of_its_own_tools(mode: str) -> None:
    registry, told = ToolRegistry(), list[tuple[float, str | None]]()

    @registry.tool
    async def copy(ctx: ToolContext) -> str:
        """Copy all the files."""
        ctx.update("half way")
        ctx.update(details={"files": 2})
        return "copied"

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async with connected(mode, registry, exposes_tools=True) as client:
        answered = await client.call_tool("copy", {}, progress_callback=note)

    assert text_of(answered) == "copied"
    assert told == [(1, "half way"), (2, '{"files": 2}')]


async def test_numbers_that_json_does_not_have_are_read_as_such_and_named_where_a_type_forbids_them(mode: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def plain():  # type: ignore[no-untyped-def]
        """Return numbers of any kind."""
        return [math.inf]

    @registry.tool
    async def typed() -> dict[str, float]:
        """Return numbers of one kind."""
        return {"x": math.nan}

    async with connected(mode, registry, exposes_tools=True) as client:
        assert text_of(await client.call_tool("plain", {})) == "[Infinity]"
        assert "x: must be number" in text_of(await client.call_tool("typed", {}))
        with pytest.raises(MCPError, match=r"there are execute_code, .*, plain, typed"):
            await client.call_tool("other", {})


async def test_files_of_a_client_s_own_tools_are_pictures_sounds_and_resources(mode: str) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def draw() -> ToolResult:
        """Draw a picture, with a sound and a table."""
        made = (("p.png", PNG, "image/png"), ("s.wav", b"RIFF", "audio/wav"), ("t.csv", b"a,b", "text/csv"))
        return ToolResult(value="drawn", has_value=True, files=tuple(File(*each) for each in made))

    @registry.tool(requires_approval=True)
    async def paint() -> File:
        """Paint a picture if somebody approves it."""
        return File("p.png", PNG, "image/png")

    async with connected(mode, registry, decide="approve", exposes_tools=True) as client:
        drawn = await client.call_tool("draw", {})
        painted = await client.call_tool("paint", {})

    assert [part.type for part in drawn.content] == ["text", "image", "audio", "resource"]
    assert base64.b64decode(drawn.content[1].data) == PNG
    assert [part.type for part in painted.content] == ["text", "image"]
    assert text_of(drawn) == "drawn"


async def test_a_client_s_scripts_share_a_session_if_the_server_keeps_it(mode: str) -> None:
    async with connected(mode, keeps_state=True) as client:
        tool = (await client.list_tools()).tools[0]
        await client.call_tool("execute_code", {"code": "x = 40"})
        result = await client.call_tool("execute_code", {"code": "x + 2"})

    assert result.structured_content["value"] == 42
    assert tool.description is not None and "stay from one script to the next" in tool.description


async def test_limits_can_be_lowered_and_not_raised(mode: str) -> None:
    script = {"code": "call_tool('add', a=1, b=2); call_tool('add', a=1, b=2)"}
    async with connected(mode) as client:
        lowered = await client.call_tool("execute_code", script | {"limits": {"tool_calls": 1}})
        raised = await client.call_tool("execute_code", script | {"limits": {"tool_calls": 21}})

    assert lowered.structured_content["outcome"] == "call_limit"
    assert raised.is_error and "tool_calls" in text_of(raised) and "20" in text_of(raised)


@pytest.mark.parametrize(
    ("tool", "args", "said"),
    [
        ("execute_code", {}, "code"),
        ("execute_code", {"code": "1", "inputs": {"not a name": 1}}, "choose an identifier"),
        ("execute_code", {"code": "1/0"}, "ZeroDivisionError"),
        ("describe_tools", {"names": ["ad"]}, "there is no tool 'ad'"),
        ("resume", {"token": "forged", "decisions": {}}, "there is no run forged to resume"),
        (
            "resume",
            {"token": "x", "decisions": {f"c{n}": "deny" for n in range(10_001)}},
            "10001 decisions, limit 10000",
        ),
    ],
)
async def test_what_is_wrong_with_a_call_is_told_to_the_model(tool: str, args: dict[str, Any], said: str) -> None:
    async with connected("legacy") as client:
        result = await client.call_tool(tool, args)
        with pytest.raises(MCPError, match="there is no tool 'nothing'"):
            await client.call_tool("nothing", {})

    assert result.is_error and said in text_of(result)


async def test_large_arguments_of_a_client_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, check = list[bool](), ArgumentChecker.check

    def noted(checker: ArgumentChecker, args: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return check(checker, args)

    monkeypatch.setattr(ArgumentChecker, "check", noted)
    async with connected("legacy") as client:
        for count in (1, 10_001):
            decisions = {f"c{number}": "deny" for number in range(count)}
            assert (await client.call_tool("resume", {"token": "x", "decisions": decisions})).is_error

    assert threads == [False, True]


def many(count: int) -> ToolRegistry:
    registry = ToolRegistry()

    def make(number: int) -> Callable[..., Any]:
        async def tool(item: str, amount: int = 1) -> str:
            """Move items of one kind from the shelf to the counter of the shop."""
            return item

        tool.__name__ = f"move_{number}"
        return tool

    for number in range(count):
        registry.add(make(number))

    @registry.tool
    async def create_issue(title: str) -> str:
        """Open a ticket in the tracker of a repository."""
        return title

    return registry


@pytest.mark.slow
async def test_five_hundred_tools_cost_less_than_a_thousand_tokens_until_the_client_searches() -> None:
    async with connected("legacy", many(500)) as client:
        listed = await client.list_tools()
        found = await client.call_tool("search_tools", {"query": "open an issue"})
        stub = await client.call_tool("describe_tools", {"names": ["create_issue"]})

    shown = listed.model_dump_json(by_alias=True, exclude_none=True)
    assert "501 tools" in shown and "move_7" not in shown
    bpe_openai = pytest.importorskip("bpe_openai")
    assert len(bpe_openai.get_encoding("o200k_base").encode(shown + INSTRUCTIONS)) < 1000
    assert text_of(found).startswith("create_issue(title: str) -> str  # Open a ticket")
    assert "def create_issue(*, title: str) -> str:" in text_of(stub)


async def test_a_small_catalogue_is_shown_as_stubs_and_a_larger_one_as_names() -> None:
    for registry, shown in ((make_registry(), "def add(*, a: int"), (many(40), "41 tools: move_0, move_1,")):
        assert shown in code_text(Runtime(registry), keeps_state=False)


def test_a_client_is_told_whether_scripts_start_afresh() -> None:
    fresh, kept = (code_text(Runtime(make_registry()), keeps_state=keeps_state) for keeps_state in (False, True))

    assert "Every script starts afresh" in fresh and "stay from one script" not in fresh
    assert "stay from one script" in kept and "starts afresh" not in kept


@pytest.mark.slow
async def test_a_saved_script_is_called_from_a_client_s_script_and_as_its_own_tool(mode: str) -> None:
    registry = make_registry()
    inputs = {"type": "object", "properties": {"numbers": {"type": "array"}}, "required": ["numbers"]}
    registry.save_script(
        "add_up", "total = 0\nfor n in numbers:\n    total = tools.add(a=total, b=n)\ntotal", inputs=inputs
    )
    async with connected(mode, registry, exposes_tools=True) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        direct = await client.call_tool("add_up", {"numbers": [1, 2, 3]})
        scripted = await client.call_tool("execute_code", {"code": "tools.add_up(numbers=[4, 5])"})
        wrong = await client.call_tool("add_up", {})
        long = await client.call_tool("add_up", {"numbers": [2**70]})

    assert listed["add_up"].input_schema == inputs
    assert (text_of(direct), direct.is_error) == ("6", False)
    assert "9" in text_of(scripted) and not scripted.is_error
    assert wrong.is_error and "numbers" in text_of(wrong)
    assert text_of(long) == "invalid arguments of add_up: numbers[0]: integer has more than 64 bits (71)"


def test_the_data_of_an_error_is_as_clean_as_its_text() -> None:
    error = ErrorInfo("ValueError", "\x1b]0;title\x07 \u202e")
    told = answer(ExecutionResult("r", Outcome.ERROR, error=error)).structured_content

    assert told is not None and "\x1b" not in told["error"]["message"] and "\u202e" not in told["error"]["message"]
