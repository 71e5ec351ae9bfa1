"""Pages of a server's list, made fit for the SDK on their way to it: one broken tool would cost the whole list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_types import Tool, methods
from pydantic import ValidationError

from toolcell.calls.schema import with_parts
from toolcell.mcp.structure import has_too_many, too_many_checked, too_many_errors
from toolcell.support.event_loop import TimeSlice
from toolcell.support.foreign_definitions import MAX_SCHEMA_BYTES

# Schemas of tools as servers send them, mended where every reader knows what was meant. Pure.


MAX_DEPTH = 64
"""Greatest depth of schemas; what is nested deeper stays as it is, and is refused later."""

TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
    "map": "object",
    "none": "null",
}
"""What is written in place of a type of JSON."""

_VALUES = ("default", "const", "example", "examples")


def mend_listing(result: dict[str, Any]) -> None:
    tools = result.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            if isinstance(schema := tool.get("inputSchema"), dict):
                tool["inputSchema"] = mended_input(schema)
            if isinstance(schema := tool.get("outputSchema"), dict):
                tool["outputSchema"] = mended(schema, 0)
            elif "outputSchema" in tool and schema is None:
                del tool["outputSchema"]


def mended_input(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments: always one of an object, each required name among its properties."""
    made = mended(schema, 0)
    kind = made.get("type", "object")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        made["type"] = "object"
    required, known = made.get("required"), made.get("properties", {})
    if isinstance(required, list) and isinstance(known, dict):
        missing: dict[str, Any] = {name: {} for name in required if name not in known}
        if missing:
            made["properties"] = {**known, **missing}
    return made


def mended(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return a schema, and those inside it, without what no reader could take as it stands."""
    made = {key: value for key, value in schema.items() if value is not None or key in _VALUES}
    if depth > MAX_DEPTH:
        return made
    if isinstance(kind := made.get("type"), str):
        made["type"] = TYPES.get(kind.lower(), kind)
        if kind.lower() == "any":
            del made["type"]
    if made.get("properties") == []:
        made["properties"] = {}
    made = with_parts(made, lambda part: mended(part, depth + 1) if isinstance(part, dict) else part)
    return _with_required(made, schema.get("properties"))


def _with_required(made: dict[str, Any], properties: Any) -> dict[str, Any]:
    """Return the schema with its required names as a list, each once: also those that say so of themselves."""
    required = made.get("required")
    names = [required] if isinstance(required, str) else required if isinstance(required, list) else []
    for name, part in properties.items() if isinstance(properties, dict) else ():
        if isinstance(part, dict) and part.get("required") is True:
            names = [*names, name]
    if isinstance(required, bool):
        del made["required"]
    if names:
        made["required"] = list(dict.fromkeys(name for name in names if isinstance(name, str)))
    return made


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

    async def mend(self, page: dict[str, Any]) -> None:
        """Mend a page in place. What is wrong with it, and not with one of its tools, is left to the SDK."""
        mend_listing(page)
        if not self.version or not isinstance(page.get("tools"), list):
            return
        page["tools"] = [self._without_output_schema(tool) for tool in page["tools"]]
        page["tools"], broken = await without_broken(page, self.version)
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


async def without_broken(page: Mapping[str, Any], version: str) -> tuple[list[Any], dict[str, str]]:
    """Return the tools of a page that are not broken, and what is wrong with each of the others, by name."""
    tools: list[Any] = page["tools"]
    others = {name: value for name, value in page.items() if not isinstance(value, dict | list)}
    kept, broken, turn = [], dict[str, str](), TimeSlice()
    for number, tool in enumerate(tools, 1):
        await turn.give_way()
        problem = _problem({**others, "tools": [tool]}, version)
        if problem is None:
            kept.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, Mapping) else None
            broken[name if isinstance(name, str) and name else f"number {number} of its list"] = problem
    return kept, broken


def _problem(page: Mapping[str, Any], version: str) -> str | None:
    """Return what is wrong with a page of one tool, where it is about the tool."""
    most = MAX_SCHEMA_BYTES // 2  # an item and its comma
    if has_too_many(page["tools"], most):
        return too_many_checked(most)
    try:
        methods.validate_server_result(METHOD, version, page)
    except ValidationError as exc:
        if said := too_many_errors(exc):
            return said
        first = next(
            (each for each in exc.errors(include_url=False, include_input=False) if "tools" in each["loc"]), None
        )
        if first is None:
            return None
        place = ".".join(str(part) for part in first["loc"] if part != "tools" and not isinstance(part, int))
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return None
