"""How a run ended, in words a model can act on: pure functions from what was seen to what is reported.

What the host saw comes before what the guest said; the guest's own words only describe its exception, and every field
of them is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolcell.results import ErrorInfo, Outcome
from toolcell.sandbox.backend import Breach, Exit, Sample

BREACHES: Mapping[Outcome, tuple[str, str]] = {
    Outcome.TIMEOUT: ("Timeout", "execution timed out after {limit:g} s"),
    Outcome.CPU_LIMIT: ("CpuLimit", "used {used:.2f} s of CPU time, limit {limit:g} s"),
    Outcome.MEMORY_LIMIT: ("MemoryLimit", "used {used:.0f} bytes of memory, limit {limit:.0f} bytes"),
    Outcome.PROCESS_LIMIT: ("ProcessLimit", "tried to have more than {limit:.0f} processes and threads"),
    Outcome.OUTPUT_LIMIT: ("OutputLimit", "printed {used:.0f} bytes, limit {limit:.0f} bytes"),
    Outcome.CALL_LIMIT: ("CallLimit", "made {used:.0f} tool calls, limit {limit:.0f}"),
}


def breach_error(breach: Breach) -> ErrorInfo:
    """A breach in words a model can act on."""
    kind, text = BREACHES[breach.outcome]
    message = text.format(limit=breach.value, used=breach.used)
    return ErrorInfo(kind, message, limit=breach.limit, limit_value=breach.value, used=breach.used)


def limited(error: ErrorInfo, limit: str, value: float, used: float) -> ErrorInfo:
    """The script's own error, with the limit that caused it; MemoryError has no words of its own."""
    message = error.message or f"out of memory: limit {value:.0f} bytes"
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
