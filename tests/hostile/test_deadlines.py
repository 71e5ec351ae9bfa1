"""`wall_s` and `cpu_s` end a sandbox while something keeps the host's event loop."""

from __future__ import annotations

import time
from typing import Any

import pytest

from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Runtime, ToolRegistry

pytestmark = pytest.mark.quick

BLOCKED_S = 6.0
"""How long a callback of the caller keeps the event loop, from the start of the script."""

MARGIN_S = 3.0
"""For a machine that is busy with other tests. A sandbox that only the event loop ends lives to BLOCKED_S."""

SLOW = """
import os, time
print("begun", flush=True)
while True:
    os.write(1, b"%f\\n" % time.monotonic())
    time.sleep(0.02)
"""

BUSY = """
import os, time
print("begun", flush=True)
while True:
    os.write(1, b"%f\\n" % time.monotonic())
    used = time.process_time()
    while time.process_time() < used + 0.02:
        pass
"""

CALLS = """
import os, threading
print("begun", flush=True)
threading.Timer(0.2, call_tool, ("note",)).start()
threading.Event().wait()
"""


async def run_blocked(
    source: str, backend: Any, registry: ToolRegistry | None = None, *, openings: int = 1, **limits: float
) -> tuple[ExecutionResult, float]:
    """Run a script whose first output keeps the loop; return its result and how long it lived after that.

    `openings`: how often the Runtime is opened; the script runs the last time.
    """
    began: list[float] = []

    def block(stream: str, text: str) -> None:
        if not began:
            began.append(time.monotonic())
            while time.monotonic() < began[0] + BLOCKED_S:
                time.sleep(0.1)

    runtime = Runtime(registry, backend=backend, limits=Limits(**limits), pool=PoolConfig(warm=1))
    for _ in range(openings - 1):
        async with runtime:
            assert (await runtime.execute_code("set_result(1)")).value == 1
    async with runtime:
        result = await runtime.execute_code(source, on_log=block)
    lines = result.logs.stdout.split() + result.logs.stderr.split()
    return result, max((float(line) for line in lines if line[:1].isdigit()), default=began[0]) - began[0]


def backend_named(name: str) -> Any:
    if name != "forked":
        return name
    from toolcell.sandbox.docker.backend import DockerBackend

    return DockerBackend(mode="forked")


@pytest.mark.anyio
@pytest.mark.isolation
@pytest.mark.parametrize("limit", ["wall_s", "cpu_s"])
async def test_a_sandbox_ends_at_its_limit_while_the_event_loop_does_not_run(limit: str) -> None:
    await assert_ends_in_time(limit, "process")


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_runtime_that_is_opened_again_ends_sandboxes_without_the_event_loop_too() -> None:
    result, lived_s = await run_blocked(SLOW, "process", wall_s=0.5, openings=2)

    assert result.outcome is Outcome.TIMEOUT
    assert lived_s < 0.5 + MARGIN_S


@pytest.mark.anyio
@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("limit", "backend"), [("wall_s", "docker"), ("cpu_s", "docker"), ("wall_s", "forked")])
async def test_a_container_ends_at_its_limit_while_the_event_loop_does_not_run(limit: str, backend: str) -> None:
    await assert_ends_in_time(limit, backend)


async def assert_ends_in_time(limit: str, backend: str) -> None:
    if limit == "wall_s":
        result, lived_s = await run_blocked(SLOW, backend_named(backend), wall_s=0.5)
        assert result.outcome is Outcome.TIMEOUT
    else:
        result, lived_s = await run_blocked(BUSY, backend_named(backend), wall_s=60.0, cpu_s=0.5)
        assert result.outcome is Outcome.CPU_LIMIT
        assert result.usage.cpu_s < 0.5 + MARGIN_S
    assert lived_s < 0.5 + MARGIN_S, f"it lived for {lived_s:.2f} s after the loop had stopped"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_call_that_is_read_after_the_deadline_is_not_made() -> None:
    registry, made = ToolRegistry(), list[str]()

    @registry.tool
    async def note() -> None:
        """Note that it was called."""
        made.append("called")

    result, _ = await run_blocked(CALLS, "process", registry, wall_s=1.0)

    assert result.outcome is Outcome.TIMEOUT
    assert made == []
