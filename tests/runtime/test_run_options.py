"""One list of options: every door takes it, checks it once, and names what was probably meant."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rows import each_row
from toolcell import Runtime, SyncRuntime
from toolcell.control import Draft
from toolcell.errors import UsageError
from toolcell.run.options import ResumeKwargs, RunKwargs, RunOptions, SessionRunKwargs
from toolcell.service import Client
from toolcell.service.client import ClientSession
from toolcell.service.routes.models import ExecuteRequest, SessionRequest
from toolcell.sessions.blocking import SyncSession
from toolcell.sessions.session import Session
from toolcell.sessions.settings import SessionKwargs, SessionSettings
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.quick

FIELDS = {each.name for each in dataclasses.fields(RunOptions)}

IN_A_BLOCK = ("seed", "clock", "repairs", "refresh", "preflight")
"""Options of a run by itself, which scripts of a session do not have."""


def options_of(door: Callable[..., Any]) -> str:
    return str(inspect.signature(door).parameters["options"].annotation)


def test_a_run_takes_every_option_at_each_door() -> None:
    assert set(RunKwargs.__annotations__) == FIELDS
    assert set(SessionRunKwargs.__annotations__) == FIELDS - set(IN_A_BLOCK)
    for kind in (Runtime, Client, SyncRuntime):
        assert options_of(kind.execute_code) == options_of(kind.stream) == "Unpack[RunKwargs]"
    for kind in (Session, ClientSession, SyncSession):
        assert options_of(kind.execute_code) == options_of(kind.stream) == "Unpack[SessionRunKwargs]"
    for kind in (Runtime, Client, SyncRuntime, Session, ClientSession, SyncSession):
        assert options_of(kind.resume) == "Unpack[ResumeKwargs]"
    assert set(ResumeKwargs.__annotations__) < FIELDS
    local = {"context", "cancel", "on_log", "on_progress"}
    assert set(ExecuteRequest.model_fields) - {"code"} == FIELDS - local
    by_hand = {"inputs", "files", "tools", "limits", "dry_run", "repairs"}
    assert set(RunOptions.PLAIN) == FIELDS - local - by_hand, "a Client sends each option that the service takes"


def test_a_session_takes_every_option_at_each_door() -> None:
    for kind in (Runtime, Client, SyncRuntime):
        assert options_of(kind.session) == "Unpack[SessionKwargs]"
    assert set(SessionRequest.model_fields) - {"name"} == set(SessionKwargs.__annotations__) - {"tools", "context"}
    assert set(SessionSettings.model_fields) < set(SessionKwargs.__annotations__)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpu_s": "abc"}, r"cpu_s = 'abc': must be a valid number"),
        ({"idle_s": [1]}, r"idle_s = \[1\]: must be a valid number"),
        ({"idle_s": 0}, "idle_s = 0: must be greater than 0"),
        ({"tool_calls": -1}, "tool_calls = -1: must be greater than or equal to 0"),
    ],
)
def test_a_wrong_option_of_a_session_is_refused_in_the_same_words_at_each_door(options: Any, said: str) -> None:
    for door in (Runtime(ToolRegistry()), Client("http://localhost:1")):
        with pytest.raises(UsageError, match=said):
            door.session("a", **options)


DOORS: dict[str, Callable[[SyncRuntime, Any], object]] = {
    "execute_code": lambda runtime, session: runtime.execute_code("1", limit=3),
    "stream": lambda runtime, session: runtime.stream("1", limit=3),
    "preflight": lambda runtime, session: runtime.preflight("1", limit=3),
    "session": lambda runtime, session: runtime.session(limit=3),
    "a session's execute_code": lambda runtime, session: session.execute_code("1", limit=3),
    "a session's stream": lambda runtime, session: session.stream("1", limit=3),
}

OTHERS: dict[str, Callable[[SyncRuntime, Any], object]] = {
    "map": lambda runtime, session: runtime.map("1", [], option={}),
    "execute_plan": lambda runtime, session: runtime.execute_plan([], option={}),
    "resume": lambda runtime, session: runtime.resume("x", option={}),
    "commit": lambda runtime, session: runtime.commit(Draft(), option={}),
    "revert": lambda runtime, session: runtime.revert(Draft(), option={}),
    "a session's resume": lambda runtime, session: session.resume("x", option={}),
}


@pytest.fixture(scope="module")
def opened() -> Any:
    with SyncRuntime() as runtime, runtime.session() as session:
        yield runtime, session


@pytest.mark.isolation
@pytest.mark.parametrize("door", DOORS)
def test_a_misspelt_option_is_the_same_error_at_every_door(door: str, opened: Any) -> None:
    with pytest.raises(UsageError, match=r"\(\) has no argument 'limit'; did you mean limits\?"):
        DOORS[door](*opened)


@pytest.mark.isolation
@pytest.mark.parametrize("door", OTHERS)
def test_so_is_one_of_the_other_methods(door: str, opened: Any) -> None:
    with pytest.raises(UsageError, match=r"\(\) has no argument 'option'; "):
        OTHERS[door](*opened)


@pytest.mark.anyio
@each_row("door", ["execute_code", "stream", "execute_plan", "preflight", "resume", "commit", "revert"])
async def test_a_client_says_it_before_it_asks_the_service(door: str) -> None:
    client = Client("http://127.0.0.1:1")
    client._lifetime.check = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=rf"^{door}\(\) has no argument 'limit'; "):
        made = getattr(client, door)([] if door == "execute_plan" else "1", limit=3)
        await made


@pytest.mark.anyio
@each_row("door", ["execute_code", "stream", "resume"])
async def test_so_does_a_session_of_a_client(door: str) -> None:
    session = ClientSession(None, {})
    with pytest.raises(UsageError, match=rf"^{door}\(\) has no argument 'limit'; "):
        await getattr(session, door)("1", limit=3)


def test_options_are_checked_once_and_do_not_change() -> None:
    options = RunOptions(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 4  # type: ignore[misc]
    wrong: dict[str, Any] = {
        "lint": "x",
        "limits": {},
        "seed": True,
        "clock": "now",
        "context": 3,
        "on_approval": "x",
        "refresh": "x",
        "check_types": "x",
        "cancel": 3,
        "on_log": 3,
        "on_progress": 3,
    }
    for name, value in wrong.items():
        with pytest.raises(UsageError, match=name):
            RunOptions(**{name: value})
