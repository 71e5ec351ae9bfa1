"""`AgentStream`: the events of one run of an agent, for `async for`. The run is a task; its reader may be slow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from toolcell.agents.loop_result import ToolLoopResult
from toolcell.calls import events
from toolcell.errors import UsageError
from toolcell.support.background import LEAVE_S, BackgroundTask, TaskReader
from toolcell.tools import Event, RunContext

Run = Callable[[RunContext], Awaitable[ToolLoopResult]]


class _Feed(BackgroundTask[Event]):
    """The task of a run, and its events that wait for the reader."""

    def __init__(self, context: RunContext) -> None:
        super().__init__("the stream was closed before the agent had a result")
        self._context = context
        self._backlog = events.Backlog(events.QUEUE_EVENTS)
        self.result: ToolLoopResult | None = None

    def take(self) -> Event | None:
        """Take the next event; None if there is none now."""
        return self._backlog.take() if self._backlog else None

    def leave(self) -> None:
        """End the run, which may go on in a tool: nobody reads any more."""
        if not self.over.is_set():
            self._context.cancel("nobody reads the agent's stream any more")
        super().leave()

    async def execute(self, run: Run) -> None:
        """Be the work of the task."""
        # A context may be given to several runs at once: only the events of this one are read here.
        own = events.EventBranch(self._context.events, self._put)
        self.result = await run(self._context.child(events=own).within(streams=True))

    def _put(self, event: Event) -> None:
        if not self.is_left:
            self._backlog.put(event)
            self.changed.notify()


class AgentStream(TaskReader[Event]):
    """The events of one run: `async with agent.stream(prompt) as events`, then `async for event in events`.

    The run begins with the first step. Leaving the block early ends the run. A step raises what `Agent.run` raises.
    """

    def __init__(self, run: Run, context: RunContext) -> None:
        self._feed = _Feed(context)
        super().__init__(self._feed, LEAVE_S)
        self._run = run
        self._tasks: TaskGroup | None = None

    @property
    def result(self) -> ToolLoopResult:
        """The result of the run, as `Agent.run` returns it.

        Raises:
            UsageError: the run is not over.
        """
        if self._feed.result is None:
            raise UsageError("the run has no result yet: read the events of the stream to their end first")
        return self._feed.result

    def _begin(self) -> None:
        if self._tasks is None:
            raise UsageError("a stream is opened first: write `async with agent.stream(prompt) as events`")
        self._tasks.start_soon(self._feed.run, partial(self._feed.execute, self._run), name="toolcell agent")

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        assert self._tasks is not None
        await self._tasks.__aexit__(None, None, None)  # empty by now: what the block raised stays as it is
