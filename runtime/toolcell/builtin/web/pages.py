"""What a response says: its characters, whether it is a page, JSON, text or none of these, and a page's article.

The article is extracted by trafilatura when it is installed. Otherwise, and where it finds none, tags are removed.
"""

from __future__ import annotations

import codecs
import html
import re
from dataclasses import dataclass
from typing import Any, Literal

from toolcell.builtin.encodings import text_of
from toolcell.builtin.web.fetch import Response
from toolcell.support.log import logger_of

# Write a stranger's HTML anew, so that a parser's work on it is bounded: few elements, few attributes in each.
#
# libxml2 compares each attribute of a tag with all before it, and an extractor looks at each element many times: a
# megabyte of attributes, or of empty paragraphs, takes them minutes. What is written here is read in one way only.


MAX_ELEMENTS = 20_000
"""Most elements of one page. Extraction takes about a second for 10,000."""
MAX_ATTRIBUTES = 30
"""Most attributes of one element; those behind them are left out."""
MAX_VALUE_CHARS = 2000

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)|<[!?][^>]*>?", re.DOTALL)
_SKIPPED_ELEMENTS = re.compile(r"<(script|style|template|svg|noscript)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
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

    written = _TAG.sub(tag, _SKIPPED_ELEMENTS.sub(" ", _COMMENT.sub(" ", text)))
    return written if count <= MAX_ELEMENTS else None


def _attributes(text: str) -> str:
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        value = match[2] or match[3] or match[4] or ""
        found.setdefault(match[1].lower(), html.escape(html.unescape(value[:MAX_VALUE_CHARS])))
        if len(found) >= MAX_ATTRIBUTES:
            break
    return "".join(f' {name}="{value}"' for name, value in found.items())


logger = logger_of("toolcell.tools")

Kind = Literal["html", "json", "text", "binary"]

MAX_HTML_CHARS = 1024 * 1024
MIN_ARTICLE_CHARS = 80
"""Shorter extracts are compared with the page without its tags: of tables and lists, extraction leaves nothing."""

_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_TEXT_TYPES = frozenset({
    "application/xml", "application/javascript", "application/x-javascript", "application/ecmascript",
    "application/x-ndjson", "application/x-yaml", "application/yaml", "application/toml", "application/sql",
    "application/rtf", "application/x-sh", "application/x-www-form-urlencoded",
})  # fmt: skip
_MEDIA = frozenset({"image", "audio", "video", "font"})
_BINARY_MARKS = (
    b"%PDF-",
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"\x89PNG",
    b"GIF8",
    b"\xff\xd8\xff",
    b"\x7fELF",
    b"Rar!",
    b"7z\xbc\xaf",
)
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")

_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hr",
        "li",
        "main",
        "nav",
        "ol",
        "option",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "td",
        "tfoot",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
    ]
)
_TAG_NAME = re.compile(r"/?([A-Za-z][A-Za-z0-9]*)")
_TITLE = re.compile(r"<title[^<>]{0,200}>([^<]{0,500})", re.IGNORECASE)
_SPACES = re.compile(r"[ \t\r\f\v\xa0]+")


@dataclass(frozen=True, slots=True)
class PageText:
    """A response in characters."""

    kind: Kind
    title: str
    text: str
    """The article of a page, otherwise what was sent. Empty for binary data."""


def read_page(response: Response, *, raw: bool = False) -> PageText:
    """Return what a response says. Takes up to a second for a large page: call it in a thread.

    `raw`: keep a page's tags.
    """
    kind = kind_of(response.content_type, response.content)
    if kind == "binary":
        return PageText(kind, "", "")
    text = text_of(response.content, response.content_type, is_page=kind == "html")
    if kind != "html":
        return PageText(kind, "", text)
    text = text[:MAX_HTML_CHARS]
    return PageText(kind, title_of(text), text if raw else article_of(text))


def kind_of(content_type: str, content: bytes) -> Kind:
    """Decide by the media type, or by the content where the type says nothing: "a file" has many names."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in _HTML_TYPES:
        return "html"
    if media_type.endswith(("/json", "+json")):
        return "json"
    if media_type.startswith("text/") or media_type in _TEXT_TYPES or media_type.endswith("+xml"):
        return "text"
    if media_type.partition("/")[0] in _MEDIA or not _is_text(content):
        return "binary"
    start = content[:1024].lstrip().lower()
    return "html" if start.startswith((b"<!doctype html", b"<html")) else "json" if start[:1] in b"{[" else "text"


def _is_text(content: bytes) -> bool:
    """Return whether a body looks like text: no control characters at its beginning, and UTF-8 or mostly ASCII."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    start = content[:1024]
    if start.startswith(_BINARY_MARKS) or _CONTROLS.search(start):
        return False
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as exc:
        return exc.start >= len(start) - 3 or sum(byte > 127 for byte in start) * 3 < len(start)
    return True


def title_of(text: str) -> str:
    found = _TITLE.search(text[:65536])
    return " ".join(html.unescape(found[1]).split())[:300] if found else ""


def article_of(text: str) -> str:
    extracted = _extracted(text)
    if len(extracted) >= MIN_ARTICLE_CHARS:
        return extracted
    stripped = strip_tags(text)
    return stripped if len(stripped) > 2 * len(extracted) else extracted


def _extracted(text: str) -> str:
    try:
        import trafilatura
    except ImportError as exc:
        if getattr(exc, "name", "") != "trafilatura":  # it is there, and something that it needs is not
            logger.warning("articles are not extracted: %s", exc)
        return ""
    bounded = bounded_markup(text)
    if bounded is None:
        return ""
    try:
        found: Any = trafilatura.extract(bounded, include_comments=False, include_tables=True, deduplicate=False)
    except Exception:  # a parser of strangers' pages: whatever it does, the tags can still be removed
        return ""
    return found.strip() if isinstance(found, str) else ""


def strip_tags(text: str) -> str:
    """Return a page without tags, scripts and styles, in linear time. Blocks stand on lines of their own."""
    lower = text.lower()
    pieces: list[str] = []
    position = 0
    while (start := text.find("<", position)) >= 0:
        pieces.append(text[position:start])
        if text.startswith("<!--", start):
            position = _after(text, "-->", start + 4)
            continue
        name = _TAG_NAME.match(text, start + 1)
        if name is None and text[start + 1 : start + 2] not in ("!", "?"):
            pieces.append("<")  # a plain less-than sign
            position = start + 1
            continue
        position = _after(text, ">", start)
        tag = name[1].lower() if name else ""
        if tag in _BLOCKS:
            pieces.append("\n")
        if tag in _SKIPPED and text[start + 1] != "/":
            position = _after(text, ">", _after(lower, f"</{tag}", position))
    pieces.append(text[position:])
    lines = (_SPACES.sub(" ", line).strip() for line in html.unescape("".join(pieces)).split("\n"))
    return "\n".join(line for line in lines if line)


def _after(text: str, end: str, start: int) -> int:
    found = text.find(end, start)
    return len(text) if found < 0 else found + len(end)
