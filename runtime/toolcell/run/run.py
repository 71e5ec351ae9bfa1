"""The conversation of one run: sends the script, reads what comes, watches the clock, and reports how it ended.

Owns the deadline. What is said goes to `calls` and `heard`, and the verdict comes from what the host saw. Knows neither
registry nor audit nor which backend it talks to.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.errors import AuditError, UsageError
from toolcell.results import ExecutionResult, Isolation, Outcome, Usage
from toolcell.run.calls import Dispatch, ToolCalls
from toolcell.run.connection import GuestConnection, RunObserver
from toolcell.run.ending import Ending
from toolcell.run.outcome import RunEnd, later, passed_limit, verdict
from toolcell.run.output import RunOutput
from toolcell.sandbox.backend import Exit, GuestFile, LimitExceeded, Sample, Sandbox
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallTool, PutFile, RunScript

CHUNK_BYTES = 1 << 20
SLICE_S = 0.002
"""How long one conversation may go on without letting others have the event loop."""


class Run:
    """One run under way."""

    def __init__(
        self,
        sandbox: Sandbox,
        connection: Connection,
        limits: Limits,
        dispatch: Dispatch,
        on_log: Callable[[str, str], None] | None,
        on_progress: Callable[[object], None] | None,
        witness: RunObserver | None,
        start_s: float,
        run_id: str,
    ) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._connection = connection
        self._witness = witness
        self._started = time.perf_counter()
        self._start_s = start_s
        self._run_id = run_id
        self._ending = Ending(sandbox)
        self._traffic = GuestConnection(sandbox.stream, connection, self._ending, witness)
        self._calls = ToolCalls(limits, dispatch, self._traffic, self._ending, self._started)
        self._heard = RunOutput(limits, self._traffic, self._ending, self._calls.cancel, on_log, on_progress)
        self._sample = Sample()
        self._over = anyio.Event()
        self._problem: UsageError | AuditError | None = None
        self._context = contextvars.copy_context()
        self._own = anyio.CancelScope()
        self._lint = ""

    async def carry_out(
        self, run: RunScript, files: Iterable[GuestFile], cancel: anyio.Event | None = None
    ) -> ExecutionResult:
        """Converse until Done, death, deadline or breach, then report."""
        self._lint = run.lint
        async with anyio.create_task_group() as tasks:
            if cancel is not None:
                tasks.start_soon(self._abort_on, cancel)
            with anyio.move_on_after(self.limits.wall_s) as deadline:
                if await self._ask(run, files):
                    with self._own:
                        await self._converse(tasks)
                    if not self._over.is_set():
                        await self._over.wait()
            if deadline.cancelled_caught:
                self._ending.breach(LimitExceeded(Outcome.TIMEOUT, "wall_s", self.limits.wall_s, self._elapsed_s()))
            if self._calls.has_loose_ends or cancel is not None or not self._over.is_set():
                tasks.cancel_scope.cancel()
        if self._problem is not None:  # not from inside the task group, which would make a group of it
            raise self._problem
        end = await self._settle()
        return self._report(end)

    def check(self) -> None:
        """Measure the sandbox and end the run if a limit was passed. Called a few times a second by the watch."""
        self._take_output()
        self._sample = self.sandbox.sample()
        if (breach := passed_limit(self.limits, self._sample)) is not None:
            self._ending.breach(breach)

    async def _ask(self, run: RunScript, files: Iterable[GuestFile]) -> bool:
        """Send everything the script begins with; False when there is a problem."""
        size = min(CHUNK_BYTES, self.limits.frame_bytes // 2)
        about = "a file's name"
        try:
            for file in files:
                for start in range(0, max(1, len(file.data)), size):
                    last = start + size >= len(file.data)
                    await self._traffic.send(PutFile(file.name, file.data[start : start + size], last))
            about = "source and inputs"
            await self._traffic.send(run)
            if self._witness is not None:
                # The guest wakes up meanwhile. Nothing it asks for is done before this returns.
                self._witness.script_sent()
        except (UnsendableValue, ValueTooLarge) as exc:
            self._problem = UsageError(f"{about} cannot be sent: {exc}; pass less, use files=, or raise frame_bytes")
        except AuditError as exc:
            self._problem = exc
            self.sandbox.kill()
        return self._problem is None

    async def _lead(self, tasks: TaskGroup) -> None:
        """Carry the conversation on in a task of its own."""
        await self._converse(tasks)
        if self._over.is_set():
            # The first task may still be seeing a call through that nobody waits for any more.
            self._own.cancel()

    async def _converse(self, tasks: TaskGroup) -> None:
        """Read and act until the run is over, or until a call has to wait: then another task reads on.

        A call that finishes without waiting is answered right here, which spares a task and a turn of the event loop:
        half of what a round trip costs. One that waits keeps this task, in which it was begun, to itself.
        """
        stream, connection = self.sandbox.stream, self._connection
        traffic, calls, heard, ending = self._traffic, self._calls, self._heard, self._ending
        busy_since = time.perf_counter()
        try:
            while ending.done is None and ending.breached is None:
                message = connection.next_message()
                if message is not None:
                    traffic.is_gathering = True
                    if type(message) is not CallTool:
                        heard.take(message)
                    elif calls.admit(message, tasks):
                        work = calls.work(message)
                        try:
                            waits_for = work.send(None)
                        except StopIteration:
                            continue
                        traffic.is_gathering = False
                        # Not in the context of the call that waits: later calls are not its children.
                        self._context.run(tasks.start_soon, self._lead, tasks)
                        await _Rest(work, waits_for)
                        return
                    continue
                traffic.is_gathering = False
                await traffic.flush()
                if time.perf_counter() - busy_since > SLICE_S:
                    # A guest that always has more to say must not keep the event loop from its deadline and others.
                    await anyio.lowlevel.checkpoint()
                    busy_since = time.perf_counter()
                data = await stream.receive()
                if not data:
                    break
                connection.receive_data(data)
        except RemoteProtocolError as exc:
            ending.violate(str(exc))
        traffic.is_gathering = False
        await traffic.flush()
        self._over.set()

    async def _abort_on(self, cancel: anyio.Event) -> None:
        await cancel.wait()
        self._ending.abort("cancelled by the caller")

    def _take_output(self) -> None:
        self._heard.take_output(*self.sandbox.read_output())

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    # The end.

    async def _settle(self) -> Exit:
        """After Done: read what is left. After anything else: wait for the corpse."""
        ending = self._ending
        if ending.done is not None and ending.breached is None and ending.violation is None:
            self._sample = self.sandbox.sample(brief=ending.done.ok, last=not ending.done.ok)
            self._take_output()
            return Exit()
        self._sample = later(self._sample, self.sandbox.sample())
        self.sandbox.kill()
        end = await self.sandbox.ended()
        self._sample = later(self._sample, self.sandbox.sample())
        await self._drain()
        return end

    async def _drain(self) -> None:
        """Take what the script had sent and printed before it died: nothing it managed to say is lost."""
        ending = self._ending
        if ending.violation is None:
            try:
                with anyio.move_on_after(1.0, shield=True):
                    while data := await self.sandbox.stream.receive():
                        self._connection.receive_data(data)
                        while (message := self._connection.next_message()) is not None:
                            self._heard.take_late(message)
            except RemoteProtocolError as exc:
                ending.violation = str(exc) if ending.breached is None else None
        while True:
            before = self._heard.printed_bytes
            self._take_output()
            if self._heard.printed_bytes == before:
                return

    def _report(self, end: Exit) -> ExecutionResult:
        sample, calls = self._sample, self._calls.records()
        usage = Usage(
            wall_s=self._elapsed_s(),
            cpu_s=max(sample.cpu_s, end.cpu_s),
            peak_memory_bytes=max(sample.peak_memory_bytes, end.peak_memory_bytes),
            peak_processes=max(sample.peak_processes, 1),
            calls=len(calls),
            sent_bytes=self._traffic.sent_bytes,
            received_bytes=self._traffic.received_bytes,
            start_s=self._start_s,
        )
        outcome, error = verdict(self._facts(end, usage))
        return ExecutionResult(
            self._run_id,
            outcome,
            self._heard.value,
            self._heard.has_value,
            self._heard.logs(),
            self._heard.files(),
            error,
            calls,
            usage,
            Isolation(self.sandbox.backend, dict(self.sandbox.layers), self._lint),
        )

    def _facts(self, end: Exit, usage: Usage) -> RunEnd:
        return RunEnd(
            limits=self.limits,
            usage=usage,
            sample=self._sample,
            end=end,
            lint=self._lint,
            breached=self._ending.breached,
            violation=self._ending.violation,
            aborted=self._ending.aborted,
            done=self._ending.done,
            has_value=self._heard.has_value,
            refused=self._calls.refused,
        )


class _Rest:
    """Awaits a coroutine that has been driven to its first wait by hand, in the same task."""

    def __init__(self, work: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except BaseException as exc:
                    waits_for = self._work.throw(exc)
                else:
                    waits_for = self._work.send(sent)
            except StopIteration:
                return
