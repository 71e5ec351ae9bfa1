"""Say in a few words what a script does: its docstring, its first comment, or its first statement that does something.

A title is what the script says of itself. One from a docstring or a comment begins with `#`, because it is not code.
The source is split into lines and never parsed: it is a guest's.
"""

from __future__ import annotations

import re
from typing import Final

TITLE_CHARS: Final = 120
MAX_LINES: Final = 200
"""Lines looked at."""

_DOCSTRING: Final = re.compile(r"""[rRuU]?(\"\"\"|'''|"|')(.*)""")
_NO_COMMENT: Final = re.compile(
    r"#\s*(?:!|-\*-|(?:en)?coding[:=]|type:|noqa|pylint:|mypy:|ruff:|fmt:)|#[\W_]*$", re.IGNORECASE
)
_PREPARES: Final = re.compile(
    r"(?:import|from|def|async def|class|global|nonlocal)\b|@|(?:try|else|finally)\s*:|pass\b"
)
"""Lines that only prepare what comes later."""


def title_of(source: str | None) -> str:
    """Return what a script says that it does, or the first thing that it does; empty without a script."""
    lines = [stripped for each in (source or "").split("\n", MAX_LINES)[:MAX_LINES] if (stripped := each.strip())]
    if not lines:
        return ""
    statements = (line for line in lines if not line.startswith("#") and not _PREPARES.match(line))
    return (_docstring(lines) or _comment(lines) or next(statements, lines[0]))[:TITLE_CHARS]


def _docstring(lines: list[str]) -> str:
    code = [line for line in lines if not line.startswith("#")]
    match = _DOCSTRING.match(code[0]) if code else None
    if match is None:
        return ""
    quote, rest = match.groups()
    text, end, after = rest.partition(quote)
    if (len(quote) == 1 and (not end or after.strip())) or (end and after.strip()):
        return ""  # an expression that begins with a text
    for line in [text] if text.strip() or end else code[1:]:
        if said := line.partition(quote)[0].strip():
            return f"# {said}"
    return ""


def _comment(lines: list[str]) -> str:
    """Return the first comment that only imports precede."""
    for line in lines:
        if line.startswith("#") and not _NO_COMMENT.match(line):
            return f"# {line.lstrip('#').strip()}"
        if not line.startswith(("#", "import ", "from ")):
            return ""
    return ""
