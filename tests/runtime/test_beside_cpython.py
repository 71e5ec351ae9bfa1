"""Each script runs in plain CPython and in a sandbox: output, files, calls, result and error text are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from toolcell import Limits, PoolConfig, SyncRuntime

from .beside_cpython import dedented, in_cpython, of_sandbox, registry
from .plain_scripts import HELPER, SCRIPTS

pytestmark = pytest.mark.isolation


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    with SyncRuntime(registry(), limits=Limits(wall_s=30), pool=PoolConfig(warm=1)) as runtime:
        yield runtime


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_ends_as_in_cpython(runtime: SyncRuntime, script: str, tmp_path: Path) -> None:
    source = dedented(SCRIPTS[script])
    result = runtime.execute_code(source, files=list(HELPER.items()))

    assert of_sandbox(result) == in_cpython(source, HELPER, tmp_path)


KILLS = {
    "wall_s": ("import time\ntime.sleep(60)", Limits(wall_s=0.7), "timeout"),
    "cpu_s": ("while True: pass", Limits(cpu_s=0.5), "cpu_limit"),
    "memory_bytes": ("x = []\nwhile True: x.append(bytearray(1 << 20))", Limits(memory_bytes=80 << 20), "memory_limit"),
    "an exit": ("import os\nos._exit(3)", Limits(), "killed"),
}


@pytest.mark.parametrize("kill", KILLS)
def test_printed_text_survives_a_kill(runtime: SyncRuntime, kill: str) -> None:
    rest, limits, outcome = KILLS[kill]
    seen: list[str] = []
    source = f"import sys\nfor i in range(5): print(i, end=' ')\nsys.stderr.write('e')\n{rest}"
    result = runtime.execute_code(source, limits=limits, on_log=lambda stream, text: seen.append(text))

    assert (result.outcome, result.logs.stdout, result.logs.stderr) == (outcome, "0 1 2 3 4 ", "e")
    assert "".join(seen) == "0 1 2 3 4 e"


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
    result = runtime.execute_code(dedented(SCRIPTS["a group of exceptions"]))
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
