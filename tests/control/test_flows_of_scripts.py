"""A script that has read something private does not send it on: also not from a plan, after a resume, or in a repair."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from journals import forget, rows
from toolcell import Policy, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.flows import Flow
from toolcell.tools import Approve, Deny

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

FAILED = "Tool 'post' failed: "
REFUSED = 'tool "post" is not permitted: it sends to "public", and this run has read "private"'
ASKED = 'needs approval: it sends to "public", and this run has read "private"'
POLICY = Policy(flows=(Flow("private", "public", "deny"),))


class Office:
    """Private mail, a payment that needs approval, and a public web."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.registry = registry = ToolRegistry()

        @registry.tool(reads="private")
        async def mail() -> str:
            """Read all the mail there is."""
            self.done.append("mail")
            return "the code is 1234"

        @registry.tool(requires_approval=True)
        async def pay() -> str:
            """Pay what there is to pay."""
            self.done.append("pay")
            return "paid"

        @registry.tool(sends="public")
        async def post(text: str) -> str:
            """Post a text where everybody can read it."""
            self.done.append("post")
            return "posted"


@pytest.fixture
def office() -> Office:
    return Office()


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals") / "runs"


@pytest.fixture(scope="module")
def deny(journals: Path) -> Any:
    """A runtime with a journal directory, under a flow that denies."""
    with SyncRuntime(pool=PoolConfig(warm=1), record=journals / "runs.db", policy=POLICY) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def ask() -> Any:
    """A runtime whose journals are in memory, under a flow that asks."""
    policy = Policy(flows=(Flow("private", "public", "ask"),))
    with SyncRuntime(pool=PoolConfig(warm=1), policy=policy) as runtime:
        yield runtime


def test_a_mended_script_has_read_what_the_broken_ones_had_read(
    deny: SyncRuntime, ask: SyncRuntime, office: Office
) -> None:
    """Also the one before the last, and where no journal is on disk."""
    said = list[str]()
    for runtime in (deny, ask):
        broken = runtime.execute_code("letter = call_tool('mail')\n1/0", tools=office.registry)
        broken = runtime.execute_code("1/0", tools=office.registry, repairs=broken)
        mended = "call_tool('post', text='the code is 1234')"
        result = runtime.execute_code(mended, tools=office.registry, repairs=broken, on_approval="suspend")
        said += [call.reason for call in result.suspension.calls] if result.suspension is not None else []
        said += [result.error.message] if result.error is not None and result.suspension is None else []

    assert said == [FAILED + REFUSED, ASKED]
    assert office.done == ["mail", "mail"]


def test_a_flow_that_asks_suspends_the_run_and_an_approval_holds_for_one_call(ask: SyncRuntime, office: Office) -> None:
    source = "letter = call_tool('mail')\n[call_tool('post', text=letter), call_tool('post', text=letter)]"
    result = ask.execute_code(source, tools=office.registry, on_approval="suspend")
    assert result.suspension is not None
    assert [(call.tool, call.reason) for call in result.suspension.calls] == [("post", ASKED)]

    result = ask.resume(result.suspension, {"call_2": Approve()}, tools=office.registry)
    assert result.suspension is not None and [call.id for call in result.suspension.calls] == ["call_3"]
    result = ask.resume(result.suspension, {"call_3": Deny("once is enough")}, tools=office.registry)
    assert result.error is not None and result.error.message == FAILED + "once is enough"
    assert office.done == ["mail", "post"]


def test_an_approval_does_not_hold_for_a_reason_that_came_later(ask: SyncRuntime, office: Office) -> None:
    registry = office.registry.merged()

    @registry.tool(requires_approval=True, sends="public")
    async def announce() -> str:
        """Announce what is to be announced."""
        office.done.append("announce")
        return "announced"

    source = "call_tools_parallel(['announce', 'mail'])"
    result = ask.execute_code(source, tools=registry, on_approval="suspend")
    assert result.suspension is not None and result.suspension.calls[0].reason == "needs approval"
    result = ask.resume(result.suspension, {"call_1": Approve()}, tools=registry)
    assert result.suspension is not None and result.suspension.calls[0].reason == ASKED
    result = ask.resume(result.suspension, {"call_1": Approve()}, tools=registry)

    assert result.value == ["announced", "the code is 1234"] and office.done == ["mail", "announce"]


def test_what_is_read_is_written_down_before_it_is_read(deny: SyncRuntime, journals: Path, office: Office) -> None:
    found: list[bool] = []

    @office.registry.tool(reads="private")
    async def look() -> None:
        """Look whether a host that is killed now leaves the label behind."""
        found.append(any(b"private" in body for (body,) in rows(journals, "SELECT body FROM kept")))

    forget(journals, "run")
    deny.execute_code("call_tool('look')", tools=office.registry)
    assert found == [True]


HOST = """
import os, signal, sys
import anyio
from toolcell import Flow, Policy, PoolConfig, Runtime, ToolRegistry

folder, *dies = sys.argv[1:]
registry = ToolRegistry()

@registry.tool(reads="private")
async def mail() -> str:
    "Read all the mail there is."
    return "the code is 1234"

@registry.tool
async def summary() -> str:
    "Have a script read the mail."
    return (await runtime.execute_code("set_result(call_tool('mail'))", tools=registry)).value

def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@registry.tool(sends="public")
async def post(text: str) -> None:
    "Post a text where everybody can read it."

async def main() -> None:
    global runtime
    policy = Policy(flows=(Flow("private", "public", "deny"),))
    async with Runtime(registry, record=folder + "/runs.db", policy=policy, pool=PoolConfig(warm=0)) as runtime:
        if dies:
            script = f"from time import sleep; letter = call_tool('{dies[0]}'); sleep(0.2); progress('read'); call_tool('post', text=letter)"
            await runtime.execute_code(script, on_approval="suspend", on_progress=die)
        (interrupted,) = runtime.interrupted_runs()
        result = await runtime.resume(interrupted)
        print(result.outcome, result.error and result.error.message)

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["summary", "mail"])
def test_a_run_whose_host_died_after_an_answer_has_read_what_the_answer_said(way: str, tmp_path: Path) -> None:
    """Also where the tool had a script of its own read it, so that only its answer says so."""
    command = [sys.executable, "-c", HOST, str(tmp_path)]
    killed = subprocess.run([*command, way], capture_output=True, text=True, timeout=60, check=False)
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert resumed.stdout == f"error {FAILED}{REFUSED}\n", resumed.stderr
