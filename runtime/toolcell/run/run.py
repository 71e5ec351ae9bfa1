"""`Run`: sends one script, reads what comes, keeps the deadline, and reports how the run ended.

Calls go to `ToolCalls`, everything else to `RunOutput`, and `outcome_of` decides what it amounts to. Knows neither
registry nor audit log nor which backend made the sandbox.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.errors import AuditError, ToolAbort, UsageError
from toolcell.results import ExecutionResult, Isolation, Outcome, Usage
from toolcell.run.calls import Answer, Dispatch, ToolCalls
from toolcell.run.connection import GATHERED_BYTES, GuestConnection
from toolcell.run.observer import NULL_OBSERVER, RunObserver
from toolcell.run.outcome import Aborted, Failed, ProtocolViolation, RunEnd, exceeded_limit, highest, outcome_of
from toolcell.run.output import RunOutput
from toolcell.run.request import RunRequest
from toolcell.sandbox.backend import Exit, LimitExceeded, Sample
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallTool, Done

SLICE_S = 0.002
"""How long one run may go on without letting other tasks have the event loop."""

DRAIN_S = 1.0
"""For reading what a dead sandbox had sent."""


class Run:
    """One run of one script in one sandbox."""

    def __init__(
        self,
        connection: GuestConnection,
        request: RunRequest,
        dispatch: Dispatch,
        observer: RunObserver = NULL_OBSERVER,
        start_s: float = 0.0,
    ) -> None:
        self._connection = connection
        self._sandbox = connection.sandbox
        self._request = request
        self._limits = request.limits
        self._dispatch = dispatch
        self._observer = observer
        self._start_s = start_s
        self._started = time.perf_counter()
        self._calls = ToolCalls(request.limits, connection, self._started)
        self._output = RunOutput(request, connection, self._calls.cancel)
        self._sample = Sample()
        self._context = contextvars.copy_context()
        self._has_tasks = False
        self._yield_at = self._started + SLICE_S

    async def execute(self) -> ExecutionResult:
        """Send the script, answer its calls, and return what it left behind.

        Raises:
            UsageError: the script or a file cannot be sent.
            AuditError: `observer` could not record that the script was sent; no tool was called.
            Exception: a callback or a measurement raised this; it ends this run only.

        Cancellation: the caller must destroy the sandbox.
        """
        connection = self._connection
        connection.begin_run()
        with anyio.move_on_after(self._limits.wall_s) as deadline:
            await self._send_script()
            cancel = self._request.cancel
            if cancel is not None and cancel.is_set():
                self._abort()  # now: the script may be over before another task has its turn
            # Most scripts make no call, and reading alone needs no task group.
            call = await self._read() if cancel is None else None
            if connection.stopped is None and (call is not None or cancel is not None):
                await self._serve_calls(call)
            await connection.flush()
        if deadline.cancel_called:
            wall_s = self._limits.wall_s
            connection.stop(LimitExceeded(Outcome.TIMEOUT, "wall_s", wall_s, time.perf_counter() - self._started))
        end = await self._wait_for_exit()
        if type(connection.stopped) is Failed:
            raise connection.stopped.error
        return self._result(end)

    def check(self) -> None:
        """Measure the sandbox and stop the run if it exceeds a limit. Called a few times a second while it runs.

        Never raises: an exception, also one of the caller's callbacks, stops this run and comes out of `execute`.
        """
        if self._connection.stopped is not None:
            return
        try:
            self._take_raw_output()
            self._sample = self._sandbox.sample()
            if (exceeded := exceeded_limit(self._limits, self._sample)) is not None:
                self._connection.stop(exceeded)
        except Exception as exc:
            self._connection.stop(Failed(exc))

    # Reading.

    async def _send_script(self) -> None:
        connection = self._connection
        about = "a file's name"
        try:
            for message in self._request.file_messages():
                connection.post(message)
                if connection.unsent_bytes > GATHERED_BYTES:
                    await connection.flush()
            about = "source and inputs"
            connection.post(self._request.message)
        except (UnsendableValue, ValueTooLarge) as exc:
            raise UsageError(f"{about} cannot be sent: {exc}; pass less, use files=, or raise frame_bytes") from exc
        await connection.flush()
        try:
            # The guest starts meanwhile. No tool call is made until this returns.
            self._observer.on_script_sent()
        except AuditError as exc:
            connection.stop(Failed(exc))

    async def _read(self) -> CallTool | None:
        """Read messages until there is a tool call to make; None when the run is over."""
        connection, calls, output = self._connection, self._calls, self._output
        try:
            while connection.stopped is None:
                message = connection.next_message()
                if message is None:
                    await connection.flush()
                    self._observer.on_answers_sent()
                    if time.perf_counter() > self._yield_at:
                        # A guest that always sends more must not keep the event loop from deadlines and from others.
                        await anyio.lowlevel.checkpoint()
                        self._yield_at = time.perf_counter() + SLICE_S
                    if not await connection.receive():
                        return None
                elif type(message) is not CallTool:
                    output.take(message)
                elif calls.admit(message):
                    return message
        except RemoteProtocolError as exc:
            connection.stop(ProtocolViolation(str(exc)))
        except Exception as exc:
            self._stop_for(exc)
        return None

    def _stop_for(self, exc: Exception) -> None:
        """Stop the run because a tool, a callback or the observer raised."""
        self._connection.stop(Aborted(str(exc)) if isinstance(exc, ToolAbort) else Failed(exc))

    # Calls.

    async def _serve_calls(self, call: CallTool | None) -> None:
        """Make calls and read on, until the run is over."""
        async with anyio.create_task_group() as tasks:
            if self._request.cancel is not None:
                self._start(tasks, self._abort_on, self._request.cancel)
            await self._serve(tasks, call)

    async def _serve(self, tasks: TaskGroup, call: CallTool | None = None) -> None:
        """Make calls and read on, until the run is over or a call has to wait: then another task reads on.

        A call that does not wait needs neither a task nor a turn of the event loop: half of what a round trip costs.
        """
        calls, connection = self._calls, self._connection
        answer: Answer | None = None
        with anyio.CancelScope() as scope:
            while (call := call or await self._read()) is not None:
                work = self._dispatch(call)
                try:
                    waits_for = work.send(None)
                except StopIteration as finished:
                    calls.finish(call, finished.value)
                    if connection.unsent_bytes > GATHERED_BYTES:
                        # In a task of its own: the guest may not read it before the host reads what the guest writes.
                        calls.keep_place()
                        self._start(tasks, self._write_answer, connection.take_unsent())
                except Exception as exc:
                    self._stop_for(exc)
                else:
                    calls.take_place(call, scope)
                    self._start(tasks, self._serve, tasks)
                    answer = await self._answer(_Rest(work, waits_for))
                    break
                call = None
        if call is not None:
            await self._finish(call, answer)
        elif self._has_tasks:
            tasks.cancel_scope.cancel()

    async def _finish(self, call: CallTool, answer: Answer | None) -> None:
        """Answer a call that has waited, then make whichever waits for its turn."""
        calls, connection = self._calls, self._connection
        while connection.stopped is None:
            calls.finish(call, answer)
            await connection.flush()
            self._answers_sent()
            made = await self._make_queued()
            if made is None:
                return
            call, answer = made
        if answer is not None:  # the tool went on when the run was over: its call is recorded all the same
            calls.finish(call, answer)

    async def _write_answer(self, data: bytes) -> None:
        """Write a large answer, then make whichever call waits for its turn."""
        await self._connection.write(data)
        if (made := await self._make_queued()) is not None:
            await self._finish(*made)

    async def _make_queued(self) -> tuple[CallTool, Answer | None] | None:
        """Free the place of a call whose answer was written. Make the call that waits for a place, if there is one."""
        queued = self._calls.next_queued() if self._connection.stopped is None else None
        if queued is None:
            return None
        await anyio.lowlevel.checkpoint_if_cancelled()  # a run whose time is over makes no further call
        answer = None
        with anyio.CancelScope() as scope:
            self._calls.take_place(queued, scope)
            answer = await self._answer(self._dispatch(queued))
        return queued, answer

    async def _answer(self, work: Awaitable[Answer]) -> Answer | None:
        try:
            return await work
        except Exception as exc:
            self._stop_for(exc)
            return None

    def _answers_sent(self) -> None:
        try:
            self._observer.on_answers_sent()
        except Exception as exc:
            self._stop_for(exc)

    def _start(self, tasks: TaskGroup, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Start a task. Not in the context of a call: calls that the task makes are not its children."""
        self._has_tasks = True
        self._context.run(tasks.start_soon, function, *args)

    async def _abort_on(self, cancel: anyio.Event) -> None:
        await cancel.wait()
        self._abort()

    def _abort(self) -> None:
        self._connection.stop(Aborted("cancelled by the caller"))

    # The end.

    async def _wait_for_exit(self) -> Exit:
        """After `Done`, measure for the last time. Otherwise wait for the process to exit, and read what is left."""
        sandbox, stopped = self._sandbox, self._connection.stopped
        if type(stopped) is Done:
            self._sample = sandbox.sample(brief=stopped.ok, last=not stopped.ok)
            self._take_raw_output()
            return Exit()
        if type(stopped) is Failed:
            return Exit()
        self._sample = highest(self._sample, sandbox.sample())
        sandbox.kill()
        end = await sandbox.ended()
        self._sample = highest(self._sample, sandbox.sample())
        await self._drain()
        return end

    async def _drain(self) -> None:
        """Read what the script sent and printed before its sandbox died."""
        connection, output = self._connection, self._output
        if not isinstance(connection.stopped, ProtocolViolation):
            try:
                with anyio.move_on_after(DRAIN_S, shield=True):
                    while await connection.receive():
                        while (message := connection.next_message()) is not None:
                            output.drain_message(message)
            except RemoteProtocolError as exc:
                connection.stop(ProtocolViolation(str(exc)))
        while True:
            before = output.printed_bytes
            self._take_raw_output()
            if output.printed_bytes == before:
                return

    def _take_raw_output(self) -> None:
        out, err = self._sandbox.read_output()
        if out or err:
            self._output.take_raw(out, err)

    def _result(self, end: Exit) -> ExecutionResult:
        sample, connection, output = self._sample, self._connection, self._output
        calls = self._calls.records()
        usage = Usage(
            wall_s=time.perf_counter() - self._started,
            cpu_s=max(sample.cpu_s, end.cpu_s),
            peak_memory_bytes=max(sample.peak_memory_bytes, end.peak_memory_bytes),
            peak_processes=max(sample.peak_processes, 1),
            calls=len(calls),
            sent_bytes=connection.sent_bytes,
            received_bytes=connection.received_bytes,
            start_s=self._start_s,
        )
        lint = self._request.message.lint
        outcome, error = outcome_of(
            RunEnd(self._limits, usage, sample, end, lint, connection.stopped, output.has_value, self._calls.refused)
        )
        return ExecutionResult(
            self._request.run_id,
            outcome,
            output.value,
            output.has_value,
            output.logs(),
            output.files(),
            error,
            calls,
            usage,
            Isolation(self._sandbox.backend, dict(self._sandbox.layers), lint),
        )


class _Rest:
    """Awaits, in the same task, a coroutine that has been driven to its first wait by hand."""

    def __init__(self, work: Coroutine[Any, Any, Answer], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Answer]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except BaseException as exc:
                    waits_for = self._work.throw(exc)
                else:
                    waits_for = self._work.send(sent)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer
