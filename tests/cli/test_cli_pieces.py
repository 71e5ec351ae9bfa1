"""The parts of the commands: flags from the model, sources, exit status, errors, saved files."""

import json
import logging
import math
import os
import re
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import COMMANDS, arguments, audit, audit_proof, build, exits, places, run, terminal
from toolcell.cli.execution import Watch, run_watched
from toolcell.config import Limits
from toolcell.errors import BadInput, PackageError, SandboxUnavailable, ToolcellError, UsageError
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, Outcome, OutputFile
from toolcell.support.files import write_named
from toolcell.support.text import size

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def invoke(*arguments: str, input: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(arguments), list(arguments), input=input)
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_every_command_in_one_line_each() -> None:
    status, text, _ = invoke("--help")
    assert status == 0
    width = max(map(len, COMMANDS)) + 2
    assert all(f"  {name:<{width}}{summary}\n" in text for name, summary in COMMANDS.items())


def test_help_and_version_load_neither_models_nor_docker_nor_rich() -> None:
    probe = (
        "import sys\nfrom toolcell.cli import build\n"
        "try:\n    build(sys.argv[1:])()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('pydantic', 'docker', 'rich', 'anyio', 'toolcell.runtime') if name in sys.modules])"
    )
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", probe, flag], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


LOSSES = {
    "reader gone": exits.READER_GONE,
    "stdout full": exits.FAILED,
    "stdout closed": exits.FAILED,
    "stderr full": exits.OK,
    "stderr closed": exits.OK,
    "stdin closed": exits.OK,
}
EACH_COMMAND = """
import gc, json, os, sys
gc.disable()
from toolcell.cli import COMMANDS, build, main
for name in COMMANDS:
    build([name])  # so that each command below has its modules already
gc.freeze()

def lose(stream, how):
    number = ("stdin", "stdout", "stderr").index(stream)
    if how == "closed":
        os.close(number)
        setattr(sys, stream, None)  # as in an interpreter that starts without it
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)

for index, (line, loss) in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        sys.argv = ["toolcell", *line.split()]
        os.dup2(os.open(f"stderr-{index}", os.O_CREAT | os.O_WRONLY), 2)
        if loss == "reader gone":
            reader, writer = os.pipe()
            os.dup2(writer, 1)
            os.close(reader)
            os.close(writer)
        else:
            lose(*loss.split())
        main()
    with open("statuses", "a") as file:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=file)
"""
"""Runs each command line in a fork that has lost a stream."""


@pytest.mark.slow
def test_streams_that_are_closed_or_full_end_every_command_with_its_documented_status(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text('def double(x: int) -> int:\n    """Double x."""\n    return 2 * x\n')
    (tmp_path / "s.py").write_text("print(1)\n")
    helps = zip([f"{name} --help" for name in COMMANDS], cycle(LOSSES), strict=False)
    scripts = [("run s.py", loss) for loss in ("reader gone", "stdout full", "stderr closed")]
    cases = [*helps, *scripts, *product(["--version", "tools t.py --json", "run"], LOSSES)]
    subprocess.run(
        [sys.executable, "-c", EACH_COMMAND, json.dumps(cases)],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "60"},  # help without tables: it is quicker
        stdout=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    found, statuses = {}, (tmp_path / "statuses").read_text().split()
    for index, (case, status) in enumerate(zip(cases, statuses, strict=True)):
        told = (tmp_path / f"stderr-{index}").read_text()
        found[case] = int(status), "cannot write to stdout" in told, "Traceback" in told
    # Without a script, `run` writes its usage error to stderr alone.
    expected = {(line, loss): exits.USAGE if line == "run" else LOSSES[loss] for line, loss in cases}
    assert found == {case: (status, status == exits.FAILED, False) for case, status in expected.items()}


def test_every_command_explains_itself() -> None:
    for name in COMMANDS:
        status, text, _ = invoke(name, "--help")
        assert status == 0
        assert "Usage:" in text
        assert (
            "--json" in text or "Commands" in text or name in ("repl", "mcp", "serve", "ui")
        )  # for a person, and for a program


def commands_with_limits() -> list[tuple[str, ...]]:
    every = [typer.main.get_command(build([name])).commands[name] for name in COMMANDS]  # type: ignore[attr-defined]
    inner = [((each.name, name), its) for each in every for name, its in getattr(each, "commands", {}).items()]
    return [
        names
        for names, command in [*(((each.name,), each) for each in every), *inner]
        if any(parameter.name == "wall_s" for parameter in command.params)
    ]


@pytest.mark.parametrize("names", commands_with_limits(), ids=" ".join)
def test_every_command_with_limits_explains_them_and_cuts_no_word(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(invoke(*names, "--help")[1].replace("│", " ").split())
    assert arguments.described_limits()["wall_s"][:20] in text
    assert "…" not in text


def test_paragraphs_of_help_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("100", "50"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = [line.strip() for line in invoke("audit", "--help")[1].splitlines()]
        first = next(number for number, line in enumerate(lines) if line.startswith("FILE is the record"))
        assert all(len(line) > int(columns) - 18 for line in lines[first : lines.index("", first) - 1])


def test_an_unknown_command_is_a_usage_error() -> None:
    assert invoke("nonsense")[0] == exits.USAGE


def test_every_field_of_limits_is_a_flag_with_its_own_words_and_default() -> None:
    by_name = {each.name: each for each in typer.main.get_command(build(["run"])).commands["run"].params}  # type: ignore[attr-defined]
    about, shown = arguments.described_limits(), " ".join(invoke("run", "--help")[1].replace("│", " ").split())
    for name, field in Limits.model_fields.items():
        assert by_name[name].opts == [arguments.flag_name(name)]
        assert len(about[name]) > 30 and about[name][:20] in shown
        assert ("Default " if field.default is not None else "None: ") in about[name]


@each_row(
    ("text", "size"), [("65536", 65536), ("64k", 65536), ("1.5GiB", 1610612736), ("2MB", 2097152), (" 3 m ", 3145728)]
)
def test_sizes_may_be_written_with_units(text: str, size: int) -> None:
    assert arguments.parse_size(text) == size


@each_row("text", ["", "x", "-1", "5x", "1e6", "0x10", "1,000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a size"):
        arguments.parse_size(text)


def test_flags_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("wall_s = 5.0\ntool_calls = 7\n")
    limits = arguments.make_limits(file, {"wall_s": 2.0, "cpu_s": None})
    assert (limits.wall_s, limits.tool_calls, limits.cpu_s) == (2.0, 7, Limits().cpu_s)


def test_a_limit_out_of_range_names_flag_value_and_bound(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--memory-bytes 5: .*greater than or equal to 33554432"):
        arguments.make_limits(None, {"memory_bytes": 5})
    (tmp_path / "bad.toml").write_text("nonsense = 1")
    with pytest.raises(UsageError, match="nonsense"):
        arguments.make_limits(tmp_path / "bad.toml", {})


def test_a_wrong_value_in_a_limits_file_is_one_line_naming_file_field_value_and_bound(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("wall_s = -3\nnonsense = 'x'\n")
    with pytest.raises(UsageError) as caught:
        arguments.make_limits(file, {})
    assert str(caught.value) == (
        f"cannot load Limits from {file}: wall_s = -3: must be greater than 0; "
        f"nonsense = 'x': there is no such key; the keys are {', '.join(Limits.model_fields)}"
    )


def test_a_limits_file_takes_sizes_as_flags_do_and_says_which_key_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text('memory_bytes = "64MiB"\n')
    assert arguments.make_limits(file, {}).memory_bytes == 64 << 20

    for text, problem in (
        ("wal_s = 3", "did you mean wall_s?"),
        ('memory_bytes = "lots"', "'lots' is not a size such as"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=re.escape(problem)):
            arguments.make_limits(file, {})


def test_inputs_are_json_under_names_a_script_can_use() -> None:
    assert arguments.parse_inputs(["rows=[1, {}]", 'name="a=b"']) == {"rows": [1, {}], "name": "a=b"}


@each_row("text", ["rows", "1x=1", "class=1", "a-b=1", "=1", "x=", "x=hello", "x={", "x=" + "[" * 100_000])
def test_an_input_that_is_no_name_and_json_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--input"):
        arguments.parse_inputs([text])


def test_files_are_put_under_their_own_or_a_given_name(tmp_path: Path) -> None:
    plain, odd = tmp_path / "data.csv", tmp_path / "a=b.txt"
    plain.write_bytes(b"1")
    odd.write_bytes(b"2")
    given = [str(plain), f"in/x.csv={plain}", str(odd)]
    assert arguments.read_files(given) == [("data.csv", b"1"), ("in/x.csv", b"1"), ("a=b.txt", b"2")]
    with pytest.raises(UsageError, match="No such file"):
        arguments.read_files(["nothing.csv"])


def test_a_script_must_be_a_readable_utf8_file(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_bytes(b"\xef\xbb\xbfx = 1")
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'")
    assert arguments.read_script(str(tmp_path / "s.py")) == "x = 1"
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-one\nx = 1")
    assert arguments.read_script(str(tmp_path / "latin.py")).endswith("x = '\xe9'")
    with pytest.raises(UsageError, match="not UTF-8: byte 0xff at 5"):
        arguments.read_script(str(tmp_path / "bad.py"))
    with pytest.raises(UsageError, match="no-such-one"):
        arguments.read_script(str(tmp_path / "unknown.py"))
    with pytest.raises(UsageError, match="No such file"):
        arguments.read_script(str(tmp_path / "none.py"))


def test_lists_of_packages_may_use_commas_and_still_hold_versions_and_extras() -> None:
    assert run.split(["numpy,pandas>=2,<4", " a[b,c] ", "x==1, y"]) == ("numpy", "pandas>=2,<4", "a[b,c]", "x==1", "y")


def test_every_outcome_has_an_exit_status_with_a_meaning_in_the_documentation() -> None:
    assert set(exits.BY_OUTCOME) == set(Outcome)
    documented = DOCS.read_text(encoding="utf-8")
    assert all(f"| {status} | {meaning} |" in documented for status, meaning in exits.MEANINGS.items())
    assert set(exits.BY_OUTCOME.values()) <= set(exits.MEANINGS)


@pytest.mark.parametrize(
    ("error", "status"),
    [(UsageError("x"), 2), (SandboxUnavailable("x"), 3), (PackageError("x"), 3), (ToolcellError("x"), 1)],
)
def test_an_error_of_ours_becomes_its_message_and_its_status(
    error: ToolcellError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(as_json: bool = False) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [error])

    with pytest.raises(typer.Exit) as caught:
        terminal.reporting(fail)(as_json=True)
    assert caught.value.exit_code == status
    assert json.loads(capsys.readouterr().out)["error"] == {"code": error.code, "message": "x"}

    with pytest.raises(typer.Exit):
        terminal.reporting(fail)()
    assert capsys.readouterr().err == f"{error.code.replace('_', ' ')}: x\n"


def test_an_interrupt_in_a_group_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        inner = BaseExceptionGroup("unhandled errors in a TaskGroup", [UsageError("x"), KeyboardInterrupt()])
        raise BaseExceptionGroup("unhandled errors in a TaskGroup", [inner])

    with pytest.raises(typer.Exit) as caught:
        terminal.reporting(fail)()
    assert caught.value.exit_code == exits.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_a_command_is_imported_is_one_word_and_no_traceback() -> None:
    program = (
        "import sys\nfrom toolcell import cli\n"
        "def build(arguments): raise KeyboardInterrupt\n"
        "cli.build = build\nsys.argv[1:] = ['run', 'x.py']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (exits.INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("columns", ["50", "71", "72", "110"])
def test_help_breaks_no_name_however_narrow_the_terminal_is(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    status, text, _ = invoke("run", "--help")
    assert status == 0
    assert all(name in text for name in ("[NAME=]PATH", "NAME=JSON", "--packages", "--record"))


def test_a_bug_of_ours_is_not_dressed_up_as_an_error_of_the_user() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        terminal.reporting(fail)()


def test_a_json_document_is_strict_whatever_the_value_is(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = {"a": [float("nan"), -math.inf, (1.5, {(1, 2): math.nan})], math.inf: b"x", 1: None}
    terminal.print_json(value)
    texts = [capsys.readouterr().out, ExecutionResult("r", Outcome.OK, {**value, "s": "\ud800é"}, True).to_json()]
    documents = [json.loads(text, parse_constant=refuse) for text in texts]

    assert documents[0] == {"a": ["nan", "-inf", [1.5, {"(1, 2)": "nan"}]], "inf": "b'x'", "1": None}
    assert documents[1]["value"] == {**documents[0], "s": "\ud800é"}
    texts[1].encode("utf-8")


@each_row(("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (65536, "64 KiB"), (3 << 40, "3072 GiB")])
def test_sizes_are_written_in_binary_units(count: int, text: str) -> None:
    assert size(count) == text


def test_json_output_is_ascii_whatever_a_script_said(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"text": "\u202e\x1b[2J\u2028é\ud800"})
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)["text"] == "\u202e\x1b[2J\u2028é\ud800"


def returned(name: str, data: bytes = b"data") -> tuple[OutputFile, ...]:
    return (OutputFile(name, "text/plain", len(data), data),)


def test_returned_files_are_saved_below_the_folder_that_was_named(tmp_path: Path) -> None:
    saved, problems = places.save_files(returned("charts/a.png"), tmp_path / "out")
    assert saved == {"charts/a.png": tmp_path / "out" / "charts" / "a.png"} and problems == []
    assert saved["charts/a.png"].read_bytes() == b"data"
    missing = (OutputFile("gone", "", 0, None, problem="missing"),)
    assert places.save_files(missing, tmp_path) == ({}, [])


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..", "", "a\\..\\x", "a\0b"])
def test_a_returned_file_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    saved, problems = places.save_files(returned(name), tmp_path / "out")
    assert not saved and ["not saved" in each for each in problems] == [True]
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_or_made_through_a_link_in_the_folder(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "dir").symlink_to(elsewhere)
    (out / "file").symlink_to(elsewhere / "target")
    for name in ("dir/x", "dir/new/x"):
        assert not places.save_files(returned(name), out)[0]
    assert places.save_files(returned("file"), out)[0] == {"file": out / "file.1"}
    assert list(elsewhere.iterdir()) == []


def test_nothing_in_the_folder_is_overwritten_or_waited_for(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("mine")
    (tmp_path / "in.use").mkdir()
    os.mkfifo(tmp_path / "chart.png")
    for number in (1, 2):
        for name, kept in (("Makefile", f"Makefile.{number}"), ("chart.png", f"chart.{number}.png")):
            saved, problems = places.save_files(returned(name), tmp_path)
            assert (saved, problems) == ({name: tmp_path / kept}, [])
    assert places.save_files(returned("in.use"), tmp_path)[0] == {"in.use": tmp_path / "in.1.use"}
    assert (tmp_path / "Makefile").read_text() == "mine"


@pytest.mark.parametrize("write", ["html", "heads", "text"])
def test_a_fifo_that_nobody_reads_is_not_waited_for(write: str, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    head = SimpleNamespace(to_dict=dict)
    with pytest.MonkeyPatch.context() as patched, pytest.raises((BadInput, OSError)) as refused:
        patched.setattr(audit_proof.Head, "saved", lambda log: [head])
        match write:
            case "html":
                audit.write_html("page", fifo)
            case "heads":
                audit_proof.write_heads("log", fifo)
            case _:
                write_named(fifo, ["text"])
    assert "No such device" in str(refused.value)
    with pytest.raises(UsageError, match="not a regular file"):
        places.check_output_file("--store", fifo, begins_with=b"SQLite")
    places.check_output_file("--write-head", Path("/dev/stdout"))


def test_printing_a_result_is_readable_and_cut() -> None:
    files = (OutputFile("a.bin", "application/octet-stream", 1 << 20, b"x" * (1 << 20)),)
    error = ErrorInfo("ValueError", "no \x1b[2Jsuch thing", line=3)
    logs = Logs((LogEntry("stdout", "line\n" * 10_000),))
    result = ExecutionResult("r1", Outcome.ERROR, {"rows": [{"a": "b" * 10_000}] * 10_000}, True, logs, files, error)
    for text in (str(result), repr(result), repr(files)):
        assert len(text) < 4000
        assert "\x1b" not in text
    assert str(result).splitlines()[0] == "error in 0 s, 0 tool calls, run r1"
    assert "error: line 3: ValueError: no such thing" in str(result)
    assert str(ExecutionResult("r2", Outcome.OK, None, True)).splitlines()[1] == "value: None"
    assert repr(ExecutionResult("r2", Outcome.OK)) == "ExecutionResult('r2', 'ok', isolation='none')"


def test_a_command_writes_warnings_of_its_audit_log_and_scheduler_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(watch: Watch) -> None:
        logging.getLogger("toolcell.audit").warning("a head did not reach %s", "file:x\x1b[2J")
        logging.getLogger("toolcell.schedule").error("an action failed")
        logging.getLogger("toolcell.audit").info("nothing of note")
        logging.getLogger("toolcell.tools").warning("is shown with the result")

    run_watched(work)
    logging.getLogger("toolcell.audit").warning("after the command")

    told = capsys.readouterr()
    assert told.err == "warning: a head did not reach file:x\\x1b[2J\nwarning: an action failed\n"
    assert told.out == ""
