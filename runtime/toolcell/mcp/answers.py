"""What an MCP server answers to a call, as a result of ours. No server is asked.

Structured content is the value; what stands beside it and says something else comes under `_content`. Several parts
without it are a list. Images, audio and embedded resources are files. What does not fit the schema that the server
declared is a failure; a part that cannot be decoded costs that part.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from toolcell.calls.checker_process import find_problem
from toolcell.calls.finalize import strict_json
from toolcell.calls.result import Part
from toolcell.mcp.structure import MAX_BLOCKS, MAX_ELEMENTS
from toolcell.support.exact_json import json_start
from toolcell.support.foreign_definitions import safe_text
from toolcell.support.host_work import HostWork
from toolcell.tools import File, Text, ToolResult

INVALID_RESULT = "invalid_result"
"""Code of a failure: the server's answer is not what it declared."""
MAX_SAID_CHARS = 2_000
MAX_JSON_CHARS = 100_000
"""Most characters of a text that is read as JSON here."""
MOST_FIELDS = 32
"""Most fields of structured content that each text is compared with."""
BESIDE = "_content"
"""Key under which a script finds texts and files beside structured content."""


def as_tool_result(
    server: str,
    answer: CallToolResult,
    mismatch: str | None,
    hide: Callable[[str], str] = str,
    *,
    is_wrapped: bool = False,
) -> ToolResult:
    """Return a server's answer as a result. `hide` takes secrets out of what it says about a failure.

    `mismatch`: what `mismatch_of` found. `is_wrapped`: structured content is `{"result": value}` for a plain value; see
    `is_wrapper`.
    """
    blocks = [_part(block, number) for number, block in enumerate(answer.content[:MAX_BLOCKS], 1)]
    if answer.is_error:
        text = "\n".join(each.text for each in blocks if isinstance(each, Text))
        if not text and answer.structured_content is not None:
            text = json_start(answer.structured_content, MAX_SAID_CHARS)
        said = safe_text(hide(text), MAX_SAID_CHARS) or "the server reports an error and does not describe it"
        return ToolResult.fail(f"MCP server {server}: {said}")
    files = tuple(each for each in blocks if isinstance(each, File))
    value = answer.structured_content
    if mismatch is not None:
        message = f"MCP server {server}: the call was made, and its result cannot be used: {mismatch}"
        return ToolResult.fail(message, code=INVALID_RESULT)
    if value is not None:
        if is_wrapped and isinstance(value, dict):
            value = value["result"]
        elif isinstance(value, dict) and BESIDE not in value and (beside := _beside(blocks, value)):
            value = {**value, BESIDE: beside}
        return ToolResult(parts=_readable_parts(blocks), value=value, has_value=True, files=files)
    if len(blocks) <= 1:
        return ToolResult(parts=_readable_parts(blocks), files=files)
    return ToolResult(parts=_readable_parts(blocks), value=[*map(_Reader(), blocks)], has_value=True, files=files)


def is_wrapper(schema: Mapping[str, Any] | None, name: str) -> bool:
    """Whether an output schema is one that an SDK makes of a plain type: an object with nothing but `result`.

    FastMCP marks it, and the official SDK calls it after the tool.
    """
    if schema is None or schema.get("required") != ["result"]:
        return False
    properties = schema.get("properties")
    if not isinstance(properties, dict) or list(properties) != ["result"]:
        return False
    return schema.get("x-fastmcp-wrap-result") is True or schema.get("title") == f"{name}Output"


def _beside(blocks: Sequence[Part], value: dict[str, Any]) -> list[Any]:
    """Return what the parts of an answer say that its structured content does not."""
    data = [*map(_Reader(), blocks)]
    return [
        data[place]
        for place, each in enumerate(blocks)
        if not isinstance(each, Text) or not _says_the_same(each.text, data[place], place, value)
    ]


def _says_the_same(text: str, data: Any, place: int, value: dict[str, Any]) -> bool:
    """Whether a text repeats structured content, as servers do for older clients: whole, a field of it, or an item."""
    inner = value["result"] if len(value) == 1 and "result" in value else value
    item = inner[place] if isinstance(inner, list) and place < len(inner) else inner
    fields = [*itertools.islice(inner.values(), MOST_FIELDS)] if isinstance(inner, dict) else ()
    items = [each[place] for each in fields if isinstance(each, list) and place < len(each)]
    return not text.strip() or any(one in (value, inner, item, *fields, *items) for one in (text, data))


async def mismatch_of(
    answer: CallToolResult,
    output_schema: Mapping[str, Any] | None,
    hide: Callable[[str], str] = str,
    work: HostWork | None = None,
) -> str | None:
    """Return why an answer is not what the server declared, or None. `work`: of the run that is charged for it."""
    value = answer.structured_content
    if output_schema is None or answer.is_error:
        return None
    if value is None:
        return "it declares an output schema and sent no structured content"
    problem = await find_problem(output_schema, value, is_foreign=True, work=work)
    if problem is None:
        return None
    place = hide("/".join(map(str, problem.path)))[:200]
    return f"it does not fit the declared schema at {place or 'its root'}: {safe_text(hide(problem.message), 300)}"


def _part(block: Any, number: int) -> Part:
    match block:
        case TextContent(text=text):
            return Text(text)
        case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
            name = f"{'image' if isinstance(block, ImageContent) else 'audio'}-{number}"
            return _file(name + (mimetypes.guess_extension(kind) or ""), data, kind)
        case EmbeddedResource(resource=TextResourceContents(text=text)):
            return Text(text)
        case EmbeddedResource(resource=BlobResourceContents(uri=uri, blob=blob, mime_type=kind)):
            return _file(_file_name(str(uri), number), blob, kind)
        case ResourceLink(uri=uri, name=name):
            return Text(f"{safe_text(name, 200)}: {safe_text(str(uri), 2_000)}")
    return Text(f"({type(block).__name__})")


def _file(name: str, data: str, kind: str | None) -> Part:
    try:
        return File(name, _bytes(data), safe_text(kind, 100) if kind else "application/octet-stream")
    except (ValueError, binascii.Error):
        return Text(f"({name} could not be decoded: it is not base64)")


def _bytes(text: str) -> bytes:
    """Decode base64 in any form that is in use: with line breaks, without padding, URL-safe, as a `data:` URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    plain = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


def _file_name(uri: str, number: int) -> str:
    """Return the last part of a URI as the name of a file, without what a path could mean."""
    last = safe_text(uri, 1_000).rstrip("/").rpartition("/")[2]
    name = "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in last)[-100:].lstrip(".")
    return name or f"resource-{number}"


def _readable_parts(blocks: Sequence[Part]) -> tuple[Part, ...]:
    """Return what a model reads: text, and a line for each file."""
    return tuple(Text(f"({each.name}, {len(each.data)} bytes)") if isinstance(each, File) else each for each in blocks)


class _Reader:
    """Gives the parts of one answer as data: what is JSON, as long as all of it together has not too much structure."""

    def __init__(self) -> None:
        self._left = MAX_ELEMENTS

    def __call__(self, block: Part) -> Any:
        """Return a part as a script gets it."""
        if isinstance(block, File):
            return {"name": block.name, "media_type": block.media_type, "data": block.data}
        return self._data(block.text) if isinstance(block, Text) else None

    def _data(self, text: str) -> Any:
        elements = text.count(",") + text.count("[") + text.count("{")
        if elements > self._left or len(text) > MAX_JSON_CHARS:
            return text
        try:
            found = strict_json(text)
        except (ValueError, RecursionError):
            return text
        self._left -= elements
        return found
