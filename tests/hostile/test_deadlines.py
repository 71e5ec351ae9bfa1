"""`wall_s` and `cpu_s` end a sandbox while something keeps the host's event loop."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Runtime, ToolRegistry

pytestmark = pytest.mark.quick

MOST_S = 60.0
"""How long a callback of the caller keeps the event loop while the sandbox lives. Only a sandbox that waits for the loop takes so long."""

MARGIN_S = 3.0
"""Processor time that a script may use past its limit until the watch sees it."""

NAMED = """
import ctypes, threading
ctypes.CDLL(None).prctl(15, NAME.encode(), 0, 0, 0)
print("begun", flush=True)
"""
WAITS = NAMED + "threading.Event().wait()"
WORKS = NAMED + "while True: pass"
CALLS = NAMED + 'threading.Timer(0.2, call_tool, ("note",)).start()\nthreading.Event().wait()'


def lives(name: str) -> bool:
    """Whether a process of this machine has this name. In containers of the local engine too."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found = path.read_bytes()
        except OSError:
            continue
        if f"({name})".encode() in found and b") Z " not in found:
            return True
    return False


async def run_blocked(
    source: str, backend: Any, registry: ToolRegistry | None = None, *, openings: int = 1, **limits: float
) -> ExecutionResult:
    """Run a script whose first output keeps the loop until no process of the script is left; return its result.

    `openings`: how often the Runtime is opened; the script runs the last time.
    """
    name, lived, died = uuid.uuid4().hex[:15], list[bool](), list[bool]()

    def block(stream: str, text: str) -> None:
        if not lived:
            lived.append(lives(name))
            until = time.monotonic() + MOST_S
            while lives(name) and time.monotonic() < until:
                time.sleep(0.05)
            died.append(not lives(name))

    runtime = Runtime(registry, backend=backend, limits=Limits(**limits), pool=PoolConfig(warm=1))
    for _ in range(openings - 1):
        async with runtime:
            assert (await runtime.execute_code("set_result(1)")).value == 1
    async with runtime:
        result = await runtime.execute_code(source, inputs={"NAME": name}, on_log=block)
    assert lived == [True], result.error
    assert died == [True], "it lived as long as the event loop did not run"
    return result


@pytest.mark.anyio
@pytest.mark.isolation
@pytest.mark.parametrize("limit", ["wall_s", "cpu_s"])
async def test_a_sandbox_ends_at_its_limit_while_the_event_loop_does_not_run(limit: str) -> None:
    await assert_ends_in_time(limit, "process")


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_runtime_that_is_opened_again_ends_sandboxes_without_the_event_loop_too() -> None:
    result = await run_blocked(WAITS, "process", wall_s=0.5, openings=2)

    assert result.outcome is Outcome.TIMEOUT


@pytest.mark.anyio
@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("limit", ["wall_s", "cpu_s"])
async def test_a_container_ends_at_its_limit_while_the_event_loop_does_not_run(limit: str) -> None:
    await assert_ends_in_time(limit, "docker")


async def assert_ends_in_time(limit: str, backend: str) -> None:
    if limit == "wall_s":
        result = await run_blocked(WAITS, backend, wall_s=0.5)
        assert result.outcome is Outcome.TIMEOUT
    else:
        result = await run_blocked(WORKS, backend, wall_s=2 * MOST_S, cpu_s=0.5)
        assert result.outcome is Outcome.CPU_LIMIT
        assert result.usage.cpu_s < 0.5 + MARGIN_S


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_call_that_is_read_after_the_deadline_is_not_made() -> None:
    registry, made = ToolRegistry(), list[str]()

    @registry.tool
    async def note() -> None:
        """Note that it was called."""
        made.append("called")

    result = await run_blocked(CALLS, "process", registry, wall_s=1.0)

    assert result.outcome is Outcome.TIMEOUT
    assert made == []
