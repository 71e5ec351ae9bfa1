"""Compute a run's outcome and error from what the host observed. Pure functions over frozen data.

What the host observed comes before what the guest said. The guest only describes its own exception, and every field of
that description is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolcell.config import Limits
from toolcell.results import ErrorFrame, ErrorInfo, Outcome, Usage
from toolcell.sandbox.backend import BELOW, Exit, LimitExceeded, Sample
from toolcell.support.text import as_one_line, for_terminal
from toolcell_bridge.guest.scripts import NOT_KEPT
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.messages import Done


@frozen
class ProtocolViolation:
    """The guest broke the bridge protocol."""

    problem: str


@frozen
class Aborted:
    """The caller cancelled the run, or a tool raised `ToolAbort`."""

    why: str
    outcome: Outcome = Outcome.CANCELLED


@frozen
class Failed:
    """Something on the host raised: a callback, a measurement, the audit log. The run has no result then."""

    error: BaseException


StopReason = Done | LimitExceeded | ProtocolViolation | Aborted | Failed
"""Why a run stopped. The first reason counts. All but `Done` end the script; see `can_go_on_after` for those that the
sandbox of a session survives."""

INTERRUPTED = frozenset({Outcome.TIMEOUT, Outcome.CPU_LIMIT, Outcome.OUTPUT_LIMIT})
"""Limits past which a script of a session is interrupted. A sandbox past any other one has no place for what follows,
or keeps the host busy."""


def can_go_on_after(reason: StopReason) -> bool:
    """Whether a session may go on when a script of it stopped for this reason, provided that it lets itself be
    interrupted."""
    return type(reason) is Aborted or (type(reason) is LimitExceeded and reason.outcome in INTERRUPTED)


LIMIT_ERRORS: Mapping[Outcome, tuple[str, str]] = {
    Outcome.TIMEOUT: ("Timeout", "execution timed out after {limit:g} s"),
    Outcome.CPU_LIMIT: ("CpuLimit", "used {used:.2f} s of CPU time, limit {limit:g} s"),
    Outcome.MEMORY_LIMIT: ("MemoryLimit", "used {used:.0f} bytes of memory, limit {limit:.0f} bytes"),
    Outcome.PROCESS_LIMIT: ("ProcessLimit", "tried to have more than {limit:.0f} processes and threads"),
    Outcome.OUTPUT_LIMIT: ("OutputLimit", "printed {used:.0f} bytes, limit {limit:.0f} bytes"),
    Outcome.HOST_WORK_LIMIT: (
        "HostWorkLimit",
        "made the host do {used:.0f} units of work, limit {limit:.0f}; send less at a time, or raise host_work",
    ),
    Outcome.CALL_LIMIT: ("CallLimit", "made {used:.0f} tool calls, limit {limit:.0f}"),
}
"""Type and message of the error for each limit that the host enforces."""


FRAMES, LOCALS = 10, 20
"""Frames of a failed script, and variables of each, that are kept of what the guest sends."""

LEFTOVERS, LEFTOVER_CHARS = 20, 120
"""Threads and processes that are named, and characters of each name."""

FULL: Mapping[str, str] = {"limit inodes": "inodes", "[Errno 28]": "disk_bytes", "[Errno 24]": "open_files"}
"""Words of an OSError to the limit that it met, the first that fits."""

HINTS: Mapping[int, str] = {
    7: " (SIGBUS): memory of a file or of SharedMemory was used that its file system has no room for; raise disk_bytes",
}
"""What a signal mostly means."""


@frozen
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
    printed_bytes: int = 0
    """To both streams, kept or not."""
    refused: int = 0
    """Tool calls past `tool_calls`; `usage` does not count them."""
    line: int | None = None
    """Line of the script that its main thread was at when its time was over, as the guest claims."""
    waits_for: tuple[str, ...] = ()
    """Threads and processes that the script waited for when it had come to its end, as the guest claims."""


def outcome_of(end: RunEnd) -> tuple[Outcome, ErrorInfo | None]:
    """Compute the outcome of a run and its error."""
    match end.stopped:
        case Aborted(why, outcome):
            return outcome, ErrorInfo(outcome.capitalize(), why, end.line)
        case ProtocolViolation(problem):
            message = f"the sandbox broke the bridge protocol and was killed: {problem}"
            return Outcome.PROTOCOL_ERROR, ErrorInfo("ProtocolError", message)
        case LimitExceeded() as exceeded:
            return _limit_outcome(exceeded, end)
    done = end.stopped if isinstance(end.stopped, Done) else None
    if (enforced := _enforced_limit(end, done)) is not None:
        return _limit_outcome(enforced, end)
    if done is None:
        return (Outcome.LOST if end.exit.is_lost else Outcome.KILLED), _killed(end.exit)
    if done.ok:
        return Outcome.OK, None
    return _script_failure(end, error_info(done.error or {}))


def warnings_of(end: RunEnd) -> tuple[str, ...]:
    """Return which limits a script met that came to its end: each refused it something, and it went on."""
    limits, said = end.limits, list[str]()
    if _had_all_processes(end):
        said.append(
            f"reached the limit processes={limits.processes}; what threads or processes that did not start were to do "
            "may be missing"
        )
    if end.sample.memory_kills:
        said.append(f"reached the limit memory_bytes={limits.memory_bytes}; the kernel killed a process for it")
    if end.refused:
        said.append(f"{end.refused} tool calls past the limit tool_calls={limits.tool_calls} were refused")
    if isinstance(end.stopped, Done) and end.stopped.error is not None and not end.has_value:
        said.append(NOT_KEPT + error_info(end.stopped.error).message)
    return tuple(said)


def _had_all_processes(end: RunEnd) -> bool:
    """Whether it was refused a process or a thread. Where nobody counts that: whether it had as many as it may."""
    sample, most = end.sample, end.limits.processes
    return bool(sample.refused_processes) or sample.peak_processes >= most > 1


def _limit_outcome(exceeded: LimitExceeded, end: RunEnd) -> tuple[Outcome, ErrorInfo]:
    used = exceeded.used
    if exceeded.outcome is Outcome.MEMORY_LIMIT:  # memory may have grown between the measurement and the kill
        used = max(used, end.usage.peak_memory_bytes)
    kind, text = LIMIT_ERRORS[exceeded.outcome]
    message = text.format(limit=exceeded.value, used=used)
    if exceeded.outcome is Outcome.MEMORY_LIMIT and used < BELOW * exceeded.value:
        message = (
            f"the kernel killed it for memory at {used:.0f} bytes, although its limit is {exceeded.value:.0f}: the "
            "memory of the host's own container, service or machine is used up"
        )
    if end.waits_for and exceeded.outcome in (Outcome.TIMEOUT, Outcome.CPU_LIMIT):
        message += f": the script had come to its end, and waited for {', '.join(end.waits_for)}"
    found = ErrorInfo(kind, message, end.line, limit=exceeded.limit, limit_value=exceeded.value, used=used)
    return exceeded.outcome, found


def _script_failure(end: RunEnd, error: ErrorInfo) -> tuple[Outcome, ErrorInfo]:
    """Classify a script that says it failed: as refused by lint, as stopped by a limit, or as an ordinary error."""
    limits, usage = end.limits, end.usage
    # Only a run with a lint profile that had done nothing yet can have been refused by lint.
    if error.findings and end.lint != "off" and not usage.calls and not end.has_value:
        return Outcome.DENIED, error
    if end.refused:
        return Outcome.CALL_LIMIT, _limited(error, "tool_calls", limits.tool_calls, usage.calls + end.refused)
    if _had_all_processes(end):
        return Outcome.PROCESS_LIMIT, _limited(error, "processes", limits.processes, usage.peak_processes)
    if error.type == "MemoryError":
        # The one limit a script can claim: the kernel refuses an absurd allocation without leaving a trace.
        return Outcome.MEMORY_LIMIT, _limited(error, "memory_bytes", limits.memory_bytes, usage.peak_memory_bytes)
    full = next((limit for words, limit in FULL.items() if words in error.message), "")
    if error.type == "OSError" and full:
        value, said = getattr(limits, full), f"the run's limit {full}"
        known = said in error.message  # the guest knows which limit, and not how much it is
        named = error.message.replace(said, f"{said}={value}") if known else f"{error.message} (limit {full}: {value})"
        return Outcome.ERROR, replace(error, message=named, limit=full, limit_value=value)
    return Outcome.ERROR, error


def _enforced_limit(end: RunEnd, done: Done | None) -> LimitExceeded | None:
    """Find a limit that the kernel enforced before the monitor measured the sandbox, or that its end exceeded."""
    limits, usage, sample = end.limits, end.usage, end.sample
    if end.printed_bytes > limits.output_flood_bytes:
        return LimitExceeded(Outcome.OUTPUT_LIMIT, "output_flood_bytes", limits.output_flood_bytes, end.printed_bytes)
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
    if not sample.memory_kills and sample.processes > limits.processes:  # each with memory of its own
        return LimitExceeded(Outcome.PROCESS_LIMIT, "processes", limits.processes, sample.processes)
    if sample.memory_kills or sample.peak_memory_bytes > limits.memory_bytes:
        return LimitExceeded(Outcome.MEMORY_LIMIT, "memory_bytes", limits.memory_bytes, sample.peak_memory_bytes)
    return None


def _limited(error: ErrorInfo, limit: str, value: float, used: float) -> ErrorInfo:
    """Add the limit that caused it to the script's own error. A MemoryError comes without a message."""
    message = error.message or f"out of memory: an allocation was refused, limit {value:.0f} bytes"
    return replace(error, message=message, limit=limit, limit_value=value, used=used)


def _killed(exit: Exit) -> ErrorInfo:
    if exit.is_lost:
        return ErrorInfo("Lost", f"the sandbox was lost: {exit.problem}")
    if exit.problem:
        return ErrorInfo("Killed", f"the sandbox was killed: {exit.problem}", signal=exit.signal)
    if exit.signal is not None:
        hint = HINTS.get(exit.signal, "")
        return ErrorInfo("Killed", f"the sandbox died of signal {exit.signal}{hint}", signal=exit.signal)
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
    return ErrorInfo(
        as_one_line(text("type", 200)) or "Exception",
        text("message", 16_384),
        number("line"),
        number("column"),
        text("traceback", 65_536),
        exit_code=number("exit_code"),
        findings=tuple(map(_finding, found[:50])) if isinstance(found, list) else (),
        frames=tuple(map(_frame, frames[:FRAMES])) if isinstance(frames := claimed.get("frames"), list) else (),
    )


def leftover_names(claimed: Sequence[str]) -> tuple[str, ...]:
    """Return the names of threads and processes that the guest claims, cut as an honest guest cuts them."""
    return tuple(for_terminal(name[:LEFTOVER_CHARS]) for name in claimed[:LEFTOVERS])


def highest(before: Sample, after: Sample) -> Sample:
    """Return the larger of two measurements, field by field: a dead sandbox measures as zero."""
    return Sample(
        max(before.cpu_s, after.cpu_s),
        max(before.peak_memory_bytes, after.peak_memory_bytes),
        processes=max(before.processes, after.processes),
        peak_processes=max(before.peak_processes, after.peak_processes),
        memory_kills=max(before.memory_kills, after.memory_kills),
        refused_processes=max(before.refused_processes, after.refused_processes),
    )


def _frame(claimed: Any) -> ErrorFrame:
    """Read one frame of the script: each field checked and cut to size."""
    given = claimed if isinstance(claimed, dict) else {}
    line, function, values = given.get("line"), given.get("function"), given.get("locals")
    pairs = itertools.islice(values.items() if isinstance(values, dict) else (), LOCALS)
    texts = {name[:100]: value[:500] for name, value in pairs if isinstance(value, str)}
    return ErrorFrame(line if type(line) is int else 0, function[:200] if isinstance(function, str) else "", texts)


def _finding(claimed: Any) -> dict[str, Any]:
    """Read one lint finding: its four fields, each checked and cut to size."""
    given = claimed if isinstance(claimed, dict) else {}
    numbers = {key: given.get(key) for key in ("line", "column") if type(given.get(key)) is int}
    return numbers | {key: value[:500] for key in ("rule", "message") if isinstance(value := given.get(key), str)}
