"""`CallerSession`: what a caller's session has at the service: its tools, its open sessions, its tenant's runtime."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

from toolcell.config import Limits
from toolcell.errors import SessionError, UsageError
from toolcell.run import guest_files
from toolcell.runtime import Runtime
from toolcell.service.principal import Principal
from toolcell.service.problems import Problem
from toolcell.service.socket.arguments import Arguments
from toolcell.service.socket.failures import ToolsetForgotten
from toolcell.service.socket.offer import KEPT_OFFERS
from toolcell.service.socket.remote_tools import remote_registry
from toolcell.service.socket.served_request import CallTeller, ServedRequest
from toolcell.service.socket.values import plain_record
from toolcell.service.tenants import Tenant
from toolcell.sessions import Session
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
        """Close every session."""
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
        own = self.tenant.registry
        registry = await remote_registry(tools, own, with_own=with_own)
        self._toolsets.put(number, registry)

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
        """Return the context of a request's calls."""
        who: dict[str, Any] = given.who()
        observer = CallTeller(request) if given.take("notes_calls", bool, default=False) else None
        ident = os.urandom(16).hex()
        return RunContext(run_id=ident, user_id=self.principal.subject, observer=observer, **who)

    def common(self, request: ServedRequest, given: Arguments) -> dict[str, Any]:
        """Return what every request that makes calls has."""
        return {"tools": self.tools(given), "context": self.context(request, given)}

    def handlers(self, request: ServedRequest, given: Arguments) -> dict[str, Any]:
        """Return what happens while a script runs."""
        return {
            "cancel": request.cancel,
            "on_log": request.log if given.take("wants_logs", bool, default=False) else None,
            "on_progress": request.progress if given.take("wants_progress", bool, default=False) else None,
        }

    def run_options(self, request: ServedRequest, given: Arguments, most: Limits | None = None) -> dict[str, Any]:
        """Return what scripts of a runtime and of a session have in common."""
        inputs = given.take("inputs", dict)
        return (
            self.common(request, given)
            | self.handlers(request, given)
            | {
                "source": given.take("source", str),
                "inputs": inputs,
                "files": guest_files(given.files()),
                "limits": given.limits(most or self.runtime.limits),
                "lint": given.take("lint", str),
                "on_approval": given.take("on_approval", str, default="ask"),
                "dry_run": given.take("dry_run", bool, default=False),
                "check_types": given.take("check_types", str, bool),
            }
        )

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
        return self.with_state(session, number)

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
        """Close a session, if it is open."""
        if (found := self._sessions.pop(number, None)) is not None:
            try:
                await found.close()
            finally:
                self.tenant.sessions.give_back()

    def with_state(self, session: Session, value: Any) -> dict[str, Any]:
        """Return a value with the state of the session."""
        state = {
            "id": session.id,
            "is_live": session.is_live,
            "is_paused": session.is_paused,
            "used_cpu_s": float(session.used_cpu_s),
            "used_calls": session.used_calls,
            "waiting": plain_record(session.waiting),
        }
        return {"value": value, "state": state}
