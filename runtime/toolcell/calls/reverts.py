"""What runs have made that can be undone: calls of tools with a `revert=`, with their results; the latest are kept."""

from __future__ import annotations

from typing import Final

from toolcell.calls.call import Call, Feature, RunContext
from toolcell.calls.result import ToolResult
from toolcell.calls.run_state import RunLink
from toolcell.errors import UnknownId
from toolcell.support.host_work import KEPT_BYTES, about_bytes
from toolcell.support.lru import Lru
from toolcell_bridge.wire.frozen import frozen

FINAL = "its tool has no revert="

RUNS: Final = 64
"""Runs and commits that a Runtime can revert, the latest."""


@frozen
class MadeCall:
    """One call of a tool that writes."""

    call: Call | None
    """None when it cannot be undone, and nothing of it is kept."""
    tool: str
    result: ToolResult | None = None
    problem: str = ""
    """Why it cannot be undone."""
    size: int = 0
    """Bytes that are kept of it, about."""


class MadeCalls(Feature):
    """The calls that a run has made of tools that write, in the order in which they ended."""

    def __init__(self, kept_by: Reverts | None = None, link: RunLink | None = None, user_id: str = "") -> None:
        """`link`: how the record names the run. `user_id`: whom it is for."""
        self.calls: list[MadeCall] = []
        self.link, self.user_id, self._kept_by = link or RunLink(), user_id, kept_by
        self._final: dict[str, MadeCall] = {}
        """By tool: all calls of one without `revert=` have the same entry. Most tools are such."""

    def finished(self, run: RunContext, ident: str, /) -> None:
        """Have what the run has made kept."""
        if self._kept_by is not None and run.scope.link is self.link:
            self._kept_by.keep(ident, self)

    def made(self, call: Call, result: ToolResult, /) -> None:
        """Take note of a call. That of a preview is none."""
        if call.options.read_only or call.options.orchestrates or (call.features.collects and call.is_collected):
            return
        if call.options.revert is None:
            if (known := self._final.get(call.name)) is None:
                known = self._final[call.name] = MadeCall(None, call.name, problem=FINAL)
            made = known
        elif result.is_error:
            made = MadeCall(None, call.name, problem="it had failed, and may have done a part of its work")
        else:
            size = about_bytes([call.args, call.raw_args, result.value, result.output])
            made = MadeCall(call, call.name, result, size=size)
        self.calls.append(made)


class Reverts(Feature):
    """What the runs and commits of one runtime have made, by the id of their journal."""

    def __init__(self) -> None:
        self._made: Lru[str, MadeCalls] = Lru(RUNS, KEPT_BYTES)

    def of_run(self, link: RunLink | None, user_id: str) -> MadeCalls:
        """Return what notes what a run makes."""
        return MadeCalls(self, link, user_id)

    def keep(self, ident: str, made: MadeCalls) -> None:
        """Keep what a run has made; of a run that is carried on, in addition to what it had made before."""
        if not made.calls:
            return
        known = self._made.use(ident) or made
        if known is not made:
            known.calls += made.calls
        self._made.put(ident, known, sum(call.size for call in known.calls))

    def made_by(self, ident: str, run_id: str = "") -> MadeCalls:
        """Return what is kept under this id.

        Raises:
            UnknownId: nothing is.
        """
        found = self._made.get(ident)
        if found is None:
            raise UnknownId(
                f"there is nothing of run {run_id or ident} to revert: it made no call of a tool that writes, it ran "
                f"elsewhere, or it is not among the last {RUNS} runs here with at most {KEPT_BYTES} bytes together"
            )
        return found
