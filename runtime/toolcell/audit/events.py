"""Runs as events for other systems: one JSON object per line, plain or in the fields of the Elastic Common Schema.

Each event says how far its run can be trusted. Scripts' text is inside JSON strings in ASCII, so it can forge no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.audit.shapes import RELATIONS
from toolcell.results import standing_of
from toolcell.support.data_text import jsonable
from toolcell.support.times import time_of

Shape = Literal["jsonl", "ecs"]
"""`jsonl`: an event of a run holds all that is recorded. `ecs`: Elastic Common Schema, for a SIEM."""

ECS_VERSION: Final = "8.17.0"
DATASET: Final = "toolcell.audit"
OUTCOMES: Final = {"good": "success", "open": "unknown", "bad": "failure"}


def event_lines(run: RecordedRun, title: str, trust: str, shape: Shape) -> Iterator[str]:
    """Yield the events of a run as lines of JSON: its start, each call, and its end if there is one."""
    events = ecs_events(run, title, trust) if shape == "ecs" else plain_events(run, trust)
    yield from (json.dumps(event, sort_keys=False) for event in events)


def unreadable_line(id: str, chain: str, seq: int, started_ns: int, why: str) -> str:
    """Return the line for a run whose records cannot be read. It has the fields of both shapes."""
    event = {"kind": "event", "action": "run-unreadable", "outcome": "unknown", "dataset": DATASET}
    about = {"run": id, "chain": chain, "seq": seq, "trust": "broken"}
    return json.dumps({"@timestamp": time_of(started_ns), "event": event, **about, "error": {"message": why}})


def plain_events(run: RecordedRun, trust: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a run with everything that is recorded of it."""
    about = {"run": run.id, "chain": run.chain, "seq": run.seq, "trust": trust}
    start = run.to_dict()
    end = start.pop("end")
    calls = start.pop("calls")
    yield {"event": "run_started", "at": time_of(run.started_ns), **about, **start}
    for call in calls:
        yield {"event": "call", "at": time_of(call["started_ns"]), **about, **call}
    if run.end:
        yield {"event": "run_ended", "at": time_of(run.ended_ns or 0), **about, **end}


def ecs_events(run: RecordedRun, title: str, trust: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in ECS fields; what ECS has no field for is under `toolcell`."""
    base = {
        "ecs": {"version": ECS_VERSION},
        "service": {"type": "toolcell"},
        "trace": {"id": run.id},
        **({"user": {"id": str(run.who["user"])}} if run.who.get("user") else {}),
    }
    who = {name: run.who[name] for name in (*RELATIONS, "decided_by") if name in run.who}
    own = {"run": who | {"id": run.id, "chain": run.chain, "seq": run.seq, "kind": run.kind}, "trust": trust}
    script = {"hash": {"sha256": run.start.get("sha256")}, "title": title}
    asked = {"script": script, "decisions": [text for _, text in replace(run, end={}).decision_lines()]}
    yield _ecs("run-started", "start", base, own | asked, at_ns=run.started_ns, seq=run.seq)
    for call in run.calls:
        yield _ecs(
            "tool-call",
            "info",
            base,
            own | {"call": _call(call)},
            at_ns=call.started_ns,
            seq=call.started_seq,
            outcome=call.status,
            duration_s=call.duration_s,
            message=call.message,
        )
    if run.end:
        duration_s = max(0, (run.ended_ns or 0) - run.started_ns) / 1e9
        error = run.end.get("error") or {}
        detail = {
            "outcome": run.outcome,
            "calls": len(run.calls),
            "waits": [text for _, text in replace(run, start={}).decision_lines()],
            "files": [{"name": name, "size": size, "sha256": sha256} for name, _, size, sha256, _ in run.end["files"]],
        }
        yield _ecs(
            "run-ended",
            "end",
            base,
            own | detail,
            at_ns=run.ended_ns or 0,
            seq=run.seq,
            outcome=run.outcome,
            duration_s=duration_s,
            message=str(error.get("message", "")),
        )


def _ecs(
    action: str,
    kind: str,
    base: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    at_ns: int,
    seq: int,
    outcome: str | None = None,
    duration_s: float | None = None,
    message: str = "",
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "kind": "event",
        "category": ["process"],
        "type": [kind],
        "action": action,
        "dataset": DATASET,
        "provider": "toolcell",
        "sequence": seq,
    }
    if outcome is not None:
        event["outcome"] = OUTCOMES[standing_of(outcome)]
    if duration_s is not None:
        event["duration"] = round(duration_s * 1e9)
    failed = {"error": {"message": message, "code": outcome}} if message else {}
    return {"@timestamp": time_of(at_ns), "event": event, **base, **failed, "toolcell": jsonable(own)}


def _call(call: RecordedCall) -> dict[str, Any]:
    """Return a call with the same type for a field whatever a script or a tool put there: values are JSON as text."""
    facts = {
        name: value if name in _TYPED or isinstance(value, str) else json.dumps(jsonable(value))
        for name, value in call.facts.items()
    }
    place = ("number", "call_id", "parent", "tool", "origin", "line", "verdict", "status", "code")
    return facts | {name: getattr(call, name) for name in place}


_TYPED: Final = frozenset({"rewritten_by", "decided", "warnings", "hosts", "secret_names", "depth", "redacted"})
"""Facts whose types are ours."""
