"""What a caller can ask for, as a table: methods of the tenant's `Runtime` and of its sessions."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from toolcell.config import Limits, check_decisions
from toolcell.errors import SessionError, UsageError
from toolcell.run import RunKwargs, RunOptions, SessionRunKwargs
from toolcell.runtime import Runtime
from toolcell.service.authentication import check_may
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.socket.arguments import KEPT_OFFERS, Arguments
from toolcell.service.socket.failures import ToolsetForgotten
from toolcell.service.socket.remote_tools import CallTeller, ServedRequest, remote_registry
from toolcell.service.socket.values import plain_record, referred
from toolcell.service.tenants import Tenant
from toolcell.sessions import Session
from toolcell.support import daemon_threads
from toolcell.support.lru import Lru
from toolcell.tools import RunContext, ToolRegistry


class CallerSession:
    """Session of one principal. It ends with the caller's session, and everything in it ends then."""

    def __init__(self, principal: Principal, tenant: Tenant) -> None:
        self.principal, self.tenant = principal, tenant
        self.runtime: Runtime = tenant.runtime
        self._toolsets: Lru[int, ToolRegistry] = Lru(KEPT_OFFERS)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        for number in [*self._sessions]:
            with contextlib.suppress(UsageError):
                await self.close_session(number)

    # Tools

    async def offer(self, number: int | None, tools: Any, with_own: bool) -> None:
        """Take note of the caller's tools.

        Raises:
            RegistrationError, UsageError: they cannot be registered.
        """
        if number is None:
            raise UsageError("a toolset has a number")
        self._toolsets.put(number, await remote_registry(tools, self.tenant.registry, with_own=with_own))

    def tools(self, given: Arguments) -> ToolRegistry | None:
        """Return the tools of a request; None: those of the tenant.

        Raises:
            ToolsetForgotten: there is no such toolset.
        """
        number = given.take("toolset", int)
        if number is None:
            return None
        if (found := self._toolsets.use(number)) is None:
            raise ToolsetForgotten(f"there is no toolset {number}; offer it again")
        return found

    # Options of requests

    def context(self, request: ServedRequest, given: Arguments) -> RunContext:
        who: dict[str, Any] = given.who()
        context = RunContext(run_id=os.urandom(16).hex(), user_id=self.principal.subject, **who)
        request.tell("began", run_id=context.run_id)
        notes_calls = given.take("notes_calls", bool, default=False)
        return context.having(CallTeller(request)) if notes_calls else context

    def common(self, request: ServedRequest, given: Arguments) -> dict[str, Any]:
        return {"tools": self.tools(given), "context": self.context(request, given)}

    def handlers(self, request: ServedRequest, given: Arguments) -> dict[str, Any]:
        return {
            "cancel": request.cancel,
            "on_log": request.log if given.take("wants_logs", bool, default=False) else None,
            "on_progress": request.progress if given.take("wants_progress", bool, default=False) else None,
        }

    def resuming(self, request: ServedRequest, given: Arguments) -> dict[str, Any]:
        own = {"token": given.take("token", str), "decisions": given.decisions()}
        return own | self.common(request, given) | self.handlers(request, given)

    def run_options(
        self, request: ServedRequest, given: Arguments, known: type, most: Limits | None = None
    ) -> dict[str, Any]:
        """Return what a script is given. `known`: a TypedDict of the options that there are."""
        own = {
            "source": given.take("source", str),
            "inputs": given.take("inputs", dict),
            "files": given.files(),
            "limits": given.limits(most or self.runtime.limits),
            "dry_run": given.take("dry_run", bool, default=False),
        }
        named = [name for name in RunOptions.PLAIN if name in known.__annotations__]
        plain = {name: value for name in named if (value := given.take(name, *RunOptions.PLAIN[name])) is not None}
        return self.common(request, given) | self.handlers(request, given) | own | plain

    # Sessions

    async def open_session(self, session: Session) -> dict[str, Any]:
        """Open a session, unless it is, and return its number and state.

        Raises:
            Problem: the tenant has too many open (429).
        """
        try:
            self.tenant.sessions.lend()
        except Problem:
            await session.close()
            raise
        try:
            await session.__aenter__()
        except BaseException:
            self.tenant.sessions.give_back()
            raise
        number = next(self._numbers)
        self._sessions[number] = session

        async def opened() -> int:
            return number

        answer: dict[str, Any] = await self.with_state(session, opened)()
        return answer

    def session(self, given: Arguments) -> Session:
        """Return the session that a request is about.

        Raises:
            SessionError: it is closed.
        """
        found = self._sessions.get(given.take("session", int, default=0))
        if found is None:
            raise SessionError("this session is closed; session() opens another one")
        return found

    async def close_session(self, number: int) -> None:
        if (found := self._sessions.pop(number, None)) is not None:
            try:
                await found.close()
            finally:
                self.tenant.sessions.give_back()

    def with_state(self, session: Session, work: Work) -> Work:
        """Return work whose value comes with the state of the session after it."""

        async def does() -> dict[str, Any]:
            value = plain_record(await work())
            state = {
                "id": session.id,
                "is_live": session.is_live,
                "is_paused": session.is_paused,
                "used_cpu_s": float(session.used_cpu_s),
                "used_calls": session.used_calls,
                "waiting": plain_record(session.waiting),
            }
            return {"value": value, "state": state}

        return does


Work = Callable[[], Awaitable[Any]]

Handler = Callable[[CallerSession, ServedRequest, Arguments], Work]
"""Takes what it needs of the arguments, and returns what is to be done if there are no others."""


@dataclass(frozen=True, slots=True)
class Method:
    handler: Handler
    scope: Scope = Scope.EXECUTE
    is_run: bool = True
    """It takes a place among the tenant's runs."""
    waits: bool = False
    """It takes no place, and waits until its tenant owes nothing. The others that take none end something."""

    async def answer(self, caller: CallerSession, request: ServedRequest, given: Arguments) -> Any:
        """Do what a request asks for, and return its plain value."""
        work = self.handler(caller, request, given)
        given.end()
        return plain_record(await work())


def _offer(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    number, tools = given.take("toolset", int), given.take("tools", list)
    return partial(caller.offer, number, tools, given.take("with_own", bool, default=False))


def _execute_code(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    options = caller.run_options(request, given, RunKwargs) | {"repairs": given.take("repairs", str)}
    if options["repairs"] is not None:
        check_may(caller.principal, Scope.READ)  # its calls are answered with what that run was told
    return partial(caller.runtime.execute_code, **options)


def _execute_plan(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    steps, on_approval = given.take("steps", list), given.take("on_approval", str, default="ask")
    return partial(caller.runtime.execute_plan, steps, on_approval=on_approval, **caller.common(request, given))


def _preflight(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    source, limits = given.take("source", str), given.limits(caller.runtime.limits)
    common = caller.common(request, given)
    checks, tools = caller.runtime.checks, caller.runtime.runs.tools(common["tools"])
    return partial(checks.preflight, source, tools, limits, common["context"])


def _resume(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    return partial(caller.runtime.resume, **caller.resuming(request, given))


def _commit(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    draft, options = given.take("draft", str, dict), caller.common(request, given)
    options |= {"recheck": given.take("recheck", bool, default=False), "decisions": given.decisions()}
    approve: Any = given.take("approve", str, list, default="all")
    check_decisions(approve)
    return partial(caller.runtime.commit, draft if isinstance(draft, str) else referred(draft), approve, **options)


def _revert(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    given.take("toolset", int)
    return partial(caller.runtime.revert, referred(given.take("result", dict)), context=caller.context(request, given))


def _open_session(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    name, limits = given.take("name", str), given.limits(caller.runtime.limits)
    options = {
        "idle_s": given.take("idle_s", float),
        "cpu_s": given.take("cpu_s", float),
        "tool_calls": given.take("tool_calls", int),
        "restore": given.take("restore", str, bool),
        "tools": caller.tools(given),
    }

    async def does() -> Any:
        return await caller.open_session(caller.runtime.session(name, limits=limits, **options))

    return does


def _session_execute_code(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    session = caller.session(given)
    options = caller.run_options(request, given, SessionRunKwargs, session.limits)
    return caller.with_state(session, partial(session.execute_code, **options))


def _session_resume(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    session = caller.session(given)
    return caller.with_state(session, partial(session.resume, **caller.resuming(request, given)))


def _session_fork(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
    session, name = caller.session(given), given.take("name", str)

    async def does() -> Any:
        return await caller.open_session(await session.fork(name))

    return does


def _session_does(name: str, take: Callable[[Arguments], Iterable[Any]] = lambda given: ()) -> Handler:
    """Return the handler of a method of a session. `take`: takes its arguments."""

    def handler(caller: CallerSession, request: ServedRequest, given: Arguments) -> Work:
        session = caller.session(given)
        return caller.with_state(session, partial(getattr(session, name), *take(given)))

    return handler


METHODS: Final[Mapping[str, Method]] = {
    "offer_tools": Method(_offer, is_run=False, waits=True),
    "execute_code": Method(_execute_code),
    "execute_plan": Method(_execute_plan),
    "preflight": Method(_preflight),
    "resume": Method(_resume, Scope.APPROVE),
    "commit": Method(_commit, Scope.APPROVE),
    "revert": Method(_revert, Scope.APPROVE),
    "suspended_runs": Method(
        lambda caller, request, given: caller.tenant.journals.suspended, Scope.READ, is_run=False, waits=True
    ),
    "interrupted_runs": Method(
        lambda caller, request, given: caller.tenant.journals.interrupted, Scope.READ, is_run=False, waits=True
    ),
    "kept_sessions": Method(
        lambda caller, request, given: partial(daemon_threads.run_sync, caller.runtime.kept_sessions),
        Scope.READ,
        is_run=False,
        waits=True,
    ),
    "forget_session": Method(
        lambda caller, request, given: partial(
            daemon_threads.run_sync, caller.runtime.forget_session, given.take("name", str)
        ),
        is_run=False,
    ),
    "session.open": Method(_open_session),
    "session.execute_code": Method(_session_execute_code),
    "session.resume": Method(_session_resume, Scope.APPROVE),
    "session.put_files": Method(_session_does("put_files", lambda given: [given.files()])),
    "session.files": Method(_session_does("files")),
    "session.read_file": Method(_session_does("read_file", lambda given: [given.take("name", str)])),
    "session.fork": Method(_session_fork),
    "session.abandon": Method(_session_does("abandon"), is_run=False),
    "session.interrupt": Method(_session_does("interrupt"), is_run=False),
    "session.reset": Method(_session_does("reset"), is_run=False),
    "session.pause": Method(_session_does("pause"), is_run=False),
    "session.put_down": Method(_session_does("put_down"), is_run=False),
    "session.close": Method(
        lambda caller, request, given: partial(caller.close_session, given.take("session", int)), is_run=False
    ),
}
"""Everything that can be asked for on a channel."""
