"""Catalogues of any size for tests: tools with parameters and descriptions of their own, in ten namespaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from toolcell.tools import ToolDefinition, ToolOptions, ToolRegistry, ToolSpec

SPACES = ("github", "mail", "calendar", "crm", "billing", "storage", "search", "monitoring", "chat", "wiki")
VERBS = ("create", "update", "delete", "list", "find")
THINGS = ("invoice", "meeting", "contact", "folder", "alert", "channel", "page", "branch", "label", "report")


def name_of(number: int) -> str:
    """Return the name of one tool."""
    space, verb = SPACES[number % 10], VERBS[number // 10 % 5]
    turn = number // 500
    return f"{space}.{verb}_{THINGS[number // 50 % 10]}{f'_v{turn + 1}' if turn else ''}"


def catalogue(count: int, **settings: Any) -> ToolRegistry:
    """Return a registry of so many tools. Each answers with its name and its argument."""
    registry, specs = ToolRegistry(**settings), list[ToolSpec]()
    for number in range(count):
        name = name_of(number)
        space, _, rest = name.partition(".")
        verb, thing = rest.split("_")[:2]
        schema = {
            "type": "object",
            "properties": {
                "title": {"type": "string", "description": f"Title of the {thing}, as people read it."},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "Words to file it under."},
                "limit": {"type": "integer", "default": 10, "description": "Most results."},
            },
            "required": ["title"],
            "additionalProperties": False,
        }
        text = f"{verb.capitalize()} a {thing} in the {space} of the company.\n\nNeeds the right to {verb} there."
        definition = ToolDefinition(name, text, schema)
        specs.append(ToolSpec.positional(definition, partial(_answer, name), ToolOptions()))
    registry.add(_Several(specs))
    return registry


def _answer(name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"tool": name, "title": args["title"]}


@dataclass(frozen=True)
class _Several:
    """Registered together: one by one, each would be compared with all others."""

    specs: list[ToolSpec]

    def to_specs(self) -> list[ToolSpec]:
        return self.specs
