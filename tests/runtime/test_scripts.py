"""What a script can rely on: results, errors with its own line numbers, logs, inputs, files."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import Limits, Outcome, Runtime, SyncRuntime, UsageError
from toolcell.run import conversation

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


def test_usage_tells_what_a_script_held_and_computed(run: Run) -> None:
    usage = run("x = bytes(range(256)) * 160_000\nsum(x)").usage

    assert usage.peak_memory_bytes > 40_000_000 and usage.cpu_s > 0


@pytest.mark.conforms("EX-43", "Q4")
def test_a_result_is_what_set_result_was_given(run: Run) -> None:
    assert run('set_result({"answer":42})').value == {"answer": 42}


@pytest.mark.conforms("Q16")
def test_the_last_set_result_wins(run: Run) -> None:
    assert run("set_result(1)\nset_result(2)").value == 2


@pytest.mark.conforms("Q-b7")
def test_none_is_a_result_and_no_result_is_not(run: Run) -> None:
    given, missing = run("set_result(None)"), run("x = 1")

    assert (given.value, given.has_value) == (None, True)
    assert (missing.value, missing.has_value) == (None, False)


@pytest.mark.conforms("Q-b7")
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("import sys; sys.exit(0)", Outcome.OK),
        ("import sys; sys.exit(3)", Outcome.ERROR),
        ("1/0", Outcome.ERROR),
        ("import os; os._exit(7)", Outcome.KILLED),
        ("import ctypes; ctypes.string_at(1)", Outcome.KILLED),
        ("while True: pass", Outcome.TIMEOUT),
    ],
)
def test_a_result_that_was_set_survives_whatever_comes_after(run: Run, end: str, outcome: Outcome) -> None:
    result = run(
        f"print('before')\nset_result({{'a': 1}})\n{end}",
        limits=Limits(wall_s=1.5 if outcome is Outcome.TIMEOUT else 10),
    )

    assert result.outcome is outcome
    assert result.value == {"a": 1}
    assert result.logs.text.startswith("before\n")


@pytest.mark.conforms("Q-b7", "T6")
def test_not_a_number_and_infinity_cross_unchanged(run: Run) -> None:
    nan, inf = run("set_result([float('nan'), float('inf')])").value

    assert math.isnan(nan)
    assert inf == math.inf


@pytest.mark.conforms("Q-b7", "T6")
@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("{'a': [1, object()]}", "a"),
        ("2**70", "result"),
        ("{'k': '\\ud800'}", "k"),
        ("lambda: 1", "result"),
    ],
)
def test_what_cannot_be_sent_raises_at_the_call_and_names_its_place(run: Run, expression: str, named: str) -> None:
    result = run(f"x = 1\nset_result({expression})")

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert result.error.line == 2
    assert named in result.error.message


@pytest.mark.conforms("Q-b7", "Q30")
def test_a_result_too_large_names_both_sizes(run: Run) -> None:
    result = run("set_result('x' * 5000)", limits=Limits(result_bytes=1000))

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert "result too large (5003 > 1000 bytes)" in result.error.message


@pytest.mark.parametrize(
    ("source", "limits", "problem"),
    [
        ("set_result([0] * 300_000)", Limits(), "elements"),
        ("set_result([0] * 262_140)", Limits(), "elements"),
        ("set_result('x' * 10_000)", Limits(frame_bytes=5000), "bytes"),
    ],
)
def test_a_last_statement_whose_result_cannot_be_sent_raises_in_the_script(
    run: Run, source: str, limits: Limits, problem: str
) -> None:
    result = run(source, limits=limits)

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("ValueTooLarge", 1)
    assert "too large" in result.error.message and problem in result.error.message


def test_the_value_of_a_last_expression_is_the_result(run: Run) -> None:
    assert run("x = 20\nx * 2 + 2").value == 42
    assert run("x = 1\nx").value == 1
    assert run("print('only')").has_value is False


def test_a_last_expression_without_a_plain_form_is_reported_and_not_kept(run: Run) -> None:
    result = run("object()")

    assert result.outcome is Outcome.OK
    assert not result.has_value
    assert "was not kept as the result" in result.logs.stderr


def test_await_works_at_the_top_level(run: Run) -> None:
    assert run("import asyncio\nasync def f(): return 5\nset_result(await f() + 1)").value == 6


@pytest.mark.conforms("Q-b8")
def test_future_imports_work(run: Run) -> None:
    result = run("from __future__ import annotations\ndef f(x: Undefined) -> None: ...\nf.__annotations__['x']")

    assert result.value == "Undefined"


@pytest.mark.conforms("Q-b8", "Q-b9")
def test_an_error_carries_type_message_line_and_the_scripts_own_frames(run: Run) -> None:
    result = run("def inner(x):\n    return 1 / x\n\ndef outer():\n    return inner(0)\n\nouter()\n")

    assert result.outcome is Outcome.ERROR
    error = result.error
    assert error is not None
    assert (error.type, error.message, error.line) == ("ZeroDivisionError", "division by zero", 2)
    lines = error.traceback.splitlines()
    assert "           ~~^~~" in lines
    # Which other lines have carets is for each version of Python to say.
    assert [line for line in lines if line.strip(" ~^")] == [
        "Traceback (most recent call last):",
        '  File "<code>", line 7, in <module>',
        "    outer()",
        '  File "<code>", line 5, in outer',
        "    return inner(0)",
        '  File "<code>", line 2, in inner',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.conforms("Q-b8")
def test_library_frames_are_not_shown(run: Run) -> None:
    error = run("import json\njson.loads('{')").error

    assert error is not None
    assert error.type == "JSONDecodeError"
    assert error.line == 2
    assert "decoder.py" not in error.traceback


@pytest.mark.conforms("Q-b8", "Q-b9")
@pytest.mark.parametrize(
    ("source", "line"), [("x = 1\ny = (\n", 2), ("s = '''never closed\n", 1), ("def f():\nreturn 1", 2)]
)
def test_a_syntax_error_is_at_the_scripts_own_line(run: Run, source: str, line: int) -> None:
    error = run(source).error

    assert error is not None
    assert error.type in ("SyntaxError", "IndentationError")
    assert error.line == line


@pytest.mark.conforms("Q-b9", "Q23")
def test_exit_codes_are_reported(run: Run) -> None:
    result = run("import sys\nsys.exit(3)")

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert (result.error.exit_code, result.error.message) == (3, "exit code 3")
    assert run("raise SystemExit('no luck')").error.message == "no luck"  # type: ignore[union-attr]


def test_causes_and_groups_are_told(run: Run) -> None:
    chained = run("try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('outer') from e").error
    grouped = run("raise ExceptionGroup('many', [ValueError('v'), TypeError('t')])").error

    assert chained is not None and grouped is not None
    assert "KeyError: 'a'" in chained.traceback
    assert chained.traceback.endswith("ValueError: outer")
    assert "ValueError: v; TypeError: t" in grouped.message


def test_an_exception_whose_str_raises_is_still_reported(run: Run) -> None:
    error = run("class E(Exception):\n    def __str__(self): raise RuntimeError('ha')\nraise E").error

    assert error is not None
    assert error.type == "E"
    assert "__str__ raised RuntimeError" in error.message


@pytest.mark.conforms("Q17", "Q24")
def test_half_a_character_at_the_end_of_what_is_printed_is_shown(run: Run) -> None:
    result = run("import sys\nfor stream in (sys.stdout, sys.stderr):\n    stream.buffer.write(b'caf\\xc3')")
    assert (result.logs.stdout, result.logs.stderr) == ("caf\\xc3", "caf\\xc3")


@pytest.mark.conforms("Q7")
def test_a_request_has_code_limits_and_files_and_its_result_a_value_output_an_exit_code_an_error_and_files(
    run: Run,
) -> None:
    script = "import sys\nprint(open('in.txt').read())\nset_result(1, files=['in.txt'])\nsys.exit(3)"

    result = run(script, limits=Limits(wall_s=20), files=[("in.txt", "given")])

    assert (result.value, result.logs.text, result.error and result.error.exit_code) == (1, "given\n", 3)
    assert [(file.name, file.media_type, file.data) for file in result.files] == [("in.txt", "text/plain", b"given")]


def test_print_goes_to_the_logs_and_nowhere_else(run: Run) -> None:
    result = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.stdout.write('partial')\nset_result(1)")

    assert result.value == 1
    assert result.logs.stdout == "out\npartial"
    assert result.logs.stderr == "err\n"
    assert result.logs.text == "out\nerr\npartial"


def test_both_streams_keep_their_order(run: Run) -> None:
    script = "import sys\nfor i in range(50):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2])"

    assert run(script).logs.text.split() == [str(i) for i in range(50)]


@pytest.mark.conforms("Q17")
def test_raw_writes_to_descriptors_are_captured_too(run: Run) -> None:
    result = run(
        "import os, ctypes\nos.write(1, b'raw\\n')\nos.write(2, b'bad \\xff\\n')\nctypes.CDLL(None).puts(b'libc')"
    )

    assert "raw\n" in result.logs.stdout
    assert result.logs.stderr == "bad \ufffd\n"


def test_inputs_are_names_in_the_script(run: Run) -> None:
    rows = [{"n": 1}, {"n": 2}]

    assert run("sum(row['n'] for row in rows) * größe", inputs={"rows": rows, "größe": 10}).value == 30


def test_an_input_that_cannot_cross_is_the_callers_error(run: Run) -> None:
    with pytest.raises(UsageError, match=r"inputs.*rows"):
        run("1", inputs={"rows": [object()]})


def test_what_does_not_fit_into_a_frame_is_the_callers_error(run: Run) -> None:
    with pytest.raises(UsageError, match=r"inputs cannot be sent.*65536.*raise frame_bytes"):
        run("1", limits=Limits(frame_bytes=65536), inputs={"text": "x" * 100_000})


def test_a_file_larger_than_a_frame_is_sent_in_pieces(run: Run) -> None:
    script = "set_result(len(open('big').read()))"

    assert run(script, files=[("big", "x" * 50_000)], limits=Limits(frame_bytes=8192)).value == 50_000


def test_source_that_is_not_text_is_the_callers_error(run: Run) -> None:
    with pytest.raises(UsageError, match="source must be a str"):
        run(b"1")  # type: ignore[arg-type]


@pytest.mark.conforms("Q31", "Q-b15", "EX-44")
def test_input_files_are_in_the_workspace(run: Run) -> None:
    script = """
import os, stat
set_result({
    "data": open("data.csv").read(),
    "deep": open("a/b/c.bin", "rb").read(),
    "names": input_files,
    "modes": [oct(stat.S_IMODE(os.stat(p).st_mode)) for p in ("data.csv", "a")],
    "cwd": os.path.samefile(".", OUTPUT_DIR),
})"""
    value = run(script, files=[("data.csv", "x,y\n1,2\n"), ("a/b/c.bin", bytes(range(256)))]).value

    assert value["data"] == "x,y\n1,2\n"
    assert value["deep"] == bytes(range(256))
    assert value["names"] == ["data.csv", "a/b/c.bin"]
    assert value["modes"] == ["0o640", "0o750"]
    assert value["cwd"] is True


@pytest.mark.conforms("Q31")
@pytest.mark.parametrize("name", ["../up.txt", "/etc/passwd", "a/../../b", "", "nul\0l", "back\\slash"])
def test_an_input_file_may_not_leave_the_workspace(run: Run, name: str) -> None:
    with pytest.raises(UsageError, match="inside the workspace"):
        run("1", files=[(name, b"x")])


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([("a", 3)], "content of the input file 'a' must be text or bytes, not int"),
        ([("a", [1, 2])], "'a' must be text or bytes, not list"),
        ([(1, b"x")], r"not \(int, bytes\)"),
        ([("a", "b", "c")], r"not \(str, str, str\)"),
        ({"a": 3}, "'a' must be text or bytes, not int"),
        ("data.csv", "files= takes a list of .* not str"),
    ],
)
def test_an_input_file_of_the_wrong_kind_is_refused_and_not_guessed_at(run: Run, files: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        run("1", files=files)


def _odd_files(folder: Path) -> dict[str, Path]:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    with (folder / "huge").open("wb") as sparse:
        sparse.truncate(1 << 40)
    return {
        "named pipe": folder / "pipe",
        "a named pipe; give a regular file": folder / "link",
        "a folder": folder,
        "a device": Path("/dev/zero"),
        "a socket; give": folder / "socket",
        "disk_bytes": folder / "huge",
    }


@pytest.mark.parametrize(
    "problem",
    ["named pipe", "a named pipe; give a regular file", "a folder", "a device", "a socket; give", "disk_bytes"],
)
def test_what_has_no_end_or_no_room_is_refused_before_it_is_read(
    sync_runtime: SyncRuntime, problem: str, tmp_path: Path
) -> None:
    path = _odd_files(tmp_path)[problem]
    with sync_runtime.session() as session:
        for take in (sync_runtime.execute_code, session.execute_code):
            for files in ([path], {"a": path}):
                with pytest.raises(UsageError, match=problem):
                    take("1", files=files)
        with pytest.raises(UsageError, match=problem):
            session.put_files([path])
        (tmp_path / "half").write_bytes(bytes(40_000))
        with pytest.raises(
            UsageError, match="it has 40000 bytes, beside 40000 of those before it, and a sandbox has 65536"
        ):
            halves = {"a": tmp_path / "half", "b": tmp_path / "half"}
            sync_runtime.execute_code("1", files=halves, limits=Limits(disk_bytes=65536))


def test_files_may_be_a_mapping_from_names_to_text_bytes_and_paths(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("three")
    script = "[open(name).read() for name in sorted(input_files)]"

    result = run(script, files={"a.csv": "one", "b/b.csv": b"two", "c.csv": tmp_path / "c"})

    assert result.value == ["one", "two", "three"]


def test_a_large_input_file_arrives_whole(run: Run) -> None:
    data = bytes(range(256)) * 20_000

    result = run("import hashlib\nhashlib.sha256(open('big','rb').read()).hexdigest()", files=[("big", data)])

    import hashlib

    assert result.value == hashlib.sha256(data).hexdigest()


def test_input_files_that_do_not_fit_are_the_scripts_error(run: Run) -> None:
    result = run("1", files=[("big", bytes(2_000_000))], limits=Limits(disk_bytes=1_000_000))

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert "big" in result.error.message and "disk_bytes=1000000" in result.error.message
    assert (result.error.limit, result.error.limit_value) == ("disk_bytes", 1_000_000)


@pytest.mark.conforms("Q16", "Q-b16", "Q32", "EX-44")
def test_returned_files_carry_name_type_bytes_and_digest(run: Run) -> None:
    script = """
import os
open("chart.png", "wb").write(b"\\x89PNG\\r\\n\\x1a\\n123")
os.makedirs("out/deep")
open("out/one.csv", "w").write("a")
open("out/deep/one.csv", "w").write("bb")
open("left.txt", "w").write("not asked for")
set_result("ok", files=["chart.png", "out"])"""
    files = {file.name: file for file in run(script).files}

    assert {name: (file.media_type, file.size) for name, file in files.items()} == {
        "chart.png": ("image/png", 11),
        "out/one.csv": ("text/csv", 1),
        "out/deep/one.csv": ("text/csv", 2),
    }
    assert files["chart.png"].data == b"\x89PNG\r\n\x1a\n123"
    assert files["out/deep/one.csv"].data == b"bb"
    assert files["out/one.csv"].sha256 == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


@pytest.mark.conforms("Q-b16")
def test_one_path_and_a_pattern_are_fine_as_files(run: Run) -> None:
    assert [f.name for f in run("open('c.png','w').write('x')\nset_result(1, files='c.png')").files] == ["c.png"]
    script = "for n in 'ab': open(f'{n}.txt','w').write(n)\nset_result(1, files=['*.txt'])"
    assert [f.name for f in run(script).files] == ["a.txt", "b.txt"]


@pytest.mark.conforms("Q32", "Q-b16")
def test_an_unknown_extension_is_judged_by_content(run: Run) -> None:
    script = """
open("a", "wb").write(b"%PDF-1.4")
open("b", "w").write("plain")
open("c", "wb").write(bytes(range(256)))
set_result(1, files=["a", "b", "c"])"""

    kinds = [file.media_type for file in run(script).files]

    assert kinds == ["application/pdf", "text/plain", "application/octet-stream"]


OFFICE = "application/vnd.openxmlformats-officedocument"
KINDS = {
    "a.XLSX": (b"PK\3\4", f"{OFFICE}.spreadsheetml.sheet"),
    "a.docx": (b"PK\3\4", f"{OFFICE}.wordprocessingml.document"),
    "report": (b"PK\3\4....xl/workbook.xml", f"{OFFICE}.spreadsheetml.sheet"),
    "deck": (b"PK\3\4....ppt/slides", f"{OFFICE}.presentationml.presentation"),
    "arrays": (b"PK\3\4....a.npy", "application/x-npz"),
    "archive": (b"PK\3\4....a.txt", "application/zip"),
    "t.parquet": (b"PAR1", "application/vnd.apache.parquet"),
    "table": (b"PAR1", "application/vnd.apache.parquet"),
    "store": (b"SQLite format 3\0", "application/vnd.sqlite3"),
    "a.tsv": (b"a\tb", "text/tab-separated-values"),
    "a.geojson": (b"{}", "application/geo+json"),
    "a.jsonl": (b"{}", "application/jsonl"),
    "a.yaml": (b"a: 1", "application/yaml"),
    "a.tiff": (b"II*\0", "image/tiff"),
    "scan": (b"MM\0*", "image/tiff"),
    "sound": (b"RIFF....WAVEfmt ", "audio/wav"),
    "film": (b"....ftypisom", "video/mp4"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_media_type_of_a_file_is_found_by_name_and_by_content(run: Run, name: str) -> None:
    content, kind = KINDS[name]
    script = f"open({name!r}, 'wb').write({content!r})\nset_result(1, files=[{name!r}])"
    assert run(script).files[0].media_type == kind


@pytest.mark.conforms("Q-b16", "Q33", "EX-44")
def test_what_was_asked_for_and_cannot_be_had_is_reported(run: Run) -> None:
    script = """
import os
os.symlink("/etc/passwd", "link"); os.mkfifo("pipe"); open("big", "wb").write(bytes(5000))
set_result(1, files=["missing.txt", "../up", "/etc/passwd", "link", "pipe", "big", "*.none"])"""
    result = run(script, limits=Limits(files_bytes=4000))

    problems = {file.name: file.problem for file in result.files}
    assert all(file.data is None for file in result.files)
    assert problems["missing.txt"] == "missing"
    assert problems["../up"] == problems["/etc/passwd"] == "outside the workspace"
    assert "symbolic link" in (problems["link"] or "")
    assert problems["pipe"] == "not a regular file"
    assert problems["big"] == "too large (5000 > 4000 bytes left)"
    assert [file.size for file in result.files if file.name == "big"] == [5000]
    assert "no file matches" in (problems["*.none"] or "")


def test_more_files_than_the_limit_are_reported(run: Run) -> None:
    script = "for i in range(5): open(f'{i}.txt','w').write('x')\nset_result(1, files=['*.txt'])"

    files = run(script, limits=Limits(files=3)).files

    assert [file.problem for file in files] == [None, None, None, *["too many files (limit 3)"] * 2]


def test_however_many_files_a_script_names_it_ends_well(run: Run) -> None:
    make = "import os\nfor i in range(1500): {}\nset_result(1, files=[{}])"
    for each, named in (
        ("open(f'f{i}', 'w')", "'*'"),
        ("os.symlink('x', f'l{i}')", "OUTPUT_DIR"),
        ("0", "*map(str, range(1500))"),
    ):
        result = run(make.format(each, named))
        assert (result.outcome, result.value, len(result.files) < 1000) == (Outcome.OK, 1, True)
        assert "there may be more" in (result.files[-1].problem or "")


def test_an_error_with_endless_names_is_an_ordinary_error(run: Run) -> None:
    for script, kind in {
        "class E(Exception): pass\nE.__name__ = 'E' * 10**7\nraise E('x')": "E",
        "def f(): 1 / 0\nf.__code__ = f.__code__.replace(co_name='f' * 10**7)\nf()": "ZeroDivisionError",
        "locals()['v' * 10**7] = 1\n1 / 0": "ZeroDivisionError",
    }.items():
        result = run(script)
        assert result.outcome is Outcome.ERROR and result.error is not None
        assert result.error.type.startswith(kind)


CALLS = """
import copy, multiprocessing, pickle
def said(*calls):
    try:
        return call_tools_parallel(calls)
    except TypeError as error:
        return str(error)
def child(_):
    try:
        call_tool("web_search", query="x")
    except Exception as error:
        return str(error)
query = {"query": "x"}
read = [("web_search", query), {"tool": "web_search", "args": query}, {"name": "web_search", "arguments": query},
        {"type": "tool_use", "id": "1", "name": "web_search", "input": query}]
refused = [{"tool": "web_search", "query": "x"}, {"name": "web_search", "parameters": query},
           {"name": "web_search", "arguments": '{"query": "x"}'}, {"function": {"name": "web_search"}}]
try:
    call_tool("web_search", {"no": 1})
except ToolError as error:
    copies = [pickle.loads(pickle.dumps(error)), copy.deepcopy(error)]
with multiprocessing.Pool(1) as pool:
    (in_child,) = pool.map(child, [0])
set_result({"read": len(said(*read)), "refused": [said(each) for each in refused], "child": in_child,
            "same": [(str(each), each.tool, each.code) == (str(error_), error_.tool, error_.code) for each in copies
                     for error_ in [copies[0]]], "tool": copies[0].tool, "in": "web_search" in tools})
"""


def test_what_a_call_holds_arrives_or_the_call_is_refused(run: Run) -> None:
    value = run(CALLS).value

    assert (value["read"], value["in"], value["tool"], value["same"]) == (4, True, "web_search", [True, True])
    assert all('a call is ("tool", {...})' in each for each in value["refused"])
    assert "a child process cannot call tools" in value["child"]


@pytest.mark.conforms("Q19")
def test_the_standard_library_is_there_and_works(run: Run) -> None:
    script = """
import array, base64, bisect, calendar, collections, concurrent.futures, contextlib, copy, csv, ctypes, dataclasses
import datetime, decimal, difflib, enum, fractions, functools, gzip, hashlib, heapq, html, io, itertools, json, logging
import math, operator, os, pathlib, pickle, pprint, queue, random, re, secrets, shutil, sqlite3, ssl, statistics, string
import struct, tempfile, textwrap, threading, time, traceback, typing, unicodedata, urllib.parse, uuid, xml.etree.ElementTree
import zipfile, zlib, zoneinfo, bz2, lzma
db = sqlite3.connect("t.db"); db.execute("create table t(x)"); db.execute("insert into t values (41)"); db.commit()
with tempfile.NamedTemporaryFile() as f: f.write(b"x")
with concurrent.futures.ThreadPoolExecutor(4) as pool: squares = list(pool.map(lambda x: x * x, range(5)))
@dataclasses.dataclass
class P: x: int
set_result([db.execute("select x from t").fetchone()[0], squares, P(1), zoneinfo.ZoneInfo("Europe/Paris").key])"""

    assert run(script).value == [41, [0, 1, 4, 9, 16], {"x": 1}, "Europe/Paris"]


@pytest.mark.conforms("Q-b23", "Q22")
def test_the_environment_has_nothing_of_the_hosts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCELL_SECRET", "hunter2")

    value = run("import os\nset_result(dict(os.environ))").value

    assert value == {"HOME": "/sandbox/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PATH": "", "TZ": "UTC"}


def test_names_that_would_deceive_are_escaped_and_not_returned(run: Run) -> None:
    files = run("open('\\u202egnp.exe', 'w'); open('a\\nb', 'w'); set_result(1, files=['.'])").files

    assert sorted(file.name for file in files) == ["\\u202egnp.exe", "a\\nb"]
    assert all(file.data is None and file.problem == "name has unprintable characters" for file in files)


def test_the_guest_packs_messages_with_compiled_code(run: Run) -> None:
    assert run("import msgpack\nset_result(msgpack.Packer.__module__)").value == "msgpack._cmsgpack"


@pytest.mark.parametrize("source", ["x = 1\ny = '\ud83d'", "# \udfff", "set_result(1)\n\udc80"])
def test_source_that_is_no_text_is_an_error_of_the_script_with_its_line(run: Run, source: str) -> None:
    result = run(source)

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("SyntaxError", 1 + source[: source.rfind("\n") + 1].count("\n"))
    assert "lone surrogate" in result.error.message
    assert not result.has_value


@pytest.mark.anyio
async def test_a_long_result_is_read_without_a_pause_and_many_prints_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    sleep = anyio.sleep
    own_delay = 0.000503  # which nothing else waits for, as the end of a sandbox on a busy machine does
    monkeypatch.setattr(conversation, "PAUSE_S", own_delay)

    async def noted(delay: float) -> None:
        if delay == own_delay:
            pauses.append(delay)
            printing.cancel()
        await sleep(delay)

    monkeypatch.setattr(anyio, "sleep", noted)
    printing = anyio.CancelScope()
    async with Runtime() as runtime:
        long = await runtime.execute_code("set_result('x' * 4_000_000)", limits=Limits(result_bytes=8 << 20))
        assert (long.outcome, len(long.value), pauses) == ("ok", 4_000_000, [])
        # However long a busy host takes until it has read so many prints one by one.
        source = "import time\nwhile True:\n    print('x')\n    time.sleep(0.001)"
        with printing:
            await runtime.execute_code(source, limits=Limits(wall_s=120, cpu_s=120))
        assert pauses
