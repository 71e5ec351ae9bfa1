"""What every test may rely on: event loops, and a tally of the requirements that passing tests prove.

A test's mark alone decides whether it is skipped for what its machine lacks: an engine, a browser, PostgreSQL or packages
from npm. In CI a skipped isolation, Docker, browser, PostgreSQL or npm test is a failure: there, skipping means that nobody
looked.

With `-n`, pytest-xdist runs the tests in several processes. Each process counts what its tests proved, and the first
process adds the counts up. A test that looks for leftovers looks below its own process only.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

import machine

hypothesis.settings.register_profile(
    "toolcell", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)  # both judge by the clock, and the machine may be busy
hypothesis.settings.load_profile("toolcell")

IN_CI = os.environ.get("CI") == "true"
IS_BARE = os.environ.get("BARE") == "true"
"""In `.ci/bare`, which tries a machine that has none of what the marks in `machine.WHY_NOT` stand for."""
MUST_RUN = ("isolation", *machine.WHY_NOT)
LACKS = pytest.StashKey[bool]()
ASYNCIO = ("asyncio", {"use_uvloop": False})

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


@pytest.fixture(
    params=[
        pytest.param(ASYNCIO, id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every async test that does not ask for one loop runs on all three; see `_mark_other_loops`."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Find the tests without Python's collector: nothing is garbage yet, and each process would look at all of it often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those that were not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_other_loops(items)
    _mark_families(items)
    for item in items:
        if " at 0x" in item.nodeid:  # the processes of `-n` must find the same tests, and an address is one process's
            raise pytest.UsageError(f"an address in the name of a test; give its parameters other ids: {item.nodeid}")
    for item in items:
        if item.get_closest_marker("isolation") and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="the process backend needs Linux"))


def _mark_other_loops(items: list[pytest.Item]) -> None:
    """Mark what runs on uvloop and trio as thorough, but for the first test of each file."""
    seen = set[tuple[str, str]]()
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if given.get("anyio_backend", "asyncio") in ("asyncio", ASYNCIO):
            continue
        place = (item.location[0], str(given["anyio_backend"]))
        if place in seen:
            item.add_marker(pytest.mark.thorough)
        seen.add(place)


def _mark_families(items: list[pytest.Item]) -> None:
    """Mark all tests of a family as thorough but the first: those of one function with other parameters."""
    seen = set[tuple[str, str]]()
    for item in items:
        if item.get_closest_marker("family") is None or item.get_closest_marker("slow") is not None:
            continue
        place = (item.location[0], getattr(item, "originalname", item.name))
        if place in seen:
            item.add_marker(pytest.mark.thorough)
        seen.add(place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, before any fixture is made."""
    for mark, why_not in machine.WHY_NOT.items():
        if item.get_closest_marker(mark) and (reason := why_not()):
            item.stash[LACKS] = True
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    ids = [each for mark in item.iter_markers("conforms") for each in mark.args]
    if report.when == "call" and report.passed:
        for each in ids:
            _proved[each].add(item.nodeid)
    elif report.failed:
        _failed.update(ids)
    may_skip = IS_BARE and LACKS in item.stash
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
