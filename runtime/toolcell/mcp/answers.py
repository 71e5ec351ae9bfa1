"""What an MCP server answers to a call, as a result of ours. Pure: no server is asked.

Structured content is the value. Images, audio and embedded resources are files. What does not fit the schema that the
server declared is a failure.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Callable, Sequence
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

from toolcell.mcp.structure import MAX_BLOCKS
from toolcell.tools.parts import File, Part, Text
from toolcell.tools.problems import ValueCheck
from toolcell.tools.result import ToolResult
from toolcell.tools.strangers import safe_text

INVALID_RESULT = "invalid_result"
"""Code of a failure: the server's answer is not what it declared."""
MAX_SAID_CHARS = 2_000


def as_tool_result(
    server: str, answer: CallToolResult, check: ValueCheck | None, hide: Callable[[str], str] = str
) -> ToolResult:
    """Return a server's answer as a result. `hide` takes secrets out of what it says about a failure."""
    try:
        blocks = [_part(block, number) for number, block in enumerate(answer.content[:MAX_BLOCKS], 1)]
    except (ValueError, binascii.Error):
        return _invalid(server, "it holds an image or a resource that is no base64")
    if answer.is_error:
        text = "\n".join(each.text for each in blocks if isinstance(each, Text))
        said = safe_text(hide(text), MAX_SAID_CHARS) or "the server reports an error and does not describe it"
        return ToolResult.fail(f"MCP server {server}: {said}")
    files = tuple(each for each in blocks if isinstance(each, File))
    value = answer.structured_content
    if check is not None:
        if value is None:
            return _invalid(server, "it declares an output schema and sent no structured content")
        if (problem := _mismatch(check, value)) is not None:
            return _invalid(server, problem)
    if value is not None:
        return ToolResult(parts=_shown(blocks), value=value, has_value=True, files=files)
    if not files or len(blocks) == 1:
        return ToolResult(parts=_shown(blocks), files=files)
    return ToolResult(parts=_shown(blocks), value=[_plain(each) for each in blocks], has_value=True, files=files)


def _invalid(server: str, problem: str) -> ToolResult:
    message = f"MCP server {server}: the call was made, and its result cannot be used: {problem}"
    return ToolResult.fail(message, code=INVALID_RESULT)


def _mismatch(check: ValueCheck, value: Any) -> str | None:
    problem = check.problem(value)
    if problem is None:
        return None
    place = "/".join(map(str, problem.path))[:200]
    return f"it does not fit the declared schema at {place or 'its root'}: {safe_text(problem.message, 300)}"


def _part(block: Any, number: int) -> Part:
    match block:
        case TextContent(text=text):
            return Text(text)
        case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
            name = f"{'image' if isinstance(block, ImageContent) else 'audio'}-{number}"
            return File(name + (mimetypes.guess_extension(kind) or ""), _bytes(data), _media_type(kind))
        case EmbeddedResource(resource=TextResourceContents(text=text)):
            return Text(text)
        case EmbeddedResource(resource=BlobResourceContents(uri=uri, blob=blob, mime_type=kind)):
            return File(_file_name(str(uri), number), _bytes(blob), _media_type(kind))
        case ResourceLink(uri=uri, name=name):
            return Text(f"{safe_text(name, 200)}: {safe_text(str(uri), 2_000)}")
    return Text(f"({type(block).__name__})")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _media_type(kind: str | None) -> str:
    return safe_text(kind, 100) if kind else "application/octet-stream"


def _file_name(uri: str, number: int) -> str:
    """Return the last part of a URI as the name of a file, without what a path could mean."""
    last = safe_text(uri, 1_000).rstrip("/").rpartition("/")[2]
    name = "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in last)[-100:].lstrip(".")
    return name or f"resource-{number}"


def _shown(blocks: Sequence[Part]) -> tuple[Part, ...]:
    """Return what a model reads: text, and a line for each file."""
    return tuple(Text(f"({each.name}, {len(each.data)} bytes)") if isinstance(each, File) else each for each in blocks)


def _plain(block: Part) -> Any:
    if isinstance(block, File):
        return {"name": block.name, "media_type": block.media_type, "data": block.data}
    return block.text if isinstance(block, Text) else None
