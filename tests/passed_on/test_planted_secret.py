"""One secret of a run, which its tools say carelessly in every way, is in nothing that leaves the run.

Each way out is a row: the text that somebody can read there. Tools and programs of ours are the only ones that know it.
"""

from __future__ import annotations

import html
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client

from passed_on.office import SECRET, shown
from rows import each_row
from toolcell import Agent, PoolConfig, RunContext, Runtime, Secrets, ToolContext, ToolError, ToolRegistry
from toolcell.audit import AuditLog, Index, SpanSink
from toolcell.control import Draft
from toolcell.mcp.server import McpServer
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Event, EventBus

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

MARK = "[redacted]"


def careless() -> ToolRegistry:
    """Tools that say the secret in each way that a tool has."""
    registry = ToolRegistry()

    def secret(ctx: ToolContext) -> str:
        return ctx.secret("key")

    @registry.tool
    async def returns(ctx: ToolContext) -> dict[str, Any]:
        """Return it, as a value, as a key and deep in a list."""
        return {"value": secret(ctx), f"a {secret(ctx)} key": 1, "deep": [[{"x": f"Bearer {secret(ctx)}"}]]}

    @registry.tool
    async def fails(ctx: ToolContext) -> str:
        """Fail with it in the message and in the details."""
        raise ToolError(f"refused {secret(ctx)}", details={"sent": secret(ctx)})

    @registry.tool(expose_errors=True)
    async def crashes(ctx: ToolContext) -> str:
        """Crash with it in the message."""
        raise ValueError(f"bad key {secret(ctx)}")

    @registry.tool
    async def reports(ctx: ToolContext) -> str:
        """Report it as progress and as an event of its own."""
        ctx.update(f"using {secret(ctx)}")
        ctx.update(details={"key": secret(ctx)})
        ctx.emit("used", key=secret(ctx))
        return "done"

    @registry.tool(requires_approval=True)
    async def waits(ctx: ToolContext, note: str = "") -> str:
        """Wait for a person, and say it then."""
        return f"used {secret(ctx)}"

    return registry


SCRIPT = """
import traceback
seen = []
for name in ("returns", "fails", "crashes", "reports"):
    try:
        seen.append(call_tool(name))
    except ToolError as exc:
        seen.append([str(exc), repr(exc), exc.details, traceback.format_exc()])
print(seen)
progress(seen)
open("seen.txt", "w").write(repr(seen))
set_result(seen, files=["seen.txt"])
"""
FAILING = "kept = call_tool('returns')\ncall_tool('crashes')"
STEPS: list[dict[str, Any]] = [{"tool": name, "args": {}} for name in ("returns", "fails", "crashes", "reports")]


class Ways:
    """What can be read in each way out of a few runs."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.events: list[Event] = []
        self.bus = EventBus()
        self.bus.subscribe(self.events.append)

    def run(self, **fields: Any) -> RunContext:
        return RunContext(events=self.bus, secrets=Secrets({"key": SECRET}), **fields)

    def put(self, name: str, *values: Any) -> None:
        self.texts[name] = "\n".join([self.texts.get(name, ""), *map(shown, values)])

    async def collect(self, folder: Path, log: AuditLog) -> None:
        heard: list[Any] = []
        printed: list[str] = []
        registry, pool = careless(), PoolConfig(warm=0)
        async with Runtime(registry, pool=pool, record=log) as runtime:
            result = await runtime.execute_code(
                SCRIPT,
                context=self.run(),
                on_log=lambda stream, text: printed.append(text),
                on_progress=heard.append,
            )
            assert result.ok, result
            self.put("result", result, result.value)
            self.put("returned files", *(file.data for file in result.files))
            self.put("logs", result.logs.text)
            self.put("calls", result.calls)
            self.put("callbacks", *printed, *heard)

            failed = await runtime.execute_code(FAILING, context=self.run())
            assert failed.error is not None and failed.error.frames
            self.put("error", failed, failed.error, failed.error.frames)
            self.put("traceback", failed.error.traceback + failed.error.message)

            self.put("stream", *[event async for event in runtime.stream(SCRIPT, context=self.run())])

            rows = await runtime.execute_plan(STEPS, context=self.run())
            self.put("plan rows", list(rows), *rows)

            source = f"x = call_tool('waits', note='as asked')\n{SCRIPT}"
            waiting = await runtime.execute_code(source, context=self.run(), on_approval="suspend")
            assert waiting.suspension is not None
            self.put("suspension", waiting.suspension, waiting.suspension.to_json(), runtime.suspended_runs())

            draft = Draft()
            dry = await runtime.execute_code(FAILING, context=self.run().having(draft))
            self.put("draft", dry, draft, draft.effects)
            self.put("commit", await runtime.commit(draft, context=self.run()))

            async with runtime.session(context=self.run()) as session:
                self.put("session", await session.execute_code(SCRIPT))

            model = ScriptedModel(
                [
                    calls(("returns", {}), ("fails", {}), ("crashes", {}), ("reports", {})),
                    calls(("execute_code", {"code": SCRIPT})),
                    calls(("execute_code", {"code": FAILING})),
                    "done",
                ]
            )
            agent = Agent(model, tools=registry, code_execution=runtime)
            told = await agent.run("go", context=self.run())
            self.put("model messages", *(json.dumps(each.messages) for each in model.requests), told.messages)
            self.put("agent's result", told, told.steps)

            try:
                await registry.dispatch("nothing", {"key": SECRET[:3]}, context=self.run())
                await runtime.resume(waiting.suspension.to_json() + "x", context=self.run())
            except Exception as exc:
                self.put("exceptions", MARK, exc, exc.__cause__)
        self.put("events", *self.events, *(event.to_json() for event in self.events))


async def over_mcp(ways: Ways) -> None:
    """The Runtime of a server has no context of a client: its tools take the secret from their own program."""
    registry = ToolRegistry()
    inner = careless()

    @registry.tool
    async def outer() -> Any:
        """Call a tool with a secret of its own."""
        results = [await inner.dispatch(name, {}, context=ways.run()) for name in ("returns", "fails", "crashes")]
        return [result.to_dict() for result in results]

    async with (
        Runtime(registry, pool=PoolConfig(warm=0)) as runtime,
        McpServer(runtime, has_one_client=True) as server,
        Client(server.server) as client,
    ):
        answer = await client.call_tool("execute_code", {"code": "print(call_tool('outer'))\ncall_tool('outer')"})
        ways.put("MCP answer", answer.model_dump_json())


def from_outside(ways: Ways, folder: Path, spans: Any) -> None:
    """What programs show of the audit log, and what the viewer serves."""
    with Index(folder) as index:
        runs = [index.load(summary) for summary in index.runs()]
    ways.put(
        "audit log", *(path.read_bytes().decode("latin-1") for path in sorted(folder.parent.glob(f"{folder.name}*")))
    )
    ways.put("audit index", *(run.to_dict() for run in runs))
    command = [sys.executable, "-m", "toolcell", "audit"]
    for words in (["list", "--json", str(folder)], *(["show", "--full", str(folder), run.id] for run in runs[-1:])):
        found = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
        ways.put("audit commands", found.stdout, found.stderr)
    ways.put("OpenTelemetry", *(span.to_json() for span in spans.get_finished_spans()))


WAYS = (
    "result", "returned files", "logs", "calls", "callbacks", "error", "traceback", "stream", "plan rows", "suspension", "draft",
    "commit", "session", "model messages", "agent's result", "exceptions", "events", "MCP answer",
    "audit log", "audit index", "audit commands", "OpenTelemetry", "Python's log", "viewer",
)  # fmt: skip

SAYS_NOTHING_OF_IT = frozenset({"calls", "suspension", "draft", "OpenTelemetry", "Python's log", "exceptions"})
"""Ways out that have no place for what tools return."""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    folder, spans, provider = tmp_path_factory.mktemp("planted"), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    found, lines = Ways(), list[str]()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(logging.Formatter("%(message)s").format(record))

    logger, handler = logging.getLogger("toolcell"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        anyio.run(found.collect, folder, AuditLog(folder / "runs" / "default.db", sinks=[SpanSink(provider)]))
        anyio.run(over_mcp, found)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    from_outside(found, folder / "runs" / "default.db", spans)
    found.put("Python's log", *lines)
    from_the_viewer(found, folder)
    return found


def from_the_viewer(ways: Ways, folder: Path) -> None:
    """Everything of the log that can be reached from the first page of a service's viewer, and what its API answers."""
    from starlette.testclient import TestClient

    from toolcell.service import ServiceConfig, TenantConfig, create_app

    config = ServiceConfig(state=folder / "state", defaults=TenantConfig(record=folder / "runs"))
    seen, wanted = set[str](), ["/", "/runs"]
    with TestClient(create_app(config), base_url="http://localhost", client=("127.0.0.1", 50_000)) as client:
        while wanted:
            path = wanted.pop()
            seen.add(path)
            answer = client.get(path)
            ways.put("viewer", answer.text)
            if answer.headers.get("content-type", "").startswith("text/html"):
                found = map(html.unescape, re.findall(r'(?:href|src)="(/[^"#]*)', answer.text))
                wanted += {each for each in found if each.startswith("/runs/") and "?" not in each} - seen - {*wanted}
    assert len([path for path in seen if path.startswith("/runs/")]) > 3, seen


@pytest.mark.slow
@each_row("way", WAYS)
def test_the_secret_does_not_get_out(ways: Ways, way: str) -> None:
    text = ways.texts[way]

    assert SECRET not in text and SECRET.encode().hex() not in text
    assert way in SAYS_NOTHING_OF_IT or MARK in text, text[:2000]


def test_each_way_out_is_a_row(ways: Ways) -> None:
    assert {*ways.texts} == {*WAYS}


@pytest.mark.anyio
async def test_variables_of_a_script_that_failed_do_not_show_what_its_caller_gave_it() -> None:
    """The caller gives the secret to the script itself, as it should not."""
    source = "def fail(given):\n    header = 'Bearer ' + given\n    1/0\nfail(key)"
    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        context = RunContext(secrets=Secrets({"key": SECRET}))
        result = await runtime.execute_code(source, inputs={"key": SECRET}, context=context)

    assert result.error is not None and "header" in shown(result.error.frames)
    assert MARK in shown(result.error.frames) and SECRET not in shown(result.error.frames)


@pytest.mark.anyio
async def test_calls_and_effects_do_not_show_what_a_script_was_given(tmp_path: Path) -> None:
    registry, source = careless(), "call_tool('waits', note=key)"
    async with Runtime(registry, pool=PoolConfig(warm=0), record=tmp_path / "runs.db") as runtime:
        given: dict[str, Any] = {"inputs": {"key": SECRET}, "on_approval": "suspend"}
        run = RunContext(secrets=Secrets({"key": SECRET}))
        waiting = await runtime.execute_code(source, context=run, **given)
        heard = [event async for event in runtime.stream(source, inputs={"key": SECRET}, context=run)]
        dry = await runtime.execute_code(source, inputs={"key": SECRET}, context=run, dry_run=True)
        made = await runtime.commit(dry, context=run)

    for way in (waiting.calls, heard, dry.calls, dry.effects, made, made.effects):
        assert MARK in shown(way) and SECRET not in shown(way), way


SERVER = """
import json, os, sys
token = os.environ["TOKEN"]
tools = [{"name": name, "description": "What it does for you", "inputSchema": {"type": "object"}}
         for name in ("error", "failure", "broken", "wrong")]
tools[-1]["outputSchema"] = {"type": "object", "properties": {"n": {"type": "integer"}}}
for line in sys.stdin:
    request = json.loads(line)
    method = request["method"]
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if method == "initialize" and len(sys.argv) > 1:
        answer["error"] = {"code": -32005, "message": "bad token " + token}
    elif method == "initialize":
        answer["result"] = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        answer["result"] = {"tools": tools}
    elif method != "tools/call":
        answer["error"] = {"code": -32601, "message": "no such method"}
    elif request["params"]["name"] == "error":
        answer["error"] = {"code": -32005, "message": "bad token " + token}
    elif request["params"]["name"] == "wrong":
        answer["result"] = {"content": [], "structuredContent": {"n": "bad token " + token}}
    elif request["params"]["name"] == "failure":
        answer["result"] = {"content": [{"type": "text", "text": "bad token " + token}], "isError": True}
    else:
        print("bad token " + token, file=sys.stderr, flush=True)
        os._exit(3)
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow
@each_row("tool", ["error", "failure", "broken", "wrong"])
@pytest.mark.anyio
async def test_an_mcp_servers_error_does_not_show_what_it_was_given(tool: str, tmp_path: Path) -> None:
    registry, program = ToolRegistry(), tmp_path / "server.py"
    program.write_text(SERVER)
    command = [sys.executable, str(program)]
    try:
        await registry.add_mcp_server("s", command=command, env={"TOKEN": SECRET}, max_restarts=0)
        async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
            result = await runtime.execute_code(f"call_tool('s.{tool}')")
    finally:
        await registry.close()

    assert f"bad token {MARK}" in shown(result) and SECRET not in shown(result)


@pytest.mark.anyio
async def test_an_mcp_server_that_does_not_start_does_not_show_what_it_was_given(tmp_path: Path) -> None:
    registry, program = ToolRegistry(), tmp_path / "server.py"
    program.write_text(SERVER)
    command = [sys.executable, str(program), "refuse"]
    with pytest.raises(Exception, match="bad token") as caught:
        await registry.add_mcp_server("s", command=command, env={"TOKEN": SECRET}, max_restarts=0)
    await registry.close()

    assert SECRET not in shown(caught.value) and MARK in str(caught.value)
