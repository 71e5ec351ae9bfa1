"""Record one run while it runs: the start and end of each call, and the end of the run.

`RunRecord` is a feature of the run. It hands plain data to the log, and knows neither files nor keys.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from toolcell.audit import cutting, records
from toolcell.audit.config import FULL, ToolContent
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.audit.store import ABORTED
from toolcell.calls.call import Feature, Features
from toolcell.calls.result import Text
from toolcell.calls.values import is_large
from toolcell.errors import AuditError
from toolcell.results import ErrorInfo, ExecutionResult, PendingCall
from toolcell.support import daemon_threads
from toolcell.support.log import logger_of
from toolcell.support.packing import pack, value_digest

if TYPE_CHECKING:
    from toolcell.calls.call import Call, RunContext
    from toolcell.calls.result import ToolResult

EXCEPTION_OUTCOMES: Final = {
    "CancelledError": "cancelled",
    "Cancelled": "cancelled",
    "SandboxUnavailable": "unavailable",
}
"""Outcome of a run that an exception of the host ended, by the exception's class. Others are `aborted`."""

logger = logger_of("toolcell.audit")

MAX_CAUSES = 8
ROWS_BYTES = 1 << 20
"""Arguments that one event has of calls that wait, or were decided about."""
MAX_FRAMES = 30


class RunRecord(Feature):
    """The records of one run, from `begin` on."""

    __slots__ = (
        "_calls", "_content_of", "_context", "_failed_calls", "_fields", "_log", "_numbers",
        "_observed", "_redactor", "_run", "_shared", "_unwritten_ends", "lines", "problem", "writes_ends_later",
    )  # fmt: skip

    def __init__(
        self,
        log: AuditLog,
        content_of: Callable[[str], ToolContent],
        context: RunContext,
        redactor: Redactor,
        fields: tuple[Any, ...],
        shared: Mapping[str, bytes],
    ) -> None:
        """`fields`: of its first event. `shared`: what it has in common with other runs, by digest."""
        self._log = log
        self._content_of = content_of
        self._run = 0
        self._redactor = redactor
        self._fields, self._shared = fields, shared
        self._numbers: dict[int, int] = {}
        self._calls = 0
        self._failed_calls = 0
        self.lines: dict[str, int | None] = {}
        """Line of the script by call id; the tool bridge fills it in before each call."""
        self.problem: AuditError | None = None
        self.writes_ends_later = False
        """True when whoever records a script calls `write_ends` after answers were sent."""
        self._context = context
        self._observed: RunContext | None = None
        self._unwritten_ends: list[tuple[int, Any]] = []
        """Time of each end, and its record's fields or the call to make them from."""

    def begin(self, wait: bool = False) -> bool:
        """Write the first event. False: another process must be waited for, and `wait` is false.

        Raises:
            AuditError: it could not be written.
        """
        for digest, packed in self._shared.items():
            if not self._log.keep_blob(digest, packed, wait=wait):
                return False
        write = self._log.append if wait else self._log.try_append
        run = write(records.RUN_STARTED, 0, self._fields, self._redactor)
        if run is not None:
            self._run, self._fields = run, ()
        return run is not None

    @property
    def context(self) -> RunContext:
        """The context for the run's calls. It is created at the first call: many scripts make none."""
        if self._observed is None:
            # The record of a parent run would count our calls as its own. What must be undone if this fails is first.
            others = [each for each in self._context.features if not isinstance(each, RunRecord)]
            ahead = [each for each in others if "unrecorded" in each.moments]
            features = Features([*ahead, self, *(each for each in others if each not in ahead)])
            self._observed = self._context.child(features=features)
        return self._observed

    # Calls

    def call_started(self, call: Call) -> Any:
        """Record a call before its effect; also a call that was refused."""
        self._calls += 1
        self._numbers[id(call)] = number = self._calls
        line = parent = None
        if call.call_id in self.lines:  # the script itself made this call
            line = self.lines.pop(call.call_id)
        elif call.parent is not None:
            parent = self._numbers.get(id(call.parent))
        args = call.raw_args
        is_plain = not call.changes and call.refusal is None and not call.run.scope.depth and not call.facts
        is_plain = is_plain and call.args == args and not call.warnings
        extra: dict[str, Any] = {} if is_plain else self._extras(call)
        origin = call.origin if call.step is None else call.origin_label
        if (keep := self._content_of(call.name)) is not FULL:
            args = self._reduced_args(keep, args, extra)
        fields = (number, call.call_id, parent, call.name, origin, line, args, extra)
        if is_large(args):
            return daemon_threads.run_large(self._log.append, records.CALL_STARTED, self._run, fields, self._redactor)
        if self._log.try_append(records.CALL_STARTED, self._run, fields, self._redactor) is None:
            return daemon_threads.run_sync(self._log.append, records.CALL_STARTED, self._run, fields, self._redactor)
        return None

    def call_ended(self, call: Call) -> Any:
        """Record the end of a call, or keep it for `write_ends`."""
        result = call.result
        assert result is not None
        # A failure is read now: its exception may look different later.
        is_later = self.writes_ends_later and not result.is_error
        self._unwritten_ends.append((time.time_ns(), call if is_later else self._end_of(call, result)))
        if is_large([result.value, [part.text for part in result.parts if isinstance(part, Text)]]):
            return daemon_threads.run_large(self._write_large_end)
        if not self.writes_ends_later:
            self.write_ends()
            if not self._log.flush():
                return daemon_threads.run_sync(functools.partial(self._log.flush, wait=True))
        return None

    def _write_large_end(self) -> None:
        self.write_ends()
        self._log.flush(wait=True)

    def write_ends(self) -> None:
        """Have the ends of calls that were kept written with the next event, or in a moment.

        Raises:
            AuditError: the record is closed, or no longer written.
        """
        ends, self._unwritten_ends = self._unwritten_ends, []
        for at_ns, ended in ends:
            fields = ended if type(ended) is tuple else self._end_of(ended, ended.result)
            self._log.append_later(records.CALL_ENDED, self._run, fields, self._redactor, at_ns)

    def _end_of(self, call: Call, result: ToolResult) -> tuple[Any, ...]:
        """Return the fields of the record of a call's end."""
        number = self._numbers.pop(id(call), 0)
        keep = self._content_of(call.name)
        extra: dict[str, Any] = {}
        value = code = None
        if result.is_error:
            self._failed_calls += 1
            code = _failure(result, extra)
        else:
            value = result.guest_value()
        if result.status == "cancelled" and call.run.state.cancel_reason is None:
            extra["unanswered"] = True  # the script cancelled the call, or the run had ended
        if result.parts or result.files or result.job_id or result.meta.truncated:
            _extra_results(result, extra)
        if keep is not FULL:
            value = self._reduced_result(keep, value, extra)
        return number, str(result.status), round(result.meta.duration_ms * 1000), value, code, extra

    @staticmethod
    def _extras(call: Call) -> dict[str, Any]:
        refusal = call.refusal
        extra: dict[str, Any] = {}
        if call.changes:
            extra["corrected"] = call.coerced
        extra |= call.facts
        if call.warnings:
            extra["warnings"] = list(call.warnings)
        if refusal is not None and not refusal.is_error:
            extra["verdict"] = "substituted"  # the end of the call holds the answer
        elif refusal is not None:
            extra["verdict"] = str(refusal.status)
            extra["why"] = refusal.text
        elif call.args != call.raw_args:
            extra["made"] = call.args
        if call.run.scope.depth:
            extra["depth"] = call.run.scope.depth
        return extra

    def _reduced_args(self, keep: ToolContent, args: Any, extra: dict[str, Any]) -> Any:
        if keep.args == "full":
            return args
        extra.pop("made", None)
        extra.pop("warnings", None)
        extra.pop("why", None)
        if "corrected" in extra:
            extra["corrected"] = [{"path": change["path"]} for change in extra["corrected"]]
        return cutting.keep_as(keep.args, args, extra, "args", self._redactor)

    def _reduced_result(self, keep: ToolContent, value: Any, extra: dict[str, Any]) -> Any:
        if keep.results == "full":
            return value
        texts = [extra.pop(name, None) for name in ("message", "details", "text", "trace")]
        whole = value if texts == [None] * 4 else [value, *texts]
        return cutting.keep_as(keep.results, whole, extra, "value", self._redactor)

    # The end

    def end(self, result: ExecutionResult, wait: bool = True) -> bool:
        """Record the result of the run. False: nothing was written, because another process must be waited for or the
        result is large.

        Raises:
            AuditError: this event, or an earlier one of the run, could not be written.
        """
        logs, waiting = result.logs, result.suspension.calls if result.suspension is not None else ()
        if not wait and is_large([result.value, logs.stdout, logs.stderr, *(call.args for call in waiting)]):
            return False
        printed = [[entry.stream, entry.text] for entry in logs.entries]
        is_written = self._end(
            str(result.outcome),
            wait=wait,
            value=result.value,
            has_value=result.has_value,
            value_sha256=value_digest(result.value) if result.has_value else None,
            printed=cutting.without_halves(printed, self._redactor) if logs.truncated else printed,
            streams=[logs.stdout_bytes, logs.stderr_bytes, logs.truncated],
            files=[[file.name, file.media_type, file.size, file.sha256, file.problem] for file in result.files],
            error=_error_fields(result.error) if result.error is not None else None,
            usage={
                "wall_s": result.usage.wall_s,
                "cpu_s": result.usage.cpu_s,
                "start_s": result.usage.start_s,
                "peak_memory_bytes": result.usage.peak_memory_bytes,
                "peak_processes": result.usage.peak_processes,
                "sent_bytes": result.usage.sent_bytes,
                "received_bytes": result.usage.received_bytes,
                "host_work": result.usage.host_work,
            },
            extra=({"lint": result.isolation.lint} if result.isolation.lint != "off" else {}) | self._waits(waiting),
        )
        if is_written and self.problem is not None:
            raise self.problem
        return is_written

    def end_calls(self, wait: bool = False) -> bool:
        """Record the end of a run without a sandbox. False: nothing was written, as by `end`."""
        link = self._context.scope.link
        waiting = link.waits if link is not None else ()
        if not wait and is_large([call.args for call in waiting]):
            return False
        waits = self._waits(waiting)
        return self._end("suspended" if waits else "ok", wait=wait, error=None, extra=waits)

    def _waits(self, calls: Iterable[PendingCall]) -> dict[str, Any]:
        """Return what a person was shown of the calls that wait."""
        rows = [
            {"call": each.id, "tool": each.tool, "line": each.line, "why": each.reason, "digest": each.digest,
             "args": each.args}
            for each in calls
        ]  # fmt: skip
        return records_of_calls("waits", rows, self._content_of, self._log, self._redactor)

    def failed(self, exc: BaseException) -> None:
        """Record that an exception of the host ended the run. Logs an `AuditError`: the caller re-raises its own."""
        outcome = EXCEPTION_OUTCOMES.get(type(exc).__name__, ABORTED)
        error = {"type": type(exc).__name__, "message": str(exc), "trace": _trace(exc) if outcome == ABORTED else None}
        try:
            self._end(outcome, wait=True, error={name: value for name, value in error.items() if value}, extra={})
        except AuditError:
            logger.exception("the end of run %s could not be recorded", self._context.run_id)

    def _end(
        self,
        outcome: str,
        *,
        wait: bool,
        error: Mapping[str, Any] | None,
        extra: Mapping[str, Any],
        value: Any = None,
        has_value: bool = False,
        value_sha256: str | None = None,
        printed: Sequence[Any] = (),
        streams: Sequence[Any] = (0, 0, False),
        files: Sequence[Any] = (),
        usage: Mapping[str, Any] | None = None,
    ) -> bool:
        self.write_ends()
        fields = (
            outcome,
            value,
            has_value,
            value_sha256,
            [*printed],
            [*streams],
            [*files],
            error,
            usage or {},
            [self._calls, self._failed_calls],
            extra,
        )
        write = self._log.append if wait else self._log.try_append
        return write(records.RUN_ENDED, self._run, fields, self._redactor) is not None


def records_of_calls(
    name: str,
    rows: Iterable[Mapping[str, Any]],
    content_of: Callable[[str], ToolContent],
    log: AuditLog,
    redactor: Redactor,
) -> dict[str, Any]:
    """Return what a run's start or end says of calls. Their arguments are kept as those of any call of the tool are."""
    found, left = [], ROWS_BYTES
    for row in rows:
        kept = dict(row)
        if "args" in kept:
            keep, size = content_of(kept["tool"]).args, len(pack(kept["args"]))
            if keep == "full" and size > min(left, log.config.value_bytes):
                keep = "digest"
            kept["args"] = cutting.keep_as(keep, kept["args"], kept, "args", redactor)
            left -= size if keep == "full" else 0
        found.append(kept)
    return {name: found} if found else {}


def _failure(result: ToolResult, extra: dict[str, Any]) -> str | None:
    extra["message"] = result.text
    if result.error is None:
        return None
    if result.error.details:
        extra["details"] = dict(result.error.details)
    if result.error.retryable:
        extra["retryable"] = True
    if result.exc is not None:
        extra["exc"] = type(result.exc).__name__
        extra["trace"] = _trace(result.exc)
    return str(result.error.code)


def _extra_results(result: ToolResult, extra: dict[str, Any]) -> None:
    if result.has_value and result.parts and not result.is_error:
        extra["text"] = result.output
    if result.files:
        extra["files"] = [[file.name, file.media_type, len(file.data)] for file in result.files]
    if result.job_id is not None:
        extra["job"] = result.job_id
    if result.meta.truncated:
        extra["truncated"] = True


def _trace(exc: BaseException) -> str:
    """Return the path of an exception: classes, functions and lines of it and its causes.

    Messages of causes, source lines and file paths are left out: they may hold data of the host.
    """
    chain: list[str] = []
    cause: BaseException | None = exc
    while cause is not None and len(chain) < MAX_CAUSES:
        frames = [
            f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"
            for frame, line in traceback.walk_tb(cause.__traceback__)
        ]
        chain.append(" > ".join([*frames[-MAX_FRAMES:], type(cause).__name__]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\nafter ".join(chain)


def _error_fields(error: ErrorInfo) -> dict[str, Any]:
    named = {
        "type": error.type,
        "message": error.message,
        "line": error.line,
        "column": error.column,
        "trace": error.traceback or None,
        "limit": error.limit,
        "limit_value": error.limit_value,
        "used": error.used,
        "signal": error.signal,
        "exit_code": error.exit_code,
        "findings": [dict(each) for each in error.findings] or None,
    }
    return {name: value for name, value in named.items() if value is not None}
