"""Find what in a request makes a server see another one than the rules do: another method, in a query or a form, and a
second URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import unquote_plus

import anyio.lowlevel

from toolcell.calls.uploads import Upload
from toolcell.egress.answers import Inflater
from toolcell.egress.failures import refused
from toolcell.egress.request import HttpRequest
from toolcell.egress.rules import header_key
from toolcell.egress.urls import Target, parse_url
from toolcell.errors import ToolError

PARAMETER_OVERRIDES: Final = frozenset({
    "$httpmethod", "$method", "_httpmethod", "_method", "x-http-method", "x-http-method-override", "x-method-override",
})  # fmt: skip
"""Some frameworks take the method from these, in a query, a form or JSON."""

PLAIN_CHARSETS: Final = re.compile(r"utf-?8|(us-)?ascii|iso-?8859-\d+|latin-?1|windows-125\d")
"""In which names are written as in ASCII."""

PIECE_BYTES: Final = 64 * 1024
"""Part of a body that is looked through at once."""

INFLATED_BYTES: Final = 64 * 1024 * 1024
"""Most that a compressed form may become."""

NAME_BYTES: Final = 512
"""More than the longest spelling of a name with its value: it may lie on the border of two pieces."""


def _spelled(name: str, escaped: str) -> str:
    """Return the pattern of a name in small letters. `escaped`: how each may be escaped, with its code in hexadecimal.

    PHP reads a dot as an underscore, servers a hyphen as one, and others leave out a backslash.
    """

    def spellings(letter: str) -> str:
        alike = f"{letter}{letter.upper()}" + ("._-" if letter in "_-" else "")
        return "|".join([*map(re.escape, alike), *(escaped.format(ord(each)) for each in alike)])

    return "".join(rf"\\?(?:{spellings(letter)})" for letter in name)


def _override(escaped: str) -> str:
    return f"(?:{'|'.join(_spelled(name, escaped) for name in sorted(PARAMETER_OVERRIDES))})"


_CHARSET: Final = re.compile(r"""charset\s*=\s*["']?([^"';,\s]*)""")
_BLANK: Final = r"(?:[\s+]++|%20|%0[9a-d])*+"
_LEADING: Final = re.compile(rf"\A{_BLANK}".encode(), re.IGNORECASE)
_OVERRIDE: Final = f"{_BLANK}{_override('%{:02x}')}"
_IN_JSON: Final = _override(r"\\u{:04x}")
_END: Final = rf"{_BLANK}(?:(?:\0|%00)[^=&;]*)?"
"""PHP reads a name up to a zero."""
_PARAMETER: Final = re.compile(rf"[&;](?=[\s+._$hx\\]|%[0-9a-f]{{2}}){_OVERRIDE}{_END}(?:=([^&;]*))?(?![^&;])".encode())
_NAMES: Final = {
    "parts": re.compile(rf"""name\*?\s*+=\s*+(?:[\w-]*+'[^'\r\n]*+')?["']?{_OVERRIDE}(?![\w-])""".encode()),
    "json": re.compile(rf'"{_IN_JSON}"\s*(?::|\Z)'.encode()),
}
_PART: Final = re.compile(rb"form-data[^\r\n]*+(?:\r?\n[ \t][^\r\n]*+)*+")
"""The line that names a part of a form, and what it goes on with."""
_HIDDEN: Final = re.compile(rb"""(?<!file)name(?:\*\d|\*?\s*+=\s*+["']?=\?)""")
"""A name in several pieces (RFC 2231) or in an encoded word (RFC 2047)."""


def check_override(request: HttpRequest) -> None:
    """Check that neither query nor form asks for another method, as some frameworks let them.

    Raises:
        ToolError: one does. Method, approval and dry run would be decided for a request that the server does not see.
    """
    _check_parameters(request, request.target.query.removeprefix("?").encode())
    kinds = _forms(request)
    if _is_compressed(request):
        return  # `check_long_form` looks through it
    if "parameters" in kinds:
        _check_parameters(request, request.body)
    for kind in kinds & _NAMES.keys():
        _check_names(request, kind, request.body)


def destinations(request: HttpRequest) -> list[Target]:
    """Return where WebDAV's MOVE and COPY write, besides the URL.

    Raises:
        ToolError: it is not a URL.
    """
    places = [value for name, value in request.headers if header_key(name) == "destination"]
    try:
        return [parse_url(each, request.target) for each in places]
    except ToolError as exc:
        raise refused(f"{request}: the header Destination: {exc.message}") from None


def head_of(request: HttpRequest) -> HttpRequest:
    """Return what is judged of a request at once; `check_long_form` looks through a long body in pieces."""
    return replace(request, body=b"") if len(request.body) > PIECE_BYTES else request


async def check_long_form(request: HttpRequest, upload: Upload | None) -> None:
    """Check the same of a form that is long, compressed, or was uploaded.

    Raises:
        ToolError: it asks for another method, or is damaged.
    """
    kinds = _forms(request)
    if not kinds or (upload is None and len(request.body) <= PIECE_BYTES and not _is_compressed(request)):
        return
    parameters, before = b"", b""
    pieces = _pieces(request, upload)
    for piece in _inflated(request, pieces) if _is_compressed(request) else pieces:
        if "parameters" in kinds:
            parameters = _check_more_parameters(request, parameters + piece)
        for kind in kinds & _NAMES.keys():
            _check_names(request, kind, before + piece)
        before = piece[-NAME_BYTES:]
        await anyio.lowlevel.checkpoint()
    _check_parameters(request, parameters)


def _pieces(request: HttpRequest, upload: Upload | None) -> Iterator[bytes]:
    for place in range(0, len(request.body) if upload is None else upload.size, PIECE_BYTES):
        if upload is None:
            yield request.body[place : place + PIECE_BYTES]
        else:
            upload.file.seek(place)
            yield upload.file.read(PIECE_BYTES)


def _inflated(request: HttpRequest, pieces: Iterator[bytes]) -> Iterator[bytes]:
    inflater, size = Inflater(), 0
    for piece in pieces:
        inflater.feed(piece)
        try:
            while made := inflater.next_piece():
                size += len(made)
                yield made
                if size > INFLATED_BYTES:
                    raise refused(f"{request}: its form becomes more than {INFLATED_BYTES} bytes; send it as it is")
        except ToolError as exc:
            raise refused(f"{request}: {exc.message}") from None


def _check_more_parameters(request: HttpRequest, text: bytes) -> bytes:
    """Check the parameters that end in a text, and return what matters of the last one, which may go on."""
    end = max(text.rfind(b"&"), text.rfind(b";")) + 1
    _check_parameters(request, text[:end])
    last = _LEADING.sub(b"", text[end:])
    if len(last) < NAME_BYTES:
        return last
    _check_parameters(request, last)
    return b"x"  # its name is known not to ask for a method, whatever follows


def _forms(request: HttpRequest) -> set[str]:
    """Return what its body may be to a server: "parameters", "parts" and "json". Some read one without a type, too.

    Raises:
        ToolError: it is a form that cannot be looked through.
    """
    found: set[str] = set()
    for each in _values(request, "content-type"):
        form = "parts" if "multipart" in each else "parameters" if "form" in each else ""
        if (form or "json" in each) and (len(coded := _codings(request)) > 1 or coded[:1] not in ([], ["gzip"])):
            raise refused(f"{request}: its body is compressed in another way than gzip; send it as it is")
        if (form or "json" in each) and not all(map(PLAIN_CHARSETS.fullmatch, _CHARSET.findall(each))):
            raise refused(f"{request}: the charset of its body is not one of those that are allowed; write it in UTF-8")
        found |= {form or ("json" if "json" in each else "other" if each.partition(";")[0].strip() else "parameters")}
    return (found or {"parameters"}) - {"other"}


def _is_compressed(request: HttpRequest) -> bool:
    return "gzip" in _codings(request)


def _codings(request: HttpRequest) -> list[str]:
    named = ",".join(_values(request, "content-encoding")).split(",")
    return [each.strip() for each in named if each.strip() not in ("", "identity")]


def _values(request: HttpRequest, key: str) -> list[str]:
    """Return the values of a header, in small letters."""
    return [value.lower() for name, value in request.headers if header_key(name) == key]


def _check_parameters(request: HttpRequest, text: bytes) -> None:
    for match in _PARAMETER.finditer(b"&" + text.lower()):
        value = unquote_plus((match[1] or b"")[:80].decode("latin-1")).strip().upper()
        if value != request.method:
            raise refused(f"{request}: a parameter asks for the method {value!r:.40}; send that one")


def _check_names(request: HttpRequest, kind: str, text: bytes) -> None:
    text = text.lower()
    if any(_HIDDEN.search(part[0]) for part in _PART.finditer(text)) if kind == "parts" else b"\0" in text:
        raise refused(f"{request}: names in its body are encoded in a way that is not allowed; write them in UTF-8")
    if _NAMES[kind].search(text):
        raise refused(f"{request}: its body asks for another method, as {kind} of it say; send that one")
