"""`Http`: the tool `http_fetch`. What may be fetched is decided in `web/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolcell.builtin.package import ToolPackage, offered
from toolcell.builtin.web.policy import METHODS, WebPolicy
from toolcell.calls.concurrency import run_in_thread
from toolcell.errors import ToolError
from toolcell.support.checks import check_kind, check_one_of
from toolcell.support.lazy import needed
from toolcell.tools import ToolContext, ToolOptions, ToolResult, ToolSpec

if TYPE_CHECKING:
    import httpx

    from toolcell.builtin.web.fetch import Fetcher, Outgoing, Response
    from toolcell.builtin.web.pages import PageText
    from toolcell.egress.resolver import Resolver

MAX_TEXT_CHARS = 8000
TRUNCATED = "\n... (truncated)"

_VALUE = {
    "type": "object",
    "properties": {
        "status": {"type": "integer"},
        "url": {"type": "string", "description": "after redirects"},
        "title": {"type": "string"},
        "body": {"description": "text; bytes of binary data with raw=True"},
        "content_type": {"type": "string"},
        "truncated": {"type": "boolean", "description": "there was more than is in body"},
    },
    "required": ["status", "url", "title", "body", "content_type", "truncated"],
}


class Http(ToolPackage):
    """Fetches URLs of the public web."""

    package = "http"
    extra = "builtin"

    def __init__(
        self,
        policy: WebPolicy | None = None,
        *,
        methods: Sequence[str] = ("GET",),
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Let models fetch what `policy` allows.

        `methods`: with others than GET, the tool also takes `method` and
        `body`, and no longer counts as reading only. `transport`: sends the requests in place of the network.

        Raises:
            UsageError: a method is unknown, or an argument is of another kind.
        """
        check_kind("Http(policy)", policy, WebPolicy, type(None))
        for method in methods:
            check_one_of("Http(methods): each", method, METHODS)
        self._methods = tuple(methods)
        self._fetcher = fetcher(policy, resolver=resolver, transport=transport)

    def _spec(self, name: str, options: ToolOptions) -> ToolSpec:
        options = self._fetcher.policy.labelled(options)
        if self._methods == ("GET",):
            return super()._spec(name, options)
        only_reads = set(self._methods) <= {"GET", "HEAD"}
        options = replace(options, read_only=only_reads, idempotent=only_reads)
        return replace(ToolSpec.of_function(self._with_method, name=name, options=options), source=self)

    @offered(read_only=True, idempotent=True, sends="public", reads="web", returns=_VALUE)
    async def http_fetch(self, ctx: ToolContext, url: str, raw: bool = False) -> ToolResult:
        """Fetch a URL and return its readable text: the article of a web page, or JSON and plain text as they are.

        Args:
            url: An http:// or https:// URL of the public web.
            raw: True returns a page's HTML, or the bytes of a file, in place of the text.
        """
        from toolcell.builtin.web.fetch import Outgoing

        return await self._answer(ctx, url, raw, Outgoing())

    async def _with_method(
        self, ctx: ToolContext, url: str, raw: bool = False, method: str = "GET", body: str = "", json: bool = False
    ) -> ToolResult:
        """Send an HTTP request and return the answer's readable text: a page's article, or JSON and text as they are.

        Args:
            url: An http:// or https:// URL of the public web.
            raw: True returns a page's HTML, or the bytes of a file, in place of the text.
            method: GET, or another method that this program allows.
            body: Text to send.
            json: The body is JSON.
        """
        from toolcell.builtin.web.fetch import Outgoing

        if method.upper() not in self._methods:
            allowed = ", ".join(self._methods)
            raise ToolError(f"method {method!r:.40} is not allowed; allowed are {allowed}", code="not_permitted")
        content_type = "application/json" if json else "text/plain; charset=utf-8"
        headers = {"Content-Type": content_type} if body else {}
        return await self._answer(ctx, url, raw, Outgoing(method.upper(), headers, body.encode()))

    async def _answer(self, ctx: ToolContext, url: str, raw: bool, outgoing: Outgoing) -> ToolResult:
        from toolcell.builtin.web.pages import read_page

        response = await self._fetcher.fetch(url, outgoing)
        if response.status >= 400:
            again = response.status in (408, 425, 429) or response.status >= 500
            details = {"status": response.status, "url": response.url}
            raise ToolError(f"HTTP {response.status} from {response.url}", retryable=again, details=details)
        page = await run_in_thread(lambda: read_page(response, raw=raw), ctx.call.give_up)
        return _result(response, page, raw)


def _result(response: Response, page: PageText, raw: bool) -> ToolResult:
    if page.kind == "binary" and not raw:
        media_type = response.content_type or "no content type"
        cure = "raw=True gives a script its bytes"
        raise ToolError(f"{response.url} is not text ({media_type}, {len(response.content)} bytes); {cure}")
    body: Any = response.content if page.kind == "binary" else page.text
    value = {
        "status": response.status,
        "url": response.url,
        "title": page.title,
        "body": body,
        "content_type": response.content_type,
        "truncated": response.truncated,
    }
    if isinstance(body, bytes):
        return ToolResult.ok(f"({response.content_type}, {len(body)} bytes)", value=value)
    text, cut = body[:MAX_TEXT_CHARS], response.truncated or len(body) > MAX_TEXT_CHARS
    return ToolResult.ok((text or "(no text)") + (TRUNCATED if cut else ""), value=value)


def fetcher(policy: WebPolicy | None, **parts: Any) -> Fetcher:
    """Return a `Fetcher`.

    Raises:
        UsageError: httpx is not installed.
    """
    needed("httpx", "this tool")
    from toolcell.builtin.web.fetch import Fetcher

    return Fetcher(policy, **parts)
