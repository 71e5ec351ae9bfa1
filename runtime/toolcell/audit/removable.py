"""What older versions could remove from a recorded run afterwards: readers say of each part that it was redacted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

REMOVABLE: Final = ("source", "inputs", "files", "who", "args", "results", "value", "output", "error")
"""The order is part of the format: a redacted record holds one bit for each."""

_NOTES: Final[dict[str, dict[str, str]]] = {
    "run_started": {"source": "source_cut", "inputs": "inputs_cut", "files": "files_cut", "who": "who_cut"},
    "call_started": {"args": "args_cut"},
    "call_ended": {"results": "value_cut"},
    "run_ended": {
        "files": "files_cut",
        "value": "value_cut",
        "source": "source_cut",
        "output": "logs_cut",
        "error": "error_cut",
    },
}
"""Kind of a record and part, by the name of the note that says that the part was removed."""

WHY: Final = "redacted"


def with_notes(kind: str, fields: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a redacted record as readers get them: `more` notes what was removed."""
    notes = {_NOTES[kind][part]: {"why": WHY} for part in parts}
    return dict(fields) | {"more": (fields["more"] or {}) | notes}


def from_bits(kind: str, bits: int) -> tuple[str, ...]:
    """Return the parts that bits stand for.

    Raises:
        ValueError: there are none, or a record of this kind does not have them.
    """
    parts = tuple(part for number, part in enumerate(REMOVABLE) if bits >> number & 1)
    if not parts or bits >> len(REMOVABLE) or not _NOTES.get(kind, {}).keys() >= set(parts):
        raise ValueError(f"a {kind} has no parts {bits:#x} that could have been removed")
    return parts
