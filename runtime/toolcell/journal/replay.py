"""Answer a script's calls from a record of an earlier run, in the order in which the answers were given then.

Every replay stands on this: of a run in the audit log, and of a run that its journal carries on. Whoever replays finds
out which recorded call a new one is. What is answered here runs no tool, and asks no rule and no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import anyio

from toolcell.calls.result import ToolResult
from toolcell.errors import ToolAbort
from toolcell.results import Divergence
from toolcell.support.event_loop import ChangeEvent

STALL_S: Final = 2.0
"""How long an answer waits, beyond its recorded duration, for the calls that came before it in the record."""

MAX_GAP_S: Final = 0.05
"""The longest pause between two answers that the script waits for at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A recorded call, and when it was made and answered. The numbers of starts and answers count in one order."""

    number: int
    tool: str
    args: Any
    started: int
    ended: int | None
    """None: it had no answer."""
    started_ns: int = 0
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call that the script makes now."""

    tool: str
    args: Any


MissingCall = Callable[[int, RecordedTurn, NewCall | None], Divergence]
"""Describes that a recorded call is not made again, from its place and the call that is made now. None: no call is."""


class CallReplay:
    """Gives recorded answers when they are due, and keeps the first difference between the run and its record.

    What a script does with the first of several answers may depend on which it is, and on the others not being there
    yet. So an answer comes after every call made and every answer given before it, and not at once.
    """

    def __init__(self, turns: Iterable[RecordedTurn], missing: MissingCall, end: Callable[[str], ToolAbort]) -> None:
        """`end` makes the exception that ends a run, from how it differs."""
        self._turns = {turn.number: turn for turn in turns}
        self._missing, self._end = missing, end
        self.divergence: Divergence | None = None
        self.stopped = ""
        """Why the replay ended before its script did."""
        self.answered = 0
        """Calls that got their answers from the record."""
        self.made: set[int] = set()
        """Numbers of the recorded calls that the script has made again."""
        self._places = {number: place for place, number in enumerate(self._turns, start=1)}
        in_order = sorted((turn.ended, turn.number) for turn in self._turns.values() if turn.ended is not None)
        self._order = [number for _, number in in_order]
        self._last: RecordedTurn | None = None
        self._changed = ChangeEvent()

    def place(self, number: int) -> int:
        """Return which recorded call this is, counting from 1. One that is not recorded comes after the last."""
        return self._places.get(number, len(self._places) + 1)

    def note(self, number: int) -> None:
        """The script has made a call."""
        self.made.add(number)
        self._changed.notify()

    async def answer(self, number: int, call: NewCall, recorded: ToolResult | None) -> ToolResult:
        """Wait until a recorded answer is due, and return it. None: the call waits until the script cancels it, as it
        did before.

        Raises:
            ToolAbort: the script does not make a call that it made before this answer.
        """
        if recorded is None:
            await anyio.sleep_forever()
        turn = self._turns[number]
        allowed_s = STALL_S + max(0, turn.ended_ns - turn.started_ns) / 1e9
        while (ahead := self._ahead_of(turn)) is not None:
            if not await self._change(allowed_s) and ahead not in self.made:
                self._diverge_at(ahead, call)
        since, self._last = self._last, turn
        if since is not None and since.ended is not None and turn.started < since.ended:  # awaited at the same time
            await anyio.sleep(min(MAX_GAP_S, max(0.0, (turn.ended_ns - since.ended_ns) / 1e9)))
        if number in self._order:
            self._order.remove(number)
        self._changed.notify()
        self.answered += 1
        assert recorded is not None
        return recorded

    async def wait_for_all(self, call: NewCall) -> None:
        """Wait until every recorded call was made again: `call` is one that the record does not have.

        Raises:
            ToolAbort: the script does not make one of them.
        """
        while (ahead := self._first_missing()) is not None:
            if not await self._change(STALL_S) and ahead not in self.made:
                self._diverge_at(ahead, call)

    def missing(self) -> Divergence | None:
        """Describe the first recorded call that a script which is over has not made again."""
        number = self._first_missing()
        return self._missing(self.place(number), self._turns[number], None) if number is not None else None

    def diverge(self, found: Divergence) -> NoReturn:
        """End a run that differs from its record.

        Raises:
            ToolAbort: always.
        """
        if self.divergence is None and not self.stopped:
            self.divergence = found
        raise self._end(found.message)

    def stop(self, why: str) -> None:
        """The replay ends here. What its script does from now on is not a difference."""
        if self.divergence is None:
            self.stopped = self.stopped or why

    def _diverge_at(self, number: int, call: NewCall) -> NoReturn:
        self.diverge(self._missing(self.place(number), self._turns[number], call))

    def _first_missing(self) -> int | None:
        return next((number for number in self._turns if number not in self.made), None)

    async def _change(self, allowed_s: float) -> bool:
        """Wait until a call is made or answered; False when nothing happens in time."""
        with anyio.move_on_after(allowed_s) as waiting:
            await self._changed.wait()
        return not waiting.cancelled_caught

    def _ahead_of(self, turn: RecordedTurn) -> int | None:
        """Return a call that must be made or answered before this one is answered."""
        if turn.number not in self._order or turn.ended is None:
            return None
        if self._order[0] != turn.number:
            return self._order[0]
        earlier = (number for number, other in self._turns.items() if other.started < turn.ended)
        return next((number for number in earlier if number not in self.made), None)
