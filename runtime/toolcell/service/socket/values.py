"""Results of the runtime as plain data for the wire, and back: the same classes at both ends, equal to one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolcell.control import PlanRows
from toolcell.results import (
    CommitResult,
    ExecutionResult,
    Outcome,
    OutputFile,
    Preflight,
    RevertResult,
    SessionFile,
    Suspension,
)
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

Made = TypeVar("Made")


def plain_record(record: Any) -> Any:
    """Return dataclasses as dicts of their fields, all the way down. Data inside them is left as it is."""
    if is_dataclass(record) and not isinstance(record, type):
        return {each.name: plain_record(getattr(record, each.name)) for each in fields(record)}
    if isinstance(record, Enum):
        return str(record.value)
    if isinstance(record, tuple):
        return [plain_record(each) for each in record]
    if isinstance(record, Mapping) and type(record) is not dict:
        return {name: plain_record(each) for name, each in record.items()}
    return record


def _reader(kind: Any) -> Callable[[Any], Any]:
    adapter = TypeAdapter(kind)

    def read(plain: Any) -> Any:
        try:
            return adapter.validate_python(plain)
        except ValidationError as exc:
            raise RemoteProtocolError(f"no {kind}: {exc.errors()[0]['msg']}") from exc

    return read


def _plan_rows(plain: Any) -> PlanRows:
    try:
        rows = PlanRows(plain["rows"], plain["run_id"], plain["journal_id"])
        rows.suspension = READERS["suspension"](plain["suspension"]) if plain["suspension"] is not None else None
        rows.files = tuple(map(READERS["output_file"], plain["files"]))
    except (KeyError, TypeError) as exc:
        raise RemoteProtocolError(f"no rows of a plan: {exc}") from exc
    return rows


def _with_state(plain: Any) -> dict[str, Any]:
    if not (isinstance(plain, dict) and isinstance(plain.get("state"), dict) and "value" in plain):
        raise RemoteProtocolError("no answer of a session")
    return plain


READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "result": _reader(ExecutionResult),
    "commit": _reader(CommitResult),
    "revert": _reader(RevertResult),
    "preflight": _reader(Preflight),
    "suspension": _reader(Suspension),
    "suspensions": _reader(list[Suspension]),
    "output_file": _reader(OutputFile),
    "files": _reader(tuple[SessionFile, ...]),
    "names": _reader(list[str]),
    "bool": _reader(bool),
    "bytes": _reader(bytes),
    "plan": _plan_rows,
    "nothing": lambda plain: None,
    "state": _with_state,
}
"""How the caller reads what a method returns, by the name of its kind."""


def plain_rows(rows: PlanRows) -> dict[str, Any]:
    """Return the rows of a plan for the wire."""
    return {
        "rows": list(rows),
        "run_id": rows.run_id,
        "journal_id": rows.journal_id,
        "suspension": plain_record(rows.suspension),
        "files": plain_record(rows.files),
    }


def reference_to(result: object) -> dict[str, Any]:
    """Return what the service needs to know of a result that a caller hands back, such as to `revert`."""
    kinds = {ExecutionResult: "result", CommitResult: "commit", PlanRows: "plan"}
    kind = next((name for cls, name in kinds.items() if isinstance(result, cls)), "")
    plain = {"kind": kind, "run_id": getattr(result, "run_id", ""), "journal_id": getattr(result, "journal_id", "")}
    if isinstance(result, ExecutionResult):
        plain |= {name: getattr(result, name) for name in ("draft_id", "draft_digest", "has_value", "value")}
    return plain


def referred(plain: Mapping[str, Any]) -> Any:
    """Return a result that stands for the one that a caller handed back."""
    run_id, journal_id = _text(plain, "run_id"), _text(plain, "journal_id")
    match plain.get("kind"):
        case "result":
            return ExecutionResult(
                run_id,
                Outcome.OK,
                plain.get("value"),
                plain.get("has_value") is True,
                draft_id=_text(plain, "draft_id"),
                draft_digest=_text(plain, "draft_digest"),
                journal_id=journal_id,
            )
        case "commit":
            return CommitResult(run_id, (), journal_id=journal_id)
        case "plan":
            return PlanRows([], run_id, journal_id)
    return None


def _text(plain: Mapping[str, Any], name: str) -> str:
    found = plain.get(name, "")
    return found if isinstance(found, str) else ""


def sendable_value(value: Any, what: str) -> Any:
    """Return a value as the wire takes it, or a text that says why it cannot be sent."""
    try:
        return to_plain(value, what)
    except (UnsendableValue, ValueTooLarge, ValueError, TypeError) as exc:
        return f"({exc})"
