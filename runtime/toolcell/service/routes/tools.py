"""/v1/tools: what scripts may call: the catalogue, typed stubs, and search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import PlainTextResponse, Response

from toolcell.service.endpoints import TEXT, ApiRequest, Endpoint
from toolcell.service.principal import Scope
from toolcell.service.problems import Problem
from toolcell.service.routes.models import ToolAnswer, ToolList, ToolsQuery
from toolcell.tools import Origin, ToolDefinition, ToolOptions, ToolRegistry


def tool_members(registry: ToolRegistry, tool: ToolDefinition) -> dict[str, Any]:
    """Return what is told of a tool."""
    registered = registry.registered(tool.name)
    options = registered.options if registered is not None else ToolOptions()
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "returns": registry.returns(tool.name),
        "read_only": options.read_only,
        "requires_approval": options.requires_approval,
    }


async def list_tools(request: ApiRequest) -> Mapping[str, Any]:
    """List the tools; with `q`, those that fit."""
    given: ToolsQuery = request.query
    registry = request.tenant.registry
    if given.q is not None:
        found = await registry.search_tools(given.q, limit=min(given.limit, 100), origin=Origin.CODE)
    else:
        found = registry.definitions(Origin.CODE)[: given.limit]
    return {"tools": [tool_members(registry, each) for each in found]}


async def show(request: ApiRequest) -> Mapping[str, Any]:
    """Show one tool."""
    registry, name = request.tenant.registry, request.path["name"]
    for each in registry.definitions(Origin.CODE):
        if each.name == name:
            return tool_members(registry, each)
    raise Problem(404, "no_such_tool", "No such tool", f"there is no tool named {name!r:.80}")


async def stubs(request: ApiRequest) -> Response:
    """Return the tools as typed Python functions without bodies."""
    return PlainTextResponse(request.tenant.registry.to_python())


ENDPOINTS = (
    Endpoint(
        method="GET", path="/v1/tools", scope=Scope.READ, handler=list_tools, summary="List or search tools",
        query=ToolsQuery, answer=ToolList,
    ),
    Endpoint(
        method="GET", path="/v1/stubs", scope=Scope.READ, handler=stubs,
        summary="Get the tools as typed Python functions", gives=TEXT,
    ),
    Endpoint(
        method="GET", path="/v1/tools/{name}", scope=Scope.READ, handler=show, summary="Show a tool",
        answer=ToolAnswer,
    ),
)  # fmt: skip
