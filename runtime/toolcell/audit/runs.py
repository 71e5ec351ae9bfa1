"""A run as one thing again: its start, calls and end, put together from records.

Frozen data for people, the index, receipts and replay. Decides nothing about whether records are genuine.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.reader import Located
from toolcell.audit.records import Record, Unrecordable

UNFINISHED: Final = "unfinished"
"""Outcome of a run, and status of a call, that has a start and no end: it is under way, or its host was killed."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call, as recorded."""

    number: int
    """Counts the run's calls in the order they started, from 1."""
    call_id: str
    parent: int | None
    """Number of the call it was made in."""
    tool: str
    origin: str
    """model, plan[i], code, subagent."""
    line: int | None
    """Line of the script that called, as the script's side claims."""
    args: Any
    started_ns: int
    started_seq: int
    status: str = UNFINISHED
    ended_ns: int | None = None
    duration_s: float = 0.0
    value: Any = None
    code: str | None = None
    """Of the failure."""
    start_more: Mapping[str, Any] = field(default_factory=dict)
    end_more: Mapping[str, Any] = field(default_factory=dict)
    ended_seq: int = 0

    @property
    def is_finished(self) -> bool:
        """True when its end was recorded."""
        return self.status != UNFINISHED

    @property
    def message(self) -> str:
        """Why it failed; empty when it did not."""
        return str(self.end_more.get("message", ""))

    @property
    def verdict(self) -> str:
        """`allowed`, or the status with which it was refused before its tool ran."""
        return str(self.start_more.get("verdict", "allowed"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {
            "number": self.number,
            "call_id": self.call_id,
            "parent": self.parent,
            "tool": self.tool,
            "origin": self.origin,
            "line": self.line,
            "verdict": self.verdict,
            "args": self.args,
            "started_ns": self.started_ns,
            "status": self.status,
            "duration_s": self.duration_s,
            "value": self.value,
            "code": self.code,
            "start": dict(self.start_more),
            "end": dict(self.end_more),
        }
        return {name: jsonable(value) for name, value in plain.items()}


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run, as recorded."""

    id: str
    chain: str
    seq: int
    """Of its first record."""
    sort: str
    started_ns: int
    start: Mapping[str, Any]
    """Fields of its first record."""
    calls: tuple[RecordedCall, ...] = ()
    ended_ns: int | None = None
    end: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its last record; empty when there is none."""
    terms: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """How it ended."""
        return str(self.end["outcome"]) if self.end else UNFINISHED

    @property
    def source(self) -> str | None:
        """The script; None when there was none, or it was too large to keep."""
        return self.start.get("source")

    @property
    def lines(self) -> list[str]:
        """The script's lines; empty when it is not there."""
        return (self.source or "").split("\n")

    @property
    def limits(self) -> Mapping[str, Any]:
        """Limits it ran under."""
        return self.terms.get("limits") or {}

    @property
    def policy(self) -> Mapping[str, Any]:
        """Policy it ran under, with what was chosen for this run alone."""
        own = {name: self.start.get(name) for name in ("lint", "seed", "clock")}
        return {**(self.terms.get("policy") or {}), **own}

    @property
    def isolation(self) -> Mapping[str, Any]:
        """Backend, live layers and environment."""
        return self.terms.get("isolation") or {}

    @property
    def definitions(self) -> list[Any]:
        """Shape: [[name, description, parameters]] of the tools it might call."""
        return self.tools.get("definitions") or []

    @property
    def who(self) -> Mapping[str, Any]:
        """For whom and in what it ran."""
        return self.start.get("who") or {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        start = {name: value for name, value in self.start.items() if name not in ("id", "sort", "files")}
        files = self.start.get("files") or []
        plain = {
            "id": self.id,
            "chain": self.chain,
            "seq": self.seq,
            "sort": self.sort,
            "outcome": self.outcome,
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "start": start | {"files": [entry[:3] for entry in files]},
            "limits": self.limits,
            "policy": self.policy,
            "isolation": self.isolation,
            "definitions": self.definitions,
            "calls": [call.to_dict() for call in self.calls],
            "end": dict(self.end),
        }
        return {name: jsonable(value) for name, value in plain.items()}


def assemble(found: Iterable[Located], common: Mapping[str, Mapping[str, Any]]) -> RecordedRun | None:
    """One run from its records; None when its first one is not among them. `common` is by digest."""
    run: RecordedRun | None = None
    calls: dict[int, RecordedCall] = {}
    ended_ns, end = None, {}
    for located in sorted(found, key=lambda each: each.record.seq):
        record, fields = located.record, located.record.fields
        match record.kind:
            case records.RUN_STARTED:
                terms, tools = common.get(fields["terms"] or "", {}), common.get(fields["tools"] or "", {})
                where = (located.place.chain, record.seq)
                run = RecordedRun(fields["id"], *where, fields["sort"], record.at_ns, fields, terms=terms, tools=tools)
            case records.CALL_STARTED:
                calls[fields["number"]] = started_call(fields, record)
            case records.CALL_ENDED if (started := calls.get(fields["number"])) is not None:
                calls[started.number] = ended_call(started, fields, record)
            case records.RUN_ENDED:
                ended_ns, end = record.at_ns, fields
    if run is None:
        return None
    made = tuple(calls[number] for number in sorted(calls))
    return RecordedRun(
        run.id, run.chain, run.seq, run.sort, run.started_ns, run.start, made, ended_ns, end, run.terms, run.tools
    )


def started_call(fields: Mapping[str, Any], record: Record) -> RecordedCall:
    """A call of which only the start is known."""
    return RecordedCall(
        fields["number"],
        fields["call"],
        fields["parent"],
        fields["tool"],
        fields["origin"],
        fields["line"],
        fields["args"],
        record.at_ns,
        record.seq,
        start_more=fields["more"] or {},
    )


def ended_call(started: RecordedCall, fields: Mapping[str, Any], record: Record) -> RecordedCall:
    """The same with its end."""
    return replace(
        started,
        status=fields["status"],
        ended_ns=record.at_ns,
        ended_seq=record.seq,
        duration_s=fields["duration_us"] / 1e6,
        value=fields["value"],
        code=fields["code"],
        end_more=fields["more"] or {},
    )


def jsonable(value: Any) -> Any:
    """Recorded data as JSON has it."""
    match value:
        case Mapping():
            return {str(key): jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item) for item in value]
        case bytes():
            return {"base64": base64.b64encode(value).decode("ascii")}
        case Unrecordable(kind, text):
            return {"unrecordable": kind, "text": text}
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        case _:
            return value
