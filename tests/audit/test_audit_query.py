"""The index answers from a log, follows it, and can always be rebuilt."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from house import ROOT
from rows import each_row
from toolcell.audit import receipt
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index, RunSummary
from toolcell.errors import AuditError, UsageError
from toolcell.results import UNFINISHED
from toolcell.tools import RunContext


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """Five runs for two people: ok, failing calls, other tools, in two sessions; the last without an end."""
    with ledger.opened() as recorder:
        ada, bob = RunContext(user_id="ada", thread_id="t1"), RunContext(user_id="bob", chat_id="c9")
        ledger.run(recorder, "a = 1", context=ada)
        ledger.run(recorder, "b = 1", [("search", {"query": "x"}), ("fail", {"text": "no"})], context=bob)
        ledger.run(recorder, "a = 1", [("outer", {"query": "x"})], context=RunContext(user_id="ada"))
        ledger.run(recorder, "import os\n\n# say something\nprint(1)", [])
        ledger.begin(recorder, "e = 1")
    return ledger


def asked(ledger: Ledger, **wanted: Any) -> list[RunSummary]:
    with Index(ledger.path) as index:
        return index.runs(Filter(**wanted))


@pytest.mark.conforms("T5")
@each_row(
    ("wanted", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"outcome": "ok"}, [0, 1, 2, 3]),
        ({"outcome": UNFINISHED}, [4]),
        ({"tool": "fail"}, [1]),
        ({"tool": "s*"}, [0, 1, 2]),
        ({"tool": "' OR 1=1 --"}, []),
        ({"user": "ada"}, [0, 2]),
        ({"session": "t1"}, [0]),
        ({"session": "c9"}, [1]),
        ({"user": "ada", "tool": "outer"}, [2]),
        ({"limit": 2}, [3, 4]),
        ({"limit": None}, [0, 1, 2, 3, 4]),
        ({"until_ns": 5}, []),
        ({"since_ns": 5}, [0, 1, 2, 3, 4]),
        ({"since_ns": 2**62}, []),
    ],
)
def test_runs_are_found_by_what_is_known_of_them(filled: Ledger, wanted: dict[str, Any], expected: list[int]) -> None:
    everything = asked(filled)

    assert [everything.index(line) for line in asked(filled, **wanted)] == expected


def test_runs_are_found_by_the_digest_of_their_script(filled: Ledger) -> None:
    everything = asked(filled)
    digest = everything[0].sha256
    assert digest is not None

    assert [line.seq for line in asked(filled, sha256=digest)] == [everything[0].seq, everything[2].seq]
    assert len(asked(filled, sha256=digest[:7].upper())) == 2
    assert asked(filled, sha256="%") == []


def test_a_line_says_what_a_run_was(filled: Ledger) -> None:
    first, second, _, fourth, last = asked(filled)

    assert (second.calls, second.failed, second.user, second.session) == (2, 1, "bob", "c9")
    assert first.title == "a = 1"
    assert fourth.title == "# say something"
    assert (last.outcome, last.ended_ns, last.wall_s) == (UNFINISHED, None, None)


def test_a_run_is_found_by_the_beginning_of_its_id(filled: Ledger) -> None:
    with Index(filled.path) as index:
        line = index.runs()[2]

        assert index.find(line.id) == index.find(line.id[:12]) == line
        assert index.find("last") == index.runs()[-1]
        with pytest.raises(UsageError, match="no run 'nothing'"):
            index.find("nothing")
        with pytest.raises(UsageError):
            index.find("")


def test_a_beginning_that_several_ids_share_is_not_enough(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        for _ in range(2):
            ledger.run(recorder, context=RunContext(run_id="same"))
    with Index(ledger.path) as index:
        assert index.find("same").id == "same"
        with pytest.raises(UsageError, match="several runs"):
            index.find("sam")


def test_runs_with_one_id_are_reached_by_their_place_in_the_log(ledger: Ledger) -> None:
    """List, show, export, receipts and a search name each of them in a way that only it has."""
    for number in range(3):
        with ledger.opened() as recorder:
            ledger.run(recorder, f"set_result({number})", context=RunContext(run_id="same"))
    with Index(ledger.path, [ledger.key]) as index:
        runs = index.runs()
        with pytest.raises(UsageError, match="several runs have the id 'same'") as caught:
            index.find("same")

        assert len({run.id for run in runs}) == 3
        for number, run in enumerate(runs):
            assert run.id == f"{run.chain}:{run.seq}"
            assert f"{run.id} (verified)" in str(caught.value)
            assert index.find(run.id) == run
            loaded = index.load(run)
            assert (loaded.id, loaded.source) == (run.id, f"set_result({number})")
            assert loaded.who["run"] == "same"
            made = receipt.export(index, run)
            checked = receipt.check(made, [ledger.key])
            assert checked.ok and checked.run is not None, checked.problems
            assert (checked.run.id, checked.run.seq) == ("same", run.seq)
        assert len({receipt.file_name(run.id) for run in runs}) == 3


def test_a_reader_keeps_up_with_a_log_that_is_being_written(ledger: Ledger) -> None:
    with ledger.opened() as recorder, Index(ledger.path) as index:
        for number in range(1, 15):
            record = ledger.begin(recorder)
            assert index.runs()[-1].outcome == UNFINISHED
            ledger.call(record, "search", {"query": "x"}, 1)
            record.end_calls()
            assert len(index.runs()) == number
            assert (index.runs()[-1].outcome, index.runs()[-1].calls) == ("ok", 1)


def test_counts_are_by_outcome_tool_and_day(filled: Ledger) -> None:
    with Index(filled.path) as index:
        counted = index.stats()
        tools = {row["tool"]: row for row in counted["tools"]}

        assert counted["runs"] == 5
        assert counted["scripts"] == 4
        assert counted["outcomes"] == {"ok": 4, UNFINISHED: 1}
        assert sum(counted["days"].values()) == 5
        assert (tools["search"]["calls"], tools["search"]["failed"]) == (3, 0)
        assert (tools["fail"]["calls"], tools["fail"]["failed"]) == (1, 1)
        assert tools["search"]["p50_ms"] <= tools["search"]["p95_ms"]
        assert index.stats(Filter(user="bob"))["outcomes"] == {"ok": 1}


def test_where_there_is_no_record_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="there is no record"):
        Index(tmp_path / "runs.db")

    assert list(tmp_path.iterdir()) == []


def test_any_sqlite_program_answers_the_query_of_the_first_page_about_the_record(ledger: Ledger) -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    match = re.search(r'\$ sqlite3 runs\.db "(.+)"\n((?:    \S+\|\d+\n)+)', page)
    assert match is not None
    with ledger.opened() as recorder:
        counts = [line.strip().split("|") for line in match[2].splitlines()]
        ledger.run(recorder, calls=[(tool, {}) for tool, count in counts for _ in range(int(count))])

    if (program := shutil.which("sqlite3")) is not None:
        found = subprocess.run([program, str(ledger.path), match[1]], capture_output=True, text=True, check=True).stdout
    else:
        found = "".join(f"{'|'.join(map(str, row))}\n" for row in ledger.rows(match[1]))
    assert found.splitlines() == [line.strip() for line in match[2].splitlines()]
