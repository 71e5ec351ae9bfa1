"""Which tools a model is shown with each request, and which it has to search for.

A catalogue that is larger than the budget is left out of the list. What a search finds joins the list, so that
providers that take calls of listed tools alone take these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolcell.tools.definition import ToolDefinition
from toolcell.tools.descriptions import SEARCH_TOOL
from toolcell.tools.detail import check_shown_chars
from toolcell.tools.spec import RegisteredTool


def is_search(tool: RegisteredTool | None) -> bool:
    """Return whether a tool is the one of this module."""
    return tool is not None and tool.spec.source is SEARCH_TOOL


def listed_within(tools: Sequence[RegisteredTool], shown_chars: int, found: Iterable[str]) -> Sequence[RegisteredTool]:
    """Return the tools that a model is shown: all, if their definitions have at most so many characters.

    Otherwise those of tools that run others, such as execute_code, and of those that were found, the latest first. What
    cannot be found stays: without `search_tools` nothing is left out.
    """
    check_shown_chars(shown_chars)
    if not is_large(tools, shown_chars) or not any(map(is_search, tools)):
        return tools
    kept, room = {tool.name for tool in tools if is_lasting(tool)}, shown_chars
    size = {tool.name: size_of(tool.definition) for tool in tools if tool.name not in kept}
    for name in reversed([*found]):
        if name in size and name not in kept and size[name] <= room:
            kept.add(name)
            room -= size[name]
    return [tool for tool in tools if tool.name in kept]


def is_large(tools: Iterable[RegisteredTool], shown_chars: int) -> bool:
    """Return whether the definitions of these tools have more than so many characters."""
    return sum(size_of(tool.definition) for tool in tools if not is_lasting(tool)) > shown_chars


def is_lasting(tool: RegisteredTool) -> bool:
    """Return whether a tool is shown however large the catalogue is."""
    return tool.options.orchestrates or is_search(tool)


def size_of(definition: ToolDefinition) -> int:
    """Return how many characters of a request a definition takes, about."""
    return len(definition.name) + len(definition.description) + len(definition._parameters_json)
