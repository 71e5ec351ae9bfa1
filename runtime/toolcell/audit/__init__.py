"""The audit log: an append-only, hash-chained, signed record of every run, with tools to verify, query and replay it.

Each public name is imported when it is first used, so a runtime without an audit log loads none of this package.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "UNFINISHED", "WHERE_KEYS_ARE", "AuditEvent", "AuditLog", "BadInput", "Ed25519Signer", "Filter", "Head",
    "HmacKey", "Index", "Match", "Place", "RecordConfig", "RecordDatabase", "RecordedCall", "RecordedRun",
    "Recorder", "Report", "RunChange", "RunSummary", "Search", "ShownCall", "ShownLine", "ShownRun", "Signer",
    "Sink", "SpanSink", "ToolContent", "Trust", "Verifier", "database_of", "default_key_path", "json_line",
    "jsonable", "key_ranges", "lines_of", "load_signer", "load_verifier", "read_log_id", "receipt", "removals",
    "save_private", "shown_text", "to_html", "verify", "visible",
]  # fmt: skip

if TYPE_CHECKING:
    from toolcell.audit import key_ranges, receipt
    from toolcell.audit.config import RecordConfig, ToolContent
    from toolcell.audit.databases import Place, database_of, read_log_id
    from toolcell.audit.events import lines_of
    from toolcell.audit.filters import Filter
    from toolcell.audit.html import ShownCall, ShownLine, ShownRun, shown_text, to_html, visible
    from toolcell.audit.keys import (
        WHERE_KEYS_ARE,
        Ed25519Signer,
        HmacKey,
        Signer,
        Verifier,
        default_key_path,
        load_signer,
        load_verifier,
        save_private,
    )
    from toolcell.audit.log import AuditLog
    from toolcell.audit.otel import SpanSink
    from toolcell.audit.query import Index, RunSummary, Trust
    from toolcell.audit.reader import RecordedCall, RecordedRun, json_line, jsonable
    from toolcell.audit.recorder import Recorder
    from toolcell.audit.retention import removals
    from toolcell.audit.run_diff import RunChange
    from toolcell.audit.signatures import Head
    from toolcell.audit.sinks import AuditEvent, Sink
    from toolcell.audit.store import UNFINISHED, BadInput, RecordDatabase
    from toolcell.audit.text_search import Match, Search
    from toolcell.audit.verification import Report, verify
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.audit.config": "RecordConfig ToolContent",
            "toolcell.audit.databases": "Place database_of read_log_id",
            "toolcell.audit.events": "lines_of",
            "toolcell.audit.filters": "Filter",
            "toolcell.audit.html": "ShownCall ShownLine ShownRun shown_text to_html visible",
            "toolcell.audit.keys": (
                "WHERE_KEYS_ARE Ed25519Signer HmacKey Signer Verifier default_key_path load_signer load_verifier "
                "save_private"
            ),
            "toolcell.audit.log": "AuditLog",
            "toolcell.audit.otel": "SpanSink",
            "toolcell.audit.query": "Index RunSummary Trust",
            "toolcell.audit.reader": "RecordedCall RecordedRun json_line jsonable",
            "toolcell.audit.recorder": "Recorder",
            "toolcell.audit.retention": "removals",
            "toolcell.audit.run_diff": "RunChange",
            "toolcell.audit.signatures": "Head",
            "toolcell.audit.sinks": "AuditEvent Sink",
            "toolcell.audit.store": "UNFINISHED BadInput RecordDatabase",
            "toolcell.audit.text_search": "Match Search",
            "toolcell.audit.verification": "Report verify",
        },
    )
