"""What every test may rely on: event loops, and a tally of the requirements that passing tests prove.

A test's mark alone decides whether it is skipped for what its machine lacks: an engine, a browser, PostgreSQL or packages
from npm. In CI a skipped test with such a mark is a failure: there, skipping means that nobody looked. Where the profile
`full` does not run, as in a plain container, a test without a mark that is refused it is skipped too.

With `-n`, pytest-xdist runs the tests in several processes. Each process counts what its tests proved, and the first
process adds the counts up. A test that looks for leftovers looks below its own process only.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import machine

hypothesis.settings.register_profile(
    "toolcell", max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # the last two judge by the clock, and the machine may be busy
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("toolcell"), max_examples=20, derandomize=True
)
hypothesis.settings.load_profile("toolcell")

IN_CI = os.environ.get("CI") == "true"
IS_BARE = os.environ.get("BARE") == "true"
ARE_QUICK_DONE = os.environ.get("QUICK") == "done"
"""The quick tests have just run here: only the others are run."""
"""In `.ci/bare`, which tries a machine that has none of what the marks in `machine.WHY_NOT` stand for."""
MUST_RUN = tuple(machine.WHY_NOT)
LACKS = pytest.StashKey[bool]()
LOOPS = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}

_proved: dict[str, set[str]] = defaultdict(set)
_failed: set[str] = set()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What programs keep in the user's state directory goes elsewhere, also that of child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop of an async test: asyncio, or what the test is parametrized with."""
    name = getattr(request, "param", "asyncio")
    pytest.importorskip(name)
    return LOOPS[name]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The address of one PostgreSQL server for all tests of a process that need one."""
    from builtin_stores import running_server

    with running_server() as address:
        yield address


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_loop") and "anyio_backend" in metafunc.fixturenames:
        metafunc.parametrize("anyio_backend", list(LOOPS), indirect=True)


def is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "quick")


def pytest_configure(config: pytest.Config) -> None:
    if is_quick(config):  # the same answer every time; `make test-all` looks for new examples
        hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file without a quick test: finding all tests takes longer than running the quick ones."""
    found = [collection_path] if collection_path.match("test_*.py") else collection_path.rglob("test_*.py")
    return None if any(_has_wanted(path, config) for path in found) else True


def _has_wanted(path: Path, config: pytest.Config) -> bool:
    return not is_quick(config) or "mark.quick" in path.read_text(encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Find the tests without Python's collector: nothing is garbage yet, and each process would look at all of it often.

    Where nothing is compiled yet, each process begins with another part of the files, and finds the rest compiled.
    """
    config = session.config
    ours: dict[str, Any] | None = getattr(config, "workerinput", None)
    if ours is not None and config.args == config.getini("testpaths"):
        files = sorted(str(path) for path in config.rootpath.glob("tests/**/test_*.py") if _has_wanted(path, config))
        first = len(files) * int(ours["workerid"].removeprefix("gw")) // ours["workercount"]
        config.args = files[first:] + files[:first]
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what was found stays until the end
        gc.enable()


@pytest.hookimpl(specname="pytest_collection_modifyitems", tryfirst=True)  # before pytest groups them by their fixtures
def pytest_in_one_order(items: list[pytest.Item]) -> None:
    """Bring the tests into the same order in all processes of `-n`, which find them in different ones."""
    items.sort(key=lambda item: item.path)


@pytest.hookimpl(trylast=True)  # after those that were not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    for item in items:
        if " at 0x" in item.nodeid:  # the processes of `-n` must find the same tests, and an address is one process's
            raise pytest.UsageError(f"an address in the name of a test; give its parameters other ids: {item.nodeid}")
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
    if is_quick(config) or ARE_QUICK_DONE:
        quick = set(_quick(items))
        config.hook.pytest_deselected(items=[item for item in items if (item in quick) == ARE_QUICK_DONE])
        items[:] = [item for item in items if (item in quick) != ARE_QUICK_DONE]


def _quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Return what is not slow and needs no engine or browser, of a function with parameters the first row or, if marked, all."""
    seen, left_out = set[str](), {"slow", *machine.WHY_NOT} - {"isolation", "contained"}
    for item in items:
        if not item.get_closest_marker("quick"):
            continue
        function, _, _ = item.nodeid.partition("[")
        every_row = any(mark.kwargs.get("every_row") for mark in item.iter_markers("quick"))
        if not any(mark.name in left_out for mark in item.iter_markers()) and (every_row or function not in seen):
            seen.add(function)
            yield item


@contextmanager
def _skipped_where_full_does_not_run() -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if machine.is_refused(problem) and (reason := machine.WHY_NOT["isolation"]()):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True, trylast=True)  # after those of pytest, before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Skip what this machine cannot run."""
    is_contained = item.get_closest_marker("contained") is not None  # then what its file says of isolation is not meant
    for mark, why_not in machine.WHY_NOT.items():
        if is_contained and mark == "isolation":
            continue
        if item.get_closest_marker(mark) and (reason := why_not()):
            item.stash[LACKS] = mark not in ("isolation", "contained")  # `.ci/bare` has what isolation needs
            pytest.skip(reason)
    with _skipped_where_full_does_not_run():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with _skipped_where_full_does_not_run():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    ids = [each for mark in item.iter_markers("conforms") for each in mark.args]
    if report.when == "call" and report.passed:
        for each in ids:
            _proved[each].add(item.nodeid)
    elif report.failed:
        _failed.update(ids)
    lacks_package = call.excinfo is not None and str(call.excinfo.value).startswith("could not import")
    may_skip = IS_BARE and (item.stash.get(LACKS, False) or lacks_package)
    if report.skipped and IN_CI and not may_skip and any(item.get_closest_marker(name) for name in MUST_RUN):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand this process's counts to the process that started it."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["proved"] = {each: sorted(tests) for each, tests in _proved.items()}
        output["failed"] = sorted(_failed)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a process that has ended. One that died has none; xdist reports its test as failed."""
    output = getattr(node, "workeroutput", {})
    for each, tests in output.get("proved", {}).items():
        _proved[each].update(tests)
    _failed.update(output.get("failed", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    proved = sorted(set(_proved) - _failed)
    if proved:
        terminalreporter.write_line(f"requirements proved by passing tests: {len(proved)}")
    if os.environ.get("CONFORMANCE") == "list":
        for each in proved:
            terminalreporter.write_line(f"  {each}: {len(_proved[each])} tests")
