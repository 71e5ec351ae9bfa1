"""`Egress`: the requests that scripts of a runtime may send, and the tools that send them."""

from __future__ import annotations

import dataclasses
import math
import os
import ssl
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, Self, TypeGuard

import anyio

from toolcell.config import Limits, Policy
from toolcell.egress.answers import AnswerBody, Inflater, inflater_for
from toolcell.egress.connector import GuardedBackend, exchange, tls_context
from toolcell.egress.echoes import Echoes
from toolcell.egress.failures import CERTIFICATE, CONNECT, LIMIT, PROTOCOL, REFUSED, RESET, TIMEOUT, refused
from toolcell.egress.overrides import check_long_form, check_override, destinations, head_of
from toolcell.egress.packages import PackageIndex, ScriptPython, described, find_wheels, prepare_pip
from toolcell.egress.request import HttpRequest, filled_body, read_request, sent_headers, sent_url
from toolcell.egress.resolver import AddressRules, Resolver, SystemResolver, checked_addresses
from toolcell.egress.rules import PLACEHOLDER, SAFE, Allow, RuleBook
from toolcell.egress.streams import httpcore
from toolcell.egress.urls import Target
from toolcell.errors import PackageError, SandboxUnavailable, ToolError, UsageError
from toolcell.support import TokenBucket, quiet_loggers
from toolcell.tools import (
    CODE,
    ArgumentChecker,
    RegisteredTool,
    RunContext,
    Secrets,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolResult,
    ToolSpec,
    Upload,
    check_kind,
    compile_tool,
)
from toolcell_bridge import HTTP, HTTP_READ, INSTALL_PACKAGE, PART_BYTES

DEFAULT_TIMEOUT_S: Final = 60.0
"""To connect, and between two pieces of an answer, when the library does not say."""

MAX_CONNECTIONS: Final = 100
"""Connections of one run."""
MAX_OF_ALL: Final = 500
"""Connections of all runs of a runtime. A host program often may have 1024 open files."""
KEPT_CONNECTIONS: Final = 20
KEPT_S: Final = 30.0

MAX_RESOLVERS: Final = 2
"""Resolvers of one runtime that work at once."""

MAX_RESTS: Final = 64
"""Answers of one run that are being read at once."""

_TELLING = ("httpcore.connection", "httpcore.http11", "httpcore.proxy")
"""At level DEBUG, httpcore logs whole headers, and these have secrets."""

_HTTP_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "method": {"type": "string"},
        "url": {"type": "string"},
        "headers": {"type": "array"},
        "body": {},
        "upload": {},
        "timeout_s": {},
    },
    "required": ["method", "url"],
}
_READ_SCHEMA: Final = {
    "type": "object",
    "properties": {"rest": {"type": "string"}, "size": {"type": "integer"}, "start": {"type": "integer"}},
    "required": ["rest", "size"],
}
_INSTALL_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "package": {"type": "string"},
        "installed": {"type": "object"},
        "python": {"type": "string"},
        "machine": {"type": "string"},
    },
    "required": ["package", "python", "machine"],
}


class Egress:
    """Where scripts may send HTTP requests. Without a rule that allows it, no request is sent.

        Egress(Allow("api.github.com", secrets={"Authorization": "Bearer {TOKEN}"}), secrets=Secrets({"TOKEN": token}))

    Scripts never have a secret: they may write `{TOKEN}`, and the host puts the value in its place.
    """

    def __init__(
        self,
        *rules: Allow,
        secrets: Mapping[str, str] | None = None,
        resolver: Resolver | None = None,
        packages: Sequence[str] | PackageIndex = (),
    ) -> None:
        """`resolver`: looks up hosts in place of the system. `packages`: what scripts may install.

        Raises:
            UsageError: a rule is none, or names a secret that there is not.
        """
        for rule in rules:
            check_kind("Egress: each rule", rule, Allow, cure='write Allow("api.example.com")')
        self._secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
        for name, value in self._secrets.items():
            if not PLACEHOLDER.fullmatch(f"{{{name}}}") or not (value.isascii() and value.isprintable()):
                raise UsageError(f"Egress: the secret {name!r:.80} needs a name like API_TOKEN, and a line of ASCII")
        self.index = packages if isinstance(packages, PackageIndex) else PackageIndex(packages)
        for rule in (*rules, *self.index.rules):
            if missing := sorted((rule.header_secrets | rule.body_secrets) - self._secrets.keys()):
                raise UsageError(f"Allow({rule.host!r}): Egress(secrets=) has no {missing[0]!r:.80}")
        self.rules = rules
        self._book = RuleBook(rules)
        self.addresses: AddressRules = self._book
        """Decides which addresses the hosts of the rules may have."""
        self.resolver = resolver
        """Looks up hosts; None for the system's."""
        self.echoes = Echoes(self._secrets)
        """Finds its secrets."""
        self._paces = [TokenBucket(1 / rule.rate, max(1.0, rule.rate)) if rule.rate else None for rule in rules]
        self._lock = threading.Lock()

    @classmethod
    def of_texts(cls, allow: Sequence[str], secrets: Sequence[str] = (), packages: Sequence[str] = ()) -> Self:
        """Return the rules of a command line or a file. Secrets are variables of this process's environment.

        `allow`: what `Allow.parse` reads. `secrets`: such as `api.example.com=Authorization: Bearer {TOKEN}`.
        `packages`: what scripts may install.

        Raises:
            UsageError: a text is wrong, or a variable is not set.
        """
        rules, values = [Allow.parse(text) for text in allow], dict[str, str]()
        for text in secrets:
            host, equals, header = text.partition("=")
            name, colon, template = header.partition(":")
            names: list[str] = PLACEHOLDER.findall(template)
            if not (equals and colon and names):
                form = "HOST=HEADER: TEXT WITH {NAME}"
                raise UsageError(f"a secret is written {form!r}, and NAME is a variable; not {text!r:.100}")
            given = zip(rules, allow, strict=True)
            if not (found := [rule for rule, own in given if host.strip() in (own.strip(), rule.host, rule.name)]):
                raise UsageError(f"secret {text!r:.100}: no rule is about {host.strip()!r}")
            for each in names:
                if not os.environ.get(each):
                    raise UsageError(f"secret {text!r:.100}: the environment variable {each} is not set")
                values[each] = os.environ[each]
            for rule in found:
                own = {**rule.headers, name.strip(): template.strip()}
                rules[rules.index(rule)] = dataclasses.replace(rule, secrets=own)
        return cls(*rules, secrets=values, packages=packages)

    def tools_for(self, limits: Limits) -> RequestTools:
        """Return the tools of one runtime. `limits`: of runs that have none of their own."""
        return RequestTools(self, limits)

    async def addresses_of(self, target: Target) -> list[str]:
        """Return the checked addresses of a host.

        Raises:
            ToolError: an address is refused, or the host is not known.
        """
        return await checked_addresses(self._book, self.resolver or SystemResolver(), target.host, target.port)

    @property
    def labels(self) -> tuple[frozenset[str], frozenset[str]]:
        """Data-flow labels of all rules: where requests go, and what answers hold."""
        sends = frozenset(rule.sends for rule in self.rules)
        return sends, frozenset[str]().union(*(label_set(rule.reads) for rule in self.rules))

    def for_index(self) -> Egress:
        """Return where packages are looked for: nothing else may be reached from there."""
        return Egress(*self.index.rules, secrets=self._secrets, resolver=self.resolver)

    def judge(self, request: HttpRequest) -> Allow:
        """Return the rule that allows a request.

        Raises:
            ToolError: none does.
        """
        rule = self._book.judge(request.method, request.target)
        check_override(request)
        for place in destinations(request):
            if self._book.judge(request.method, place) is not rule:
                raise refused(f"{request}: the header Destination leads to where another rule holds, {place}")
        return rule

    def judge_unasked(self, request: HttpRequest) -> Allow:
        """Do the same for a request that nobody can be asked about.

        Raises:
            ToolError: no rule allows it, or somebody would have to approve it.
        """
        rule = self.judge(request)
        if rule.needs_approval(request.method):
            raise refused(f"{request}: somebody has to approve it, and only requests of scripts are asked about")
        return rule

    def filled(
        self, request: HttpRequest, rule: Allow, long_bytes: int | None = None
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Return body and headers of a request as they are sent. `long_bytes`: size of a body that is elsewhere."""
        body = filled_body(request, rule, self._secrets)
        return body, sent_headers(request, rule, self._secrets, len(body) if long_bytes is None else long_bytes)

    async def wait_for_turn(self, rule: Allow, most_s: float) -> None:
        """Wait for the next turn of a rule with a rate.

        Raises:
            ToolError: it is `most_s` away or more; it is not taken.

        Cancellation: the turn is given back. A script could otherwise take all turns of the others.
        """
        bucket = next(pace for each, pace in zip(self.rules, self._paces, strict=True) if each is rule)
        if bucket is None:
            return
        with self._lock:
            now = time.monotonic()
            if (wait_s := bucket.wait_s(now)) >= most_s:
                text = f"{rule.host} may get {rule.rate:g} requests a second, and the next turn is {wait_s:.1f} s away"
                raise ToolError(text, code=LIMIT, retryable=True)
            bucket.take(now)
        try:
            await anyio.sleep(wait_s)
        except BaseException:
            with self._lock:
                bucket.give_back(time.monotonic())
            raise

    def network(self, connections: anyio.CapacityLimiter) -> GuardedBackend:
        """Return what connects to the addresses that the rules allow. `connections`: how many there may be."""
        return GuardedBackend(self._book, self.resolver, connections)

    def __repr__(self) -> str:
        return f"Egress({', '.join(repr(rule.host) for rule in self.rules)})"


class RunRequests:
    """The requests of one run: how many, how many bytes, and the answers that are being read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests = self._bytes = self._count = 0
        self._id = os.urandom(4).hex()
        self.rests: dict[str, AnswerBody] = {}
        self.wheels: dict[str, IO[bytes]] = {}
        """In files: a script may have many found, and read none."""
        self.pool: httpcore.AsyncConnectionPool | None = None
        """Its own: what a server sends too much, or knows of a connection, is not for another run."""

    def count_request(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            ToolError: it is one too many.
        """
        most = self._limits.egress_requests
        if self._requests >= most:
            raise ToolError(f"this run may send {most} requests (egress_requests), and has sent them", code=LIMIT)
        self._requests += 1

    def count_bytes(self, count: int) -> None:
        """Count bytes of a body.

        Raises:
            ToolError: they are too many.
        """
        self._bytes += count
        if self._bytes > (most := self._limits.egress_bytes):
            text = f"the requests of this run may send and receive {most} bytes together (egress_bytes)"
            raise ToolError(text, code=LIMIT)

    @property
    def bytes_left(self) -> int:
        """What may still be sent and received."""
        return max(0, self._limits.egress_bytes - self._bytes)

    async def keep(self, body: AnswerBody) -> str:
        """Keep the rest of an answer; return its name, which no other run gives: a repair gets answers of two runs."""
        if len(self.rests) >= MAX_RESTS:
            oldest = next(iter(self.rests))
            await self.rests.pop(oldest).aclose()
        self._count += 1
        name = f"answer-{self._id}-{self._count}"
        self.rests[name] = body
        return name

    def keep_wheel(self, content: bytes, digest: str) -> str:
        """Keep a wheel until it is read; return its name, by which other runs have the same content.

        Raises:
            ToolError: there is no room for it.
        """
        name = digest
        while name in self.wheels:  # another thread of the script reads it
            name += "+"
        try:
            file = self.wheels[name] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with its last part, or the run)
            file.write(content)
            file.flush()
        except OSError as exc:
            raise ToolError(f"the host cannot keep a wheel: {exc.strerror}", code=LIMIT, retryable=True) from None
        return name

    def part_of_wheel(self, name: str, start: int, size: int) -> bytes:
        """Return a part of a wheel. It is dropped with its last."""
        file = self.wheels[name]
        file.seek(start)
        part = file.read(size)
        if not file.read(1):
            self.wheels.pop(name).close()
        return part

    async def aclose(self) -> None:
        """Drop what is left."""
        rests, wheels, self.rests, self.wheels = self.rests, self.wheels, {}, {}
        for body in rests.values():
            await body.aclose()
        for file in wheels.values():
            file.close()
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.aclose()


class _AsReceived(ArgumentChecker):
    """Arguments that the tool itself reads."""

    def check_plain(self, args: dict[str, Any]) -> dict[str, Any] | None:
        """Return a copy, with the URL as it is sent: nobody who approves it or reads the log takes it for another.

        None: there are more than the tool reads, which would be shown, too.
        """
        if not args.keys() <= self._plain:
            return None
        return {**args, "url": sent_url(args["url"])} if "url" in args else args.copy()


def _tool(spec: ToolSpec) -> RegisteredTool:
    made = compile_tool(spec)
    return RegisteredTool(spec, _AsReceived(spec.definition, "off", "forbid"), made.aliases, made.identity)


class RequestTools:
    """The tools of one runtime, and their connections. Used in one event loop."""

    def __init__(self, egress: Egress, limits: Limits) -> None:
        self._egress, self._limits = egress, limits
        self._runs: weakref.WeakKeyDictionary[object, RunRequests] = weakref.WeakKeyDictionary()
        self._connections = anyio.CapacityLimiter(MAX_OF_ALL)
        general = ToolOptions(listed=False, callable_from=frozenset({CODE}), timeout_s=math.inf)
        self._http = _tool(
            ToolSpec(
                definition=ToolDefinition(HTTP, "Sends an HTTP request of a library of the script.", _HTTP_SCHEMA),
                invoke=self._send,
                options=general,
                source=egress,
                choose=self._choose,
            )
        )
        read = dataclasses.replace(general, read_only=True, idempotent=True)
        self._read_tool = _tool(
            ToolSpec(
                definition=ToolDefinition(HTTP_READ, "Returns more of the body of an answer.", _READ_SCHEMA),
                invoke=self._read,
                options=read,
                source=egress,
            )
        )
        index = egress.index
        install = dataclasses.replace(
            read,
            requires_approval=index.approval,
            sends=frozenset({rule.sends for rule in index.rules}),
            max_concurrency=MAX_RESOLVERS,
        )
        self._install_tool = _tool(
            ToolSpec(
                definition=ToolDefinition(INSTALL_PACKAGE, "Finds the wheels of a package.", _INSTALL_SCHEMA),
                invoke=self._install,
                options=install,
                source=egress,
                choose=self._choose_install,
            )
        )
        self._forms: dict[tuple[int, bool, bool], RegisteredTool] = {}

    @property
    def tools(self) -> Sequence[RegisteredTool]:
        """That every run of a script has, and nobody is told of."""
        return (self._http, self._read_tool, self._install_tool)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where requests may go, as a model is told."""
        return tuple(dict.fromkeys(rule.host for rule in self._egress.rules))

    @property
    def installable(self) -> tuple[str, ...]:
        """Which packages scripts may install, as a model is told."""
        return tuple(self._egress.index.requirements)

    @property
    def options(self) -> Sequence[ToolOptions]:
        """What is known about requests: of each rule, those that read and those that write."""
        return [self._form(rule, method).options for rule in self._egress.rules for method in ("GET", "POST")]

    async def open(self) -> None:
        """Prepare pip: the first script that installs something would wait for that."""
        if self.installable:
            await prepare_pip()

    async def aclose(self) -> None:
        """Close what is left of runs."""
        for run in [*self._runs.values()]:
            await run.aclose()

    # What a request is: a call that reads or writes, and perhaps one that somebody has to approve

    def _choose(self, args: Any, run: RunContext | None) -> RegisteredTool | ToolResult:
        """Return the tool for a request, with the options of its rule; or why it is refused."""
        try:
            request = read_request(args if isinstance(args, Mapping) else {})
            rule = self._egress.judge(head_of(request))
            is_shown = rule.needs_approval(request.method) or (run is not None and run.dry_run is not None)
            if request.upload is not None and is_shown:
                text = f"{request}: its body is too long to be shown to those who decide about it: {request.upload}"
                raise ToolError(text, code=LIMIT)
        except ToolError as exc:
            return ToolResult.fail(exc.message, code=exc.code, retryable=exc.retryable)
        return self._form(rule, request.method)

    def _form(self, rule: Allow, method: str) -> RegisteredTool:
        """Return the tool as it is for requests of this rule and method."""
        is_safe, needs_approval = method in SAFE, rule.needs_approval(method)
        key = id(rule), is_safe, needs_approval
        if key not in self._forms:
            options = dataclasses.replace(
                self._http.options,
                read_only=is_safe,
                idempotent=is_safe,
                requires_approval=needs_approval,
                sends=frozenset({rule.sends}),
                reads=label_set(rule.reads),
                preview=None if is_safe else _collected,
                blocking=False,
            )
            spec = dataclasses.replace(self._http.spec, options=options)
            tool = self._http
            self._forms[key] = RegisteredTool(spec, tool.checker, tool.aliases, tool.identity)
        return self._forms[key]

    def _of_run(self, run: RunContext) -> RunRequests:
        requests = run.scope.requests
        key = run.state if requests is None else requests  # the scripts of an agent have one state
        if (found := self._runs.get(key)) is None:
            found = self._runs[key] = RunRequests(run.limits if isinstance(run.limits, Limits) else self._limits)
            if requests is not None:
                requests.at_end.append(found.aclose)
        return found

    # Sending

    async def _send(self, context: ToolContext) -> dict[str, Any]:
        call, egress = context.call, self._egress
        request = read_request(call.args)
        rule = egress.judge(head_of(request))
        if self._form(rule, request.method).options != call.options:
            raise refused(f"{request}: a hook changed the request to one that other rules hold for; it was not sent")
        run = self._of_run(call.run)
        upload = self._upload_of(call.run, request)
        body, headers = egress.filled(request, rule, None if upload is None else upload.size)
        content: Any = body
        size = len(request.body)  # with placeholders: what a script is told does not depend on secrets
        await check_long_form(request, upload)
        if upload is not None:
            size, content = upload.size, _Pieces(upload)
        if rule.max_bytes is not None and size > rule.max_bytes:
            raise ToolError(f"{request}: the body has {size} bytes, and may have {rule.max_bytes}", code=LIMIT)
        timeout_s = min(request.timeout_s or DEFAULT_TIMEOUT_S, 86_400.0)
        run.count_request()
        run.count_bytes(size)
        await egress.wait_for_turn(rule, timeout_s)
        can_keep = call.run.scope.requests is not None
        if run.pool is None:
            run.pool = self._new_pool(KEPT_CONNECTIONS if can_keep else 0)
        with self._failures(request):
            response = await self._exchange(run.pool, request, headers, content, timeout_s)
            return await self._answer(request, rule, run, response, can_keep=can_keep)

    def _upload_of(self, run: RunContext, request: HttpRequest) -> Upload | None:
        if request.upload is None:
            return None
        requests = run.scope.requests
        if requests is None or (found := requests.uploads.get(request.upload)) is None:
            raise ToolError(f"{request}: there is no upload {request.upload!r:.100}", code="invalid_arguments")
        return found

    def _new_pool(self, kept: int) -> httpcore.AsyncConnectionPool:
        """Return connections of which so many stay open for the next request."""
        return httpcore.AsyncConnectionPool(
            ssl_context=tls_context(),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=kept,
            keepalive_expiry=KEPT_S,
            network_backend=self._egress.network(self._connections),
        )

    @staticmethod
    async def _exchange(
        pool: httpcore.AsyncConnectionPool,
        request: HttpRequest,
        headers: list[tuple[bytes, bytes]],
        content: Any,
        timeout_s: float,
    ) -> httpcore.Response:
        target = request.target
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=target.scheme.encode(),
                host=target.host.encode(),
                port=target.port,
                target=f"{target.path}{target.query}".encode(),
            ),
            headers=headers,
            content=content,
            extensions={"timeout": timeouts},
        )
        return await exchange(pool, sent)

    async def _answer(
        self, request: HttpRequest, rule: Allow, run: RunRequests, response: httpcore.Response, *, can_keep: bool
    ) -> dict[str, Any]:
        """Return the answer with the first part of its body, and keep the rest."""
        is_over = False
        try:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers]
            headers = [each for each in headers if each[0].lower() not in ("transfer-encoding", "connection")]
            inflater = None
            length = next((value for name, value in headers if name.lower() == "content-length"), "")
            if request.method != "HEAD":
                headers, inflater = self._readable(headers)
            elif self._egress.echoes and any(name.lower() == "content-encoding" for name, _ in headers):
                headers = [each for each in headers if each[0].lower() != "content-length"]
            received = 0

            def count(size: int) -> None:
                nonlocal received
                received += size
                run.count_bytes(size)
                if rule.max_bytes is not None and received > rule.max_bytes:
                    raise ToolError(f"{request}: the answer has more than {rule.max_bytes} bytes", code=LIMIT)

            pieces = aiter(response.aiter_stream())
            body = AnswerBody(pieces, response.aclose, count=count, echoes=self._egress.echoes, inflater=inflater)
            # Whether it is short is not decided by a length that has secrets in it
            is_short = length.isdigit() and (bool(self._egress.echoes) or int(length) <= PART_BYTES)
            first = await body.read(PART_BYTES, fill=is_short or not can_keep)
            if body.failure is not None and not can_keep:
                raise body.failure
            is_over = body.is_empty
            rest = None if is_over or not can_keep else await run.keep(body)
            if is_over and length and request.method != "HEAD" and self._egress.echoes:
                headers.append(("Content-Length", str(len(first))))
            is_over = is_over or rest is not None
        finally:
            if not is_over:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        echoes = self._egress.echoes
        return {
            "status": response.status,
            "reason": echoes.clean_text(response.extensions.get("reason_phrase", b"").decode("latin-1")),
            "version": response.extensions.get("http_version", b"HTTP/1.1").decode("latin-1").removeprefix("HTTP/"),
            "headers": [[echoes.clean_text(name), echoes.clean_text(value)] for name, value in headers],
            "body": first,
            "rest": rest,
        }

    def _readable(self, headers: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], Inflater | None]:
        """Return the headers of a body that is looked through for secrets, and what decompresses it."""
        if not self._egress.echoes:
            return headers, None
        inflater = inflater_for(", ".join(value for name, value in headers if name.lower() == "content-encoding"))
        gone = {"content-length", "content-encoding"} if inflater is not None else {"content-length"}
        return [each for each in headers if each[0].lower() not in gone], inflater

    # Packages

    def _choose_install(self, args: Any, _run: RunContext | None) -> RegisteredTool | ToolResult:
        try:
            self._egress.index.requirement_for(args.get("package") if isinstance(args, Mapping) else None)
        except ToolError as exc:
            return ToolResult.fail(exc.message, code=exc.code)
        return self._install_tool

    async def _install(self, context: ToolContext) -> dict[str, Any]:
        args, egress = context.call.args, self._egress
        index = egress.index
        requirement, python = index.requirement_for(args.get("package")), ScriptPython.of(args)
        run = self._of_run(context.call.run)
        run.count_request()
        try:
            wheels = await find_wheels(
                index,
                requirement,
                python,
                egress=egress.for_index(),
                policy=_policy_of_resolver(context.call.run.scope.runtime),
                most_bytes=run.bytes_left,
            )
        except (SandboxUnavailable, PackageError) as exc:
            raise ToolError(
                f"pip, which finds packages in a sandbox of its own, cannot run: {exc}", code=CONNECT
            ) from exc
        run.count_bytes(sum(wheel.size for wheel in wheels))
        facts = [described(wheel) for wheel in wheels]
        is_read = context.call.run.scope.requests is not None  # else a commit looks whether they are the same
        for fact, wheel in zip(facts, wheels, strict=True):
            fact["rest"] = run.keep_wheel(wheel.data or b"", fact["sha256"]) if is_read else fact["sha256"]
        return {"wheels": facts}

    # Reading on

    async def _read(self, context: ToolContext) -> bytes:
        args = context.call.args
        name, size, start = args.get("rest"), args.get("size"), args.get("start", 0)
        if not isinstance(name, str) or not _is_count(size) or not _is_count(start):
            raise ToolError("http_read takes the name of a rest, and a size from 0", code="invalid_arguments")
        run = self._of_run(context.call.run)
        if name in run.wheels:
            return run.part_of_wheel(name, start, min(size, PART_BYTES))
        body = run.rests.get(name)
        if body is None:
            raise ToolError(
                f"there is no more of {name!r:.40}: it was read or dropped, or is of another run", code=PROTOCOL
            )
        made = b""
        try:
            if size:
                with self._failures(name):
                    made = await body.read(min(size, PART_BYTES))
        finally:
            if not made and run.rests.pop(name, None) is not None:
                with anyio.CancelScope(shield=True):
                    await body.aclose()
        return made

    @contextmanager
    def _failures(self, request: object) -> Iterator[None]:
        """Turn what the network raises into failures of the call, without secrets."""
        echoes = self._egress.echoes
        try:
            with quiet_loggers(*_TELLING):
                yield
        except ToolError as exc:
            code = {"not_permitted": REFUSED, "unavailable": CONNECT}.get(exc.code, exc.code)
            raise ToolError(echoes.clean_text(exc.message), code=code, retryable=exc.retryable) from None
        except httpcore.TimeoutException as exc:
            raise self._failed(request, exc, TIMEOUT) from None
        except (httpcore.ConnectError, OSError) as exc:
            is_unproven = isinstance(exc.__context__, ssl.SSLCertVerificationError)
            raise self._failed(request, exc, CERTIFICATE if is_unproven else CONNECT) from None
        except httpcore.NetworkError as exc:
            raise self._failed(request, exc, RESET) from None
        except httpcore.ProtocolError as exc:
            raise self._failed(request, exc, PROTOCOL) from None

    def _failed(self, request: object, exc: Exception, code: str) -> ToolError:
        kind = type(exc).__name__
        text = self._egress.echoes.clean_text(f"{request}: {kind}{f': {exc}' if str(exc) else ''}")
        return ToolError(text, code=code, retryable=code in (CONNECT, TIMEOUT))


def label_set(given: str | Sequence[str]) -> frozenset[str]:
    """Return labels of which one may be written as a text."""
    return frozenset((given,) if isinstance(given, str) else given)


def _policy_of_resolver(runtime: Any) -> Policy:
    """Return how pip's sandbox is isolated, which is one of this machine's processes. `runtime`: whose script asks."""
    if runtime is None:
        return Policy()
    policy = runtime.policy
    is_alike = runtime.environment.backend.name == "process"
    return Policy(profile=policy.profile, **({"require": policy.require} if is_alike else {}))


def _is_count(given: object) -> TypeGuard[int]:
    return type(given) is int and given >= 0


def _collected(**request: Any) -> dict[str, Any]:
    """Return what a request that a dry run collects is answered with."""
    return {"status": 202, "reason": "Collected", "version": "1.1", "headers": [], "body": b"", "rest": None}


class _Pieces:
    """Reads a long body from its file. No generator: trio warns of those that a broken connection leaves behind."""

    def __init__(self, upload: Upload) -> None:
        self._upload, self._place = upload, 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._upload.file.seek(self._place)
        if not (piece := self._upload.file.read(PART_BYTES)):
            raise StopAsyncIteration
        self._place += len(piece)
        return piece
