"""Every view of a record shows of a call what its events say: one function decides that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.testclient import TestClient

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from audit.test_audit_spans import Spans
from rows import each_row
from toolcell.audit import Index, records
from toolcell.audit.log import AuditLog
from toolcell.audit.reader import LABELS
from toolcell.cli.audit_terminal import style_of
from toolcell.results import standing_of
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.app import create_viewer
from toolcell.service.viewer.visitors import OneLog

CUT: Final = {"why": "size", "bytes": 70707, "sha256": "5ha256" * 10, "head": "the-beginning"}

STARTED: Final[dict[str, Any]] = {
    "number": 7,
    "call": "call_77",
    "parent": None,
    "tool": "the-tool",
    "origin": "plan[3]",
    "line": 4321,
    "args": {"euros": "the-sent"},
    "more": {
        "corrected": [{"path": "the-path", "from": "the-from", "to": "the-to"}],
        "rewritten_by": ["the-hook"],
        "decided": {"decision": "edit", "by": "the-approver", "reason": "the-reason"},
        "made": {"euros": "the-made"},
        "answered_from": "the-other-run",
        "verdict": "substituted",
        "why": "the-refusal",
        "warnings": ["the-warning"],
        "hosts": ["the-host"],
        "secret_names": ["THE_SECRET"],
        "depth": 3,
        "later": "the-addition",
    },
}
ANSWERED: Final[dict[str, Any]] = {
    "number": 7,
    "status": "ok",
    "duration_us": 1234,
    "value": {"paid": "the-answer"},
    "code": None,
    "more": {"text": "the-text", "files": [["the-file", "text/plain", 5]], "job": "the-job"},
}
FAILED: Final = ANSWERED | {
    "status": "the-status",
    "value": None,
    "code": "the-code",
    "more": {"message": "the-message", "details": {"at": "the-detail"}, "exc": "the-class", "trace": "the-trace"},
}
WORDS: Final = {  # where a view writes something in another way than the event does
    "duration_us": ("1.23 ms", "1.234 ms", "1234000", "0.001234", ""),
    "verdict": ("substituted", "answered by a hook"),
    "more": ("",),
    "number": ("7",),
    "later": ("the-addition",),
}


def leaves(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Every text and number in the fields of an event, with the field that it belongs to."""
    match value:
        case dict():
            return [
                leaf for key, each in value.items() for leaf in leaves(each, name if name != "more" and name else key)
            ]
        case list():
            return [leaf for each in value for leaf in leaves(each, name)]
        case None:
            return []
    return [(name, str(value))]


def write(log: AuditLog, end: dict[str, Any] | None, started: dict[str, Any] = STARTED, outcome: str = "ok") -> None:
    run = log.append(
        records.RUN_STARTED,
        0,
        ("the-run", "code", "x = 1", "00ff", None, None, [], None, None, "off", 7, 1.5, None, {"user": "ann"}, {}),
    )
    for kind, fields in ((records.CALL_STARTED, started), (records.CALL_ENDED, end)):
        if fields is None:
            return
        assert set(fields) == set(records.FIELDS[kind])
        log.append(kind, run, tuple(fields[name] for name in records.FIELDS[kind]))
    nothing = (None, False, None, [], [0, 0, False], [], None, {}, [1, 0], {})
    log.append(records.RUN_ENDED, run, (outcome, *nothing))


def viewer(ledger: Ledger) -> str:
    log = LogReader(ledger.path, [ledger.key])
    host = OneLog(log, 80)
    with TestClient(create_viewer(host, ["testserver"]), follow_redirects=True) as client:
        client.get("/", params={"token": host.token})
        run = ledger.the_run()
        page = client.get(f"/runs/{run.chain}/{run.seq}").text
    log.close_now()
    return page


def html(ledger: Ledger) -> str:
    path = ledger.path.with_suffix(".html")
    assert invoke("show", ledger.path, "last", "--html", path)[0] == 0
    return path.read_text()


def receipt(ledger: Ledger) -> str:
    path = ledger.path.with_suffix(".json")
    assert invoke("export", ledger.path, "last", "-o", path)[0] == 0
    return json.dumps(json.loads(path.read_text())["run"])


def found_by_grep(ledger: Ledger) -> str:
    found = json.loads(invoke("grep", ledger.path, ".", "--json")[1])["matches"]
    return "\n".join(f"{each['where']} {each['text']} {each['call']}" for each in found)


VIEWS: Final[dict[str, Callable[[Ledger], str]]] = {
    "audit show --full": lambda ledger: invoke("show", ledger.path, "last", "--full")[1],
    "audit show --json": lambda ledger: invoke("show", ledger.path, "last", "--json")[1],
    "audit show --html": html,
    "audit events --format jsonl": lambda ledger: invoke("events", ledger.path, "--format", "jsonl")[1],
    "audit events --format ecs": lambda ledger: invoke("events", ledger.path, "--format", "ecs")[1],
    "audit grep": found_by_grep,
    "audit export": receipt,
    "viewer": viewer,
}


@pytest.mark.parametrize("end", [ANSWERED, FAILED], ids=["answered", "failed"])
def test_every_view_shows_every_field_of_the_events_of_a_call(
    ledger: Ledger, end: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    spans = Spans(capture_content=True)
    with ledger.log(sinks=[spans.sink]) as log:
        write(log, end)
    told = [str(span.attributes) + str(span.status.description) for span in spans.exporter.get_finished_spans()]
    shown = {name: view(ledger) for name, view in VIEWS.items()} | {"OpenTelemetry": "\n".join(told)}

    expected = [*leaves(STARTED), *leaves(end)]
    named = {name for name, _ in expected}
    assert set(LABELS) - {"code", "message", "value"} <= named | {"code"}
    missing = [
        (view, field, text)
        for field, text in expected
        for view, page in shown.items()
        if not any(word in page for word in WORDS.get(field, (text,)))
        and not (view == "OpenTelemetry" and field in ("status", "verdict") and text in ("ok", "the-status"))
    ]
    assert missing == []


def test_every_view_shows_what_is_recorded_in_place_of_a_value(ledger: Ledger) -> None:
    started = STARTED | {"args": None, "more": {"args_cut": CUT, "made_cut": CUT | {"bytes": 80808}}}
    spans = Spans(capture_content=True)
    with ledger.log(sinks=[spans.sink]) as log:
        write(log, ANSWERED | {"value": None, "more": {"value_cut": CUT | {"bytes": 90909}}}, started)
    told = "\n".join(str(span.attributes) for span in spans.exporter.get_finished_spans())
    shown = {name: view(ledger) for name, view in VIEWS.items()} | {"OpenTelemetry": told}

    for view, page in shown.items():
        assert [size for size in ("70707", "80808", "90909") if size not in page] == [], view
        assert "the-beginning" in page, view


@pytest.mark.parametrize(("outcome", "standing"), [("ok", "good"), ("suspended", "open"), ("killed", "bad")])
def test_every_view_says_of_an_outcome_whether_it_is_good_open_or_bad(
    ledger: Ledger, outcome: str, standing: str
) -> None:
    spans = Spans()
    with ledger.log(sinks=[spans.sink]) as log:
        write(log, ANSWERED, outcome=outcome)
    *_, ended = map(json.loads, VIEWS["audit events --format ecs"](ledger).splitlines())

    assert standing_of(outcome) == standing
    assert ended["event"]["outcome"] == {"good": "success", "open": "unknown", "bad": "failure"}[standing]
    assert style_of(outcome) == {"good": "green", "open": "yellow", "bad": "red"}[standing]
    assert f'class="mark {standing}">{outcome}<' in viewer(ledger)
    assert spans.finished()["execute_tool execute_code"].status.is_ok == (standing != "bad")


@each_row(
    ("status", "standing"),
    [
        ("ok", "good"), ("pending", "good"), ("collected", "good"), ("suspended", "open"), ("unfinished", "open"),
        ("timeout", "bad"),
    ],
)  # fmt: skip
def test_every_view_says_of_a_call_whether_it_is_good_open_or_bad(tmp_path: Path, status: str, standing: str) -> None:
    ledger = Ledger(tmp_path / "runs.db")
    with ledger.log() as log:
        write(log, None if status == "unfinished" else ANSWERED | {"status": status})
    failed = int(standing == "bad")

    assert re.search(f'<h3><span class="{standing}">7 the-tool: {status}[ <]', html(ledger))
    with Index(ledger.path) as index:
        counted = (index.hosts(), index.tool_table(), index.stats()["tools"])
    assert [table[0]["failed"] for table in counted] == [failed] * 3
