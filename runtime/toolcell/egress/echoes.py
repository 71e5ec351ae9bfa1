"""Take secrets out of what servers send back: a server may echo what it was sent, and write it in another way."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote, quote_plus

MIN_CODED: Final = 6
"""Characters of a base64 form that are looked for; fewer are in nearly every text."""

LONGEST_FORM: Final = len("\\u002f")
"""Bytes of one character."""

MIN_REACH: Final = 256
"""Bytes of a secret in its longest form, at least, for which the end of a piece waits."""

_IN_FORMS: Final = bytes([0, *range(0x20, 0x7F)])
"""What secrets and their forms consist of; a line break ends all of them."""


class Echoes:
    """Finds the secrets of one `Egress`, and puts their placeholders in their place."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        found = {form: f"{{{name}}}".encode() for name, value in secrets.items() for form in forms(value)}
        self._forms = sorted(found.items(), key=lambda each: len(each[0]), reverse=True)
        longest = max(map(len, secrets.values()), default=0) * LONGEST_FORM
        self._reach = max(MIN_REACH, 1 << longest.bit_length())  # which does not tell how long the secret is

    def __bool__(self) -> bool:
        return bool(self._forms)

    def clean(self, data: bytes) -> bytes:
        """Return data without secrets."""
        for form, mark in self._forms:
            if form in data:
                data = data.replace(form, mark)
        return data

    def clean_text(self, text: str) -> str:
        """Do the same for a text."""
        return self.clean(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def held_back(self, data: bytes) -> int:
        """Return how many bytes at the end have to wait for what follows: a secret may be among them both.

        Bytes that could be in any secret decide, not those of these secrets: who sees what waits, and chooses what a
        server sends, could guess a secret letter by letter.
        """
        tail = data[-self._reach :] if self._forms else b""
        return len(tail) - len(tail.rstrip(_IN_FORMS))


def forms(secret: str) -> Iterator[bytes]:
    """Yield every way in which a secret is looked for."""
    raw = secret.encode()
    yield raw
    yield from (secret.encode("utf-16-le"), secret.encode("utf-16-be"))
    yield from (json.dumps(secret)[1:-1].encode(), json.dumps(secret, ensure_ascii=False)[1:-1].encode())
    yield json.dumps(secret)[1:-1].replace("/", "\\/").encode()
    for escaped in ("&<>", "&<>'", "&<>'+", "&<>'+/"):
        for form in ("\\u{:04x}", "\\u{:04X}"):
            yield "".join(form.format(ord(each)) if each in escaped else each for each in secret).encode()
    for escaped in ("\"'+", "\"'+/", "\"'`=/"):
        for form in ("&#{};", "&#x{:x};", "&#x{:X};"):
            letters = [form.format(ord(each)) if each in escaped else html.escape(each) for each in secret]
            yield "".join(letters).encode()
    yield from (html.escape(secret).encode(), html.escape(secret, quote=False).encode())
    everything = "".join(f"%{byte:02X}" for byte in raw)
    twice = quote(quote(secret, safe=""))
    for coded in (quote(secret), quote(secret, safe=""), quote_plus(secret), everything, twice):
        yield coded.encode()
        yield _lower_escapes(coded).encode()
    yield from (raw.hex().encode(), raw.hex().upper().encode())
    for shift in range(3):
        # Its place among the bytes that are encoded together decides the letters; those it shares with others differ.
        coded = base64.b64encode(b"\0" * shift + raw).decode()
        inner = coded[(0, 2, 3)[shift] : len(coded) if (shift + len(raw)) % 3 == 0 else -4 + (shift + len(raw)) % 3]
        if len(inner) >= MIN_CODED:
            yield inner.encode()
            yield inner.replace("+", "-").replace("/", "_").encode()


def _lower_escapes(coded: str) -> str:
    pieces = coded.split("%")
    return pieces[0] + "".join(f"%{each[:2].lower()}{each[2:]}" for each in pieces[1:])
