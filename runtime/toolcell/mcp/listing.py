"""What an MCP client lists: the tools of a server with their schemas, in few words whatever the catalogue's size."""

from __future__ import annotations

from typing import Any, get_args

from mcp_types import Tool, ToolAnnotations

from toolcell.config import CheckTypes, Limits
from toolcell.tools import CodeTool, Origin, ToolRegistry

_OFFERED = ToolRegistry()
_OFFERED.enable_tool_search()
(_SEARCH,) = _OFFERED.definitions()
SEARCH_TOOL, DESCRIBE_TOOL, RESUME_TOOL = _SEARCH.name, "describe_tools", "resume"
OWN_TOOLS = (CodeTool.NAME, SEARCH_TOOL, DESCRIBE_TOOL, RESUME_TOOL)

SHOWN_CHARS = 1_200
"""Most characters of tools in the description of execute_code: as stubs, a line each, or names, whatever there is room
for."""

GIVEN_LIMITS = ("wall_s", "cpu_s", "memory_bytes", "tool_calls")
"""Limits that a client may lower for one script."""


def code_schema(limits: Limits, check_types: CheckTypes | None = None) -> dict[str, Any]:
    """Return the schema of execute_code's arguments. A limit has the server's own as its maximum, and a client may have
    the types of a script checked more strictly than the server does, not less.
    """
    degrees = get_args(CheckTypes)
    stricter = degrees[degrees.index(check_types or degrees[0]) :]
    given = {
        name: {"type": "integer" if isinstance(limit := getattr(limits, name), int) else "number", "maximum": limit}
        for name in GIVEN_LIMITS
    }
    return {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "Python source to run."},
            "inputs": {"type": "object", "description": "Values that the script finds as variables."},
            "limits": {
                "type": "object",
                "properties": given,
                "additionalProperties": False,
            },
            "check_types": {"type": "string", "enum": [*stricter]},
        },
        "required": ["code"],
        "additionalProperties": False,
    }


# Every word of these schemas costs each client tokens, so they describe only what their names do not say.

CODE_OUTPUT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "outcome": {"type": "string"},
        "value": {},
        "logs": {"type": "string"},
        "error": {"type": ["object", "null"]},
        "files": {"type": "array", "items": {"type": "object"}},
        "calls": {"type": "array", "items": {"type": "object"}},
        "run_id": {"type": "string"},
        "suspension": {"type": "object"},
    },
    "required": ["outcome"],
}

_PARAMETERS: dict[str, Any] = _SEARCH.parameters["properties"]
_DETAIL: dict[str, Any] = {"type": "string", "enum": _PARAMETERS["detail"]["enum"]}

SEARCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "A few words: what the tool is to do."},
        "limit": _PARAMETERS["limit"],
        "detail": _DETAIL | {"default": "signatures"},
    },
    "required": ["query"],
    "additionalProperties": False,
}

DESCRIBE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 50},
        "detail": _DETAIL | {"default": "full"},
    },
    "required": ["names"],
    "additionalProperties": False,
}

RESUME_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "token": {"type": "string", "description": "Of the suspended script."},
        "decisions": {
            "type": "object",
            "description": "For each waiting call's id: approve, or deny.",
            "additionalProperties": {"type": "string", "enum": ["approve", "deny"]},
        },
    },
    "required": ["token", "decisions"],
    "additionalProperties": False,
}

SEARCH_TEXT = f"Find tools that a script of {CodeTool.NAME} can call. Returns a line for each, the best first."
DESCRIBE_TEXT = "Return typed Python stubs of tools, by name, as a script calls them."
RESUME_TEXT = (
    f"Carry on a script of {CodeTool.NAME} that was suspended because a tool call needs a person's approval. "
    "Ask the user about each call first; decide only what the user said."
)


def own_tools(runtime: Any, keeps_state: bool, offers_resume: bool, shown_chars: int = SHOWN_CHARS) -> list[Tool]:
    """Return the tools of the server itself."""
    reading = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    found = [
        Tool(
            name=CodeTool.NAME,
            description=code_text(runtime, keeps_state, shown_chars),
            input_schema=code_schema(runtime.limits, runtime.policy.check_types),
            output_schema=CODE_OUTPUT,
            annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True),
        ),
        Tool(name=SEARCH_TOOL, description=SEARCH_TEXT, input_schema=SEARCH_SCHEMA, annotations=reading),
        Tool(name=DESCRIBE_TOOL, description=DESCRIBE_TEXT, input_schema=DESCRIBE_SCHEMA, annotations=reading),
    ]
    if offers_resume:
        acting = ToolAnnotations(read_only_hint=False, destructive_hint=True)
        found.append(Tool(name=RESUME_TOOL, description=RESUME_TEXT, input_schema=RESUME_SCHEMA, annotations=acting))
    return found


def code_text(runtime: Any, keeps_state: bool, shown_chars: int = SHOWN_CHARS) -> str:
    """Describe execute_code: what a script finds, and the tools that it may call, as far as there is room."""
    text = CodeTool(runtime).describe(lambda origin: (), keeps_state=keeps_state)
    registry: ToolRegistry = runtime.registry.snapshot()
    if not (tools := registry.names(Origin.CODE)):
        return text
    detail, shown = registry.shown_within(shown_chars)
    if detail == "full":
        return f"{text}\n\nTools, callable as call_tool('name', {{...}}) or tools.name(...):\n\n{shown}"
    between = {"signatures": ":\n\n{}\n\n", "names": ": {}. "}.get(detail or "", ". ").format(shown)
    return f"{text}\n\n{len(tools)} tools{between}Find them with {SEARCH_TOOL}; {DESCRIBE_TOOL} has their parameters."
