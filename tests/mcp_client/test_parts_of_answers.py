"""What a script and a model get of an answer with several parts, of every form that servers send."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from mcp_types import CallToolResult

from rows import each_row
from toolcell.mcp.answers import as_tool_result, is_wrapper
from toolcell.mcp.structure import MAX_ELEMENTS, with_whole_characters
from toolcell.tools import ToolRegistry

from .conftest import HONEST, a_tool, raw

pytestmark = pytest.mark.anyio
PNG = b"\x89PNG\r\n\x1a\n..>>??"
IMAGE = {"name": "image-2.png", "media_type": "image/png", "data": PNG}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def image(data: str) -> dict[str, str]:
    return {"type": "image", "data": data, "mimeType": "image/png"}


ENCODED = base64.b64encode(PNG).decode()

VALUES: list[tuple[dict[str, Any], Any, str]] = [
    ({"content": [text("10"), text("20")]}, [10, 20], "10\n20"),
    ({"content": [text('{"a": 1}'), text("no JSON")]}, [{"a": 1}, "no JSON"], '{"a": 1}\nno JSON'),
    ({"content": [text('{"a": NaN}'), text("")]}, ['{"a": NaN}', ""], '{"a": NaN}\n'),
    ({"content": [text('[1, {"a": 2}]')]}, [1, {"a": 2}], '[1, {"a": 2}]'),
    ({"content": [text("3")]}, "3", "3"),
    ({"content": [text("see"), image(ENCODED)]}, ["see", IMAGE], "see\n(image-2.png, 14 bytes)"),
    ({"content": [text('{"n": 1}')], "structuredContent": {"n": 1}}, {"n": 1}, '{"n": 1}'),
    (
        {"content": [text("a page")], "structuredContent": {"content": "a page", "n": 1}},
        {"content": "a page", "n": 1},
        "a page",
    ),
    ({"content": [text("1"), text("b")], "structuredContent": {"found": [1, "b"]}}, {"found": [1, "b"]}, "1\nb"),
    ({"content": [text("one")], "structuredContent": {"n": 1}}, {"n": 1, "_content": ["one"]}, "one"),
    (
        {"content": [text('{"n": 1}'), image(ENCODED)], "structuredContent": {"n": 1}},
        {"n": 1, "_content": [IMAGE]},
        '{"n": 1}\n(image-2.png, 14 bytes)',
    ),
    ({"content": [text("1"), text("2")], "structuredContent": {"result": [1, 2]}}, {"result": [1, 2]}, "1\n2"),
]


@each_row(("answer", "value", "shown"), VALUES)
async def test_a_script_gets_each_part_and_a_model_a_line_of_each(
    answer: dict[str, Any], value: Any, shown: str
) -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]], answer=answer), approve="none")
    result = await registry.dispatch("s.t", {})
    await client.close()

    assert (result.guest_value(), result.text) == (value, shown)


@each_row(
    "data",
    [
        ENCODED,
        ENCODED.rstrip("="),
        base64.urlsafe_b64encode(PNG).decode(),
        "\n".join(ENCODED[start : start + 4] for start in range(0, len(ENCODED), 4)),
        f"data:image/png;base64,{ENCODED}",
    ],
)
def test_base64_is_read_in_every_form(data: str) -> None:
    answer = CallToolResult.model_validate({"content": [image(data)]}, by_name=False)
    assert as_tool_result("s", answer, None).files[0].data == PNG


def test_a_part_that_cannot_be_decoded_costs_that_part() -> None:
    answer = CallToolResult.model_validate({"content": [text("here"), image("%%%")]}, by_name=False)
    result = as_tool_result("s", answer, None)
    assert result.value == ["here", "(image-2.png could not be decoded: it is not base64)"]


def test_texts_beside_many_fields_are_compared_with_the_first_of_them() -> None:
    blocks = [text(f"text {number}") for number in range(1000)]
    answer = CallToolResult.model_validate(
        {"content": blocks, "structuredContent": {f"f{number}": [number] for number in range(60_000)}}
    )
    began = time.process_time()
    result = as_tool_result("s", answer, None)

    assert len(result.value["_content"]) == 1000
    assert time.process_time() - began < 0.4


async def test_bytes_that_mcp_cannot_carry_are_refused_with_what_to_send() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]]), approve="none")
    result = await registry.dispatch("s.t", {"data": b"\xff"})
    await client.close()

    assert result.error is not None and result.error.code == "invalid_arguments"
    assert "base64.b64encode" in result.text


def test_an_error_with_nothing_but_structured_content_keeps_its_reason() -> None:
    answer = CallToolResult.model_validate(
        {"content": [], "isError": True, "structuredContent": {"reason": "no such city"}}, by_name=False
    )
    assert as_tool_result("s", answer, None).message == 'MCP server s: {"reason": "no such city"}'


def test_texts_with_too_much_structure_together_stay_texts() -> None:
    lists = "[" + ",".join(["[]"] * 30_000) + "]"
    answer = CallToolResult.model_validate({"content": [text(lists)] * 9}, by_name=False)
    value = as_tool_result("s", answer, None).value
    read = [each for each in value if isinstance(each, list)]
    assert sum(map(len, read)) <= MAX_ELEMENTS and len(read) == 2 and value[-1] == lists


@each_row(
    ("sent", "read"),
    [
        (rb'"\ud83d"', rb'"\ufffd"'),
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ude00\ud83d"', rb'"\ufffd\ufffd"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (b'"\xff"', b'"\xef\xbf\xbd"'),
        (rb'"\u00e9"', rb'"\u00e9"'),
    ],
)
async def test_half_a_character_costs_that_character(sent: bytes, read: bytes) -> None:
    assert await with_whole_characters(sent) == read


async def test_half_a_character_of_an_answer_is_no_loss_of_the_rest() -> None:
    registry = ToolRegistry()
    said = '{"content": [{"type": "text", "text": "smile \\ud83d!"}]}'
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]], result=said), approve="none")
    result = await registry.dispatch("s.t", {})
    await client.close()
    assert result.text == "smile \ufffd!"


WRAPPED: dict[str, Any] = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}


@each_row(
    ("schema", "is_one"),
    [
        ({**WRAPPED, "title": "addOutput"}, True),
        ({**WRAPPED, "x-fastmcp-wrap-result": True}, True),
        (WRAPPED, False),
        ({**WRAPPED, "title": "Result"}, False),
        ({**WRAPPED, "title": "addOutput", "required": []}, False),
        ({**WRAPPED, "title": "addOutput", "properties": {"result": {}, "more": {}}}, False),
        (None, False),
    ],
)
def test_a_wrapper_is_known_by_the_marks_of_the_sdks(schema: dict[str, Any] | None, is_one: bool) -> None:
    assert is_wrapper(schema, "add") is is_one


async def test_the_stub_of_a_wrapped_value_is_that_of_the_value() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("h", command=HONEST, approve="none")
    stubs = registry.to_python()
    await client.close()
    assert "def add(*, a: int, b: int) -> int" in stubs
