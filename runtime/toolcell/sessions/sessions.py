"""`Sessions`: makes the sessions of a runtime, knows which are open, and puts down those that idle too long."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.journal.approval_tokens import run_of
from toolcell.results import Suspension
from toolcell.sessions.state import SessionHost
from toolcell.settings import settings_of
from toolcell.support.checks import check_keywords
from toolcell.support.event_loop import ChangeEvent
from toolcell.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from toolcell.sessions.session import Session
    from toolcell.sessions.settings import Restores, SessionKwargs


class Sessions:
    """The sessions of one runtime: makes them, knows which are open, and puts idle ones down."""

    def __init__(self, cap: int, host: SessionHost) -> None:
        """`cap`: how many may have sandboxes at once."""
        self._cap, self._host = cap, host
        self._tasks: TaskGroup | None = None
        """In which idle sessions are looked at."""
        self._open: dict[str, Session] = {}
        self._changed = ChangeEvent()
        self._next_look = math.inf
        """When `tick` wakes."""

    def enter(self, session: Session) -> None:
        """Take note of a session that opens.

        Raises:
            UsageError: its name is taken.
        """
        if session.id in self._open:
            raise UsageError(f"a session named {session.id!r} is open already; use that one, or another name")
        self._open[session.id] = session
        if self._tasks is not (tasks := self._host.runs.task_group()):
            self._tasks = tasks
            tasks.start_soon(self.tick)

    def leave(self, session: Session) -> None:
        """Forget a session that closes."""
        self._open.pop(session.id, None)

    def waiting_for(self, token: object) -> Session | None:
        """Return the open session whose script waits for this token, or has this id. The token is not checked."""
        text = token.to_json() if isinstance(token, Suspension) else token
        run = run_of(text) if isinstance(text, str) else ""
        found = ((each, each.waiting) for each in self._open.values())
        waiting = ((each, waits.run_id if isinstance(waits, Suspension) else waits) for each, waits in found)
        return next((each for each, waits in waiting if run and run == waits), None)

    def note_idle(self, look_at: float) -> None:
        """A session has begun to idle, and is to be looked at then, on the event loop's clock."""
        if look_at < self._next_look:
            self._next_look = look_at
            self._changed.notify()

    async def make_room(self) -> None:
        """See to it that one more session can have a sandbox: the one that idles longest gives up its own.

        Raises:
            SandboxUnavailable: too many have one, and none of them can be put down.
        """
        if len(self._open) <= self._cap:  # whoever asks is among them, and has none
            return
        live = [session for session in self._open.values() if session.is_live]
        if len(live) < self._cap:
            return
        idle = [session for session in live if session.can_be_put_down()]
        if not idle:
            raise SandboxUnavailable(
                f"{len(live)} sessions have sandboxes, PoolConfig(cap={self._cap}) allows no more, and none of them "
                "can be put down now"
            )
        await min(idle, key=lambda session: session.idle_since or 0.0).put_down()

    async def tick(self) -> None:
        """Pause sessions that idle, and put them down later, for ever."""
        while True:
            with anyio.move_on_after(self._next_look - anyio.current_time()):
                await self._changed.wait()
            if (now := anyio.current_time()) < self._next_look:
                continue
            self._next_look = math.inf
            for session in [each for each in self._open.values() if each.look_at <= now]:
                await session.look()
            waits = (session.look_at for session in self._open.values())  # running ones say when they idle
            self._next_look = min(self._next_look, *waits, math.inf)

    async def close(self) -> None:
        """Close every session."""
        for session in list(self._open.values()):
            await session.close()

    # Making and forgetting them

    def kept_names(self) -> list[str]:
        """Return the names of sessions with a journal here: each can be restored, or is open."""
        from toolcell.sessions.journal import recorded_names

        return recorded_names(self._host.journals)

    async def keeps(self, name: str) -> bool:
        """Return whether the journal of a session of this name is kept here."""
        from toolcell.sessions.journal import is_recorded

        return await self._host.journals.call(is_recorded, self._host.journals, name)

    def forget(self, name: str) -> None:
        """Remove the journal of a closed session, which can then not be restored.

        Raises:
            UsageError: there is none of this name.
            SessionError: it is open.
        """
        from toolcell.sessions.journal import forget, is_recorded, opened

        if not is_recorded(self._host.journals, name):
            raise UsageError(f"there is no journal of a session named {name!r:.80} here")
        forget(opened(self._host.journals, name))

    def make(self, name: str | None, options: SessionKwargs) -> Session:
        """Return a session; see `Runtime.session`."""
        from toolcell.sessions.session import Session
        from toolcell.sessions.settings import SessionKwargs, check_name, session_settings

        check_keywords("session", options, SessionKwargs.__annotations__)
        restore, tools = options.get("restore"), options.get("tools")
        restores: Restores = "always" if restore is True else "if_kept" if restore == "if_kept" else "never"
        if restores != "never" and (name is None or not self._host.journals.is_durable):
            lacks = "the name of the session" if name is None else "Runtime(record=FILE)"
            raise UsageError(f"restore={restore!r} needs {lacks}: without it there is nothing to go on from")
        limits = settings_of(Limits, options.get("limits") or self._host.runs.limits, "limits")
        return Session(
            self._host,
            self,
            ident=os.urandom(16).hex() if name is None else check_name(name),
            limits=limits,
            settings=session_settings(limits, options),
            tools=ToolRegistry.of(tools, "tools=") if tools is not None else None,
            context=options.get("context"),
            is_named=name is not None,
            restores=restores,
        )
