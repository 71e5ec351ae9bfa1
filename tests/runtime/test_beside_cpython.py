"""Each script runs in plain CPython and on each route to a sandbox: output, files, calls, result and error text agree.

All scripts run by `execute_code`. On the other routes runs what they could do differently: a script of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rows import each_row
from toolcell import Limits, PoolConfig, SyncRuntime
from toolcell.run.streaming import RunFinished

from .beside_cpython import OF_EACH_KIND, WRITTEN, Ending, ending_in_cpython, ending_of, of_sandbox, registry, source_of
from .plain_scripts import HELPER, SCRIPTS

pytestmark = pytest.mark.isolation

LIMITS, POOL = Limits(wall_s=30), PoolConfig(warm=1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    with SyncRuntime(registry(), limits=LIMITS, pool=POOL) as runtime:
        yield runtime


def by_run(runtime: SyncRuntime, source: str, _folder: Path) -> Ending:
    return ending_of(runtime.execute_code(source, files=HELPER))


def by_stream(runtime: SyncRuntime, source: str, _folder: Path) -> Ending:
    *_, last = runtime.stream(source, files=HELPER)
    assert isinstance(last, RunFinished)
    return ending_of(last.result)


def by_session(runtime: SyncRuntime, source: str, _folder: Path) -> Ending:
    with runtime.session() as session:
        session.execute_code("x = 1", files=HELPER)
        return ending_of(session.execute_code(source))


def by_tool(runtime: SyncRuntime, source: str, _folder: Path) -> Ending:
    tools = registry()
    tools.enable_code_execution(runtime.runtime)
    result = runtime._opened().call(partial(tools.execute, "execute_code", {"code": source}))
    return of_sandbox(result.details, {file.name: file.data for file in result.files})


def by_command_line(_runtime: SyncRuntime, source: str, folder: Path) -> Ending:
    (folder / "given.py").write_text(source, "utf-8")
    (folder / "tools.py").write_text("from runtime.beside_cpython import registry\nregistry = registry()\n")
    files = [f"--file={name}={folder / name}" for name in HELPER]
    for name, text in HELPER.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "toolcell",
        "run",
        "given.py",
        "--tools",
        "tools.py",
        "--json",
        "-o",
        "out",
        *files,
    ]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "HOME": str(folder), "LANG": "C.UTF-8"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    result = json.loads(done.stdout)
    return of_sandbox(result, {each["name"]: (folder / "out" / each["name"]).read_bytes() for each in result["files"]})


ROUTES: dict[str, Callable[[SyncRuntime, str, Path], Ending]] = {
    "stream": by_stream,
    "session": by_session,
    "tool": by_tool,
    "command line": by_command_line,
}

NOT_IN = {
    # Between scripts of a session threads and processes are ended, and hooks and destructors wait for its end.
    "session": {
        "a thread that nobody joins", "a process that nobody joins", "exit hooks, the last one first",
        "a file written after the result", "destructors of what is left",
    },
    # Another process for each script.
    "command line": {*OF_EACH_KIND} - {"a file written after the result", "an error with notes", "stdin_is_empty"},
}  # fmt: skip


@each_row("script", [*SCRIPTS, *WRITTEN])
def test_a_script_ends_as_in_cpython(runtime: SyncRuntime, script: str, tmp_path: Path) -> None:
    assert by_run(runtime, source_of(script), tmp_path) == ending_in_cpython(script)


@each_row(
    ("route", "script"),
    [(route, script) for route in ROUTES for script in OF_EACH_KIND if script not in NOT_IN.get(route, ())],
)
def test_a_script_ends_as_in_cpython_on_every_route(
    runtime: SyncRuntime, route: str, script: str, tmp_path: Path
) -> None:
    assert ROUTES[route](runtime, source_of(script), tmp_path) == ending_in_cpython(script)


KILLS = {
    "wall_s": ("import time\ntime.sleep(60)", Limits(wall_s=0.7), "timeout"),
    "cpu_s": ("while True: pass", Limits(cpu_s=0.5), "cpu_limit"),
    "memory_bytes": ("x = []\nwhile True: x.append(bytearray(1 << 20))", Limits(memory_bytes=80 << 20), "memory_limit"),
    "an exit": ("import os\nos._exit(3)", Limits(), "killed"),
}


@each_row("kill", KILLS)
def test_printed_text_survives_a_kill(runtime: SyncRuntime, kill: str) -> None:
    rest, limits, outcome = KILLS[kill]
    seen: list[str] = []
    source = f"import sys\nfor i in range(5): print(i, end=' ')\nsys.stderr.write('e')\n{rest}"
    result = runtime.execute_code(source, limits=limits, on_log=lambda stream, text: seen.append(text))

    assert (result.outcome, result.logs.stdout, result.logs.stderr) == (outcome, "0 1 2 3 4 ", "e")
    assert "".join(seen) == "0 1 2 3 4 e"


def test_hooks_of_a_script_run_where_logging_was_imported_before_it(tmp_path: Path) -> None:
    with SyncRuntime(registry(), preload=["logging.handlers"], limits=LIMITS, pool=POOL) as runtime:
        for script in ("a handler of logging that keeps records", "exit hooks, the last one first"):
            assert by_run(runtime, source_of(script), tmp_path) == ending_in_cpython(script)


def test_text_of_c_code_survives_a_kill(runtime: SyncRuntime) -> None:
    source = "import ctypes, time\nctypes.CDLL(None).printf(b'from C')\ntime.sleep(60)"
    assert runtime.execute_code(source, limits=Limits(wall_s=0.7)).logs.stdout == "from C"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='slow').start()",
            "thread 'slow'",
        ),
        (
            "import multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=(60,), name='p').start()",
            "process 'p'",
        ),
    ],
)
def test_a_run_that_ends_while_it_waits_names_what_it_waits_for(runtime: SyncRuntime, source: str, named: str) -> None:
    result = runtime.execute_code(f"{source}\nset_result('kept')", limits=Limits(wall_s=0.7))

    assert (result.outcome, result.value) == ("timeout", "kept")
    assert result.error is not None
    assert result.error.message.endswith(f"the script had come to its end, and waited for {named}")


def test_the_line_of_a_group_is_where_its_first_exception_was_raised(runtime: SyncRuntime) -> None:
    result = runtime.execute_code(source_of("a group of exceptions"))
    assert result.error is not None and result.error.line == 3


def test_files_that_are_gone_at_the_end_are_returned_as_they_were(runtime: SyncRuntime) -> None:
    source = """
import tempfile, os
other = open("other.txt", "w")
with tempfile.TemporaryDirectory(dir=".") as folder:
    path = os.path.join(folder, "a.txt")
    with open(path, "w") as file: file.write("a")
    set_result(1, files=[path, "other.txt"])
other.write("later")
"""
    result = runtime.execute_code(source)
    assert [file.data for file in result.files] == [b"a", b""]


def test_a_session_writes_out_what_a_script_left_open(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.execute_code("file = open('a.txt', 'w')\nfile.write('text')")
        assert session.read_file("a.txt") == b"text"
        assert session.execute_code("file.write(' more')\nset_result(1, files=['a.txt'])").files[0].data == b"text more"
