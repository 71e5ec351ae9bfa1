"""Group P: plans make many calls in one turn of the model."""

from __future__ import annotations

import json
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rows import each_row
from toolcell import Runtime
from toolcell.agents import Agent, Network
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.result import TokenUsage, to_json
from toolcell.errors import ToolAbort, ToolError
from toolcell.tools import Block, Call, Feature, File, RunContext, ToolRegistry, ToolResult
from toolcell.tools.plan import MAX_NAME_CHARS, MAX_OUTPUT_CHARS, MAX_REFERENCES, PlanError, look_up, read_plan
from tools.toolkit import PATIENCE_S, Crowd, FakeRuntime, Meeting, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def planning(**settings_: Any) -> ToolRegistry:
    registry = ToolRegistry(**settings_)

    @registry.tool
    async def search(query: str) -> dict[str, Any]:
        """Search the web for something."""
        await anyio.lowlevel.checkpoint()
        if query == "bad":
            raise ToolError("timeout")
        return {"hits": [{"url": f"https://{query}.example", "score": 1}], "total": 1}

    @registry.tool
    async def fetch(url: str) -> str:
        """Fetch a page of the web."""
        return f"page at {url}"

    registry.enable_plan_execution()
    return registry


async def plan(registry: ToolRegistry, *steps: dict[str, Any], **options: Any) -> Any:
    return (await registry.execute("execute_plan", {"steps": list(steps), **options})).value


def step(tool: str, _id: str | None = None, **args: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"tool": tool, "args": args}
    return made if _id is None else made | {"id": _id}


@pytest.mark.conforms("P1", "P2", "P16", "EX-6")
async def test_plans_are_offered_to_agents_and_networks_alike_when_enabled() -> None:
    for kind in (Agent, lambda model, **options: Network(model, {}, **options)):
        on, off = ScriptedModel(["done"]), ScriptedModel(["done"])
        await kind(on, tools=[], plan_execution=True).run("go")
        await kind(off, tools=[]).run("go")
        assert on.requests[0].tool_names == ["execute_plan"]
        assert off.requests[0].tool_names == []


@pytest.mark.conforms("P3", "P4")
def test_the_schema_asks_for_steps_of_a_tool_and_its_arguments() -> None:
    [definition] = [each for each in planning().definitions() if each.name == "execute_plan"]
    schema = definition.parameters

    assert schema["required"] == ["steps"]
    assert schema["properties"]["steps"]["type"] == "array"
    items = schema["properties"]["steps"]["items"]
    assert items["required"] == ["tool"]
    assert (items["properties"]["tool"]["type"], items["properties"]["args"]["type"]) == ("string", "object")


@pytest.mark.conforms("P5", "P6", "P8", "P12", "P-b3", "EX-7", "P7", "V-7")
async def test_rows_have_exactly_the_keys_of_their_status_in_the_order_of_the_steps() -> None:
    async def nothing() -> None:
        """Return nothing at all."""

    registry = planning()
    registry.add(nothing)

    rows = await plan(registry, step("search", query="a"), step("search", query="bad"), step("nothing"))

    assert rows == [
        {
            "step": 0,
            "tool": "search",
            "status": "ok",
            "result": {"hits": [{"url": "https://a.example", "score": 1}], "total": 1},
        },
        {"step": 1, "tool": "search", "status": "error", "error": "timeout"},
        {"step": 2, "tool": "nothing", "status": "ok", "result": None},
    ]


@pytest.mark.conforms("P9", "M-b1")
async def test_a_plan_in_a_plan_is_an_error_of_its_step_whatever_it_is_called() -> None:
    registry = planning()
    registry.alias("innocent", "execute_plan")
    ran = recorded(registry.events)

    for name in ("execute_plan", "innocent"):
        result = await registry.execute("execute_plan", {"steps": [step("fetch", url="x"), step(name, steps=[])]})
        assert [row["status"] for row in result.value] == ["ok", "error"]
        assert result.value[1]["error"] == "execute_plan steps cannot call execute_plan"
    assert {event.tool for event in ran} == {"execute_plan", "fetch"}
    assert len([event for event in ran if event.type == "tool_execution_start"]) == 4


MALFORMED: dict[str, tuple[Any, str]] = {
    "another key": ({"tool": "fetch", "args": {"url": "y"}, "retries": 3}, "retries"),
    "args are a list": ({"tool": "fetch", "args": [1]}, "args"),
    "no tool": ({"args": {}}, "tool"),
    "the tool is a number": ({"tool": 7, "args": {}}, "tool"),
    "recursive": ({"tool": "execute_plan", "args": {"steps": []}}, "cannot call execute_plan"),
    "no object": ("fetch", "must be an object"),
    "null": (None, "must be an object"),
    "an id that is a list": ({"tool": "fetch", "args": {}, "id": [1]}, "id: must be string"),
    "a timeout of text": ({"tool": "fetch", "args": {}, "timeout_s": "x"}, "timeout_s: must be number"),
    "a timeout that is none": ({"tool": "fetch", "args": {}, "timeout_s": -1}, "timeout_s"),
}


@pytest.mark.conforms("P13", "P9")
@each_row("route", ["model", "program", "agent", "validate"])
@each_row("kind", MALFORMED)
async def test_a_malformed_step_costs_that_step_only(kind: str, route: str) -> None:
    registry = ToolRegistry([ping])
    registry.enable_plan_execution()
    malformed, said = MALFORMED[kind]
    steps = [{"tool": "ping"}, malformed, {"tool": "ping", "args": {}}]
    match route:
        case "program":
            async with Runtime(registry) as runtime:
                rows: Any = await runtime.execute_plan(steps)
        case "agent":
            model = ScriptedModel([calls(("execute_plan", {"steps": steps})), "went on"])
            rows = json.loads((await Agent(model, tools=registry).run("go")).messages[2]["content"])
        case _:
            args = {"steps": steps, "validate_only": route == "validate"}
            rows = (await registry.execute("execute_plan", args)).value

    good = "valid" if route == "validate" else "ok"
    assert [row["status"] for row in rows] == [good, "error", good]
    assert said in rows[1]["error"]


async def ping() -> str:
    """Answer, so that one knows that somebody is there."""
    return "pong"


@pytest.mark.conforms("P13", "P-b2")
@each_row("args", [{}, {"args": {}}])
async def test_a_step_that_needs_a_malformed_one_is_skipped_and_an_aborting_plan_ends_there(args: Any) -> None:
    registry = ToolRegistry([ping])
    registry.enable_plan_execution()
    steps = [
        {"tool": "ping", "id": "a", "surplus": 1},
        {"tool": "ping", "depends_on": ["a"]} | args,
        {"tool": "ping"} | args,
    ]

    rows = (await registry.execute("execute_plan", {"steps": steps})).value
    aborted = (await registry.execute("execute_plan", {"steps": steps, "on_error": "abort"})).value

    assert [row["status"] for row in rows] == ["error", "skipped", "ok"]
    assert aborted[0]["status"] == "error" and aborted[1]["status"] == "skipped"


@pytest.mark.conforms("P11", "P10", "EX-8")
@each_row(
    ("args", "text"),
    [
        ('{"steps": [', "invalid execute_plan args: "),
        ({}, "invalid execute_plan args: validation failed"),
        ({"steps": "fetch"}, "invalid execute_plan args: validation failed"),
        ({"steps": []}, "execute_plan requires at least one step"),
        ({"steps": [step("fetch", url="x")] * 51}, "execute_plan limited to 50 steps, got 51"),
    ],
)
async def test_a_plan_that_cannot_run_says_why_in_its_own_words(args: Any, text: str) -> None:
    registry = planning()
    log = recorded(registry.events)

    result = await registry.execute("execute_plan", args)

    assert result.is_error
    assert result.text.startswith(text)
    assert {event.tool for event in log} == {"execute_plan"}


@pytest.mark.conforms("P13")
async def test_what_one_step_cannot_do_is_an_error_of_that_step() -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return "yes"

    agent = Agent(ScriptedModel([]), tools=planning(), plan_execution=True, ask_user=ask)
    registry = agent.tools_for_run()

    rows = await plan(registry, step("nowhere"), step("ask_user", question="May I?"), step("fetch", url="x"))
    direct = await registry.execute("ask_user", {"question": "May I?"})

    assert [row["status"] for row in rows] == ["error", "error", "ok"]
    assert "unknown tool: nowhere" in rows[0]["error"]
    assert rows[1]["error"] == "ask_user cannot be called from within execute_plan"
    assert (direct.text, asked) == ("yes", ["May I?"])


@pytest.mark.conforms("P14", "B16")
async def test_steps_have_ids_of_their_own_and_their_files_and_tokens_are_added_up() -> None:
    seen: list[str] = []

    async def draw(n: int) -> ToolResult:
        """Draw a picture of a number."""
        return ToolResult.ok("drawn", files=(File(f"{n}.png", b""),), usage=TokenUsage(n, 1))

    registry = planning()
    registry.add(draw)
    registry.add_hook(before=lambda call: seen.append(call.call_id))

    result = await registry.dispatch("execute_plan", {"steps": [step("draw", n=1), step("draw", n=2)]}, call_id="top")

    assert seen == ["top", "plan_step_0", "plan_step_1"]
    assert [file.name for file in result.files] == ["1.png", "2.png"]
    assert result.usage == TokenUsage(3, 2)


@pytest.mark.conforms("P-b1")
async def test_a_step_may_use_the_result_of_another_while_independent_ones_still_overlap() -> None:
    meeting = Meeting(2)

    async def meet() -> str:
        """Meet the other one."""
        await meeting.join()
        return "met"

    registry = planning()
    registry.add(meet)

    rows = await plan(
        registry,
        step("fetch", url={"$ref": "found.hits[0].url"}),
        step("search", "found", query="a"),
        step("meet", "m1"),
        step("meet", "m2"),
        step("fetch", url={"$ref": "found.hits.0.url"}) | {"depends_on": ["m1", "m2"]},
    )

    assert [row["status"] for row in rows] == ["ok"] * 5
    assert rows[0]["result"] == rows[4]["result"] == "page at https://a.example"
    assert rows[1]["id"] == "found"
    assert meeting.most == 2


@pytest.mark.conforms("P-b1")
async def test_what_depends_on_a_failed_step_is_skipped_and_says_so() -> None:
    rows = await plan(
        planning(),
        step("search", "a", query="bad"),
        step("fetch", "b", url={"$ref": "a.hits[0].url"}),
        step("fetch", url="x") | {"depends_on": ["b"]},
        step("fetch", url="y"),
    )

    assert [row["status"] for row in rows] == ["error", "skipped", "skipped", "ok"]
    assert rows[1]["error"] == "needs step a, which did not succeed"
    assert rows[2]["error"] == "needs step b, which did not succeed"


@pytest.mark.conforms("P-b1")
@each_row(
    ("steps", "problem"),
    [
        ([step("fetch", "a", url={"$ref": "b"}), step("fetch", "b", url={"$ref": "a"})], "wait for each other: a, b"),
        ([step("fetch", "a", url="x") | {"depends_on": ["a"]}], "wait for each other: a"),
        ([step("fetch", "a", url={"$ref": "ghost.x"})], "'ghost', which is not a step's id (ids: a)"),
        ([step("fetch", url="x") | {"depends_on": ["ghost"]}], "'ghost', which is not a step's id (ids: none)"),
        ([step("fetch", "a", url="x"), step("fetch", "a", url="x")], "steps 0 and 1 have the same id 'a'"),
    ],
)
async def test_a_plan_that_cannot_be_ordered_is_refused_before_anything_runs(steps: Any, problem: str) -> None:
    registry = planning()
    log = recorded(registry.events)

    result = await registry.execute("execute_plan", {"steps": steps})

    assert result.is_error
    assert problem in result.text
    assert {event.tool for event in log} == {"execute_plan"}


@pytest.mark.conforms("P-b1")
async def test_a_reference_that_leads_nowhere_says_how_far_it_leads() -> None:
    rows = await plan(planning(), step("search", "found", query="a"), step("fetch", url={"$ref": "found.hits[0].link"}))

    assert rows[1]["status"] == "error"
    assert "there is no '.link' in '.hits[0]' (an object with url, score)" in rows[1]["error"]


@pytest.mark.conforms("P-b1")
async def test_without_ids_a_plan_is_exactly_the_plain_one() -> None:
    async def echo(value: dict[str, str]) -> dict[str, str]:
        """Give back what was given."""
        return value

    registry = planning()
    registry.add(echo)

    assert (await plan(registry, step("echo", value={"$ref": "nothing.special"})))[0]["result"] == {
        "$ref": "nothing.special"
    }


@pytest.mark.conforms("P-b2")
async def test_steps_that_cannot_be_right_are_reported_and_the_others_run() -> None:
    rows = await plan(planning(), step("fetch"), step("fetch", url="x"), step("nowhere"))

    assert [row["status"] for row in rows] == ["error", "ok", "error"]
    assert '"url"' in rows[0]["error"]


@pytest.mark.conforms("P-b2")
async def test_a_failed_step_stops_the_others_when_that_is_wished() -> None:
    left, meeting = list[str](), Meeting(2)

    async def hang() -> str:
        """Never come to an end."""
        try:
            await meeting.join()
            await anyio.sleep_forever()
        finally:
            left.append("left")
        return ""

    async def fail() -> ToolResult:
        """Fail once the other one hangs."""
        await meeting.join()
        return ToolResult.fail("no")

    registry = planning()
    registry.add(hang)
    registry.add(fail)

    rows = await plan(
        registry, step("hang"), step("fail", "a"), step("fetch", url="x") | {"depends_on": ["a"]}, on_error="abort"
    )

    assert [row["status"] for row in rows] == ["error", "error", "skipped"]
    assert rows[0]["error"] == "tool execution aborted"
    assert left == ["left"]


@pytest.mark.conforms("P-b2", "F-b2")
async def test_steps_and_plans_have_timeouts_of_their_own() -> None:
    async def hang() -> str:
        """Never come to an end."""
        await anyio.sleep_forever()
        return ""

    registry = planning()
    registry.add(hang)

    one = await plan(registry, step("hang") | {"timeout_s": 0.01}, step("fetch", url="x"))
    whole = await plan(registry, step("hang"), step("fetch", url="x"), timeout_s=1.0)
    strict = planning()
    strict.add(hang, timeout_s=0.01)
    longer = await plan(strict, step("hang") | {"timeout_s": 1000})

    assert [row["status"] for row in one] == ["error", "ok"]
    assert one[0]["error"] == "timed out after 0.01 s"
    assert [row["status"] for row in whole] == ["error", "ok"]
    assert longer[0]["error"] == "timed out after 0.01 s"


@pytest.mark.conforms("P-b3")
async def test_results_stay_data_and_too_much_of_it_is_cut_step_by_step() -> None:
    async def large(n: int) -> list[int]:
        """Return a lot of numbers."""
        return list(range(n))

    registry = planning()
    registry.add(large)

    result = await registry.execute("execute_plan", {"steps": [step("large", n=3), *[step("large", n=50_000)] * 3]})
    rows = result.value

    assert rows[0]["result"] == [0, 1, 2]
    assert [row.get("truncated", False) for row in rows] == [False, True, True, True]
    assert "characters cut" in rows[1]["result"]
    assert len(result.text) < MAX_OUTPUT_CHARS * 1.05 and len(str(rows)) < MAX_OUTPUT_CHARS * 1.05


@pytest.mark.conforms("P-b4")
async def test_sub_agents_run_two_at_a_time_in_a_plan() -> None:
    crowd = Crowd()

    async def visit() -> str:
        """Be counted while running."""
        await crowd.visit()
        return "visited"

    agent = Agent(
        ScriptedModel([calls(("execute_plan", {"steps": [step("aide", task="go")] * 6})), "done"]), plan_execution=True
    )
    aide = Agent(
        ScriptedModel([lambda request: calls(("visit", {})) if len(request.messages) == 1 else "done"], repeat=True),
        tools=[visit],
    )
    agent.add_subagent("aide", "Helps with everything there is.", aide)

    run = await agent.run("go")

    assert [row["status"] for row in json.loads(run.messages[2]["content"])] == ["ok"] * 6
    assert (crowd.visits, crowd.most) == (6, 2)


@pytest.mark.conforms("P-b5")
async def test_a_plan_can_be_checked_without_running_and_approved_as_a_whole() -> None:
    registry = planning()
    log = recorded(registry.events)

    rows = await plan(
        registry,
        step("search", "a", query="x"),
        step("fetch"),
        step("nowhere"),
        step("fetch", url={"$ref": "a.hits[0].url"}),
        validate_only=True,
    )
    registry.add_hook(before=lambda call: Block("no plans today") if call.name == "execute_plan" else None)
    blocked = await registry.execute("execute_plan", {"steps": [step("fetch", url="x")]})

    assert [row["status"] for row in rows] == ["valid", "error", "error", "valid"]
    assert {event.tool for event in log} == {"execute_plan"}
    assert blocked.text == "no plans today"


@pytest.mark.conforms("P-b5", "G-b2")
async def test_hooks_and_observers_see_every_step() -> None:
    seen: list[str] = []

    class Observer(Feature):
        def call_started(self, call: Call) -> None:
            seen.append(f"started {call.call_id}")

        def call_ended(self, call: Call) -> None:
            seen.append(f"ended {call.call_id}")

    registry = planning()
    registry.add_hook(before=lambda call: seen.append(f"before {call.call_id}"))
    steps = [step("fetch", url="x"), step("nowhere")]

    await registry.dispatch("execute_plan", {"steps": steps}, call_id="p", context=RunContext().having(Observer()))

    assert seen == [
        "before p",
        "started p",
        "before plan_step_0",
        "started plan_step_0",
        "started plan_step_1",
        "ended plan_step_0",
        "ended plan_step_1",
        "ended p",
    ]


@pytest.mark.conforms("P-b6")
async def test_identical_steps_that_only_read_are_one_call() -> None:
    ran: list[str] = []
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def read(path: str) -> str:
        """Read a file from the disk."""
        ran.append(path)
        return f"content of {path}"

    @registry.tool
    async def count(path: str) -> int:
        """Count how often this is called."""
        ran.append("count")
        return len(ran)

    registry.enable_plan_execution()
    a, b, c = step("read", path="a"), step("read", path="b"), step("count", path="a")

    rows = await plan(registry, a, b, a, c, c, a)

    assert [row["status"] for row in rows] == ["ok"] * 6
    assert [rows[index]["result"] for index in (0, 2, 5)] == ["content of a"] * 3
    assert sorted(ran) == ["a", "b", "count", "count"]


@pytest.mark.conforms("J-b1")
async def test_a_step_that_ends_the_run_ends_the_plan() -> None:
    async def stop() -> str:
        """End the whole run."""
        raise ToolAbort("enough")

    registry = planning()
    registry.add(stop)

    for steps in ([step("stop"), step("fetch", url="x")], [step("stop", "a"), step("fetch", url={"$ref": "a"})]):
        with pytest.raises(ToolAbort, match="enough"):
            await registry.execute("execute_plan", {"steps": steps})


async def test_code_that_calls_a_tool_that_ends_the_run_ends_the_run() -> None:
    async def stop() -> str:
        """End the whole run."""
        raise ToolAbort("enough")

    async def script(call_tool: Any) -> Any:
        try:
            await call_tool("stop")
        except ToolAbort as exc:
            raise RuntimeError("what a runtime makes of it") from exc

    model = ScriptedModel([calls(("execute_code", {"code": "..."})), "never said"])
    run = await Agent(model, tools=[stop], code_execution=FakeRuntime(script)).run("go")

    assert (run.stop_reason, run.error) == ("cancelled", "enough")


# Any plan at all

step_ids = st.sampled_from(["a", "b", "c", "d"])
plans = st.lists(
    st.fixed_dictionaries(
        {
            "tool": st.sampled_from(["search", "fetch", "nowhere"]),
            "args": st.dictionaries(
                st.sampled_from(["query", "url"]),
                st.sampled_from(["x", "bad"]) | step_ids.map(lambda name: {"$ref": f"{name}.total"}),
            ),
        },
        optional={"id": step_ids, "depends_on": st.lists(step_ids, max_size=2)},
    ),
    min_size=1,
    max_size=6,
)


def why_refused(steps: list[Any]) -> str | None:
    try:
        read_plan({"steps": steps})
    except PlanError as exc:
        return str(exc)
    return None


@pytest.mark.conforms("P5", "P-b1", "J-b3")
@settings(max_examples=60, deadline=None)
@given(steps=plans, abort=st.booleans())
def test_any_plan_is_refused_as_a_whole_or_gives_one_row_per_step(steps: list[Any], abort: bool) -> None:
    async def main() -> None:
        with anyio.fail_after(PATIENCE_S):
            result = await planning().execute(
                "execute_plan", {"steps": steps, "on_error": "abort" if abort else "continue"}
            )
        if (refusal := why_refused(steps)) is not None:
            assert result.is_error
            assert result.message == refusal
            return
        assert [(row["step"], row["tool"]) for row in result.value] == [
            (index, each["tool"]) for index, each in enumerate(steps)
        ]
        for row in result.value:
            assert ("result" in row) == (row["status"] == "ok")
            assert ("error" in row) == (row["status"] in ("error", "skipped"))
        assert json.loads(to_json(result.value)) == result.value

    anyio.run(main)


def test_a_path_leads_through_objects_and_lists() -> None:
    value = {"a": [{"b.c": 1, "d": [10, 20]}]}

    assert look_up(value, ".a[0].d[1]") == 20
    assert look_up(value, ".a.0.d.0") == 10
    assert look_up(value, "") == value
    for path in (".a[1]", ".x", ".a.b", "[0]", ".a[0].d[1].e", ".a[", "..a", ".a.\u00b2", ".a[\u0661]"):
        with pytest.raises(PlanError):
            look_up(value, path)


@each_row(
    ("steps", "said"),
    [
        (
            [step("fetch", "a" * 100_000, url="x")],
            f"the id of step 0 has 100000 characters, more than {MAX_NAME_CHARS}",
        ),
        ([step("fetch", "a", url={"$ref": "b" * 100_000})], "step 0 has a reference of 100000 characters"),
        ([step("fetch", "a", url={"$ref": f"a[{'9' * 5000}]"})], "step 0 has a reference of 5003 characters"),
        ([step("fetch", "a", url={"$ref": "a" + "[0]" * 50_000})], "step 0 has a reference of 150001 characters"),
        (
            [step("fetch", "a", url="x"), step("fetch", url=[{"$ref": "a"}] * (MAX_REFERENCES + 1))],
            f"a plan may have {MAX_REFERENCES} references",
        ),
        ([step("fetch", "a", url="x") | {"depends_on": ["b" * 100_000]}], "which is not a step's id"),
    ],
)
async def test_what_references_cost_is_bounded_and_so_is_what_is_said_about_them(steps: Any, said: str) -> None:
    result = await planning().execute("execute_plan", {"steps": steps})

    assert said in result.text
    assert len(result.text) < 500


async def test_a_name_that_no_tool_can_have_is_cut_in_its_row() -> None:
    rows = await plan(planning(), step("e" * 100_000))

    assert len(json.dumps(rows)) < 1000
