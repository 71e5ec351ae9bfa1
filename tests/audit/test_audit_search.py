"""Finding runs by content, comparing two, following a log, and handing runs to other systems."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from rows import each_row
from toolcell.audit.config import ToolContent
from toolcell.audit.events import Shape
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index, Trust
from toolcell.audit.text_search import LINE_CHARS, Search, word_of
from toolcell.audit.titles import title_of
from toolcell.calls.call import RunScope
from toolcell.cli import audit, exits
from toolcell.results import ExecutionResult, LogEntry, Logs, Outcome, OutputFile
from toolcell.support.times import time_of
from toolcell.tools import RunContext, ToolRegistry

KEPT = "kept in the file"
TEXTS = {
    "plain words of a source": {"source": "x = 'plain words of a source'"},
    "na\u00efve \u4e16\u754c": {"inputs": {"key": "na\u00efve \u4e16\u754c"}},
    "\\xfe\\xedfeed me": {"files": [("a.bin", b"\xfe\xedfeed me")]},
    "-123456.75": {"inputs": {"n": -123456.75}},
    "1e+300": {"inputs": {"n": 1e300}},
    "True": {"inputs": {"n": True}},
    "87112285931760246646623899502532662132736": {"inputs": {"n": 2**136}},
    "cell of a table": {"value": [{"name": "cell of a table"}]},
    "file name.csv": {"files": [("file name.csv", b"")]},
}
"""Text to search for in pieces, and the run that has it."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """A run for each text, and one whose two streams are mixed."""
    np = pytest.importorskip("numpy")
    ledger = Ledger(tmp_path_factory.mktemp("texts") / "runs.db")
    with ledger.opened(heads=ledger.path.parent / "heads") as recorder:
        for fields in TEXTS.values():
            ledger.run(recorder, **fields)
        record = ledger.begin(recorder)
        entries = [("stdout", "plain wo"), ("stderr", "beside"), ("stdout", "rds of a source")]
        logs = Logs(tuple(LogEntry(*entry) for entry in entries), 23)
        record.end(ExecutionResult(record.context.run_id, Outcome.OK, np.array([1.5, 2.5]), True, logs))
    return ledger


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """One run with something to find in every field, and one run without."""
    with ledger.opened() as recorder:
        record = ledger.begin(
            recorder,
            "# look for nothing\nx = 'in-source'",
            inputs={"name": "in-inputs"},
            files=[("in-name.txt", KEPT.encode())],
            context=RunContext(run_id="aaaa1111", user_id="in-who", scope=RunScope(depth=1)),
        )
        ledger.call(record, "search", {"query": "in-args"}, 1)
        ledger.call(record, "fail", {"text": "in-failure"}, 2)
        logs = Logs((LogEntry("stdout", "first\nin-out"), LogEntry("stderr", "put\n")), 20)
        file = OutputFile("report.csv", "text/csv", 7, b"in-file", "c0ffee")
        record.end(ExecutionResult("aaaa1111", Outcome.OK, ["in-value"], True, logs, (file,)))
        ledger.run(recorder, "y = 1", [], context=RunContext(run_id="bbbb2222"))
    return ledger


def found(ledger: Ledger, pattern: str) -> list[tuple[str, int, int | None]]:
    with Index(ledger.path, [ledger.key]) as index:
        matches = Search().search(index, Filter(limit=None), re.compile(pattern))
        return [(each.where, each.line, each.call.number if each.call else None) for each in matches]


def test_content_is_found_in_every_field_with_the_call_it_came_from(filled: Ledger) -> None:
    digest = filled.the_run("aaaa1111").end["files"][0][3]
    expected = {
        "in-source": ("source", 2, None),
        "in-inputs": ("inputs.name", 1, None),
        "in-who": ("who.user", 1, None),
        "in-name": ("file in-name.txt", 1, None),
        KEPT: ("file in-name.txt", 1, None),
        "in-args": ("args.query", 1, 1),
        "in-output": None,  # two streams
        "in-out": ("stdout", 2, None),
        "put": ("stderr", 1, None),
        "in-value": ("value[0]", 1, None),
        digest: ("file report.csv sha256", 1, None),
        "aaaa1111": ("id", 1, None),
    }

    for pattern, where in expected.items():
        assert (where in found(filled, pattern)) if where else not found(filled, pattern), pattern
    assert ("message", 1, 2) in found(filled, "in-failure")
    assert ("value[0].title", 1, 1) in found(filled, "in-args")


@given(st.sampled_from([*TEXTS]), st.data())
def test_a_plain_text_is_found_by_the_word_in_the_events_as_it_is_by_reading_every_run(
    recorded: Ledger, text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    wanted = text[start : data.draw(st.integers(start + 1, len(text)))]
    with Index(recorded.path) as index:
        fixed = [each.where for each in Search().search(index, Filter(limit=None), re.compile(re.escape(wanted)))]
        read = [
            each.where for each in Search().search(index, Filter(limit=None), re.compile(f"(?:{re.escape(wanted)})"))
        ]
    assert fixed == read


def test_a_word_is_looked_for_in_the_events_and_few_runs_are_read(filled: Ledger) -> None:
    with Index(filled.path) as index:
        for text, word in {"in-source": b"in-source", "two words, and": b"words,", r"a\.b-c": b".b-c"}.items():
            assert word_of(re.compile(text)) == word
        for text in ("in.out", "abc", "1e5", "rue", "(?:in)", "cafe:12", "xfeed", "a|b-c"):
            assert word_of(re.compile(text)) is None
        assert word_of(re.compile("in-source", re.I)) is None
        assert len(index.runs(Filter(limit=None, may_hold=b"y = 1"))) == 2
        assert [run.id for run in index.runs(Filter(limit=None, may_hold=b"nowhere"))] == ["aaaa1111"]  # two streams
        latest = Search().search(index, Filter(limit=1), re.compile("in-source"))
        assert not [*latest]  # it is in the run before


def test_a_match_in_a_long_line_is_found_wherever_it_stands(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        for before in range(LINE_CHARS - 8, LINE_CHARS + 2):
            ledger.run(recorder, "a" * before + "needle" + "b" * 5000, [])

    assert len(found(ledger, "needle")) >= 10
    with Index(ledger.path) as index:
        hits = Search().search(index, Filter(), re.compile("needle"))
        assert len({each.run.seq for each in hits}) == 10


def test_grep_says_how_many_matches_it_does_not_show(filled: Ledger) -> None:
    status, out, err = invoke("grep", filled.path, "in-", "-n", "2")
    report = json.loads(invoke("grep", filled.path, "in-", "-n", "2", "--json")[1])

    assert status == exits.OK
    assert out.count("in-") >= 2 and "aaaa1111" in out
    assert report["more"] > 3 and f"{report['more']} more matches" in err
    assert (len(report["matches"]), report["runs"]) == (2, 2)
    every = json.loads(invoke("grep", filled.path, "in-", "-n", "0", "--json")[1])
    assert (len(every["matches"]), every["more"]) == (2 + report["more"], 0)


def test_grep_names_what_it_could_not_search(ledger: Ledger) -> None:
    with ledger.opened(settings={"value_bytes": 64}) as recorder:
        ledger.run(recorder, calls=[("search", {"query": "x" * 100 + "needle"})])
    status, out, err = invoke("grep", ledger.path, "needle")

    assert (status, out) == (exits.FAILED, "")
    assert "not recorded in full" in err


def test_patterns_are_expressions_or_fixed_texts(filled: Ledger) -> None:
    assert invoke("grep", filled.path, "IN-SOURCE")[0] == exits.FAILED
    assert invoke("grep", filled.path, "IN-SOURCE", "-i")[0] == exits.OK
    assert invoke("grep", filled.path, "in.source")[0] == exits.OK
    assert invoke("grep", filled.path, "in.source", "-F")[0] == exits.FAILED
    for wrong in ("(", ""):
        assert invoke("grep", filled.path, wrong)[0] == exits.USAGE


def test_grep_shows_no_terminal_control(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "needle \x1b]0;title\x07 \u202e", [])

    for flags in ([], ["--full"]):
        out = invoke("grep", ledger.path, "needle", *flags)[1]
        assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_two_runs_are_compared(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        for name, text in (("aaaa", "x"), ("bbbb", "x"), ("cccc", "z")):
            ledger.run(
                recorder,
                f"a = 1\nb = '{text}'",
                [("search", {"query": text}), ("outer", {"query": "1"})],
                context=RunContext(run_id=name),
                printed=f"same\n{text}\n",
                value=text,
            )
    same = invoke("diff", ledger.path, "aaaa", "bbbb")
    status, out, _ = invoke("diff", ledger.path, "aaaa", "cccc")
    report = json.loads(invoke("diff", ledger.path, "aaaa", "cccc", "--json")[1])

    assert (same[0], "no difference" in same[1]) == (exits.OK, True)
    assert status == exits.FAILED
    assert "-b = 'x'" in out and "+b = 'z'" in out and "call 1" in out
    assert [each["what"] for each in report["changes"]] == [
        "source", "call 1 args", "call 1 made", "call 1 value", "value", "stdout",
    ]  # fmt: skip
    assert [line[0] for each in report["changes"][4:] for line in each["lines"] if line[0] in "+-"] == ["-", "+"] * 2
    assert {"what": "value", "lines": ["@@ -1 +1 @@", '-"x"', '+"z"']} in report["changes"]


def test_content_and_its_digest_are_no_difference(ledger: Ledger) -> None:
    files, returned = [("b", b"b"), ("a", b"a")], [OutputFile(name, "", 1, b"", name) for name in "ba"]

    def run(name: str, text: str, order: int, **settings: Any) -> None:
        ledger.registry = ToolRegistry()
        ledger.registry.tool(search, description=f"Search as {name} does, and find what was asked for.")
        with ledger.opened(settings=settings) as recorder:
            given: Any = {"inputs": {"a": text}, "files": files[::order], "context": RunContext(run_id=name)}
            record = ledger.begin(recorder, f"a = '{text}'", **given)
            ledger.call(record, "search", {"query": text}, 1)
            logs = Logs((LogEntry("stdout", text),), len(text))
            record.end(ExecutionResult(name, Outcome.OK, text, True, logs, tuple(returned[::order])))

    def search(query: str) -> str:
        return query

    def compared(one: str, two: str) -> list[str]:
        return [each["what"] for each in json.loads(invoke("diff", ledger.path, one, two, "--json")[1])["changes"]]

    small = {"source_bytes": 100, "value_bytes": 100, "logs_bytes": 100}
    run("full", "x" * 200, 1)
    run("digests", "x" * 200, -1, **small)
    run("others", "y" * 200, 1, **small)
    run("omitted", "x" * 200, 1, tools={"*": ToolContent(args="omit")})
    every = ["source", "inputs", "call 1 args", "call 1 value", "value", "logs"]

    assert compared("full", "digests") == compared("digests", "full") == []
    assert compared("full", "others") == compared("digests", "others") == every
    assert compared("full", "omitted") == compared("omitted", "digests") == ["call 1 args"]


def test_long_texts_are_compared_up_to_their_first_different_line(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        for name, item in (("aaaa", 7), ("bbbb", 8)):
            value = [*range(1500), item, *range(1000)]
            ledger.run(recorder, "x = 1", [], context=RunContext(run_id=name), value=value)
    (change,) = json.loads(invoke("diff", ledger.path, "aaaa", "bbbb", "--json")[1])["changes"]

    head, *lines = change["lines"]
    assert head == "@@ line 1502 of 2503 and 2503 is the first that differs @@"
    assert [lines[0], lines[10], lines[11]] == ["- 7,", "  ... 992 more lines", "+ 8,"]
    assert "+ 8," in invoke("diff", ledger.path, "aaaa", "bbbb")[1]


def test_a_long_list_says_how_many_runs_it_does_not_show(ledger: Ledger) -> None:
    ledger.fill(52)
    out = invoke("list", ledger.path)[1]
    _, listed, err = invoke("list", ledger.path, "--json", "-n", "3")

    assert "and 2 older runs" in out
    assert (len(json.loads(listed)), "and 49 older runs" in err) == (3, True)
    assert "older" not in invoke("list", ledger.path, "-n", "0")[1]


@each_row("count", [0, 1, 2])
def test_tail_begins_with_so_many_of_the_newest_runs(filled: Ledger, count: int) -> None:
    status, out, _ = invoke("tail", filled.path, "-n", str(count), "--json")

    assert (status, len(out.splitlines())) == (0, count)


@each_row("command", [["list"], ["tail"], ["grep", "in-"]])
def test_a_number_that_no_database_takes_is_refused(filled: Ledger, command: list[str]) -> None:
    name, *rest = command
    status, _, err = invoke(name, filled.path, *rest, "-n", str(10**23))

    assert (status, str(10**23) in err, "1000000000" in err) == (exits.USAGE, True, True)


def test_full_cuts_nothing(ledger: Ledger) -> None:
    source = "\n".join(f"line_{number} = 1" for number in range(60))
    with ledger.opened() as recorder:
        ledger.run(recorder, source, [("search", {"query": "q" * 300})], printed="\n".join(map(str, range(1000, 1040))))
    short, full = (invoke("show", ledger.path, "last", *flags)[1] for flags in ([], ["--full"]))

    assert "line_59" not in short and "20 more lines: --full" in short and "q" * 300 not in short
    assert "line_59" in full and "q" * 300 in full and "1039" in full


def test_times_name_their_zone(filled: Ledger) -> None:
    assert re.search(r"\d\d:\d\d:\d\d [+-]\d{4} ", invoke("list", filled.path)[1])
    assert time_of(0) == "1970-01-01T00:00:00.000000+00:00"
    assert time_of((1 << 63) - 1).endswith("+00:00")


def everything(folder: Path) -> set[Path]:
    """All files, without those that SQLite makes beside a record to read it."""
    return {path for path in folder.rglob("*") if not path.name.endswith(("-wal", "-shm"))}


@each_row("command", [["list"], ["show", "last"], ["stats"], ["grep", "in-"], ["events"], ["tail"]])
def test_reading_writes_nothing_anywhere(filled: Ledger, command: list[str]) -> None:
    home = filled.path.parents[1]
    whole, before = filled.path.read_bytes(), everything(home)
    name, *rest = command
    status, *_ = invoke(name, filled.path, *rest)

    assert status == exits.OK
    assert filled.path in before
    assert everything(home) == before and filled.path.read_bytes() == whole


def test_a_followed_log_shows_runs_when_they_are_signed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FOLLOW_S", 0)
    ledger.fill(1)
    with Index(ledger.path, [ledger.key]) as index:
        coming = audit.new_runs(index, Filter(limit=None))
        ledger.fill(1)
        (signed,) = next(coming)
        with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
            ledger.run(recorder, "set_result('new')", [])
            (unsigned,) = next(coming)
        (later,) = next(coming)

    assert (signed.title, signed.trust) == ("set_result(0)", Trust.VERIFIED)
    assert (unsigned.seq, unsigned.trust) == (later.seq, Trust.UNSIGNED)
    assert later.trust == Trust.VERIFIED


def test_events_are_lines_of_json_with_trust_and_zones(filled: Ledger, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in invoke("events", filled.path)[1].splitlines()]
    invoke("events", filled.path, "--format", "ecs", "-o", tmp_path / "ecs.jsonl")
    ecs = [json.loads(line) for line in (tmp_path / "ecs.jsonl").read_text().splitlines()]

    assert [each["event"] for each in lines] == ["run_started", "call", "call", "run_ended", "run_started", "run_ended"]
    assert {each["at"][-6:] for each in lines} == {"+00:00"}
    assert {each["trust"] for each in lines} == {"unverified"}  # no key was given
    assert [each["event"]["outcome"] for each in ecs if "outcome" in each["event"]] == [
        "success",
        "failure",
        "success",
        "success",
    ]
    assert {(each["ecs"]["version"], each["event"]["dataset"]) for each in ecs} == {("8.17.0", "toolcell.audit")}
    assert [each["toolcell"]["call"]["depth"] for each in ecs if "call" in each["toolcell"]] == [1, 1]
    assert ecs[0]["user"] == {"id": "in-who"} and ecs[2]["error"]["message"]


def test_a_script_cannot_forge_an_event(ledger: Ledger) -> None:
    hostile = 'x = 1\n{"event": "run_ended"}\u2028\r\n\x1b[2J'
    with ledger.opened() as recorder:
        ledger.run(recorder, hostile, [("search", {"query": hostile})], printed=hostile)
    with Index(ledger.path) as index:
        (summary,) = index.runs()
        shapes: tuple[Shape, ...] = ("jsonl", "ecs")
        for shape in shapes:
            lines = [*index.event_lines(summary, shape)]

            assert len(lines) == 3
            assert all(line.isascii() and line.isprintable() for line in lines)


@each_row(
    ("source", "title"),
    [
        ('"""Count boxes.\n\nMore."""\nx = 1', "# Count boxes."),
        ("'''\nCount\n'''", "# Count"),
        ("'count'\nx = 1", "# count"),
        ("'a'.join(y)", "'a'.join(y)"),
        ('"""a""" + b', '"""a""" + b'),
        ("#!/usr/bin/python\n# -*- coding: utf-8 -*-\n# ------\n# Count boxes\nx = 1", "# Count boxes"),
        ("import os\ndef f():\n    pass\ntry:\n    f()\nexcept E: g()", "f()"),
        ("x = 1  # why", "x = 1  # why"),
        ("import os", "import os"),
        ("#\n#!", "#"),
        (None, ""),
        ('"""', '"""'),
        ("x" * 500, "x" * 120),
    ],
)
def test_a_title_is_what_a_script_says_of_itself_or_first_does(source: str | None, title: str) -> None:
    assert title_of(source) == title
