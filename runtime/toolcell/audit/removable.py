"""What can be removed from a recorded run afterwards: which fields of which records, and what is left in their place.

What is left never takes more room than what was there. This module knows neither files nor encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

REMOVABLE: Final = ("source", "inputs", "files", "who", "args", "results", "value", "output", "error")
"""What a redaction can name. The order is part of the format: a redacted record holds one bit for each."""

_Blank = Callable[[dict[str, Any], dict[str, Any]], None]
"""Removes a part from the fields of a record and from its `more`."""


def _without(*names: str, extras: Iterable[str] = ()) -> _Blank:
    def blank(fields: dict[str, Any], more: dict[str, Any]) -> None:
        fields |= dict.fromkeys(names)
        for extra in extras:
            more.pop(extra, None)

    return blank


def _without_input_files(fields: dict[str, Any], more: dict[str, Any]) -> None:
    fields["files"] = [["", size, "", None] for _, size, _, _ in fields["files"]]


def _without_returned_files(fields: dict[str, Any], more: dict[str, Any]) -> None:
    fields["files"] = [["", None, size, None, None] for _, _, size, _, _ in fields["files"]]


def _without_who(fields: dict[str, Any], more: dict[str, Any]) -> None:
    fields["who"] = {}


def _without_error(fields: dict[str, Any], more: dict[str, Any]) -> None:
    if error := fields["error"]:
        kept = {name: error[name] for name in ("type", "line", "limit") if name in error}
        fields["error"] = kept | ({"message": ""} if "message" in error else {})


_OF_ARGS: Final = ("args_cut", "effective_args", "effective_args_cut", "coerced", "coerced_cut", "warnings", "why")
_OF_RESULTS: Final = (
    "value_cut", "message", "message_cut", "details", "details_cut", "text", "text_cut", "trace", "trace_cut", "files",
    "job",
)  # fmt: skip

_PARTS: Final[dict[str, dict[str, tuple[_Blank, str]]]] = {
    "run_started": {
        "source": (_without("source", "sha256", extras=("source_cut",)), "source_cut"),
        "inputs": (_without("inputs", "inputs_sha256", extras=("inputs_cut",)), "inputs_cut"),
        "files": (_without_input_files, "files_cut"),
        "who": (_without_who, "who_cut"),
    },
    "call_started": {
        "args": (_without("args", extras=_OF_ARGS), "args_cut"),
    },
    "call_ended": {
        "results": (
            _without(
                "value",
                extras=_OF_RESULTS,
            ),
            "value_cut",
        ),
    },
    "run_ended": {
        "files": (_without_returned_files, "files_cut"),
        "value": (_without("value", "value_sha256", extras=("value_cut",)), "value_cut"),
        "source": (_without(extras=("source", "source_cut", "retracted", "retracted_cut")), "source_cut"),
        "output": (_without("logs", extras=("logs_cut",)), "logs_cut"),
        "error": (_without_error, "error_cut"),
    },
}  # fmt: skip
"""Kind of a record and part, by what removes it and the name of the note that says so."""

WHY: Final = "redacted"


def parts_of(kind: str) -> frozenset[str]:
    """Return the parts that records of a kind have."""
    return frozenset(_PARTS.get(kind, ()))


def without(kind: str, fields: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record without these parts."""
    left = dict(fields)
    more = dict(left["more"] or {})
    for part in parts:
        _PARTS[kind][part][0](left, more)
    return left | {"more": more}


def with_notes(kind: str, fields: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a redacted record as readers get them: `more` notes what was removed."""
    notes = {_PARTS[kind][part][1]: {"why": WHY} for part in parts}
    return dict(fields) | {"more": (fields["more"] or {}) | notes}


def to_bits(parts: Iterable[str]) -> int:
    """Return the bits that stand for these parts."""
    return sum(1 << REMOVABLE.index(part) for part in parts)


def from_bits(kind: str, bits: int) -> tuple[str, ...]:
    """Return the parts that bits stand for.

    Raises:
        ValueError: there are none, or a record of this kind does not have them.
    """
    parts = tuple(part for number, part in enumerate(REMOVABLE) if bits >> number & 1)
    if not parts or bits >> len(REMOVABLE) or not parts_of(kind).issuperset(parts):
        raise ValueError(f"a {kind} has no parts {bits:#x} that could have been removed")
    return parts
