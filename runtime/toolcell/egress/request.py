"""Read a request that a guest asks for, and decide which headers are sent. Pure; trusts nothing in it."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from toolcell.egress.failures import refused
from toolcell.egress.rules import PLACEHOLDER, Allow, header_key, is_of_connection
from toolcell.egress.urls import Target, parse_url
from toolcell.errors import ToolError

MAX_HEADERS: Final = 200
MAX_HEADER_BYTES: Final = 64 * 1024

ORDINARY: Final = frozenset({
    "anthropic-beta", "anthropic-version", "api-key", "apikey", "authorization", "baggage", "cache-control", "cookie",
    "date", "depth", "destination", "digest", "dnt", "from", "idempotency-key", "if", "last-event-id",
    "lock-token", "origin", "overwrite",
    "pragma", "prefer", "priority", "range", "referer", "repr-digest", "request-range", "signature", "signature-input",
    "traceparent", "tracestate", "upgrade-insecure-requests", "user-agent", "want-digest", "want-repr-digest",
    "x-amz-content-sha256", "x-amz-date", "x-amz-security-token", "x-amz-user-agent", "x-api-key", "x-auth-token",
    "x-correlation-id", "x-csrf-token", "x-github-api-version", "x-goog-api-client", "x-goog-api-key",
    "x-ms-blob-type", "x-ms-client-request-id", "x-ms-date", "x-ms-range", "x-ms-version", "x-request-id",
    "x-requested-with", "x-xsrf-token",
})  # fmt: skip
"""Headers that every rule allows: none of them names a second place, another method or who is asking for whom."""

ORDINARY_FAMILIES: Final = ("accept", "content-", "if-", "mcp-", "openai-", "sec-ch-", "sec-fetch-", "x-stainless-")

MAX_PLACEHOLDERS: Final = 32
"""Secrets in one header or body: each may be much longer than its placeholder."""

_DROPPED: Final = frozenset({"keep-alive", "te", "trailer", "expect"})
"""About the connection, which is the host's own."""

_PIECES: Final = frozenset({"range", "if-range", "request-range", "x-ms-range"})
"""Not sent where secrets are in play: one that is echoed would not be found in the pieces of an answer."""

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


def sent_headers(request: HttpRequest, rule: Allow, secrets: Mapping[str, str], size: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that are sent, with the secrets of the rule. `size`: bytes of the body.

    Raises:
        ToolError: a header is the host's to set, or has the placeholder of a secret that is not for this host.
    """
    authority = request.target.origin.partition("://")[2]
    own = {header_key(name) for name in rule.added_headers}
    found = [("Host", authority)]
    for name, value in request.headers:
        if header_key(name) in own or (secrets and header_key(name) in _PIECES):
            continue
        if _is_passed_on(request, rule, name, value, size):
            if secrets and header_key(name) == "accept-encoding":
                value = "identity"  # how long a compressed answer is tells what is in it
            found.append((name, filled_header(request, rule, secrets, name, value)))
    for name, template in rule.added_headers.items():
        _check_is_private(request, rule)
        found.append((name, PLACEHOLDER.sub(lambda match: secrets[match[1]], template)))
    has_no_body = request.method in ("GET", "HEAD", "OPTIONS", "DELETE")
    if size or not has_no_body:
        found.append(("Content-Length", str(size)))
    if size and has_no_body:  # a server that does not read it would take it for a request, which no rule has seen
        found.append(("Connection", "close"))
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found]


def _is_passed_on(request: HttpRequest, rule: Allow, name: str, value: str, size: int) -> bool:
    """Return False for a header that the host sets itself.

    Raises:
        ToolError: it says something else than what the host sets, or the rule does not allow it.
    """
    key = header_key(name)
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
        case _ if key in _DROPPED:
            pass
        case _ if key in ORDINARY or key.startswith(ORDINARY_FAMILIES) or rule.allows_header(key):
            return True
        case _ if is_of_connection(key):
            raise refused(f"{request}: the header {name} is refused")
        case _:
            raise refused(
                f"{request}: the header {name} is not among those that every request may have; "
                f'Allow("{rule.host}", headers=["{name}"]) would allow it, or --allow "{rule.host} +{name}"'
            )
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


class _Noted(dict[str, str]):
    """Secrets that take note of which of them are asked for."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        super().__init__(secrets)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)


def secret_names(request: HttpRequest, rule: Allow, secrets: Mapping[str, str]) -> list[str]:
    """Return the names of the secrets that go into a request.

    Raises:
        ToolError: it has one that is not for this host, so it is not sent.
    """
    noted, own = _Noted(secrets), {header_key(name) for name in rule.added_headers}
    for name, value in request.headers:
        if header_key(name) not in own:
            filled_header(request, rule, noted, name, value)
    in_body = (name for name in rule.body_secrets if f"{{{name}}}".encode() in request.body)
    added = (name for template in rule.added_headers.values() for name in PLACEHOLDER.findall(template))
    return sorted({*noted.names, *in_body, *added})


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
