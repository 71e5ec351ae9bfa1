"""The pages of the viewer over a log, asked for as a browser would, without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from starlette.testclient import TestClient

from audit.ledger import SCRIPT, Ledger
from rows import each_row
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index
from toolcell.errors import UsageError
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.app import create_viewer
from toolcell.service.viewer.rendering import as_download, as_image, disposition
from toolcell.service.viewer.runs_pages import PAGE, page_before, place_of, runs_after, wanted_of
from toolcell.service.viewer.visitors import OneLog

pytestmark = pytest.mark.quick

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "runs")


@pytest.fixture
def client(ledger: Ledger) -> Iterator[TestClient]:
    with ledger.opened() as recorder:
        ledger.run(recorder, SCRIPT, printed="hello\n", files=[("dot.png", PNG), ("../x.svg", b"<svg/>")])
        ledger.run(recorder, "# second\nset_result(2)", calls=(("fail", {"text": "no luck"}),))
    yield from viewing(ledger)


def viewing(ledger: Ledger) -> Iterator[TestClient]:
    log = LogReader(ledger.path, [ledger.key])
    host = OneLog(log, 80)
    with TestClient(create_viewer(host, ["testserver"]), follow_redirects=True) as client:
        assert client.get("/", params={"token": host.token}).status_code == 200
        yield client
    log.close_now()


def first_run(client: TestClient, text: str = "") -> str:
    found = re.search(r'<a href="(/runs/[0-9a-f]{12}/\d+)"', client.get("/runs", params={"q": text}).text)
    assert found
    return found[1]


def test_the_list_has_each_run_with_outcome_calls_and_trust(client: TestClient) -> None:
    page = client.get("/runs").text

    assert "2 in the log" in page
    assert page.index("# second") < page.index("rows = call_tool")
    assert page.count('<span class="mark good">verified</span>') == 2
    assert "(1 failed)" in page


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"q": "SECOND"}, 1),
        ({"q": "search"}, 1),
        ({"tool": "fail"}, 1),
        ({"tool": "f*"}, 0),
        ({"outcome": "ok"}, 2),
        ({"outcome": "timeout"}, 0),
        ({"trust": "verified"}, 2),
        ({"trust": "broken"}, 0),
        ({"since": "1h"}, 2),
        ({"until": "1h"}, 0),
        ({"since": "2001-01-01T00:00"}, 2),
    ],
    ids=str,
)
def test_filters_in_the_address_choose_runs(client: TestClient, params: dict[str, str], count: int) -> None:
    assert client.get("/runs", params=params).text.count('<tr id="run-') == count


@pytest.mark.parametrize("params", [{"outcome": "x"}, {"since": "soon"}, {"before": "1"}, {"trust": "<b>"}], ids=str)
def test_a_wrong_value_in_the_address_is_named(client: TestClient, params: dict[str, str]) -> None:
    answer = client.get("/runs", params=params)

    assert answer.status_code == 400
    assert "want" in answer.text or "follow the links" in answer.text


def test_a_run_shows_script_calls_output_result_limits_files_and_trust(client: TestClient) -> None:
    page = client.get(first_run(client, "search")).text

    for text in (
        "call_tool(&#39;search&#39;",
        "1 search: ok",
        "hello",
        "Use of limits",
        "dot.png",
        "verified",
        "Tool calls",
    ):
        assert text in page, text
    assert page.count("<img ") == 1
    assert "Run it again" in page


def test_parts_of_a_run_can_be_downloaded_whole(client: TestClient) -> None:
    run = first_run(client, "search")

    assert client.get(f"{run}/parts/script").text == SCRIPT
    assert client.get(f"{run}/parts/output").text == "hello\n"
    assert '"query": "x"' in client.get(f"{run}/parts/sent-1").text
    assert client.get(f"{run}/parts/answer-1").headers["content-disposition"].startswith("attachment")
    assert client.get(f"{run}/parts/nothing").status_code == 404
    assert client.get(f"{run}/parts/answer-9").status_code == 404


def test_only_pictures_are_shown_and_every_file_can_be_kept(client: TestClient) -> None:
    run = first_run(client, "search")

    picture = client.get(f"{run}/pictures/0")
    assert picture.content == PNG
    assert picture.headers["content-type"] == "image/png"
    assert "sandbox" in picture.headers["content-security-policy"]
    assert client.get(f"{run}/pictures/1").status_code == 404
    kept = client.get(f"{run}/files/1")
    assert kept.content == b"<svg/>"
    assert kept.headers["content-type"] == "application/octet-stream"
    assert kept.headers["content-disposition"] == "attachment; filename=\"x.svg\"; filename*=UTF-8''x.svg"
    assert client.get(f"{run}/files/2").status_code == 404


@each_row(
    "name",
    [
        'a"; filename="evil.html', "a\r\nSet-Cookie: x=1", "../../etc/passwd", "C:\\con.txt", "\u202egnp.exe", "ä ö.csv",
        "", "...", "x" * 5000, "\ud800", "a\0b", "%0d%0a", "a;b=c", "<svg onload=1>",
    ],
    ids=ascii,
)  # fmt: skip
def test_no_name_of_a_file_breaks_out_of_its_header(name: str) -> None:
    header = disposition(name)
    answer = as_download(name, b"x")

    assert answer.headers["content-disposition"] == header
    assert re.fullmatch(r'attachment; filename="[A-Za-z0-9._-]{1,160}"; filename\*=UTF-8\'\'[A-Za-z0-9._~%-]+', header)
    last = unquote(header.rpartition("''")[2])
    assert not set(last) & set("\r\n\0/\u202e") and last.strip(". ")


@each_row("data", [b"", b"<svg/>", b"GIF8<script>", b"\x89PNG", b"%PDF-1.7", b"<!doctype html>"])
def test_what_does_not_begin_like_a_picture_is_none(data: bytes) -> None:
    assert as_image(data) is None


def test_tools_are_listed_with_calls_errors_and_what_the_script_was_told(client: TestClient) -> None:
    page = client.get("/tools").text
    assert page.index(">fail<") < page.index(">outer<")

    tool = client.get("/tool", params={"name": "search"}).text
    assert "Search for something and find one thing." in tool
    assert "&#34;query&#34;" in tool
    assert client.get("/tool", params={"name": "nothing"}).status_code == 404


def test_the_overview_counts_outcomes_tools_and_failures(client: TestClient) -> None:
    page = client.get("/").text

    assert re.search(r"<dt>Runs</dt><dd>2</dd>", page)
    assert "/runs?outcome=ok" in page
    assert client.get("/", params={"window": "1h"}).status_code == 200
    assert client.get("/", params={"window": "1y"}).status_code == 400


def token_of(client: TestClient) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/verify").text)
    assert found
    return found[1]


def test_verifying_shows_progress_and_says_that_nothing_is_wrong(client: TestClient) -> None:
    client.post("/verify", data={"csrf": token_of(client)})
    page = wait_for_check(client)

    assert "Nothing is wrong" in page
    assert ">2<" in page


def wait_for_check(client: TestClient) -> str:
    for _ in range(1000):
        page = client.get("/verify/state").text
        if "Checking:" not in page:
            return page
    raise AssertionError(page)


def test_verifying_locates_a_change(client: TestClient, ledger: Ledger) -> None:
    ledger.rows("UPDATE event SET at = at + 1 WHERE n = 3")

    client.post("/verify", data={"csrf": token_of(client)})
    page = wait_for_check(client)
    assert "edited" in page and "findings" in page
    assert "broken" in client.get("/runs").text


def test_new_runs_appear_and_a_run_under_way_is_followed(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "# before")
        for client in viewing(ledger):
            page = client.get("/runs").text
            newer = re.search(r'id="new-runs" hx-get="([^"]+)"', page)
            assert newer
            under_way = ledger.begin(recorder, "# live\nx = 1")
            new = wait_for(client, newer[1].replace("&amp;", "&"), "# live")
            assert "# before" not in new
            assert "unfinished" in new
            run = first_run(client, "live")
            assert 'hx-trigger="every 1s"' in client.get(run).text
            seen = re.search(r'hx-get="([^"]+/state\?seen=[^"]+)"', client.get(run).text)
            assert seen
            assert client.get(seen[1]).status_code == 204
            ledger.call(under_way, "search", {"query": "now"}, 1)
            assert "now" in wait_for(client, seen[1], "now")
            under_way.end_calls()
            assert "every 1s" not in wait_for(client, f"{run}/state", '<div id="run-state">')


def wait_for(client: TestClient, path: str, text: str) -> str:
    for _ in range(1000):
        page = client.get(path).text
        if text in page:
            return page
    raise AssertionError(page)


# The list


def filled(ledger: Ledger, runs: int) -> Index:
    ledger.fill(runs)
    return Index(ledger.path, [ledger.key])


def test_the_pages_of_the_list_hold_each_run_once_in_order(ledger: Ledger) -> None:
    with filled(ledger, 2 * PAGE + 7) as index:
        wanted, _ = wanted_of({})
        seen, before = [], None
        while True:
            page = page_before(index, wanted, before)
            seen += page.runs
            if not page.older:
                break
            before = place_of(page.older)

        expected = index.runs(Filter(limit=None))[::-1]
        assert [run.id for run in seen] == [run.id for run in expected]
        assert len(page.runs) == 7
        newest, third = seen[0], seen[2]
        assert runs_after(index, wanted, (third.started_ns, third.seq, third.chain)) == seen[:2]
        assert runs_after(index, wanted, (newest.started_ns, newest.seq, newest.chain)) == []


def test_a_page_with_a_wanted_trust_looks_at_a_bounded_number_of_runs(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcell.service.viewer.runs_pages.MAX_LOOKED_AT", PAGE)
    with filled(ledger, PAGE + 1) as index:
        wanted, _ = wanted_of({"trust": "broken"})
        page = page_before(index, wanted, None)

        assert (page.runs, bool(page.older)) == ([], True)
        rest = page_before(index, wanted, place_of(page.older))
        assert (rest.runs, rest.older) == ([], "")


def test_a_place_in_the_list_is_three_numbers_and_nothing_else() -> None:
    assert place_of("5.6.0123456789ab") == (5, 6, "0123456789ab")
    for wrong in ("5", "5.6.x", "5.6.0123456789ab ", "9" * 19 + ".1.0123456789ab", "-1.2.0123456789ab", "' OR 1 --"):
        with pytest.raises(UsageError):
            place_of(wrong)


@pytest.mark.parametrize("tool", ["*", "?????", "[a-z]*", "sear[c]h", "%", "_____"])
def test_a_tool_in_the_address_is_a_name_and_no_pattern(client: TestClient, tool: str) -> None:
    assert client.get("/runs", params={"tool": tool}).text.count('<tr id="run-') == 0
