"""Answer a script's calls from a record of an earlier run, in the order in which the answers were given then.

Every replay stands on this: of a run in the audit log, and of a run that its journal carries on. Whoever replays finds
out which recorded call a new one is. What is answered here runs no tool, and asks no rule and no hook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Self

import anyio

from toolcell.calls.call import Call
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Origin
from toolcell.calls.result import Status, ToolFailure, ToolResult, of_plain
from toolcell.errors import SessionError, ToolAbort
from toolcell.results import Divergence, PendingCall
from toolcell.support.event_loop import ChangeEvent
from toolcell.tools.registry import ToolRegistry
from toolcell_bridge.guest.tool_names import name_meant
from toolcell_bridge.wire.codec import decode
from toolcell_bridge.wire.messages import HTTP, INSTALL_PACKAGE, ToolFail, ToolReturn

CANCELLED: Final = b""
"""The answer of a call that the script cancelled."""

LENGTH_BYTES: Final = 4
"""Length of a frame, before its body."""

STALL_S: Final = 2.0
"""How long an answer waits, beyond its recorded duration, for the calls that came before it in the record."""

MAX_GAP_S: Final = 0.05
"""The longest pause between two answers that the script waits for at the same time."""


DecisionKind = Literal["approve", "edit", "deny", "made"]


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """What somebody decided about a pending call."""

    kind: DecisionKind
    data: Any
    """Arguments of an edit, reason of a denial, result of a call that was made already."""
    digest: str
    """Digest of the call that was decided about."""
    reason: str
    """Why it waited. A decision holds for no other reason."""
    by: str = ""
    """Who decided."""
    why: str = ""
    """What this person said."""
    at_ns: int = 0


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One call of a script. The numbers of starts and answers count in one order."""

    number: int
    """Counts the calls of the script from 1."""
    tool: str
    args: Any
    """As the script gave them; the very object that the call holds."""
    began: int
    ended: int | None = None
    """Place of its answer among all starts and answers; None when the script got none."""
    began_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0
    answer: bytes | None = None
    """Frame of the answer, as the script received it."""
    is_started: bool = False
    """An observer saw that the tool is about to run."""
    is_refused: bool = False
    """The answer says why the tool did not run."""
    run: str = ""
    """The run in which it was answered, as the record names it; empty while that is under way."""
    reused: int | None = None
    """Index of the call of a repaired run whose answer this call got."""
    is_taken_over: bool = False
    """Its answer is that of a repaired run, so its tool does not run."""
    is_written: bool = False
    pending: PendingCall | None = None
    decision: RecordedDecision | None = None
    edited: dict[str, Any] | None = None
    """Arguments of the decision with which its tool started."""

    @property
    def is_in_doubt(self) -> bool:
        """True when the tool had started, and nobody knows what came of it."""
        return self.answer is None and self.is_started

    @property
    def state(self) -> str:
        """What is known of it: `answered`, `in doubt` or `not begun`."""
        return "answered" if self.answer is not None else "in doubt" if self.is_started else "not begun"

    def decide(self, decision: RecordedDecision) -> None:
        """Take a decision. A call in doubt that is approved is a call that has not started."""
        self.pending = None
        if self.is_in_doubt and decision.kind == "approve":
            self.is_started = False
        else:
            self.decision = decision

    def start(self) -> None:
        """Take note that its tool is about to run. A decision is used up by that."""
        decision = self.decision
        self.edited = decision.data if decision is not None and decision.kind == "edit" else None
        self.is_started, self.decision, self.pending = True, None, None

    def result(self) -> ToolResult:
        """Return the recorded answer as a tool's result."""
        assert self.answer
        message = decode(self.answer[LENGTH_BYTES:])
        if isinstance(message, ToolReturn):
            return of_plain(message.value)
        assert isinstance(message, ToolFail)
        details = message.details if isinstance(message.details, dict) else {}
        failure = ToolFailure(message.code, message.message, message.retryable, details)
        return ToolResult(status=Status.ERROR, error=failure)

    @property
    def is_failed(self) -> bool:
        """True when the answer is a failure."""
        return bool(self.answer) and self.result().is_error


MissingCall = Callable[[int, JournalEntry, JournalEntry | None], Divergence]
"""Describes that a recorded call is not made again, from its place and the call that is made now. None: no call is."""


class CallReplay:
    """Gives recorded answers when they are due, and keeps the first difference between the run and its record.

    What a script does with the first of several answers may depend on which it is, and on the others not being there
    yet. So an answer comes after every call made and every answer given before it, and not at once.
    """

    def __init__(self, turns: Iterable[JournalEntry], missing: MissingCall, end: Callable[[str], ToolAbort]) -> None:
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
        self._last: JournalEntry | None = None
        self._changed = ChangeEvent()

    def place(self, number: int) -> int:
        """Return which recorded call this is, counting from 1. One that is not recorded comes after the last."""
        return self._places.get(number, len(self._places) + 1)

    def note(self, number: int) -> None:
        """The script has made a call."""
        self.made.add(number)
        self._changed.notify()

    async def answer(self, number: int, call: JournalEntry, recorded: ToolResult | None) -> ToolResult:
        """Wait until a recorded answer is due, and return it. None: the call waits until the script cancels it, as it
        did before.

        Raises:
            ToolAbort: the script does not make a call that it made before this answer.
        """
        if recorded is None:
            await anyio.sleep_forever()
        turn = self._turns[number]
        allowed_s = STALL_S + max(0, turn.ended_ns - turn.began_ns) / 1e9
        while (ahead := self._ahead_of(turn)) is not None:
            if not await self._change(allowed_s) and ahead not in self.made:
                self._diverge_at(ahead, call)
        since, self._last = self._last, turn
        if since is not None and since.ended is not None and turn.began < since.ended:  # awaited at the same time
            await anyio.sleep(min(MAX_GAP_S, max(0.0, (turn.ended_ns - since.ended_ns) / 1e9)))
        if number in self._order:
            self._order.remove(number)
        self._changed.notify()
        self.answered += 1
        assert recorded is not None
        return recorded

    async def wait_for_all(self, call: JournalEntry) -> None:
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

    def _diverge_at(self, number: int, call: JournalEntry) -> NoReturn:
        self.diverge(self._missing(self.place(number), self._turns[number], call))

    def _first_missing(self) -> int | None:
        return next((number for number in self._turns if number not in self.made), None)

    async def _change(self, allowed_s: float) -> bool:
        """Wait until a call is made or answered; False when nothing happens in time."""
        with anyio.move_on_after(allowed_s) as waiting:
            await self._changed.wait()
        return not waiting.cancelled_caught

    def _ahead_of(self, turn: JournalEntry) -> int | None:
        """Return a call that must be made or answered before this one is answered."""
        if turn.number not in self._order or turn.ended is None:
            return None
        if self._order[0] != turn.number:
            return self._order[0]
        earlier = (number for number, other in self._turns.items() if other.began < turn.ended)
        return next((number for number in earlier if number not in self.made), None)


_NO_TOOLS: Final = ToolRegistry().freeze()


class RecordedTools:
    """What a script was told of its tools, for another run of it (`CallableTools`). None of them is called."""

    def __init__(
        self, shown: Sequence[ToolDefinition], returned: Mapping[str, Mapping[str, Any] | None], called: Iterable[str]
    ) -> None:
        """`returned`: the schema of what each tool returns, where it was known. `called`: names of tools."""
        self._shown, self._returned, self._called = shown, returned, tuple(called)

    def snapshot(self) -> Self:
        """Return itself: a record does not change."""
        return self

    def names(self, origin: Origin = Origin.CODE) -> list[str]:
        """Return the names of the tools that the script was told of."""
        return [each.name for each in self._shown]

    def names_text(self, origin: Origin = Origin.CODE) -> str:
        """Return the same names as one text."""
        return " ".join(self.names())

    def definitions(self, origin: Origin = Origin.CODE) -> list[ToolDefinition]:
        """Return what the script was told of them."""
        return list(self._shown)

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of what a tool returns, where it was known."""
        return self._returned.get(name)

    def registered_name(self, name: str) -> str:
        """Return the recorded name for one that a provider was given in its place; else `name` itself."""
        return name_meant(name, [*self.names(), *self._called])

    @property
    def makes_requests(self) -> bool:
        """True when the script has sent a request, or installed a package."""
        return HTTP in self._called or INSTALL_PACKAGE in self._called

    def new_call(self, name: str, args: Mapping[str, Any] | str, **fields: Any) -> Call:
        """Return the record of a call that gets an answer, and no tool."""
        return _NO_TOOLS.new_call(name, args, **fields)

    async def make(self, call: Call) -> ToolResult:
        """Raise: the journal of the script answers its calls."""
        raise SessionError("no tool is called while a state is rebuilt")
