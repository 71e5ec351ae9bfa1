"""Search tools by words, best first; which tools a model is shown with a request, and which it has to search for.

Scripts, models, MCP clients and the command line all use this.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from toolcell.calls.context import ToolContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Origin, ToolOptions
from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.support.checks import check_count, check_kind, did_you_mean
from toolcell.support.vocabulary import query_words, words
from toolcell.tools.code import CODE_TOOL, SEARCH_TOOL
from toolcell.tools.spec import Offered, RegisteredTool, ToolSpec
from toolcell.tools.stubs import DETAILS, Recent, tools_text
from toolcell_bridge.guest.tool_names import provider_name

MAX_QUERY_CHARS: Final = 1_000
MAX_FOUND: Final = 100
"""Tools that one search returns at most."""
FOUND: Final = 10
"""Tools that a search returns unless it says otherwise."""

NAME_WEIGHT, DESCRIPTION_WEIGHT, PARAMETERS_WEIGHT = 4, 2, 1
"""How often the words of each field count."""
SMALL: Final = 100
"""Tools whose index is made in the event loop. Of more, it takes long enough for a thread."""
MAX_FIELD_CHARS: Final = 4_000
"""Most characters of a description, and of the parameters of one tool: what a stranger's server may add to the
index."""

_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMES_IN_QUERY: Final = re.compile(r"[\w.-]+")


def words_of(text: str) -> list[str]:
    """Split a text, also names such as create_issue and createIssue, into words without case, accents and plural."""
    return [_singular(word) for word in words(_CAMEL.sub(" ", text))]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _names_of(definition: ToolDefinition) -> tuple[str, str]:
    return definition.name, provider_name(definition.name)


class ToolIndex:
    """The words of some tools. Makes no copy of their definitions, and never changes."""

    def __init__(self, definitions: Sequence[ToolDefinition]) -> None:
        self._texts = [
            Counter(
                [
                    *words_of(each.name) * NAME_WEIGHT,
                    *words_of(each.description[:MAX_FIELD_CHARS]) * DESCRIPTION_WEIGHT,
                    *words_of(_parameter_texts(each)) * PARAMETERS_WEIGHT,
                ]
            )
            for each in definitions
        ]
        self._having = Counter(word for text in self._texts for word in text)
        """How many tools have a word."""
        self._exact = {key.casefold(): at for at, each in enumerate(definitions) for key in _names_of(each)}

    def ranked(self, query: str) -> list[int]:
        """Return the places of the tools that have a word of the query, best first; tools that it names come first.

        A rare word counts more, and each further time less.
        """
        named = [
            self._exact[name] for word in _NAMES_IN_QUERY.findall(query) if (name := word.casefold()) in self._exact
        ]
        wanted = dict.fromkeys(_singular(word) for word in query_words(_CAMEL.sub(" ", query)))
        weights = {word: math.log(1 + len(self._texts) / self._having[word]) for word in wanted if self._having[word]}
        scores = {
            at: sum(weight * text[word] / (1 + text[word]) for word, weight in weights.items())
            for at, text in enumerate(self._texts)
            if any(word in text for word in weights)
        }
        return list(dict.fromkeys([*named, *sorted(scores, key=lambda at: -scores[at])]))


def _parameter_texts(definition: ToolDefinition) -> str:
    properties = definition.parameters.get("properties")
    parts: list[str] = []
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        described = schema.get("description") if isinstance(schema, dict) else None
        parts += [name, described] if isinstance(described, str) else [name]
    return " ".join(parts)[:MAX_FIELD_CHARS]


_indexes = Recent[ToolIndex](8)
"""Of the tools that were asked for last."""


def find(definitions: Sequence[ToolDefinition], query: str, limit: int = FOUND) -> list[ToolDefinition]:
    """Return the tools that fit a query, best first, at most `limit`.

    Raises:
        UsageError: the query is not text or too long, or the limit is out of range.
    """
    check_query(query, limit)
    index = _indexes.get(definitions, lambda: ToolIndex(definitions))
    return [definitions[at] for at in index.ranked(query)[:limit]]


async def find_soon(definitions: Sequence[ToolDefinition], query: str, limit: int) -> list[ToolDefinition]:
    """Do the same, and keep the event loop free while the index of many tools is made."""
    if len(definitions) <= SMALL:
        return find(definitions, query, limit)
    return await daemon_threads.run_sync(find, definitions, query, limit)


def check_query(query: object, limit: object) -> None:
    """Refuse what is not a query.

    Raises:
        UsageError: names the value and the limit.
    """
    check_kind("a query for tools", query, str, cure="write a few words: what the tool is to do")
    if isinstance(query, str) and len(query) > MAX_QUERY_CHARS:
        raise UsageError(
            f"a query for tools has at most {MAX_QUERY_CHARS} characters, not {len(query)}; use a few words"
        )
    check_count("limit", limit, 1)
    if isinstance(limit, int) and limit > MAX_FOUND:
        raise UsageError(f"limit is at most {MAX_FOUND} tools, not {limit}")


def named_of(definitions: Iterable[ToolDefinition], names: Iterable[str]) -> list[ToolDefinition]:
    """Return the tools of these names, as they are registered or as providers write them, each once.

    Raises:
        UsageError: there is no tool of one of the names.
    """
    known = {key: each for each in definitions for key in reversed(_names_of(each))}
    given = list(names)
    for each in given:
        check_kind("the name of a tool", each, str, cure="of definitions: [each.name for each in definitions]")
    wanted = list(dict.fromkeys(given))
    if unknown := [name for name in wanted if name not in known]:
        shown = ", ".join(f"{name[:78]!r}{did_you_mean(name, known)}" for name in unknown[:3])
        raise UsageError(f"there is no tool {shown}; search_tools finds tools by what they do")
    return list({known[name].name: known[name] for name in wanted}.values())


def is_search(tool: RegisteredTool | None) -> bool:
    """Return whether a tool is the one of this module."""
    return tool is not None and tool.spec.source is SEARCH_TOOL


def listed_within(tools: Sequence[RegisteredTool], shown_chars: int, found: Iterable[str]) -> Sequence[RegisteredTool]:
    """Return the tools that a model is shown: all, if their definitions have at most so many characters.

    Otherwise those of tools that run others, such as execute_code, and of those that were found, the latest first. What
    cannot be found stays: without `search_tools` nothing is left out.
    """
    check_count("shown_chars", shown_chars, 0)
    if not is_large(tools, shown_chars) or not any(map(is_search, tools)):
        return tools
    kept, room = {tool.name for tool in tools if is_lasting(tool)}, shown_chars
    size = {tool.name: tool.definition.size_chars for tool in tools if tool.name not in kept}
    for name in reversed([*found]):
        if name in size and name not in kept and size[name] <= room:
            kept.add(name)
            room -= size[name]
    return [tool for tool in tools if tool.name in kept]


def is_large(tools: Iterable[RegisteredTool], shown_chars: int) -> bool:
    """Return whether the definitions of these tools have more than so many characters."""
    return sum(tool.definition.size_chars for tool in tools if not is_lasting(tool)) > shown_chars


def is_lasting(tool: RegisteredTool) -> bool:
    """Return whether a tool is shown however large the catalogue is."""
    return tool.options.orchestrates or is_search(tool)


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
        options=known.changed(options),
        source=SEARCH_TOOL,
        args_prefix=f"invalid {SEARCH_TOOL} args: ",
        describe=_describe,
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
    found = await find_soon(definitions, args["query"], args["limit"])
    call.run.state.note_found(each.name for each in found)
    if not found:
        return f"none of {len(own)} tools fits; use other words"
    return tools_text([(each, tools[each.name].options.returns) for each in found], args["detail"])
