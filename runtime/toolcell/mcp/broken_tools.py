"""Pages of a server's list, made fit for the SDK on their way to it: one broken tool would cost the whole list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_types import Tool, methods
from pydantic import ValidationError

from toolcell.mcp.mending import mend_listing

METHOD = "tools/list"
OF_ANYTHING = "2026-07-28"
"""Version of the protocol from which on answers need not be objects."""


class ToolPages:
    """What is taken out of the pages of one connection before the SDK sees them.

    Broken tools, which are reported, and schemas of answers: the SDK would check answers by them once more, with
    patterns that can keep it busy. `answers` checks each answer.
    """

    def __init__(self) -> None:
        self.version = ""
        """Version of the protocol. A page that comes before it is known stays as it is."""
        self._broken = dict[str, str]()
        self._output_schemas = dict[str, Any]()
        self.unused = dict[str, str]()
        """What is wrong with schemas of answers that the protocol's version does not know, by name of the tool."""

    def begin(self) -> None:
        """Forget what an earlier list had."""
        self._broken.clear()
        self.unused.clear()
        self._output_schemas.clear()

    def mend(self, page: dict[str, Any]) -> None:
        """Mend a page in place. What is wrong with it, and not with one of its tools, is left to the SDK."""
        mend_listing(page)
        if not self.version or not isinstance(page.get("tools"), list):
            return
        page["tools"] = [self._without_output_schema(tool) for tool in page["tools"]]
        page["tools"], broken = without_broken(page, self.version)
        self._broken |= broken

    def _without_output_schema(self, tool: Any) -> Any:
        if not isinstance(tool, Mapping) or not isinstance(schema := tool.get("outputSchema"), Mapping):
            return tool
        if isinstance(name := tool.get("name"), str):
            if schema.get("type") != "object" and self.version < OF_ANYTHING:
                self.unused[name] = "it is not of an object"
            else:
                self._output_schemas.setdefault(name, schema)
        return {name: value for name, value in tool.items() if name != "outputSchema"}

    def take_broken(self) -> dict[str, str]:
        """Return what is wrong with tools that were taken out, by name; each is returned once."""
        broken, self._broken = self._broken, {}
        return broken

    def completed(self, tools: list[Tool]) -> list[Tool]:
        """Return tools that the SDK has read with the schemas of their answers."""
        return [
            tool.model_copy(update={"output_schema": self._output_schemas[tool.name]})
            if tool.name in self._output_schemas
            else tool
            for tool in tools
        ]


def without_broken(page: Mapping[str, Any], version: str) -> tuple[list[Any], dict[str, str]]:
    """Return the tools of a page that are not broken, and what is wrong with each of the others, by name."""
    tools: list[Any] = page["tools"]
    if _problem(page, version) is None:
        return tools, {}
    others = {name: value for name, value in page.items() if name != "nextCursor"}
    kept, broken = [], dict[str, str]()
    for number, tool in enumerate(tools, 1):
        problem = _problem({**others, "tools": [tool]}, version)
        if problem is None:
            kept.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, Mapping) else None
            broken[name if isinstance(name, str) and name else f"number {number} of its list"] = problem
    return kept, broken


def _problem(page: Mapping[str, Any], version: str) -> str | None:
    """Return what is wrong with a page, where it is about a tool."""
    try:
        methods.validate_server_result(METHOD, version, page)
    except ValidationError as exc:
        first = next(
            (each for each in exc.errors(include_url=False, include_input=False) if "tools" in each["loc"]), None
        )
        if first is None:
            return None
        place = ".".join(str(part) for part in first["loc"] if part != "tools" and not isinstance(part, int))
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return None
