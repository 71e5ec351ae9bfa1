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

_NUMBER: Final = re.compile(r"[+-]?(?:\d++(?:\.\d++)?|\.\d++)", re.ASCII)
MOST_FLOAT32: Final = 3.4e38
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
    texts = {secret, *_escaped(secret), *_in_urls(raw), raw.hex(), raw.hex().upper()}
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
    for form in {quote(raw), quote(raw, safe=""), quote_plus(raw), everything, quote(quote(raw, safe=""))}:
        yield from (form, _ESCAPE.sub(lambda match: match[0].lower(), form))


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
            yield from (form, form.replace("+", "-").replace("/", "_"))


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
