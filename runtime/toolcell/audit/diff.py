"""Find the first difference between a recorded run and another run of its script.

Values are compared as they would be recorded, so a difference that redaction hides does not count. Nothing runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.audit.records import value_digest
from toolcell.audit.redact import Redactor
from toolcell.results import ExecutionResult, Outcome

SCRIPT_OUTCOMES: Final = frozenset({str(Outcome.OK), str(Outcome.ERROR), str(Outcome.DENIED), str(Outcome.CALL_LIMIT)})
"""Outcomes that the script alone decides. Everything that such a run returns must be equal."""

HOST_OUTCOMES: Final = frozenset(
    map(
        str,
        (
            Outcome.TIMEOUT,
            Outcome.CPU_LIMIT,
            Outcome.MEMORY_LIMIT,
            Outcome.OUTPUT_LIMIT,
            Outcome.PROCESS_LIMIT,
            Outcome.KILLED,
            Outcome.PROTOCOL_ERROR,
        ),
    )
)
"""Outcomes that the host decides. They must be equal, but the moment may differ."""

_redactor = Redactor()


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a replay first differed from the record."""

    kind: str
    """call, extra_call, missing_call, no_answer, outcome, error, value, stdout, stderr, files."""
    message: str
    index: int | None = None
    """Of the call, counting the script's own calls from 1."""
    line: int | None = None
    source_line: str = ""
    expected: Any = None
    got: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def difference_of_call(call: RecordedCall, name: str, args: Any) -> tuple[str, Any, Any] | None:
    """Return what differs in a call, the expected and the new value; None when nothing differs."""
    if name != call.tool:
        return f"it calls {name}, and called {call.tool}", call.tool, name
    if (missing := call.start_extra.get("args_cut")) is not None:
        digest = missing.get("sha256")
        same = digest is None or digest in (value_digest(args), value_digest(cleaned(args)))
        return None if same else (f"{name} gets other arguments", missing, args)
    if same_value(call.args, args):
        return None
    return f"{name} gets other arguments", call.args, args


def same_value(recorded: Any, got: Any) -> bool:
    """True when a value would be recorded as the same bytes."""
    packed = records.pack(recorded)
    return packed == records.pack(got) or packed == records.pack(cleaned(got))


def cleaned(value: Any) -> Any:
    """Return a value without what no log records, whatever its configuration."""
    return _redactor.clean_all(records.unpack(records.pack(value)))


def compare(run: RecordedRun, result: ExecutionResult) -> Divergence | None:
    """Return the first difference between a finished replay and the recorded run."""
    if run.outcome not in SCRIPT_OUTCOMES | HOST_OUTCOMES:
        return None  # it was ended from outside: there is nothing to compare
    if run.outcome != str(result.outcome):
        reason = f": {result.error.type}: {result.error.message}" if result.error is not None else ""
        message = f"it ends as {result.outcome}{reason}"
        return Divergence("outcome", message, None, None, "", run.outcome, str(result.outcome))
    if run.outcome in HOST_OUTCOMES:
        return None
    return _compare_error(run, result) or _compare_value(run, result) or _compare_rest(run, result)


def _compare_error(run: RecordedRun, result: ExecutionResult) -> Divergence | None:
    recorded, error = run.end["error"] or {}, result.error
    expected = [recorded.get(name) for name in ("type", "message", "line")]
    got = [error.type, error.message, error.line] if error is not None else [None, None, None]
    if same_value(expected, got):
        return None
    line = error.line if error is not None else None
    return Divergence("error", "it fails in another way", None, line, "", expected, got)


def _compare_value(run: RecordedRun, result: ExecutionResult) -> Divergence | None:
    if run.end["has_value"] != result.has_value:
        message = "it has a result now" if result.has_value else "it has no result now"
        return Divergence("value", message, None, None, "", run.end["value"], result.value)
    digest = run.end["value_sha256"]
    if not result.has_value or digest in (value_digest(result.value), value_digest(cleaned(result.value))):
        return None
    expected = run.end["value"] if "value_cut" not in (run.end["more"] or {}) else {"sha256": digest}
    return Divergence("value", "its result is another", None, None, "", expected, result.value)


def _compare_rest(run: RecordedRun, result: ExecutionResult) -> Divergence | None:
    if "logs_cut" not in (run.end["more"] or {}):
        for stream, got in (("stdout", result.logs.stdout), ("stderr", result.logs.stderr)):
            expected = "".join(text for each, text in run.end["logs"] if each == stream)
            if not same_value(expected, got):
                return Divergence(stream, f"it writes something else to {stream}", None, None, "", expected, got)
    expected_files = sorted([entry[0], entry[3], entry[4]] for entry in run.end["files"])
    got_files = sorted([file.name, file.sha256, file.problem] for file in result.files)
    if expected_files != got_files:
        return Divergence("files", "it returns other files", None, None, "", expected_files, got_files)
    return None
