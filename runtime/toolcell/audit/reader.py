"""A recorded run and its calls, put together from their events. Nothing here decides whether an event is genuine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.records import StoredEvent
from toolcell.audit.shapes import RELATIONS
from toolcell.audit.sinks import AuditEvent
from toolcell.config import Limits, Policy, package_name
from toolcell.errors import UsageError
from toolcell.results import UNFINISHED
from toolcell.support.data_text import json_line, jsonable
from toolcell.support.times import time_of

# Runs

LABELS: Final = {
    "args": "sent",
    "corrected": "corrected",
    "rewritten_by": "rewritten by",
    "decided": "decided",
    "made": "made",
    "answered_from": "answered from",
    "verdict": "verdict",
    "why": "refused",
    "warnings": "warnings",
    "hosts": "hosts",
    "secret_names": "secrets sent",
    "code": "failure",
    "message": "message",
    "value": "answer",
}
"""Names of facts, in the order in which they happen, and what people read. Others follow, under their own names."""

_CALL_ID: Final = re.compile(r"call_(\d+)")
"""Of a call that a script makes itself."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One recorded call."""

    number: int
    """Counts the run's calls in the order they started, from 1."""
    call_id: str
    parent: int | None
    """Number of the call it was made in."""
    tool: str
    origin: str
    """model, plan[i], code, subagent."""
    line: int | None
    """Line of the script that called, as the guest claims."""
    args: Any
    started_ns: int
    started_seq: int
    status: str = UNFINISHED
    ended_ns: int | None = None
    duration_s: float = 0.0
    value: Any = None
    code: str | None = None
    """Code of the failure."""
    start_extra: Mapping[str, Any] = field(default_factory=dict)
    """What few records of a call's start have, such as coercions; `more` in the log."""
    end_extra: Mapping[str, Any] = field(default_factory=dict)
    """What few records of a call's end have, such as a failure's details; `more` in the log."""
    ended_seq: int = 0

    @property
    def is_finished(self) -> bool:
        """True when its end was recorded."""
        return self.status != UNFINISHED

    @property
    def message(self) -> str:
        """Why it failed; empty when it did not."""
        return str(self.end_extra.get("message", ""))

    @property
    def verdict(self) -> str:
        """`allowed`; else the tool did not run: `substituted` by a hook's answer, or the status of the refusal."""
        return str(self.start_extra.get("verdict", "allowed"))

    @property
    def facts(self) -> dict[str, Any]:
        """Return what is recorded of a call besides its place in the run, by name: how it was sent, corrected, decided
        about and made, which run answered it, and what came of it. What did not happen, or is not known, is missing.
        """
        found: dict[str, Any] = {} if "args_cut" in self.start_extra else {"args": self.args}
        found |= self.start_extra
        if self.code is not None:
            found["code"] = self.code
        elif self.is_finished and "value_cut" not in self.end_extra:
            found["value"] = self.value
        redacted = [each["redacted"] for each in (self.start_extra, self.end_extra) if "redacted" in each]
        found |= self.end_extra
        if len(redacted) == 2 and all(type(each) is int for each in redacted):
            found["redacted"] = sum(redacted)
        order = {name: place for place, name in enumerate(LABELS)}
        names = sorted(found, key=lambda name: order.get(name.removesuffix("_cut"), len(order)))
        return {name: found[name] for name in names}

    def lines(self, written: Callable[[Any], str] = json_line) -> Iterator[tuple[str, str]]:
        """Yield the facts of a call for people: a label and a text. `written`: returns values of any kind as text."""
        facts = self.facts
        for name, value in facts.items():
            label = LABELS.get(name.removesuffix("_cut"), name.replace("_", " "))
            match name:
                case _ if name.endswith("_cut") and isinstance(value, Mapping):
                    yield label, not_recorded(value)
                case "verdict":
                    if value == "substituted":
                        yield label, "answered by a hook, the tool did not run"
                case "code" if "message" in facts:
                    yield label, f"{value}: {facts['message']}"
                case "message" if "code" in facts:
                    continue
                case "decided":
                    yield label, decision_text(value)
                case "answered_from":
                    yield label, f"run {value}; the tool did not run"
                case "rewritten_by" | "hosts" | "secret_names":
                    yield label, ", ".join(map(str, value))
                case _:
                    yield label, written(value)

    @property
    def place(self) -> str:
        """Say who made a call, and where: `by code, line 4, in call 2, id call_3`."""
        line = f", line {self.line}" if self.line else ""
        parent = f", in call {self.parent}" if self.parent else ""
        return f"by {self.origin}{line}{parent}{f', id {self.call_id}' if self.call_id else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        place = {
            "number": self.number,
            "call_id": self.call_id,
            "parent": self.parent,
            "tool": self.tool,
            "origin": self.origin,
            "line": self.line,
            "started_ns": self.started_ns,
            "status": self.status,
            "duration_s": self.duration_s,
            "verdict": self.verdict,
        }
        return {name: jsonable(value) for name, value in (self.facts | place).items()}


@dataclass(frozen=True, slots=True)
class LinkedRun:
    """One of the runs that go on from each other, as the table of runs says; its own events are the proof."""

    id: str
    chain: str
    seq: int
    started_ns: int
    outcome: str
    user: str
    relation: str | None
    parent: str | None
    decided_by: str | None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One recorded run: its start, calls and end."""

    id: str
    chain: str
    seq: int
    """Number of its first record."""
    kind: str
    """`code`: a script. Others are calls without a sandbox; `sort` in the log."""
    started_ns: int
    start: Mapping[str, Any]
    """Fields of its first record."""
    calls: tuple[RecordedCall, ...] = ()
    ended_ns: int | None = None
    end: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its last record; empty when there is none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] = field(default_factory=dict)
    family: tuple[LinkedRun, ...] = ()
    """The runs that it goes on from, and that go on from it, itself among them; empty if there are none."""

    @property
    def outcome(self) -> str:
        """The recorded outcome."""
        return str(self.end["outcome"]) if self.end else UNFINISHED

    @property
    def value_text(self) -> str:
        """The value that it returned as a line of JSON, or what is recorded in its place."""
        missing = (self.end.get("more") or {}).get("value_cut")
        return not_recorded(missing) if missing else json_line(self.end["value"])

    def script_calls(self) -> dict[int, RecordedCall]:
        """Return the calls that a script made itself, by the number it gave them, in order."""
        found = {}
        for call in self.calls:
            match = _CALL_ID.fullmatch(call.call_id)
            if match is not None and call.parent is None and call.origin == "code":
                found[int(match[1])] = call
        return dict(sorted(found.items()))

    @property
    def source(self) -> str | None:
        """The script. None: the run had none, or it was too large to keep."""
        return self.start.get("source")

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the script, without what redaction has taken out."""
        return self.start.get("sha256")

    @property
    def limits(self) -> Mapping[str, Any]:
        """The run's limits."""
        return self.settings.get("limits") or {}

    @property
    def policy(self) -> Mapping[str, Any]:
        """The run's policy, with its own lint profile, seed and clock."""
        own = {name: self.start.get(name) for name in ("lint", "seed", "clock")}
        return {**(self.settings.get("policy") or {}), **own}

    @property
    def isolation(self) -> Mapping[str, Any]:
        """Backend, live layers and environment, as tenants may see it: `packages` without the folders of wheels."""
        recorded = self.settings.get("isolation") or {}
        if not self.packages:
            return recorded
        shown = [package_name(str(each)) for each in self.packages]
        return {**recorded, "environment": {**recorded["environment"], "packages": shown}}

    @property
    def egress(self) -> Sequence[Mapping[str, Any]]:
        """The rules about requests under which it ran, with the names of secrets; empty if it could send none."""
        return self.settings.get("egress") or ()

    @property
    def packages(self) -> Sequence[Any]:
        """The packages that the script could import, as the runtime was given them."""
        recorded = self.settings.get("isolation") or {}
        return (recorded.get("environment") or {}).get("packages") or ()

    @property
    def definitions(self) -> list[Any]:
        """Definitions of the tools that the run could call. Shape: [[name, description, parameters, what it returns if
        known]]."""
        return self.tools.get("definitions") or []

    @property
    def who(self) -> Mapping[str, Any]:
        """The user, thread, chat and parent run that it ran for."""
        return self.start.get("who") or {}

    def who_lines(self) -> Iterator[tuple[str, str]]:
        """Yield for whom a run was, which one it goes on from, and who had it go on."""
        for name, value in self.who.items():
            is_link = name in RELATIONS or name == "decided_by"
            yield (name.replace("_", " ") if is_link else f"for {name}"), str(value)

    def runtime_options(self) -> dict[str, Any]:
        """Return the arguments for a `Runtime` that can repeat this run.

        Raises:
            UsageError: a runtime does not take the recorded limits or policy.
        """
        environment = self.isolation.get("environment") or {}
        known = {name: value for name, value in self.limits.items() if name in Limits.model_fields}
        try:
            policy = Policy(hash_seed=self.policy.get("hash_seed"), profile=self.policy.get("profile") or "full")
            limits = Limits(**known)
        except ValueError as exc:
            raise UsageError(f"run {self.id} was recorded with settings that no runtime takes: {exc}") from exc
        return {
            "policy": policy,
            "limits": limits,
            "packages": tuple(self.packages),
            "preload": tuple(environment.get("preload") or ()),
        }

    def decision_lines(self, written: Callable[[Any], str] = json_line) -> Iterator[tuple[str, str]]:
        """Yield what a run was told of the calls that had waited, and the calls for which it waits itself."""
        for each in (self.start.get("more") or {}).get("decisions") or ():
            yield "decided", f"{_call_text(each, written)}: {decision_text(each)}{_time_text(each.get('at_ns'))}"
        for each in (self.end.get("more") or {}).get("waits") or ():
            yield "waits for", f"{_call_text(each, written)}: {each.get('why')}"

    def family_lines(self) -> Iterator[str]:
        """Yield a line for each of the runs that go on from each other, the oldest first."""
        for each in self.family:
            is_own = (each.chain, each.seq) == (self.chain, self.seq)
            link = f", {each.relation} {each.parent}" if each.relation else ""
            by = f", decided by {each.decided_by}" if each.decided_by else ""
            user = f", for {each.user}" if each.user else ""
            yield f"{'*' if is_own else ' '} {each.id} {each.outcome}{user}{link}{by}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        start = {name: value for name, value in self.start.items() if name not in ("id", "sort", "files")}
        files = self.start.get("files") or []
        plain = {
            "id": self.id,
            "chain": self.chain,
            "seq": self.seq,
            "sort": self.kind,
            "outcome": self.outcome,
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "start": start | {"files": [entry[:3] for entry in files]},
            "limits": self.limits,
            "policy": self.policy,
            "isolation": self.isolation,
            "egress": self.egress,
            "definitions": self.definitions,
            "calls": [call.to_dict() for call in self.calls],
            "end": dict(self.end),
        }
        return {name: jsonable(value) for name, value in plain.items()}


def decision_text(decided: Mapping[str, Any]) -> str:
    """Return a decision in words: `edit by bob: too much`."""
    by, reason = decided.get("by"), decided.get("reason")
    return f"{decided.get('decision')}{f' by {by}' if by else ''}{f': {reason}' if reason else ''}"


def not_recorded(missing: Mapping[str, Any]) -> str:
    """Say what is recorded in place of a value, and why: size, digest and beginning."""
    what = f"{missing.get('bytes')} bytes, sha256 {str(missing['sha256'])[:16]}, " if "sha256" in missing else ""
    tables = f", {missing['tables']}" if "tables" in missing else ""
    head = f"; it begins {missing['head']!r}" if "head" in missing else ""
    return f"({what}not recorded: {missing.get('why')}{tables}{head})"


def _call_text(row: Mapping[str, Any], written: Callable[[Any], str]) -> str:
    args = not_recorded(row["args_cut"]) if isinstance(row.get("args_cut"), Mapping) else row.get("args")
    shown = f" {args if isinstance(args, str) else written(args)}" if args is not None else ""
    line = f" in line {row['line']}" if row.get("line") else ""
    return f"{row.get('call')} {row.get('tool')}{shown}{line}"


def _time_text(at_ns: Any) -> str:
    return f", at {time_of(at_ns)}" if type(at_ns) is int and at_ns >= 0 else ""


def assemble(found: Iterable[StoredEvent], shared: Mapping[str, Mapping[str, Any]]) -> RecordedRun | None:
    """Build a run from its events; None when its first event is missing. `shared` is settings and tools by digest.

    Raises:
        ValueError: a body is not one that toolcell writes.
    """
    run: RecordedRun | None = None
    calls: dict[int, RecordedCall] = {}
    ended_ns, end = None, {}
    for event in sorted(found, key=lambda each: each.seq):
        fields = event.fields
        match event.kind:
            case records.RUN_STARTED:
                settings, tools = shared.get(fields["terms"] or "", {}), shared.get(fields["tools"] or "", {})
                own = (fields["id"], event.chain, event.seq, fields["sort"], event.at_ns, fields)
                run = RecordedRun(*own, settings=settings, tools=tools)
            case records.CALL_STARTED:
                calls[fields["number"]] = started_call(fields, event)
            case records.CALL_ENDED if (started := calls.get(fields["number"])) is not None:
                calls[started.number] = ended_call(started, fields, event)
            case records.RUN_ENDED:
                ended_ns, end = event.at_ns, fields
    if run is None:
        return None
    return replace(run, calls=tuple(calls[number] for number in sorted(calls)), ended_ns=ended_ns, end=end)


def started_call(fields: Mapping[str, Any], event: StoredEvent | AuditEvent) -> RecordedCall:
    """Build a call from the event of its start."""
    return RecordedCall(
        fields["number"],
        fields["call"],
        parent=fields["parent"],
        tool=fields["tool"],
        origin=fields["origin"],
        line=fields["line"],
        args=fields["args"],
        started_ns=event.at_ns,
        started_seq=event.seq,
        start_extra=fields["more"] or {},
    )


def ended_call(started: RecordedCall, fields: Mapping[str, Any], event: StoredEvent | AuditEvent) -> RecordedCall:
    """Add the event of a call's end."""
    return replace(
        started,
        status=fields["status"],
        ended_ns=event.at_ns,
        ended_seq=event.seq,
        duration_s=fields["duration_us"] / 1e6,
        value=fields["value"],
        code=fields["code"],
        end_extra=fields["more"] or {},
    )
