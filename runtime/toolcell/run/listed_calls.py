"""`ListedCalls`: the calls of a run that needs no journal. Its tools make them, and they are listed for a repair."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from toolcell.calls.call import RunContext
from toolcell.calls.options import Origin
from toolcell.calls.result import ToolResult
from toolcell.errors import RunEnded
from toolcell.results import ExecutionResult
from toolcell.results.call_list import CallList, FinishedRuns, ListedCall
from toolcell.run.run import Run, RunPart

ANSWER_BYTES: Final = 64 << 20
"""Bytes of answers and of uploaded bodies that are kept of one run. A run with more cannot be repaired."""


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
