"""A session ends as the interpreter does: what its scripts left for the end runs when it closes, and not between them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rows import each_row
from toolcell import Limits, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.sessions import state

pytestmark = pytest.mark.isolation

ENDINGS = {
    "an exit hook": "import atexit\natexit.register(call_tool, 'note', text='bye')",
    "a decorated hook": "import atexit\n@atexit.register\ndef last(): tools.note(text='bye')",
    "a finalizer": "import weakref\nclass A: pass\na = A()\nkept = weakref.finalize(a, tools.note, text='bye')",
    "a destructor": "class A:\n    def __del__(self, note=tools.note): note(text='bye')\na = A()",
    "a destructor that uses names": "import json\nclass A:\n    def __del__(self): tools.note(text=json.loads(TEXT))\n"
    "TEXT = '\"bye\"'\na = A()",
    "a handler of logging": "import logging\nclass H(logging.Handler):\n    def emit(self, record): pass\n"
    "    def close(self): tools.note(text='bye')\nlogging.getLogger().addHandler(H())",
    "a thread of a hook": "import atexit, threading\n"
    "atexit.register(lambda: (t := threading.Thread(target=tools.note, args=('bye',)), t.start(), t.join()))",
    "after a hook that fails": "import atexit\natexit.register(tools.note, text='bye')\natexit.register(lambda: 1 / 0)",
    "after a failed script": "import atexit\natexit.register(tools.note, text='bye')\n1 / 0",
}


@pytest.fixture(scope="module")
def noted() -> list[str]:
    return []


@pytest.fixture(scope="module")
def registry(noted: list[str]) -> ToolRegistry:
    made = ToolRegistry()

    @made.tool
    def note(text: str) -> None:
        """Take note of a text, for the test."""
        noted.append(text)

    return made


@pytest.fixture(scope="module")
def runtime(registry: ToolRegistry) -> Iterator[SyncRuntime]:
    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as opened:
        yield opened


@each_row("ending", ENDINGS)
def test_what_scripts_left_for_the_end_runs_once_when_the_session_closes(
    runtime: SyncRuntime, noted: list[str], ending: str
) -> None:
    noted.clear()
    with runtime.session() as session:
        session.execute_code(ENDINGS[ending])
        session.execute_code("tools.note(text='second')")
        between = [*noted]

    assert (between, noted) == (["second"], ["second", "bye"])


def test_a_session_that_is_left_open_ends_with_its_runtime(registry: ToolRegistry, noted: list[str]) -> None:
    noted.clear()
    with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
        session = runtime.session().__enter__()
        session.execute_code(ENDINGS["an exit hook"])

    assert noted == ["bye"]


def test_nothing_is_started_for_the_end_of_a_session(
    runtime: SyncRuntime, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object) -> None:
        raise AssertionError("there was nothing to run")

    with runtime.session() as plain:
        plain.execute_code("import logging, threading\nlogging.warning('x')\nfile = open('a', 'w'); file.write('b')")
        monkeypatch.setattr(state, "FINISH", "")
        monkeypatch.setattr(state.SessionState, "read", fails)
    with runtime.session() as session:
        session.execute_code(ENDINGS["an exit hook"])
        session.execute_code("import os\nos._exit(1)")


def test_what_scripts_left_for_the_end_runs_once_when_the_session_is_reset(
    runtime: SyncRuntime, noted: list[str]
) -> None:
    noted.clear()
    with runtime.session() as session:
        session.execute_code(ENDINGS["an exit hook"])
        session.reset()
        after, again = [*noted], session.execute_code("'again'")

    assert (after, again.value, noted) == (["bye"], "again", ["bye"])


def test_a_dry_run_leaves_its_hooks_in_its_copy(runtime: SyncRuntime, noted: list[str]) -> None:
    noted.clear()
    with runtime.session() as session:
        session.execute_code(ENDINGS["an exit hook"], dry_run=True)

    assert noted == []


def test_a_hook_that_does_not_end_holds_up_nobody_for_long(
    registry: ToolRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FINISH_S", 0.3)
    source = "import atexit, time\natexit.register(lambda: [time.sleep(60) for _ in range(60)])"
    with (
        caplog.at_level(logging.WARNING, "toolcell.sessions"),
        SyncRuntime(registry) as runtime,
        runtime.session("customer") as session,
    ):
        session.execute_code(source)

    assert "session customer: its exit hooks did not end: timeout" in caplog.text


def test_calls_of_hooks_meet_the_rules_of_the_tools(registry: ToolRegistry, noted: list[str]) -> None:
    noted.clear()
    guarded = registry.subset(["note"])
    guarded.policy.blacklist("note")
    with SyncRuntime(guarded) as runtime, runtime.session() as session:
        session.execute_code("import atexit\natexit.register(call_tool, 'note', text='bye')")

    assert noted == []


def test_limits_of_the_session_hold_at_its_end(registry: ToolRegistry, noted: list[str]) -> None:
    noted.clear()
    source = "import atexit\nfor n in range(9): atexit.register(tools.note, text=str(n))"
    with SyncRuntime(registry, limits=Limits(tool_calls=3)) as runtime, runtime.session() as session:
        session.execute_code(source)

    assert noted == ["8", "7", "6"]


def test_a_handler_of_logging_is_closed_beside_a_package_that_has_hooks_of_its_own() -> None:
    source = (
        "import logging.handlers\nhandler = logging.handlers.MemoryHandler(9, target=logging.StreamHandler())\n"
        "logging.getLogger().addHandler(handler)\nlogging.getLogger().setLevel(7)\nlogging.warning('kept until the end')"
    )
    with SyncRuntime(packages=["matplotlib"]) as runtime:
        alone = runtime.execute_code(source)
        with runtime.session() as session:
            session.execute_code(source)
            session.put_down()
            back = session.execute_code("logging.getLogger().level")
        with runtime.session() as session:
            session.execute_code("import logging\nlogging.getLogger('lib').addHandler(logging.NullHandler())\nx = 1")
            session.put_down()
            library = session.execute_code("x")

    assert "kept until the end" in alone.logs.stderr, alone.error
    assert back.value == 7 and back.session is not None and back.session.began == "journal"
    assert library.value == 1 and library.session is not None and library.session.began == "value"
