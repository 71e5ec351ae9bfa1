"""`toolcell audit`: arguments, output and exit status of every command."""

from __future__ import annotations

import io
import json
import re
import stat
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from audit.ledger import Ledger
from rows import each_row
from toolcell import PoolConfig, SyncRuntime
from toolcell.audit import keys
from toolcell.audit.reader import RecordedCall
from toolcell.cli import audit_terminal, build, exits
from toolcell.errors import UsageError
from toolcell.support.times import parse_time
from toolcell.tools import RunContext, Substitute, ToolResult


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    words = ["audit", *map(str, arguments)]
    result = CliRunner().invoke(build(words), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


SCRIPT = "hits = call_tool('search', query='boxes')\ntry:\n    call_tool('fail', text='no such page')\nexcept ToolError:\n    print('skipped')\nset_result(len(hits))\n"


@pytest.fixture
def filled(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A run of several calls by somebody and a run of none, signed with the default key."""
    monkeypatch.chdir(tmp_path)
    signer = keys.own_signer()
    assert isinstance(signer, keys.HmacKey)
    ledger.key = signer
    with ledger.opened() as recorder:
        calls = [
            ("search", {"query": "boxes", "limit": "5"}),
            ("fail", {"text": "no such page"}),
            ("outer", {"query": "x"}),
        ]
        ledger.run(
            recorder,
            SCRIPT,
            calls,
            context=RunContext(run_id="aaaa1111", user_id="ada", thread_id="t1"),
            value={"n": 1},
            printed="skipped\n",
        )
        ledger.run(recorder, "x = 1", [], context=RunContext(run_id="bbbb2222"))
    return ledger


@pytest.mark.conforms("T5")
def test_runs_are_listed_the_newest_last(filled: Ledger) -> None:
    with filled.opened() as recorder:
        for length in (40, 41):
            filled.run(recorder, "x = 1", [], context=RunContext(run_id="c" * length))
    status, out, _ = invoke("list", filled.path)
    lines = out.splitlines()

    assert (status, len(lines)) == (exits.OK, 5)
    assert lines[0].split() == ["started", "run", "outcome", "trust", "calls", "took", "script", "what"]
    assert "aaaa1111" in lines[1] and "4 (1 failed)" in lines[1] and "hits = call_tool" in lines[1]
    assert "bbbb2222" in lines[2]


@each_row(
    ("flags", "expected"),
    [
        (["--tool", "fail"], ["aaaa1111"]),
        (["--tool", "nothing*"], []),
        (["--session", "t1"], ["aaaa1111"]),
        (["--user", "ada"], ["aaaa1111"]),
        (["--outcome", "ok"], ["aaaa1111", "bbbb2222"]),
        (["--outcome", "error"], []),
        (["--since", "1h"], ["aaaa1111", "bbbb2222"]),
        (["--until", "1h"], []),
        (["-n", "1"], ["bbbb2222"]),
        (["-n", "0"], ["aaaa1111", "bbbb2222"]),
    ],
)
def test_lists_are_filtered(filled: Ledger, flags: list[str], expected: list[str]) -> None:
    _, out, _ = invoke("list", filled.path, *flags, "--json")

    assert [line["id"] for line in json.loads(out)] == expected


@pytest.mark.conforms("T5")
def test_a_run_is_shown_with_its_calls_on_a_timeline(filled: Ledger) -> None:
    status, out, _ = invoke("show", filled.path, "aaaa")

    assert status == exits.OK
    for expected in (
        "run aaaa1111  ok",
        "user ada, thread t1",
        "30 s, cpu 30 s, 512 MiB",
        "seed 7, clock 1000000000.0, hash seed 1",
        "1 | hits = call_tool('search', query='boxes')",
        "  search",
        "    search",
        "tool_error: no such page",
        'corrected [{"path": "limit", "from": "5", "to": 5}]',
        '-> [{"title": "boxes", "rank": 5}]',
        "| skipped",
        'result  {"n": 1}',
    ):
        assert expected in out, expected
    bars = [line for line in out.splitlines() if re.search("[█▏]", line)]
    assert len(bars) == 4


def test_lines_with_calls_are_in_another_colour(filled: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = invoke("show", filled.path, "aaaa")

    colours = re.findall(r"\x1b\[(\d+)m +\d \| ", out)
    assert len(colours) == 6 and colours[0] not in colours[1:]  # all calls are made in the first line


def test_last_is_the_newest_run_and_a_default_directory_can_be_set(
    filled: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCELL_AUDIT", str(filled.path))

    assert json.loads(invoke("show", "last", "--json")[1])["id"] == "bbbb2222"
    assert invoke("list")[0] == exits.OK


def test_a_run_as_json_holds_everything(filled: Ledger) -> None:
    shown = json.loads(invoke("show", filled.path, "aaaa1111", "--json")[1])

    assert shown["start"]["source"] == SCRIPT
    assert [call["tool"] for call in shown["calls"]] == ["search", "fail", "outer", "search"]
    assert shown["calls"][3]["parent"] == 3
    assert shown["end"]["value"] == {"n": 1}
    assert shown["limits"]["memory_bytes"] == 512 * 1024 * 1024


def test_a_call_that_a_hook_answered_is_shown_with_its_answer_and_not_as_refused(filled: Ledger) -> None:
    filled.registry.add_hook(before=lambda call: Substitute(ToolResult.of({"from": "the cache"})))
    with filled.opened() as recorder:
        context = RunContext(run_id="dddd4444")
        filled.run(recorder, SCRIPT, [("search", {"query": "boxes"})], context=context)

    _, out, _ = invoke("show", filled.path, "dddd")
    shown = json.loads(invoke("show", filled.path, "dddd", "--json")[1])

    assert "refused" not in out
    assert "answered by a hook, the tool did not run" in out
    assert '-> {"from": "the cache"}' in out
    assert [(call["verdict"], call["status"]) for call in shown["calls"]] == [("substituted", "ok")]


def test_nothing_a_script_did_reaches_the_terminal_raw(filled: Ledger) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    with filled.opened() as recorder:
        filled.run(
            recorder,
            f"# {evil}",
            [(f"x{evil}", {evil: evil})],
            printed=evil,
            value=evil,
            context=RunContext(run_id="cccc", user_id=evil, thread_id=evil),
        )
    for command in (["list"], ["stats"], ["verify"]):
        _, out, err = invoke(*command, filled.path)
        assert not set("\x1b\x07\u202e") & set(out + err)
    _, out, err = invoke("show", filled.path, "cccc")
    assert not set("\x1b\x07\u202e") & set(out + err)
    assert "\\x1b]0;owned\\x07" in out


def test_runs_and_calls_are_counted(filled: Ledger) -> None:
    _, out, _ = invoke("stats", filled.path)
    counted = json.loads(invoke("stats", filled.path, "--json")[1])

    assert "2 runs of 2 scripts" in out
    assert re.search(r"search +2 +0 ", out)
    assert counted["outcomes"] == {"ok": 2}
    assert json.loads(invoke("stats", filled.path, "--tool", "fail", "--json")[1])["runs"] == 1


def test_verify_says_ok_and_exits_with_0_or_what_is_wrong_and_with_5(filled: Ledger) -> None:
    status, out, _ = invoke("verify", filled.path)
    assert (status, out.split()[0]) == (exits.OK, "ok")
    filled.rows("UPDATE event SET at = at + 1 WHERE n = 3")
    status, out, _ = invoke("verify", filled.path)

    assert status == exits.BROKEN
    assert re.search(r"^edited +chain [0-9a-f]{12}, event 3$", out, re.MULTILINE)
    report = json.loads(invoke("verify", filled.path, "--json")[1])
    assert report["ok"] is False
    assert report["findings"][0]["kind"] == "edited"


def cut_off(ledger: Ledger, last: int) -> None:
    """Remove the last events and the checkpoint of them."""
    for table in ("event", "checkpoint"):
        ledger.rows(f"DELETE FROM {table} WHERE n > ?", last)
    ledger.rows("DELETE FROM run WHERE n > ?", last)
    ledger.rows("UPDATE run SET outcome = 'unfinished', ended = NULL, calls = 0, failed = 0, wall_s = NULL, "
                "cpu_s = NULL, peak_memory_bytes = NULL WHERE (SELECT count(*) FROM event WHERE event.run = run.n AND "
                "kind = 'run_ended') = 0")  # fmt: skip


def test_a_head_that_was_kept_shows_that_an_end_was_cut_off(filled: Ledger, tmp_path: Path) -> None:
    assert invoke("verify", filled.path, "--write-head", tmp_path / "head.json")[0] == exits.OK
    cut_off(filled, len(filled.found()) - 1)
    status, out, _ = invoke("verify", filled.path, "--head", tmp_path / "head.json")

    assert status == exits.BROKEN
    assert "its end was cut off" in out


def test_an_end_without_a_signature_fails_only_when_asked(filled: Ledger) -> None:
    cut_off(filled, len(filled.found()) - 1)
    empty = filled.path.parent / "none.json"
    empty.write_text("[]")

    assert invoke("verify", filled.path, "--head", empty)[0] == exits.OK
    assert invoke("verify", filled.path, "--head", empty, "--strict")[0] == exits.BROKEN


def test_a_strict_check_says_that_it_failed_and_why(filled: Ledger, tmp_path: Path) -> None:
    cut_off(filled, len(filled.found()) - 1)
    (tmp_path / "none.json").write_text("[]")
    words = ("verify", filled.path, "--head", tmp_path / "none.json", "--strict")
    _, out, _ = invoke(*words)

    assert out.splitlines()[0].split()[0] == "not_closed"
    assert "its writer was killed" in out
    assert not any(line.startswith("ok") for line in out.splitlines())
    assert json.loads(invoke(*words, "--json")[1])["ok"] is False
    assert json.loads(invoke(*words[:-1], "--json")[1])["ok"] is True


@pytest.mark.conforms("T5")
def test_a_receipt_is_written_and_verified(filled: Ledger, tmp_path: Path) -> None:
    assert invoke("export", filled.path, "aaaa", "-o", tmp_path / "r.json")[0] == exits.OK
    status, out, _ = invoke("verify", tmp_path / "r.json")
    assert (status, out.split()[:3]) == (exits.OK, ["ok", "run", "aaaa1111,"])
    (tmp_path / "r.json").write_text((tmp_path / "r.json").read_text().replace("boxes", "foxes", 1))
    status, out, _ = invoke("verify", tmp_path / "r.json")

    assert status == exits.BROKEN
    assert "does not hold what was recorded" in out
    assert json.loads(invoke("export", filled.path, "aaaa", "-o", "-")[1])["format"] == "toolcell receipt 3"


def test_a_receipt_is_verified_elsewhere_with_the_public_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    assert invoke("keygen", tmp_path / "sign.pem")[0] == exits.OK
    ledger = Ledger(tmp_path / "log")
    ledger.fill(1, key=tmp_path / "sign.pem")
    invoke("export", ledger.path, "last", "-o", tmp_path / "r.json")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another machine"))
    (tmp_path / "sign.pem").unlink()

    assert invoke("verify", tmp_path / "r.json", "--key", tmp_path / "sign.pem.pub")[0] == exits.OK
    assert invoke("verify", ledger.path, "--key", tmp_path / "sign.pem.pub")[0] == exits.OK


def test_want_of_a_key_is_said_once_and_is_no_sign_of_a_change(filled: Ledger, tmp_path: Path) -> None:
    keys.save_private(other := tmp_path / "other.key", keys.HmacKey.generate().to_text())
    invoke("export", filled.path, "aaaa", "-o", tmp_path / "r.json")
    needed = f"key {filled.key.key_id} (hmac-sha256), which was not given; pass it with --key"
    status, out, _ = invoke("verify", tmp_path / "r.json", "--key", other)
    assert status == exits.USAGE
    assert out == f"it could not be checked: it is signed with {needed}: {keys.WHERE_KEYS_ARE}\n"
    status, out, _ = invoke("verify", filled.path, "--key", other)

    assert status == exits.USAGE
    assert out.count(needed) == 1
    assert out.splitlines()[-1].startswith("not checked")


def test_a_whole_record_is_copied_while_it_is_written(filled: Ledger, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with filled.opened() as recorder:
        filled.run(recorder, SCRIPT, [], context=RunContext(run_id="cccc3333"))
        assert invoke("export", "--all", "-o", copy, filled.path)[0] == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    (elsewhere := tmp_path / "heads.json").write_text("[]")  # a machine that has seen no later end of this record
    assert invoke("verify", copy, "--head", elsewhere)[0] == 0
    assert {"aaaa1111", "cccc3333"} <= {each["id"] for each in json.loads(invoke("list", copy, "--json")[1])}
    content = copy.read_bytes()
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    for words, said in (
        (["--all", "-o", copy, filled.path], "copy.db"),
        (["--all", filled.path], "-o COPY"),
        (["--all", "-o", tmp_path / "b", filled.path, "last"], "no RUN"),
        (["--all", "-o", tmp_path / "no" / "b", filled.path], "cannot write"),
        (["--all", "-o", open_to_all / "b", filled.path], "others may"),
    ):
        status, _, err = invoke("export", *words)
        assert status != exits.OK and said in " ".join(err.split()), err
    assert copy.read_bytes() == content


def test_an_export_says_who_can_verify_it(filled: Ledger, tmp_path: Path) -> None:
    for place in (tmp_path / "r.json", Path("-")):
        _, _, err = invoke("export", filled.path, "aaaa", "-o", place)
        assert "only those who have that key can verify it" in err
        assert "toolcell audit keygen sign.pem" in err


def test_an_export_that_anyone_can_verify_needs_no_note(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    invoke("keygen", tmp_path / "sign.pem")
    ledger = Ledger(tmp_path / "log")
    ledger.fill(1, key=tmp_path / "sign.pem")
    _, _, err = invoke("export", ledger.path, "last", "-o", tmp_path / "r.json")

    assert "note" not in err


def test_keys_are_made_and_never_overwritten(tmp_path: Path) -> None:
    assert invoke("keygen", tmp_path / "a.key", "--hmac")[0] == exits.OK
    status, _, err = invoke("keygen", tmp_path / "a.key", "--hmac")

    assert status == exits.USAGE
    assert "never overwritten" in err
    assert keys.load_signer(tmp_path / "a.key").algorithm == keys.HMAC


@each_row(
    "words",
    [
        ["show", "nothing"],
        ["show", "a", "b", "c"],
        ["list", "/nowhere"],
        ["list", "--since", "yesterday-ish"],
        ["verify", "/nowhere"],
        ["export", "/nowhere", "last"],
        ["replay", "/nowhere", "last"],
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(filled: Ledger, words: list[str]) -> None:
    status, out, err = invoke(*words)

    assert status in (exits.USAGE, exits.BROKEN)
    assert out == ""
    assert "Traceback" not in err
    assert err.strip()


@each_row(
    ("words", "said"),
    [
        (["verify", "nodir/"], "there is no record nodir"),
        (["list", "nodir/"], "there is no record nodir"),
        (["verify", "LOG", "--key", "nope"], "cannot read the key nope"),
        (["verify", "LOG", "--head", "nope.json"], "cannot read heads from nope.json"),
        (["verify", "LOG", "--head", "junk.json"], "junk.json holds no heads"),
        (["verify", "junk.json"], "junk.json is not a receipt"),
        (["verify", "LOG", "--write-head", "nodir2/x.json"], "--write-head nodir2/x.json: it cannot be written"),
        (["export", "LOG", "last", "-o", "nodir2/x.json"], "cannot write nodir2/x.json"),
        (["verify"], "no record runs.db; name the record's file (to `verify`, or a receipt)"),
        (["show", "last"], "no record runs.db; name the record's file"),
        (["show", "LOG"], "RUN is missing"),
        (["show", "nodir/"], "RUN is missing"),
        (["show", "junk.json"], "`toolcell audit verify junk.json` checks a receipt"),
        (["show", "junk.json", "last"], "cannot read the record junk.json: it is not a database"),
        (["list", "LOG", "--outcome", "bogus"], "--outcome 'bogus': want one of ok, error, timeout"),
        (["list", "LOG", "-n", "-3"], "--limit"),
        (["replay", "LOG", "aaaa", "--until", "0"], "--until"),
    ],
)
def test_what_was_merely_named_wrong_exits_with_2(filled: Ledger, words: list[str], said: str) -> None:
    Path("junk.json").write_text("{}")
    status, out, err = invoke(*(str(filled.path) if word == "LOG" else word for word in words))

    assert status == exits.USAGE
    assert said in err
    assert out == ""
    assert "Errno" not in err


def test_a_default_key_that_is_not_there_is_asked_for(filled: Ledger) -> None:
    keys.default_key_path().unlink()
    status, _, err = invoke("verify", filled.path)

    assert status == exits.USAGE
    assert "--key FILE" in err


def test_a_record_that_cannot_be_read_is_not_called_damaged_and_a_damaged_one_is(filled: Ledger) -> None:
    filled.rows("UPDATE about SET value = 'x'")
    status, _, err = invoke("list", filled.path)
    assert (status, "is damaged" in err) == (exits.BROKEN, True)
    filled.path.unlink()
    filled.path.mkdir()
    status, _, err = invoke("list", filled.path)

    assert (status, "is damaged" in err) == (exits.USAGE, False)
    assert "it is a folder" in err


def test_the_guide_names_the_commands_that_take_no_json() -> None:
    commands = typer.main.get_command(build(["audit"])).commands["audit"].commands  # type: ignore[attr-defined]
    without = [name for name, each in commands.items() if "--json" not in {o for p in each.params for o in p.opts}]
    guide = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")

    assert sorted(without) == ["events", "export", "keygen"]
    assert "All but `keygen`, `events` and `export` take `--json`" in guide


def test_commands_that_read_a_log_load_no_tools() -> None:
    program = (
        "import sys\nfrom toolcell.cli import build\n"
        "try: build(['audit'])(['audit', 'list', '/nonexistent'])\n"
        "except SystemExit: print([n for n in sys.modules if n.startswith(('toolcell.tools', 'toolcell.runtime'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Replay


@pytest.fixture
def replayable(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    with SyncRuntime(ledger.registry, record=ledger.log(), pool=PoolConfig(warm=0)) as runtime:
        runtime.execute_code(SCRIPT, context=RunContext(run_id="aaaa1111"))
        runtime.execute_code("set_result(call_tool('search', query='x'))", context=RunContext(run_id="bbbb2222"))
    return ledger


@pytest.mark.isolation
def test_a_replay_checks_runs_for_ci(replayable: Ledger, tmp_path: Path) -> None:
    status, out, _ = invoke("replay", replayable.path, "all", "--check")
    assert status == exits.OK
    assert [line.split()[:3] for line in out.splitlines()] == [["ok", "run", "aaaa1111:"], ["ok", "run", "bbbb2222:"]]
    (tmp_path / "changed.py").write_text(SCRIPT.replace("no such page", "no page"))
    status, out, _ = invoke("replay", replayable.path, "aaaa", "--check", "--source", tmp_path / "changed.py")

    assert status == exits.FAILED
    assert out.splitlines() == ["differs  run aaaa1111: call 2, line 3: fail gets other arguments"]


@pytest.mark.isolation
def test_a_difference_is_shown_with_its_line_and_both_values(replayable: Ledger, tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text(SCRIPT.replace("no such page", "no page"))
    status, out, _ = invoke("replay", replayable.path, "aaaa", "--source", tmp_path / "changed.py")

    assert status == exits.FAILED
    assert "> 3 |     call_tool('fail', text='no page')" in out
    assert 'expected {"text": "no such page"}' in out
    assert 'got      {"text": "no page"}' in out
    plain = json.loads(invoke("replay", replayable.path, "aaaa", "--source", "changed.py", "--json")[1])
    assert plain["divergence"]["index"] == 2


@pytest.mark.isolation
def test_a_replay_shows_no_secret_that_it_was_given(
    replayable: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE", "planted-planted")
    (tmp_path / "changed.py").write_text(SCRIPT.replace("no such page", "planted-planted"))
    wanted = ("replay", replayable.path, "aaaa", "--source", tmp_path / "changed.py")

    assert "planted-planted" in invoke(*wanted)[1]
    status, out, _ = invoke(*wanted, "--secret", "PAGE")
    assert status == exits.FAILED and "planted-planted" not in out.split("expected")[1]
    status, _, err = invoke(*wanted, "--secret", "NOWHERE")
    assert status == exits.USAGE and "--secret NOWHERE: the environment has no such variable" in err


@pytest.mark.isolation
def test_a_call_that_is_not_made_is_quoted_from_the_record_and_the_error_from_the_script(
    replayable: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("\nx = nope\n")
    status, out, _ = invoke("replay", replayable.path, "aaaa", "--source", "broken.py")

    assert status == exits.FAILED
    assert "call 1, line 1 as recorded: it does not call search" in out
    assert "it fails with NameError: name 'nope' is not defined (line 2)" in out
    assert "> 1 | hits = call_tool('search', query='boxes')" in out
    assert "> 2 | x = nope" in out


@pytest.mark.isolation
def test_a_replay_of_a_run_without_an_end_does_not_claim_the_same_result(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.begin(recorder, "x = 1")
    status, out, _ = invoke("replay", ledger.path, "last")

    assert status == exits.OK
    assert "no end is recorded to compare" in out
    assert "the same result" not in out


@pytest.mark.isolation
def test_a_replay_can_be_stopped(replayable: Ledger) -> None:
    _, out, _ = invoke("replay", replayable.path, "aaaa", "--until", "2")

    assert "stopped at call 2, as asked" in out


# Pieces


@each_row(("text", "seconds"), [("90s", 90), ("5m", 300), ("2h", 7200), ("1.5d", 129_600), ("1w", 604_800)])
def test_a_time_ago_is_understood(text: str, seconds: int) -> None:
    now = time.time_ns()

    assert abs(now - seconds * 10**9 - parse_time(text)) < 10 * 10**9


def test_dates_and_times_are_local() -> None:
    assert parse_time("2026-11-21") == int(datetime(2026, 11, 21).timestamp()) * 10**9
    assert (
        parse_time("2026-11-21T14:30") - parse_time("2026-11-21")
        == timedelta(hours=14.5) // timedelta(microseconds=1) * 1000
    )
    assert audit_terminal.show_time(parse_time("2026-11-21T14:30:05"))[:19] == "2026-11-21 14:30:05"


@each_row("text", ["", "soon", "2026-13-01", "5 minutes", "-3h", "99999-01-01", "9" * 400 + "w", "٣h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time: want 2026"):
        parse_time(text)


def call(started_ms: float, took_ms: float, **fields: Any) -> RecordedCall:
    return RecordedCall(1, "c", None, "x", "code", 1, {}, int(started_ms * 1e6), 1, duration_s=took_ms / 1000, **fields)


@each_row(
    ("started_ms", "took_ms", "expected"),
    [
        (0, 100, "#" * 28),
        (0, 50, "#" * 14 + " " * 14),
        (50, 50, " " * 14 + "#" * 14),
        (50, 0.1, " " * 14 + "|" + " " * 13),
        (100, 0, " " * 27 + "|"),
        (75, 500, " " * 21 + "#" * 7),
    ],
)
def test_a_bar_is_where_its_call_was(started_ms: float, took_ms: float, expected: str) -> None:
    assert audit_terminal.bar(call(started_ms, took_ms, status="ok"), 0, 100_000_000, "ascii") == expected


def test_a_call_without_an_end_has_a_bar_to_the_end() -> None:
    assert audit_terminal.bar(call(50, 0), 0, 100_000_000) == " " * 14 + "█" * 14


def test_a_list_fits_the_terminal(filled: Ledger) -> None:
    from toolcell.audit.query import Index

    console = Console(width=90, force_terminal=True, file=io.StringIO(), color_system=None)
    with Index(filled.path) as index:
        audit_terminal.show_list(index.runs(), console)
    assert isinstance(console.file, io.StringIO)

    assert max(map(len, console.file.getvalue().splitlines())) <= 92
