"""The sandbox of a session while no script runs: it is paused, measured, and destroyed when its time is over."""

from __future__ import annotations

import math
import os
from typing import cast

import anyio

from toolcell.control.controlled import ControlledRuntime
from toolcell.run.connection import GuestConnection
from toolcell.sessions.sandbox import SessionSandbox
from toolcell.sessions.settings import SessionSettings

PAUSE_S = 1.0
"""After so long without a script the sandbox is paused. Scripts in a row need not wait for it."""

WATCH_S = 0.1
"""An idle sandbox that has nearly used up its CPU time is measured so often."""

PROCESSORS = os.cpu_count() or 1


class IdleSandbox:
    """The part of a session's state that is about its sandbox."""

    settings: SessionSettings
    not_repeatable: str
    connection: GuestConnection | None
    idle_since: float | None
    look_at: float
    is_paused: bool
    _host: ControlledRuntime
    _ended_cpu_s: float

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds of all its sandboxes: of scripts, of running them again, and of what goes on between them."""
        return self._ended_cpu_s + (self._sandbox.used_cpu_s if self.connection is not None else 0.0)

    @property
    def _sandbox(self) -> SessionSandbox:
        assert self.connection is not None
        return cast("SessionSandbox", self.connection.sandbox)

    @property
    def can_be_lost(self) -> bool:
        """True when without the sandbox no more is lost than `restore` says."""
        return not (self.settings.restore == "journal" and self.not_repeatable)

    def rest(self) -> None:
        """No script runs from here on."""
        self.idle_since, self.look_at = None, math.inf
        if self.connection is not None:
            self.idle_since = anyio.current_time()
            self._look_later(self.settings.cpu_s - self._ended_cpu_s - self._sandbox.latest_cpu_s, PAUSE_S)

    def _look_later(self, cpu_s: float, pause_s: float) -> None:
        """Say when to look next, so much before the pause and with so much left of the session's CPU time."""
        now = anyio.current_time()
        self.look_at = now + min(self._idle_left_s(now), max(WATCH_S, cpu_s / PROCESSORS), pause_s)

    def _idle_left_s(self, now: float) -> float:
        if self.idle_since is None or not self.can_be_lost:
            return math.inf
        return self.idle_since + self.settings.idle_s - now

    async def look(self) -> None:
        """Pause an idle sandbox, or drop it when its time is over, and say when to look again.

        It is measured, also when it is paused: a script can leave something running that the guest does not report.
        """
        if self.idle_since is None:
            return
        cpu_s = self.settings.cpu_s - self.used_cpu_s
        if cpu_s <= 0 or self._idle_left_s(anyio.current_time()) <= 0:
            await self.drop()
            return
        pause_s = self.idle_since + PAUSE_S - anyio.current_time()
        if pause_s <= 0:
            await self.pause()
        self._look_later(cpu_s, pause_s if pause_s > 0 else math.inf)

    async def pause(self) -> bool:
        """Stop everything in the sandbox; see `Session.pause`. May be called again: something may run all the same."""
        if self.connection is None or not self.connection.is_usable:
            return False
        before, self.is_paused = self.is_paused, True  # also when this is cancelled: nobody knows what was done then
        self.is_paused = await self._sandbox.pause() or before
        return self.is_paused

    async def drop(self) -> None:
        """Destroy the sandbox."""
        self._ended_cpu_s = self.used_cpu_s
        connection, self.connection = self.connection, None
        self.idle_since, self.look_at, self.is_paused = None, math.inf, False
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await self._host._let_go(connection)
