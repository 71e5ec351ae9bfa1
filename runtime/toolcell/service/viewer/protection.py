"""What stands between the pages and other sites: headers of every answer, the names we answer to, and forms.

A form, or anything else that changes something, is obeyed only if our own page sent it: the browser says so, and it
carries the token of the visitor's session.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
MAX_FORM_BYTES: Final = 1 << 20
MAX_FIELDS: Final = 2000
FORM_TYPE: Final = "application/x-www-form-urlencoded"
TOKEN_HEADER: Final = "x-csrf-token"
TOKEN_FIELD: Final = "csrf"


class ProtectedPages:
    """Adds the headers to every answer, and answers only to names that are ours.

    A page of another site can have its own name point to this address. Then the browser takes our pages for that
    site's; the name in `Host` tells. No names: every name is ours.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if self._hosts and host.lower() not in self._hosts:
            text = (
                f"this server does not answer to the name {host[:100]!r}; use one of {', '.join(sorted(self._hosts))}"
            )
            await PlainTextResponse(text, 421)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class RefusedForm(Exception):
    """A form that no page of ours sent, or that is not a form."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def form_token(secret: bytes, session: str) -> str:
    return hmac.new(secret, b"form:" + session.encode(), hashlib.sha256).hexdigest()


async def read_form(request: Request, token: str) -> dict[str, str]:
    """Return the fields of a form that our page sent.

    Raises:
        RefusedForm: another page sent it, its token is wrong, or it is too large.
    """
    check_origin(request)
    fields = parse_fields(request, await _body(request))
    given = request.headers.get(TOKEN_HEADER) or fields.pop(TOKEN_FIELD, "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        raise RefusedForm(403, "this form is not from a page of this session; load the page again")
    return fields


def check_origin(request: Request) -> None:
    """Refuse what another site sent.

    Our pages send no referrer, so browsers say `Origin: null` for their plain forms; they all send `Sec-Fetch-Site`
    where the connection is one that they trust.

    Raises:
        RefusedForm: another site sent it.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        raise RefusedForm(403, "another site sent this form")
    origin = request.headers.get("origin")
    own = f"://{request.headers.get('host', '')}"
    if origin not in (None, "null") and not (origin or "").endswith(own):
        raise RefusedForm(403, "another site sent this form")


def parse_fields(request: Request, body: bytes) -> dict[str, str]:
    """Return the fields of a form; of fields with one name the last.

    Raises:
        RefusedForm: it is not a form.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
        raise RefusedForm(415, f"a form has the content type {FORM_TYPE}")
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as exc:
        raise RefusedForm(400, "the form cannot be read: want UTF-8 and at most 2000 fields") from exc


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_FORM_BYTES:
            raise RefusedForm(413, f"the form is larger than {MAX_FORM_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
