"""`ListedCalls`: the calls of a run that needs no journal. Its tools make them, and they are listed for a repair.

The lists of the latest runs are kept in memory, with the journals of others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.calls.call import RunContext
from toolcell.calls.options import Origin
from toolcell.calls.result import ToolResult
from toolcell.errors import RunEnded
from toolcell.results import ExecutionResult
from toolcell.run.run import Run, RunPart
from toolcell.support.lru import Lru

ANSWER_BYTES: Final = 64 << 20
"""Bytes of answers and of uploaded bodies that are kept of one run. A run with more cannot be repaired."""


FINISHED_RUNS: Final = 64
FINISHED_BYTES: Final = 64 << 20
"""Finished runs whose calls are kept in memory for repairs, and their largest total size."""


class ListedCall:
    """One call of a script."""

    __slots__ = ("answer", "args", "is_refused", "tool")

    def __init__(self, tool: str, args: Any) -> None:
        self.tool, self.args = tool, args
        self.answer: bytes | None = None
        """Frame of the answer, as the script received it; b"" when the script cancelled the call."""
        self.is_refused = False
        """The answer says why the tool did not run."""


@dataclass(slots=True)
class CallList:
    """The calls of one run, in their order."""

    id: str
    run: str = ""
    """Name of the run in the record."""
    calls: list[ListedCall] = field(default_factory=list)
    labels: frozenset[str] = frozenset()
    """Labels of everything that the run has read."""
    size: int = 0
    """Bytes of its answers and, once it is over, of its arguments."""


FinishedRuns = Lru[str, tuple[str, object]]
"""The latest finished runs, by the ids of their journals: each run's id, and its `CallList` or journal."""


def finished_runs() -> FinishedRuns:
    """Return where the calls of the latest finished runs are kept."""
    return Lru(FINISHED_RUNS, FINISHED_BYTES)


class ListedCalls(RunPart):
    """Makes the calls of one run, and lists them."""

    def __init__(self, run: Run, finished: FinishedRuns) -> None:
        self._tools, self._context, self._work, self._finished = run.tools, run.context, run.work, finished
        self._list = CallList(os.urandom(16).hex())
        self._by_id: dict[str, ListedCall] = {}
        run.journal_id, run.make_call = self._list.id, self.dispatch
        run.parts += (self,)

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Make a call.

        Raises:
            ToolAbort: a tool ended the run.
            AuditError: the call could not be recorded.
        """
        is_kept = self._list.size + self._work.uploaded <= ANSWER_BYTES
        call = self._by_id[call_id] = ListedCall(name, args if is_kept else None)
        self._list.calls.append(call)
        try:
            result = await self._tools.dispatch(name, args, call_id=call_id, origin=origin, context=context)
        except RunEnded as exc:
            end_script_alone(exc, context)
            raise
        if result.error is not None:
            call.is_refused = not result.meta.duration_ms
        return result

    def answered(self, call_number: int, frame: bytes) -> None:
        """Keep the answer to a call."""
        call = self._by_id.get(f"call_{call_number}")
        if call is not None and call.answer is None:
            self._list.size += len(frame)
            call.answer = frame if self._list.size <= ANSWER_BYTES else b""

    def finish(self, result: ExecutionResult) -> ExecutionResult:
        """Keep its calls for a repair, as long as there is room."""
        found, work, link = self._list, self._work, self._context.scope.link
        found.run = link.id if link is not None else result.run_id
        if found.size + work.uploaded <= ANSWER_BYTES:
            found.labels = self._context.state.labels.names
            found.size += work.calls + work.uploaded
            self._finished.put(found.id, (result.run_id, found), found.size)
        return result


def end_script_alone(exc: RunEnded, context: RunContext | None) -> None:
    """Let what ended a script not end the agent's run around it."""
    if context is not None and context.state.abort is exc:
        context.state.abort = None
