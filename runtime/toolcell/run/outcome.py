"""Compute a run's outcome and error from what the host observed. Pure functions over frozen data.

What the host observed comes before what the guest said. The guest only describes its own exception, and every field of
that description is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolcell.config import Limits
from toolcell.results import ErrorInfo, Outcome, Usage
from toolcell.sandbox.backend import Exit, LimitExceeded, Sample
from toolcell_bridge.wire.messages import Done


@dataclass(frozen=True, slots=True)
class ProtocolViolation:
    """The guest broke the bridge protocol."""

    problem: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """The caller cancelled the run, or a tool raised `ToolAbort`."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something on the host raised: a callback, a measurement, the audit log. The run has no result then."""

    error: Exception


StopReason = Done | LimitExceeded | ProtocolViolation | Aborted | Failed
"""Why a run stopped. The first reason counts; all but `Done` kill the sandbox."""

LIMIT_ERRORS: Mapping[Outcome, tuple[str, str]] = {
    Outcome.TIMEOUT: ("Timeout", "execution timed out after {limit:g} s"),
    Outcome.CPU_LIMIT: ("CpuLimit", "used {used:.2f} s of CPU time, limit {limit:g} s"),
    Outcome.MEMORY_LIMIT: ("MemoryLimit", "used {used:.0f} bytes of memory, limit {limit:.0f} bytes"),
    Outcome.PROCESS_LIMIT: ("ProcessLimit", "tried to have more than {limit:.0f} processes and threads"),
    Outcome.OUTPUT_LIMIT: ("OutputLimit", "printed {used:.0f} bytes, limit {limit:.0f} bytes"),
    Outcome.CALL_LIMIT: ("CallLimit", "made {used:.0f} tool calls, limit {limit:.0f}"),
}
"""Type and message of the error for each limit that the host enforces."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Everything the host knows when nothing more can happen in a run."""

    limits: Limits
    usage: Usage
    sample: Sample
    """The last measurement of the sandbox. `usage` also includes what its main process had used when it ended."""
    exit: Exit
    lint: str
    """The lint profile that was sent with the script."""
    stopped: StopReason | None = None
    """None: the sandbox ended by itself, without a `Done`."""
    has_value: bool = False
    refused: int = 0
    """Tool calls past `tool_calls`; `usage` does not count them."""


def outcome_of(end: RunEnd) -> tuple[Outcome, ErrorInfo | None]:
    """Compute the outcome of a run and its error."""
    match end.stopped:
        case Aborted(why):
            return Outcome.CANCELLED, ErrorInfo("Cancelled", why)
        case ProtocolViolation(problem):
            message = f"the sandbox broke the bridge protocol and was killed: {problem}"
            return Outcome.PROTOCOL_ERROR, ErrorInfo("ProtocolError", message)
        case LimitExceeded() as exceeded:
            return _limit_outcome(exceeded, end.usage)
    done = end.stopped if isinstance(end.stopped, Done) else None
    enforced = _enforced_limit(end, done)
    if enforced is not None:
        return _limit_outcome(enforced, end.usage)
    if done is None:
        return Outcome.KILLED, _killed(end.exit)
    if done.ok:
        return Outcome.OK, None
    return _script_failure(end, error_info(done.error or {}))


def _limit_outcome(exceeded: LimitExceeded, usage: Usage) -> tuple[Outcome, ErrorInfo]:
    used = exceeded.used
    if exceeded.outcome is Outcome.MEMORY_LIMIT:  # memory may have grown between the measurement and the kill
        used = max(used, usage.peak_memory_bytes)
    kind, text = LIMIT_ERRORS[exceeded.outcome]
    message = text.format(limit=exceeded.value, used=used)
    return exceeded.outcome, ErrorInfo(kind, message, limit=exceeded.limit, limit_value=exceeded.value, used=used)


def _script_failure(end: RunEnd, error: ErrorInfo) -> tuple[Outcome, ErrorInfo]:
    """Classify a script that says it failed: as refused by lint, as stopped by a limit, or as an ordinary error."""
    limits, usage, sample = end.limits, end.usage, end.sample
    # Only a run with a lint profile that had done nothing yet can have been refused by lint.
    if error.findings and end.lint != "off" and not usage.calls and not end.has_value:
        return Outcome.DENIED, error
    if end.refused:
        return Outcome.CALL_LIMIT, _limited(error, "tool_calls", limits.tool_calls, usage.calls + end.refused)
    if sample.refused_processes or sample.peak_processes >= limits.processes > 1:
        return Outcome.PROCESS_LIMIT, _limited(error, "processes", limits.processes, usage.peak_processes)
    if error.type == "MemoryError":
        # The one limit a script can claim: the kernel refuses an absurd allocation without leaving a trace.
        return Outcome.MEMORY_LIMIT, _limited(error, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    return Outcome.ERROR, error


def _enforced_limit(end: RunEnd, done: Done | None) -> LimitExceeded | None:
    """Find a limit that the kernel enforced before the monitor measured the sandbox."""
    limits, usage, sample = end.limits, end.usage, end.sample
    if sample.memory_kills and (done is None or not done.ok):
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    if sample.peak_memory_bytes > limits.memory_bytes:
        # Without a cgroup the kernel does not hold memory below the limit; the run ended before the next measurement.
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    if done is None and usage.cpu_s >= limits.cpu_s:
        return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, usage.cpu_s)
    if done is None and sample.refused_processes:
        return LimitExceeded(Outcome.PROCESS_LIMIT, "processes", limits.processes, usage.peak_processes)
    return None


def exceeded_limit(limits: Limits, sample: Sample) -> LimitExceeded | None:
    """Return the limit that a running sandbox exceeds by its last measurement."""
    if sample.cpu_s > limits.cpu_s:
        return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, sample.cpu_s)
    if sample.memory_kills or sample.peak_memory_bytes > limits.memory_bytes:
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, sample.peak_memory_bytes)
    if sample.processes > limits.processes:
        return LimitExceeded(Outcome.PROCESS_LIMIT, "processes", limits.processes, sample.processes)
    return None


def _limited(error: ErrorInfo, limit: str, value: float, used: float) -> ErrorInfo:
    """Add the limit that caused it to the script's own error. A MemoryError comes without a message."""
    message = error.message or f"out of memory: an allocation was refused, limit {value:.0f} bytes"
    return replace(error, message=message, limit=limit, limit_value=value, used=used)


def _killed(exit: Exit) -> ErrorInfo:
    if exit.signal is not None:
        return ErrorInfo("Killed", f"the sandbox died of signal {exit.signal}", signal=exit.signal)
    return ErrorInfo("Killed", f"the sandbox ended without a word (exit code {exit.code})", exit_code=exit.code)


def error_info(claimed: Mapping[str, Any]) -> ErrorInfo:
    """Read the guest's description of its exception. Every field is checked, because the guest is not trusted."""

    def text(key: str, most: int) -> str:
        value = claimed.get(key)
        return value[:most] if isinstance(value, str) else ""

    def number(key: str) -> int | None:
        value = claimed.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    found = claimed.get("findings")
    findings = tuple(map(_finding, found[:50])) if isinstance(found, list) else ()
    return ErrorInfo(
        text("type", 200) or "Exception",
        text("message", 16_384),
        number("line"),
        number("column"),
        text("traceback", 65_536),
        exit_code=number("exit_code"),
        findings=findings,
    )


def highest(before: Sample, after: Sample) -> Sample:
    """Return the larger of two measurements, field by field: a dead sandbox measures as zero."""
    return Sample(
        max(before.cpu_s, after.cpu_s),
        max(before.peak_memory_bytes, after.peak_memory_bytes),
        max(before.processes, after.processes),
        max(before.peak_processes, after.peak_processes),
        max(before.memory_kills, after.memory_kills),
        max(before.refused_processes, after.refused_processes),
    )


def _finding(claimed: Any) -> dict[str, Any]:
    """Read one lint finding: its four fields, each checked and cut to size."""
    given = claimed if isinstance(claimed, dict) else {}
    numbers = {key: given.get(key) for key in ("line", "column") if type(given.get(key)) is int}
    texts = {key: value[:500] for key in ("rule", "message") if isinstance(value := given.get(key), str)}
    return numbers | texts
