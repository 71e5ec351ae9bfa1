"""Saved scripts: tools whose body runs in a sandbox, with versions, on every route, and as files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from builtin.routes import by_code
from toolcell import Limits, Outcome, RegistrationError, RunContext, Runtime, SyncRuntime, ToolRegistry, UsageError
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.run_state import RunState
from toolcell.config import OnApproval
from toolcell.run.streaming import RunFinished
from toolcell.tools import Budget, Origin
from toolcell.tools.saved_script import MAX_SOURCE_BYTES
from toolcell_bridge.guest.scripts import NOT_KEPT

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

SOURCE = """rows = call_tool("orders", since=since)
big = [row for row in rows if row["total"] >= least]
call_tool("note", text=f"{len(big)} big since {since}")
print("looked at", len(rows))
[row["id"] for row in big]
"""
INPUTS = {
    "type": "object",
    "properties": {"since": {"type": "string"}, "least": {"type": "number", "default": 10}, "unused": {}},
    "required": ["since"],
}
GIVEN = {"since": "2026-01-01"}

notes: list[str] = []


def shop() -> ToolRegistry:
    registry = ToolRegistry()
    notes.clear()

    @registry.tool(read_only=True)
    def orders(since: str) -> list[dict[str, float]]:
        """List the orders since a day."""
        return [{"id": 1, "total": 20.0}, {"id": 2, "total": 5.0}]

    @registry.tool
    def note(text: str) -> int:
        """Write something down for later."""
        notes.append(text)
        return len(notes)

    return registry


def with_script(**options: Any) -> ToolRegistry:
    registry = shop()
    about = "Find large orders, and note how many there are."
    registry.save_script("big_orders", SOURCE, inputs=INPUTS, description=about, **options)
    return registry


@pytest.fixture(scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    async with Runtime(record=tmp_path_factory.mktemp("audit") / "runs.db") as opened:
        yield opened


# Every route


async def test_a_saved_script_is_a_tool_for_scripts_plans_sessions_and_models(runtime: Runtime) -> None:
    registry = with_script()
    assert await by_code(runtime, registry, "big_orders", GIVEN) == {"value": [1]}
    rows = await runtime.execute_plan([{"tool": "big_orders", "args": {**GIVEN, "least": 1}}], tools=registry)
    assert (rows[0]["status"], rows[0]["result"]) == ("ok", [1, 2])
    async with runtime.session() as session:
        result = await session.execute_code(f"tools.big_orders(**{GIVEN})", tools=registry)
        assert result.value == [1]
    model = ScriptedModel([calls(("big_orders", GIVEN)), "done"])
    await Agent(model, tools=registry, code_execution=runtime).run("go")
    read = str(model.requests[-1].messages[-1]["content"])
    assert read.startswith("[1]") and "looked at 2" in read
    assert notes == ["1 big since 2026-01-01", "2 big since 2026-01-01", *["1 big since 2026-01-01"] * 2]


def test_a_saved_script_runs_in_the_sandboxes_of_a_sync_runtime() -> None:
    with SyncRuntime(with_script()) as runtime:
        assert runtime.execute_code("tools.big_orders(since='x')").value == [1]
        assert runtime.execute_plan([{"tool": "big_orders", "args": GIVEN}])[0]["result"] == [1]


async def test_a_call_outside_of_a_run_needs_a_runtime_of_its_own_or_that_of_execute_code(runtime: Runtime) -> None:
    refused = await with_script().dispatch("big_orders", GIVEN)
    assert refused.error is not None
    assert refused.error.code == "unavailable" and "runtime=" in refused.text
    assert (await with_script(runtime=runtime).dispatch("big_orders", GIVEN)).value == [1]
    registry = with_script()
    registry.enable_code_execution(runtime)
    assert (await registry.dispatch("big_orders", GIVEN)).value == [1]
    for wrong in (Runtime, SyncRuntime(), object()):
        with pytest.raises(UsageError, match="needs a Runtime"):
            shop().save_script("big", "1", runtime=wrong)  # type: ignore[arg-type]


async def test_a_run_that_was_suspended_and_a_repair_do_not_run_a_finished_saved_script_again(
    runtime: Runtime,
) -> None:
    registry = with_script()

    @registry.tool(requires_approval=True)
    def pay(euros: float) -> str:
        """Pay somebody some money."""
        return "paid"

    source = "ids = tools.big_orders(since='x')\ntools.pay(euros=len(ids))"
    suspend: OnApproval = "suspend"
    waiting = await runtime.execute_code(source, tools=registry, on_approval=suspend)
    assert waiting.suspension is not None and len(notes) == 1
    from toolcell.control.suspension import Approve

    done = await runtime.resume(waiting.suspension, {waiting.suspension.calls[0].id: Approve()}, tools=registry)
    assert (done.value, len(notes)) == ("paid", 1)

    broken = await runtime.execute_code("ids = tools.big_orders(since='y')\nid[0]", tools=registry)
    assert (broken.outcome, len(notes)) == (Outcome.ERROR, 2)
    mended = await runtime.execute_code("ids = tools.big_orders(since='y')\nids[0]", tools=registry, repairs=broken)
    assert (mended.value, len(notes)) == (1, 2)


async def test_a_dry_run_collects_the_writes_of_a_saved_script_and_commits_them(runtime: Runtime) -> None:
    registry = with_script()
    draft = await runtime.execute_code("tools.big_orders(since='x')", tools=registry, dry_run=True)
    assert (draft.value, notes) == ([1], [])
    assert [(each.tool, each.args) for each in draft.effects] == [("note", {"text": "1 big since x"})]
    assert (await runtime.commit(draft, tools=registry)).ok and notes == ["1 big since x"]


# What holds for the inner run


@pytest.mark.slow
async def test_rules_budgets_and_limits_of_the_caller_hold_in_a_saved_script(runtime: Runtime) -> None:
    registry = with_script()
    part = registry.subset(["big_orders", "orders"])
    lacking = await by_code(runtime, part, "big_orders", GIVEN)
    assert "unknown tool: note" in lacking["error"]

    registry.blacklist("note", origins=[Origin.CODE])
    blocked = await by_code(runtime, registry, "big_orders", GIVEN)
    assert "note" in blocked["error"] and notes == []
    registry.unblacklist("note")

    spent = RunContext(state=RunState(budget=Budget(tool_calls=2)))
    result = await runtime.execute_code("tools.big_orders(since='x')", tools=registry, context=spent)
    assert result.outcome is Outcome.ERROR and notes == []

    limits = Limits(tool_calls=2)  # big_orders itself and orders
    result = await runtime.execute_code("tools.big_orders(since='x')", tools=registry, limits=limits)
    assert result.error is not None and "2 tool calls" in result.error.message and notes == []
    again = "tools.big_orders(since='x')\ntools.orders(since='x')"
    result = await runtime.execute_code(again, tools=registry, limits=Limits(tool_calls=3))
    assert result.error is not None and result.error.line == 2 and "3 tool calls" in result.error.message


async def test_a_saved_script_with_tools_of_its_own_has_those_and_no_others(runtime: Runtime) -> None:
    own = shop()
    registry = ToolRegistry()
    registry.save_script("big_orders", SOURCE, inputs=INPUTS, description="Find large orders.", tools=own)
    assert await by_code(runtime, registry, "big_orders", GIVEN) == {"value": [1]}
    assert (await runtime.execute_code("tools.orders(since='x')", tools=registry)).outcome is Outcome.ERROR
    registry.policy.blacklist("note")
    assert "note" in (await by_code(runtime, registry, "big_orders", GIVEN))["error"]
    with pytest.raises(UsageError, match="subset"):
        registry.save_script("other", "1", tools=["orders"])  # type: ignore[arg-type]


async def test_arguments_are_checked_and_absent_ones_have_their_default_or_none(runtime: Runtime) -> None:
    registry = ToolRegistry()
    registry.save_script("show", "[since, least, unused]", inputs=INPUTS, description="Show what it was given.")
    assert await by_code(runtime, registry, "show", GIVEN) == {"value": ["2026-01-01", 10, None]}
    assert "since" in (await by_code(runtime, registry, "show", {}))["error"]
    assert "least" in (await by_code(runtime, registry, "show", {**GIVEN, "least": []}))["error"]
    registry.save_script("nothing", "pass")
    assert await by_code(runtime, registry, "nothing", {}) == {"value": None}

    @dataclasses.dataclass
    class Query:
        words: list[str]
        limit: int = 3

    registry.save_script("find", "words * limit", inputs=Query)
    assert await by_code(runtime, registry, "find", {"words": ["a"]}) == {"value": ["a", "a", "a"]}


async def test_what_fails_in_a_saved_script_says_which_script_and_line(runtime: Runtime) -> None:
    registry = ToolRegistry()
    registry.save_script("bad", "x = 1\nx / 0")
    error = (await by_code(runtime, registry, "bad", {}))["error"]
    assert "script bad (version 1)" in error and "line 2" in error and "ZeroDivisionError" in error
    registry.save_script("endless", "while True: pass")
    result = await runtime.execute_code("tools.endless()", tools=registry, limits=Limits(wall_s=1.0))
    assert result.outcome is Outcome.TIMEOUT or "timeout" in str(result.error).lower()


BEFORE_TOO_LARGE = {
    "silent": "",
    "in_a_line": "sys.stderr.write('50 %')",
    "noisy": "print('x' * 2_000_000, file=sys.stderr)",
    "replaced": "sys.stderr = io.StringIO()",
    "none": "sys.stderr = None",
}


async def test_a_last_value_that_is_too_large_is_an_error_and_not_none(runtime: Runtime) -> None:
    registry = ToolRegistry()
    for name, before in BEFORE_TOO_LARGE.items():
        registry.save_script(name, f"import io, sys\n{before}\n'x' * 10_000_000")
    registry.save_script("no_data", "lambda: 1")
    registry.save_script(
        "says_so", f"import sys\nprint({f'[toolcell] {NOT_KEPT}result too large (x)'!r}, file=sys.stderr)"
    )

    for name in BEFORE_TOO_LARGE:
        assert f"{name} (version 1): result too large" in (await by_code(runtime, registry, name, {}))["error"]
    assert await by_code(runtime, registry, "no_data", {}) == {"value": None}
    assert await by_code(runtime, registry, "says_so", {}) == {"value": None}


async def test_the_limits_of_a_run_hold_in_the_saved_scripts_it_calls(runtime: Runtime) -> None:
    """On each route, and two scripts deep."""
    registry = shop()
    seen = """import os, resource
room = os.statvfs(".")
[resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_CPU)[0], room.f_blocks, room.f_files]"""
    registry.save_script("seen", seen)
    registry.save_script("deeper", "tools.seen()")
    limits = Limits(open_files=40, cpu_s=7, disk_bytes=2 << 20, inodes=64)
    options: dict[str, Any] = {"tools": registry, "limits": limits}
    usual = (await runtime.execute_code(seen)).value
    found = {each: (await runtime.execute_code(each, **options)).value for each in (seen, "tools.seen()")}
    async for event in runtime.stream("tools.deeper()", **options):
        if isinstance(event, RunFinished):
            found["stream"] = event.result.value
    async with runtime.session(**options) as session:
        found["session"] = (await session.execute_code("tools.deeper()")).value
    assert found == dict.fromkeys(found, found[seen])
    assert all(mine < its for mine, its in zip(found[seen], usual, strict=True)), (found, usual)


async def test_scripts_that_call_each_other_in_a_circle_or_too_deep_are_refused(runtime: Runtime) -> None:
    registry = ToolRegistry()
    registry.save_script("a", "tools.b()")
    registry.save_script("b", "tools.a()")
    registry.save_script("self", "call_tool('self')")
    assert "a -> b -> a" in (await by_code(runtime, registry, "a", {}))["error"]
    assert "self -> self" in (await by_code(runtime, registry, "self", {}))["error"]
    for number in range(6):
        registry.save_script(f"deep{number}", f"tools.deep{number + 1}()" if number < 5 else "1")
    assert "4 deep" in (await by_code(runtime, registry, "deep0", {}))["error"]
    assert await by_code(runtime, registry, "deep2", {}) == {"value": 1}


async def test_the_audit_log_has_a_saved_script_as_a_run_below_the_call(runtime: Runtime) -> None:
    outer = await runtime.execute_code("tools.big_orders(since='x')", tools=with_script())
    found = [each.fields for each in Ledger(runtime.record.path).found()]
    runs = [each for each in found if each.get("who", {}).get("run") == outer.run_id]
    assert [each["source"] for each in runs] == ["tools.big_orders(since='x')", SOURCE]
    inner = runs[1]
    assert inner["who"]["parent_call"] == "call_1" and inner["inputs"] == {"since": "x", "least": 10, "unused": None}


# Versions


async def test_other_content_is_the_next_version_and_the_old_one_stays_callable(runtime: Runtime) -> None:
    registry = ToolRegistry()
    assert registry.save_script("f", "1").version == 1
    assert registry.save_script("f", "1").version == 1
    assert registry.save_script("f", "2").version == 2
    assert registry.save_script("f", "2", inputs=INPUTS).version == 3
    assert registry.names() == ["f", "f_v1", "f_v2"]
    assert await by_code(runtime, registry, "f_v1", {}) == {"value": 1}
    assert await by_code(runtime, registry, "f", GIVEN) == {"value": 2}
    registry.blacklist("f")
    assert "error" in await by_code(runtime, registry, "f_v1", {})  # a rule about it holds for what it was


def test_names_of_tools_and_of_scripts_do_not_replace_each_other() -> None:
    registry = with_script()
    with pytest.raises(RegistrationError, match="another name"):
        registry.save_script("orders", "1")
    with pytest.raises(RegistrationError, match="already registered"):
        registry.register("big_orders", "Something else entirely.", None, lambda args: 1)
    registry.register("twice_v1", "Something else entirely.", None, lambda args: 1)
    registry.save_script("twice", "1")
    with pytest.raises(RegistrationError, match="twice_v1"):
        registry.save_script("twice", "2")
    with pytest.raises(UsageError, match="frozen"):
        registry.snapshot().save_script("more", "1")
    assert registry.registered("twice").spec.source.version == 1  # type: ignore[union-attr]


def test_a_script_takes_no_name_of_an_old_version() -> None:
    registry = ToolRegistry()
    registry.save_script("f", "1")
    registry.save_script("f", "2")
    with pytest.raises(RegistrationError, match="old version"):
        registry.save_script("f_v1", "3")
    assert registry.registered("f_v1").spec.source.source == "1"  # type: ignore[union-attr]


@pytest.mark.parametrize("taken", ["f_v1", "F", "f.g"])
def test_a_script_that_cannot_stand_beside_a_tool_is_not_written_either(taken: str, tmp_path: Path) -> None:
    ToolRegistry().save_script("f", "1", folder=tmp_path)
    registry = ToolRegistry()
    registry.register(taken, "Something else entirely.", None, lambda args: 1)

    with pytest.raises(RegistrationError, match="f"):
        registry.save_script("f", "2", folder=tmp_path)
    assert [path.name for path in sorted((tmp_path / "f").iterdir())] == ["v1.json", "v1.py"]


# Bad input


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/etc/x", "a b", "a\0b", "a.", ".a", "x" * 60, "é", 7, None])
def test_a_name_that_is_none_or_a_path_is_refused_and_nothing_is_written(name: Any, tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="name must"):
        ToolRegistry().save_script(name, "1", folder=tmp_path / "in")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("x" * 1_000_000, {}, f"1000000 bytes, and at most {MAX_SOURCE_BYTES}"),
        (" \n", {}, "empty"),
        (b"1", {}, "must be str"),
        ("'\ud800'", {}, "not UTF-8"),
        ("1", {"inputs": {"type": "array"}}, "inputs must be"),
        ("1", {"inputs": int}, "not a record"),
        ("1", {"inputs": [1]}, "inputs must be"),
        ("1", {"inputs": {"type": "object", "properties": {"a-b": {}}}}, "'a-b' is not a Python name"),
        ("1", {"inputs": {"type": "object", "properties": {"tools": {}}}}, "'tools' is a name that every script"),
        ("1", {"inputs": {"type": "object", "properties": {"a": {"type": "nope"}}}}, "nope"),
        ("1", {"description": "x" * 5000}, "5000 characters"),
        ("1", {"description": " "}, "empty"),
        ("1", {"description": 7}, "description must be"),
        ("1", {"revert": print}, "revert"),
        ("1", {"read_onyl": True}, "did you mean"),
        ("1", {"timeout_s": float("inf")}, "cannot be saved"),
    ],
    ids=range(16),
)
def test_what_cannot_be_a_script_is_refused_before_anything_is_written(
    source: Any, options: Any, said: str, tmp_path: Path
) -> None:
    registry = ToolRegistry()
    with pytest.raises(UsageError) as caught:
        registry.save_script("f", source, folder=tmp_path / "in", **options)
    assert said in str(caught.value)
    assert not (tmp_path / "in").exists() and registry.names() == []


# Files


async def test_scripts_are_kept_as_plain_files_and_loaded_again(runtime: Runtime, tmp_path: Path) -> None:
    with_script(folder=tmp_path, requires_approval=False, returns={"type": "array"})
    second = with_script(folder=tmp_path)
    assert sorted(each.name for each in (tmp_path / "big_orders").iterdir()) == [
        "v1.json",
        "v1.py",
        "v2.json",
        "v2.py",
    ]
    assert (tmp_path / "big_orders/v2.py").read_text() == SOURCE
    facts = json.loads((tmp_path / "big_orders/v1.json").read_text())
    assert (facts["name"], facts["version"], facts["inputs"]) == ("big_orders", 1, INPUTS)
    assert facts["options"] == {"requires_approval": False, "returns": {"type": "array"}}
    assert second.names() == ["orders", "note", "big_orders_v1", "big_orders"]

    registry = shop()
    (latest,) = registry.load_scripts(tmp_path)
    assert (latest.version, latest.source, latest.inputs) == (2, SOURCE, INPUTS)
    assert registry.registered("big_orders_v1").options.returns == {"type": "array"}  # type: ignore[union-attr]
    assert await by_code(runtime, registry, "big_orders_v1", GIVEN) == {"value": [1]}


def test_an_approval_that_a_script_was_saved_with_is_asked_for_after_loading(tmp_path: Path) -> None:
    with_script(folder=tmp_path, requires_approval=True, sends={"mail"}, callable_from={Origin.PLAN})
    registry = shop()
    registry.load_scripts(tmp_path)
    options = registry.registered("big_orders").options  # type: ignore[union-attr]
    assert options.requires_approval and options.sends == {"mail"} and options.callable_from == {Origin.PLAN}


def test_the_same_script_keeps_its_version_whatever_the_tools_are(tmp_path: Path) -> None:
    ToolRegistry().save_script("f", "tools.orders(since='x')", folder=tmp_path)
    assert shop().save_script("f", "tools.orders(since='x')", folder=tmp_path).version == 1


def test_a_dotted_name_stays_in_its_folder_and_in_its_namespace(tmp_path: Path) -> None:
    registry = ToolRegistry()
    registry.save_script("reports.weekly", "1", folder=tmp_path)
    registry.save_script("reports.weekly", "2", folder=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["reports.weekly"]
    assert registry.names() == ["reports.weekly", "reports.weekly_v1"]


def damage(path: Path, how: str) -> None:
    source, facts = path / "f/v1.py", path / "f/v1.json"
    match how:
        case "source changed":
            source.write_text("2")
        case "source gone":
            source.unlink()
        case "source huge":
            source.write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
        case "source a pipe":
            source.unlink()
            os.mkfifo(source)
        case "source a link":
            source.unlink()
            source.symlink_to("/etc/passwd")
        case "no JSON":
            facts.write_text("{")
        case "nested JSON":
            facts.write_text("[" * 100_000)
        case "a list":
            facts.write_text("[]")
        case "other name":
            facts.write_text(facts.read_text().replace('"name": "f"', '"name": "g"'))
        case "other format":
            facts.write_text(facts.read_text().replace('"format": 1', '"format": 9'))
        case "unknown option":
            facts.write_text(facts.read_text().replace('"options": {}', '"options": {"shell": true}'))
        case "wrong option":
            facts.write_text(facts.read_text().replace('"options": {}', '"options": {"timeout_s": "x"}'))
        case "wrong inputs":
            facts.write_text(facts.read_text().replace('"type": "object"', '"type": "array"'))


@pytest.mark.parametrize(
    "how",
    [
        "source changed", "source gone", "source huge", "source a pipe", "source a link", "no JSON", "nested JSON",
        "a list", "other name", "other format", "unknown option", "wrong option", "wrong inputs",
    ],
)  # fmt: skip
def test_damaged_files_are_named_and_nothing_of_the_folder_is_registered(how: str, tmp_path: Path) -> None:
    ToolRegistry().save_script("a", "1", folder=tmp_path)
    ToolRegistry().save_script("f", "1", folder=tmp_path)
    damage(tmp_path, how)
    registry = ToolRegistry()
    with pytest.raises(UsageError, match="v1"):
        registry.load_scripts(tmp_path)
    assert registry.names() == []


def test_versions_saved_with_schemas_of_tools_are_read_and_followed(tmp_path: Path) -> None:
    ToolRegistry().save_script("f", "1", folder=tmp_path)
    facts = tmp_path / "f/v1.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"tools": {"t": {"parameters": {}, "digest": ""}}}))
    assert [each.version for each in ToolRegistry().load_scripts(tmp_path)] == [1]
    assert ToolRegistry().save_script("f", "2", folder=tmp_path).version == 2


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(UsageError, match="not a folder of saved scripts"):
            ToolRegistry().load_scripts(wrong)
    with pytest.raises(UsageError, match="cannot be saved in"):
        ToolRegistry().save_script("f", "1", folder=tmp_path / "file")
    with pytest.raises(UsageError, match="empty text"):
        ToolRegistry().save_script("f", "1", folder="")


@pytest.mark.slow
def test_what_a_killed_process_left_is_no_version_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    ToolRegistry().save_script("f", "1", folder=tmp_path)
    (tmp_path / "f/v2.py").write_text("half")
    (loaded,) = ToolRegistry().load_scripts(tmp_path)
    assert loaded.version == 1
    assert ToolRegistry().save_script("f", "3", folder=tmp_path).version == 3
    (tmp_path / "f/v4.py").write_text("4")  # the same script, and its JSON is still missing
    assert ToolRegistry().save_script("f", "4", folder=tmp_path).version == 4


SAVER = """
import sys
from toolcell import ToolRegistry
folder, own = sys.argv[1:]
for number in range(20):
    ToolRegistry().save_script("same", f"{number}", folder=folder)
    ToolRegistry().save_script("each", f"'{own}', {number}", folder=folder)
"""


@pytest.mark.slow
def test_two_processes_that_save_at_once_lose_no_version(tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), own]) for own in "ab"]
    assert [each.wait(300) for each in both] == [0, 0]
    registry = ToolRegistry()
    registry.load_scripts(tmp_path)
    saved = [tool.spec.source for tool in registry.state.tools.values()]
    each = {script.version: script for script in saved if script.name == "each"}
    assert sorted(each) == list(range(1, 41))
    assert {script.source for script in each.values()} == {f"'{own}', {n}" for own in "ab" for n in range(20)}
    assert {script.source for script in saved if script.name == "same"} == {str(n) for n in range(20)}
