"""Turn what a run has left behind into the answer to an MCP tool call: text, data, images and embedded files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from toolcell.calls.result import without_bytes
from toolcell.calls.schema import mentions_bytes
from toolcell.calls.values import values_in
from toolcell.results import Array, ExecutionResult, OutputFile, PendingCall, Suspension, Table
from toolcell.support.about_tables import table_with_rows
from toolcell.support.call_text import MAX_ARGS, MAX_ASKED_CHARS, arguments_text
from toolcell.support.exact_json import json_size, json_text, left_out
from toolcell.support.text import as_one_line, clean
from toolcell.tools import Approve, CodeTool, Deny
from toolcell_bridge.guest.pictures import picture_type

VALUE_BYTES = 1 << 20
"""Most bytes of a value in an answer. A model reads the text beside it, which is shorter."""

_SHOWN_WHOLE = f"at most {MAX_ASKED_CHARS} characters of an argument, and {MAX_ARGS} arguments"
TOO_MUCH_BYTES = 256 * 1024
"""Most bytes of all arguments of calls that wait: an answer has them three times, in its text, its data and its
token."""

IN_PART = f"it was not made: a form cannot show all of its arguments to the user who decides ({_SHOWN_WHOLE})"


def output_schema(name: str, returns: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the schema of a tool's structured content. What is not an object becomes the `result` of one, marked as
    SDKs mark it, so that clients give the value itself."""
    if returns is None or not returns or mentions_bytes(returns):
        return None
    if returns.get("type") == "object":
        return dict(returns)
    shared = {key: returns[key] for key in ("$defs", "definitions") if key in returns}
    inner = {key: value for key, value in returns.items() if key not in shared}
    return {
        "type": "object",
        "title": f"{name}Output",
        "properties": {"result": inner},
        "required": ["result"],
        "x-fastmcp-wrap-result": True,
        **shared,
    }


def failed(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=clean(text))], is_error=True)


def text_answer(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=clean(text))])


def too_much_to_decide(waiting: Suspension | None) -> CallToolResult | None:
    """Return an error in the place of calls that wait, if their arguments are too much for an answer; else None."""
    if waiting is None or json_size([call.args for call in waiting.calls], TOO_MUCH_BYTES) <= TOO_MUCH_BYTES:
        return None
    return failed(
        f"The script waits for a person's approval of {len(waiting.calls)} calls, whose arguments have more than "
        f"{TOO_MUCH_BYTES} bytes of JSON: too many to be read and decided here. They were not made. Run it again with "
        "less in each call, or fewer calls at once."
    )


def answer(result: ExecutionResult, *, with_logs: bool = True) -> CallToolResult:
    """Return a run's result: text for the model, the same as data, and its files."""
    if (refusal := too_much_to_decide(result.suspension)) is not None:
        return refusal
    content: list[ContentBlock] = [TextContent(text=clean(CodeTool.result(result, with_logs=with_logs).text))]
    content += file_blocks(result.run_id, result.files, result.value)
    if result.suspension is not None:
        content.append(TextContent(text=_waiting(result.suspension)))
    return CallToolResult(content=content, structured_content=_plain(result, with_logs), is_error=not result.ok)


def _plain(result: ExecutionResult, with_logs: bool) -> dict[str, Any]:
    error = result.error
    plain: dict[str, Any] = {
        "outcome": str(result.outcome),
        "logs": clean(result.logs.text) if with_logs else "",
        "error": None if error is None else {"type": error.type, "message": clean(error.message), "line": error.line},
        "files": [
            {"name": file.name, "media_type": file.media_type, "size": file.size, "problem": file.problem}
            for file in result.files
        ],
        "calls": [{"tool": call.name, "status": call.status, "line": call.line} for call in result.calls],
        "run_id": result.run_id,
    }
    if result.has_value:
        plain["value"] = structured_value(result.value)
    if result.warnings:
        plain["warnings"] = [*result.warnings]
    if result.type_findings:
        plain["type_findings"] = [
            {name: each[name] for name in ("line", "rule", "message")} for each in result.type_findings
        ]
    if result.suspension is not None:
        calls = [
            {"id": call.id, "tool": call.tool, "args": call.args, "reason": call.reason}
            for call in result.suspension.calls
        ]
        plain["suspension"] = {"token": result.suspension.to_json(), "calls": calls}
    made: dict[str, Any] = json.loads(json_text(plain))
    return made


def structured_value(value: Any) -> Any:
    """Return a value as it stands in structured content: with the rows of tables, if there is room for them."""
    short = without_bytes(value)
    if short is not value and _rows_may_fit(value) and _fits(value):
        with_rows = without_bytes(_with_rows(value))
        if _fits(with_rows):
            return with_rows
    return short if _fits(short) else left_out(f"it has more than {VALUE_BYTES} bytes of JSON")


def _fits(value: Any) -> bool:
    return json_size(value, VALUE_BYTES) <= VALUE_BYTES


def _rows_may_fit(value: Any) -> bool:
    """Return whether the rows of all tables, which may be far more than their bytes, may have room. Makes none."""
    left = VALUE_BYTES
    for table in values_in(value, Array | Table):
        left -= table.cells
        if left < 0 or table.plain_bytes > VALUE_BYTES:
            return False
    return True


def _with_rows(value: Any) -> Any:
    match value:
        case Array() | Table():
            return table_with_rows(value)
        case dict():
            return {key: _with_rows(each) for key, each in value.items()}
        case list():
            return [*map(_with_rows, value)]
    return value


def file_blocks(run_id: str, files: Iterable[OutputFile], value: Any = None) -> list[ContentBlock]:
    """Return files as content: pictures and sounds as such, the others as embedded resources. Then those pictures of
    the value that are not files."""
    found = [part for file in files if (part := _file(run_id, file)) is not None]
    shown = {file.data for file in files}
    pictures = [data for data in dict.fromkeys(values_in(value, bytes)) if picture_type(data) and data not in shown]
    return [*found, *map(_image, pictures)]


def _image(data: bytes) -> ImageContent:
    return ImageContent(data=base64.b64encode(data).decode(), mime_type=picture_type(data) or "image/png")


def _file(run_id: str, file: OutputFile) -> ContentBlock | None:
    if file.data is None:
        return None
    if picture_type(file.data):
        return _image(file.data)
    encoded = base64.b64encode(file.data).decode()
    if file.media_type.startswith("audio/"):
        return AudioContent(data=encoded, mime_type=file.media_type)
    uri = f"toolcell://runs/{run_id}/{quote(file.name)}"
    if file.media_type.startswith("text/") or file.media_type == "application/json":
        try:
            text = file.data.decode()
            return EmbeddedResource(resource=TextResourceContents(uri=uri, mime_type=file.media_type, text=text))
        except UnicodeDecodeError:
            pass
    return EmbeddedResource(resource=BlobResourceContents(uri=uri, mime_type=file.media_type, blob=encoded))


def _waiting(suspension: Suspension) -> str:
    """Say what a suspended run waits for."""
    asked = [(call, arguments_text(call.args, max_chars=MAX_ASKED_CHARS)) for call in suspension.calls]
    calls = "\n".join(
        f"- {call.id}: {as_one_line(call.tool)}({args}): {as_one_line(call.reason)}" for call, args in asked
    )
    cut = "" if all(args.is_whole for _, args in asked) else "The structured content has all of the arguments.\n"
    return (
        f"The script waits for a person's approval of these calls, which were not made:\n{calls}\n{cut}"
        "When the user has decided, call resume with the token and a decision for each id.\n"
        f"token: {suspension.to_json()}"
    )


def question(call: PendingCall) -> ElicitRequestFormParams:
    """Return what a person is asked about a call: each argument on a line of its own.

    A form cannot be read on, so what it does not show whole can only be denied.
    """
    args = arguments_text(call.args, max_chars=MAX_ASKED_CHARS)
    lines = [f"A script wants to call {as_one_line(call.tool)}:", *(f"  {each}" for each in args.parts)]
    lines += [f"Line {call.line} of the script."] if call.line else []
    lines.append(as_one_line(call.reason))
    if not args.is_whole:
        lines.append(f"Not all of it is shown, so it cannot be approved here ({_SHOWN_WHOLE}).")
    schema = {
        "type": "object",
        "properties": {
            "decision": {
                "type": "string",
                "enum": ["approve", "deny"] if args.is_whole else ["deny"],
                "description": "Make this call?",
            },
            "reason": {"type": "string", "description": "Why not; the script is told."},
        },
        "required": ["decision"],
    }
    return ElicitRequestFormParams(message="\n".join(lines), requested_schema=schema)


def readable_only(decisions: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Return decisions, with a refusal for each approval of a call that no form has shown whole.

    The token of the suspended run need not be checked yet: whoever carries it on does. Without one, nothing was shown.
    """
    try:
        calls = json.loads(token)["toolcell_suspension"]["calls"]
        whole = {each["id"] for each in calls if not each.get("is_cut")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = set()
    return {
        ident: Deny(IN_PART) if ident not in whole and isinstance(each, Approve) else each
        for ident, each in decisions.items()
    }


def decision(result: object) -> Approve | Deny:
    """Return what a person decided. Everything but an explicit approval is a refusal."""
    if not isinstance(result, ElicitResult):
        return Deny("nobody has decided about it")
    given = result.content or {}
    if result.action == "accept" and given.get("decision") == "approve":
        return Approve()
    reason = given.get("reason")
    return Deny(clean(str(reason))[:1000] if reason else f"the user did not approve it ({result.action})")
