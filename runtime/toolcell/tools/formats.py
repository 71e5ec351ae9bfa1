"""Definitions in the shapes other systems take, where a definition alone is not enough."""

from __future__ import annotations

from typing import Any

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import ToolOptions


def mcp_tool(definition: ToolDefinition, traits: ToolOptions) -> dict[str, Any]:
    """One tool as MCP's tools/list gives it.

    Source: Model Context Protocol, revision 2025-06-18: `outputSchema` must be of type object, and hints are hints.
    """
    described: dict[str, Any] = definition.to_mcp()
    if traits.label:
        described["title"] = traits.label
    if traits.returns is not None and traits.returns.get("type") == "object":
        described["outputSchema"] = dict(traits.returns)
    described["annotations"] = {
        "readOnlyHint": traits.read_only,
        "idempotentHint": traits.idempotent or traits.read_only,
        "destructiveHint": traits.requires_approval and not traits.read_only,
    }
    return described
