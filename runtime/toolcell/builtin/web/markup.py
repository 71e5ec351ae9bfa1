"""Write a stranger's HTML anew, so that a parser's work on it is bounded: few elements, few attributes in each.

libxml2 compares each attribute of a tag with all before it, and an extractor looks at each element many times: a
megabyte of attributes, or of empty paragraphs, takes them minutes. What is written here is read in one way only.
"""

from __future__ import annotations

import html
import re

MAX_ELEMENTS = 20_000
"""Most elements of one page. Extraction takes about a second for 10,000."""
MAX_ATTRIBUTES = 30
"""Most attributes of one element; those behind them are left out."""
MAX_VALUE_CHARS = 2000

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)|<[!?][^>]*>?", re.DOTALL)
_SKIPPED = re.compile(r"<(script|style|template|svg|noscript)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"""<(/?[A-Za-z][A-Za-z0-9:-]{0,40}+)((?:[^<>"']++|"[^"]*+"|'[^']*+'){0,400}+)>|<""")
_ATTRIBUTE = re.compile(r"""([A-Za-z][A-Za-z0-9_:.-]{0,60})(?:\s{0,9}=\s{0,9}(?:"([^"]*)"|'([^']*)'|([^\s"'>]+)))?""")


def bounded_markup(text: str) -> str | None:
    """Return a page with the same elements; None when it has more than `MAX_ELEMENTS`. Takes linear time."""
    count = 0

    def tag(match: re.Match[str]) -> str:
        nonlocal count
        if match[1] is None:
            return "&lt;"
        if match[1].startswith("/"):
            return f"<{match[1]}>"
        count += 1
        return f"<{match[1]}{_attributes(match[2])}>" if count <= MAX_ELEMENTS else ""

    written = _TAG.sub(tag, _SKIPPED.sub(" ", _COMMENT.sub(" ", text)))
    return written if count <= MAX_ELEMENTS else None


def _attributes(text: str) -> str:
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        value = match[2] or match[3] or match[4] or ""
        found.setdefault(match[1].lower(), html.escape(html.unescape(value[:MAX_VALUE_CHARS])))
        if len(found) >= MAX_ATTRIBUTES:
            break
    return "".join(f' {name}="{value}"' for name, value in found.items())
