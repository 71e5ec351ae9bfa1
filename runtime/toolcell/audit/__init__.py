"""Evidence of what every script did: an append-only, hash-chained, signed log; verifying, querying and replaying it.

Names are loaded when they are first used, so that a runtime without an audit log pays nothing for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolcell.audit.config import AuditConfig, ToolContent
    from toolcell.audit.index import Filter, Index
    from toolcell.audit.keys import Ed25519Signer, HmacKey, Signer, Verifier, load_signer, load_verifier
    from toolcell.audit.log import AuditEvent, AuditLog, Sink
    from toolcell.audit.otel import SpanSink
    from toolcell.audit.recorder import Recorder
    from toolcell.audit.runs import RecordedCall, RecordedRun

_HOMES = {
    "toolcell.audit.config": ("AuditConfig", "ToolContent"),
    "toolcell.audit.index": ("Filter", "Index"),
    "toolcell.audit.keys": ("Ed25519Signer", "HmacKey", "Signer", "Verifier", "load_signer", "load_verifier"),
    "toolcell.audit.log": ("AuditLog", "AuditEvent", "Sink"),
    "toolcell.audit.otel": ("SpanSink",),
    "toolcell.audit.recorder": ("Recorder",),
    "toolcell.audit.runs": ("RecordedCall", "RecordedRun"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AuditConfig",
    "AuditEvent",
    "AuditLog",
    "Ed25519Signer",
    "Filter",
    "HmacKey",
    "Index",
    "RecordedCall",
    "RecordedRun",
    "Recorder",
    "Signer",
    "Sink",
    "SpanSink",
    "ToolContent",
    "Verifier",
    "load_signer",
    "load_verifier",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolcell.audit' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
