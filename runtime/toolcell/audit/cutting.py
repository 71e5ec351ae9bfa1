"""Decide what a record holds of a content that is too large, or that is not to be kept: size, digest and beginning.

Everything here is made of what redaction leaves. A digest of the rest would confirm a right guess of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.config import Keep, RecordConfig
from toolcell.audit.redact import Redactor
from toolcell.support import packing
from toolcell.support.about_tables import tables_text
from toolcell.support.packing import bytes_digest, text_digest, value_digest

HEAD_CHARS: Final = 1024
"""Kept of a text that is too large."""

MAX_CLEANED_BYTES: Final = 512 * 1024
"""A larger content with something to redact is recorded without digest and beginning: cleaning it would
block the event loop."""

MAX_PIECES: Final = 8
"""Suspicious pieces of a larger content that are examined. With more, all of it counts as something to redact."""

_Limit = Callable[[RecordConfig], int]

LARGE_FIELDS: Final[dict[str, tuple[tuple[str, _Limit], ...]]] = {
    records.CALL_STARTED: (("args", lambda config: config.value_bytes),),
    records.CALL_ENDED: (("value", lambda config: config.value_bytes),),
    records.RUN_STARTED: (
        ("source", lambda config: config.source_bytes),
        ("inputs", lambda config: config.value_bytes),
    ),
    records.RUN_ENDED: (("value", lambda config: config.value_bytes), ("logs", lambda config: config.logs_bytes)),
}
"""Fields that may be too large to keep, and the limit of each."""

LARGE_EXTRAS: Final = (
    "made", "corrected", "message", "details", "text", "trace", "source",
)  # fmt: skip
"""Extras that only some calls have. Each may be as large as a value."""

DIGESTS: Final = {"source": "sha256", "inputs": "inputs_sha256", "value": "value_sha256"}
"""Field to the field with its digest, in the kinds that have one."""


def encode(kind: str, fields: tuple[Any, ...], config: RecordConfig, redactor: Redactor) -> bytes:
    """Encode a record's content without secrets and without what is too large."""
    parts = [*map(packing.pack, fields)]
    if sum(map(len, parts)) > min(config.value_bytes, config.source_bytes, config.logs_bytes):
        parts = [*map(packing.pack, _without_large(kind, fields, parts, config, redactor))]
    packed = packing.joined_fields(parts)
    rules = redactor.scan(packed)
    if rules is None:
        return packed
    plain, count = redactor.clean(packing.unpack(packed), rules)
    if count:
        plain = _with_digests(kind, plain)
        plain[-1] = plain[-1] | {"redacted": plain[-1].get("redacted", 0) + count}
    return packing.pack_fields(tuple(plain))


def _without_large(
    kind: str, fields: tuple[Any, ...], parts: Sequence[bytes], config: RecordConfig, redactor: Redactor
) -> list[Any]:
    """Replace the fields of a record that are too large. The last field, `more`, notes each one. `parts`: the encoded
    fields."""
    names, kept, extra = records.FIELDS[kind], list(fields), dict(fields[-1])
    for name, limit in LARGE_FIELDS.get(kind, ()):
        index = names.index(name)
        if len(parts[index]) > limit(config):
            summary, cleaned = _summary(parts[index], "size", redactor)
            if tables := tables_text(kept[index]):
                summary["tables"] = tables
            kept[index] = None
            _note(extra, name, summary)
            if DIGESTS.get(name) in names:
                digest = text_digest(cleaned) if name == "source" and type(cleaned) is str else summary.get("sha256")
                kept[names.index(DIGESTS[name])] = digest
    for name in LARGE_EXTRAS:
        if name in extra and len(packed := packing.pack(extra[name])) > config.value_bytes:
            del extra[name]
            _note(extra, name, _summary(packed, "size", redactor)[0])
    return [*kept[:-1], extra]


def _note(extra: dict[str, Any], name: str, summary: dict[str, Any]) -> None:
    if count := summary.pop("redacted", 0):
        extra["redacted"] = extra.get("redacted", 0) + count
    extra[f"{name}_cut"] = summary


def _summary(packed: bytes, why: str, redactor: Redactor) -> tuple[dict[str, Any], Any]:
    """Return what is recorded in place of an encoded value, and the value without secrets if it was made."""
    summary: dict[str, Any] = {"why": why, "bytes": len(packed)}
    is_small = len(packed) <= MAX_CLEANED_BYTES
    if not is_small and redactor.holds_any(packed, MAX_PIECES):
        return summary | {"redacted": 1}, None
    rules = redactor.scan(packed) if is_small else None
    value = packing.unpack(packed) if rules is not None or _is_text(packed) else None
    if rules is not None:
        value, count = redactor.clean(value, rules)
        packed = packing.pack(value)
        summary |= {"redacted": count} if count else {}
    summary["sha256"] = bytes_digest(packed)
    if why == "size" and isinstance(value, str):
        summary["head"] = value[:HEAD_CHARS]
    return summary, value


def _is_text(packed: bytes) -> bool:
    return packed[0] in (0xD9, 0xDA, 0xDB) or packed[0] & 0xE0 == 0xA0


def keep_as(keep: Keep, value: Any, extra: dict[str, Any], name: str, redactor: Redactor) -> Any:
    """Return the value, or None with a note in `extra` of what is missing."""
    if keep == "full" or value is None:
        return value
    if keep == "omit":
        extra[f"{name}_cut"] = {"why": "omit"}
    else:
        _note(extra, name, _summary(packing.pack(value), "digest", redactor)[0])
    return None


def _with_digests(kind: str, fields: list[Any]) -> list[Any]:
    """Compute the fields' digests again after a secret was removed from them."""
    named = dict(zip(records.FIELDS[kind], fields, strict=False))
    more = named["more"]
    if kind == records.RUN_STARTED and named["source"] is not None:
        named["sha256"] = text_digest(named["source"])
    if kind == records.RUN_STARTED and named["inputs"]:
        named["inputs_sha256"] = value_digest(named["inputs"])
    if kind == records.RUN_ENDED and named["has_value"] and "value_cut" not in more:
        named["value_sha256"] = value_digest(named["value"])
    return list(named.values())


# Input files


def file_entry(name: str, data: bytes, keep_bytes: int, redactor: Redactor) -> list[Any]:
    """Return what is recorded of an input file. Its digest is of what redaction leaves; empty where that is not made.

    Shape: [name, size, sha256, content or None].
    """
    size = len(data)
    if redactor.holds_any(data):
        data = redactor.clean_all(data) if size <= MAX_CLEANED_BYTES else b""
        digest = bytes_digest(data) if size <= MAX_CLEANED_BYTES else ""
    else:
        digest = bytes_digest(data)
    return [name, size, digest, data if size <= keep_bytes else None]


# Output that was cut while it was captured

_DROPPED: Final = re.compile(r"\n\.\.\. \[\d+ bytes of (stdout|stderr) dropped\] \.\.\.\n")


def without_halves(entries: Sequence[Sequence[str]], redactor: Redactor) -> list[list[str]]:
    """Return a script's output, of which the middle was dropped, without what may be half of a secret beside the gap.

    Shape: [[stream, text]], as it was given.
    """
    found: list[list[str]] = []
    for stream, text in entries:
        start = 0
        for gap in _DROPPED.finditer(text):
            if gap[1] == stream:
                found.append([stream, text[start : gap.start()]])
                _cut_last(found, stream, redactor)
                found.append([stream, gap[0]])
                start = gap.end()
        found.append([stream, redactor.without_start(text[start:]) if start else text])
    return [entry for entry in found if entry[1]]


def _cut_last(entries: list[list[str]], stream: str, redactor: Redactor) -> None:
    last = next((entry for entry in reversed(entries) if entry[0] == stream and entry[1]), None)
    if last is not None:
        last[1] = redactor.without_end(last[1])
