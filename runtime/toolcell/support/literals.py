"""Search encoded data for many literals at once, in a time that hardly depends on the data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final

PIECE_BYTES: Final = 64 * 1024

MAX_TOGETHER_BYTES: Final = 64 * 1024
"""Most bytes of literals that one automaton looks for."""


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
        return [automaton("|".join(group)) for group in groups]


@functools.lru_cache(maxsize=32)
def automaton(pattern: str) -> Callable[[str], bool]:
    """Return what says whether a pattern occurs in a text."""
    from pydantic_core import SchemaValidator, core_schema  # only large data needs it

    return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
