"""The records of one run under way: what is noted of each call, and of how the run ended.

Sees the calls as their `CallObserver`. Knows neither files nor keys; it hands plain data to the log.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from toolcell.audit import content, records
from toolcell.audit.config import FULL, ToolContent
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.errors import AuditError
from toolcell.results import ErrorInfo, ExecutionResult, Usage

if TYPE_CHECKING:
    from toolcell.tools.call import Call, CallObserver, RunContext
    from toolcell.tools.result import ToolResult

ABORTED: Final = "aborted"
HOST_OUTCOMES: Final = {"CancelledError": "cancelled", "Cancelled": "cancelled", "SandboxUnavailable": "unavailable"}
"""How a run ended that ended with an exception of the host, by the exception's class; others are `aborted`."""

logger = logging.getLogger("toolcell.audit")

CAUSES = 8
FRAMES = 30


class RunRecord:
    """The records of one run under way; sees its calls as their `CallObserver`."""

    __slots__ = (
        "_calls", "_content_of", "_ended", "_failed_calls", "_given", "_log", "_numbers", "_observed", "_others",
        "_redactor", "_run", "has_witness", "lines", "problem",
    )  # fmt: skip

    def __init__(
        self,
        log: AuditLog,
        content_of: Callable[[str], ToolContent],
        run: int,
        context: RunContext,
        redactor: Redactor,
    ) -> None:
        self._log = log
        self._content_of = content_of
        self._run = run
        self._redactor = redactor
        observer = context.observer  # of a run above, its own record would note our calls as its own
        self._others: CallObserver | None = observer._others if isinstance(observer, RunRecord) else observer
        self._numbers: dict[int, int] = {}
        self._calls = 0
        self._failed_calls = 0
        self.lines: dict[str, int | None] = {}
        """Line of the script that made a call, by call id; filled in by who knows it."""
        self.problem: AuditError | None = None
        self.has_witness = False
        """Somebody calls `settle` whenever answers have been sent."""
        self._given = context
        self._observed: RunContext | None = None
        self._ended: list[tuple[int, Any]] = []
        """When, and the record's fields or the call that they are of."""

    @property
    def context(self) -> RunContext:
        """The run as its calls are made with. Made at the first call: many scripts make none."""
        if self._observed is None:
            self._observed = self._given.child(observer=self)
        return self._observed

    # Calls

    def call_started(self, call: Call) -> Any:
        """A call is about to have its effect, or was refused."""
        self._calls += 1
        self._numbers[id(call)] = number = self._calls
        line = parent = None
        if call.call_id in self.lines:  # made by the script itself, whatever else is under way
            line = self.lines.pop(call.call_id)
        elif call.parent is not None:
            parent = self._numbers.get(id(call.parent))
        args = call.raw_args
        is_plain = not call.changes and call.refusal is None and not call.run.depth
        is_plain = is_plain and call.args == args and not (call.approved or call.warnings)
        more: dict[str, Any] = {} if is_plain else self._extras(call)
        origin = call.origin if call.step is None else call.origin_label
        if (keep := self._content_of(call.name)) is not FULL:
            args = self._reduced(keep, args, more)
        self._log.append(
            records.CALL_STARTED,
            self._run,
            (number, call.call_id, parent, call.name, origin, line, args, more),
            self._redactor,
        )
        return self._others.call_started(call) if self._others is not None else None

    def call_ended(self, call: Call) -> Any:
        """A call has its result."""
        result = call.result
        assert result is not None
        # With a witness there is a better moment to look at what went well; what failed may look different by then.
        is_later = self.has_witness and not result.is_error
        self._ended.append((time.time_ns(), call if is_later else self._end_of(call, result)))
        if not self.has_witness:
            self.settle()
        return self._others.call_ended(call) if self._others is not None else None

    def settle(self) -> None:
        """Write what has ended. With a witness this waits until answers are on their way.

        Raises:
            AuditError: it could not be written.
        """
        while self._ended:
            at_ns, ended = self._ended.pop(0)
            if type(ended) is not tuple:
                ended = self._end_of(ended, ended.result)
            self._log.append(records.CALL_ENDED, self._run, ended, self._redactor, at_ns)

    def _end_of(self, call: Call, result: ToolResult) -> tuple[Any, ...]:
        """Fields of the record of a call's end."""
        number = self._numbers.pop(id(call), 0)
        keep = self._content_of(call.name)
        more: dict[str, Any] = {}
        value = code = None
        if result.is_error:
            self._failed_calls += 1
            code = _failure(result, more)
        else:
            value = result.guest_value()
        if result.status == "cancelled" and call.run.state.cancel_reason is None:
            more["unanswered"] = True  # the script took the call back, or was gone
        if result.parts or result.files or result.job_id or result.meta.truncated:
            _extra_results(result, more)
        if keep is not FULL:
            value = self._reduced_result(keep, value, more)
        return number, str(result.status), round(result.meta.duration_ms * 1000), value, code, more

    @staticmethod
    def _extras(call: Call) -> dict[str, Any]:
        refusal = call.refusal
        more: dict[str, Any] = {}
        if call.changes:
            more["coerced"] = call.coerced
        if call.warnings:
            more["warnings"] = list(call.warnings)
        if refusal is not None:
            more["verdict"] = str(refusal.status)
            more["why"] = refusal.text
        elif call.args != call.raw_args:
            more["effective_args"] = call.args
        if call.approved:
            more["approved"] = True
        if call.run.depth:
            more["depth"] = call.run.depth
        return more

    def _reduced(self, keep: ToolContent, args: Any, more: dict[str, Any]) -> Any:
        if keep.args == "full":
            return args
        more.pop("effective_args", None)
        more.pop("warnings", None)
        more.pop("why", None)
        if "coerced" in more:
            more["coerced"] = [{"path": change["path"]} for change in more["coerced"]]
        return content.kept(args, keep.args, more, "args", self._clean)

    def _reduced_result(self, keep: ToolContent, value: Any, more: dict[str, Any]) -> Any:
        if keep.results == "full":
            return value
        said = [more.pop(name, None) for name in ("message", "details", "text", "trace")]
        whole = value if said == [None] * 4 else [value, *said]
        return content.kept(whole, keep.results, more, "value", self._clean)

    def _clean(self, value: Any) -> Any:
        return self._redactor.clean_all(records.unpack(records.pack(value)))

    # The end

    def end(self, result: ExecutionResult) -> None:
        """Record what the run left behind.

        Raises:
            AuditError: this, or an earlier record of the run, could not be written.
        """
        logs = result.logs
        self._end(
            str(result.outcome),
            result.value,
            result.has_value,
            content.digest_of(result.value) if result.has_value else None,
            [[entry.stream, entry.text] for entry in logs.entries],
            [logs.stdout_bytes, logs.stderr_bytes, logs.truncated],
            [[file.name, file.media_type, file.size, file.sha256, file.problem] for file in result.files],
            _error_fields(result.error) if result.error is not None else None,
            _usage_fields(result.usage),
            [self._calls, self._failed_calls],
            {"lint": result.isolation.lint} if result.isolation.lint != "off" else {},
        )
        if self.problem is not None:
            raise self.problem

    def end_calls(self, outcome: str = "ok", error: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run that had no sandbox, or of one that was cut short."""
        self._end(outcome, None, False, None, [], [0, 0, False], [], error, {}, [self._calls, self._failed_calls], {})

    def failed(self, exc: BaseException) -> None:
        """Record that the host gave up. Never raises: there is an exception under way already."""
        outcome = HOST_OUTCOMES.get(type(exc).__name__, ABORTED)
        error = {"type": type(exc).__name__, "message": str(exc), "trace": _trace(exc) if outcome == ABORTED else None}
        try:
            self.end_calls(outcome, {name: value for name, value in error.items() if value})
        except AuditError:
            logger.exception("the end of run %s could not be recorded", self._given.run_id)

    def _end(self, *fields: Any) -> None:
        self.settle()
        self._log.append(records.RUN_ENDED, self._run, fields, self._redactor)


def _failure(result: ToolResult, more: dict[str, Any]) -> str | None:
    more["message"] = result.text
    if result.error is None:
        return None
    if result.error.details:
        more["details"] = dict(result.error.details)
    if result.error.retryable:
        more["retryable"] = True
    if result.exc is not None:
        more["exc"] = type(result.exc).__name__
        more["trace"] = _trace(result.exc)
    return str(result.error.code)


def _extra_results(result: ToolResult, more: dict[str, Any]) -> None:
    if result.has_value and result.parts and not result.is_error:
        more["text"] = result.output
    if result.files:
        more["files"] = [[file.name, file.media_type, len(file.data)] for file in result.files]
    if result.job_id is not None:
        more["job"] = result.job_id
    if result.meta.truncated:
        more["truncated"] = True


def _trace(exc: BaseException) -> str:
    """Where an exception came from and what led to it: classes, functions and lines.

    No message of a cause, no source line, no path: they hold what the host was working with.
    """
    chain: list[str] = []
    link: BaseException | None = exc
    while link is not None and len(chain) < CAUSES:
        frames = [
            f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}:{line}"
            for frame, line in traceback.walk_tb(link.__traceback__)
        ]
        chain.append(" > ".join([*frames[-FRAMES:], type(link).__name__]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
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


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "wall_s": usage.wall_s,
        "cpu_s": usage.cpu_s,
        "start_s": usage.start_s,
        "peak_memory_bytes": usage.peak_memory_bytes,
        "peak_processes": usage.peak_processes,
        "sent_bytes": usage.sent_bytes,
        "received_bytes": usage.received_bytes,
    }
