"""The audit log: an append-only, hash-chained, signed record of every run, with tools to verify, query and replay it.

Each public name is imported when it is first used, so a runtime without an audit log loads none of this package.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "AuditEvent", "AuditLog", "Ed25519Signer", "Filter", "Head", "HmacKey", "Index", "RecordConfig", "RecordDatabase",
    "RecordedCall", "RecordedRun", "Recorder", "Report", "RunSummary", "ShownRun", "Signer", "SpanSink",
    "ToolContent", "Trust", "Verifier", "database_of", "key_ranges", "load_signer", "load_verifier", "load_verifiers",
    "receipt", "removals", "text_search", "verify",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.audit import key_ranges, receipt, text_search
    from toolcell.audit.config import RecordConfig, ToolContent
    from toolcell.audit.databases import database_of
    from toolcell.audit.filters import Filter
    from toolcell.audit.html import ShownRun
    from toolcell.audit.keys import (
        Ed25519Signer,
        HmacKey,
        Signer,
        Verifier,
        load_signer,
        load_verifier,
        load_verifiers,
    )
    from toolcell.audit.log import AuditLog
    from toolcell.audit.otel import SpanSink
    from toolcell.audit.query import Index, RunSummary, Trust
    from toolcell.audit.reader import RecordedCall, RecordedRun
    from toolcell.audit.recorder import Recorder
    from toolcell.audit.retention import removals
    from toolcell.audit.signatures import Head
    from toolcell.audit.sinks import AuditEvent
    from toolcell.audit.store import RecordDatabase
    from toolcell.audit.verification import Report, verify
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.audit.config": "RecordConfig ToolContent",
            "toolcell.audit.databases": "database_of",
            "toolcell.audit.filters": "Filter",
            "toolcell.audit.html": "ShownRun",
            "toolcell.audit.keys": "Ed25519Signer HmacKey Signer Verifier load_signer load_verifier load_verifiers",
            "toolcell.audit.log": "AuditLog",
            "toolcell.audit.otel": "SpanSink",
            "toolcell.audit.query": "Index RunSummary Trust",
            "toolcell.audit.reader": "RecordedCall RecordedRun",
            "toolcell.audit.recorder": "Recorder",
            "toolcell.audit.retention": "removals",
            "toolcell.audit.signatures": "Head",
            "toolcell.audit.sinks": "AuditEvent",
            "toolcell.audit.store": "RecordDatabase",
            "toolcell.audit.verification": "Report verify",
        },
    )
