"""Search a catalogue of tools by words, best first. Scripts, models, MCP clients and the command line all use this.

With the extra `search` the ranking is BM25, by rank-bm25. Without it, a word counts more the fewer tools have it. Both
weigh a word in a tool's name most, then one in its description, then one in the names and texts of its parameters.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.tools.checks import check_count, check_kind
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.embedding_provider import EmbeddingProvider, embed_texts
from toolcell.tools.names import provider_name
from toolcell.tools.problems import did_you_mean
from toolcell.tools.recent import Recent
from toolcell.tools.similarity import cosine
from toolcell.tools.words import query_words, words

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
"""Of a description, and of the parameters of one tool: what a stranger's server may add to the index."""
EMBEDDED_CHARS: Final = 1_000
"""Of each tool's text, for its vector."""
RANK_OFFSET: Final = 60
"""Of reciprocal rank fusion. Source: Cormack et al., Reciprocal Rank Fusion, SIGIR 2009."""

_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMES_IN_QUERY: Final = re.compile(r"[\w.-]+")

logger = logging.getLogger("toolcell.tools")


def words_of(text: str) -> list[str]:
    """Split a text, also names such as create_issue and createIssue, into words without case, accents and plural."""
    return [_singular(word) for word in words(_CAMEL.sub(" ", text))]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


class ToolIndex:
    """The words of some tools. Makes no copy of their definitions, and never changes."""

    def __init__(self, definitions: Sequence[ToolDefinition]) -> None:
        self.definitions = tuple(definitions)
        self._texts = [_indexed_words(each) for each in self.definitions]
        self._scores: Callable[[list[str]], Sequence[float]] = _scorer(self._texts)
        self._known = [frozenset(text) for text in self._texts]
        self._exact = {key.casefold(): at for at, each in enumerate(self.definitions) for key in _names_of(each)}
        self._vectors: tuple[EmbeddingProvider, list[list[float]]] | None = None

    def ranked(self, query: str) -> list[int]:
        """Return the places of the tools that have a word of the query, best first; tools that it names come first."""
        named = [
            self._exact[name] for word in _NAMES_IN_QUERY.findall(query) if (name := word.casefold()) in self._exact
        ]
        wanted = list(dict.fromkeys(_singular(word) for word in query_words(_CAMEL.sub(" ", query))))
        scores = self._scores(wanted) if wanted else ()
        fits = [at for at in range(len(scores)) if not self._known[at].isdisjoint(wanted)]
        return list(dict.fromkeys([*named, *sorted(fits, key=lambda at: -scores[at])]))

    async def ranked_by_meaning(self, query: str, provider: EmbeddingProvider) -> list[int]:
        """Return the places of all tools by the rank of their words and that of their vectors together.

        Raises:
            EmbeddingError: there are no vectors, or none that can be used.
        """
        if self._vectors is None or self._vectors[0] is not provider:
            texts = [_embedded_text(each) for each in self.definitions]
            self._vectors = provider, await embed_texts(provider, texts)
        vectors = self._vectors[1]
        (wanted,) = await embed_texts(provider, [query])
        likeness = [cosine(wanted, each) or 0.0 for each in vectors]
        near = sorted((at for at, score in enumerate(likeness) if score > 0), key=lambda at: -likeness[at])
        fused = dict[int, float]()
        for ranking in (self.ranked(query), near):
            for rank, at in enumerate(ranking):
                fused[at] = fused.get(at, 0.0) + 1 / (RANK_OFFSET + rank)
        return sorted(fused, key=lambda at: -fused[at])


def _names_of(definition: ToolDefinition) -> tuple[str, str]:
    return definition.name, provider_name(definition.name)


def _parameter_texts(definition: ToolDefinition) -> str:
    properties = definition.parameters.get("properties")
    parts: list[str] = []
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        described = schema.get("description") if isinstance(schema, dict) else None
        parts += [name, described] if isinstance(described, str) else [name]
    return " ".join(parts)[:MAX_FIELD_CHARS]


def _indexed_words(definition: ToolDefinition) -> list[str]:
    return [
        *words_of(definition.name) * NAME_WEIGHT,
        *words_of(definition.description[:MAX_FIELD_CHARS]) * DESCRIPTION_WEIGHT,
        *words_of(_parameter_texts(definition)) * PARAMETERS_WEIGHT,
    ]


def _embedded_text(definition: ToolDefinition) -> str:
    named = " ".join(words(_CAMEL.sub(" ", definition.name)))
    return f"{named}. {definition.description} {_parameter_texts(definition)}"[:EMBEDDED_CHARS]


def _scorer(texts: Sequence[list[str]]) -> Callable[[list[str]], Sequence[float]]:
    """Return what ranks texts by words, each as a number for every text."""
    if not any(texts):
        return lambda wanted: [0.0] * len(texts)
    try:
        from rank_bm25 import BM25Plus  # type: ignore[import-untyped]  # "Plus": a word that most tools have still counts for those that have it
    except ImportError:
        return _plain_scorer(texts)
    index: Any = BM25Plus(list(texts))
    return lambda wanted: [float(score) for score in index.get_scores(wanted)]


def _plain_scorer(texts: Sequence[list[str]]) -> Callable[[list[str]], Sequence[float]]:
    """Rank without a library: a rare word counts more, and each further time less."""
    counted = [Counter(text) for text in texts]
    having = Counter(word for text in counted for word in text)

    def scores(wanted: list[str]) -> list[float]:
        weights = {word: math.log(1 + len(counted) / having[word]) for word in wanted if having[word]}
        return [sum(weight * text[word] / (1 + text[word]) for word, weight in weights.items()) for text in counted]

    return scores


@runtime_checkable
class KnowsReturns(Protocol):
    """Tools that know more than their definitions."""

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of what a tool returns; None where it says nothing."""


def returns_of(tools: object, name: str) -> Mapping[str, Any] | None:
    """Return the schema of what a tool returns, as far as these tools know."""
    return tools.returns(name) if isinstance(tools, KnowsReturns) else None


_indexes = Recent[ToolIndex](8)


def index_of(definitions: Sequence[ToolDefinition]) -> ToolIndex:
    """Return the index of these tools. Those that were asked for last are kept."""
    return _indexes.get(definitions, lambda: ToolIndex(definitions))


def find(definitions: Sequence[ToolDefinition], query: str, limit: int = FOUND) -> list[ToolDefinition]:
    """Return the tools that fit a query, best first, at most `limit`.

    Raises:
        UsageError: the query is no text or too long, or the limit is out of range.
    """
    check_query(query, limit)
    return [definitions[at] for at in index_of(definitions).ranked(query)[:limit]]


async def find_by_meaning(
    definitions: Sequence[ToolDefinition], query: str, limit: int, provider: EmbeddingProvider | None
) -> list[ToolDefinition]:
    """Do the same with an embedding provider, if there is one. One that fails is logged, and words decide alone."""
    check_query(query, limit)
    if len(definitions) > SMALL:
        await daemon_threads.run_sync(index_of, definitions)  # it is found again below
    if provider is None or not definitions:
        return find(definitions, query, limit)
    try:
        ranked = await index_of(definitions).ranked_by_meaning(query, provider)
    except Exception as exc:  # a provider may be anybody's code, and a search goes on without it
        logger.warning("search_tools: the embedding provider failed (%s: %s); words decide", type(exc).__name__, exc)
        return find(definitions, query, limit)
    return [definitions[at] for at in ranked[:limit]]


def check_query(query: object, limit: object) -> None:
    """Refuse what is no query.

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
