"""Remove content from recorded runs afterwards, on disk, so that the log still verifies and says who did it.

The signed record of a redaction comes first: who, when, why, which parts, the digest of the record as it was and of
what is left of it. Then the content is written over in place. `verify` names a record where a crash came in between,
and the same redaction again finishes the work. Records of runs are salted, so that their digests confirm no guess.
"""

from __future__ import annotations

import getpass
import hashlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.format import body_digest, overwrite_body, segment_path
from toolcell.audit.holds import held_places
from toolcell.audit.log import AuditLog
from toolcell.audit.query import VERIFIED, Index, RunSummary
from toolcell.audit.reader import UNFINISHED, StoredRecord
from toolcell.audit.removable import REMOVABLE, parts_of
from toolcell.errors import UsageError

ALL: Final = "all"
PARTS: Final = (*REMOVABLE, ALL)
"""What can be removed: a script and its digest, inputs, files' names, contents and digests, whom it ran for, arguments,
answers and failures of calls, the result, the output, the error's message; or all of it."""

_CALLS: Final = frozenset({records.CALL_STARTED, records.CALL_ENDED})


@dataclass(frozen=True, slots=True)
class Redaction:
    """One record to be redacted."""

    stored: StoredRecord
    parts: tuple[str, ...]
    body: bytes
    """What the record is to hold afterwards."""

    @property
    def original(self) -> bytes:
        """Digest of the record as it was written."""
        return body_digest(self.stored.frame.body)

    @property
    def left(self) -> bytes:
        """Digest of what the record is to hold."""
        return hashlib.sha256(self.body).digest()


def _has_source(more: Any) -> bool:
    """Whether the end of a run has its script, because that came in parts."""
    return bool({"source", "source_cut", "retracted"}.intersection(more or ()))


def plan(found: Iterable[StoredRecord], parts: Collection[str], calls: Collection[int] = ()) -> list[Redaction]:
    """Decide which records of a run are to hold what. `calls` are the numbers of the calls meant; empty: all of them.

    Raises:
        UsageError: a record has no room for what is left of it.
    """
    planned = []
    for stored in found:
        record = stored.record
        chosen = sorted(parts_of(record.kind).intersection(REMOVABLE if ALL in parts else parts), key=REMOVABLE.index)
        if record.kind == records.RUN_ENDED and not _has_source(record.fields["more"]):
            chosen = [part for part in chosen if part != "source"]
        is_other_call = record.kind in _CALLS and calls and record.fields["number"] not in calls
        if not chosen or is_other_call or (calls and record.kind not in _CALLS):
            continue
        body = records.redact_body(stored.frame.body, chosen)
        if body is None:
            raise UsageError(
                f"record {record.seq} was written in an older format and is too short for a redaction of "
                f"{', '.join(chosen)}; `all` removes more of it"
            )
        if body != stored.frame.body:
            planned.append(Redaction(stored, tuple(chosen), body))
    return planned


def redact(
    log: AuditLog,
    index: Index,
    summary: RunSummary,
    parts: Collection[str],
    *,
    calls: Collection[int] = (),
    by: str = "",
    reason: str = "",
) -> list[Redaction]:
    """Remove parts of a run from an open log and return what was done. `by` is by default the user of this process.

    The run must be verified and finished: a redaction signs that what it removed was there.

    Raises:
        UsageError: a part has another name, or the run cannot be redacted.
        AuditError: the log cannot be written.
    """
    if wrong := sorted(set(parts) - set(PARTS)):
        raise UsageError(f"no part of a run is called {wrong[0]!r}: want {', '.join(PARTS)}")
    if not parts:
        raise UsageError(f"nothing was named to be removed: want {', '.join(PARTS)}")
    if summary.trust != VERIFIED:
        raise UsageError(f"run {summary.id} is {summary.trust}: only what was verified can be redacted")
    if summary.outcome == UNFINISHED and log.is_open and log.chain == summary.chain:
        raise UsageError(f"run {summary.id} is not finished: it can be redacted when it is over")
    if (summary.chain, summary.seq) in held_places(index.directory, index.verifiers):
        how = f"`toolcell audit hold {index.directory} {summary.id} --release` ends that"
        raise UsageError(f"run {summary.id} is under legal hold, so nothing of it is removed; {how}")
    planned = plan(index.records_of(summary), parts, calls)
    for each in planned:
        log.append(records.REDACTED, 0, _fields(summary, each, by or user_name(), reason))
    if planned:
        log.checkpoint()
    for each in planned:
        location = each.stored.location
        path = segment_path(index.directory / location.chain, location.segment)
        overwrite_body(path, location.offset, each.stored.frame.body, each.body)
    index.refresh()
    index.changed_by_us(summary.chain)
    return planned


def _fields(summary: RunSummary, planned: Redaction, by: str, reason: str) -> tuple[Any, ...]:
    stored = planned.stored
    return (
        stored.location.chain, stored.record.seq, summary.id, planned.original, planned.left, list(planned.parts), by,
        reason, {},
    )  # fmt: skip


def user_name() -> str:
    """Return the name of the user of this process."""
    with suppress(KeyError, OSError, ImportError):  # a user without a name
        return getpass.getuser()
    return "?"
