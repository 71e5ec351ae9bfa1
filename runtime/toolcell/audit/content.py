"""What of a call or a run is kept: all of it, its digest, or nothing; and what is cut because it is too large.

Decides over plain data; redaction comes before, writing after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.config import AuditConfig, Keep

HEAD_CHARS: Final = 1024
"""Kept of a text that is too large."""


def digest_of(value: Any) -> str:
    """Sha256 of a value as it is recorded, in hex: of its canonical msgpack."""
    return hashlib.sha256(records.pack(value)).hexdigest()


def text_digest(text: str) -> str:
    """Sha256 of a text's UTF-8, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cut(value: Any, why: str) -> dict[str, Any]:
    """What is recorded in place of a value: its size and digest, and the beginning of a text that was too large."""
    packed = records.pack(value)
    stub: dict[str, Any] = {"why": why, "bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    if why == "size" and isinstance(value, str):
        stub["head"] = value[:HEAD_CHARS]
    return stub


def kept(value: Any, keep: Keep, more: dict[str, Any], name: str, clean: Callable[[Any], Any]) -> Any:
    """The value, or None with a note in `more` of what is missing. Digests are made of what `clean` leaves."""
    if keep == "full" or value is None:
        return value
    more[f"{name}_cut"] = {"why": "omit"} if keep == "omit" else cut(clean(value), "digest")
    return None


def with_digests(kind: str, fields: list[Any]) -> list[Any]:
    """The fields with the digests of what they hold now, after something was taken out of it.

    A digest of a text that held a secret would confirm every right guess of it.
    """
    named = dict(zip(records.FIELDS[kind], fields, strict=False))
    if kind == records.RUN_STARTED and named["source"] is not None:
        named["sha256"] = text_digest(named["source"])
        named["inputs_sha256"] = digest_of(named["inputs"]) if named["inputs"] else None
    elif kind == records.RUN_ENDED and named["has_value"]:
        named["value_sha256"] = digest_of(named["value"])
    return list(named.values())


_Limit = Callable[[AuditConfig], int]

LARGE: Final[dict[str, tuple[tuple[str, _Limit], ...]]] = {
    records.CALL_STARTED: (("args", lambda config: config.value_bytes),),
    records.CALL_ENDED: (("value", lambda config: config.value_bytes),),
    records.RUN_STARTED: (
        ("source", lambda config: config.source_bytes),
        ("inputs", lambda config: config.value_bytes),
    ),
    records.RUN_ENDED: (("value", lambda config: config.value_bytes), ("logs", lambda config: config.logs_bytes)),
}
"""Fields that may be too large to keep, and how much of each is."""


LARGE_EXTRAS: Final = ("effective_args", "coerced", "message", "details", "text", "trace")
"""The same among what only some calls have; each may be as large as a value."""


def fitted(kind: str, fields: list[Any], config: AuditConfig) -> list[Any]:
    """The fields of a record with what is too large replaced; the last field notes it."""
    names = records.FIELDS[kind]
    more = dict(fields[-1])
    for name, limit in LARGE.get(kind, ()):
        index = names.index(name)
        if len(records.pack(fields[index])) > limit(config):
            more[f"{name}_cut"] = cut(fields[index], "size")
            fields[index] = None
    for name in LARGE_EXTRAS:
        if name in more and len(records.pack(more[name])) > config.value_bytes:
            more[f"{name}_cut"] = cut(more.pop(name), "size")
    return [*fields[:-1], more]


def bytes_digest(data: bytes) -> str:
    """Sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()
