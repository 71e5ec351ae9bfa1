"""Forks of scripts, and the modules whose handlers of forks the zygote leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rows import each_row
from sandbox.test_contained_backend import CONTAINER
from toolcell import PoolConfig, SyncRuntime
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell_bridge.entry.fork_handlers import NEEDLESS, ForkHandlers

pytestmark = pytest.mark.isolation

LOADED = "import asyncio, concurrent.futures.thread, logging, os, random, sys, threading\n"

IN_CHILD = f"""{LOADED}
def in_child(work):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, repr(work()).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as pipe:
        return eval(pipe.read())
"""

BEHAVIOUR = {
    "the main thread is the only one": """
        set_result([[t.name for t in threading.enumerate()], threading.current_thread() is threading.main_thread()])
        expected = [["MainThread"], True]""",
    "a child has only the thread that forked": """
        ended = threading.Event()
        threading.Thread(target=ended.wait, name="left behind").start()
        set_result(in_child(lambda: [t.name for t in threading.enumerate()]))
        ended.set()
        expected = ["MainThread"]""",
    "a child finds the locks of logging free": """
        taken, ended = threading.Event(), threading.Event()
        def keep():
            with logging._lock:
                taken.set()
                ended.wait(1)
        threading.Thread(target=keep).start()
        taken.wait()
        set_result(in_child(lambda: logging._lock.acquire(timeout=0) if hasattr(logging._lock, "timeout") else logging._lock.acquire(False)))
        ended.set()
        expected = True""",
    "a child logs": """
        def log():
            logging.basicConfig(stream=sys.stdout, force=True)
            logging.warning("from a child")
            return True
        set_result(in_child(log))
        expected = True""",
    "a child and its parent draw different numbers": """
        set_result(in_child(random.random) != in_child(random.random) != random.random())
        expected = True""",
    "a child runs an event loop, in one that runs": """
        async def main():
            async def inner(): return 5
            return in_child(lambda: asyncio.run(inner())) if sys.version_info >= (3, 12) else 5
        set_result(asyncio.run(main()))
        expected = 5""",
    "a pool of threads works before and after": """
        def square():
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                return list(pool.map(lambda n: n * n, range(3)))
        set_result([square(), in_child(square), square()])
        expected = [[0, 1, 4]] * 3""",
    "multiprocessing starts processes": """
        import multiprocessing
        def double(numbers, answers):
            answers.send([2 * number for number in numbers])
        context = multiprocessing.get_context("fork")
        receives, sends = context.Pipe(duplex=False)
        process = context.Process(target=double, args=(range(4), sends))
        process.start()
        set_result(receives.recv())
        process.join()
        expected = [0, 2, 4, 6]""",
    "handlers of the script run in order": """
        order = []
        os.register_at_fork(before=lambda: order.append("before"), after_in_parent=lambda: order.append("parent"),
                            after_in_child=lambda: order.append("child"))
        set_result([in_child(lambda: order), order])
        expected = [["before", "child"], ["before", "parent"]]""",
}


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.contained)])
def forking(request: pytest.FixtureRequest) -> Iterator[SyncRuntime]:
    options = {} if request.param == "process" else {"policy": CONTAINER}
    with SyncRuntime(pool=PoolConfig(warm=1), **options) as runtime:
        for _ in range(100):  # until the zygote has loaded, when idle, the modules whose handlers it collects
            if runtime.execute_code("import sys\nset_result('random' in sys.modules)").value:
                break
        yield runtime


@each_row("name", BEHAVIOUR)
def test_forks_of_a_script_behave(forking: SyncRuntime, name: str) -> None:
    body, _, expected = textwrap.dedent(BEHAVIOUR[name]).rpartition("expected = ")

    result = forking.execute_code(IN_CHILD + body)

    assert result.error is None
    assert result.value == eval(expected)


def test_two_sandboxes_of_one_zygote_draw_different_numbers(forking: SyncRuntime) -> None:
    source = "import random\nset_result([random.random(), random.gauss(), random.Random().random()])"

    draws = [forking.execute_code(source).value for _ in range(4)]

    assert all(len(set(column)) == 4 for column in zip(*draws, strict=True))


def test_no_handler_of_the_standard_library_runs_when_a_sandbox_is_forked(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "sitting.py").write_text(
        "import logging, threading\n"
        "ran = []\n"
        "threading._after_fork.__code__ = (lambda: __import__('sitting').ran.append('threading')).__code__\n"
        "__import__('os').register_at_fork(after_in_child=lambda: ran.append('own'))\n"
    )
    with SyncRuntime(backend=ProcessBackend(packages=tmp_path, preload=["sitting"])) as runtime:
        result = runtime.execute_code(
            "import os, sitting\nread, write = os.pipe()\nbefore = list(sitting.ran)\n"
            "if os.fork() == 0:\n    os.write(write, repr(sitting.ran).encode())\n    os._exit(0)\n"
            "set_result([before, eval(os.read(read, 1000))])"
        )

    assert result.value == [["own"], ["own", "threading", "own"]]


def test_handlers_run_as_those_of_python_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fails() -> None:
        raise ValueError("a fork takes place whatever a handler raises")

    monkeypatch.setattr(os, "register_at_fork", os.register_at_fork)
    monkeypatch.setattr(os, "fork", lambda: calls.append("fork") or 7)
    handlers = ForkHandlers()
    handlers.collect()
    os.register_at_fork(before=lambda: calls.append("first"), after_in_parent=lambda: calls.append("parent"))
    os.register_at_fork(before=fails, after_in_child=lambda: calls.append("child"))
    os.register_at_fork(before=lambda: calls.append("last"))

    assert handlers.fork() == 7
    assert calls == ["last", "first", "fork", "parent"]


@each_row("module", sorted(NEEDLESS))
def test_each_module_whose_handlers_are_left_out_registers_some_or_is_too_old(module: str) -> None:
    source = (
        "import importlib, os\nseen = []\n"
        "os.register_at_fork = lambda **_: seen.append(__import__('sys')._getframe(1).f_globals['__name__'])\n"
        f"importlib.import_module({module!r})\nprint({module!r} in seen)"
    )
    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], capture_output=True, text=True, check=True
    ).stdout

    assert shown == ("False\n" if module == "asyncio.events" and sys.version_info < (3, 12) else "True\n")


CHILD_PRINTS = """
import os, sys
print("before")
if (pid := os.fork()) == 0:
    print("in the child", file=sys.stderr)
    os._exit(0)
os.waitpid(pid, 0)
print("after")
"""


@pytest.mark.quick
def test_what_a_child_prints_stands_between_what_its_parent_prints() -> None:
    with SyncRuntime(pool=PoolConfig(warm=1)) as runtime, runtime.session() as session:
        results = [runtime.execute_code(CHILD_PRINTS), *(session.execute_code(CHILD_PRINTS) for _ in range(2))]

    assert [[each.text for each in result.logs.entries] for result in results] == [
        ["before\n", "in the child\n", "after\n"]
    ] * 3
