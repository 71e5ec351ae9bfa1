"""Push the heads of a log to its witnesses, and keep what is to be recorded of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolcell.audit.signatures import Head
from toolcell.audit.witness import Witness, WitnessFailed
from toolcell.support.log import logger_of

logger = logger_of("toolcell.audit")


class Witnessing:
    """Pushes heads and remembers which witness did not keep the last one. Safe in several threads.

    With `is_required`, the log takes no records while a witness has not kept the last head.
    """

    def __init__(self, witnesses: Iterable[Witness | str], is_required: bool, log: Path) -> None:
        self._witnesses = [_load_witness(each, log) if isinstance(each, str) else each for each in witnesses]
        self.is_required = is_required and bool(self._witnesses)
        self._lock = threading.Lock()
        self._last: Head | None = None
        self._failed: dict[str, str] = {}
        self._notes: list[tuple[Any, ...]] = []

    def push(self, head: Head) -> None:
        """Push a head to every witness. A failure is logged when it begins, and recorded."""
        if self._witnesses:
            with self._lock:
                self._last = head
                self._push_to(self._witnesses)

    def announce(self, head: Head) -> None:
        """Push the head of what is to be removed from a chain's beginning.

        Raises:
            WitnessFailed: a witness did not keep it, so nothing may be removed.
        """
        with self._lock:
            for witness in self._witnesses:
                try:
                    witness.push(head)
                except Exception as exc:  # a caller's own witness may raise anything
                    raise WitnessFailed(f"the witness {witness.name} was not told of the removal: {exc}") from exc

    def push_again(self) -> None:
        """Push the last head to those witnesses that did not keep it."""
        if self._failed:
            with self._lock:
                self._push_to([each for each in self._witnesses if each.name in self._failed])

    def _push_to(self, witnesses: Iterable[Witness]) -> None:
        head = self._last
        if head is None:
            return
        for witness in witnesses:
            try:
                witness.push(head)
                problem = ""
            except Exception as exc:  # a caller's own witness may raise anything
                problem = str(exc) if isinstance(exc, WitnessFailed) else f"{type(exc).__name__}: {exc}"
            before = self._failed.pop(witness.name, "")
            if problem:
                self._failed[witness.name] = problem
            if problem and not before:
                why = problem.removeprefix(f"{witness.name}: ")
                logger.warning("a head of the audit log did not reach its witness %s: %s", witness.name, why)
            if not (problem and before):  # while it cannot be reached, one record says so
                self._notes.append((witness.name, head.chain, head.seq, head.record_hash, problem, {}))

    def take_notes(self) -> list[tuple[Any, ...]]:
        """Return the fields of what is to be recorded: which head reached whom. Each is returned once."""
        notes, self._notes = self._notes, []
        return notes

    @property
    def is_behind(self) -> bool:
        """True while a witness has not kept the last head."""
        return bool(self._failed)

    @property
    def problem(self) -> WitnessFailed | None:
        """Why the log takes no records now; None when it does."""
        if not (self.is_required and self._failed):
            return None
        failed = "; ".join(f"{name}: {why}" for name, why in tuple(self._failed.items()))
        return WitnessFailed(
            f"the log takes no records, because a witness is required and did not keep its head: {failed}"
        )


def _load_witness(place: str, log: Path) -> Witness:
    from toolcell.audit.witness_places import witness_of  # loads an HTTP client

    return witness_of(place, log)
