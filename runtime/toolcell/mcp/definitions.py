"""What an MCP server says of a tool, as a definition of ours; and what is wrong with it. Pure: no server is asked.

A server is not trusted. Texts lose control, bidi and invisible characters and what is too long, each description names
the server, and a tool that cannot be made safe is left out with the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from mcp_types import Tool

from toolcell.calls.definition import MAX_NAME_CHARS
from toolcell.errors import RegistrationError
from toolcell.mcp.answers import is_wrapper
from toolcell.support.foreign_definitions import HIDDEN, bounded_schema, safe_text
from toolcell.tools import ToolDefinition, ToolOptions
from toolcell_bridge.guest.tool_names import provider_name

MAX_DESCRIPTION_CHARS = 2_000
MAX_SHOWN_CHARS = 120

Approve = Literal["destructive", "all", "none"]


@dataclass(frozen=True, slots=True)
class McpProblem:
    """Something that a server did or said, and that was not taken as it is."""

    tool: str
    """As the server calls it, without hidden characters; empty when it is about the server."""
    kind: Literal["left_out", "changed", "mended", "server"]
    message: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.message}" if self.tool else self.message


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool of a server, ready to be registered."""

    remote_name: str
    definition: ToolDefinition
    options: ToolOptions
    digest: str
    """sha256 of everything the server says of it; a tool is pinned by it."""
    output_schema: dict[str, Any] | None
    """Of structured content, when the server declares one."""
    is_wrapped: bool = False
    """Structured content is an object made for a plain value; the script gets that value."""
    problems: tuple[McpProblem, ...] = ()


def shown_name(name: str) -> str:
    return HIDDEN.sub("", name[:MAX_SHOWN_CHARS])


def tool_digest(tool: Tool) -> str:
    """Return the digest of everything a server says of a tool that a model or a check depends on."""
    said = tool.model_dump(mode="json", by_alias=True, include=_PINNED)
    return "sha256:" + hashlib.sha256(json.dumps(said, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


_PINNED = {"name", "description", "input_schema", "output_schema", "annotations"}


def local_name(namespace: str, name: str) -> str:
    """Return the name under which a server's tool is registered: `namespace.name`.

    Raises:
        RegistrationError: the name holds hidden characters, or is one of Python's own.
    """
    if HIDDEN.search(name):
        raise RegistrationError("its name holds control, bidi or invisible characters")
    parts = [_ascii(part) for part in re.split(r"[./:]", name) if part]
    if not parts or any(part.startswith("__") or not part.strip("_-") for part in parts):
        raise RegistrationError("its name is empty, or begins with two underscores")
    chosen = ".".join([namespace, *parts])
    if len(provider_name(chosen)) > MAX_NAME_CHARS:
        mark = "_" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
        flat = f"{namespace}." + "_".join(parts)
        more = len(provider_name(flat)) - len(flat)
        chosen = flat[: MAX_NAME_CHARS - len(mark) - more].rstrip(".") + mark
    return chosen


def _ascii(part: str) -> str:
    """Return a part of a name in the letters that every provider takes. What other letters say, a digest stands for."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", part)
    if part.isascii():
        return plain
    mark = hashlib.sha256(part.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{re.sub('__+', '_', plain).strip('_-') or 'tool'}_{mark}"


def read_tool(namespace: str, tool: Tool, approve: Approve, options: ToolOptions) -> McpTool:
    """Return a server's tool as one of ours.

    Raises:
        RegistrationError: it cannot be one, and why.
    """
    if tool.execution is not None and tool.execution.task_support == "required":
        raise RegistrationError("it can only be called as a task, which this client does not do")
    problems: list[McpProblem] = []
    name = local_name(namespace, tool.name)
    definition = ToolDefinition(name, _description(namespace, tool), bounded_schema(tool.input_schema, "its schema"))
    returns = None
    if tool.output_schema is not None:
        try:
            returns = bounded_schema(tool.output_schema, "its output schema")
        except RegistrationError as exc:
            problems.append(unused_output_schema(tool.name, str(exc)))
    output_schema = returns
    is_wrapped = returns is not None and is_wrapper(tool.output_schema, tool.name)
    if returns is not None and is_wrapped:
        shared: dict[str, Any] = {name: returns[name] for name in ("$defs", "definitions") if name in returns}
        returns = {**shared, **returns["properties"]["result"]}
    known = replace(_hinted(tool, approve, options), returns=returns)
    return McpTool(
        tool.name,
        definition,
        options=known,
        digest=tool_digest(tool),
        output_schema=output_schema,
        is_wrapped=is_wrapped,
        problems=tuple(problems),
    )


def unused_output_schema(name: str, problem: str) -> McpProblem:
    """Return what is said of a tool whose output schema cannot be used."""
    return McpProblem(shown_name(name), "mended", f"its output schema is not used: {problem}")


def _description(namespace: str, tool: Tool) -> str:
    said = safe_text(tool.description or tool.title or "", MAX_DESCRIPTION_CHARS)
    return f"[MCP server {namespace}] {said or f'{shown_name(tool.name)}: the server does not describe it.'}"


def _hinted(tool: Tool, approve: Approve, options: ToolOptions) -> ToolOptions:
    """Return the options that a server's hints ask for. What its user has set stays."""
    hints = tool.annotations
    read_only = bool(hints and hints.read_only_hint)
    destructive = bool(hints and hints.destructive_hint) and not read_only
    return replace(
        options,
        label=safe_text(tool.title or (hints.title if hints else "") or "", MAX_SHOWN_CHARS),
        read_only=options.read_only or read_only,
        idempotent=options.idempotent or read_only or bool(hints and hints.idempotent_hint),
        requires_approval=options.requires_approval or approve == "all" or (approve == "destructive" and destructive),
    )
