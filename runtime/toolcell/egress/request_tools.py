"""`RequestTools`: the tools with which scripts of a runtime send requests and install packages."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import anyio

from toolcell.calls.arguments import ArgumentChecker
from toolcell.calls.call import Call, Feature, Features
from toolcell.calls.uploads import Upload
from toolcell.config import Limits, Policy
from toolcell.egress.allowed_requests import AllowedRequests
from toolcell.egress.failures import CONNECT, LIMIT, PROTOCOL, refused
from toolcell.egress.overrides import head_of
from toolcell.egress.packages import IndexRules, PackageIndex, ScriptPython, described, find_wheels, prepare_pip
from toolcell.egress.request import HttpRequest, read_request, sent_url
from toolcell.egress.rules import SAFE, Allow, label_set
from toolcell.egress.run_requests import RunRequests
from toolcell.egress.sending import Sender
from toolcell.errors import PackageError, SandboxUnavailable, ToolError
from toolcell.tools import (
    Origin,
    RegisteredTool,
    RunContext,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolResult,
    ToolSpec,
)
from toolcell_bridge.wire.messages import HTTP, HTTP_READ, INSTALL_PACKAGE, PART_BYTES

MAX_RESOLVERS: Final = 2
"""Resolvers of one runtime that work at once."""

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
    made = spec.compile()
    return RegisteredTool(spec, _AsReceived(spec.definition, "off", "forbid"), made.aliases, made.identity)


class Destinations(Feature):
    """Notes, for the record, where a call sends something, and the names of secrets in it."""

    def __init__(self, of: Callable[[Mapping[str, Any]], Mapping[str, Sequence[str]]]) -> None:
        self._of = of

    def admitted(self, call: Call, /) -> None:
        """Note it, if the call is made now and somebody records it."""
        if call.refusal is None and call.features.call_started and not call.is_collected:
            call.note(**{name: list(texts) for name, texts in self._of(call.args).items() if texts})


class RequestTools:
    """The tools of one runtime, and their connections. Used in one event loop."""

    def __init__(self, allowed: AllowedRequests, index: PackageIndex, of_index: IndexRules, limits: Limits) -> None:
        """`of_index`: where packages are looked for. `limits`: of runs that have none of their own."""
        self._allowed, self._index, self._of_index, self._limits = allowed, index, of_index, limits
        self._sender = Sender(allowed)
        self._runs: weakref.WeakKeyDictionary[object, RunRequests] = weakref.WeakKeyDictionary()
        general = ToolOptions(listed=False, callable_from=frozenset({Origin.CODE}), timeout_s=math.inf)
        self._http = _tool(
            ToolSpec(
                definition=ToolDefinition(HTTP, "Sends an HTTP request of a library of the script.", _HTTP_SCHEMA),
                invoke=self._send,
                options=general,
                source=allowed,
                choose=self._choose,
                features=Features([Destinations(self._sent_to)]),
            )
        )
        read = dataclasses.replace(general, read_only=True, idempotent=True)
        self._read_tool = _tool(
            ToolSpec(
                definition=ToolDefinition(HTTP_READ, "Returns more of the body of an answer.", _READ_SCHEMA),
                invoke=self._read,
                options=read,
                source=allowed,
            )
        )
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
                source=allowed,
                choose=self._choose_install,
                features=Features([Destinations(self._searched)]),
            )
        )
        self._forms: dict[tuple[int, bool, bool], RegisteredTool] = {}

    @property
    def tools(self) -> Sequence[RegisteredTool]:
        """That every run of a script has, and nobody is told of."""
        return (self._http, self._read_tool, self._install_tool)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule.host for rule in self._allowed.rules))

    @property
    def rules(self) -> Sequence[Mapping[str, Any]]:
        """For the record: every rule, with names of secrets and never their values."""
        of_index = self._index.rules if self.installable else ()
        return [rule.to_plain() for rule in (*self._allowed.rules, *of_index)]

    @property
    def installable(self) -> tuple[str, ...]:
        """Which packages scripts may install, as a model is told."""
        return tuple(self._index.requirements)

    @property
    def options(self) -> Sequence[ToolOptions]:
        """What is known about requests of each rule; those that write have the same labels."""
        return [self._form(rule, "GET").options for rule in self._allowed.rules]

    async def open(self) -> None:
        """Prepare pip: the first script that installs something would wait for that."""
        if self.installable:
            await prepare_pip()

    async def aclose(self) -> None:
        for run in [*self._runs.values()]:
            await run.aclose()

    # What a request is: a call that reads or writes, and perhaps one that somebody has to approve

    def _choose(self, args: Any, run: RunContext | None) -> RegisteredTool | ToolResult:
        """Return the tool for a request, with the options of its rule; or why it is refused."""
        try:
            request = read_request(args if isinstance(args, Mapping) else {})
            rule = self._allowed.judge(head_of(request))
            is_shown = rule.needs_approval(request.method) or (run is not None and bool(run.features.approves))
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

    def _sent_to(self, args: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        try:
            return self._allowed.sent_to(head_of(read_request(args)))
        except ToolError:
            return {}

    def _searched(self, _args: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        rules = self._index.rules
        names = sorted({name for rule in rules for name in rule.header_secrets})
        return {"hosts": [rule.name for rule in rules], "secret_names": names}

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
        call = context.call
        request = read_request(call.args)
        rule = self._allowed.judge(head_of(request))
        if self._form(rule, request.method).options != call.options:
            raise refused(f"{request}: a hook changed the request to one that other rules hold for; it was not sent")
        upload, can_keep = self._upload_of(call.run, request), call.run.scope.requests is not None
        return await self._sender.send(request, rule, self._of_run(call.run), upload, can_keep=can_keep)

    def _upload_of(self, run: RunContext, request: HttpRequest) -> Upload | None:
        if request.upload is None:
            return None
        requests = run.scope.requests
        if requests is None or (found := requests.uploads.get(request.upload)) is None:
            raise ToolError(f"{request}: there is no upload {request.upload!r:.100}", code="invalid_arguments")
        return found

    def _choose_install(self, args: Any, _run: RunContext | None) -> RegisteredTool | ToolResult:
        try:
            self._index.requirement_for(args.get("package") if isinstance(args, Mapping) else None)
        except ToolError as exc:
            return ToolResult.fail(exc.message, code=exc.code)
        return self._install_tool

    async def _install(self, context: ToolContext) -> dict[str, Any]:
        args = context.call.args
        requirement, python = self._index.requirement_for(args.get("package")), ScriptPython.of(args)
        run = self._of_run(context.call.run)
        run.count_request()
        try:
            wheels = await find_wheels(
                self._index,
                requirement,
                python,
                egress=self._of_index,
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
                with self._sender.failures(name):
                    made = await body.read(min(size, PART_BYTES))
        finally:
            if not made and run.rests.pop(name, None) is not None:
                with anyio.CancelScope(shield=True):
                    await body.aclose()
        return made


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
