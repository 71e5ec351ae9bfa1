"""`Reverts`: what the latest runs and commits of a runtime have made, and can be undone."""

from __future__ import annotations

from typing import Final

from toolcell.errors import UnknownId
from toolcell.support.host_work import KEPT_BYTES
from toolcell.support.lru import Lru
from toolcell.tools.reverts import MadeCalls

RUNS: Final = 64
"""Runs and commits that a Runtime can revert, the latest."""


class Reverts:
    """What the runs and commits of one runtime have made, by the id of their journal."""

    def __init__(self) -> None:
        self._made: Lru[str, MadeCalls] = Lru(RUNS, KEPT_BYTES)

    def keep(self, ident: str, made: MadeCalls) -> None:
        """Keep what a run has made; of a run that is carried on, in addition to what it had made before."""
        if not made.calls:
            return
        known = self._made.get(ident) or made
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
