"""Group B: one result model, and the four formats that it replaces."""

from __future__ import annotations

import dataclasses
import json
import threading
from datetime import datetime
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rows import each_row
from tool_routes import ROUTES, answer_by
from toolcell import Runtime, Secrets, compat
from toolcell.agents import Agent, ToolLoopConfig, run_tool_loop, user
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.result import TokenUsage
from toolcell.calls.run_state import JobTable, RunState
from toolcell.errors import ToolError
from toolcell.support import daemon_threads
from toolcell.support.text import cut_text
from toolcell.tools import (
    ErrorCode,
    File,
    Image,
    RunContext,
    Status,
    Text,
    ToolContext,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


@pytest.mark.conforms("B1")
def test_content_and_error_are_two_keys_and_the_second_only_when_there_is_one() -> None:
    assert compat.to_content_error(ToolResult.ok("fine")) == {"content": "fine"}
    assert compat.to_content_error(ToolResult.fail("no")) == {"content": "", "error": "no"}
    assert compat.to_content_error(ToolResult.of({"a": 1})) == {"content": '{"a": 1}'}


def test_a_model_reads_characters_and_not_their_escapes() -> None:
    assert ToolResult.of({"city": "Zürich", "名": ["東京"]}).text == '{"city": "Zürich", "名": ["東京"]}'


@pytest.mark.conforms("B9")
def test_the_model_reads_the_attached_exception_when_there_is_no_text() -> None:
    assert compat.to_for_llm(ToolResult().with_error(ValueError("disk full")))["for_llm"] == "disk full"
    assert ToolResult.fail("", code="x").with_error(ValueError("disk full")).text == "disk full"
    assert ToolResult.ok("fine").with_error(ValueError("disk full")).text == "fine"


@pytest.mark.conforms("B12", "EX-31", "B11", "J6")
async def test_failure_is_a_flag_beside_the_text_whatever_the_text_begins_with() -> None:
    async def read() -> str:
        """Read a file that looks like an error."""
        return "error: this is the content of the file"

    async def fetch(url: str) -> ToolResult:
        """Fetch a page, of no file."""
        return ToolResult.fail(f"Cannot fetch local file URLs: {url}")

    url, registry = {"url": "file:///etc/passwd"}, ToolRegistry([read, fetch])
    model = ScriptedModel([calls(("read", {}), ("fetch", url)), "done"])
    config = ToolLoopConfig(provider=model, tools=registry, error_style="error:")

    run = await run_tool_loop(config, [user("go")])

    good, bad = run.messages[2:4]
    assert good == {"role": "tool", "content": "error: this is the content of the file", "tool_call_id": "call_0_read"}
    assert bad["content"] == "error: Cannot fetch local file URLs: file:///etc/passwd"
    assert bad["is_error"] is True
    assert model.requests[1].messages[-1]["content"] == bad["content"]
    assert compat.observed(await registry.execute("fetch", url)) == f"ERROR: {bad['content'][7:]}"


PICTURE = Image(b"\x89PNG\r\n\x1a\n")
RESULTS = [
    ToolResult.ok("text"),
    ToolResult.ok("text", value={"a": 1}),
    ToolResult.of([1, 2]),
    ToolResult(parts=(Text("see"), PICTURE), details={"rows": 3}, terminate=True),
    ToolResult.user("for both"),
    ToolResult.silenced("for the model"),
    ToolResult.async_("started", job_id="job_1"),
    ToolResult.fail("broken"),
    ToolResult.fail("broken", output="half of it"),
    ToolResult.fail("blocked", status=Status.BLOCKED, code=ErrorCode.BLOCKED),
    ToolResult.fail("late", status=Status.TIMEOUT, code=ErrorCode.TIMEOUT),
    ToolResult.fail("stopped", status=Status.CANCELLED, code=ErrorCode.CANCELLED),
]


@pytest.mark.conforms("B13", "B14", "B1", "B3", "B6", "B10")
@each_row("result", RESULTS, ids=lambda result: f"{result.status}-{result.text[:12]}")
def test_every_result_has_its_place_in_all_four_shapes(result: ToolResult) -> None:
    pair, parts = compat.to_content_error(result), compat.to_parts(result)
    for_llm, ok_err = compat.to_for_llm(result), compat.to_ok_err(result)

    assert ("error" in pair) == parts.is_error == for_llm["is_error"] == isinstance(ok_err, compat.Err)
    assert parts.is_error == (result.status not in (Status.OK, Status.PENDING))
    assert for_llm["async"] == (result.status is Status.PENDING)
    assert (parts.details, parts.terminate) == (result.details, result.terminate)
    assert compat.observed(result) == f"{'ERROR' if result.is_error else 'SUCCESS'}: {result.text}"


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@pytest.mark.conforms("B14", "B1", "B3", "B6", "B8", "B10")
@given(text=texts, message=texts.filter(bool), flags=st.tuples(st.booleans(), st.booleans()), shown=texts)
def test_what_another_shape_can_say_survives_the_way_there_and_back(
    text: str, message: str, flags: tuple[bool, bool], shown: str
) -> None:
    pair = {"content": text, "error": message} if flags[0] else {"content": text}
    for_llm: dict[str, Any] = {"for_llm": text, "silent": flags[0], "is_error": False, "async": flags[1]}
    if shown:
        for_llm["for_user"] = shown
    failed = {"for_llm": message, "silent": False, "is_error": True, "async": False}
    parts = compat.PartsResult((Text(message), PICTURE), {"n": 1}, flags[0], flags[1])

    assert compat.to_content_error(compat.from_content_error(pair)) == pair
    assert compat.to_for_llm(compat.from_for_llm(for_llm)) == for_llm
    assert compat.to_for_llm(compat.from_for_llm(failed)) == failed
    assert compat.to_parts(compat.from_parts(parts)) == parts
    for ok_err in (compat.Ok(text), compat.Err(message)):
        assert compat.to_ok_err(compat.from_ok_err(ok_err)) == ok_err
    assert "err" not in json.loads(json.dumps(compat.to_for_llm(ToolResult.fail(message, exc=ValueError("secret")))))


@pytest.mark.conforms("B7", "O-b6")
async def test_users_are_shown_what_is_meant_for_them_in_order_and_never_what_is_silent() -> None:
    shown: list[str] = []

    async def loud(text: str) -> ToolResult:
        """Say something to everybody."""
        return ToolResult.user(text)

    async def quiet() -> ToolResult:
        """Say something to nobody but the model."""
        return ToolResult(parts=(Text("x"),), for_user="never shown", silent=True)

    model = ScriptedModel([calls(("loud", {"text": "one"}), ("quiet", {}), ("loud", {"text": "two"})), "done"])

    def show(text: str, result: ToolResult) -> None:
        shown.append(text)

    await Agent(model, tools=[loud, quiet], on_user=show).run("go")

    assert shown == ["one", "two"]


class Point(BaseModel):
    x: int
    when: datetime = datetime(2024, 1, 2)


@dataclasses.dataclass
class Pair:
    left: int
    right: Point


RETURNED: list[tuple[Any, Any, str]] = [
    ("text", None, "text"),
    ({"a": [1, None]}, {"a": [1, None]}, '{"a": [1, None]}'.replace("None", "null")),
    ([1, 2], [1, 2], "[1, 2]"),
    ((1, 2), [1, 2], "[1, 2]"),
    (7, 7, "7"),
    (True, True, "true"),
    (Point(x=1), {"x": 1, "when": "2024-01-02T00:00:00"}, '{"x": 1, "when": "2024-01-02T00:00:00"}'),
    (Pair(1, Point(x=2)), {"left": 1, "right": {"x": 2, "when": "2024-01-02T00:00:00"}}, ""),
    ([Point(x=1)], [{"x": 1, "when": "2024-01-02T00:00:00"}], ""),
    (ToolResult.ok("mine"), None, "mine"),
    (None, None, ""),
]


@pytest.mark.conforms("B15", "B-b4")
@each_row(("returned", "value", "text"), RETURNED, ids=lambda value: type(value).__name__)
async def test_what_a_tool_returns_becomes_data_for_code_and_text_for_the_model(
    returned: Any, value: Any, text: str
) -> None:
    async def give() -> Any:
        """Give back whatever the test wants."""
        return returned

    result = await ToolRegistry([give]).execute("give")

    assert result.status is Status.OK
    assert result.value == value
    assert result.guest_value() == (value if value is not None else text or None)
    if text:
        assert result.text == text


@pytest.mark.conforms("B15", "J-b2")
@each_row("returned", [object(), {1, 1j}, {"f": object()}, lambda: 1], ids=["object", "set", "mapping", "function"])
async def test_what_is_no_result_is_an_error_and_not_a_crash(returned: Any) -> None:
    async def give() -> Any:
        """Give back whatever the test wants."""
        return returned

    result = await ToolRegistry([give]).execute("give")

    assert result.error is not None
    assert result.error.code == "no_result"


@pytest.mark.conforms("B15", "B16", "P14")
async def test_bytes_and_files_are_carried_up_in_the_order_of_the_calls() -> None:
    async def draw(name: str) -> File:
        """Draw a picture and return it."""
        return File(name, b"\x89PNG", "image/png")

    async def dump() -> bytes:
        """Return plain bytes."""
        return b"\x00\x01"

    step = {"tool": "draw", "args": {"name": "b.png"}}
    model = ScriptedModel(
        [calls(("draw", {"name": "a.png"}), ("execute_plan", {"steps": [step]}), ("dump", {})), "done"]
    )

    run = await Agent(model, tools=[draw, dump], plan_execution=True).run("go")

    assert [(file.name, file.data) for file in run.files] == [
        ("a.png", b"\x89PNG"),
        ("b.png", b"\x89PNG"),
        ("result.bin", b"\x00\x01"),
    ]


@pytest.mark.conforms("B17", "B-b6")
async def test_long_text_is_cut_in_the_transcript_and_whole_in_the_events() -> None:
    long = "é" * 60_000 + "ü" * 60_000

    async def read() -> str:
        """Read something long."""
        return long

    model = ScriptedModel([calls(("read", {})), "done"])
    agent = Agent(model, tools=[read])
    log: list[Any] = []
    agent.subscribe(log.append)

    run = await agent.run("go")

    content = run.messages[2]["content"]
    mark = "\n\n[output truncated — original was longer]"
    assert content.endswith(mark)
    assert len(content) == 100_000 + len(mark)
    assert content.startswith("éé")
    assert content.removesuffix(mark).endswith("üü")
    [end] = [event for event in log if event.type == "tool_execution_end"]
    assert end.result.whole_text == long


@pytest.mark.conforms("B-b1")
async def test_a_failing_command_shows_what_it_printed_beside_its_error() -> None:
    async def shell() -> ToolResult:
        """Run a command that fails."""
        return ToolResult.fail("exit: 2", output="make: no rule to make target")

    result = await ToolRegistry([shell]).execute("shell")

    assert result.text == "exit: 2\nmake: no rule to make target"
    assert compat.to_content_error(result) == {"content": "make: no rule to make target", "error": "exit: 2"}


@pytest.mark.conforms("B-b2")
async def test_a_success_that_looks_like_an_error_stays_a_success_through_plan_and_code() -> None:
    async def read() -> str:
        """Read a file that looks like an error."""
        return "error: not really"

    async def script(call_tool: Any) -> Any:
        return await call_tool("read")

    registry = ToolRegistry([read])
    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))

    plan = await registry.execute("execute_plan", {"steps": [{"tool": "read", "args": {}}]})
    code = await registry.execute("execute_code", {"code": "..."})

    assert plan.value == [{"step": 0, "tool": "read", "status": "ok", "result": "error: not really"}]
    assert (code.is_error, code.value) == (False, "error: not really")


@pytest.mark.conforms("B-b3")
async def test_error_codes_are_stable_and_say_whether_to_try_again() -> None:
    async def raises() -> str:
        """Raise something unexpected."""
        raise OSError("gone")

    async def nothing() -> ToolResult:
        """Promise a result and forget it."""
        return None  # type: ignore[return-value]

    async def large() -> list[int]:
        """Return more than allowed."""
        return list(range(100))

    async def busy() -> str:
        """Be busy just now."""
        raise ToolError("come back later", code="unavailable", retryable=True)

    registry = ToolRegistry([raises, nothing, busy])
    registry.add(large, max_result_bytes=50)

    async def code(name: str, args: Any = None) -> tuple[str, bool]:
        result = await registry.execute(name, args)
        assert result.error is not None
        return str(result.error.code), result.error.retryable

    assert await code("nowhere") == ("unknown_tool", False)
    assert await code("raises", {"x": 1}) == ("invalid_arguments", False)
    assert await code("raises") == ("exception", False)
    assert await code("nothing") == ("no_result", False)
    assert await code("large") == ("too_large", False)
    assert await code("busy") == ("unavailable", True)
    registry.blacklist("busy")
    assert await code("busy") == ("not_permitted", False)
    assert {str(each) for each in ErrorCode} >= {
        "unknown_tool",
        "invalid_arguments",
        "blocked",
        "not_permitted",
        "timeout",
        "cancelled",
        "exception",
        "no_result",
        "too_large",
        "unavailable",
    }


@pytest.mark.conforms("B-b5")
async def test_an_unexpected_exception_shows_its_class_and_message_without_secrets() -> None:
    async def connect() -> str:
        """Connect with a key that must not be shown."""
        raise ConnectionError("401 for key sk-very-secret at /srv/app/client.py")

    run = RunContext(secrets=Secrets({"API_KEY": "sk-very-secret"}))

    result = await ToolRegistry([connect]).dispatch("connect", {}, context=run)

    assert result.message == ('tool "connect" raised ConnectionError: 401 for key [redacted] at /srv/app/client.py')
    assert "Traceback" not in result.text
    assert isinstance(result.exc, ConnectionError)
    assert result.exc.__traceback__ is not None
    assert "sk-very-secret" not in json.dumps(result.to_dict())
    assert "sk-very-secret" not in repr(run)


@pytest.mark.conforms("B-b6")
@given(text=st.text(max_size=400), limit=st.integers(0, 300))
def test_cutting_keeps_beginning_and_end_and_never_splits_a_character(text: str, limit: int) -> None:
    kept, was_cut = cut_text(text, limit)

    assert was_cut == (len(text) > limit)
    assert len(kept) <= max(limit, 0) or not was_cut
    if was_cut and "characters cut" in kept:
        head, _, tail = kept.partition("\n[... ")
        assert text.startswith(head)
        assert text.endswith(tail.partition("cut ...]\n")[2])


@pytest.mark.conforms("B-b7", "B13")
async def test_results_do_not_change_and_carry_their_call() -> None:
    async def act() -> ToolResult:
        """Act and say so."""
        return ToolResult.ok("done", usage=TokenUsage(1, 2))

    result = await ToolRegistry([act]).dispatch("act", {}, call_id="c7")

    assert (result.meta.call_id, result.meta.tool) == ("c7", "act")
    assert result.meta.duration_ms >= 0
    assert result.usage.total == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.value = 1  # type: ignore[misc]


@pytest.mark.conforms("B13")
async def test_a_result_a_tool_keeps_is_not_stamped_behind_its_back() -> None:
    shared = ToolResult.of({"n": 1})

    async def one() -> ToolResult:
        """Return the same object each time."""
        return shared

    registry = ToolRegistry([one])
    first = await registry.dispatch("one", {}, call_id="c1")
    second = await registry.dispatch("one", {}, call_id="c2")

    assert (first.meta.call_id, second.meta.call_id, shared.meta.call_id) == ("c1", "c2", "")


INTERNAL = ToolResult.ok("fine", details={"note": "internal-7"}, exc=ValueError("internal-7"))


@pytest.mark.slow
@pytest.mark.conforms("B3", "B15", "B-b6")
@each_row("route", ROUTES)
@each_row(
    "returned",
    [[INTERNAL], (INTERNAL, None), {"a": [INTERNAL]}, ToolResult.of([INTERNAL]), {"s": Secrets({"key": "internal-7"})}],
    ids=["list", "pair", "deep", "value", "secrets"],
)
async def test_what_is_for_logs_is_never_text_wherever_a_tool_puts_a_result(route: str, returned: Any) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def odd() -> Any:
        """Return a result inside other data."""
        return returned

    seen = str(await answer_by(route, registry, "odd"))

    assert "internal-7" not in seen
    assert "return" in seen and "tool returned data that is not JSON" in seen


ROWS = [{"title": "a", "score": 0.9}, {"title": "b", "score": 0.1}]
FILTERED = "set_result([r for r in call_tool('web_search', {}) if r.get('score', 0) > .8])"


def searching(answer: Any, **options: Any) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(**options)
    async def web_search() -> ToolResult:
        """Search the web for current information."""
        return ToolResult.ok(answer)

    return registry


@pytest.mark.slow
@pytest.mark.conforms("B-b4", "B13")
@each_row("returns", [None, {"type": "array", "items": {"type": "object"}}], ids=["undeclared", "declared"])
async def test_the_seeds_own_script_takes_json_text_as_data(returns: Any) -> None:
    async with Runtime(searching(json.dumps(ROWS), returns=returns)) as runtime:
        assert (await runtime.execute_code(FILTERED)).value == [ROWS[0]]


@pytest.mark.slow
@pytest.mark.conforms("B-b4", "B13")
@each_row("route", [route for route in ROUTES if route != "agent"])
async def test_json_text_is_data_on_every_route(route: str) -> None:
    assert "'score': 0.9" in str(await answer_by(route, searching(json.dumps(ROWS)), "web_search"))


@pytest.mark.conforms("B-b4")
async def test_the_model_reads_json_text_as_the_tool_wrote_it() -> None:
    text = json.dumps(ROWS, indent=2)
    assert await answer_by("agent", searching(text), "web_search") == text


@pytest.mark.conforms("B-b4", "B13")
async def test_json_text_of_background_work_is_data() -> None:
    registry, jobs = ToolRegistry(), JobTable()

    @registry.tool
    async def later(ctx: ToolContext) -> ToolResult:
        """Search in the background."""

        async def search() -> ToolResult:
            return ToolResult.ok(json.dumps(ROWS))

        return ctx.start_job(search)

    async with jobs:
        started = await registry.execute("later", context=RunContext(state=RunState(jobs=jobs)))
        assert started.job_id is not None
        assert (await jobs.await_(started.job_id)).value == ROWS


@pytest.mark.conforms("B-b4")
@each_row("text", ["prose", "[1] a footnote", "7", '"text"', "[NaN]", "{broken", "[" * 5000])
async def test_text_that_is_no_json_object_or_array_stays_text(text: str) -> None:
    result = await searching(text).execute("web_search")
    assert (result.has_value, result.guest_value()) == (False, text)


@pytest.mark.conforms("B-b4")
@each_row(
    "options",
    [{"raw": True}, {"returns": {"type": "string"}}, {"returns": {"anyOf": [{"type": "string"}, {"type": "array"}]}}],
)
async def test_text_stays_reachable(options: Any) -> None:
    text = json.dumps(ROWS)
    assert (await searching(text, **options).execute("web_search")).guest_value() == text


@pytest.mark.slow
@pytest.mark.conforms("B-b4", "B13")
@each_row("route", ROUTES)
@each_row(("text", "said"), [("prose", "its text is not JSON"), ('{"a": 1}', "does not fit: root")])
async def test_text_that_is_not_of_the_declared_type_is_a_clear_error(route: str, text: str, said: str) -> None:
    registry = searching(text, returns={"type": "array", "items": {"type": "object"}})

    seen = str(await answer_by(route, registry, "web_search"))

    assert said in seen
    assert "declares what it returns" in seen


@pytest.mark.conforms("B-b4")
@each_row(
    ("returns", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"$ref": "#/$defs/Row", "$defs": {"Row": {"type": "object"}}}, "{}", {}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
    ],
)
async def test_a_declared_type_that_takes_no_text_makes_data_of_it(returns: Any, text: str, value: Any) -> None:
    result = await searching(text, returns=returns).execute("web_search")
    assert (result.value, result.has_value, result.text) == (value, True, text)


@pytest.mark.quick
@pytest.mark.anyio
@each_row("make", [list, json.dumps])
async def test_a_large_result_of_a_tool_that_was_in_time_counts_though_its_turn_comes_late(make: Any) -> None:
    registry, timed_out = ToolRegistry(), threading.Event()

    @registry.tool(timeout_s=0.1)
    async def rows() -> list[dict[str, int]]:
        """Return a great many rows, also as text."""
        await anyio.sleep(0.001)  # its clock begins when it waits
        made: Any = make([{"n": number} for number in range(9_000)])
        return made  # type: ignore[no-any-return]

    async def hold() -> None:
        await daemon_threads.run_large(timed_out.wait, 10)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(later, timed_out)
        result = await registry.execute("rows", {})

    assert result.status is Status.OK and len(result.value) == 9_000


async def later(event: threading.Event) -> None:
    await anyio.sleep(0.3)
    event.set()
