"""Take tools that are no MCP out of a server's list, before the SDK refuses the whole list because of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcp.client import Client
from mcp_types import methods
from pydantic import ValidationError

METHOD = "tools/list"


def take_over_checks(client: Client, report: Callable[[str, str], None]) -> None:
    """Have each list of a connection without its broken tools; `report` gets a tool's name and what is wrong.

    Results of calls are checked in `answers`, by a validator that no pattern of a server can keep busy.
    """
    setattr(client.session, "validate_tool_result", _accept)  # noqa: B010
    dispatcher: Any = client.session._dispatcher
    plain = dispatcher.send_raw_request

    async def send_raw_request(method: str, params: Any = None, opts: Any = None) -> Any:
        raw = await plain(method, params, opts)
        return without_broken(raw, client.protocol_version, report) if method == METHOD else raw

    dispatcher.send_raw_request = send_raw_request


async def _accept(name: str, result: object) -> None:
    """Accept every result."""


def without_broken(raw: Any, version: str, report: Callable[[str, str], None]) -> Any:
    """Return a page of a list without its broken tools. What else is wrong with it is left to the SDK."""
    tools = raw.get("tools") if isinstance(raw, dict) else None
    if not isinstance(tools, list) or _problem(raw, version) is None:
        return raw
    others = {name: value for name, value in raw.items() if name != "nextCursor"}
    kept = []
    for number, tool in enumerate(tools, 1):
        problem = _problem({**others, "tools": [tool]}, version)
        if problem is None:
            kept.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, Mapping) else None
            report(name if isinstance(name, str) and name else f"number {number} of its list", problem)
    return {**raw, "tools": kept}


def _problem(raw: Mapping[str, Any], version: str) -> str | None:
    """Return what is wrong with a page, where it is about a tool."""
    try:
        methods.validate_server_result(METHOD, version, raw)
    except ValidationError as exc:
        first = next(
            (each for each in exc.errors(include_url=False, include_input=False) if "tools" in each["loc"]), None
        )
        if first is None:
            return None
        place = ".".join(str(part) for part in first["loc"] if part != "tools" and not isinstance(part, int))
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return None
