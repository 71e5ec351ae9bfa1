"""One sandbox's conversation: bytes in and out, tool calls, the deadline.

Owns the clock of a run and the verdict on how it ended; the verdict comes from what the host saw, and the guest's own
words only say what its code raised. Knows neither registry nor audit: calls go to a function it is given.
"""

from __future__ import annotations

import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.errors import AuditError, SandboxUnavailable, ToolAbort, UsageError
from toolcell.results import ErrorInfo, Isolation, Logs, Outcome, OutputFile, ToolCallRecord, Usage
from toolcell.sandbox.backend import Breach, Exit, GuestFile, Sample, Sandbox
from toolcell.sandbox.capture import Capture, Stream
from toolcell.sandbox.returned import ReturnedFiles
from toolcell.verdict import breach_error, error_info, killed, later, limited
from toolcell_bridge.codec import check_plain, packed_size
from toolcell_bridge.connection import Connection, State
from toolcell_bridge.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.messages import (
    CallTool,
    CancelCall,
    Done,
    FilePart,
    FileProblem,
    Hello,
    Log,
    Message,
    Progress,
    PutFile,
    Result,
    Run,
    ToolFail,
    ToolReturn,
)

HELLO_S = 30.0
"""From fork to Hello. Rehearsal takes milliseconds; a machine this slow has something else wrong with it."""

CHUNK_BYTES = 1 << 20
SLICE_S = 0.002
"""How long one conversation may go on without letting others have the event loop."""

GATHERED_BYTES = 64 * 1024
"""Answers that wait for their neighbours. Each write costs a system call, and wakes a guest that sleeps."""

FRAME_COST_BYTES = 256
"""What each frame counts besides its text towards the output flood: an empty one costs the host time too."""

REFUSALS = 1000
"""Calls past `tool_calls` that are answered with a refusal; a script that goes on after that is flooding."""

TOOL_NAME_CHARS = 256
ELEMENT_BYTES = 64
"""What an element of a list or dict takes here, roughly, however short it was on the wire."""

Answer = ToolReturn | ToolFail
Dispatch = Callable[[CallTool], Awaitable[Answer]]
"""Answers one call. Must not raise but for cancellation and `ToolAbort`."""


class Witness(Protocol):
    """Notes what happened, in the moments when the guest is busy and nobody waits."""

    def script_sent(self) -> None:
        """The script is on its way; no call of it has been looked at.

        Raises:
            AuditError: it could not be noted; the run ends with that.
        """
        ...

    def answers_sent(self) -> None:
        """Every answer there was is on its way.

        Raises:
            ToolAbort: something could not be noted; the run ends with that.
        """
        ...


STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


@dataclass(slots=True)
class Report:
    """What one run left behind, before the runtime gives it a name."""

    outcome: Outcome
    error: ErrorInfo | None
    value: Any
    has_value: bool
    logs: Logs
    files: tuple[OutputFile, ...]
    calls: tuple[ToolCallRecord, ...]
    usage: Usage
    isolation: Isolation


class Session:
    """A sandbox that has said Hello. `execute` may be called again only while `is_usable`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._connection = Connection.host(max_frame_bytes=sandbox.limits.frame_bytes)
        self._runs = 0

    @property
    def is_usable(self) -> bool:
        """True while another run may be sent."""
        return self._connection.state is State.IDLE and self.sandbox.is_alive()

    def freeze(self) -> bool:
        """Stop it where it is until it is destroyed; False when it has to be destroyed now."""
        return self.sandbox.freeze()

    async def greet(self) -> None:
        """Wait for the guest's Hello.

        Raises:
            SandboxUnavailable: it died or said something else; the sandbox has been destroyed.
        """
        problem = f"it said nothing within {HELLO_S:g} s"
        try:
            with anyio.move_on_after(HELLO_S):
                while (message := self._connection.next_message()) is None:
                    data = await self.sandbox.stream.receive()
                    if not data:
                        problem = await self._last_words()
                        break
                    self._connection.receive_data(data)
                if isinstance(message, Hello):
                    self.sandbox.accept(message.layers)
                    return
        except RemoteProtocolError as exc:
            problem = str(exc)
        except BaseException:
            await self.sandbox.destroy()
            raise
        await self.sandbox.destroy()
        raise SandboxUnavailable(f"a sandbox did not come up: {problem}")

    async def _last_words(self) -> str:
        end = await self.sandbox.ended()
        text = self.sandbox.read_output()[1].decode("utf-8", "replace").strip()
        return text or f"it ended with signal {end.signal}, exit code {end.code}"

    async def execute(
        self,
        run: Run,
        limits: Limits,
        dispatch: Dispatch,
        *,
        files: Iterable[GuestFile] = (),
        watch: Callable[[Execution], Callable[[], None]] | None = None,
        cancel: anyio.Event | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
        witness: Witness | None = None,
    ) -> Report:
        """Send one script, answer its calls, and report how it ended.

        Raises:
            UsageError: the script does not fit into a frame.
            AuditError: `witness` could not note that the script was sent; nothing it asked for was done.

        Cancellation: the sandbox is killed and the exception goes on; `Execution.report` still tells what happened.
        """
        self._runs += 1
        execution = Execution(self.sandbox, self._connection, limits, dispatch, on_log, on_progress, witness)
        unwatch = watch(execution) if watch is not None else None
        try:
            return await execution.carry_out(run, files, cancel)
        finally:
            if unwatch is not None:
                unwatch()


class Execution:
    """One run under way."""

    def __init__(
        self,
        sandbox: Sandbox,
        connection: Connection,
        limits: Limits,
        dispatch: Dispatch,
        on_log: Callable[[str, str], None] | None,
        on_progress: Callable[[object], None] | None,
        witness: Witness | None,
    ) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._connection = connection
        self._dispatch = dispatch
        self._on_log = on_log
        self._on_progress = on_progress
        self._witness = witness
        self._capture = Capture(limits.output_bytes)
        self._started = time.perf_counter()
        self._breach: Breach | None = None
        self._violation: str | None = None
        self._done: Done | None = None
        self._value: Any = None
        self._has_value = False
        self._files = ReturnedFiles(limits)
        self._calls: dict[int, ToolCallRecord] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queue: deque[CallTool] = deque()
        self._running = 0
        self._refused = 0
        self._sample = Sample()
        self._aborted: str | None = None
        self._frames = 0
        self._args_bytes = 0
        self._refused_arguments = 0
        self._over = anyio.Event()
        self._problem: UsageError | AuditError | None = None
        self._context = contextvars.copy_context()
        self._outgoing = bytearray()
        self._is_gathering = False
        self._own = anyio.CancelScope()
        self._lint = ""
        self._sent_before = sandbox.stream.sent_bytes
        self._received_before = sandbox.stream.received_bytes

    async def carry_out(self, run: Run, files: Iterable[GuestFile], cancel: anyio.Event | None = None) -> Report:
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
                self.breach(Breach(Outcome.TIMEOUT, "wall_s", self.limits.wall_s, self._elapsed_s()))
            if (
                self._running
                or self._refused
                or self._refused_arguments
                or cancel is not None
                or not self._over.is_set()
            ):
                tasks.cancel_scope.cancel()
        if self._problem is not None:  # not from inside the task group, which would make a group of it
            raise self._problem
        end = await self._settle()
        return self._report(end)

    def breach(self, breach: Breach) -> None:
        """End the run because a limit was passed. The first breach is the one that counts."""
        if self._breach is None and self._done is None:
            self._breach = breach
            self.sandbox.kill()

    def check(self) -> None:
        """Measure the sandbox and end the run if a limit was passed. Called a few times a second by the watch."""
        self._take_output()
        self._sample = sample = self.sandbox.sample()
        limits = self.limits
        if sample.cpu_s > limits.cpu_s:
            self.breach(Breach(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, sample.cpu_s))
        elif sample.memory_kills or sample.peak_memory_bytes > limits.memory_bytes:
            self.breach(Breach(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, sample.peak_memory_bytes))
        elif sample.processes > limits.processes:
            self.breach(Breach(Outcome.PROCESS_LIMIT, "processes", limits.processes, sample.processes))

    async def _ask(self, run: Run, files: Iterable[GuestFile]) -> bool:
        """Send everything the script begins with; False when there is a problem."""
        size = min(CHUNK_BYTES, self.limits.frame_bytes // 2)
        about = "a file's name"
        try:
            for file in files:
                for start in range(0, max(1, len(file.data)), size):
                    last = start + size >= len(file.data)
                    await self._send(PutFile(file.name, file.data[start : start + size], last))
            about = "source and inputs"
            await self._send(run)
            if self._witness is not None:
                # The guest wakes up meanwhile. Nothing it asks for is done before this returns.
                self._witness.script_sent()
        except (UnsendableValue, ValueTooLarge) as exc:
            self._problem = UsageError(f"{about} cannot be sent: {exc}; pass less, use files=, or raise frame_bytes")
        except AuditError as exc:
            self._problem = exc
            self.sandbox.kill()
        return self._problem is None

    async def _send(self, message: Message) -> None:
        """Send now, or, while the messages of one read are being answered, together with what else they bring."""
        self._outgoing += self._connection.send(message)
        if not self._is_gathering or len(self._outgoing) > GATHERED_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._outgoing:
            data, self._outgoing = bytes(self._outgoing), bytearray()
            await self.sandbox.stream.send(data)
        if self._witness is not None:
            try:
                self._witness.answers_sent()
            except ToolAbort as exc:
                self.abort(str(exc))

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
        busy_since = time.perf_counter()
        try:
            while self._done is None and self._breach is None:
                message = connection.next_message()
                if message is not None:
                    self._is_gathering = True
                    if type(message) is not CallTool:
                        self._take(message)
                    elif self._admit(message, tasks):
                        work = self._work(message)
                        try:
                            waits_for = work.send(None)
                        except StopIteration:
                            continue
                        self._is_gathering = False
                        # Not in the context of the call that waits: later calls are not its children.
                        self._context.run(tasks.start_soon, self._lead, tasks)
                        await _Rest(work, waits_for)
                        return
                    continue
                self._is_gathering = False
                await self._flush()
                if time.perf_counter() - busy_since > SLICE_S:
                    # A guest that always has more to say must not keep the event loop from its deadline and others.
                    await anyio.lowlevel.checkpoint()
                    busy_since = time.perf_counter()
                data = await stream.receive()
                if not data:
                    break
                connection.receive_data(data)
        except RemoteProtocolError as exc:
            self._violate(str(exc))
        self._is_gathering = False
        await self._flush()
        self._over.set()

    def _violate(self, problem: str) -> None:
        self._violation = problem
        self.sandbox.kill()

    def _take(self, message: Message) -> None:
        self._frames += 1
        match message:
            case Log(stream, text):
                self._log(STREAMS[stream], text)
            case Result(value):
                self._check_result(value)
                self._value, self._has_value = value, True
                self._files.forget()
            case Done():
                self._done = message
            case FilePart():
                self._files.take_part(message)
            case FileProblem():
                self._files.take_problem(message)
            case CancelCall(id):
                self._check_flood()
                if (scope := self._scopes.get(id)) is not None:
                    scope.cancel()
            case Progress(value):
                self._check_flood()
                if self._on_progress is not None:
                    self._on_progress(value)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def _check_result(self, value: Any) -> None:
        # Measured only when it could be too large: everything this run has sent is an upper bound.
        received = self.sandbox.stream.received_bytes - self._received_before
        if received > self.limits.result_bytes and (size := packed_size(value)) > self.limits.result_bytes:
            raise RemoteProtocolError(f"result too large ({size} > {self.limits.result_bytes} bytes)")

    def _log(self, stream: Stream, text: str) -> None:
        self._capture.feed(stream, text)
        if self._on_log is not None:
            self._on_log(stream, text)
        self._check_flood()

    def _check_flood(self) -> None:
        total, limit = self._capture.total_bytes + FRAME_COST_BYTES * self._frames, self.limits.output_flood_bytes
        if total > limit:
            self.breach(Breach(Outcome.OUTPUT_LIMIT, "output_flood_bytes", limit, total))

    def _take_output(self) -> None:
        out, err = self.sandbox.read_output()
        for stream, data in ((STREAMS[1], out), (STREAMS[2], err)):
            if data:
                self._capture.feed_raw(stream, data)
                if self._on_log is not None:
                    self._on_log(stream, data.decode("utf-8", "replace"))
        self._check_flood()

    # Tool calls.

    def _admit(self, call: CallTool, tasks: TaskGroup) -> bool:
        """Note a call; True when it is to be made now, by the caller."""
        if len(self._calls) >= self.limits.tool_calls or len(call.name) > TOOL_NAME_CHARS:
            self._refuse(call, tasks)
            return False
        if not self._can_hold(call):
            self._refuse_arguments(call, tasks)
            return False
        self._calls[call.id] = ToolCallRecord(
            call.id, call.name, call.args, "pending", started_s=self._elapsed_s(), line=call.line
        )
        if self._running >= self.limits.concurrent_calls:
            self._queue.append(call)
            return False
        self._running += 1
        return True

    def _refuse(self, call: CallTool, tasks: TaskGroup) -> None:
        self._refused += 1
        limit = self.limits.tool_calls
        if self._refused > REFUSALS:
            self.breach(Breach(Outcome.CALL_LIMIT, "tool_calls", limit, limit + self._refused))
            return
        text = f"this run may make {limit} tool calls, and has made them; batch the work or raise the limit tool_calls"
        if len(call.name) > TOOL_NAME_CHARS:
            text = f"a tool's name has at most {TOOL_NAME_CHARS} characters, not {len(call.name)}"
        tasks.start_soon(self._send_answer, call, ToolFail(call.id, "call_limit", text, False, None))

    def _can_hold(self, call: CallTool) -> bool:
        """Calls are kept for the result, so what they hold together is bounded.

        Measured only when it could be too much: each byte this run has sent is at most one element.
        """
        received = self.sandbox.stream.received_bytes - self._received_before
        if received * (1 + ELEMENT_BYTES) <= self.limits.call_args_bytes:
            return True
        if not self._args_bytes:
            self._args_bytes = sum(_held_bytes(record.args) for record in self._calls.values())
        self._args_bytes += _held_bytes(call.args)
        return self._args_bytes <= self.limits.call_args_bytes

    def _refuse_arguments(self, call: CallTool, tasks: TaskGroup) -> None:
        limit = self.limits.call_args_bytes
        text = f"the arguments of this run's calls take more than {limit} bytes together; pass less, or a file's name"
        answer = ToolFail(call.id, "too_large", text, False, None)
        record = ToolCallRecord(call.id, call.name, {}, "pending", started_s=self._elapsed_s(), line=call.line)
        self._calls[call.id] = _recorded(record, answer, 0.0)
        self._refused_arguments += 1
        tasks.start_soon(self._send_answer, call, answer)

    async def _work(self, call: CallTool) -> None:
        """Answer this call, then whichever waits next."""
        try:
            while True:
                await self._answer(call)
                if not self._queue:
                    return
                call = self._queue.popleft()
        finally:
            self._running -= 1

    async def _answer(self, call: CallTool) -> None:
        record = self._calls[call.id]
        began = time.perf_counter()
        answer: Answer | None = None
        with anyio.CancelScope() as scope:
            self._scopes[call.id] = scope
            try:
                answer = await self._dispatch(call)
            except ToolAbort as exc:
                self.abort(str(exc))
                return
        self._scopes.pop(call.id, None)
        duration_s = time.perf_counter() - began
        if answer is None:
            answer = ToolFail(call.id, "cancelled", "the call was cancelled by the script", False, None)
        self._calls[call.id] = _recorded(record, answer, duration_s)
        await self._send_answer(call, answer)

    async def _send_answer(self, call: CallTool, answer: Answer) -> None:
        if call.id not in self._connection.outstanding:
            return
        try:
            await self._send(answer)
        except (UnsendableValue, ValueTooLarge) as exc:
            answer = ToolFail(call.id, "too_large", f"the tool's result cannot be sent: {exc}", False, None)
            self._calls[call.id] = _recorded(self._calls[call.id], answer, self._calls[call.id].duration_s)
            await self._send(answer)

    async def _abort_on(self, cancel: anyio.Event) -> None:
        await cancel.wait()
        self.abort("cancelled by the caller")

    def abort(self, why: str) -> None:
        """End the run from the host's side, as a cancellation."""
        self._aborted = why
        self.sandbox.kill()

    # The end.

    async def _settle(self) -> Exit:
        """After Done: read what is left. After anything else: wait for the corpse."""
        if self._done is not None and self._breach is None and self._violation is None:
            self._sample = self.sandbox.sample(brief=self._done.ok, last=not self._done.ok)
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
        if self._violation is None:
            try:
                with anyio.move_on_after(1.0, shield=True):
                    while data := await self.sandbox.stream.receive():
                        self._connection.receive_data(data)
                        while (message := self._connection.next_message()) is not None:
                            self._take_late(message)
            except RemoteProtocolError as exc:
                self._violation = str(exc) if self._breach is None else None
        while True:
            before = self._capture.total_bytes
            self._take_output()
            if self._capture.total_bytes == before:
                return

    def _take_late(self, message: Message) -> None:
        match message:
            case Log(stream, text):
                self._capture.feed(STREAMS[stream], text)
            case Result(value):
                self._value, self._has_value = value, True
            case Done() if self._breach is None:
                self._done = message
            case _:
                pass

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _report(self, end: Exit) -> Report:
        sample = self._sample
        usage = Usage(
            wall_s=self._elapsed_s(),
            cpu_s=max(sample.cpu_s, end.cpu_s),
            peak_memory_bytes=max(sample.peak_memory_bytes, end.peak_memory_bytes),
            peak_processes=max(sample.peak_processes, 1),
            calls=len(self._calls),
            sent_bytes=self.sandbox.stream.sent_bytes - self._sent_before,
            received_bytes=self.sandbox.stream.received_bytes - self._received_before,
        )
        outcome, error = self._verdict(end, usage)
        return Report(
            outcome,
            error,
            self._value,
            self._has_value,
            self._capture.logs(),
            self._files.finished(),
            tuple(self._calls.values()),
            usage,
            Isolation(self.sandbox.backend, dict(self.sandbox.layers)),
        )

    def _verdict(self, end: Exit, usage: Usage) -> tuple[Outcome, ErrorInfo | None]:
        """How the run ended. What the host saw comes before what the guest said."""
        limits = self.limits
        if self._aborted is not None:
            return Outcome.CANCELLED, ErrorInfo("Cancelled", self._aborted)
        if self._violation is not None:
            message = f"the sandbox broke the bridge protocol and was killed: {self._violation}"
            return Outcome.PROTOCOL_ERROR, ErrorInfo("ProtocolError", message)
        breach = self._breach or self._seen(end, usage)
        if breach is not None:
            return breach.outcome, breach_error(breach)
        if self._done is None:
            return Outcome.KILLED, killed(end)
        if self._done.ok:
            return Outcome.OK, None
        error = error_info(self._done.error or {})
        # Only a run that had a profile, and had done nothing yet, can have been refused by it.
        if error.findings and self._lint != "off" and not self._calls and not self._has_value:
            return Outcome.DENIED, error
        if self._refused:
            return Outcome.CALL_LIMIT, limited(error, "tool_calls", limits.tool_calls, usage.calls + self._refused)
        if self._sample.refused_processes or self._sample.peak_processes >= limits.processes > 1:
            return Outcome.PROCESS_LIMIT, limited(error, "processes", limits.processes, usage.peak_processes)
        if error.type == "MemoryError":
            # The one limit a script can claim: the kernel refuses an absurd allocation without leaving a trace.
            return Outcome.MEMORY_LIMIT, limited(error, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
        return Outcome.ERROR, error

    def _seen(self, end: Exit, usage: Usage) -> Breach | None:
        """A limit that the kernel enforced before the watch could see it."""
        limits = self.limits
        dead = self._done is None
        if self._sample.memory_kills and (dead or not self._done_ok()):
            return Breach(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
        if self._sample.peak_memory_bytes > limits.memory_bytes:
            # Without a cgroup nothing holds it below; it ended before the watch came round.
            return Breach(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
        if dead and usage.cpu_s >= limits.cpu_s:
            return Breach(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, usage.cpu_s)
        if dead and self._sample.refused_processes:
            return Breach(Outcome.PROCESS_LIMIT, "processes", limits.processes, usage.peak_processes)
        return None

    def _done_ok(self) -> bool:
        return self._done is not None and self._done.ok


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


def _held_bytes(args: Mapping[str, Any]) -> int:
    return packed_size(args) + ELEMENT_BYTES * check_plain(args)


def _recorded(record: ToolCallRecord, answer: Answer, duration_s: float) -> ToolCallRecord:
    failed = isinstance(answer, ToolFail)
    return ToolCallRecord(
        record.id,
        record.name,
        record.args,
        "error" if failed else "ok",
        answer.code if isinstance(answer, ToolFail) else None,
        answer.message if isinstance(answer, ToolFail) else None,
        record.started_s,
        duration_s,
        record.line,
    )
