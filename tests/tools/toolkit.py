"""Helpers of the tool tests: meetings instead of sleeps, a log of events, a runtime without a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from toolcell.calls.options import Origin
from toolcell.config import Policy
from toolcell.errors import ToolError
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, Outcome
from toolcell.tools import CodeRuntime, Event, RunContext, ToolRegistry

PATIENCE_S = 60.0
"""Only a broken test waits this long."""

QUERY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "Search query"}},
    "required": ["query"],
}


class Meeting:
    """Everybody waits until `expected` have come: overlap without a clock."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.all_here = anyio.Event()
        self.here = 0
        self.most = 0

    async def join(self) -> None:
        """Come, wait for the others, go."""
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here >= self._expected:
            self.all_here.set()
        try:
            with anyio.fail_after(PATIENCE_S):
                await self.all_here.wait()
        finally:
            self.here -= 1


class Crowd:
    """Counts how many are inside at once; each lets everybody else run a while before it leaves."""

    def __init__(self, rounds: int = 100) -> None:  # more than a batch of 25 calls gives way while it starts
        self._rounds = rounds
        self.inside = 0
        self.most = 0
        self.visits = 0

    async def visit(self) -> None:
        """Be inside for some turns of the event loop."""
        self.inside += 1
        self.visits += 1
        self.most = max(self.most, self.inside)
        for _ in range(self._rounds):
            await anyio.lowlevel.checkpoint()
        self.inside -= 1


def recorded(events: Any) -> list[Event]:
    """Everything a bus emits from now on."""
    log: list[Event] = []
    events.subscribe(log.append)
    return log


def kinds(log: list[Event]) -> list[tuple[str, str | None]]:
    """Shape: [(type, tool)], the types without their prefix."""
    return [(event.type.removeprefix("tool_execution_"), event.tool) for event in log]


Script = Callable[[Callable[..., Awaitable[Any]]], Awaitable[Any]]


class FakeRuntime(CodeRuntime):
    """Runs a Python function in place of a script: `call_tool` is all it gets, and takes the same way as a guest's."""

    policy: Policy | None = None

    def __init__(self, script: Script, logs: str = "") -> None:
        self._script = script
        self._logs = logs
        self.sources: list[str] = []

    async def execute_code(
        self,
        source: str,
        /,
        *,
        tools: ToolRegistry | None = None,
        limits: Any = None,
        context: RunContext | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
    ) -> ExecutionResult:
        assert tools is not None
        self.sources.append(source)

        async def call_tool(name: str, args: dict[str, Any] | None = None) -> Any:
            result = await tools.dispatch(name, args or {}, origin=Origin.CODE, context=context)
            if result.is_error:
                raise ToolError(result.message, code=result.error.code if result.error else "")
            return result.guest_value()

        if self._logs and on_log is not None:
            on_log("stdout", self._logs)
        logs = Logs((LogEntry("stdout", self._logs),) if self._logs else ())
        try:
            value = await self._script(call_tool)
        except Exception as exc:
            error = ErrorInfo(type(exc).__name__, str(exc), line=1)
            return ExecutionResult("run", Outcome.ERROR, error=error, logs=logs)
        return ExecutionResult("run", Outcome.OK, value=value, has_value=value is not None, logs=logs)
