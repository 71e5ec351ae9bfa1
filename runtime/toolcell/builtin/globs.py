"""`Glob`: which relative paths a pattern such as `src/**/*.py` means. Its cost does not grow with clever patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from toolcell.errors import ToolError
from toolcell.support.text import one_line

MAX_CHARS = 500
MAX_PARTS = 32
ANY_DEPTH = "**"


class Glob:
    """`*` and `?` match in one name, `[...]` one character, `**` any number of directories. Case counts."""

    def __init__(self, pattern: str) -> None:
        """Read a pattern.

        Raises:
            ToolError: it is empty, too long, absolute, or has a part `..`.
        """
        parts = pattern.split("/")
        shown = one_line(pattern, 100)
        if not pattern or len(pattern) > MAX_CHARS or len(parts) > MAX_PARTS:
            raise ToolError(f"a pattern has 1 to {MAX_CHARS} characters and at most {MAX_PARTS} parts: {shown!r}")
        if pattern.startswith("/") or ".." in parts:
            raise ToolError(f"a pattern is relative to the listed directory and has no '..': {shown!r}")
        self._parts: list[re.Pattern[str] | None] = []
        for part in parts:
            if part in ("", "."):
                continue
            try:
                one = None if part == ANY_DEPTH else re.compile(fnmatch.translate(re.sub(r"\*+", "*", part)))
            except re.error as exc:
                raise ToolError(f"a pattern that cannot be read: {shown!r}: {exc}") from exc
            if one is not None or not (self._parts and self._parts[-1] is None):
                self._parts.append(one)

    def matches(self, path: str) -> bool:
        """Return whether this path matches."""
        names = path.split("/")
        reached = self._after(names)
        last = len(self._parts)
        return last in reached

    def may_be_below(self, names: Sequence[str]) -> bool:
        """Return whether something below this directory can match."""
        return any(place < len(self._parts) for place in self._after(names))

    def _after(self, names: Sequence[str]) -> set[int]:
        """Return every place in the pattern at which one can be after these names: one step for each place and name."""
        places = self._open({0})
        for name in names:
            following = set()
            for place in places:
                if place == len(self._parts):
                    continue
                part = self._parts[place]
                if part is None:
                    following.add(place)
                elif part.match(name):
                    following.add(place + 1)
            places = self._open(following)
        return places

    def _open(self, places: set[int]) -> set[int]:
        """Add the places behind each `**`, which also matches nothing."""
        return places | {place + 1 for place in places if place < len(self._parts) and self._parts[place] is None}
