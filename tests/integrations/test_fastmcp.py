"""FastMCP's CodeMode with toolcell's sandboxes: its own client searches, and runs scripts that call its server's tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from .conftest import audited_calls, needs, run_example

needs("fastmcp")

from fastmcp import Client, FastMCP  # noqa: E402
from fastmcp.exceptions import ToolError  # noqa: E402
from fastmcp.experimental.transforms.code_mode import CodeMode  # noqa: E402

from toolcell import Limits, Runtime, SandboxUnavailable, ToolRegistry  # noqa: E402
from toolcell.integrations.fastmcp import ToolcellSandboxProvider  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]


def server(provider: ToolcellSandboxProvider, **options: Any) -> FastMCP[Any]:
    mcp = FastMCP("shop", transforms=[CodeMode(sandbox_provider=provider, **options)])

    @mcp.tool(annotations={"readOnlyHint": True})
    def price(item: str, count: int = 1) -> float:
        """Return what so many of an item cost."""
        if item == "ghost":
            raise ToolError("there is no ghost in stock")
        if item == "bug":
            raise RuntimeError("the database password is hunter2")
        return {"apple": 0.5, "pear": 0.75}[item] * count

    @mcp.tool
    async def order(item: str, count: int) -> dict[str, Any]:
        """Order so many of an item."""
        if item == "never":
            await asyncio.Event().wait()
        return {"ordered": item, "count": count}

    return mcp


async def execute(client: Client[Any], code: str) -> Any:
    """Run a script as a model's client does, and return the text that the model reads, as data where it is some."""
    [content] = (await client.call_tool("execute", {"code": code})).content
    try:
        return json.loads(content.text)
    except ValueError:
        return content.text


async def failure(client: Client[Any], code: str) -> str:
    with pytest.raises(ToolError) as caught:
        await client.call_tool("execute", {"code": code})
    return str(caught.value)


TWO_TOOLS = """\
apples = await call_tool("price", {"item": "apple", "count": 4})
if apples["result"] < 3:
    done = await call_tool("order", {"item": "apple", "count": 4})
    return [apples["result"], done]
return "too dear"
"""


async def test_code_mode_searches_and_runs_code_that_calls_two_tools_under_hooks_and_audit(tmp_path: Path) -> None:
    registry, seen = ToolRegistry(), list[tuple[str, Any]]()
    registry.before_call(lambda call: seen.append((call.name, dict(call.args))))
    async with Runtime(registry, record=tmp_path / "audit" / "runs.db") as runtime:
        async with Client(server(ToolcellSandboxProvider(runtime))) as client:
            assert {tool.name for tool in await client.list_tools()} == {"search", "get_schema", "execute"}
            found = await client.call_tool("search", {"query": "what an item costs"})
            assert "price" in str(found.content)
            assert await execute(client, TWO_TOOLS) == [2.0, {"ordered": "apple", "count": 4}]
        assert (await runtime.execute_code("1 + 1")).value == 2, "a runtime of the program's stays open"

    assert seen == [("price", {"item": "apple", "count": 4}), ("order", {"item": "apple", "count": 4})]
    assert [name for name in audited_calls(tmp_path / "audit") if name != "external"] == ["price", "order"]


async def test_arguments_are_checked_before_the_server_sees_them() -> None:
    async with Runtime() as runtime, Client(server(ToolcellSandboxProvider(runtime))) as client:
        said = await failure(client, "await call_tool('price', {'item': 'apple', 'count': 'many'})")
        assert "count" in said and "ToolError" in said
        assert await execute(client, "return await call_tool('price', {'item': 'pear', 'count': '2'})") == {
            "result": 1.5
        }
        for wrong in ("call_tool()", "call_tool('price', 3)", "call_tool(1, {})", "call_tool('price', {}, 1)"):
            assert "takes a tool's name and its arguments" in await failure(client, f"await {wrong}")


async def test_a_script_that_fails_is_an_error_of_execute_with_its_line_its_output_and_its_calls() -> None:
    async with Runtime() as runtime, Client(server(ToolcellSandboxProvider(runtime))) as client:
        said = await failure(client, "print('begin')\nawait call_tool('price', {'item': 'apple'})\n1 / 0")
        assert "ZeroDivisionError" in said and "line 3" in said and "begin" in said
        assert "tool calls already made: price (ok)" in said
        assert "SyntaxError" in await failure(client, "x = = 1")


async def test_a_tools_own_error_reaches_the_script_and_an_exception_shows_what_fastmcp_shows() -> None:
    async with Runtime() as runtime, Client(server(ToolcellSandboxProvider(runtime))) as client:
        caught = """
try:
    await call_tool("price", {"item": "%s"})
except ToolError as exc:
    return str(exc)
"""
        ghost = await execute(client, caught % "ghost")
        assert ghost == "call_tool('price') failed: there is no ghost in stock"
        said = await execute(client, caught % "bug")
        assert said.startswith("call_tool('price') failed: Error calling tool 'price'"), said
        assert "Unknown tool: fly" in await failure(client, "await call_tool('fly', {})")
        assert "Unknown tool: execute" in await failure(client, "await call_tool('execute', {'code': '1'})")


async def test_a_tool_that_the_rules_deny_is_an_error_in_the_script() -> None:
    registry = ToolRegistry()
    registry.policy.blacklist("order")
    async with Runtime(registry) as runtime, Client(server(ToolcellSandboxProvider(runtime))) as client:
        said = await failure(client, "await call_tool('order', {'item': 'apple', 'count': 1})")
        assert "order" in said and "tool calls already made: order (blocked)" in said
        assert await execute(client, "return await call_tool('price', {'item': 'apple'})") == {"result": 0.5}


async def test_a_timeout_is_an_error_of_execute() -> None:
    async with Client(server(ToolcellSandboxProvider(limits=Limits(wall_s=0.5)))) as client:
        said = await failure(client, "while True: pass")
        assert "timed out after 0.5 s" in said and "session" not in said


async def test_code_modes_own_limit_of_calls_holds() -> None:
    async with Runtime() as runtime, Client(server(ToolcellSandboxProvider(runtime), max_tool_calls=1)) as client:
        two = "for _ in range(2): await call_tool('price', {'item': 'apple'})"
        assert "Tool call limit exceeded" in await failure(client, two)


async def test_a_script_that_is_cancelled_leaves_no_sandbox_and_no_session() -> None:
    started = anyio.Event()
    registry = ToolRegistry()
    registry.before_call(lambda call: started.set())
    async with Runtime(registry) as runtime:
        provider = ToolcellSandboxProvider(runtime)
        async with Client(server(provider)) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(failure, client, "await call_tool('order', {'item': 'never', 'count': 1})")
            with anyio.fail_after(60):
                await started.wait()
            tasks.cancel_scope.cancel()
        assert runtime.pool is not None
        with anyio.fail_after(60):
            while runtime.pool.busy:
                await anyio.sleep(0.01)


async def test_its_own_runtime_is_open_while_the_server_runs_and_closed_after(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ToolcellSandboxProvider(limits=Limits(wall_s=60))
    mcp = FastMCP("own", lifespan=provider.lifespan, transforms=[CodeMode(sandbox_provider=provider)])
    async with Client(mcp) as client:
        provider._owner.runtime.check_open()
        assert await execute(client, "print('only said')") == "only said\n"
        assert await execute(client, "x = 1\nx + 1") == 2
    with pytest.raises(Exception, match="open"):
        provider._owner.runtime.check_open()
    assert await provider.run("return n * await twice(k=3)", inputs={"n": 2}, external_functions={"twice": twice}) == 12


async def twice(k: int) -> int:
    return 2 * k


async def test_functions_other_than_call_tool_are_checked_too() -> None:
    provider = ToolcellSandboxProvider()
    with pytest.raises(ToolError, match="k"):
        await provider.run("await twice(k='x')", external_functions={"twice": twice})
    with pytest.raises(ToolError, match="by name"):
        await provider.run("await twice(3)", external_functions={"twice": twice})
    with pytest.raises(ToolError, match="there is no function 'thrice'"):
        forged = "await call_tool_async('external', {'function': 'thrice', 'args': [], 'kwargs': {}})"
        await provider.run(forged, external_functions={"twice": twice})


async def test_files_become_content() -> None:
    async with Runtime() as runtime, Client(server(ToolcellSandboxProvider(runtime))) as client:
        png = "b'\\x89PNG\\r\\n\\x1a\\n'"
        code = f"open('a.dat', 'wb').write({png}); open('b.txt', 'w').write('b')\nset_result('two', files=['*.*'])"
        result = await client.call_tool("execute", {"code": code})
        assert [each.type for each in result.content] == ["text", "image", "resource"]
        result = await client.call_tool("execute", {"code": f"{{'chart': {png}}}"})
        assert [each.type for each in result.content] == ["text", "image"]
        assert "(image/png, 8 bytes)" in result.content[0].text


async def test_a_machine_without_sandboxes_is_an_error_of_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable(self: Runtime) -> None:
        raise SandboxUnavailable("no sandbox could be started here")

    monkeypatch.setattr(Runtime, "open", unavailable)
    async with Client(server(ToolcellSandboxProvider())) as client:
        assert "no sandbox could be started here" in await failure(client, "1")


def test_the_example_runs() -> None:
    assert "'total': 3.5" in run_example("with_fastmcp.py")
