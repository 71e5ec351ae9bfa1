"""`search_tools` as a tool of a model. What it finds joins the list of tools that the model gets; see `shown`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolcell.tools.adapters import with_options
from toolcell.tools.catalogue import FOUND, MAX_FOUND, MAX_QUERY_CHARS, find_by_meaning
from toolcell.tools.context import ToolContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.descriptions import CODE_TOOL, SEARCH_TOOL
from toolcell.tools.detail import DETAILS, tools_text
from toolcell.tools.options import Origin, ToolOptions
from toolcell.tools.shown import is_search
from toolcell.tools.spec import Offered, ToolSpec

SEARCH_TEXT: Final = "Find tools by what they do. Returns those that fit, the best first."
SEARCH_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "query": {
            "type": "string",
            "maxLength": MAX_QUERY_CHARS,
            "description": "A few words: what the tool is to do; or names of tools.",
        },
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_FOUND, "default": FOUND},
        "detail": {
            "type": "string",
            "enum": [*DETAILS],
            "default": "signatures",
            "description": "How much to tell of each.",
        },
    },
    "required": ["query"],
    "additionalProperties": False,
}


def search_spec(options: Mapping[str, Any]) -> ToolSpec:
    """`search_tools` as a tool."""
    known = ToolOptions(
        read_only=True, callable_from=frozenset({Origin.MODEL}), label="Search for tools", timeout_s=60.0
    )
    return ToolSpec(
        definition=ToolDefinition(SEARCH_TOOL, SEARCH_TEXT, SEARCH_SCHEMA),
        invoke=_search,
        options=with_options(known, options),
        source=SEARCH_TOOL,
        args_prefix=f"invalid {SEARCH_TOOL} args: ",
        describe=_describe,
        requires_result=True,
    )


def _describe(offered: Offered) -> str:
    listed = list(offered(Origin.MODEL))
    callers = "You can call them from your next turn on"
    if any(tool.name == CODE_TOOL for tool in listed):
        callers += f", and a script of {CODE_TOOL} at once"
    return f"{SEARCH_TEXT} {callers}."


async def _search(context: ToolContext) -> str:
    call = context.call
    registry: Any = call.registry
    policies, args = call.run.scope.policies, call.args
    origins = [call.origin]
    if any(tool.name == CODE_TOOL for tool in registry.state.visible(call.origin, policies)):
        origins.append(Origin.CODE)
    tools = {tool.name: tool for origin in origins for tool in registry.state.visible(origin, policies)}
    own = [tool for tool in tools.values() if not is_search(tool)]
    definitions = [tool.definition for tool in own]
    found = await find_by_meaning(definitions, args["query"], args["limit"], registry.settings.embeddings)
    call.run.state.note_found(each.name for each in found)
    if not found:
        return f"none of {len(own)} tools fits; use other words"
    return tools_text([(each, tools[each.name].options.returns) for each in found], args["detail"])
