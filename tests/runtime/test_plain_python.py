"""What a script finds is what plain Python has, as far as a sandbox can: docs/plain-python.md lists the rest."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, Outcome, Policy, SyncRuntime
from toolcell.testing.contract.termination import OWN_SIGNALS

from .conftest import Run
from .plain_python import JOBS, LIBRARIES, PROGRAMS, died_of

pytestmark = pytest.mark.isolation


@each_row("program", PROGRAMS)
def test_a_program_behaves_as_under_plain_python(run: Run, program: str) -> None:
    result = run(textwrap.dedent(PROGRAMS[program]))
    assert (result.outcome, result.value) == ("ok", True), (result.error, result.logs.text)


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_a_signal_to_itself_ends_a_script_and_is_named(profile: Any) -> None:
    with SyncRuntime(policy=Policy(profile=profile)) as runtime:
        for source, number in OWN_SIGNALS.items():
            result = runtime.execute_code(f"import os, signal, threading\n{source}")
            assert (result.outcome, result.error) == (Outcome.KILLED, died_of(number)), source


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Policy(), id="full"),
        pytest.param(Policy(profile="container"), id="container", marks=pytest.mark.contained),
        pytest.param(Policy(shell=True), id="shell"),
    ],
)
def test_libraries_keep_few_heaps_and_look_for_no_programs(policy: Policy) -> None:
    pytest.importorskip("joblib", reason="copies the joblib of this interpreter")
    with SyncRuntime(policy=policy, packages=["joblib"], limits=Limits(wall_s=120)) as runtime:
        result = runtime.execute_code(LIBRARIES)
    assert result.value == 2, result.error
    assert "physical cores" not in result.logs.stderr


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_joblib_works_in_threads_and_says_nothing(profile: Any) -> None:
    pytest.importorskip("joblib", reason="copies the joblib of this interpreter")
    with SyncRuntime(policy=Policy(profile=profile), packages=["joblib"], limits=Limits(wall_s=120)) as runtime:
        result = runtime.execute_code(JOBS)
    assert (result.value, result.logs.stderr) == ([[0, 1]] * 5, ""), result.error


REFUSED_LISTS = """
import mimetypes, threadpoolctl
mimetypes.knownfiles.insert(0, '/etc/passwd')
mimetypes.init(mimetypes.knownfiles)
set_result([mimetypes.guess_type('a.html')[0], type(threadpoolctl.threadpool_info()).__name__])
"""


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_libraries_do_without_lists_of_the_machine_that_are_refused(profile: Any) -> None:
    pytest.importorskip("threadpoolctl", reason="copies the threadpoolctl of this interpreter")
    with SyncRuntime(policy=Policy(profile=profile), packages=["threadpoolctl"]) as runtime:
        result = runtime.execute_code(REFUSED_LISTS)
    assert result.value == ["text/html", "list"], result.error


@pytest.mark.parametrize("script", ["1 / 0", "import asyncio\nawait asyncio.sleep(0)\n1 / 0"])
def test_a_hook_for_exceptions_is_given_the_traceback_of_the_script(run: Run, script: str) -> None:
    lines = ["import sys, traceback", "sys.excepthook = lambda *error: traceback.print_exception(*error)", script]
    result = run("\n".join(lines))
    frames = [line for line in result.logs.stderr.splitlines() if line.startswith("  File")]
    assert frames == [f'  File "<code>", line {len(script.splitlines()) + 2}, in <module>']
    assert result.error is not None
    assert result.error.type == "ZeroDivisionError"


def test_an_exit_code_that_is_too_large_is_255(run: Run) -> None:
    result = run("import sys\nsys.exit(1 << 80)")
    assert result.error is not None
    assert result.error.exit_code == 255


def test_trio_is_imported_although_it_names_a_method_that_sockets_do_not_have() -> None:
    pytest.importorskip("trio", reason="copies the trio of this interpreter")
    with SyncRuntime(packages=["trio"]) as runtime:
        result = runtime.execute_code(
            "import socket, trio\n"
            "set_result([trio.run(trio.to_thread.run_sync, abs, -3), hasattr(socket.socket, 'sendmsg')])"
        )
    assert result.value == [3, False], result.error


def test_a_hook_for_exceptions_that_fails_or_is_gone_hides_nothing(run: Run) -> None:
    result = run("import sys\ndef hook(*error): raise KeyError('hook')\nsys.excepthook = hook\n1 / 0")
    assert result.logs.stderr.count("KeyError: 'hook'\n\nOriginal exception was:\n") == 1
    assert "During handling" not in result.logs.stderr
    result = run("import sys\ndel sys.excepthook\n1 / 0")
    assert result.error is not None
    assert result.error.type == "ZeroDivisionError"


def test_destructors_find_the_names_of_the_script_although_a_hook_refers_to_them(run: Run) -> None:
    script = """
import os, sys
class Thing:
    def __del__(self): print("deleted", os.sep)
thing = Thing()
sys.excepthook = lambda *error: print(thing)"""
    assert run(script).logs.stdout == "deleted /\n"


def test_a_module_given_as_a_file_is_imported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("answer = 42")
    result = run("import helper\nset_result(helper.answer)", files=[tmp_path / "helper.py"])
    assert result.value == 42


def test_folders_that_nest_a_thousand_deep_are_returned_or_named(run: Run) -> None:
    source = """
import os
start = os.getcwd()
os.mkdir("top")
os.chdir("top")
for _ in range(1100):
    os.mkdir("d")
    os.chdir("d")
    if _ == 450:
        open("found.txt", "w").close()
os.chdir(start)
open("top/first.txt", "w").close()
set_result("made", files=["top"])
"""
    result = run(source, limits=None)
    assert (result.outcome, result.value) == ("ok", "made"), result.error
    assert [Path(file.name).name for file in result.files] == ["first.txt", "found.txt"]


def test_a_link_that_is_returned_is_named_as_one(run: Run) -> None:
    result = run("import os\nopen('a', 'w').close()\nos.symlink('a', 'b')\nset_result(1, files=['b'])")
    assert result.files[0].problem == "a symbolic link; return the file it points to"


def test_the_collector_works_and_passes_over_what_was_there_before_the_script(run: Run) -> None:
    result = run("import gc\nset_result([gc.isenabled(), gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000])")
    assert result.value == [True, True, True], result.error
