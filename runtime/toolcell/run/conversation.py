"""`Conversation`: sends the script of a run, reads what comes, keeps the deadline, and reports how the run ended.

Calls go to `ToolCalls`, everything else to `RunOutput`, and `outcome_of` decides what it amounts to. Knows neither
registry nor record nor which backend made the sandbox.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools, RunContext
from toolcell.calls.options import Origin
from toolcell.config import Limits
from toolcell.errors import AuditError, Misconfigured, ToolAbort, UsageError
from toolcell.results import ExecutionResult, Isolation, Outcome, Usage
from toolcell.run.calls import Answer, ToolCalls
from toolcell.run.connection import GATHERED_BYTES, GuestConnection, read_line
from toolcell.run.options import CALLBACK_ERRORS
from toolcell.run.outcome import (
    Aborted,
    Failed,
    ProtocolViolation,
    RunEnd,
    error_info,
    exceeded_limit,
    highest,
    leftover_names,
    outcome_of,
    warnings_of,
)
from toolcell.run.output import RunOutput
from toolcell.run.run import Run, Script
from toolcell.sandbox.backend import Exit, LimitExceeded, Sample, profile_of
from toolcell.support import daemon_threads, event_loop
from toolcell.support.event_loop import SteppedCoroutine
from toolcell.support.host_work import ELEMENT_WORK, MESSAGE_WORK
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.framing import Part
from toolcell_bridge.wire.messages import CallTool, Done, Log

DRAIN_S = 0.25
"""For reading what a dead sandbox had sent. Part of what a run takes past `wall_s`."""

SIGNALS = 10
"""How often it is told meanwhile: it may be sending a message, which must not be torn."""


async def interrupt(connection: GuestConnection, output: RunOutput) -> int | None:
    """Interrupt the script and wait until it has ended; return the line it was at. Otherwise kill the sandbox."""
    done: Done | None = None
    sandbox = connection.sandbox
    until, pause_s = connection.now() + sandbox.interrupted_s, sandbox.interrupted_s / SIGNALS
    with suppress(RemoteProtocolError):
        while done is None and sandbox.is_alive():
            if (left_s := until - connection.now()) <= 0:
                break
            sandbox.interrupt()
            with anyio.move_on_after(min(pause_s, left_s)):
                done = await read_done(connection, output)
    if done is None:
        sandbox.kill()
        return None
    line = (done.error or {}).get("line")
    return line if type(line) is int else None


async def read_done(connection: GuestConnection, output: RunOutput) -> Done | None:
    """Take messages until `Done`; None when the guest is gone."""
    while True:
        if (message := connection.next_message()) is not None:
            if type(message) is Done:
                return message
            output.drain_message(message)
        elif not connection.wire.is_decoding and not await connection.receive():
            return None
        await connection.turn.give_way()


async def wait_for_exit(connection: GuestConnection, output: RunOutput, sample: Sample) -> tuple[Exit, Sample]:
    """After `Done`, measure for the last time. Otherwise wait for the process to exit, and read what is left.

    Shape: how it exited, and the most of what was measured. `sample`: what was measured before.
    """
    meter, stopped = connection.meter, connection.stopped
    if type(stopped) is Done or (connection.is_ending and connection.is_usable):
        is_ok = type(stopped) is Done and stopped.ok
        sample = meter.sample(brief=is_ok, last=not is_ok)
        take_printed(connection, output)
        return Exit(), sample
    if type(stopped) is Failed:
        return Exit(), sample
    sample = highest(sample, meter.sample())
    connection.sandbox.kill()
    end = await meter.ended()
    sample = highest(sample, meter.sample())
    await _drain(connection, output)
    return end, sample


def take_printed(connection: GuestConnection, output: RunOutput) -> None:
    """Read what the script's processes have written to their output and error streams, as far as it is there."""
    out, err = connection.sandbox.read_output()
    if out or err:
        output.take_raw(out, err)


async def _drain(connection: GuestConnection, output: RunOutput) -> None:
    """Read what the script sent and printed before its sandbox died."""
    if not isinstance(connection.stopped, ProtocolViolation):
        try:
            with anyio.move_on_after(DRAIN_S, shield=True):
                if (done := await read_done(connection, output)) is not None:
                    connection.stop(done)
        except RemoteProtocolError as exc:
            connection.stop(ProtocolViolation(str(exc)))
    before = -1
    while output.capture.total_bytes != before:
        before = output.capture.total_bytes
        take_printed(connection, output)


PRINTED_READS, PAUSE_S, FEW_BYTES = 32, 0.0005, 4096
"""After so many reads that brought printed text and nothing else, wait so long after one that brought few bytes: being
woken for each word that a script prints costs both ends more than the word."""

AT_ONCE_S = 0.1
"""A run of so little time gets its deadline at once."""

CANCELLED = "cancelled by the caller"


class Conversation:
    """One run, with the guest in its sandbox."""

    def __init__(self, run: Run, connection: GuestConnection, start_s: float = 0.0) -> None:
        """`start_s`: how long the sandbox took to be found."""
        self._run = run
        self._connection = connection
        self._sandbox = connection.sandbox
        self._start_s = start_s
        self._started = time.perf_counter()
        self._calls = ToolCalls(run, connection, self._started)
        self._output = RunOutput(run, connection, self._calls.cancel)
        self.callbacks = self._output.callbacks
        self._sample = Sample()
        self._context = contextvars.copy_context()
        self._has_tasks = self._is_behind = False
        self._line: int | None = None
        self.deadline = Deadline(run.script.limits, connection, self._started)
        self._turn = connection.turn
        self._scope: anyio.CancelScope | None = None
        """Of the conversation. It gets its deadline with the first `check`: most runs are over before that."""

    async def execute(self) -> ExecutionResult:
        """Send the script, answer its calls, and return what it left behind.

        Raises:
            UsageError: the script or a file cannot be sent.
            AuditError: it could not be recorded that the script was sent; no tool was called.
            Exception: a callback or a measurement raised this; it ends this run only.

        Cancellation: the caller must destroy the sandbox.
        """
        connection = self._connection
        connection.begin_run()
        if connection.stays:
            await self._sandbox.interrupts_passed_on()
        with self.callbacks:
            try:
                await self._converse()
                if connection.is_ending:
                    self._line = await interrupt(connection, self._output)
                elif connection.was_asked:
                    self._line = await read_line(self._sandbox, self._output.take_raw)
            finally:
                self.deadline.end()
            end, self._sample = await wait_for_exit(connection, self._output, self._sample)
            if type(connection.stopped) is Failed:
                raise connection.stopped.error
            await self.callbacks.finish(self.deadline.left_s())
        return self._result(end)

    async def _converse(self) -> None:
        """Send the script and answer its calls until the run is over, for whatever reason."""
        connection = self._connection
        with connection.scope_type() as scope:
            self._scope = scope
            if self._run.script.limits.wall_s < AT_ONCE_S:
                self._end_in_time()
            connection.on_interrupt = scope.cancel
            await self._send_script()
            connection.script_scope = scope
            cancel = self._run.options.cancel
            if cancel is not None and cancel.is_set():
                self.abort(CANCELLED)  # now: the script may be over before another task has its turn
            # Most scripts make no call, and reading alone needs no task group.
            call = await self._read() if cancel is None else None
            if connection.stopped is None and (call is not None or cancel is not None):
                await self._serve_calls(call)
            if not connection.is_ending:
                await connection.flush()
        connection.script_scope = None
        if self.deadline.exceeded is not None:
            connection.stop(self.deadline.exceeded)
        if scope.cancel_called:
            is_late = connection.interrupted_for and self.deadline.left_s() > 0
            connection.stop(Aborted(connection.interrupted_for) if is_late else self.deadline.timeout())

    def _end_in_time(self) -> None:
        if self._scope is not None and self._scope.deadline == math.inf:
            self._scope.deadline = self._connection.now() + self.deadline.left_s()

    def check(self) -> None:
        """Measure the sandbox and stop the run if it exceeds a limit. Called a few times a second while it runs.

        Never raises: an exception, also one of the caller's callbacks, stops this run and comes out of `execute`.
        """
        if self._connection.stopped is not None:
            return
        if self.deadline.exceeded is not None:
            self._connection.stop(self.deadline.exceeded)
            return
        self._end_in_time()
        try:
            # What the guest has sent was perhaps printed before. It may always send more, and is not waited for twice.
            self._is_behind = not self._is_behind and self._connection.has_unread()
            if not self._is_behind:
                take_printed(self._connection, self._output)
            if self._run.work.used > self._run.work.limit:
                self._stop_for_work()
            self._sample = self._connection.meter.sample()
            if (exceeded := exceeded_limit(self._run.script.limits, self._sample)) is not None:
                self._connection.stop(exceeded)
                if self._connection.was_asked:
                    self.deadline.exceeded = exceeded  # which kills it at its next turn
        except BaseException as exc:  # nothing is awaited here, so it is not a cancellation of this task
            self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """Stop the run: `execute` raises `exc`."""
        self._connection.stop(Failed(exc))

    def abort(self, why: str) -> None:
        """Stop the run with outcome `cancelled`. It keeps what it had done until then."""
        self._connection.stop(Aborted(why))

    # Reading.

    async def _send_script(self) -> None:
        connection = self._connection
        try:
            for message in self._run.file_messages():
                connection.post(message)
                if connection.unsent_bytes > GATHERED_BYTES:
                    await connection.flush()
            script = self._run.message
            for send in self._run.context.features.send:
                script = send(script)
            # Nothing is sent or received meanwhile.
            await daemon_threads.run_large(connection.post, script) if self._run.is_large else connection.post(script)
        except (UnsendableValue, ValueTooLarge) as exc:
            raise UsageError(
                f"source and inputs cannot be sent: {exc}; pass less, use files=, or raise frame_bytes"
            ) from exc
        await connection.flush()
        try:
            # The guest starts meanwhile. No tool call is made until this returns.
            for part in self._run.parts:
                if (noted := part.script_sent()) is not None:
                    await noted
        except AuditError as exc:
            connection.stop(Failed(exc))

    async def _read(self) -> CallTool | None:
        """Read messages until there is a tool call to make; None when the run is over."""
        connection, calls, output, work = self._connection, self._calls, self._output, self._run.work
        wire, turn, unheard, read = connection.wire, self._turn, self.callbacks.unheard, connection.next_message
        printed, received, has_printed = 0, 0, False
        try:
            while connection.stopped is None:
                if time.perf_counter() > turn.until:
                    # Guests that always send more must not keep the event loop from deadlines and from others.
                    await turn.give_way()
                    if self._connection.stopped is not None:  # meanwhile
                        break
                # Nearly always a guest has sent one message and waits: there is nothing more to look for.
                message = read() if wire.frames.buffer or wire.frames.large or wire.is_decoding else None
                if message is None:
                    if wire.is_decoding:
                        continue
                    await connection.flush()
                    for part in self._run.parts:
                        part.answers_sent()
                    if has_printed and (printed := printed + 1) > PRINTED_READS and received < FEW_BYTES:
                        await anyio.sleep(PAUSE_S)
                    has_printed = False
                    if not (received := await connection.receive()):
                        return None
                    continue
                if not (has_printed := type(message) is Log):
                    printed = 0
                size = wire.message_bytes + ELEMENT_WORK * wire.message_elements
                work.used += size + MESSAGE_WORK
                if work.used > work.limit:
                    self._stop_for_work()
                elif type(message) is not CallTool:
                    output.take(message)
                    if unheard:
                        await self.callbacks.hear(self.fail)
                elif self.deadline.exceeded is not None:  # sent in time, read too late: nobody takes the answer
                    connection.stop(self.deadline.exceeded)
                elif calls.admit(call := calls.named(message), size):
                    return call
        except RemoteProtocolError as exc:
            connection.stop(ProtocolViolation(str(exc)))
        except CALLBACK_ERRORS as exc:
            self._stop_for(exc)
        return None

    def _stop_for_work(self) -> None:
        work = self._run.work
        self._connection.stop(LimitExceeded(Outcome.HOST_WORK_LIMIT, "host_work", work.limit, work.used))

    def _stop_for(self, exc: BaseException) -> None:
        """Stop the run because a tool, a callback or a part of it raised.

        A KeyboardInterrupt goes this way too: raised in a task other than the caller's, it would end the event loop.
        """
        if isinstance(exc, ToolAbort) and not isinstance(exc, Misconfigured):
            self._connection.stop(Aborted(str(exc), Outcome(exc.outcome)))
        else:
            self._connection.stop(Failed(exc))

    # Calls.

    async def _serve_calls(self, call: CallTool | None) -> None:
        """Make calls and read on, until the run is over."""
        async with anyio.create_task_group() as tasks:
            if self._run.options.cancel is not None:
                self._start(tasks, self._abort_on, self._run.options.cancel)
            await self._serve(tasks, call)

    async def _serve(self, tasks: TaskGroup, call: CallTool | None = None) -> None:
        """Make calls and read on, until the run is over or a call has to wait: then another task reads on.

        A call that does not wait needs neither a task nor a turn of the event loop: half of what a round trip costs.
        """
        calls, connection = self._calls, self._connection
        answer: Answer | None = None
        with connection.scope_type() as scope:
            while (call := call or await self._read()) is not None:
                work = calls.make(call)
                try:
                    waits_for = work.send(None)
                except StopIteration as finished:
                    try:
                        if time.perf_counter() > self._turn.until:
                            await self._turn.give_way()
                    finally:
                        calls.finish(call, finished.value)
                    if connection.unsent_bytes > GATHERED_BYTES:
                        # In a task of its own: the guest may not read it before the host reads what the guest writes.
                        calls.keep_place()
                        self._start(tasks, self._write_answer, connection.take_unsent())
                except (Exception, KeyboardInterrupt) as exc:
                    self._stop_for(exc)
                else:
                    calls.take_place(call, scope)
                    self._start(tasks, self._serve, tasks)
                    answer = await self._answer(SteppedCoroutine(work, waits_for))
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
            try:
                for part in self._run.parts:
                    part.answers_sent()
            except Exception as exc:
                self._stop_for(exc)
            await self._run.context.scope.abandoned.wait()  # of a call that was given up: until then its place is taken
            if (made := await self._make_queued()) is None:
                return
            call, answer = made
        if answer is not None:  # the tool went on when the run was over: its call is recorded all the same
            calls.finish(call, answer)

    async def _write_answer(self, parts: Sequence[Part]) -> None:
        """Write a large answer, then make whichever call waits for its turn."""
        await self._connection.write(parts)
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
            answer = await self._answer(self._calls.make(queued))
        return queued, answer

    async def _answer(self, work: Awaitable[Answer]) -> Answer | None:
        try:
            return await work
        except (Exception, KeyboardInterrupt) as exc:
            self._stop_for(exc)
            return None

    def _start(self, tasks: TaskGroup, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Start a task. Not in the context of a call: calls that the task makes are not its children."""
        self._has_tasks = True
        self._context.run(tasks.start_soon, function, *args)

    async def _abort_on(self, cancel: anyio.Event) -> None:
        try:
            await cancel.wait()
        except BaseException:
            del self  # the frames of a task that is cancelled are a cycle, which would keep all that the run has sent
            raise
        self.abort(CANCELLED)

    # The end.

    def _result(self, end: Exit) -> ExecutionResult:
        sample, connection, output, calls = self._sample, self._connection, self._output, self._calls.records()
        usage = Usage(
            wall_s=time.perf_counter() - self._started,
            cpu_s=max(sample.cpu_s, end.cpu_s),
            peak_memory_bytes=max(sample.peak_memory_bytes, end.peak_memory_bytes),
            peak_processes=max(sample.peak_processes, 1),
            calls=len(calls),
            sent_bytes=connection.sent_bytes,
            received_bytes=connection.received_bytes,
            start_s=self._start_s,
            host_work=self._run.work.used,
        )
        lint, stopped, refused = self._run.message.lint, connection.stopped, self._calls.refused
        if connection.interrupted_for and type(stopped) is Done:
            found = error_info(stopped.error or {})
            if found.type == KeyboardInterrupt.__name__:  # else it has handled that
                stopped, self._line = Aborted(connection.interrupted_for), found.line
        run_end = RunEnd(
            self._run.script.limits,
            usage,
            sample=sample,
            exit=end,
            lint=lint,
            stopped=stopped,
            has_value=output.has_value,
            printed_bytes=output.capture.total_bytes,
            refused=refused,
            line=self._line,
            waits_for=leftover_names(connection.leftover.stuck) if connection.leftover is not None else (),
        )
        outcome, error = outcome_of(run_end)
        return ExecutionResult(
            self._run.context.run_id,
            outcome,
            value=output.value,
            has_value=output.has_value,
            logs=output.capture.logs(),
            files=output.returned.finished(),
            error=error,
            warnings=warnings_of(run_end) if outcome is Outcome.OK else (),
            calls=calls,
            abandoned=self._run.context.scope.abandoned.list(),
            usage=usage,
            isolation=Isolation(self._sandbox.backend, dict(self._sandbox.layers), lint, **profile_of(self._sandbox)),
            journal_id=self._run.journal_id,
            **self._run.script.found,
        )


class SandboxRunner(GuestConnection):
    """Runs scripts in one sandbox, without a Runtime: for tests of a backend."""

    async def run(self, source: str, tools: CallableTools, limits: Limits, number: int = 1) -> ExecutionResult:
        """Run a script. `number`: which one it is in this sandbox."""
        script = Script(source=source, limits=limits)
        message = script.message(number, tools=tools.names_text(Origin.CODE))
        return await Conversation(Run(script, tools, RunContext(), message), self).execute()


# `RunMonitor`: has every run under way measured a few times a second, and ends runs whose time is over.
#
# There are two ways to that. The event loop calls `Conversation.check`, which measures everything. A thread calls
# `Deadline.enforce`, which kills a sandbox past `wall_s` or `cpu_s` also while something keeps the event loop.

TICK_S = 0.02
"""How often running sandboxes are measured. A run shorter than this is only measured at its end."""

ABORT_S = 5.0
"""An aborted run ends within milliseconds, unless a tool does not let itself be cancelled."""

REST_S = 1.0
"""How long the thread rests when there is no run. Meanwhile it need not be woken for a run whose limits are later."""

PROCESSORS = os.cpu_count() or 1


class Deadline:
    """The limits in time of one run, and the sandbox that they end."""

    def __init__(self, limits: Limits, connection: GuestConnection, started: float) -> None:
        """`started`: by `time.perf_counter`."""
        self._limits = limits
        self._sandbox, self._meter = connection.sandbox, connection.meter
        self._started = started
        self._is_over = self._is_killed = False
        self._enforcing = threading.Lock()
        """Invariant: `enforce` touches the sandbox only while it holds this lock and the run is not over."""
        self._exceeded_at = 0.0
        self._answer_s = self._meter.answer_s
        self.exceeded: LimitExceeded | Failed | None = None
        """Why `enforce` killed the sandbox."""

    def enforce(self) -> None:
        """Kill the sandbox if its time is over. Never raises: what fails here ends this run only.

        Called a few times a second. The event loop has one turn of it to ask the script where it is.
        """
        with self._enforcing:
            if self._is_over or self._is_killed:
                return
            try:
                if self.exceeded is None:
                    self.exceeded, self._exceeded_at = self._find_exceeded(), time.perf_counter()
                elif time.perf_counter() - self._exceeded_at >= self._answer_s:
                    self._is_killed = True
                    self._sandbox.kill_now()
            except Exception as exc:
                self.exceeded = Failed(exc)

    def due(self) -> float:
        """Return when `enforce` may have something to do, by `time.perf_counter`.

        A tick late: the event loop comes first, if it runs.
        """
        if self._is_over or self._is_killed:
            return math.inf
        within_s = 0.0 if self.exceeded is not None else min(self._limits.wall_s, self._limits.cpu_s / PROCESSORS)
        return max(self._started + within_s, time.perf_counter()) + TICK_S

    def left_s(self) -> float:
        return self._limits.wall_s - (time.perf_counter() - self._started)

    def end(self) -> None:
        """The run is over: when this returns, `enforce` does not touch the sandbox any more."""
        with self._enforcing:
            self._is_over = True

    def timeout(self) -> LimitExceeded:
        """Return `wall_s` as the limit that was exceeded, now."""
        return LimitExceeded(Outcome.TIMEOUT, "wall_s", self._limits.wall_s, time.perf_counter() - self._started)

    def _find_exceeded(self) -> LimitExceeded | None:
        limits, elapsed_s = self._limits, time.perf_counter() - self._started
        if self.left_s() < 0:
            return self.timeout()
        if elapsed_s * PROCESSORS > limits.cpu_s:  # it cannot have used more
            cpu_s = self._meter.cpu_now()
            if cpu_s is not None and cpu_s > limits.cpu_s:
                return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, cpu_s)
        return None


class RunMonitor:
    """Checks every run that was added, until it is discarded."""

    def __init__(self) -> None:
        self._runs: set[Conversation] = set()
        self._enforcer = Enforcer(self._runs)
        self._added = event_loop.ChangeEvent()
        self.on_tick: Callable[[], object] = lambda: None
        """Called with each tick: a run takes long."""
        self.discard = self._runs.discard

    def add(self, run: Conversation) -> None:
        self._runs.add(run)
        self._enforcer.expect(run.deadline)
        self._added.notify()

    async def abort_all(self, why: str) -> None:
        """Abort every run, and wait until they have ended, at most a few seconds."""
        with anyio.move_on_after(ABORT_S):
            while self._runs:
                for run in tuple(self._runs):
                    run.abort(why)
                await anyio.sleep(TICK_S)

    async def watch(self) -> None:
        """Check the runs for ever. A Runtime that is opened again begins anew, with a thread of its own."""
        self._enforcer = enforcer = Enforcer(self._runs)
        enforcer.start()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    if not self._runs:
                        await self._added.wait()
                    await anyio.sleep(TICK_S)
                    self._tick(tasks)  # in a task: a backend may begin another one in order to measure
        finally:
            enforcer.stop()

    def _tick(self, tasks: TaskGroup) -> None:
        for run in tuple(self._runs):
            run.check()
            if run.callbacks.must_be_heard:
                tasks.start_soon(run.callbacks.hear, run.fail)
        if self._runs:
            self.on_tick()


class Enforcer:
    """The thread that ends runs whose time is over. It sleeps until one may be."""

    def __init__(self, runs: set[Conversation]) -> None:
        self._runs = runs
        self._is_stopped = False
        self._awake = threading.Event()
        self._wakes_at = math.inf
        """When it looks again, by `time.perf_counter`."""

    def start(self) -> None:
        """Begin. The thread ends with `stop`, or with the process."""
        daemon_threads.start(self._enforce, name="toolcell-limits")

    def stop(self) -> None:
        """End the thread, at once or after what it is doing."""
        self._is_stopped = True
        self._awake.set()

    def expect(self, deadline: Deadline) -> None:
        """Wake the thread if it would sleep past a deadline of a run that was added."""
        if deadline.due() < self._wakes_at:
            self._awake.set()

    def _enforce(self) -> None:
        has_rested = False
        while not self._is_stopped:
            self._awake.clear()
            self._wakes_at = math.inf  # whatever is added from here on wakes it
            for run in tuple(self._runs):
                run.deadline.enforce()
            due = [run.deadline.due() for run in tuple(self._runs)]
            now = time.perf_counter()
            self._wakes_at = min(due, default=math.inf if has_rested else now + REST_S)
            has_rested = not due
            self._awake.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
