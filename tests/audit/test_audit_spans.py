"""OpenTelemetry: a span for each run and call, named by the conventions for generative AI, below the current span."""

from __future__ import annotations

import json
import sys
from asyncio import CancelledError
from typing import Any

import anyio
import pytest

from audit.ledger import Ledger
from toolcell.audit.otel import SpanSink
from toolcell.errors import UsageError
from toolcell.tools import Origin, RunContext

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


class Spans:
    """An exporter in memory, and a sink that feeds it."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.sink = SpanSink(self.provider, **options)

    def finished(self) -> dict[str, ReadableSpan]:
        """Ended spans by name."""
        return {span.name: span for span in self.exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def test_a_run_and_its_calls_are_spans_below_one_another(ledger: Ledger) -> None:
    spans = Spans()
    with ledger.opened(sinks=[spans.sink]) as recorder:
        context = RunContext(run_id="r1", user_id="ada", thread_id="t1")
        ledger.run(recorder, calls=[("outer", {"query": "x"}), ("fail", {"text": "no"})], context=context)
    found = spans.finished()
    run, outer, inner, failed = (found[f"execute_tool {name}"] for name in ("execute_code", "outer", "search", "fail"))

    assert parent_of(run) is None
    assert parent_of(outer) == parent_of(failed) == run.context.span_id
    assert parent_of(inner) == outer.context.span_id
    assert attributes(run) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "execute_code",
        "gen_ai.tool.type": "function",
        "gen_ai.conversation.id": "t1",
        "enduser.id": "ada",
        "toolcell.run.id": "r1",
        "toolcell.run.sort": "code",
        "toolcell.script.sha256": attributes(run)["toolcell.script.sha256"],
        "toolcell.outcome": "ok",
        "toolcell.run.calls": 3,
        "toolcell.cpu_s": 0.0,
        "toolcell.peak_memory_bytes": 0,
    }
    assert attributes(outer) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "outer",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call_1",
        "toolcell.call.number": 1,
        "toolcell.call.origin": "code",
        "code.line.number": 1,
    }


def test_failures_carry_their_kind(ledger: Ledger) -> None:
    spans = Spans()
    with ledger.opened(sinks=[spans.sink]) as recorder:
        record = ledger.begin(recorder)
        ledger.call(record, "crash", {"text": "a secret of the host"}, 1)
        record.failed(RuntimeError("gone"))
    found = spans.finished()
    call, run = found["execute_tool crash"], found["execute_tool execute_code"]

    assert call.status.status_code is run.status.status_code is StatusCode.ERROR
    assert attributes(call)["error.type"] == "exception"
    assert attributes(run)["error.type"] == "aborted"
    assert "a secret of the host" not in call.to_json()


def test_spans_last_as_long_as_what_they_are_of(ledger: Ledger) -> None:
    spans = Spans()
    with ledger.opened(sinks=[spans.sink]) as recorder:
        ledger.run(recorder)
    run = ledger.the_run()
    found = spans.finished()

    assert found["execute_tool execute_code"].start_time == run.started_ns
    assert found["execute_tool execute_code"].end_time == run.ended_ns
    assert found["execute_tool search"].start_time == run.calls[0].started_ns
    assert found["execute_tool search"].end_time == run.calls[0].ended_ns


def test_arguments_and_results_are_left_out_unless_asked_for_and_redacted_then(ledger: Ledger) -> None:
    plain, full = Spans(), Spans(capture_content=True)
    with ledger.opened(sinks=[plain.sink, full.sink], secrets=["s3cr3t-thing"]) as recorder:
        ledger.run(recorder, calls=[("search", {"query": "s3cr3t-thing needle"})])
    without, with_content = (spans.finished()["execute_tool search"] for spans in (plain, full))

    assert "needle" not in without.to_json()
    assert json.loads(attributes(with_content)["gen_ai.tool.call.arguments"]) == {"query": "[redacted] needle"}
    assert json.loads(attributes(with_content)["gen_ai.tool.call.result"])[0]["title"] == "[redacted] needle"
    assert "s3cr3t-thing" not in with_content.to_json()


def test_a_run_is_below_the_span_that_was_current_when_it_began(ledger: Ledger) -> None:
    spans = Spans()
    tracer = spans.provider.get_tracer("an application")
    with ledger.opened(sinks=[spans.sink]) as recorder, tracer.start_as_current_span("request") as request:
        ledger.run(recorder)

    assert parent_of(spans.finished()["execute_tool execute_code"]) == request.get_span_context().span_id


def test_calls_without_a_script_are_spans_too(ledger: Ledger) -> None:
    spans = Spans()

    async def work(recorder: Any) -> None:
        async with recorder.observe(RunContext(), kind="plan") as context:
            await ledger.registry.dispatch("search", {"query": "x"}, call_id="c1", origin=Origin.PLAN, context=context)

    with ledger.opened(sinks=[spans.sink]) as recorder:
        anyio.run(work, recorder)

    assert set(spans.finished()) == {"execute_tool execute_plan", "execute_tool search"}


def test_a_call_cut_short_with_its_run_ends_with_it(ledger: Ledger) -> None:
    spans = Spans()

    @ledger.registry.tool
    async def never() -> str:
        """Wait for something that does not come."""
        record.failed(CancelledError())
        raise KeyboardInterrupt

    with ledger.opened(sinks=[spans.sink]) as recorder:
        record = ledger.begin(recorder)
        with pytest.raises(KeyboardInterrupt):
            ledger.call(record, "never", {}, 1)

    assert attributes(spans.finished()["execute_tool never"])["error.type"] == "unfinished"


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(UsageError, match=r"toolcell\[audit\]"):
        SpanSink()
