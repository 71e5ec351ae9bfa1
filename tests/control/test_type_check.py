"""Types of a script are checked before it runs, in a sandbox of its own."""

from __future__ import annotations

import ast
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import (
    Outcome,
    Policy,
    RunContext,
    Runtime,
    SandboxUnavailable,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.control import type_check
from toolcell.control.type_check import MAX_CHECKERS, SCRIPT, TypeChecker, read_findings
from toolcell.control.type_check_guest import direct_calls
from toolcell.sandbox.process import programs
from toolcell.tools import Approve

pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

HIT = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
made: list[str] = []


def searching() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(name="web.search", returns={"type": "array", "items": HIT})
    def search(query: str, limit: int = 10, tags: list[float] | None = None, mode: str = "a") -> Any:
        """Search the web for pages."""
        made.append(query)
        return [{"title": query}]

    return registry


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime(searching(), policy=Policy(check_types=True)) as opened:
        yield opened


async def test_a_wrong_argument_name_type_and_use_of_a_result_are_three_findings_before_any_call(
    runtime: Runtime,
) -> None:
    made.clear()
    source = (
        'tools.web.search(query="first")\n'
        'tools.web.search(query="x", limmit=3)\n'
        'call_tool("web.search", {"query": "x", "limit": "many"})\n'
        'for hit in await call_tool_async("web.search", query="x"):\n'
        '    print(hit["titel"])\n'
    )

    result = await runtime.execute_code(source)

    assert (result.outcome, made) == (Outcome.DENIED, [])
    assert result.error is not None
    assert [each["line"] for each in result.error.findings] == [2, 3, 5]
    for word in ("line 2: ", "limmit", "Expected `int`", "titel", "the script was not run"):
        assert word in result.error.message


@each_row(
    ("source", "line"),
    [
        ("from tools import web\nweb.search(qery='x')", 2),
        ("from tools import (\n    web as w,\n    nothing,\n)\nw.search('x', limit='many')", 5),
        ("import json, tools as t\njson.dumps(t.web.search(query='x')[0]['titel'])", 2),
        ("from tools import *\nweb.search('x')[0]['titel']", 2),
        ("def f():\n    from tools import web\n    return web.search(query='x', limmit=1)", 3),
    ],
)
async def test_imported_tools_are_checked(runtime: Runtime, source: str, line: int) -> None:
    result = await runtime.execute_code(source)

    assert result.error is not None
    assert {each["line"] for each in result.error.findings} == {line}


RIGHT = (
    "from tools import web\nfor hit in web.search('x'): hit['title'].upper()",
    "import tools\nimport tools as t\nt.web.search({'query': 'x'}), tools.web.search('x', 3)",
    "from tools import own, web\nown(1), web.search('x')",
    'tools.web.search("x", 3)',
    'tools.web.search({"query": "x"})',
    'given = {"query": "x", "limit": 2}\ntools.web.search(given)\ncall_tool("web.search", given)',
    'whole = [1, 2]\ncall_tool("web.search", query="x", tags=whole)',
    'for mode in ["a", "b"]:\n    tools.web.search(query="x", mode=mode)',
    'call_tool("web.search", {"query": ("x"), "limit": int("3")},\n)[0]["title"].upper()',
    'call_tool("web.search", {"query": "x"}, raw=True).upper()',
    "await call_tool_async('web.search', query=text)",
    'import numpy\nname = "web.search"\ncall_tool(name, query="x")\ntools["web"].search(query="x")',
    "set_result([OUTPUT_DIR, input_files, rows[0], list_tools()])",
    "rows = rows[1:]\ntext += 'more'\nprint(rows, text.upper())",
    "found = search_tools('pages')\nfor each in found: print(each['name'])\nprogress({'at': 1})\nlog('x')",
    "try:\n    tools.web.search(query='x')\nexcept ToolError as exc:\n    print(exc.tool, exc.code, exc.retryable, exc.details)",
    "a, b = call_tools_parallel([{'tool': 'web.search', 'args': {'query': 'x'}}, ('web.search', {'query': 'y'})])\na[0]['title']",
    "import asyncio\nasync def one(q):\n    return await call_tool_async('web.search', {'query': q})\n"
    "first, second = await asyncio.gather(one('a'), one('b'))\n[hit['title'] for hit in first + second]",
    "[hit['title'] async for hit in (h for h in [])] if False else [await call_tool_async('web.search', query=q) for q in 'ab']",
    "if not rows:\n    return 'none'\nset_result({'rows': rows}, files=['a.csv'])",
    "import pandas as pd\nframe = pd.DataFrame(tools.web.search(query='x'))\nframe.groupby('title').size().to_dict()",
    "best = max(tools.web.search(query='x'), key=lambda hit: hit['title'])\nf'{best[\"title\"]:>10}'",
    "from collections import defaultdict\nby = defaultdict(list)\nfor hit in tools.web.search(query='x'): by[hit['title'][0]].append(hit)\ndict(by)",
    "hit = tools.web.search(query='x')[0]\nhit.get('title', '')\nhit | {'more': 1}\ndict(hit)['anything']",
    "result = tools.web.search(query='x')\nresult = result[0]['title']\nresult = len(result)\nresult + 1",
    "cache = {}\ncache['a'] = 1\ncache['b'] = 'text'\ncache['c'] = [1]\nsorted(cache, key=str)",
    "import json, re\ndata = json.loads('{}')\ndata['x'][0].y\nre.search('a', 'b').group(0) if re.search('a', 'b') else None",
)


async def test_scripts_that_a_sandbox_takes_have_no_findings(runtime: Runtime) -> None:
    registry = runtime.registry.snapshot()
    for source in RIGHT:
        found = await runtime.checks.type_checker.findings(source, registry, {"rows": [1], "text": "x"})
        assert found == (), (source, found)


@each_row("around", ["```python\n{}\n```", "\ufeff\n{}", "\n    {}", "```\n    {}"])
async def test_a_script_in_a_fence_or_indented_is_checked_like_any_and_keeps_its_lines(
    runtime: Runtime, around: str
) -> None:
    result = await runtime.execute_code(around.format(WRONG))
    assert result.outcome is Outcome.DENIED
    assert [each["line"] for each in result.type_findings] == [2, 2]


async def test_a_script_that_is_no_python_is_left_to_its_run(runtime: Runtime) -> None:
    result = await runtime.execute_code("a b")
    assert (result.outcome, result.error.type if result.error else "") == (Outcome.ERROR, "SyntaxError")


@each_row("source", ["(" * 50_000, "-" * 300_000 + "1", "x = '\ud800'", "\0", "a" + ".b" * 100_000])
async def test_a_hostile_text_ends_nothing_but_its_own_check(runtime: Runtime, source: str) -> None:
    result = await runtime.execute_code(source)
    assert result.outcome in (Outcome.ERROR, Outcome.DENIED, Outcome.MEMORY_LIMIT)
    assert (await runtime.execute_code("1 + 1")).value == 2


ATTACK = """
import os, socket, subprocess
def tried(*command):
    try:
        return subprocess.run(command, capture_output=True, env={'LD_LIBRARY_PATH': '/packages/lib'}).returncode
    except OSError as exc:
        return type(exc).__name__
def failed(function, *args):
    try:
        function(*args)
    except OSError as exc:
        return type(exc).__name__
os.mkdir('own')
with open('own/program', 'wb') as copy, open('/packages/bin/ty', 'rb') as ty:
    copy.write(ty.read(4096))
os.chmod('own/program', 0o700)
python = [f'/usr/bin/{name}' for name in os.listdir('/usr/bin')]
set_result({
    'sees': os.path.exists(path),
    'reads': failed(open, path),
    'checks': tried('/packages/bin/ty', 'check', path),
    'version': tried('/packages/bin/ty', '--version'),
    'programs': sorted({tried(each, '--version') for each in [*python, '/bin/sh', './own/program']}, key=str),
    'python': len(python),
    'writes': [failed(open, each, 'w') for each in ('/packages/x', '/packages/bin/ty', '/usr/x', '/etc/x', '/x')],
    'net': failed(socket.create_connection, ('127.0.0.1', port), 1),
    'folders': sorted(os.listdir('/packages')),
})
"""


async def test_the_checker_reads_no_file_of_the_host_opens_no_connection_and_executes_nothing_but_ty(
    runtime: Runtime, tmp_path: Path
) -> None:
    """What a script could do that had taken over the checker."""
    secret = tmp_path / "secret.py"
    secret.write_text("value: int = 1\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        shown = {"path": str(secret), "port": server.getsockname()[1]}
        opened = await runtime.checks.type_checker._checkers._open()
        result = await opened.execute_code(ATTACK, inputs=shown, tools=[], cancel=anyio.Event())

    assert result.ok, result.error
    found = result.value
    assert found["sees"] is False and found["reads"] == "FileNotFoundError"
    assert found["version"] == 0 and found["checks"] not in (0, 1)
    assert found["python"] and set(found["programs"]) <= {"PermissionError", "FileNotFoundError"}
    assert None not in found["writes"]
    assert found["net"] is not None and found["folders"] == ["bin", "lib"]


async def test_no_check_sees_a_script_or_the_names_of_another(runtime: Runtime) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    first = "class Mine:\n    secret = 1\ntools.web.search(limmit=1)\n"
    assert len(await checker.findings(first, tools, {"given": 1})) == 2

    assert await checker.findings("1 + 1\n\n", tools, None) == ()
    for source in ("Mine", "given", "import script\nMine", "from script import Mine\nMine.secrets", "secret"):
        [*found] = await checker.findings(source, tools, None)
        assert [each["rule"] for each in found] in (["unresolved-reference"], []), found
        assert "Mine.secret" not in str(found)
    assert await checker.findings("import script\nscript.Mine.nothing.at_all", tools, None) == ()
    assert await checker.findings(first, tools, {"given": "text"}) != ()


async def test_checks_at_the_same_time_do_not_mix_and_checkers_stay_bounded(runtime: Runtime) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    found = dict[int, Any]()

    async def check(number: int) -> None:
        found[number] = await checker.findings(f"name_{number}\n", tools, None)

    async with anyio.create_task_group() as tasks:
        for number in range(3 * MAX_CHECKERS):
            tasks.start_soon(check, number)
    for number, [finding] in found.items():
        assert f"name_{number}`" in finding["message"]
    assert 1 <= len(checker._checkers._alive) <= MAX_CHECKERS


async def test_a_script_that_ends_its_checker_costs_other_checks_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    await checker.findings("1", tools, None)
    [*before] = checker._checkers._alive
    monkeypatch.setattr(type_check, "CHECK_S", 0.0)  # so nothing is ever in time

    [late] = await checker.findings("2", tools, None)
    monkeypatch.undo()

    assert late["rule"] == "not-checked" and "more than 0 s" in late["message"]
    assert await checker.findings("3", tools, None) == ()
    assert checker._checkers._alive[-1] not in before or len(before) > 1


DOUBLING = "x = 1\n" + 60 * "x = (x, x)\n" + "x + 1\n"
"""Its type has 2**60 parts."""


async def test_while_a_checker_is_busy_with_one_script_others_are_checked(runtime: Runtime) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    await checker.findings("1", tools, None)
    async with anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def check() -> None:
            await checker.findings(DOUBLING, tools, None)
            ended.set()

        tasks.start_soon(check)
        while not (ended.is_set() or any(each.is_busy for each in checker._checkers._alive)):
            await anyio.lowlevel.checkpoint()
        found = await checker.findings("nowhere", tools, None)
        tasks.cancel_scope.cancel()

    assert [each["rule"] for each in found] == ["unresolved-reference"]
    assert not any(each.is_busy for each in checker._checkers._alive)


async def test_a_checker_that_died_is_replaced_within_the_check(runtime: Runtime) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    await checker.findings("1", tools, None)
    for each in checker._checkers._alive:
        each.checks = 1
        each._jobs.send_nowait({"source": None, "given": ""})  # type: ignore[dict-item]
        each._answered = anyio.Event()
        await each._answered.wait()
        assert each.has_died

    assert [each["rule"] for each in await checker.findings("nowhere", tools, None)] == ["unresolved-reference"]


async def test_a_check_whose_caller_gives_up_leaves_no_answer_for_the_next(runtime: Runtime) -> None:
    tools, checker = runtime.registry.snapshot(), runtime.checks.type_checker
    await checker.findings("1", tools, None)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await checker.findings("nowhere", tools, None)

    assert await checker.findings("2", tools, None) == ()


WRONG = 'tools.web.search(limmit="x")'
HIDDEN = 'if len(OUTPUT_DIR) > 9_999:\n    tools.web.search(limmit="x")\nset_result(40 + 2)'
"""Wrong in a branch that no run takes."""


@each_row(
    ("of_policy", "of_runtime", "of_call", "outcome"),
    [
        (None, None, None, Outcome.OK),
        ("refuse", None, None, Outcome.DENIED),
        (True, "warn", None, Outcome.OK),
        (None, True, None, Outcome.DENIED),
        ("refuse", None, False, Outcome.OK),
        ("off", "off", "refuse", Outcome.DENIED),
        (None, None, "warn", Outcome.OK),
    ],
)
async def test_a_call_decides_before_the_runtime_and_the_runtime_before_the_policy(
    of_policy: Any, of_runtime: Any, of_call: Any, outcome: Outcome
) -> None:
    policy = Policy(check_types=of_policy)
    async with Runtime(searching(), policy=policy, check_types=of_runtime) as opened:
        result = await opened.execute_code(HIDDEN, check_types=of_call)
        async with opened.session() as session:
            again = await session.execute_code(HIDDEN, check_types=of_call)

    for each in (result, again):
        assert each.outcome is outcome
        looked = "warn" in (of_call, of_runtime) or outcome is Outcome.DENIED
        assert [each["line"] for each in each.type_findings] == ([2, 2] if looked else [])
        assert ("limmit" in each.to_json()) == looked


@each_row("wrong", ["on", "WARN", 1, [], "", {"a": 1}])
async def test_another_degree_is_refused_by_name(runtime: Runtime, wrong: Any) -> None:
    for made in (lambda: Runtime(check_types=wrong), lambda: Policy(check_types=wrong)):
        with pytest.raises(UsageError, match="check_types"):
            made()
    with pytest.raises(UsageError, match="'off', 'warn', 'refuse'"):
        await runtime.execute_code("1", check_types=wrong)
    async with Runtime(searching()) as without, runtime.session() as session:
        if wrong:
            with pytest.raises(UsageError, match="'off', 'warn', 'refuse'"):
                await without.execute_code("1", context=RunContext(check_types=wrong))
        with pytest.raises(UsageError, match="'off', 'warn', 'refuse'"):
            await session.execute_code("1", check_types=wrong)


async def test_a_warning_is_in_what_the_model_reads_after_the_result_or_the_error(runtime: Runtime) -> None:
    registry = searching()
    async with Runtime(registry, check_types="warn") as warning:
        registry.enable_code_execution(warning)
        fine = await registry.execute("execute_code", {"code": HIDDEN})
        failed = await registry.execute("execute_code", {"code": WRONG})
        right = await registry.execute("execute_code", {"code": "1 + 1"})

    assert fine.text.startswith("42") and failed.is_error
    for each in (fine, failed):
        assert "the types of the script look wrong: line" in each.text and "limmit" in each.text
    assert "types" not in right.text


async def test_an_agent_warns_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(context: RunContext | None = None, **options: Any) -> str:
        async with Runtime(searching(), **options) as opened:
            agent = Agent(
                ScriptedModel([calls(("execute_code", {"code": HIDDEN})), "done"]),
                tools=searching(),
                code_execution=opened,
                context=context,
            )
            await agent.run("go")
            return str(agent.messages)

    assert "limmit" in (await told()).partition("look wrong")[2]
    assert "look wrong" not in await told(check_types="off")
    assert "look wrong" not in await told(RunContext(check_types="off"))
    assert "look wrong" not in await told(RunContext(check_types="off"), check_types=False)
    assert "was not run" in await told(check_types="refuse")
    monkeypatch.setitem(__import__("sys").modules, "ty", None)
    assert "look wrong" not in await told()


async def test_a_script_that_cannot_be_checked_is_refused_warned_of_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type_check, "CHECK_S", 0.0)  # so nothing is ever in time
    async with Runtime(searching()) as opened:
        refused = await opened.execute_code(HIDDEN, check_types="refuse")
        warned = await opened.execute_code(HIDDEN, check_types="warn")
        ran = await opened.execute_code(HIDDEN, context=RunContext(check_types="warn"))

    assert refused.outcome is Outcome.DENIED and "could not be checked" in str(refused.error)
    assert warned.value == ran.value == 42
    assert [[each["rule"] for each in result.type_findings] for result in (warned, ran)] == [["not-checked"], []]


async def test_where_no_checker_can_be_started_only_those_who_asked_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def unavailable() -> Path:
        asked.append(1)
        raise SandboxUnavailable("no sandbox here")

    monkeypatch.setattr(programs, "copy_type_checker", unavailable)
    async with Runtime(searching()) as opened:
        by_default = RunContext(check_types="warn")
        for _ in range(2):
            assert (await opened.execute_code(HIDDEN, context=by_default)).value == 42
        assert asked == [1]
        for degree in ("warn", "refuse"):
            with pytest.raises(SandboxUnavailable, match="no sandbox here"):
                await opened.execute_code(HIDDEN, check_types=degree)


async def test_a_script_of_a_session_may_use_what_earlier_ones_left(runtime: Runtime) -> None:
    async with runtime.session() as session:
        for source in (
            "import json as j\nfrom math import pi\ndef area(r): return pi * r\nclass Point: x = 1\ntotal, *rest = 1, 2, 3",
            "print(j.dumps(area(2)), Point().x, total + pi, rest)\nfor each in rows: total += each",
            "print(each, rows, total)\nhits = tools.web.search(query='x')",
            "[hit['title'] for hit in hits]",
        ):
            result = await session.execute_code(source, inputs={"rows": [1]} if "rows:" in source else None)
            assert result.ok, (source, result.error)
        wrong = await session.execute_code("nobody_knows + total\n")
        fork = await session.fork()
        async with fork:
            assert (await fork.execute_code("total\nfrom math import *")).ok
            assert (await fork.execute_code("tau")).ok  # which may be anything from now on
        await session.reset()
        forgotten = await session.execute_code("total")
        await session.execute_code("globals()['made_up'] = 1", check_types=False)
        assert (await session.execute_code("made_up")).value == 1

    for each, name in ((wrong, "nobody_knows"), (forgotten, "total")):
        assert each.outcome is Outcome.DENIED and each.error is not None and f"`{name}`" in each.error.message
        assert each.session is not None


async def test_a_session_without_a_journal_knows_its_names_until_its_sandbox_is_gone(runtime: Runtime) -> None:
    async with runtime.session(restore="empty") as session:
        await session.execute_code("x = 40")
        assert (await session.execute_code("x + 2")).value == 42
        await session.put_down()
        await session.execute_code("1")
        assert (await session.execute_code("x + 2")).outcome is Outcome.DENIED


async def test_a_script_that_goes_on_later_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = searching()

    @registry.tool(requires_approval=True)
    def send(text: str) -> str:
        """Send a text to somebody."""
        return f"sent {text}"

    async with Runtime(registry, check_types=True) as opened:
        refused = await opened.execute_code(WRONG, on_approval="suspend")
        waits = await opened.execute_code("tools.send(text='x')", on_approval="suspend")
        assert refused.outcome is Outcome.DENIED and waits.suspension is not None
        monkeypatch.setattr(TypeChecker, "check", None)
        result = await opened.resume(waits.suspension, {each.id: Approve() for each in waits.suspension.calls})
    assert result.value == "sent x"


async def test_a_mended_script_and_a_dry_run_are_checked_once_like_any(runtime: Runtime) -> None:
    broken = await runtime.execute_code("1 / 0")
    assert (await runtime.execute_code(WRONG, repairs=broken)).outcome is Outcome.DENIED
    assert (await runtime.execute_code(WRONG, dry_run=True)).outcome is Outcome.DENIED
    async with runtime.session() as session:
        dry = await session.execute_code(WRONG, dry_run=True)
        assert (dry.outcome, dry.effects) == (Outcome.DENIED, ())


async def test_a_models_script_and_a_stream_are_checked_too(runtime: Runtime) -> None:
    registry = searching()
    registry.enable_code_execution(runtime)

    answered = await registry.execute("execute_code", {"code": "tools.web.search(limmit=1)"})
    events = [event async for event in runtime.stream("tools.web.search(limmit=1)")]

    assert "limmit" in answered.text
    assert events[-1].result.outcome is Outcome.DENIED  # type: ignore[union-attr]


def test_a_blocking_runtime_checks_too() -> None:
    with SyncRuntime(searching()) as runtime:
        result = runtime.execute_code("tools.web.search(limmit=1)", check_types=True)
    assert result.outcome is Outcome.DENIED


async def test_without_ty_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ty", None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[types\]'"):
        programs.copy_type_checker()


@each_row("rows", [None, 3, [None], [["1", "r", "m"]], [[1, "r"]], [[1, "r", 2]], {"line": 1}, [[[], {}, ()]]])
def test_findings_that_are_none_are_left_out(rows: Any) -> None:
    assert read_findings(rows) == ()


def test_calls_are_rewritten_line_by_line() -> None:
    source = 'x = call_tool(\n    "a.b",  # which\n    {"q": "ü",\n     "n": 1},\n)\nbad\n'

    text = direct_calls(source, {"a.b": "a.b"})

    assert text.splitlines()[-1] == "bad"
    assert len(text.splitlines()) == 6
    [call] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert ast.unparse(call) == "tools.a.b(q='ü', n=1)"


def test_the_text_of_the_checker_is_a_script() -> None:
    ast.parse(SCRIPT)
    assert TypeChecker.__doc__
