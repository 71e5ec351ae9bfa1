"""Pictures that tools and scripts return: a model is shown them, a script can save them, and no text has their bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client

from toolcell import Agent, PoolConfig, Runtime, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.agents.transcript import tool_message
from toolcell.calls.result import File, Image, Text, ToolResult
from toolcell.mcp.server import McpServer

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

PNG, JPEG = b"\x89PNG\r\n\x1a\n" + bytes(61), b"\xff\xd8\xff\xe0" + bytes(40)
GIF, WEBP = b"GIF89a" + bytes(9), b"RIFF\x09\0\0\0WEBPVP8 " + bytes(9)
KINDS = {"image/png": PNG, "image/jpeg": JPEG, "image/gif": GIF, "image/webp": WEBP}

RETURNED: dict[str, Callable[[], Any]] = {
    "bytes": lambda: PNG,
    "a file without a type": lambda: File("chart", PNG),
    "a file of another type": lambda: File("chart.txt", PNG, "text/plain"),
    "a picture": lambda: Image(PNG),
    "a picture of another type": lambda: Image(PNG, "image/jpeg"),
    "a list of parts": lambda: ["seen", Image(PNG)],
    "parts": lambda: (Text("seen"), Image(PNG)),
    "a list of bytes": lambda: [PNG],
    "data": lambda: {"rows": [{"chart": PNG}, {"file": File("chart.png", PNG)}]},
    "a result": lambda: ToolResult(parts=(Text("seen"), Image(PNG))),
    "a result with a value": lambda: ToolResult.of({"chart": PNG}),
}
BASE64 = "iVBORw0KGgo"


def drawing(returned: Callable[[], Any]) -> ToolRegistry:
    def draw():  # type: ignore[no-untyped-def]
        """Draw the chart of the sales."""
        return returned()

    registry = ToolRegistry([draw])
    registry.enable_plan_execution()
    return registry


async def shown_to_a_model(registry: ToolRegistry, *call: Any, code: Runtime | None = None) -> tuple[str, list[Any]]:
    """Return text and pictures of the message that answers a model's call."""
    model = ScriptedModel([calls(call), "done"], supports_images=True)
    run = await Agent(model, tools=registry, code_execution=code).run("go")
    message = run.messages[2]
    return message["content"], message.get("images", [])


def is_shown(content: str, images: list[Any]) -> bool:
    assert BASE64 not in content
    assert "\\x89" not in content
    return [(each["media_type"], each["data"][:11]) for each in images] == [("image/png", BASE64)]


async def test_a_model_is_shown_the_picture_of_a_tool_on_every_route() -> None:
    now = ""
    registry = drawing(lambda: RETURNED[now]())
    plan, script = {"steps": [{"tool": "draw", "args": {}}]}, {"code": "call_tool('draw')"}
    async with (
        Runtime(registry, pool=PoolConfig(warm=0)) as runtime,
        McpServer(runtime, has_one_client=True, exposes_tools=True) as server,
        Client(server.server) as client,
    ):
        for now in RETURNED:
            assert is_shown(*await shown_to_a_model(registry, "draw", {})), now
            assert is_shown(*await shown_to_a_model(registry, "execute_plan", plan)), now
            assert is_shown(*await shown_to_a_model(registry, "execute_code", script, code=runtime)), now
            for answer in (await client.call_tool("execute_code", script), await client.call_tool("draw", {})):
                pictures = [each for each in answer.content if isinstance(each, types.ImageContent)]
                others = [each for each in answer.content if each not in pictures]
                assert [each.mime_type for each in pictures] == ["image/png"], now
                assert BASE64 not in f"{others} {answer.structured_content}", now


SAVE = """
def picture(found):
    if isinstance(found, bytes):
        return found
    return next(filter(None, map(picture, found.values() if isinstance(found, dict) else found if isinstance(found, list) else [])), None)

chart = picture(call_tool("draw"))
print(chart)
chart.save("chart.png")
set_result([chart.media_type, len(chart), open("chart.png", "rb").read() == chart], files=["chart.png"])
"""


async def test_a_script_can_save_the_picture_of_a_tool() -> None:
    now = ""
    async with Runtime(drawing(lambda: RETURNED[now]()), pool=PoolConfig(warm=0)) as runtime:
        for now in RETURNED:
            result = await runtime.execute_code(SAVE)
            assert (result.value, [file.data for file in result.files]) == (["image/png", 69, True], [PNG]), now
            assert result.logs.text == "<Picture image/png, 69 bytes>\n"


async def test_the_bytes_say_what_a_picture_is() -> None:
    kind = ""
    registry = drawing(lambda: KINDS[kind])
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        for kind, picture in KINDS.items():
            result = await registry.execute("draw", {})
            assert ([each.media_type for each in result.images], result.files[0].media_type) == ([kind], kind)
            assert (result.text, result.files[0].name) == (f"({kind}, {len(picture)} bytes)", f"result.{kind[6:]}")
            shown = await runtime.execute_code("display(call_tool('draw')); set_result(call_tool('draw').media_type)")
            assert (shown.value, [file.data for file in shown.files]) == (kind, [picture]), shown.error
            assert (shown.files[0].media_type, shown.logs.text) == (kind, "")


async def test_what_a_provider_would_refuse_is_named_and_not_shown() -> None:
    result = await drawing(lambda: (Text("see"), Image(b"<svg/>", "image/svg+xml"))).execute("draw", {})

    assert result.images == ()
    assert result.text == "see\n(image/svg+xml, 6 bytes: not a PNG, JPEG, GIF or WebP picture)"
    assert "images" not in tool_message("c", result, supports_images=True)


async def test_other_bytes_are_bytes_for_a_script_and_a_size_for_a_model() -> None:
    registry = drawing(lambda: {"digest": b"\x01\x02"})
    assert (await registry.execute("draw", {})).text == '{"digest": "(2 bytes)"}'
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        assert (await runtime.execute_code("type(call_tool('draw')['digest']) is bytes")).value is True


async def test_a_large_picture_stays_one_in_the_rows_of_a_plan() -> None:
    registry = drawing(lambda: [PNG + bytes(3_000_000)])
    content, images = await shown_to_a_model(registry, "execute_plan", {"steps": [{"tool": "draw", "args": {}}]})

    assert "(image/png, 3000069 bytes)" in content
    assert len(images) == 1


async def test_bytes_in_a_value_count_for_its_size() -> None:
    def draw() -> list[bytes]:
        """Draw the chart of the sales."""
        return [PNG]

    registry = ToolRegistry()
    registry.tool(max_result_bytes=60)(draw)
    assert "result too large" in (await registry.execute("draw", {})).text


async def test_a_picture_stays_one_in_a_session_and_its_forks() -> None:
    async with Runtime(drawing(lambda: PNG), pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        await session.execute_code("chart = call_tool('draw')")
        async with await session.fork() as fork:
            for each in (session, fork):
                result = await each.execute_code("chart.save('chart.png'); chart")
                assert result.value == PNG, result.error


def test_the_example_of_the_page_prints_what_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    section = page.partition("### Pictures")[2].partition("\n##")[0]
    [(source, printed)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", section, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout, done.stderr) == (printed, "")


async def test_the_check_of_types_knows_what_a_picture_can_do() -> None:
    pytest.importorskip("ty")

    def plot() -> bytes:
        """Plot the temperatures of a city."""
        return PNG

    def plots() -> list[bytes]:
        """Plot the temperatures of all cities."""
        return [PNG]

    script = "tools.plot().save('a.png')\nx: list[bytes] = tools.plots()\nset_result(tools.plots()[0].media_type)"
    async with Runtime(ToolRegistry([plot, plots]), pool=PoolConfig(warm=0)) as runtime:
        result = await runtime.execute_code(script, check_types=True)
        wrong = await runtime.execute_code("tools.plot().encode()", check_types=True)
    assert (result.value, result.type_findings) == ("image/png", ())
    assert "encode" in wrong.type_findings[0]["message"]
