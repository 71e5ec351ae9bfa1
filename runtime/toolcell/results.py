"""`ExecutionResult`: what a run leaves behind, as frozen data.

Knows no sandbox, no registry and no wire; everything else may import it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


class Outcome(enum.StrEnum):
    """How a run ended. Each value means exactly one thing, and all but the first two are what the host observed."""

    OK = "ok"
    """The script reached its end."""
    ERROR = "error"
    """The script raised an exception, called `sys.exit(n)` with n != 0, or did not compile."""
    TIMEOUT = "timeout"
    """`wall_s` passed; the sandbox was killed."""
    CPU_LIMIT = "cpu_limit"
    """The process tree used `cpu_s`; the sandbox was killed."""
    MEMORY_LIMIT = "memory_limit"
    """The process tree reached `memory_bytes`, or an allocation past it was refused and ended the script."""
    OUTPUT_LIMIT = "output_limit"
    """The script printed more than `output_flood_bytes`; the sandbox was killed."""
    PROCESS_LIMIT = "process_limit"
    """A process or thread past `processes` was refused, and the run did not end well."""
    CALL_LIMIT = "call_limit"
    """A tool call past `tool_calls` was refused, and that ended the script."""
    KILLED = "killed"
    """The sandbox died by itself: a signal, a crash, a forbidden system call ABI."""
    PROTOCOL_ERROR = "protocol_error"
    """The guest broke the bridge protocol; the sandbox was killed and nothing it said later was believed."""
    DENIED = "denied"
    """The lint profile refused the script before it ran."""
    CANCELLED = "cancelled"
    """The caller cancelled the run, or a tool raised `ToolAbort`."""
    UNAVAILABLE = "unavailable"
    """No sandbox could be had; no code ran."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What went wrong, for a model or a person to act on."""

    type: str
    """Exception class name, or the limit's name for what the host ended."""
    message: str
    line: int | None = None
    """1-based line of the script, its own numbering."""
    column: int | None = None
    traceback: str = ""
    """The script's own frames with their source lines; none of the guest's or of libraries."""
    limit: str | None = None
    """Field of `Limits` that was hit."""
    limit_value: float | None = None
    used: float | None = None
    """What had been used of the limit, in its unit."""
    signal: int | None = None
    exit_code: int | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    """Lint findings: line, column, rule, message."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Text that the script wrote to one stream without a break."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Logs:
    """What the script printed. `text` interleaves both streams in the order they were written."""

    entries: tuple[LogEntry, ...] = ()
    stdout_bytes: int = 0
    """Written in all, kept or not."""
    stderr_bytes: int = 0
    truncated: bool = False

    @property
    def text(self) -> str:
        """Text of both streams, in order."""
        return "".join(entry.text for entry in self.entries)

    @property
    def stdout(self) -> str:
        """What was written to stdout."""
        return "".join(entry.text for entry in self.entries if entry.stream == "stdout")

    @property
    def stderr(self) -> str:
        """What was written to stderr."""
        return "".join(entry.text for entry in self.entries if entry.stream == "stderr")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file the script returned through `set_result(..., files=[...])`."""

    name: str
    """Path relative to the workspace, with forward slashes."""
    media_type: str
    size: int
    data: bytes | None
    """None when it was not sent; `problem` says why."""
    sha256: str | None = None
    problem: str | None = None
    """'missing', 'too large (N > M bytes)', 'not a regular file', 'outside the workspace', ..."""


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """One tool call a run made, as the host saw it."""

    id: int
    name: str
    args: Mapping[str, Any]
    status: str
    """'ok', or the status of the tool's result: error, blocked, timeout, cancelled, pending."""
    error_code: str | None = None
    message: str | None = None
    started_s: float = 0.0
    """Seconds after the run started."""
    duration_s: float = 0.0
    line: int | None = None
    """Line of the script that called, as the guest claims."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run used, measured from outside the sandbox."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    peak_processes: int = 0
    calls: int = 0
    sent_bytes: int = 0
    """Bridge bytes, host to guest."""
    received_bytes: int = 0
    """Bridge bytes, guest to host."""
    start_s: float = 0.0
    """Time the run waited for its sandbox."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation that was live while the script ran."""

    backend: str
    layers: Mapping[str, str] = field(default_factory=dict)
    """Layer name to detail, live layers only: {'landlock': 'ABI 7', 'cgroup': 'v1 memory+pids', ...}."""
    lint: str = "off"


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """Everything one run left behind."""

    run_id: str
    outcome: Outcome
    value: Any = None
    """What `set_result` was given last, or the value of a trailing expression."""
    has_value: bool = False
    """True after `set_result(None)`, False without a result."""
    logs: Logs = field(default_factory=Logs)
    files: tuple[OutputFile, ...] = ()
    error: ErrorInfo | None = None
    calls: tuple[ToolCallRecord, ...] = ()
    usage: Usage = field(default_factory=Usage)
    isolation: Isolation = field(default_factory=lambda: Isolation("none"))

    @property
    def ok(self) -> bool:
        """True when the script reached its end."""
        return self.outcome is Outcome.OK

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: bytes become sizes, enums become strings."""
        plain = asdict(self) | {"outcome": str(self.outcome)}
        plain["logs"] = {"stdout": self.logs.stdout, "stderr": self.logs.stderr, "truncated": self.logs.truncated}
        for entry in plain["files"]:
            entry.pop("data")
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text; values JSON does not have are written as their `str`."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, default=str)
