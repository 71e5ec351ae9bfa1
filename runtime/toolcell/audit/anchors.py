"""Search encoded data for many literals at once, in a time that hardly depends on the data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pydantic_core import SchemaValidator, core_schema

from toolcell.audit.assigned import COMMON, any_of, rarest

SMALL_BYTES: Final = 4096
"""In less, no time is lost that matters."""

MAX_DENSITY: Final = 8
"""One byte in so many may be one that the search has to look at closely."""

PIECE_BYTES: Final = 64 * 1024

MAX_TOGETHER_BYTES: Final = 64 * 1024
"""Of literals that one automaton looks for."""


class LiteralSearch:
    """Whether one of many literals occurs in data. Each byte costs about the same, whatever the data is.

    The automaton is that of pydantic's patterns, which are linear in the text. Python's own patterns stop wherever a
    literal may begin, and a text can consist of such places.
    """

    def __init__(self, literals: Iterable[bytes]) -> None:
        self._literals = sorted(set(literals))
        self._overlap = max(map(len, self._literals), default=1) - 1

    def __call__(self, data: bytes) -> bool:
        """True when one of the literals occurs."""
        if len(data) <= PIECE_BYTES:
            text = data.decode("latin-1")
            for occurs in self._automata:  # noqa: SIM110 - each tool call waits for this twice
                if occurs(text):
                    return True
            return False
        return any(
            occurs(piece)
            for start in range(0, len(data), PIECE_BYTES)
            for piece in (data[start : start + PIECE_BYTES + self._overlap].decode("latin-1"),)
            for occurs in self._automata
        )

    @functools.cached_property
    def _automata(self) -> list[Callable[[str], bool]]:
        """Made when they are first needed: most data is small."""
        groups: list[list[str]] = []
        room = 0
        for literal in self._literals:
            if room < len(literal):
                groups.append([])
                room = max(MAX_TOGETHER_BYTES, len(literal))
            groups[-1].append("".join(f"\\x{{{byte:x}}}" for byte in literal))
            room -= len(literal)
        return [_automaton("|".join(group)) for group in groups]


def _automaton(pattern: str) -> Callable[[str], bool]:
    return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python


@functools.lru_cache(maxsize=8)
def _search_for(literals: tuple[bytes, ...]) -> LiteralSearch:
    """Return one search for the same literals, which are no secrets: an automaton takes long to make."""
    return LiteralSearch(literals)


class AnchorSearch:
    """Literals in lower case, to be found in data in lower case."""

    def __init__(self, literals: Iterable[str]) -> None:
        wanted = sorted(literals)
        # What is made of frequent characters alone is looked for by itself: the search would have to stop too often.
        common = [each for each in wanted if rarest(each) in COMMON]
        others = [each for each in wanted if rarest(each) not in COMMON]
        self._needles = {each: each.encode() for each in wanted}
        self._common = tuple(common)
        self.occurs_in = _search_for(tuple(self._needles.values()))
        self._find_all = re.compile(any_of(others).encode()).findall
        self._pivots = "".join({rarest(each) for each in others}).encode()
        self._by_tail: dict[bytes, list[str]] = {}
        for each in others:
            self._by_tail.setdefault(each[each.index(rarest(each)) :].encode(), []).append(each)

    def found_in(self, low: bytes) -> Sequence[str]:
        """Return the literals that occur in the data, and perhaps some that end like one that does."""
        if len(low) > SMALL_BYTES and not self.occurs_in(low):
            return ()
        if self._is_dense(low):
            return [literal for literal, needle in self._needles.items() if needle in low]
        found = [literal for literal in self._common if self._needles[literal] in low]
        for tail in set(self._find_all(low)):
            found += self._by_tail[tail]
        return found

    def _is_dense(self, low: bytes) -> bool:
        """True when the search for rare bytes would have to stop too often."""
        if len(low) <= SMALL_BYTES:
            return False
        return (len(low) - len(low.translate(None, self._pivots))) * MAX_DENSITY > len(low)
