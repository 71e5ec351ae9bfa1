"""Hand each written record to functions of the caller's, such as one that makes spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.audit import records
from toolcell.support import packing
from toolcell.support.log import logger_of

logger = logger_of("toolcell.audit")


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One written record, as a sink gets it."""

    kind: str
    chain: str
    seq: int
    run: int
    at_ns: int
    fields: Mapping[str, Any]
    """As on disk: redacted, and cut where too large."""


Sink = Callable[[AuditEvent], None]
"""Gets every record of a run, in order, in the task that made it. An exception of a sink is logged and ignored."""


def call_sinks(sinks: Iterable[Sink], kind: str, chain: str, seq: int, run: int, at_ns: int, packed: bytes) -> None:
    """Hand one record, as it was packed, to every sink."""
    fields = dict(zip(records.FIELDS[kind], packing.unpack(packed), strict=False))
    event = AuditEvent(kind, chain, seq=seq, run=run, at_ns=at_ns, fields=fields)
    for sink in sinks:
        try:
            sink(event)
        except Exception:
            logger.exception("an audit sink failed")
