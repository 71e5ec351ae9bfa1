"""`toolcell top`: rates from two readings, hostile answers, and what it says when there is no service."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import build
from toolcell.cli.top import Reading, Source, picture, reading_of, state
from toolcell.errors import UsageError

TEXT = """# TYPE toolcell_runs counter
toolcell_runs_total{{outcome="ok",tenant="a"}} {ok}
toolcell_runs_total{{outcome="timeout",tenant="a"}} 1
toolcell_runs_total{{outcome="ok",tenant="b"}} 7
# TYPE toolcell_calls counter
toolcell_calls_total{{status="ok",tenant="a"}} {calls}
# TYPE toolcell_requests_running gauge
toolcell_requests_running{{tenant="a"}} 3
# TYPE toolcell_sandboxes_idle gauge
toolcell_sandboxes_idle{{tenant="a"}} 2
"""


def reading(at: float, ok: int, calls: int = 0) -> Reading:
    return reading_of(TEXT.format(ok=ok, calls=calls), at)


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request as `answer` says, and keeps the headers."""

    answer = (200, b"")
    seen: str | None = None

    def do_GET(self) -> None:
        type(self).seen = self.headers.get("Authorization")
        status, body = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:  # the other side had enough
            return

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_row_has_what_is_now_and_what_happened_a_second() -> None:
    first, other = state(reading(10.0, ok=4, calls=10), reading(12.0, ok=10, calls=40))

    assert (first["tenant"], first["runs_per_s"], first["calls_per_s"]) == ("a", 3.0, 15.0)
    assert (first["running"], first["idle"], first["busy"]) == (3, 2, 0)
    assert first["outcomes"] == {"ok": 10, "timeout": 1}
    assert (other["tenant"], other["runs_per_s"]) == ("b", 0.0)


def test_a_service_that_started_again_has_no_negative_rates() -> None:
    (first, _) = state(reading(10.0, ok=400), reading(11.0, ok=3))
    assert first["runs_per_s"] == 0.0
    assert state(reading(1.0, ok=1), reading(1.0, ok=2))[0]["runs_per_s"] == 0.0


def test_names_of_a_service_are_never_markup_or_control_characters() -> None:
    hostile = 'toolcell_runs_total{outcome="\x1b[31mred",tenant="[bold]x\u202e"} 1\n'
    out = io.StringIO()
    now = reading_of(hostile, 1.0)
    Console(file=out, width=200, color_system=None).print(picture("http://x", state(now, now)))

    assert "[bold]x" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert "\u202e" not in out.getvalue()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, b""), "wants a token with the scope read"),
        ((403, b""), "wants a token with the scope read"),
        ((404, b""), "answers 404"),
        ((200, b"<html>{"), "not metrics"),
        ((200, b'toolcell_runs_total{tenant="a"} many\n'), "not metrics"),
        ((200, b'toolcell_sessions_open{tenant="a"} NaN\n'), "not metrics"),
        ((200, b'toolcell_requests_running{tenant="a"} +Inf\n'), "not metrics"),
        ((200, b"\xff\xfe"), "does not answer"),
    ],
)
def test_an_answer_that_is_none_is_a_clear_error(
    url: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes], says: str
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(UsageError, match=says):
        Source(url, "").read()


def test_an_endless_answer_is_cut(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcell.cli.top.MAX_BYTES", 1000)
    monkeypatch.setattr(Answers, "answer", (200, b"# " + b"x" * 5000))
    with pytest.raises(UsageError, match="longer than 1000 bytes"):
        Source(url, "").read()


@each_row("wrong", ["", "127.0.0.1:8700", "file:///etc/passwd", "http://[::1", "http://127.0.0.1:1"])
def test_a_wrong_url_is_named(wrong: str) -> None:
    with pytest.raises(UsageError):
        Source(wrong, "").read()


def test_the_command_shows_json_and_sends_the_token(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Answers, "answer", (200, TEXT.format(ok=1, calls=2).encode()))
    (tmp_path / "token").write_text("tcs_a_secret\n")
    arguments = ["top", url, "--token-file", str(tmp_path / "token"), "--interval-s", "0.1"]
    shown = CliRunner().invoke(build(arguments), [*arguments, "--json"])

    assert shown.exit_code == 0, shown.output
    assert [row["tenant"] for row in json.loads(shown.stdout)["tenants"]] == ["a", "b"]
    assert Answers.seen == "Bearer tcs_a_secret"
    assert "a" in CliRunner().invoke(build(arguments), [*arguments, "--once"]).stdout
