"""Answer a script's calls from a record of an earlier run, in the order in which the answers were given then.

`audit.replay` and `control` stand on this. A call that is answered here runs no tool, and asks no rule and no hook.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import anyio

from toolcell.support.change_event import ChangeEvent
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import ToolResult

STALL_S: Final = 2.0
"""How long an answer waits, beyond its recorded duration, for the calls that came before it in the record."""

MAX_GAP_S: Final = 0.05
"""The longest pause between two answers that the script waits for at the same time."""

_NO_TOOLS = ToolRegistry().freeze()


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """When a recorded call was made and answered. The numbers of starts and answers count in one order."""

    number: int
    started: int
    ended: int | None
    """None: it had no answer."""
    started_ns: int = 0
    ended_ns: int = 0


class AnswerTurns:
    """Decides when the next recorded answer is given.

    What a script does with the first of several answers may depend on which it is, and on the others not being there
    yet. So an answer comes after every call made and every answer given before it, and not at once.
    """

    def __init__(self, turns: Iterable[RecordedTurn]) -> None:
        self._turns = {turn.number: turn for turn in turns}
        self.made: set[int] = set()
        """Numbers of the recorded calls that the script has made again."""
        in_order = sorted((turn.ended, turn.number) for turn in self._turns.values() if turn.ended is not None)
        self._order = [number for _, number in in_order]
        self._last: RecordedTurn | None = None
        self._changed = ChangeEvent()

    def note(self, number: int) -> None:
        """The script has made a call."""
        self.made.add(number)
        self._wake()

    async def wait(self, number: int) -> int | None:
        """Wait until a recorded answer is due. Return a call that the script should have made before and does not."""
        turn = self._turns[number]
        allowed_s = STALL_S + max(0, turn.ended_ns - turn.started_ns) / 1e9
        while (ahead := self._ahead_of(turn)) is not None:
            if not await self._change(allowed_s) and ahead not in self.made:
                return ahead
        since, self._last = self._last, turn
        if since is not None and since.ended is not None and turn.started < since.ended:  # awaited at the same time
            await anyio.sleep(min(MAX_GAP_S, max(0.0, (turn.ended_ns - since.ended_ns) / 1e9)))
        if number in self._order:
            self._order.remove(number)
        self._wake()
        return None

    async def wait_for_all(self) -> int | None:
        """Wait until every recorded call was made again. Return one that the script does not make."""
        while (ahead := self.first_unmade()) is not None:
            if not await self._change(STALL_S) and ahead not in self.made:
                return ahead
        return None

    def first_unmade(self) -> int | None:
        """Return the first recorded call that was not made again."""
        return next((number for number in self._turns if number not in self.made), None)

    async def _change(self, allowed_s: float) -> bool:
        """Wait until a call is made or answered; False when nothing happens in time."""
        with anyio.move_on_after(allowed_s) as waiting:
            await self._changed.wait()
        return not waiting.cancelled_caught

    def _wake(self) -> None:
        self._changed.notify()

    def _ahead_of(self, turn: RecordedTurn) -> int | None:
        """Return a call that must be made or answered before this one is answered."""
        if turn.number not in self._order or turn.ended is None:
            return None
        if self._order[0] != turn.number:
            return self._order[0]
        earlier = (number for number, other in self._turns.items() if other.started < turn.ended)
        return next((number for number in earlier if number not in self.made), None)


async def answer_from_record(
    name: str, args: Any, answer: Awaitable[ToolResult], *, note: str, **call: Any
) -> ToolResult:
    """Give a call a recorded answer, and its place in events and in the audit log. `call`: fields of `new_call`."""
    return await _NO_TOOLS.answer(name, args, answer, note=note, **call)
