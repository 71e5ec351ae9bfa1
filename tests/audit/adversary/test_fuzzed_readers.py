"""Bytes of any kind, in any place: every reader of a log ends, says something, and raises nothing of its own."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audit.adversary.test_attacks_on_a_record import rehash
from audit.adversary.test_poisoned_records import HOSTILE, packed
from audit.ledger import Ledger
from audit.record_examples import EXAMPLES
from toolcell.audit import receipt, records
from toolcell.audit.config import RecordConfig
from toolcell.audit.filters import Filter
from toolcell.audit.otel import SpanSink
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedRun
from toolcell.audit.replay_diff import Comparison
from toolcell.audit.retention import removals
from toolcell.audit.sinks import AuditEvent
from toolcell.cli.audit import changed_parts
from toolcell.control.replays import AnsweringTools, recorded_result
from toolcell.errors import ToolcellError
from toolcell.results import ExecutionResult, Outcome

MOST_S = 20.0
"""Far more than any reader needs for a log of some hundred records, on a busy machine too."""


def each_reader(ledger: Ledger) -> None:
    """Verify, list, show, compare, export, check, replay's preparations, and what retention would remove."""
    ledger.verify()
    removals(ledger.path, RecordConfig(keep_s=1), [ledger.key])
    with Index(ledger.path, [ledger.key]) as index:
        index.stats()
        runs = []
        for summary in index.runs(Filter(limit=None)):
            attempt(lambda summary=summary: runs.append(index.load(summary)))
            attempt(lambda summary=summary: receipt.check(receipt.export(index, summary), [ledger.key]))
    for run in runs:
        json.dumps(run.to_dict())
        changed_parts(run, runs[0])
        attempt(lambda run=run: replay_parts(run))


def attempt(work: Callable[[], Any]) -> None:
    try:
        work()
    except ToolcellError:
        pass


def replay_parts(run: RecordedRun) -> None:
    """What a replay does with a record before and after the script runs."""
    AnsweringTools(run, {}, None, None).definitions()
    for call in run.script_calls().values():
        recorded_result(call)
        Comparison(run).call(call, "search", {"query": "x"})
    if run.end:
        Comparison(run).end(ExecutionResult("id", Outcome.OK, 1, True))
    run.runtime_options()


def mutations(data: bytes, dice: random.Random) -> bytes:
    """Flip, cut, repeat, exchange and insert."""
    for _ in range(dice.randint(1, 4)):
        at, to = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        match dice.randrange(5):
            case 0:
                data = (
                    data[:at]
                    + bytes(dice.randrange(256) for _ in range(min(9, to - at)))
                    + data[at + min(9, to - at) :]
                )
            case 1:
                data = data[:at] + data[to:]
            case 2:
                data = data[:to] + data[at:to] + data[to:]
            case 3:
                data = data[:at] + dice.randbytes(dice.randrange(300)) + data[at:]
            case _:
                data = data[:at]
    return data


@pytest.mark.parametrize("seed", range(6))
def test_a_file_of_any_bytes_stops_no_reader(ledger: Ledger, seed: int) -> None:
    ledger.fill(3)
    ledger.path.write_bytes(mutations(ledger.path.read_bytes(), random.Random(seed)))
    started = time.monotonic()
    attempt(lambda: each_reader(ledger))

    assert time.monotonic() - started < MOST_S


@pytest.mark.parametrize("seed", range(6))
def test_chained_events_of_any_content_stop_no_reader(ledger: Ledger, seed: int) -> None:
    """Whole runs in which fields are exchanged for hostile values, in events that are linked."""
    dice = random.Random(seed)
    ledger.fill(2)
    for event in ledger.found():
        fields = [*event.fields.values()]
        for _ in range(dice.randrange(3)):
            fields[dice.randrange(len(fields))] = dice.choice(HOSTILE)
        ledger.rows("UPDATE event SET body = ? WHERE n = ?", packed(tuple(fields)), event.seq)
    rehash(ledger, ledger.rows("SELECT writer FROM event")[0][0])
    each_reader(ledger)

    assert not ledger.verify().ok


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, name=ANY_TEXT, printed=ANY_TEXT, who=ANY_TEXT, tool=ANY_TEXT, source=ANY_TEXT)
def test_whatever_was_recorded_is_well_formed(
    tmp_path_factory: pytest.TempPathFactory, value: Any, name: str, printed: str, who: str, tool: str, source: str
) -> None:
    """Any names, ids, values and texts: each record has the shapes that readers rely on, and the log verifies."""
    from toolcell.tools import RunContext

    ledger = Ledger(tmp_path_factory.mktemp("any") / "runs.db")
    context = RunContext(run_id=name or "x", user_id=who, thread_id=name, channel=who)
    with ledger.opened(settings={"value_bytes": 64, "logs_bytes": 64}, heads=ledger.path.parent / "heads") as recorder:
        calls = [("search", {"query": printed}), (tool, {name: 1}), ("fail", {"text": printed})]
        ledger.run(
            recorder,
            source,
            calls,
            context=context,
            value=value,
            printed=printed,
            inputs={"v": value},
            files=[(name or "f", printed.encode("utf-8", "surrogatepass"))],
        )
    report = ledger.verify(heads=[])

    assert report.ok, report.findings
    assert ledger.kinds().count(records.CALL_ENDED) == 3
    assert ledger.the_run().end["outcome"] == "ok"


def test_spans_of_any_records_are_made_or_left_out() -> None:
    pytest.importorskip("opentelemetry.sdk")
    sink = SpanSink(capture_content=True)
    dice = random.Random(5)
    for _ in range(300):
        kind = dice.choice([*EXAMPLES])
        fields = dict(zip(records.FIELDS[kind], EXAMPLES[kind], strict=False))
        body = packed((*fields.values(),))
        sink(AuditEvent(kind, "chain", 5, 5, 5, records.fields_of(kind, body)))
