"""The tool calls of one run: name, admit, queue, make, cancel, answer and record them.

Everything is counted and bounded here, because a hostile script makes calls too. A guest sees of a result what
`failure` and `ToolResult.guest_value` let through.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import anyio

from toolcell.calls.call import Call, RunContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.finalize import failure, unsendable
from toolcell.calls.options import Origin
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.uploads import Uploads
from toolcell.config import Limits
from toolcell.errors import AuditError, RunEnded, ToolAbort, ToolError, UsageError
from toolcell.results import ExecutionResult, Outcome, ToolCallRecord
from toolcell.run.connection import GuestConnection
from toolcell.run.run import Run, RunPart
from toolcell.sandbox.backend import LimitExceeded
from toolcell.support import daemon_threads
from toolcell.support.lru import Lru
from toolcell.tools.search import FOUND, MAX_FOUND, SMALL, find, named_of
from toolcell.tools.stubs import tools_text
from toolcell_bridge.guest.tools import LIST_TOOLS
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode_parts
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import HTTP, HTTP_READ, HTTP_UPLOAD, PART_BYTES, CallTool, ToolFail, ToolReturn

FREE_LISTINGS = 16
"""Times that a script may ask for the list of tools, as `tools.f(1)` does, without making a call by that."""

PARTS = frozenset({HTTP_UPLOAD, HTTP_READ})
"""Calls that move a part of a body."""

REFUSALS = 1000
"""Calls past `tool_calls` that are answered with a refusal. A script that goes on after that is stopped."""

TOOL_NAME_CHARS = 256

CANCELLED_BY_SCRIPT = "the call was cancelled by the script"

Answer = ToolReturn | ToolFail


def parts_of(limits: Limits) -> int:
    """Return how many parts of bodies a run may move besides its calls. Readers may take small ones."""
    return 64 + 8 * limits.egress_bytes // PART_BYTES


Pending = tuple[CallTool, float, float]
"""A call without an answer, when it was admitted, and when it began."""


class ToolCalls:
    """The calls of one run."""

    def __init__(self, run: Run, connection: GuestConnection, started: float) -> None:
        self._run = run
        self._connection = connection
        self._started = started
        limits = run.script.limits
        run.work.tool_calls = limits.tool_calls
        self.refused = 0
        """Calls past `tool_calls`. They leave no record."""
        self._records: dict[int, ToolCallRecord | Pending] = {}
        """In the order they were admitted; a call has its record once it has its answer."""
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queue: deque[CallTool] = deque()
        self._running = 0
        """Calls that wait for their tool, or whose answer is being written."""
        self._parts = parts_of(limits) if run.message.egress else 0
        """Parts of the bodies of requests that do not count as calls: their bytes are counted."""
        self._listings = 0
        """Requests for the list of tools that do not count as calls."""

    def named(self, call: CallTool) -> CallTool:
        """Return a call by its tool's registered name: `github__search` in a script is `github.search` ever after."""
        run = self._run
        name = run.tools.registered_name(call.name)
        if name == HTTP and (requests := run.context.scope.requests) is not None:
            return replace(call, name=name, args=requests.uploads.taken(call.args))
        return call if name == call.name else replace(call, name=name)

    def records(self) -> tuple[ToolCallRecord, ...]:
        """Return every call that was admitted. One without an answer took until now.

        It is pending, or cancelled when the script did that and the run ended before its tool had come to its end.
        """
        made = [self._open(each[0], each[1]) if isinstance(each, tuple) else each for each in self._records.values()]
        return tuple([each for each in made if each.name != LIST_TOOLS])

    def admit(self, call: CallTool, size: int) -> bool:
        """Take note of a call whose message was so large; True when the caller is to make it now."""
        limits = self._run.script.limits
        if call.name == LIST_TOOLS and self._listings < FREE_LISTINGS:
            self._listings += 1
        elif call.name in PARTS and self._parts:
            self._parts -= 1
            size = 0
        elif (most := self._run.work.call_limit_reached()) is not None:
            self._refuse(call, most)
            return False
        else:
            self._run.work.count_call()
        if len(call.name) > TOOL_NAME_CHARS:
            text = f"a tool's name has at most {TOOL_NAME_CHARS} characters, not {len(call.name)}"
            self._answer_unmade(call, "unknown_tool", text)
            return False
        # Calls are kept for the result, so the memory they take together is bounded.
        if self._run.work.calls + size > limits.call_args_bytes:
            text = f"the arguments of this run's calls take more than {limits.call_args_bytes} bytes together"
            self._answer_unmade(call, "too_large", f"{text} (call_args_bytes); pass less, or a file's name")
            return False
        self._run.work.calls += size
        now = time.perf_counter()
        self._records[call.id] = (call, now, now)
        if self._running >= limits.concurrent_calls:
            self._queue.append(call)
            return False
        return True

    def next_queued(self) -> CallTool | None:
        """Free the place of a call whose answer was written; return the call that is to take it, or None."""
        self._running -= 1
        if not self._queue:
            return None
        call = self._queue.popleft()
        pending = self._records[call.id]
        assert isinstance(pending, tuple)
        self._records[call.id] = (call, pending[1], time.perf_counter())
        return call

    def finish(self, call: CallTool, answer: Answer | None) -> None:
        """Record the answer to a call and post it. None: the script cancelled the call."""
        self._scopes.pop(call.id, None)
        self._record(call, self._post(answer) if answer is not None else self._post_cancelled(call))

    # Making.

    async def make(self, call: CallTool) -> Answer:
        """Make one call and return its answer.

        Raises:
            ToolAbort: the tool ended the run, or the call could not be recorded.
        """
        run = self._run
        requests = run.context.scope.requests
        if call.name == LIST_TOOLS:
            return await self._answer_discovery(call)
        if call.name == HTTP_UPLOAD and requests is not None:
            return _add_to_upload(requests.uploads, call)
        call_id, context = f"call_{call.id}", run.context
        for part in run.parts:
            context = part.context_of(call, call_id, context)
        uploads = requests.uploads if requests is not None and call.name == HTTP else None
        args = call.args if uploads is None else self._whole(uploads, call.args)
        try:
            made = run.tools.new_call(call.name, args, call_id=call_id, origin=Origin.CODE, context=context)
            result = await run.make_call(made)
        except AuditError as exc:
            for part in run.parts:
                part.unrecorded(exc)
            raise ToolAbort("a tool call could not be recorded") from exc
        finally:
            if uploads is not None:
                uploads.drop(call.args)
        if result.status is not Status.OK and result.error is not None and result.is_error:
            return failure(call.id, result)
        return ToolReturn(call.id, result.guest_value())

    def _whole(self, uploads: Uploads, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a request with the body that was uploaded for it."""
        made = uploads.whole(args)
        if made is not args:
            self._run.work.uploaded += len(made["body"])
        return made

    async def _answer_discovery(self, call: CallTool) -> Answer:
        """Answer `list_tools` and `search_tools`."""
        definitions = self._run.tools.definitions(Origin.CODE)
        wanted: dict[str, Any] = call.args
        if not wanted:
            return ToolReturn(call.id, [tool_row(each) for each in definitions])
        try:
            if len(definitions) <= SMALL:
                return ToolReturn(call.id, self._choose_tools(definitions, wanted))
            return ToolReturn(call.id, await daemon_threads.run_large(self._choose_tools, definitions, wanted))
        except UsageError as exc:
            return ToolFail(call.id, str(ErrorCode.INVALID_ARGUMENTS), str(exc), False, {})

    def _choose_tools(self, definitions: Sequence[ToolDefinition], wanted: Mapping[str, Any]) -> Any:
        """Return the tools that a script asked for, as rows or as text.

        Raises:
            UsageError: what it asked for cannot be answered.
        """
        if "query" in wanted:
            definitions = find(definitions, wanted["query"], wanted.get("limit", FOUND))
        elif "names" in wanted:
            definitions = named_of(definitions, _names(wanted["names"]))
        if (detail := wanted.get("detail")) is None:
            return [tool_row(each) for each in definitions]
        return tools_text([(each, self._run.tools.returns(each.name)) for each in definitions], detail)

    # Cancelling.

    def take_place(self, call: CallTool, scope: anyio.CancelScope) -> None:
        """Count a call that has to wait, until `next_queued`, and let the script cancel it, until it is finished."""
        self.keep_place()
        self._scopes[call.id] = scope

    def keep_place(self) -> None:
        """Count a call whose answer takes long to write, until `next_queued`."""
        self._running += 1

    def cancel(self, call_id: int) -> None:
        """Cancel a call that is being made, or one that waits for its turn."""
        if (scope := self._scopes.get(call_id)) is not None:
            scope.cancel()
            return
        for call in self._queue:
            if call.id == call_id:
                self._queue.remove(call)
                self._record(call, self._post_cancelled(call))
                return

    # Calls that are not made.

    def _refuse(self, call: CallTool, limit: int) -> None:
        self.refused += 1
        if self.refused > REFUSALS:
            self._connection.stop(LimitExceeded(Outcome.CALL_LIMIT, "tool_calls", limit, limit + self.refused))
            return
        text = (
            f"this run may make {limit} tool calls (tool_calls), and has made them; those of call_tools_parallel count "
            "too. Ask for more with each call, or return what is done and go on in another run"
        )
        self._connection.post(ToolFail(call.id, "call_limit", text, False, None))

    def _answer_unmade(self, call: CallTool, code: str, text: str) -> None:
        """Answer a call that is not made, and record it without what is too large in it."""
        answer = ToolFail(call.id, code, text, False, None)
        self._connection.post(answer)
        short = CallTool(call.id, call.name[:TOOL_NAME_CHARS], {}, call.line)
        now = time.perf_counter()
        self._records[call.id] = (short, now, now)
        self._record(short, answer)

    # Answering.

    def _post(self, answer: Answer) -> Answer:
        """Post an answer, or a failure in the place of a result that cannot be sent; return what was posted.

        Most results are plain data, and encoding checks that anyway. So only a result that was refused is converted.
        """
        # Nobody reads the answer of a run that is over. A journal keeps it all the same: the tool has done its work.
        write = self._connection.post if self._connection.stopped is None else encode_parts
        if write is encode_parts and not self._run.parts:
            return answer
        try:
            frame = write(answer)
        except (UnsendableValue, ValueTooLarge):
            answer = _converted(answer)
            try:
                frame = write(answer)
            except (UnsendableValue, ValueTooLarge) as exc:
                answer = unsendable(answer.id, "too_large", exc)
                frame = write(answer)
        kept = b"".join(frame)
        for part in self._run.parts:
            part.answered(answer.id, kept)
        return answer

    def _post_cancelled(self, call: CallTool) -> Answer:
        answer = ToolFail(call.id, "cancelled", CANCELLED_BY_SCRIPT, False, None)
        if self._connection.stopped is None:
            self._connection.post(answer)
            for part in self._run.parts:
                part.answered(call.id, b"")
        return answer

    def _record(self, call: CallTool, answer: Answer) -> None:
        pending = self._records[call.id]
        assert isinstance(pending, tuple)
        if call.name in PARTS:
            del self._records[call.id]  # it is a part of the request, and its bytes are not kept
            return
        status = ("error", answer.code, answer.message) if type(answer) is ToolFail else ("ok", None, None)
        self._records[call.id] = self._entry(call, *pending[1:], *status)

    def _open(self, call: CallTool, admitted: float) -> ToolCallRecord:
        is_cancelled = (scope := self._scopes.get(call.id)) is not None and scope.cancel_called
        status = ("error", "cancelled", CANCELLED_BY_SCRIPT) if is_cancelled else ("pending", None, None)
        return self._entry(call, admitted, admitted, *status)

    def _entry(
        self, call: CallTool, admitted: float, since: float, status: str, code: str | None, message: str | None
    ) -> ToolCallRecord:
        return ToolCallRecord(
            f"call_{call.id}",
            call.name,
            args=call.args,
            status=status,
            error_code=code,
            message=message,
            started_s=admitted - self._started,
            duration_s=time.perf_counter() - since,
            line=call.line,
        )


def _converted(answer: Answer) -> Answer:
    """Return an answer with its result as plain data."""
    if type(answer) is not ToolReturn:
        return answer
    try:
        return ToolReturn(answer.id, to_plain(answer.value, "result"))
    except (ValueError, TypeError) as exc:
        return unsendable(answer.id, "no_result", exc)


def _add_to_upload(uploads: Uploads, call: CallTool) -> Answer:
    """Keep a part of a body. It has no effect, so it does not count as a call; the request that sends it is one."""
    try:
        return ToolReturn(call.id, uploads.add(call.args.get("upload"), call.args.get("data")))
    except ToolError as exc:
        return ToolFail(call.id, exc.code, exc.message, exc.retryable, {})


def _names(given: Any) -> list[str]:
    """Return a guest's list of names, which may be anything.

    Raises:
        UsageError: it is not a list of texts.
    """
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UsageError("list_tools takes names of tools, as texts")
    if len(given) > MAX_FOUND:
        raise UsageError(f"list_tools takes at most {MAX_FOUND} names, not {len(given)}; without a name it takes all")
    return given


def tool_row(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as `list_tools()` shows it."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


# `ListedCalls`: the calls of a run that needs no journal. Its tools make them, and they are listed for a repair.
#
# The lists of the latest runs are kept in memory, with the journals of others.

ANSWER_BYTES: Final = 64 << 20
"""Bytes of answers and of uploaded bodies that are kept of one run. A run with more cannot be repaired."""


FINISHED_RUNS: Final = 64
FINISHED_BYTES: Final = 64 << 20
"""Finished runs whose calls are kept in memory for repairs, and their largest total size."""


class ListedCall:
    """One call of a script."""

    __slots__ = ("answer", "args", "is_refused", "tool")

    def __init__(self, tool: str, args: Any) -> None:
        self.tool, self.args = tool, args
        self.answer: bytes | None = None
        """Frame of the answer, as the script received it; b"" when the script cancelled the call."""
        self.is_refused = False
        """The answer says why the tool did not run."""


@dataclass(slots=True)
class CallList:
    """The calls of one run, in their order."""

    id: str
    run: str = ""
    """Name of the run in the record."""
    calls: list[ListedCall] = field(default_factory=list)
    labels: frozenset[str] = frozenset()
    """Labels of everything that the run has read."""
    size: int = 0
    """Bytes of its answers and, once it is over, of its arguments."""


FinishedRuns = Lru[str, tuple[str, object]]
"""The latest finished runs, by the ids of their journals: each run's id, and its `CallList` or journal."""


def finished_runs() -> FinishedRuns:
    """Return where the calls of the latest finished runs are kept."""
    return Lru(FINISHED_RUNS, FINISHED_BYTES)


class ListedCalls(RunPart):
    """Makes the calls of one run, and lists them."""

    def __init__(self, run: Run, finished: FinishedRuns) -> None:
        self._tools, self._context, self._work, self._finished = run.tools, run.context, run.work, finished
        self._list = CallList(os.urandom(16).hex())
        self._by_id: dict[str, ListedCall] = {}
        self.journal_id = self._list.id

    async def make_call(self, call: Call) -> ToolResult:
        """Make a call.

        Raises:
            ToolAbort: a tool ended the run.
            AuditError: the call could not be recorded.
        """
        is_kept = self._list.size + self._work.uploaded <= ANSWER_BYTES
        listed = self._by_id[call.call_id] = ListedCall(call.name, call.raw_args if is_kept else None)
        self._list.calls.append(listed)
        try:
            result = await self._tools.make(call)
        except RunEnded as exc:
            end_script_alone(exc, call.run)
            raise
        if result.status is not Status.OK and result.error is not None:
            listed.is_refused = not result.meta.duration_ms
        return result

    def answered(self, call_number: int, frame: bytes) -> None:
        call = self._by_id.get(f"call_{call_number}")
        if call is not None and call.answer is None:
            self._list.size += len(frame)
            call.answer = frame if self._list.size <= ANSWER_BYTES else b""

    def finish(self, result: ExecutionResult) -> ExecutionResult:
        """Keep its calls for a repair, as long as there is room."""
        found, work, link = self._list, self._work, self._context.scope.link
        found.run = link.id if link is not None else result.run_id
        if found.size + work.uploaded <= ANSWER_BYTES:
            found.labels = self._context.state.labels.names
            found.size += work.calls + work.uploaded
            self._finished.put(found.id, (result.run_id, found), found.size)
        return result


def end_script_alone(exc: RunEnded, context: RunContext) -> None:
    """Let what ended a script not end the agent's run around it."""
    if context.state.abort is exc:
        context.state.abort = None
