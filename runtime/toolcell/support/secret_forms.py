"""The forms of a secret: as it is, escaped, quoted or encoded, as it may stand in a script, an answer or a log."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import struct
from collections.abc import Iterator
from decimal import Decimal
from typing import Final
from urllib.parse import quote, quote_plus

MIN_BASE64_CHARS: Final = 5
MIN_NUMBER_CHARS: Final = 4
"""Fewer characters would be found in many values."""

LONGEST_FORM: Final = 8
"""Most characters of a form for each byte of a secret: a quotation mark, escaped three times."""

_KEPT_IN_URLS: Final = ("!'()*", "!'()*;,/?:@&=+$#")
"""What JavaScript's `encodeURIComponent` and `encodeURI` leave as it is."""

_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d++)?|\.\d++)", re.ASCII)
MOST_FLOAT32: Final = 3.4e38
_BREAK: Final = re.compile(r"\r?\n|\\r\\n|\\n")
_LINE: Final = re.compile(r"[A-Za-z0-9+/]{64}")
"""The end of a line of base64, as mail (76 characters) and PEM (64) have them."""

LINE_CHARS: Final = 64
LINES_OF_BASE64: Final = r"[A-Za-z0-9+/]{64}(?:\r?\n|\\)"
"""Occurs in a text with such lines, and in few others."""

_ESCAPE: Final = re.compile("%[0-9A-F]{2}")


_NAMED: Final = {ord(each): html.escape(each) for each in "&<>"}
_IN_HTML: Final = (
    _NAMED,
    _NAMED | {ord(each): html.escape(each) for each in "\"'"},
    *(
        _NAMED | {ord(each): form.format(ord(each)) for each in letters}
        for letters in ("'", "\"'", "\"'+", "\"'+/", "\"'`=/")
        for form in ("&#{};", "&#x{:x};", "&#x{:X};")
    ),
)
_IN_JSON: Final = (
    {ord("/"): "\\/"},
    *(
        {ord(each): form.format(ord(each)) for each in letters}
        for letters in ("&<>", "&<>'", "&<>'+", "&<>'+/")
        for form in ("\\u{:04x}", "\\u{:04X}")
    ),
)
"""What programs write in place of letters, which differs between them."""


def forms_of(secret: str) -> set[str]:
    """Return the forms of a secret. Those of bytes that are not UTF-8 are read as Latin-1, one character for a byte."""
    raw = secret.encode("utf-8", "surrogatepass")
    texts = {secret, *_escaped(secret), *_in_urls(raw), *_in_hex(raw)}
    texts |= {*(secret.replace("\n", between) for between in ("\r\n", " ", "")), *_in_base64(raw)}
    as_bytes = [form.encode("utf-8", "surrogatepass") for form in texts if not form.isascii()]
    as_bytes += [secret.encode(coding, "surrogatepass") for coding in ("utf-16-le", "utf-16-be")]
    return texts.union(form.decode("latin-1") for form in as_bytes)


def _escaped(secret: str) -> Iterator[str]:
    """Yield the secret as HTML, JSON and Python write it, the last two up to three times: errors quote JSON in JSON."""
    in_json = json.dumps(secret)[1:-1]
    once = {secret, in_json, json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1], ascii(secret)[1:-1]}
    twice = {json.dumps(form)[1:-1] for form in once} | {repr(form)[1:-1] for form in once}
    yield from (*once, *twice, *(json.dumps(form)[1:-1] for form in twice))
    yield from (*map(in_json.translate, _IN_JSON), *map(secret.translate, _IN_HTML))


def _in_urls(raw: bytes) -> Iterator[str]:
    everything = "".join(f"%{byte:02X}" for byte in raw)
    forms = {quote(raw), quote(raw, safe=""), quote_plus(raw), everything, quote(quote(raw, safe=""))}
    forms |= {quote(raw, safe=kept) for kept in _KEPT_IN_URLS}
    forms.add(quote_plus(raw, safe="*").replace("~", "%7E"))  # Java, and forms of browsers
    for form in forms:
        yield from (form, _ESCAPE.sub(lambda match: match[0].lower(), form))


def _in_hex(raw: bytes) -> Iterator[str]:
    """Yield the bytes as digits, together or one by one, as dumps and logs write them."""
    for digits in ("{:02x}", "{:02X}"):
        each = [digits.format(byte) for byte in raw]
        yield from (between.join(each) for between in ("", ":", " ", "-", ", ", " 0x", ", 0x", "\\x", "\\\\x"))


def _in_base64(raw: bytes) -> Iterator[str]:
    """Yield what base64 of any data that contains the secret contains, at each of the three alignments.

    Characters at both ends that also depend on what is beside the secret are left out, unless nothing is.
    """
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")
    for before in range(3):
        start, end = (before * 8 + 5) // 6, (before + len(raw)) * 8 // 6
        if end - start >= MIN_BASE64_CHARS:
            form = base64.b64encode(bytes(before) + raw).decode()[start:end]
            yield from (form, form.replace("+", "-").replace("/", "_"), form.replace("/", "\\/"))
            yield from (form.replace("+", escaped) for escaped in ("\\u002b", "\\u002B"))


def numbers_of(secret: str) -> set[Decimal | float]:
    """Return the numbers that a secret of digits can become. A short one would be found among many numbers."""
    if _NUMBER.fullmatch(secret) is None:
        return set()
    exact = Decimal(secret)
    found: set[Decimal | float] = {exact, float(exact)}
    if abs(exact) < MOST_FLOAT32:
        found.add(float(struct.unpack("f", struct.pack("f", exact))[0]))
    signed = {sign * number for number in found for sign in (1, -1) if math.isfinite(number)}
    return {number for number in signed if len(f"{Decimal(number).normalize():f}".strip("-")) >= MIN_NUMBER_CHARS}


def has_lines(text: str | bytes) -> bool:
    """Return False for most texts that have no lines of base64, and for none that has some, also inside JSON."""
    if len(text) <= LINE_CHARS:
        return False
    return ("\n" in text or "\\n" in text) if isinstance(text, str) else (b"\n" in text or b"\\n" in text)


def unwrapped(text: str) -> tuple[str, list[int]]:
    """Join lines of base64. Return the text, and in turn its place and its length for each break that is gone."""
    pieces, gone, end, length = list[str](), list[int](), 0, 0
    for found in _BREAK.finditer(text):
        start, stop = found.span()
        if start - end >= LINE_CHARS and _LINE.fullmatch(text, start - LINE_CHARS, start):
            pieces.append(text[end:start])
            length += start - end
            gone += (length, stop - start)
            end = stop
    return ("".join((*pieces, text[end:])), gone) if gone else (text, gone)
