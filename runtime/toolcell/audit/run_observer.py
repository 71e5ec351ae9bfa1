"""`AuditRunObserver`: writes the records of a run while the guest is busy, so that its script does not wait.

The order matters. The start of a run is written after its script was sent and before any call of it is made; the end of
a call after its answer was sent and before the next message is handled. So every effect has its record first, and a
host that is killed in between leaves a start without an end, never an effect without a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolcell.errors import AuditError, SandboxUnavailable, ToolAbort

if TYPE_CHECKING:
    from toolcell.audit.run_record import RunRecord
    from toolcell.results import ExecutionResult
    from toolcell.sandbox.backend import Sandbox
    from toolcell.tools.call import RunContext
    from toolcell_bridge.wire.messages import CallTool


class AuditRunObserver:
    """Records one run. The record begins when the script was sent."""

    __slots__ = ("_begin", "_record", "_sandbox")

    def __init__(self, begin: Callable[[Sandbox | None], RunRecord]) -> None:
        self._begin = begin
        self._sandbox: Sandbox | None = None
        self._record: RunRecord | None = None

    def on_sandbox(self, sandbox: Sandbox) -> None:
        """Remember the sandbox: its isolation belongs to the record."""
        self._sandbox = sandbox

    def on_script_sent(self) -> None:
        """Record the start of the run."""
        self._record = self._begin(self._sandbox)
        self._record.has_witness = True

    def context_of(self, call: CallTool, call_id: str, context: RunContext) -> RunContext:
        """Return a context whose calls are recorded."""
        record = self._record
        assert record is not None
        record.lines[call_id] = call.line
        return record.context

    def on_unrecorded(self, error: AuditError) -> None:
        """Keep the error, for the end of the run."""
        assert self._record is not None
        self._record.problem = error

    def on_answers_sent(self) -> None:
        """Record the ends of the calls that were answered."""
        if self._record is None:
            return
        try:
            self._record.settle()
        except AuditError as exc:
            self._record.problem = exc
            raise ToolAbort("a tool call could not be recorded") from exc

    def on_end(self, result: ExecutionResult) -> None:
        """Record the end of the run."""
        if self._record is not None:
            self._record.end(result)

    def on_failure(self, error: BaseException) -> None:
        """Record that the run has no result."""
        if self._record is None and isinstance(error, SandboxUnavailable):
            self._record = self._begin(self._sandbox)
        if self._record is not None:
            self._record.failed(error)
