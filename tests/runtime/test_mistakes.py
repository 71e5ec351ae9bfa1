"""Mistakes that everybody makes once. Each is refused at once with one line that names the value and the cure."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from rows import each_row
from toolcell import (
    Flow,
    Limits,
    Policy,
    PoolConfig,
    Quota,
    Quotas,
    RecordConfig,
    Runtime,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.sandbox.docker.backend import DockerBackend
from toolcell.sandbox.process.backend import ProcessBackend

from .conftest import Run

pytestmark = pytest.mark.quick

Mistake = tuple[Callable[[], object], str, str]
"""What is written, and two parts of the message: the value and the cure."""


def double(x: int) -> int:
    """Return twice the number that is given."""
    return 2 * x


def a_plain_with() -> None:
    with Runtime([double]):
        pass


def an_async_with() -> None:
    async def main() -> None:
        async with SyncRuntime([double]):
            pass

    anyio.run(main)


def opened(**options: Any) -> None:
    async def main() -> None:
        async with Runtime(**options):
            pass

    anyio.run(main)


SETTINGS: dict[str, Mistake] = {
    "a limit by another name": (lambda: Limits(timeout=3), "timeout = 3", "did you mean wall_s?"),  # type: ignore[call-arg]
    "elements of nothing": (lambda: Limits(elements=9000), "elements = 9000", "did you mean message_elements?"),  # type: ignore[call-arg]
    "bytes of an answer": (lambda: Limits(answer_bytes=9), "answer_bytes = 9", "did you mean frame_bytes?"),  # type: ignore[call-arg]
    "a limit without its unit": (lambda: Limits(memory=3), "memory = 3", "did you mean memory_bytes?"),  # type: ignore[call-arg]
    "a limit misspelt": (lambda: Limits(wal_s=3), "wal_s = 3", "did you mean wall_s?"),  # type: ignore[call-arg]
    "a negative limit": (lambda: Limits(wall_s=-3), "wall_s = -3", "greater than 0"),
    "a limit that is not a number": (lambda: Limits(wall_s="ten"), "wall_s = 'ten'", "a valid number"),  # type: ignore[arg-type]
    "a limit of True": (lambda: Limits(tool_calls=True), "tool_calls = True", "must not be a bool"),
    "a limit of None": (lambda: Limits(wall_s=None), "wall_s = None", "a valid number"),  # type: ignore[arg-type]
    "a size in no known unit": (lambda: Limits(memory_bytes="lots"), "'lots'", "64MiB"),  # type: ignore[arg-type]
    "a limit without a name": (lambda: Limits(10), "Limits", "Limits(wall_s=...)"),  # type: ignore[call-arg,misc]
    "changed limits": (lambda: setattr(Limits(), "wall_s", 3), "Limits does not change", "model_copy"),
    "a copy with a wrong limit": (lambda: Limits().model_copy(update={"wall_s": -1}), "wall_s = -1", "greater than 0"),
    "an unknown policy": (lambda: Policy(network=True), "network = True", "the keys are profile"),  # type: ignore[call-arg]
    "a misspelt layer": (lambda: Policy(require=["seccmp"]), "'seccmp'", "'seccomp'"),  # type: ignore[arg-type]
    "a text for a list of layers": (lambda: Policy(require="seccomp"), "'seccomp'", "must be a list"),  # type: ignore[arg-type]
    "a number in the environment": (lambda: Policy(env={"A": 1}), "env.A = 1", "a valid string"),  # type: ignore[dict-item]
    "an unknown profile": (lambda: Policy(profile="docker"), "'docker'", "'auto'"),  # type: ignore[arg-type]
    "an unknown lint profile": (lambda: Policy(lint="hard"), "'hard'", "'standard'"),  # type: ignore[arg-type]
    "a pool by another name": (lambda: PoolConfig(size=3), "size = 3", "did you mean warm?"),  # type: ignore[call-arg]
    "an empty pool": (lambda: PoolConfig(cap=0), "cap = 0", "greater than 0"),
    "an unknown audit setting": (lambda: RecordConfig(sync=1), "sync = 1", "did you mean fsync?"),  # type: ignore[call-arg]
    "a quota misspelt": (lambda: Quota(call=3), "'call'", "did you mean calls?"),  # type: ignore[call-arg]
    "quotas by another name": (lambda: Quotas(Quota(), key="x"), "'key'", "it has quota, by, clock"),  # type: ignore[call-arg]
    "a flow misspelt": (lambda: Flow(source="a", dst="b"), "'source'", "did you mean src?"),  # type: ignore[call-arg]
    "a missing file": (lambda: Limits.from_toml("no.toml"), "no.toml", "No such file"),
    "a setting of the registry": (lambda: ToolRegistry(workers=3), "'workers'", "did you mean max_workers?"),
    "a dict for settings": (lambda: ToolRegistry(settings={}), "not {}", "RegistrySettings(...)"),  # type: ignore[arg-type]
    "one function for a registry": (lambda: ToolRegistry(double), "double", "write [...] around it"),  # type: ignore[arg-type]
}

RUNTIMES: dict[str, Mistake] = {
    "one function": (lambda: Runtime(double), "double", "write [...] around it"),  # type: ignore[arg-type]
    "a name": (lambda: Runtime("tools"), "'tools'", "a list of tools"),
    "names": (lambda: Runtime(["double"]), "['double']", "registry.subset("),
    "a class": (lambda: Runtime(ToolRegistry), "a class", "write ToolRegistry()"),  # type: ignore[arg-type]
    "a dict for limits": (lambda: Runtime(limits={"wall_s": 3}), "{'wall_s': 3}", "limits=Limits(...)"),  # type: ignore[arg-type]
    "an argument misspelt": (lambda: Runtime(limit=3), "'limit'", "did you mean limits?"),  # type: ignore[call-arg]
    "one of the same with with": (lambda: SyncRuntime(recrod="x"), "'recrod'", "did you mean record?"),
    "a session's, misspelt": (lambda: Runtime().session(cpu=3), "'cpu'", "did you mean cpu_s?"),  # type: ignore[call-arg]
    "an unknown backend": (lambda: Runtime(backend="proces"), "'proces'", '"process", "docker"'),
    "a backend's class": (lambda: Runtime(backend=threading.Event), "class Event", "write Event()"),  # type: ignore[arg-type]
    "one package": (lambda: Runtime(packages="pandas"), "'pandas'", "packages=['pandas']"),
    "a package that is not a name": (lambda: Runtime(packages=[3]), "3 is not a name", "list of names"),  # type: ignore[list-item]
    "an empty name": (lambda: Runtime(preload=[""]), "'' is not a name", "list of names"),
    "a version for python": (lambda: Runtime(python=3.11), "3.11", "path of an interpreter"),  # type: ignore[arg-type]
    "packages beside a backend": (
        lambda: Runtime(backend=DockerBackend(), packages=["pandas"], preload=["pandas"]),
        "packages= and preload=",
        "DockerBackend(packages=...)",
    ),
    "an interpreter beside a backend": (
        lambda: Runtime(backend=DockerBackend(), python="/usr/bin/python3"),
        "python=",
        "takes no python=",
    ),
    "preloads beside a backend": (
        lambda: Runtime(backend=ProcessBackend(), preload=["json"]),
        "preload=",
        "ProcessBackend(preload=...)",
    ),
    "isolation beside a backend": (
        lambda: Runtime(backend=ProcessBackend(), policy=Policy(require=["seccomp"])),
        "policy=",
        "ProcessBackend(policy=...)",
    ),
    "variables beside a backend": (
        lambda: Runtime(backend=DockerBackend(policy=Policy(shell=True)), policy=Policy(shell=True, env={"A": "b"})),
        "policy=",
        "DockerBackend(policy=...)",
    ),
    "a flag for record": (lambda: Runtime(record=True), "True", "a file, a postgresql:// URL or an AuditLog"),  # type: ignore[arg-type]
    "with for async with": (a_plain_with, "Runtime", "`async with Runtime(...)`"),
    "async with for with": (an_async_with, "SyncRuntime", "`with SyncRuntime(...)`"),
    "never opened": (lambda: SyncRuntime().execute_code("1"), "not open", "with SyncRuntime(...)"),
}


def assert_one_line(mistake: Mistake) -> None:
    make, value, cure = mistake
    with pytest.raises(UsageError) as caught:
        make()
    said = str(caught.value)
    assert value in said
    assert cure in said
    assert "\n" not in said
    assert len(said) < 400


@each_row("name", SETTINGS)
def test_a_wrong_setting_is_one_line_with_value_and_cure(name: str) -> None:
    assert_one_line(SETTINGS[name])


@each_row("name", RUNTIMES)
def test_a_runtime_made_wrongly_is_one_line_with_value_and_cure(name: str) -> None:
    assert_one_line(RUNTIMES[name])


@each_row("again", [{}, {"python": sys.executable}, {"preload": ["json"]}])
def test_what_a_backend_was_made_with_may_be_said_again_or_left_out(again: dict[str, Any]) -> None:
    Runtime(backend=ProcessBackend(python=sys.executable, preload=["json"]), **again)
    Runtime(backend=DockerBackend(packages=["six"]), packages=["six"][: len(again)])


def test_an_error_inside_is_not_taken_for_a_wrong_keyword() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Flow("a")  # type: ignore[call-arg]


RUNS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a path for source": ({"source": Path("script.py")}, "script.py", "path.read_text()"),
    "bytes for source": ({"source": b"1"}, "b'1'", "must be a str"),
    "a function for source": ({"source": double}, "double", "must be a str"),
    "a list of inputs": ({"inputs": [1]}, "not list", "dict from names to values"),
    "an input that is not a name": ({"inputs": {"x y": 1}}, "'x y'", "an identifier"),
    "an input named by a number": ({"inputs": {1: 1}}, "1 is not one", "an identifier"),
    "a keyword": ({"inputs": {"class": 1}}, "'class'", "an identifier"),
    "a ligature": ({"inputs": {"\ufb01": 1}}, "Python reads as 'fi'", "give it that name"),
    "an input that hides call_tool": ({"inputs": {"call_tool": 1}}, "'call_tool'", "choose another one"),
    "an input that hides the module": ({"inputs": {"__name__": 1}}, "'__name__'", "choose another one"),
    "a function as input": ({"inputs": {"f": double}}, "inputs['f']", "not data"),
    "one path": ({"files": "a.csv"}, "str", "write files=['a.csv']"),
    "one Path": ({"files": Path("a.csv")}, "PosixPath", "write files=["),
    "one path of bytes": ({"files": b"a.csv"}, "bytes", "write files=['a.csv']"),
    "a path of bytes": ({"files": [b"a.csv"]}, "(bytes)", "os.fsdecode(path)"),
    "a name of bytes": ({"files": {b"a.csv": "1"}}, "(bytes, str)", "os.fsdecode(path)"),
    "a path for a name": ({"files": [(Path("a.csv"), "1")]}, "(PosixPath, str)", "os.fsdecode(path)"),
    "a file that does not exist": ({"files": ["no.csv"]}, "'no.csv'", "No such file"),
    "a folder": ({"files": ["/"]}, "'/'", "is a folder; give its files"),
    "a file twice": ({"files": [("x", "1"), ("./x", "2")]}, "two input files are called 'x'", "name one of them"),
    "a file and a folder": ({"files": {"x": "1", "x/y": "2"}}, "'x'", "'x/y' needs a folder of that name"),
    "a folder's name": ({"files": {"x/": "1"}}, "'x/'", "inside the workspace"),
    "a name that is too long": ({"files": {"x" * 300: "1"}}, "300 bytes", "255 are possible"),
    "too many folders": ({"files": {"x/" * 800 + "x": "1"}}, "1601 bytes", "1000 are possible"),
    "too many files": ({"files": {f"x{n}": "" for n in range(4097)}}, "more than 4096", "(inodes)"),
    "an odd name": ({"files": {"\udc80": "1"}}, "'\\udc80'", "not valid Unicode"),
    "odd text": ({"files": {"x": "\udc80"}}, "'x'", "not valid Unicode"),
    "an open file": ({"files": [io.BytesIO(b"x")]}, "BytesIO", "file.read()"),
    "an unknown lint profile": ({"lint": "hard"}, "'hard'", "'standard'"),
    "a dict for limits": ({"limits": {"wall_s": 3}}, "{'wall_s': 3}", "limits=Limits(...)"),
    "names for tools": ({"tools": ["double"]}, "['double']", "registry.subset("),
    "a dict for context": ({"context": {"user": 1}}, "{'user': 1}", "RunContext(user_id=...)"),
    "text for a seed": ({"seed": "x"}, "'x'", "whole number"),
    "a clock that is not a number": ({"clock": float("nan")}, "nan", "time.time()"),
    "a number for repairs": ({"repairs": 3}, "not 3", "the result of a run, or its id"),
    "what to refresh, and no repair": ({"refresh": "reads"}, "refresh=", "pass repairs= too"),
    "True for cancel": ({"cancel": True}, "True", "anyio.Event"),
    "an event that blocks": ({"cancel": threading.Event()}, "threading.Event", "anyio.Event"),
    "text for on_log": ({"on_log": "print"}, "'print'", "takes a function"),
}


@pytest.mark.isolation
@each_row("name", RUNS)
def test_an_option_of_a_run_is_refused_in_one_line_before_anything_runs(run: Run, name: str) -> None:
    options, value, cure = RUNS[name]
    assert_one_line((lambda: run(**{"source": "1", **options}), value, cure))


PLANS: dict[str, tuple[Any, str, str]] = {
    "no list": (None, "None", '{"tool": name, "args": {...}}'),
    "one step": ({"tool": "echo", "args": {}}, "'echo'", "[{...}] around one step"),
    "no steps": ([], "execute_plan", "at least one step"),
}


@pytest.mark.isolation
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_written_wrongly_is_refused_in_one_line_and_no_step_runs(sync_runtime: SyncRuntime, name: str) -> None:
    steps, value, cure = PLANS[name]
    assert_one_line((lambda: sync_runtime.execute_plan(steps), value, cure))


STEPS: dict[str, tuple[Any, str, str]] = {
    "a name for a step": ("echo", "'echo'", '{"tool": name, "args": {...}}'),
    "arguments for args": ({"tool": "echo", "arguments": {}}, '"arguments"', "did you mean `args`?"),
    "timeout for timeout_s": ({"tool": "echo", "args": {}, "timeout": 3}, '"timeout"', "did you mean `timeout_s`?"),
    "name for tool": ({"name": "echo", "args": {}}, '"name"', '{"tool": name, "args": {...}}'),
}


@pytest.mark.isolation
@pytest.mark.parametrize("name", STEPS)
def test_a_step_written_wrongly_is_a_row_in_one_line_and_the_others_run(sync_runtime: SyncRuntime, name: str) -> None:
    step, value, cure = STEPS[name]

    wrong, right = sync_runtime.execute_plan([step, {"tool": "no_such_tool"}])

    assert (wrong["status"], "\n" in wrong["error"]) == ("error", False)
    assert value in wrong["error"] and cure in wrong["error"]
    assert "no_such_tool" in right["error"]


@pytest.mark.anyio
async def test_an_unknown_key_in_a_models_plan_is_named_and_that_step_does_not_run() -> None:
    made = []
    registry = ToolRegistry([double])
    registry.before_call(lambda call: made.append(call.name) if call.name == "double" else None)
    registry.enable_plan_execution()

    result = await registry.execute("execute_plan", {"steps": [{"tool": "double", "args": {"x": 1}, "dependson": []}]})

    assert result.value[0]["status"] == "error"
    assert "did you mean `depends_on`?" in result.text
    assert made == []


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_list_of_functions_is_a_registry_wherever_one_is_taken() -> None:
    async with Runtime([double], pool=PoolConfig(warm=0)) as runtime:
        assert (await runtime.execute_code("tools.double(4)")).value == 8
        assert (await runtime.execute_code("tools.double(4)", tools=[])).error is not None
        assert (await runtime.execute_plan([{"tool": "double", "args": {"x": 4}}]))[0]["result"] == 8
        [row] = await runtime.execute_plan([{"tool": "double", "args": {"x": 4}}], tools=[])
        assert row["status"] == "error"


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_runtime_in_another_loop_or_closed_is_refused_at_once() -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        with pytest.raises(UsageError, match="another event loop"):
            await anyio.to_thread.run_sync(lambda: asyncio.run(runtime.execute_code("1")))
        session = runtime.session("held")
        async with session:
            for method in (session.interrupt, session.reset, session.put_down, session.close, session.fork):
                with pytest.raises(UsageError, match="another event loop"):
                    await anyio.to_thread.run_sync(asyncio.run, method())
            assert (await session.execute_code("1 + 1")).value == 2
        with pytest.raises(UsageError, match="already open"):
            await runtime.open()
    with pytest.raises(UsageError, match="not open"):
        await runtime.execute_code("1")


def test_a_copy_of_settings_says_what_was_given_and_not_what_has_its_default() -> None:
    copy = Policy(seed=1).model_copy(update={"hash_seed": 2})

    assert copy.model_fields_set == {"seed", "hash_seed"}
    assert (copy.seed, copy.hash_seed) == (1, 2)
