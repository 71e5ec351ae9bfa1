"""Find the first difference between a recorded run and another run of its script.

Values are compared as they would be recorded, so a difference that redaction hides does not count. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.audit.redact import Redactor
from toolcell.audit.wildcards import fits, is_redacted, shown_for
from toolcell.results import HOST_OUTCOMES, SCRIPT_OUTCOMES, Divergence, ExecutionResult
from toolcell.support import packing
from toolcell.support.packing import value_digest

_UNREGISTERED: Final = Redactor()


def clean_value(value: Any, redactor: Redactor = _UNREGISTERED) -> Any:
    """Return a value without what no log records, whatever its configuration, and without registered secrets."""
    return redactor.clean_all(packing.unpack(packing.pack(value)))


def same_value(recorded: Any, got: Any, redactor: Redactor = _UNREGISTERED) -> bool:
    """True when a value would be recorded as the same bytes. Where a secret was taken out, anything may stand."""
    packed = packing.pack(recorded)
    if packed == packing.pack(got):
        return True
    without = clean_value(got, redactor)
    return packed == packing.pack(without) or (is_redacted(recorded) and fits(recorded, without))


@dataclass(slots=True)
class Comparison:
    """Compares a new run with a recorded one, and notes what it could not compare."""

    run: RecordedRun
    redactor: Redactor = _UNREGISTERED
    """Knows the secrets that no difference may show."""
    not_compared: dict[str, None] = field(default_factory=dict)

    def _differs(self, kind: str, message: str, expected: Any, got: Any, line: int | None = None) -> Divergence:
        return Divergence(
            kind,
            clean_value(message, self.redactor),
            index=None,
            line=line,
            source_line="",
            expected=expected,
            got=shown_for(expected, clean_value(got, self.redactor)),
        )

    # Calls

    def call(self, call: RecordedCall, name: str, args: Any) -> Divergence | None:
        """Return what differs in a call."""
        if not same_value(call.tool, name, self.redactor):
            return self._differs("call", f"it calls {name}, and called {call.tool}", call.tool, name)
        if (missing := call.start_extra.get("args_cut")) is not None:
            if self._fits_digest(missing.get("sha256"), args, call.start_extra, f"arguments of {call.tool}", missing):
                return None
            return self._differs("call", f"{name} gets other arguments", missing, args)
        if same_value(call.args, args, self.redactor):
            return None
        return self._differs("call", f"{name} gets other arguments", call.args, args)

    def _fits_digest(self, digest: str | None, got: Any, more: Mapping[str, Any], what: str, why: Any) -> bool:
        """True when a value fits the digest that is recorded in its place, or when that cannot be said."""
        if digest is not None and digest in (value_digest(got), value_digest(clean_value(got, self.redactor))):
            return True
        if digest is None or more.get("redacted"):
            reason = "secrets were taken out of what the digest is of" if digest is not None else _why(why)
            self.not_compared[f"{what} ({reason})"] = None
            return True
        return False

    # The end

    def end(self, result: ExecutionResult) -> Divergence | None:
        """Return the first difference between how a run ended and how the recorded one did."""
        run = self.run
        if run.outcome not in SCRIPT_OUTCOMES | HOST_OUTCOMES:
            return None  # it was ended from outside: there is nothing to compare
        if run.outcome != str(result.outcome):
            reason = f": {result.error.type}: {result.error.message}" if result.error is not None else ""
            return self._differs("outcome", f"it ends as {result.outcome}{reason}", run.outcome, str(result.outcome))
        if run.outcome in HOST_OUTCOMES:
            self.not_compared["result, output and files (the host ended the run, not at the same point)"] = None
            return None
        return self._error(result) or self._value(result) or self._output(result) or self._files(result)

    def _error(self, result: ExecutionResult) -> Divergence | None:
        recorded, error = self.run.end["error"] or {}, result.error
        expected = [recorded.get(name) for name in ("type", "message", "line")]
        got = [error.type, error.message, error.line] if error is not None else [None, None, None]
        if same_value(expected, got, self.redactor):
            return None
        line = error.line if error is not None else None
        return self._differs("error", "it fails in another way", expected, got, line)

    def _value(self, result: ExecutionResult) -> Divergence | None:
        end = self.run.end
        more = end["more"] or {}
        if end["has_value"] != result.has_value:
            message = "it has a result now" if result.has_value else "it has no result now"
            return self._differs("value", message, end["value"], result.value)
        if not result.has_value:
            return None
        if (missing := more.get("value_cut")) is None:
            if same_value(end["value"], result.value, self.redactor):
                return None
            return self._differs("value", "its result is another", end["value"], result.value)
        if self._fits_digest(end["value_sha256"], result.value, more, "result", missing):
            return None
        return self._differs("value", "its result is another", {"sha256": end["value_sha256"]}, result.value)

    def _output(self, result: ExecutionResult) -> Divergence | None:
        end, logs = self.run.end, result.logs
        if (missing := (end["more"] or {}).get("logs_cut")) is not None:
            self.not_compared[f"output ({_why(missing)})"] = None
        elif end["logs"] is not None:
            for stream, got in (("stdout", logs.stdout), ("stderr", logs.stderr)):
                expected = "".join(text for each, text in end["logs"] if each == stream)
                if not same_value(expected, got, self.redactor):
                    return self._differs(stream, f"it writes something else to {stream}", expected, got)
            if len({stream for stream, _ in end["logs"]}) > 1:
                self.not_compared["in which order stdout and stderr were written"] = None
        return self._output_bytes(result)

    def _output_bytes(self, result: ExecutionResult) -> Divergence | None:
        """Compare how much was written: also of output that was cut."""
        expected, logs = self.run.end["logs_bytes"], result.logs
        if expected is None:
            return None
        if expected[2] and "logs_cut" not in (self.run.end["more"] or {}):
            self.not_compared["the middle of the output (it was longer than `output_bytes`)"] = None
        got = [logs.stdout_bytes, logs.stderr_bytes, logs.truncated]
        if expected == got or self._was_redacted:
            return None
        return self._differs("stdout", "it writes more or less: bytes of stdout, of stderr, cut", expected, got)

    def _files(self, result: ExecutionResult) -> Divergence | None:
        expected = sorted([entry[0], entry[3], entry[4]] for entry in self.run.end["files"])
        got = sorted([file.name, file.sha256, file.problem] for file in result.files)
        if expected == got:
            return None
        if self._was_redacted and [entry[::2] for entry in expected] == [entry[::2] for entry in got]:
            self.not_compared["content of files (secrets were taken out of what the script was given)"] = None
            return None
        return self._differs("files", "it returns other files", expected, got)

    @property
    def _was_redacted(self) -> bool:
        """True when the script does not get in a replay what it got then."""
        mores = [self.run.start["more"], self.run.end.get("more")]
        mores += [more for call in self.run.calls for more in (call.start_extra, call.end_extra)]
        return any((more or {}).get("redacted") for more in mores)


def _why(missing: Mapping[str, Any]) -> str:
    reason = {"size": "too large to be recorded", "omit": "not recorded, as configured"}.get(missing.get("why", ""))
    return reason or "not recorded"
