"""Read a request that a guest asks for, and decide which headers are sent. Pure; trusts nothing in it."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote_plus

import anyio.lowlevel

from toolcell.egress.answers import acceptable
from toolcell.egress.failures import refused
from toolcell.egress.rules import PLACEHOLDER, Allow
from toolcell.egress.urls import Target, parse_url
from toolcell.errors import ToolError
from toolcell.tools import Upload

MAX_HEADERS: Final = 200
MAX_HEADER_BYTES: Final = 64 * 1024

OVERRIDES: Final = frozenset({
    "x-http-method-override", "x-http-method", "x-method-override", "x-original-url", "x-rewrite-url",
    "x-original-method", "x-forwarded-path", "x-override-url", "x-original-uri", "x-forwarded-uri",
    "x-forwarded-method", "x-http-verb", "x-forwarded-host", "x-forwarded-server", "forwarded", "x-host",
    "x-original-host", "x-http-host-override",
})  # fmt: skip
"""Some servers take method, path or host from these in place of the request's own."""

PARAMETER_OVERRIDES: Final = frozenset({"_method", "_httpmethod", "x-http-method-override"})
"""Some frameworks take the method from these, in a query, a form or JSON."""

PLAIN_CHARSETS: Final = re.compile(r"utf-?8|(us-)?ascii|iso-?8859-\d+|latin-?1|windows-125\d")
"""In which names are written as in ASCII."""

MAX_PLACEHOLDERS: Final = 32
"""Secrets in one header or body: each may be much longer than its placeholder."""

PIECE_BYTES: Final = 256 * 1024
"""Of a body that is looked through, at once."""

NAME_BYTES: Final = 512
"""More than the longest spelling of a name with its value: it may lie on the border of two pieces."""

_DROPPED: Final = frozenset({"keep-alive", "te", "trailer", "expect"})
"""About the connection, which is the host's own."""

_PIECES: Final = frozenset({"range", "if-range", "request-range", "x-ms-range"})
"""Not sent where secrets are in play: one that is echoed would not be found in the pieces of an answer."""

_REFUSED: Final = frozenset({"upgrade", "http2-settings", "alt-used"})

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

Header = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One request as it was asked for, checked for its form."""

    method: str
    target: Target
    headers: tuple[Header, ...]
    body: bytes
    upload: str | None = None
    """What stands for a long body."""
    timeout_s: float | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.target.origin}{self.target.path}"


def read_request(args: Mapping[str, Any]) -> HttpRequest:
    """Return the request that a guest asks for.

    Raises:
        ToolError: its form is wrong, or its URL is written in a way that programs read differently.
    """
    method, url, timeout_s = args.get("method"), args.get("url"), args.get("timeout_s")
    body, upload = args.get("body", b""), args.get("upload")
    if not isinstance(method, str) or not isinstance(url, str):
        raise _malformed("method and url are texts")
    if not isinstance(body, bytes) or not (upload is None or isinstance(upload, str)):
        raise _malformed("body is bytes, and upload the name of an upload or None")
    if body and upload is not None:
        raise _malformed("it has a body or an upload, not both")
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf
    ):
        raise _malformed(f"timeout_s is a number of seconds or None, not {timeout_s!r:.40}")
    try:
        target = parse_url(url)
    except ToolError as exc:
        raise refused(exc.message) from None
    return HttpRequest(
        method=method,
        target=target,
        headers=_headers(args.get("headers", [])),
        body=body,
        upload=upload,
        timeout_s=timeout_s,
    )


def sent_url(url: Any) -> Any:
    """Return a URL in the form in which it is sent; what cannot be sent stays as it is."""
    try:
        return str(parse_url(url)) if isinstance(url, str) else url
    except ToolError:
        return url


def _malformed(message: str) -> ToolError:
    return ToolError(f"a request is not well formed: {message}", code="invalid_arguments")


def _headers(given: Any) -> tuple[Header, ...]:
    if not isinstance(given, list) or len(given) > MAX_HEADERS:
        raise _malformed(f"headers is a list of at most {MAX_HEADERS} [name, value]")
    found, size = list[Header](), 0
    for each in given:
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(text, str) for text in each):
            raise _malformed("each header is [name, value], two texts")
        name, value = each
        if not _TOKEN.fullmatch(name):
            raise refused(f"the name of a header is not one: {name!r:.80}")
        if _BAD_VALUE.search(value):
            raise refused(f"the header {name} has a line break or another control character")
        try:
            size += len(name) + len(value.encode("latin-1"))
        except UnicodeEncodeError:
            raise refused(f"the header {name} has characters that no header can have") from None
        found.append((name, value.strip(" \t")))
    if size > MAX_HEADER_BYTES:
        raise refused(f"the headers have {size} bytes, and may have {MAX_HEADER_BYTES}")
    return tuple(found)


def check_override(request: HttpRequest) -> None:
    """Check that neither query nor form asks for another method, as some frameworks let them.

    Raises:
        ToolError: one does. Method, approval and dry run would be decided for a request that the server does not see.
    """
    _check_parameters(request, request.target.query.removeprefix("?").encode())
    kinds = _forms(request)
    if "parameters" in kinds:
        _check_parameters(request, request.body)
    for kind in kinds & _NAMES.keys():
        _check_names(request, kind, request.body)


def destinations(request: HttpRequest) -> list[Target]:
    """Return where WebDAV's MOVE and COPY write, besides the URL.

    Raises:
        ToolError: it is not a URL.
    """
    places = [value for name, value in request.headers if _key(name) == "destination"]
    try:
        return [parse_url(each, request.target) for each in places]
    except ToolError as exc:
        raise refused(f"{request}: the header Destination: {exc.message}") from None


def head_of(request: HttpRequest) -> HttpRequest:
    """Return what is judged of a request at once; `check_long_form` looks through a long body in pieces."""
    return replace(request, body=b"") if len(request.body) > PIECE_BYTES else request


async def check_long_form(request: HttpRequest, upload: Upload | None) -> None:
    """Check the same of a form that is long, or was uploaded.

    Raises:
        ToolError: it asks for another method.
    """
    kinds = _forms(request)
    if not kinds or (upload is None and len(request.body) <= PIECE_BYTES):
        return
    parameters, before = b"", b""
    for piece in _pieces(request, upload):
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
    types = _values(request, "content-type")
    for each in types:
        form = "parts" if "multipart" in each else "parameters" if "form" in each else ""
        if form and any(coding not in ("", "identity") for coding in _values(request, "content-encoding")):
            raise refused(f"{request}: its form is compressed; send it as it is")
        if form and not all(map(PLAIN_CHARSETS.fullmatch, _CHARSET.findall(each))):
            raise refused(f"{request}: the charset of its form is not one of those that are allowed; write it in UTF-8")
        found |= {form or ("json" if "json" in each else "other" if each.partition(";")[0].strip() else "parameters")}
    return (found or {"parameters"}) - {"other"}


def _values(request: HttpRequest, key: str) -> list[str]:
    """Return the values of a header, in small letters."""
    return [value.lower() for name, value in request.headers if _key(name) == key]


def _spelled(name: str, escaped: str) -> str:
    """Return the pattern of a name in small letters. `escaped`: how each may be escaped, with its code in hexadecimal.

    PHP reads a dot as an underscore, and others leave out a backslash.
    """

    def spellings(letter: str) -> str:
        alike = f"{letter}{letter.upper()}" + ("." if letter == "_" else "")
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
_PARAMETER: Final = re.compile(rf"[&;](?=[\s+._hx\\]|%[0-9a-f]{{2}}){_OVERRIDE}{_END}(?:=([^&;]*))?(?![^&;])".encode())
_NAMES: Final = {
    "parts": re.compile(rf"""name\*?\s*=\s*(?:[\w-]*'[^'\r\n]*')?["']?{_OVERRIDE}(?![\w-])""".encode()),
    "json": re.compile(rf'"{_IN_JSON}"\s*(?::|\Z)'.encode()),
}


def _check_parameters(request: HttpRequest, text: bytes) -> None:
    for match in _PARAMETER.finditer(b"&" + text.lower()):
        value = unquote_plus((match[1] or b"")[:80].decode("latin-1")).strip().upper()
        if value != request.method:
            raise refused(f"{request}: a parameter asks for the method {value!r:.40}; send that one")


def _check_names(request: HttpRequest, kind: str, text: bytes) -> None:
    if _NAMES[kind].search(text.lower()):
        raise refused(f"{request}: its body asks for another method, as {kind} of it say; send that one")


def sent_headers(request: HttpRequest, rule: Allow, secrets: Mapping[str, str], size: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that are sent, with the secrets of the rule. `size`: bytes of the body.

    Raises:
        ToolError: a header is the host's to set, or has the placeholder of a secret that is not for this host.
    """
    authority = request.target.origin.partition("://")[2]
    own = {_key(name) for name in rule.headers}
    found = [("Host", authority)]
    for name, value in request.headers:
        if secrets and _key(name) in _PIECES:
            continue
        if _is_passed_on(request, name, value, size) and _key(name) not in own:
            if secrets and _key(name) == "accept-encoding":
                value = acceptable(value)
            found.append((name, filled_header(request, rule, secrets, name, value)))
    for name, template in rule.headers.items():
        _check_is_private(request, rule)
        found.append((name, PLACEHOLDER.sub(lambda match: secrets[match[1]], template)))
    has_no_body = request.method in ("GET", "HEAD", "OPTIONS", "DELETE")
    if size or not has_no_body:
        found.append(("Content-Length", str(size)))
    if size and has_no_body:  # a server that does not read it would take it for a request, which no rule has seen
        found.append(("Connection", "close"))
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found]


def _key(name: str) -> str:
    """Return the name of a header as many servers read it: `_` and `-` are one."""
    return name.lower().replace("_", "-")


def _is_passed_on(request: HttpRequest, name: str, value: str, size: int) -> bool:
    """Return False for a header that the host sets itself.

    Raises:
        ToolError: it says something else than what the host sets, or is refused.
    """
    key = _key(name)
    match key:
        case "host":
            target = request.target
            default = f":{target.port}"
            if value.lower().rstrip(".") not in {(host := target.origin.partition("://")[2]), f"{host}{default}"}:
                raise refused(f"{request}: the header Host says {value!r:.80}, which is not the host of the URL")
        case "content-length":
            size = len(request.body) or size  # as it was asked for, with placeholders
            if value != str(size):
                raise refused(f"{request}: the header Content-Length says {value!r:.40}, and the body has {size} bytes")
        case "transfer-encoding":
            if value.lower() not in ("chunked", "identity"):
                raise refused(f"{request}: the header Transfer-Encoding {value!r:.40} is refused")
        case "connection":
            if not {each.strip().lower() for each in value.split(",")} <= {"close", "keep-alive", "te", ""}:
                raise refused(f"{request}: the header Connection {value!r:.40} is refused")
        case _ if key in _REFUSED or key in OVERRIDES or key.startswith("proxy-"):
            raise refused(f"{request}: the header {name} is refused")
        case _:
            return key not in _DROPPED
    return False


def _check_is_private(request: HttpRequest, rule: Allow) -> None:
    if request.target.scheme != "https" and not rule.is_plain:
        raise refused(
            f"{request}: a secret would be sent over http, where everybody on the way can read it; "
            f'Allow("http://{rule.name}") allows that'
        )


def filled_header(request: HttpRequest, rule: Allow, secrets: Mapping[str, str], name: str, value: str) -> str:
    """Return the value of a header with secrets in the place of their placeholders.

    Raises:
        ToolError: a secret is not for this host.
    """
    if "{" in value:
        return _filled(request, rule, secrets, rule.header_secrets, f"the header {name}", value)
    scheme, space, coded = value.partition(" ")
    if space and scheme.lower() == "basic":
        try:
            plain = base64.b64decode(coded.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return value
        filled = _filled(request, rule, secrets, rule.header_secrets, f"the header {name}", plain)
        return value if filled == plain else f"{scheme} {base64.b64encode(filled.encode()).decode()}"
    return value


def filled_body(request: HttpRequest, rule: Allow, secrets: Mapping[str, str]) -> bytes:
    """Return the body with the secrets that the rule lists for bodies.

    Raises:
        ToolError: it has too many, or they would be sent in clear.
    """
    body = request.body
    marks = {f"{{{name}}}".encode(): secrets[name].encode() for name in rule.body_secrets}
    if count := sum(map(body.count, marks)):
        _check_is_private(request, rule)
        _check_count(request, "the body", count)
    for mark, secret in marks.items():
        body = body.replace(mark, secret)
    return body


def _check_count(request: HttpRequest, where: str, count: int) -> None:
    if count > MAX_PLACEHOLDERS:
        raise refused(f"{request}: {where} has {count} placeholders of secrets, and may have {MAX_PLACEHOLDERS}")


def _filled(
    request: HttpRequest, rule: Allow, secrets: Mapping[str, str], allowed: frozenset[str], where: str, text: str
) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in secrets:
            return match[0]  # text with braces
        if match[1] not in allowed:
            raise refused(f"{request}: {where} has {match[0]}, and no rule gives that secret to {request.target.host}")
        _check_is_private(request, rule)
        return secrets[match[1]]

    _check_count(request, where, sum(name in secrets for name in PLACEHOLDER.findall(text)))
    return PLACEHOLDER.sub(value, text)
