"""A registered secret, planted in every place of a run and in every spelling, is nowhere on disk."""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import urllib.parse
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from audit.ledger import Ledger
from toolcell.audit import receipt, records
from toolcell.audit.otel import SpanSink
from toolcell.audit.query import Index
from toolcell.errors import ToolError
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, Outcome
from toolcell.tools import RunContext

SECRET = 'hunter2-"quoted"\\é/and more'
RAW = SECRET.encode()

SPELLINGS = {
    "as it is": SECRET,
    "beside a letter": f"x{SECRET}x",
    "in JSON": json.dumps(SECRET),
    "in JSON, not escaped": json.dumps(SECRET, ensure_ascii=False),
    "in JSON in JSON": json.dumps(json.dumps({"x": SECRET})),
    "repr()": repr(SECRET),
    "repr() of JSON": repr(json.dumps({"x": SECRET})),
    "ascii()": ascii(SECRET),
    "as Latin-1": RAW.decode("latin-1"),
    "in a URL": urllib.parse.quote(SECRET),
    "in a URL, without slashes": urllib.parse.quote(SECRET, safe=""),
    "in a form": urllib.parse.quote_plus(SECRET),
    "in a URL, lower case": re.sub("%..", lambda match: match[0].lower(), urllib.parse.quote(SECRET)),
    "hex": RAW.hex(),
    "HEX": RAW.hex().upper(),
    "base64": base64.b64encode(RAW).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(RAW).decode(),
    "base64 of user:secret": base64.b64encode(b"user:" + RAW).decode(),
    "base64, one byte later": base64.b64encode(b"a" + RAW + b"more").decode(),
    "base64, two bytes later": base64.b64encode(b"ab" + RAW + b"more").decode(),
    "cut off": SECRET[: len(SECRET) * 2 // 3],
}
MARKS = (
    b"hunter2-",
    b"quoted",
    RAW.hex().encode()[:12],
    RAW.hex().upper().encode()[:12],
    b"aHVudGVyMi0",
    b"h1bnRlcjIt",
    b"odW50ZXIyL",
)
"""Pieces of the secret, in clear, in hex and in base64 at each alignment."""


def run_with(ledger: Ledger, recorder: Any, planted: str) -> None:
    """One run that has the text in every place where a run can have one, and a plan."""
    context = RunContext(user_id=planted, thread_id=planted, channel=planted, chat_id=planted)
    record = ledger.begin(
        recorder,
        f"# {planted}\nx = 1",
        context=context,
        inputs={"a": [planted], planted: {planted: 1}},
        files=[("in.txt", planted.encode()), ("large.txt", b"x" * 100_000 + planted.encode())],
        environment={"packages": [planted]},
    )
    calls = [
        ("search", {"query": planted}),
        ("fail", {"text": planted}),
        ("crash", {"text": planted}),
        ("detail", {"text": planted}),
        ("search", {"query": planted, "limit": planted}),
        (f"unknown {planted}", {planted: [planted]}),
        ("search", {"query": "x" * 100_000 + planted}),
    ]
    for number, (name, args) in enumerate(calls, start=1):
        ledger.call(record, name, args, number)
    error = ErrorInfo(type="ValueError", message=planted, line=1, traceback=f"Traceback\n  raise {planted}")
    logs = Logs((LogEntry("stdout", planted), LogEntry("stderr", f"> {planted}")), 2 * len(planted))
    record.end(ExecutionResult(record.context.run_id, Outcome.ERROR, {"v": [planted]}, True, logs, error=error))

    async def work() -> None:
        async with recorder.observe(RunContext(user_id=planted), "plan") as observed:
            await ledger.registry.dispatch("search", {"query": planted}, context=observed)
        async with recorder.observe(RunContext(), "program"):
            raise RuntimeError(planted)

    with pytest.raises(RuntimeError):
        anyio.run(work)


@pytest.fixture
def everything(ledger: Ledger) -> dict[str, bytes]:
    """What is written of one run with the secret in each spelling: the log, its index, receipts and spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    @ledger.registry.tool(description=f"Fail with details: {SECRET}")
    async def detail(text: str) -> str:
        raise ToolError("no", details={"text": text, text: 1})

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sink = SpanSink(provider, capture_content=True)
    with ledger.opened(secrets=[SECRET], sinks=[sink]) as recorder:
        for planted in SPELLINGS.values():
            run_with(ledger, recorder, planted)
    with Index(ledger.path) as index:
        receipts = [receipt.export(index, each) for each in index.runs() if each.kind == "code"]
    with closing(sqlite3.connect(ledger.path)) as db:
        dump = "\n".join(db.iterdump()).encode()
    bodies = [base64.b64decode(step["body"]) for each in receipts for step in each["events"] if "body" in step]
    return {
        "log": ledger.bytes_on_disk(),
        "index": dump,
        "receipts": json.dumps([each["run"] for each in receipts]).encode() + b"".join(bodies),
        "spans": "".join(span.to_json() for span in exporter.get_finished_spans()).encode(),
    }


def test_a_planted_secret_is_found_nowhere(everything: dict[str, bytes], ledger: Ledger) -> None:
    for place, written in everything.items():
        assert len(written) > 10_000, place
        for mark in MARKS:
            at = written.find(mark)
            assert at < 0, (place, written[max(0, at - 60) : at + 60])
    assert ledger.kinds().count(records.RUN_STARTED) == 3 * len(SPELLINGS)
    assert ledger.verify().ok


NOT_FOUND = {
    "reversed": SECRET[::-1],
    "compressed or encrypted": RAW.translate(bytes(range(255, -1, -1))).hex(),
    "base32": base64.b32encode(RAW).decode(),
    "escaped four times": json.dumps(json.dumps(json.dumps(json.dumps(SECRET)))),
    "split": "hunter2 -quoted",
}


def test_what_the_docs_name_as_not_found_is_not(ledger: Ledger) -> None:
    """If one of these is found one day, docs/audit.md has to say so."""
    docs = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    with ledger.opened(secrets=[SECRET]) as recorder:
        for name, planted in NOT_FOUND.items():
            ledger.run(recorder, planted)
            assert ledger.fields(records.RUN_STARTED)[-1]["source"] == planted, name
            assert all(word in docs for word in name.split(" or ")), name
