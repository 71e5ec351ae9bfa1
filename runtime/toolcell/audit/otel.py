"""Make OpenTelemetry spans of runs and calls from the records of an audit log.

Needs `toolcell[audit]`. Names follow the semantic conventions for generative AI: each run and each call is an
`execute_tool` span. The parent of a call's span is its run or the call that made it. Arguments and results are included
only on request, and then redacted as in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from toolcell.audit import records
from toolcell.audit.reader import RecordedCall, decision_text, ended_call, started_call
from toolcell.audit.shapes import RELATIONS
from toolcell.audit.sinks import AuditEvent
from toolcell.errors import UsageError
from toolcell.results import standing_of
from toolcell.support.data_text import json_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

RUN_TOOLS: Final = {"code": "execute_code", "plan": "execute_plan"}
"""Tool name of each kind of run; other kinds are their own name."""

_CONTENT: Final = {"args": "gen_ai.tool.call.arguments", "value": "gen_ai.tool.call.result"}
_DECIDED: Final = ("toolcell.call.decision", "toolcell.call.decision.by")


@dataclass(slots=True)
class _OpenRun:
    """A run whose end has not been recorded yet."""

    span: Span
    calls: dict[int, tuple[Span, RecordedCall]] = field(default_factory=dict)


class SpanSink:
    """A sink for `AuditLog`: `AuditLog("runs/", sinks=[SpanSink()])`."""

    def __init__(self, provider: TracerProvider | None = None, *, capture_content: bool = False) -> None:
        try:
            from opentelemetry import trace
        except ImportError as exc:
            raise UsageError("spans need OpenTelemetry: pip install 'toolcell[audit]'") from exc
        from toolcell_bridge import __version__

        self._trace = trace
        self._tracer: Tracer = trace.get_tracer("toolcell", __version__, tracer_provider=provider)
        self._capture_content = capture_content
        self._runs: dict[tuple[str, int], _OpenRun] = {}
        self._handlers = {
            records.RUN_STARTED: self._run_started,
            records.CALL_STARTED: self._call_started,
            records.CALL_ENDED: self._call_ended,
            records.RUN_ENDED: self._run_ended,
        }

    def __call__(self, event: AuditEvent) -> None:
        """Take one record."""
        if (handle := self._handlers.get(event.kind)) is not None:
            handle(event, (event.chain, event.run), event.fields)

    def _run_started(self, event: AuditEvent, key: tuple[str, int], fields: Mapping[str, Any]) -> None:
        name = RUN_TOOLS.get(fields["sort"], fields["sort"])
        who = fields["who"]
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": who.get("parent_call"),
            "gen_ai.conversation.id": who.get("thread") or who.get("chat"),
            "toolcell.run.id": fields["id"],
            "toolcell.run.sort": fields["sort"],
            "toolcell.script.sha256": fields["sha256"],
            "enduser.id": who.get("user"),
            **{f"toolcell.run.{name}": who.get(name) for name in (*RELATIONS, "decided_by")},
            **self._content("gen_ai.tool.call.arguments", fields["source"]),
        }
        # Its parent is the span that is current where the run was started, such as a request's.
        span = self._tracer.start_span(f"execute_tool {name}", attributes=_present(attributes), start_time=event.at_ns)
        self._runs[key] = _OpenRun(span)

    def _call_started(self, event: AuditEvent, key: tuple[str, int], fields: Mapping[str, Any]) -> None:
        run = self._runs.get(key)
        if run is None:
            return
        call = started_call(fields, event)
        known = run.calls.get(call.parent or 0)
        parent = known[0] if known is not None else run.span
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": fields["tool"],
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": fields["call"] or None,
            "toolcell.call.number": fields["number"],
            "toolcell.call.origin": fields["origin"],
            "code.line.number": fields["line"],
            **self._facts(call),
        }
        span = self._tracer.start_span(
            f"execute_tool {fields['tool']}",
            context=self._trace.set_span_in_context(parent),
            attributes=_present(attributes),
            start_time=event.at_ns,
        )
        run.calls[call.number] = span, call

    def _call_ended(self, event: AuditEvent, key: tuple[str, int], fields: Mapping[str, Any]) -> None:
        run = self._runs.get(key)
        found = run.calls.pop(fields["number"], None) if run is not None else None
        if found is None:
            return
        span, call = found[0], ended_call(found[1], fields, event)
        span.set_attributes(_present(self._facts(call)))
        if standing_of(call.status) == "bad":
            self._fail(span, call.code or call.status, call.message)
        span.end(event.at_ns)

    def _run_ended(self, event: AuditEvent, key: tuple[str, int], fields: Mapping[str, Any]) -> None:
        run = self._runs.pop(key, None)
        if run is None:
            return
        usage = fields["usage"]
        attributes = {
            "toolcell.outcome": fields["outcome"],
            "toolcell.run.calls": fields["calls"][0],
            "toolcell.cpu_s": usage.get("cpu_s"),
            "toolcell.peak_memory_bytes": usage.get("peak_memory_bytes"),
            **self._content("gen_ai.tool.call.result", fields["value"], fields["more"].get("value_cut")),
        }
        run.span.set_attributes(_present(attributes))
        if standing_of(fields["outcome"]) == "bad":
            self._fail(run.span, fields["outcome"], (fields["error"] or {}).get("message", ""))
        for span, _ in run.calls.values():  # calls that ended with the run
            self._fail(span, "unfinished", "")
            span.end(event.at_ns)
        run.span.end(event.at_ns)

    def _fail(self, span: Span, kind: str, message: str) -> None:
        span.set_attribute("error.type", kind)
        description = message if self._capture_content else ""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, description or kind))

    def _facts(self, call: RecordedCall) -> dict[str, Any]:
        """Return what is shown of a call: who decided and which run answered always, values only on request."""
        facts = call.facts
        found = {name: facts.get("decided", {}).get(name.rpartition(".")[2]) for name in _DECIDED}
        found["toolcell.call.answered_from"] = facts.get("answered_from")
        for name, value in facts.items() if self._capture_content else ():
            attribute = _CONTENT.get(name.removesuffix("_cut"), f"toolcell.call.{name}")
            found |= self._content(attribute, decision_text(value) if name == "decided" else value)
        return found

    def _content(self, name: str, value: Any, cut: Any = None) -> dict[str, Any]:
        """Return the attribute with a value, or with what the log says of one that was too long for it."""
        value = cut if value is None else value
        if not self._capture_content or value is None:
            return {}
        return {name: value if isinstance(value, str) else json_line(value)}


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
