"""The sessions of one tenant. Those that are closed, or were open when the service ended, come back from journals."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import anyio

from toolcell.errors import SessionError
from toolcell.runtime import Runtime
from toolcell.service.problems import Problem
from toolcell.sessions import Session
from toolcell.support import daemon_threads


class TenantSessions:
    """Opens, finds and forgets the sessions of a tenant. Every session has a name, so each can be restored."""

    def __init__(self, runtime: Runtime, most: int) -> None:
        """`most`: sessions that may be open at once."""
        self._runtime, self._most = runtime, most
        self._open: dict[str, Session] = {}
        self._opening = 0
        self._lent = 0
        """Sessions that callers on WebSockets have open. They are counted here, and kept there."""
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def create(self, name: str | None, options: Mapping[str, Any]) -> Session:
        """Open a new session, or, with `restore=True`, the one of this name from its journal. "if_kept": either.

        Raises:
            Problem: there is one of this name (409), or there is none to be restored (404), or too many are open (429).
        """
        name = name or os.urandom(8).hex()
        async with self._lock_of(name):
            restore, is_kept = options.get("restore"), await self._runtime.sessions.keeps(name)
            if name in self._open:
                raise _conflict(name, "is open; use it, or another name")
            if is_kept and restore is not True and restore != "if_kept":
                raise _conflict(
                    name, 'is kept in its journal; use it, or forget it with DELETE, or say "restore": true'
                )
            if restore is True and not is_kept:
                raise no_session(name)
            return await self._opened(name, lambda: _open(self._runtime.session(name, **options)))

    async def get(self, name: str) -> Session:
        """Return an open session; one that is kept in its journal is restored.

        Raises:
            Problem: there is none of this name (404), or too many are open (429).
        """
        if (found := self._open.get(name)) is not None:
            return found
        async with self._lock_of(name):
            if (found := self._open.get(name)) is not None:
                return found
            if not await self._runtime.sessions.keeps(name):
                raise no_session(name)
            return await self._opened(name, lambda: _open(self._runtime.session(name, restore="if_kept")))

    async def fork(self, name: str, copy: str | None) -> Session:
        """Return a new session with the state of one.

        Raises:
            Problem: as from `get` and `create`.
        """
        session = await self.get(name)
        copy = copy or os.urandom(8).hex()
        if copy == name:
            raise _conflict(copy, "is there already; choose another name")
        async with self._lock_of(copy):
            if copy in self._open or await self._runtime.sessions.keeps(copy):
                raise _conflict(copy, "is there already; choose another name")
            return await self._opened(copy, lambda: session.fork(copy))

    async def forget(self, name: str) -> None:
        """Close a session and remove its journal. A script that waits for a decision is given up.

        Raises:
            Problem: there is none of this name (404).
        """
        async with self._lock_of(name):
            is_kept, session = await self._runtime.sessions.keeps(name), self._open.get(name)
            if session is None and not is_kept:
                raise no_session(name)
            with suppress(SessionError):  # one whose journal is damaged is forgotten, too
                session = session or await _open(self._runtime.session(name, restore="if_kept"))
                await session.interrupt()
                await session.abandon()
            if session is not None:
                await session.close()
            self._open.pop(name, None)
            if is_kept:
                await daemon_threads.run_sync(self._runtime.forget_session, name)

    def _lock_of(self, name: str) -> anyio.Lock:
        """Return what keeps others from opening and forgetting this session."""
        return self._locks.setdefault(name, anyio.Lock())

    def lend(self) -> None:
        """Count a session that a caller opens elsewhere.

        Raises:
            Problem: too many are open (429).
        """
        self._check_room()
        self._lent += 1

    def give_back(self) -> None:
        """Count it no longer."""
        self._lent -= 1

    def _check_room(self) -> None:
        if self.open_count + self._opening >= self._most:
            detail = f"{self.open_count} sessions are open, and this tenant may have {self._most}; close one first"
            raise Problem(429, "too_many_sessions", "Too many sessions", detail)

    async def _opened(self, name: str, opening: Callable[[], Awaitable[Session]]) -> Session:
        self._check_room()
        self._opening += 1
        try:
            self._open[name] = session = await opening()
        finally:
            self._opening -= 1
        return session

    @property
    def open_count(self) -> int:
        """How many are open, those of callers on WebSockets too."""
        return len(self._open) + self._lent

    async def list(self) -> list[tuple[str, Session | None]]:
        """Return the name of each session, and the session if it is open."""
        names = sorted({*self._open, *await daemon_threads.run_sync(self._runtime.kept_sessions)})
        return [(name, self._open.get(name)) for name in names]


async def _open(session: Session) -> Session:
    await session.open()
    return session


def no_session(name: str) -> Problem:
    return Problem(404, "no_such_session", "No such session", f"there is no session named {name!r:.80}")


def _conflict(name: str, why: str) -> Problem:
    return Problem(409, "session_exists", "The name is taken", f"the session {name!r:.80} {why}")
