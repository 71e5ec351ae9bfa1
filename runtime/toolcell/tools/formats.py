"""Definitions in the specs other systems take, where a definition alone is not enough."""

from __future__ import annotations

from typing import Any

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import ToolOptions


def mcp_tool(definition: ToolDefinition, options: ToolOptions) -> dict[str, Any]:
    """One tool as MCP's tools/list gives it.

    Source: Model Context Protocol, revision 2025-06-18: `outputSchema` must be of type object, and hints are hints.
    """
    described: dict[str, Any] = definition.to_mcp()
    if options.label:
        described["title"] = options.label
    if options.returns is not None and options.returns.get("type") == "object":
        described["outputSchema"] = dict(options.returns)
    described["annotations"] = {
        "readOnlyHint": options.read_only,
        "idempotentHint": options.idempotent or options.read_only,
        "destructiveHint": options.requires_approval and not options.read_only,
    }
    return described
