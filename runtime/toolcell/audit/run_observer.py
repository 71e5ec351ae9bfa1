"""Writes a run's records in the moments that cost its script nothing: while the guest is busy with what it was sent.

The order is what matters. The start of a run is written after its script is on the way and before anything the script
asks for is done; the end of a call after its answer is on the way and before the next thing is done. So every effect
still has its record first, and a kill in between can only leave a start without an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toolcell.errors import AuditError, ToolAbort

if TYPE_CHECKING:
    from toolcell.audit.run_record import RunRecord


class AuditRunObserver:
    """The record of one run, begun when its script has been sent."""

    __slots__ = ("_begin", "record")

    def __init__(self, begin: Callable[[], RunRecord]) -> None:
        self._begin = begin
        self.record: RunRecord | None = None

    def script_sent(self) -> None:
        """Record the start.

        Raises:
            AuditError: it could not be written.
        """
        self.record = self._begin()
        self.record.has_witness = True

    def answers_sent(self) -> None:
        """Record the ends of the calls that have been answered.

        Raises:
            ToolAbort: one could not be written.
        """
        if self.record is None:
            return
        try:
            self.record.settle()
        except AuditError as exc:
            self.record.problem = exc
            raise ToolAbort("a tool call could not be recorded") from exc
