"""`Fetcher`: one request from URL to body, with every rule of the policy on every hop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

import anyio
import httpcore
import httpx

from toolcell.builtin.web.policy import WebPolicy
from toolcell.calls.values import in_thread_if_large
from toolcell.egress.answers import Inflater
from toolcell.egress.connector import GuardedTransport
from toolcell.egress.echoes import Echoes
from toolcell.egress.failures import PROTOCOL, REFUSED
from toolcell.egress.overrides import check_long_form
from toolcell.egress.request import HttpRequest
from toolcell.egress.resolver import Resolver
from toolcell.egress.urls import Target, parse_url
from toolcell.errors import ToolError
from toolcell.support.daemon_threads import run_sync
from toolcell.support.log import quiet_loggers
from toolcell.support.lru import Lru
from toolcell.support.token_bucket import TokenBucket
from toolcell.tools import ErrorCode

# Read a body up to a bound, also a compressed one: a few kilobytes can decompress to gigabytes.


ACCEPT_ENCODING = "gzip, deflate"
"""What `read_body` decompresses without ever making more than was asked for. Brotli's library cannot do that."""

_COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd", "dcb", "dcz"})


async def read_body(stream: AsyncIterable[bytes], encoding: str, max_bytes: int) -> tuple[bytes, bool]:
    """Read a body of at most `max_bytes` after decompression, piece by piece; the rest is not read.

    Shape: (content, whether there was more, or it ended in the middle). A name that no compression has is ignored:
    servers write `utf-8`, `none` or `aws-chunked` there.

    Raises:
        ToolError: `encoding` is a compression that was not asked for, or the data is damaged.
    """
    names = [name for each in encoding.split(",") if (name := each.strip().lower()) in _COMPRESSIONS]
    if len(names) > 1 or not set(names) <= {"gzip", "x-gzip", "deflate"}:
        raise ToolError(f"the server sent content-encoding {encoding!r:.80}, and was asked for {ACCEPT_ENCODING}")
    inflater = Inflater() if names else None
    content, received = bytearray(), 0
    async for piece in stream:
        received += len(piece)
        if inflater is None:
            content += piece
        else:
            inflater.feed(piece)
            while len(content) <= max_bytes and (made := inflater.next_piece()):
                content += made
        is_endless = inflater is not None and received > max_bytes + 1024  # empty members of gzip become nothing
        if is_endless or len(content) > max_bytes:
            return bytes(content[:max_bytes]), True
    return bytes(content), inflater is not None and not inflater.is_whole


# robots.txt: which paths of a host a program may fetch. Source: RFC 9309. Pure; `fetch` gets and keeps the files.


MAX_ROBOTS_BYTES = 500 * 1024
"""RFC 9309, section 2.5."""
MAX_RULES = 5000
MAX_STARS = 16
"""Wildcards in one rule; with more of them it is ignored. Each costs one search of the path."""


@dataclass(frozen=True, slots=True)
class RobotsRules:
    """The rules for one user agent, as (allowed, pattern)."""

    rules: tuple[tuple[bool, str], ...] = ()

    def allows(self, path: str) -> bool:
        """True when the longest pattern that matches allows the path, or none matches."""
        if path == "/robots.txt":
            return True
        path = _normal(path)
        hits = [(len(pattern), allowed) for allowed, pattern in self.rules if _matches(pattern, path)]
        return max(hits)[1] if hits else True


EVERYTHING = RobotsRules()
NOTHING = RobotsRules(((False, "/"),))


def parse_robots(text: str, agent: str) -> RobotsRules:
    """Return the rules that a robots.txt has for `agent`, a product name such as `toolcell`."""
    own: list[tuple[bool, str]] = []
    others: list[tuple[bool, str]] = []
    is_named = False
    agents: set[str] = set()
    in_rules = False
    for key, value in _lines(text):
        if key == "user-agent":
            agents = set() if in_rules else agents
            agents.add(value.lower())
            in_rules = False
            is_named = is_named or value.lower() == agent.lower()
        elif key in ("allow", "disallow"):
            in_rules = True
            if not value or value.count("*") > MAX_STARS:
                continue
            rule = key == "allow", _normal(value)
            if agent.lower() in agents and len(own) < MAX_RULES:
                own.append(rule)
            if "*" in agents and len(others) < MAX_RULES:
                others.append(rule)
    return RobotsRules(tuple(own if is_named else others))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        if colon:
            yield key.strip().lower(), value.strip()


def _normal(path: str) -> str:
    return quote(unquote(path), safe="/*$?=&:@!'()+,;~")


def _matches(pattern: str, path: str) -> bool:
    is_whole = pattern.endswith("$")
    first, *rest = pattern.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    position = len(first)
    for index, piece in enumerate(rest):
        if is_whole and index == len(rest) - 1:
            return len(path) - len(piece) >= position and path.endswith(piece)
        position = path.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return not is_whole or position == len(path)


REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
ROBOTS_AGENT: Final = "toolcell"
ROBOTS_KEPT_S: Final = 3600.0
MAX_HOSTS: Final = 1024
"""Most hosts of which robots.txt and the time of the last request are kept."""

_TELLING = ("httpcore.connection", "httpcore.http11")
"""At level DEBUG, httpcore logs whole headers, and a server may send a credential back in them."""

_BROKEN = (httpcore.ProtocolError, httpx.ProtocolError, httpx.DecodingError)
_UNREACHABLE = (httpcore.NetworkError, httpcore.TimeoutException, httpx.TransportError, OSError)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is asked for besides the URL."""

    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered after all redirects. No credential is in it."""

    status: int
    url: str
    content_type: str
    content: bytes
    """Decompressed; at most `max_body_bytes`."""
    truncated: bool


class HostPace:
    """Spaces out requests to one host. Safe in several threads and event loops."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._buckets: Lru[str, TokenBucket] = Lru(MAX_HOSTS)
        self._lock = threading.Lock()

    def reserve(self, host: str, most_s: float = math.inf) -> float:
        """Take the next turn of `host`; return how many seconds it is away.

        Raises:
            ToolError: it is `most_s` away or more. It is not taken: calls that end before their turn would otherwise
                keep everybody else from the host for as long as they like.
        """
        with self._lock:
            now = self._clock()
            bucket = self._buckets.get(host) or TokenBucket(self._interval_s, 1)
            if (wait_s := bucket.wait_s(now)) >= most_s:
                message = f"too many requests to {host} are waiting: the next turn is {wait_s:.1f} s away"
                raise ToolError(message, code="unavailable", retryable=True)
            self._buckets.put(host, bucket)
            return bucket.take(now)


class Fetcher:
    """Makes requests for a model. Holds no connection: each fetch opens and closes its own."""

    def __init__(
        self,
        policy: WebPolicy | None = None,
        *,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport`: sends the requests in place of the guarded one, and is not closed. For tests."""
        self.policy = policy or WebPolicy()
        self._egress = self.policy.egress
        self._echoes = Echoes({}) if self._egress is None else self._egress.allowed.echoes
        self._resolver = resolver
        self._transport = transport
        self._pace = HostPace(self.policy.interval_s)
        self._robots: Lru[str, tuple[float, RobotsRules]] = Lru(MAX_HOSTS)

    async def fetch(
        self,
        url: str,
        outgoing: Outgoing | None = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> Response:
        """Fetch one URL.

        Raises:
            ToolError: it is not allowed, cannot be reached in time, or is not HTTP. Its text has no credential in it.
        """
        seconds = self.policy.timeout_s if timeout_s is None else timeout_s
        try:
            with anyio.fail_after(seconds):
                async with self._opened() as transport:
                    target = parse_url(url)
                    most = max_bytes or self.policy.max_body_bytes
                    return await self._follow(transport, outgoing or Outgoing(), target, most, check_robots=True)
        except TimeoutError as exc:
            message = self._echoes.clean_text(f"no answer from {url[:200]} in {seconds:g} s")
            raise ToolError(message, code="timeout", retryable=True) from exc
        except ToolError as exc:
            code = {REFUSED: "not_permitted", PROTOCOL: ErrorCode.TOOL_ERROR}.get(exc.code, exc.code)
            raise ToolError(self._echoes.clean_text(exc.message), code=code, retryable=exc.retryable) from None

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[httpx.AsyncBaseTransport]:
        if self._transport is not None:
            yield self._transport
            return
        egress = self._egress
        check = self.policy.check_address if egress is None else egress.allowed.check_address
        transport = GuardedTransport(check, self._resolver or (None if egress is None else egress.allowed.resolver))
        try:
            with quiet_loggers(*_TELLING):
                yield transport
        finally:
            with anyio.CancelScope(shield=True):
                await transport.aclose()

    async def _follow(
        self,
        transport: httpx.AsyncBaseTransport,
        outgoing: Outgoing,
        target: Target,
        max_bytes: int,
        *,
        check_robots: bool,
    ) -> Response:
        """Send a request, and those that redirects ask for; each is checked like the first one."""
        origin = target.origin
        was_sent_elsewhere = False  # from then on, what is asked for is what a server wants, not the caller
        for _ in range(self.policy.max_redirects + 1):
            self.policy.check(outgoing.method, target)
            if check_robots and self.policy.robots and self._egress is None:
                await self._ask_robots(transport, target)
            answer = await self._send(transport, outgoing, target, max_bytes, has_secrets=not was_sent_elsewhere)
            if isinstance(answer, Response):
                return answer
            status, location = answer
            target = parse_url(location, target)
            if target.origin != origin and self._echoes.clean_text(location) != location:
                text = f"{origin} redirects to {target.origin} with a secret in the URL; it is not sent there"
                raise ToolError(text, code="not_permitted")
            outgoing = _redirected(outgoing, status, same_origin=target.origin == origin)
            was_sent_elsewhere |= target.origin != origin
            origin = target.origin
        raise ToolError(f"more than {self.policy.max_redirects} redirects; the last one leads to {target}")

    async def _send(
        self,
        transport: httpx.AsyncBaseTransport,
        outgoing: Outgoing,
        target: Target,
        max_bytes: int,
        *,
        has_secrets: bool,
    ) -> Response | tuple[int, str]:
        """Return the answer, or status and location of a redirect. `has_secrets`: those of its rule are sent."""
        left_s = anyio.current_effective_deadline() - anyio.current_time()
        await anyio.sleep(self._pace.reserve(target.host, left_s))
        fixed = {"User-Agent": self.policy.user_agent, "Accept-Encoding": ACCEPT_ENCODING, "Connection": "close"}
        given = {"Accept": "*/*"} | dict(outgoing.headers) | fixed
        headers, content = [(name.encode(), value.encode()) for name, value in given.items()], outgoing.body
        if self._egress is not None:
            asked = HttpRequest(method=outgoing.method, target=target, headers=tuple(given.items()), body=content)
            rule = self._egress.allowed.judge_unasked(asked)
            await check_long_form(asked, None)
            await self._egress.allowed.wait_for_turn(rule, left_s)
            content, headers = self._egress.allowed.filled(asked, rule if has_secrets else replace(rule, secrets=()))
            if rule.max_bytes is not None:
                max_bytes = min(max_bytes, rule.max_bytes)
        request = httpx.Request(outgoing.method, str(target), headers=headers, content=content or None)
        decoded = httpx.URL(scheme="https", host=target.host).host  # of an international name
        if request.url.host.lower().rstrip(".") not in (target.host, decoded):
            raise ToolError(f"the URL is read differently by different programs: {target}", code="not_permitted")
        try:
            response = await transport.handle_async_request(request)
            try:
                location = response.headers.get("location")
                if response.status_code in REDIRECTS and location is not None:
                    return response.status_code, location
                assert isinstance(response.stream, httpx.AsyncByteStream)
                body, is_cut = await read_body(response.stream, response.headers.get("content-encoding", ""), max_bytes)
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        except _BROKEN as exc:
            raise ToolError(f"{target.origin} did not answer with HTTP: {exc}") from None
        except _UNREACHABLE as exc:
            message = f"{target.origin} cannot be reached: {str(exc) or type(exc).__name__}"
            raise ToolError(message, code="unavailable", retryable=True) from None
        read = partial(self._without_secrets, response, target, body, is_cut)
        return await in_thread_if_large(body, read)

    def _without_secrets(self, response: httpx.Response, target: Target, content: bytes, truncated: bool) -> Response:
        """A server may send back what it was sent."""
        content = self._echoes.clean(content)
        if truncated:
            content = content[: len(content) - self._echoes.held_back(content)]
        content_type = self._echoes.clean_text(response.headers.get("content-type", ""))[:200]
        return Response(response.status_code, self._echoes.clean_text(str(target)), content_type, content, truncated)

    async def _ask_robots(self, transport: httpx.AsyncBaseTransport, target: Target) -> None:
        known = self._robots.get(target.origin)
        if known is None or known[0] < time.monotonic():
            known = time.monotonic() + ROBOTS_KEPT_S, await self._get_robots(transport, target)
            self._robots.put(target.origin, known)
        # In a thread: a server chooses the rules, and whoever asks the path.
        if not await run_sync(known[1].allows, f"{target.path}{target.query}"):
            raise ToolError(f"robots.txt of {target.origin} does not allow {target.path}", code="not_permitted")

    async def _get_robots(self, transport: httpx.AsyncBaseTransport, target: Target) -> RobotsRules:
        """RFC 9309, section 2.3.1: a file that does not exist allows everything, a failing server nothing."""
        url = parse_url("/robots.txt", target)
        response = await self._follow(transport, Outgoing(), url, MAX_ROBOTS_BYTES, check_robots=False)
        if response.status >= 500:
            return NOTHING
        if response.status >= 400:
            return EVERYTHING
        return await run_sync(parse_robots, response.content.decode("utf-8", "replace"), ROBOTS_AGENT)


def _redirected(outgoing: Outgoing, status: int, *, same_origin: bool) -> Outgoing:
    """Return what is sent to where a redirect leads: only 307 and 308 keep method and body."""
    headers = outgoing.headers if same_origin else {}
    if status in (307, 308) and same_origin:
        return outgoing
    if status in (307, 308) and outgoing.body:
        raise ToolError("the server redirects a request with a body to another host; it is not sent there")
    headers = {name: value for name, value in headers.items() if not name.lower().startswith("content-")}
    keeps = status in (307, 308) or outgoing.method == "HEAD"
    return Outgoing(outgoing.method if keeps else "GET", headers)
