"""The audit log: an append-only, hash-chained, signed record of every run, with tools to verify, query and replay it.

Each public name is imported when it is first used, so a runtime without an audit log loads none of this package.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "AuditConfig", "AuditEvent", "AuditLog", "Ed25519Signer", "FileWitness", "Filter", "HmacKey", "Index",
    "RecordedCall", "RecordedRun", "Recorder", "Signer", "Sink", "SpanSink", "ToolContent", "Verifier", "Witness",
    "load_signer", "load_verifier",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.audit.config import AuditConfig, ToolContent
    from toolcell.audit.filters import Filter
    from toolcell.audit.keys import Ed25519Signer, HmacKey, Signer, Verifier, load_signer, load_verifier
    from toolcell.audit.log import AuditLog
    from toolcell.audit.otel import SpanSink
    from toolcell.audit.query import Index
    from toolcell.audit.reader import RecordedCall, RecordedRun
    from toolcell.audit.recorder import Recorder
    from toolcell.audit.sinks import AuditEvent, Sink
    from toolcell.audit.witness import FileWitness, Witness
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        "toolcell.audit.filters",
        "toolcell.audit.query",
        "toolcell.audit.reader",
        "toolcell.audit.keys",
        "toolcell.audit.config",
        "toolcell.audit.sinks",
        "toolcell.audit.witness",
        "toolcell.audit.log",
        "toolcell.audit.recorder",
        "toolcell.audit.otel",
    )
