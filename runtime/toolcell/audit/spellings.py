"""The spellings of a registered secret: escaped, quoted or encoded, as it may stand in a script or a log."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from typing import Final


def forms_of(secret: str) -> set[str]:
    """Return the spellings of a secret: as it is; escaped for JSON, Python or a URL, up to three times; in base64."""
    raw = secret.encode("utf-8", "surrogatepass")
    quoted = {urllib.parse.quote(raw), urllib.parse.quote(raw, safe=""), urllib.parse.quote_plus(raw)}
    in_json = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    in_python = {repr(secret)[1:-1], ascii(secret)[1:-1]}
    once = {secret, *in_json, *in_python}
    twice = {json.dumps(form)[1:-1] for form in once} | {repr(form)[1:-1] for form in once}
    thrice = {json.dumps(form)[1:-1] for form in twice}  # an error message quotes arguments in JSON
    return {
        raw.decode("latin-1"),
        raw.hex(),
        raw.hex().upper(),
        *once,
        *twice,
        *thrice,
        *quoted,
        *(_ESCAPE.sub(lambda match: match[0].lower(), form) for form in quoted),
        *_base64_forms(raw),
    }


_ESCAPE: Final = re.compile("%[0-9A-F]{2}")


def _base64_forms(raw: bytes) -> set[str]:
    """Return what base64 of any data that contains the secret contains, at each of the three alignments.

    Characters at both ends that also depend on what is beside the secret are left out, unless nothing is.
    """
    forms: set[str] = set()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        forms.add(encode(raw).decode().rstrip("="))
        for before in range(3):
            encoded = encode(bytes(before) + raw).decode().rstrip("=")
            start = (before * 8 + 5) // 6
            end = (before + len(raw)) * 8 // 6
            if end - start >= MIN_BASE64_CHARS:
                forms.add(encoded[start:end])
    return forms


MIN_BASE64_CHARS: Final = 5
"""Fewer characters would be found in many texts."""
