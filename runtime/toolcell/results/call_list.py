"""The calls of a finished run with their answers, as far as a repair of its script needs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.support.lru import Lru

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
