"""`RunMap`: the items of `Runtime.map`, for `async for`. Tasks pull inputs and run them; their reader may be slow.

At most `WINDOW` inputs for each task are pulled and not read yet, so memory does not grow with the number of inputs.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools
from toolcell.calls.concurrency import first_leaf
from toolcell.control.suspension import IN_DOUBT
from toolcell.errors import MapStopped, UsageError
from toolcell.journal.identity import options_of
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, PendingCall, Suspension
from toolcell.support.background import BackgroundTask, TaskReader
from toolcell.support.checks import brief

WINDOW: Final = 4
"""Inputs for each task that are pulled and not read: one slow item does not stop the others at once."""

NO_MORE: Final = object()

Inputs = Mapping[str, Any]
OnError = Literal["yield", "raise", "stop"]


OF_THE_MACHINE: Final = frozenset({Outcome.UNAVAILABLE, Outcome.LOST})
"""Failures that are not the script's."""

UNDECIDED: Final = frozenset({Outcome.UNAVAILABLE, Outcome.LOST, Outcome.CANCELLED, Outcome.SUSPENDED})
"""An item that ended like this is not done: a map that is carried on takes it up again."""


@dataclass(frozen=True, slots=True)
class MapItem:
    """The result for one input of `Runtime.map`."""

    index: int
    """Number of the input, from 0."""
    inputs: Mapping[str, Any]
    run_id: str
    outcome: Outcome
    value: Any = None
    has_value: bool = False
    error: ErrorInfo | None = None
    attempts: int = 1
    """In this process."""
    result: ExecutionResult | None = field(default=None, repr=False)
    """Everything the run left behind. None of an item that had no run in this process."""
    suspension: Suspension | None = None
    """What it waits for: approvals, or decisions about calls in doubt. Give it to `Runtime.resume`."""
    is_recorded: bool = False
    """It ended in an earlier process, and this is what the map's file has: outcome, value and error."""
    unkept: str = ""
    """Why a recorded item has no value although its script had a result."""

    @property
    def ok(self) -> bool:
        """True when the script reached its end."""
        return self.outcome is Outcome.OK

    @property
    def in_doubt(self) -> tuple[PendingCall, ...]:
        """Calls that had started when their host ended. Their results are unknown, and they were not repeated."""
        calls = self.suspension.calls if self.suspension is not None else ()
        return tuple(call for call in calls if call.reason == IN_DOUBT)


def had_no_effect(result: ExecutionResult | None, tools: CallableTools) -> bool:
    """Return whether a run provably changed nothing: it made no call, or only of tools that may be called twice."""
    if result is None:  # it had no sandbox
        return True
    return all(options_of(tools, tools.registered_name(call.name)).is_repeatable for call in result.calls)


class MapPump(BackgroundTask[MapItem]):
    """The tasks of a map, and what they have ready."""

    def __init__(
        self,
        inputs: Iterable[Inputs] | AsyncIterable[Inputs],
        run_item: Callable[[int, Inputs], Awaitable[MapItem]],
        check_count: Callable[[int], None],
        *,
        concurrency: int,
        ordered: bool,
        on_error: OnError,
    ) -> None:
        """`check_count` gets the number of all inputs when every item of theirs has ended."""
        super().__init__("the Runtime was closed before the map was over")
        self._inputs = _iterator_of(inputs)
        self._run_item, self._check_count = run_item, check_count
        self._concurrency, self._ordered, self._on_error = concurrency, ordered, on_error
        self._workers = 0
        self._ready: dict[int, MapItem] = {}
        self._pulled = 0
        self._taken = 0
        self._pulling = anyio.Lock()
        self._is_stopped = False
        """No more inputs are pulled."""
        self._are_over = False
        """There are no more inputs."""
        self._waiting: anyio.CancelScope | None = None
        """In which an input is waited for."""
        self._broken: Exception | None = None
        """Why the map does not go on: the inputs raised it, or an item could not be run."""

    def leave(self) -> None:
        """End the runs under way: nobody reads any more."""
        self.cancel()
        super().leave()

    # The tasks

    async def work(self, opened: Callable[[], Awaitable[Callable[[], None]]]) -> None:
        """Be the work of the map's task. `opened` opens its file and returns what closes it."""
        close = await opened()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._work, group)
            if self._broken is not None:
                raise self._broken
            if self._are_over:
                self._check_count(self._pulled)
        except BaseExceptionGroup as exc:
            raise first_leaf(exc) from None
        finally:
            close()

    async def _work(self, group: TaskGroup) -> None:
        """Run items until there are no more. After an error no more are begun, and those under way end.

        Each worker starts the next one when it has an input, so that there are no more workers than inputs.
        """
        self._workers += 1
        is_newest = True
        try:
            while (pulled := await self._pull()) is not None:
                if is_newest and self._workers < self._concurrency:
                    group.start_soon(self._work, group)
                is_newest = False
                await self._run_one(*pulled)
        except Exception as exc:
            self._broken = self._broken or exc
            self._stop()
            self.changed.notify()

    def _stop(self) -> None:
        """Begin no more items, and wait for no more inputs."""
        self._is_stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _run_one(self, index: int, inputs: Inputs) -> None:
        item = await self._run_item(index, inputs)
        self._ready[item.index] = item
        if self._is_failure(item):
            self._stop()
        self.changed.notify()

    def _is_failure(self, item: MapItem) -> bool:
        """Return whether `on_error` is about this item. One that had failed before was told of then."""
        return self._on_error != "yield" and not item.ok and not item.is_recorded

    async def _pull(self) -> tuple[int, Inputs] | None:
        """Return the next input and its number, when there is room for its item; None after the last one."""
        async with self._pulling:
            while not self._is_stopped and self._pulled - self._taken >= WINDOW * self._concurrency:
                await self.changed.wait()
            if self._is_stopped:
                return None
            with anyio.CancelScope() as self._waiting:
                inputs = await self._next_input()
            if self._waiting.cancel_called:  # an item has failed meanwhile
                return None
            if inputs is NO_MORE:
                self._is_stopped = self._are_over = True
                return None
            index = self._pulled
            if not isinstance(inputs, Mapping):
                raise UsageError(
                    f'input {index} of a map must be a dict from names to values, such as {{"x": ...}}, not '
                    f"{brief(inputs)}"
                )
            self._pulled += 1
            return index, inputs

    async def _next_input(self) -> Any:
        try:
            if isinstance(self._inputs, AsyncIterator):
                return await anext(self._inputs, NO_MORE)
            return next(self._inputs, NO_MORE)
        except anyio.get_cancelled_exc_class() as exc:
            if anyio.current_effective_deadline() == -math.inf:  # it is this map that was cancelled
                raise
            raise UsageError("the inputs of a map were cancelled: a task that they wait for was") from exc

    # The reader's end

    def take(self) -> MapItem | None:
        """Take the next item; None if none is ready.

        Raises:
            MapStopped: the item failed, and `on_error` is "raise".
        """
        if (index := self._next()) is None:
            return None
        item = self._ready.pop(index)
        self._taken += 1
        self.changed.notify()
        if self._on_error == "raise" and self._is_failure(item):
            why = item.error.message if item.error is not None else "without a word"
            raise MapStopped(f"item {index} ended as {item.outcome}: {why}", item)
        return item

    def _next(self) -> int | None:
        if self._ordered and not self.over.is_set():  # after an error, those behind it come too
            return self._taken if self._taken in self._ready else None
        return min(self._ready, default=None) if self._ordered else next(iter(self._ready), None)


def _iterator_of(inputs: object) -> Iterator[Inputs] | AsyncIterator[Inputs]:
    if isinstance(inputs, AsyncIterable):
        return aiter(inputs)
    if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping | str | bytes):
        return iter(inputs)
    raise UsageError(f"map takes an iterable or async iterator of dicts, one for each run, not {brief(inputs)}")


class RunMap(TaskReader[MapItem]):
    """The items of a map: `async for item in runtime.map(source, inputs)`. It begins with the first step.

    Leaving the loop early ends the runs under way. `async with runtime.map(...) as items` also waits for their end.
    """

    def __init__(
        self,
        pump: MapPump,
        opened: Callable[[], Awaitable[Callable[[], None]]],
        tasks: Callable[[], TaskGroup],
    ) -> None:
        super().__init__(pump)
        self._pump, self._opened, self._tasks = pump, opened, tasks

    def _begin(self) -> None:
        self._tasks().start_soon(self._pump.run, partial(self._pump.work, self._opened), name="toolcell map")

    async def __anext__(self) -> MapItem:
        """Return the next item.

        Raises:
            MapStopped: an item failed, with `on_error="raise"`.
            UsageError: an input cannot be sent, or the map's file cannot be used.
            AuditError: a run could not be recorded.
            Exception: the inputs raised this.

        Cancellation: the runs under way end.
        """
        try:
            return await super().__anext__()
        except MapStopped:
            await self.aclose()
            raise
