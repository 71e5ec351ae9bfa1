"""How a run ended, in words a model can act on: pure functions from what was seen to what is reported.

What the host saw comes before what the guest said; the guest's own words only describe its exception, and every field
of them is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolcell.config import Limits
from toolcell.results import ErrorInfo, Outcome, Usage
from toolcell.sandbox.backend import Exit, LimitExceeded, Sample
from toolcell_bridge.wire.messages import Done

BREACHES: Mapping[Outcome, tuple[str, str]] = {
    Outcome.TIMEOUT: ("Timeout", "execution timed out after {limit:g} s"),
    Outcome.CPU_LIMIT: ("CpuLimit", "used {used:.2f} s of CPU time, limit {limit:g} s"),
    Outcome.MEMORY_LIMIT: ("MemoryLimit", "used {used:.0f} bytes of memory, limit {limit:.0f} bytes"),
    Outcome.PROCESS_LIMIT: ("ProcessLimit", "tried to have more than {limit:.0f} processes and threads"),
    Outcome.OUTPUT_LIMIT: ("OutputLimit", "printed {used:.0f} bytes, limit {limit:.0f} bytes"),
    Outcome.CALL_LIMIT: ("CallLimit", "made {used:.0f} tool calls, limit {limit:.0f}"),
}


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Everything a verdict rests on, once nothing more can happen."""

    limits: Limits
    usage: Usage
    sample: Sample
    """The last of the sandbox; `usage` also counts what its main process had used when it ended."""
    end: Exit
    lint: str
    """Profile the script was sent with."""
    breached: LimitExceeded | None = None
    violation: str | None = None
    """How the guest broke the protocol."""
    aborted: str | None = None
    done: Done | None = None
    """The guest's last word, if it had one."""
    has_value: bool = False
    refused: int = 0
    """Calls past `tool_calls`; `usage` does not count them."""


def verdict(facts: RunEnd) -> tuple[Outcome, ErrorInfo | None]:
    """How the run ended. What the host saw comes before what the guest said."""
    limits, usage, sample = facts.limits, facts.usage, facts.sample
    if facts.aborted is not None:
        return Outcome.CANCELLED, ErrorInfo("Cancelled", facts.aborted)
    if facts.violation is not None:
        message = f"the sandbox broke the bridge protocol and was killed: {facts.violation}"
        return Outcome.PROTOCOL_ERROR, ErrorInfo("ProtocolError", message)
    breach = facts.breached or _enforced_limit(facts)
    if breach is not None:
        if breach.outcome is Outcome.MEMORY_LIMIT:  # it may have grown between the look that found it and its end
            breach = replace(breach, used=max(breach.used, usage.peak_memory_bytes))
        return breach.outcome, breach_error(breach)
    if facts.done is None:
        return Outcome.KILLED, killed(facts.end)
    if facts.done.ok:
        return Outcome.OK, None
    error = error_info(facts.done.error or {})
    # Only a run that had a profile, and had done nothing yet, can have been refused by it.
    if error.findings and facts.lint != "off" and not usage.calls and not facts.has_value:
        return Outcome.DENIED, error
    if facts.refused:
        return Outcome.CALL_LIMIT, limited(error, "tool_calls", limits.tool_calls, usage.calls + facts.refused)
    if sample.refused_processes or sample.peak_processes >= limits.processes > 1:
        return Outcome.PROCESS_LIMIT, limited(error, "processes", limits.processes, usage.peak_processes)
    if error.type == "MemoryError":
        # The one limit a script can claim: the kernel refuses an absurd allocation without leaving a trace.
        return Outcome.MEMORY_LIMIT, limited(error, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    return Outcome.ERROR, error


def _enforced_limit(facts: RunEnd) -> LimitExceeded | None:
    """A limit that the kernel enforced before the watch could see it."""
    limits, usage, sample, done = facts.limits, facts.usage, facts.sample, facts.done
    if sample.memory_kills and (done is None or not done.ok):
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    if sample.peak_memory_bytes > limits.memory_bytes:
        # Without a cgroup nothing holds it below; it ended before the watch came round.
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    if done is None and usage.cpu_s >= limits.cpu_s:
        return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, usage.cpu_s)
    if done is None and sample.refused_processes:
        return LimitExceeded(Outcome.PROCESS_LIMIT, "processes", limits.processes, usage.peak_processes)
    return None


def passed_limit(limits: Limits, sample: Sample) -> LimitExceeded | None:
    """The limit that a running sandbox has passed by the last measurement."""
    if sample.cpu_s > limits.cpu_s:
        return LimitExceeded(Outcome.CPU_LIMIT, "cpu_s", limits.cpu_s, sample.cpu_s)
    if sample.memory_kills or sample.peak_memory_bytes > limits.memory_bytes:
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, sample.peak_memory_bytes)
    if sample.processes > limits.processes:
        return LimitExceeded(Outcome.PROCESS_LIMIT, "processes", limits.processes, sample.processes)
    return None


def breach_error(breach: LimitExceeded) -> ErrorInfo:
    """A breach in words a model can act on."""
    kind, text = BREACHES[breach.outcome]
    message = text.format(limit=breach.value, used=breach.used)
    return ErrorInfo(kind, message, limit=breach.limit, limit_value=breach.value, used=breach.used)


def limited(error: ErrorInfo, limit: str, value: float, used: float) -> ErrorInfo:
    """The script's own error, with the limit that caused it; MemoryError has no words of its own."""
    message = error.message or f"out of memory: an allocation was refused, limit {value:.0f} bytes"
    return replace(error, message=message, limit=limit, limit_value=value, used=used)


def killed(end: Exit) -> ErrorInfo:
    if end.signal is not None:
        return ErrorInfo("Killed", f"the sandbox died of signal {end.signal}", signal=end.signal)
    return ErrorInfo("Killed", f"the sandbox ended without a word (exit code {end.code})", exit_code=end.code)


def error_info(claimed: Mapping[str, Any]) -> ErrorInfo:
    """The guest's description of its exception; every field is checked, because the guest is not trusted."""

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


def later(before: Sample, after: Sample) -> Sample:
    """The larger of two measurements, field by field: a dead sandbox measures as nothing."""
    return Sample(
        max(before.cpu_s, after.cpu_s),
        max(before.peak_memory_bytes, after.peak_memory_bytes),
        max(before.processes, after.processes),
        max(before.peak_processes, after.peak_processes),
        max(before.memory_kills, after.memory_kills),
        max(before.refused_processes, after.refused_processes),
    )


def _finding(claimed: Any) -> dict[str, Any]:
    """One lint finding, held to its four fields and their sizes."""
    given = claimed if isinstance(claimed, dict) else {}
    numbers = {key: given.get(key) for key in ("line", "column") if type(given.get(key)) is int}
    texts = {key: value[:500] for key in ("rule", "message") if isinstance(value := given.get(key), str)}
    return numbers | texts
