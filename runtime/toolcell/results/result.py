"""`ExecutionResult`: what a run leaves behind, as frozen data. Everything else may import it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, Final, Literal

from toolcell.results.effects import Effect, Preflight, shown_effects
from toolcell.support.call_text import call_text
from toolcell.support.exact_json import json_text
from toolcell.support.text import SHORT, as_one_line, clean, counted, shown_findings
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import Array, Table


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
    HOST_WORK_LIMIT = "host_work_limit"
    """What the script sent made more work for the host than `host_work`; the sandbox was killed."""
    KILLED = "killed"
    """The sandbox died by itself: a signal, a crash, a forbidden system call ABI."""
    LOST = "lost"
    """What the sandbox depended on went away: its zygote, container or node. `calls` says which calls had begun."""
    PROTOCOL_ERROR = "protocol_error"
    """The guest broke the bridge protocol; the sandbox was killed and nothing it said later was believed."""
    DENIED = "denied"
    """The lint profile, `preflight` or `check_types` refused the script before it ran."""
    CANCELLED = "cancelled"
    """The caller cancelled the run, or a tool raised `ToolAbort`."""
    UNAVAILABLE = "unavailable"
    """No sandbox could be had; no code ran."""
    SUSPENDED = "suspended"
    """A call needs a decision. `suspension` has the calls and the token that carries the run on."""
    DIVERGED = "diverged"
    """A run that was carried on did not repeat what it had done. `divergence` says where; nothing was made twice."""


LIMIT_OUTCOMES: Final = (
    Outcome.TIMEOUT,
    Outcome.CPU_LIMIT,
    Outcome.MEMORY_LIMIT,
    Outcome.OUTPUT_LIMIT,
    Outcome.PROCESS_LIMIT,
    Outcome.CALL_LIMIT,
    Outcome.HOST_WORK_LIMIT,
)
"""A limit of the run ended it."""

SCRIPT_OUTCOMES: Final = frozenset({Outcome.OK, Outcome.ERROR, Outcome.DENIED, Outcome.CALL_LIMIT})
"""The script alone decided: another run of it ends in the same way, at the same point."""

HOST_OUTCOMES: Final = frozenset({*LIMIT_OUTCOMES, Outcome.KILLED, Outcome.LOST, Outcome.PROTOCOL_ERROR}) - {
    Outcome.CALL_LIMIT
}
"""The host ended the run. Another run of the script may be ended at another point. The remaining outcomes come from
outside: from the caller, a person or the machine."""


@frozen
class ErrorFrame:
    """One frame of the script when it failed, as the guest claims."""

    line: int
    function: str
    locals: Mapping[str, str]
    """Variables and short texts of their values; secrets that the run knows are taken out."""


@frozen
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
    frames: tuple[ErrorFrame, ...] = ()
    """The script's innermost frames, outermost first. Not part of the audit log."""


@frozen
class LogEntry:
    """Text that the script wrote to one stream without a break."""

    stream: Literal["stdout", "stderr"]
    text: str


@frozen
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


@frozen
class OutputFile:
    """A file the script returned through `set_result(..., files=[...])`."""

    name: str
    """Path relative to the workspace, with forward slashes."""
    media_type: str
    size: int
    data: bytes | None = field(repr=False)
    """None when it was not sent; `problem` says why."""
    sha256: str | None = None
    problem: str | None = None
    """'missing', 'too large (N > M bytes)', 'not a regular file', 'outside the workspace', ..."""


@frozen
class ToolCallRecord:
    """One tool call a run made, as the host saw it."""

    id: str
    """`call_1` and so on, in the order in which the script made them; also in events, and of a call that waits."""
    name: str
    args: Mapping[str, Any]
    status: str
    """'ok', or its status: error, blocked, timeout, cancelled, pending; 'collected' by a dry run."""
    error_code: str | None = None
    message: str | None = None
    started_s: float = 0.0
    """Seconds after the run started."""
    duration_s: float = 0.0
    line: int | None = None
    """Line of the script that called, as the guest claims."""


@frozen
class PendingCall:
    """A tool call that waits for a decision."""

    id: str
    """What a decision refers to."""
    tool: str
    args: Mapping[str, Any]
    """As the tool will receive them: checked, and with defaults."""
    line: int | None
    digest: str
    """Sha256 of tool and arguments: what was approved is what runs."""
    reason: str = "needs approval"

    def __str__(self) -> str:
        line = f"  (line {self.line})" if self.line is not None else ""
        return f"{as_one_line(self.id)}: {call_text(self.tool, self.args)}{line}  {as_one_line(self.reason)}"


@frozen
class Suspension:
    """What a suspended run waits for."""

    run_id: str
    """Name of the run's journal."""
    calls: tuple[PendingCall, ...]
    expires: float
    """Seconds since the epoch."""
    token: str = field(repr=False)
    preflight: Preflight | None = field(default=None, compare=False)
    """Preflight of a run with `preflight=True`: the calls that are written in its script."""

    def to_json(self) -> str:
        """Return the signed token for `Runtime.resume`. It holds the calls, and nothing else of the run."""
        return self.token


@frozen
class Divergence:
    """Where a run first differed from the record of an earlier run of the same script."""

    MISSING_CALL: ClassVar[str] = "missing_call"
    """Kind of a divergence whose line is in the recorded script: the new script makes no such call."""

    kind: str
    """call, extra_call, missing_call, no_answer, outcome, error, value, stdout, stderr, files."""
    message: str
    index: int | None = None
    """Number of the call, counting the script's own calls from 1."""
    line: int | None = None
    source_line: str = ""
    expected: Any = None
    got: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@frozen
class RepairedCall:
    """One call of a repaired script, or of the run that it repairs."""

    tool: str
    args: Mapping[str, Any]
    status: str
    """Status of the call in the earlier run: answered, failed or in doubt."""


@frozen
class Repair:
    """What a repaired script reused of the run that it repairs."""

    repaired: str
    """Id of that run."""
    reused: tuple[RepairedCall, ...] = ()
    """Answered from the journal; the tool did not run."""
    new: tuple[RepairedCall, ...] = ()
    """Made now."""
    orphaned: tuple[RepairedCall, ...] = ()
    """Writes of the earlier run that the repaired script does not ask for: they were made, and stay made."""


@frozen
class AbandonedThread:
    """A thread of a synchronous tool that runs on after its call timed out or was cancelled."""

    tool: str
    call_id: str
    run_id: str
    since: float
    """When the call was given up, in seconds since the epoch."""


@frozen
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
    host_work: int = 0
    """Work that the run made for the host with what it sent, in the unit of `Limits.host_work`."""


@frozen
class Isolation:
    """The isolation that was live while the script ran."""

    backend: str
    layers: Mapping[str, str] = field(default_factory=dict)
    """Layer name to detail, live layers only: {'landlock': 'ABI 7', 'cgroup': 'v1 memory+pids', ...}."""
    lint: str = "off"
    profile: str = ""
    """Which profile of `Policy` it was, `full` or `container`; empty for other backends than the process backend."""
    missing: tuple[str, ...] = ()
    """Layers of the profile `full` that were not live."""


@frozen
class SessionFile:
    """A file in the workspace of a session, as the guest says."""

    name: str
    size: int


@frozen
class SessionReport:
    """A run's place in its session, and what became of the sandbox."""

    id: str
    script: int
    """Which script of the session it was, counting from 1."""
    began: Literal["new", "live", "value", "journal", "empty"]
    """From what the script began: the first one; the state that the scripts before had left; the same, kept by value
    and brought back in another sandbox; the same, rebuilt by running the scripts again; nothing, although there were
    scripts before."""
    lost: str = ""
    """Why the session lost its sandbox in this run; empty when the state is kept."""
    ended: tuple[str, ...] = ()
    """Threads and processes that still ran after the script and were ended."""
    forgotten: tuple[str, ...] = ()
    """What could not be brought back by value before this script: each name, and why (an open file, a generator)."""


@frozen
class ExecutionResult:
    """The result of one run. `print` shows it in a few lines; long values are cut."""

    run_id: str
    outcome: Outcome
    value: Any = None
    """What `set_result` was given last, or the value of a trailing expression."""
    has_value: bool = False
    """True after `set_result(None)`, False without a result."""
    logs: Logs = field(default_factory=Logs)
    files: tuple[OutputFile, ...] = ()
    error: ErrorInfo | None = None
    warnings: tuple[str, ...] = ()
    """Limits that a script with outcome `ok` met all the same: a library may have caught the error, and left things
    out; and why the value of its last expression, which was too large, is not the result."""
    calls: tuple[ToolCallRecord, ...] = ()
    abandoned: tuple[AbandonedThread, ...] = ()
    """Threads of tools that still ran when the run was over, though their calls had been given up."""
    usage: Usage = field(default_factory=Usage)
    isolation: Isolation = field(default_factory=lambda: Isolation("none"))
    suspension: Suspension | None = None
    """Suspension of a suspended run."""
    divergence: Divergence | None = None
    """Divergence of a run that diverged."""
    repair: Repair | None = None
    """Repair of a run with `repairs=`."""
    preflight: Preflight | None = None
    """Preflight of a run with `preflight=True`."""
    type_findings: tuple[Mapping[str, Any], ...] = ()
    """Findings of a run whose types were checked: line, column, rule, message."""
    effects: tuple[Effect, ...] = ()
    """Effects of a dry run: the calls that write, in order. `Runtime.commit` makes them."""
    draft_id: str = field(default="", repr=False)
    """Name of the draft, for `Runtime.commit`; empty when this was not a dry run."""
    draft_digest: str = field(default="", repr=False)
    """Sha256 of `effects`. `Runtime.commit(result, approve=result.draft_digest)` makes exactly these, however long they
    are."""
    session: SessionReport | None = None
    """Report of a script of a session."""
    journal_id: str = field(default="", repr=False)
    """Name of the run's journal."""

    @property
    def ok(self) -> bool:
        """True when the script reached its end."""
        return self.outcome is Outcome.OK

    def __repr__(self) -> str:
        given = {"value": self.value} if self.has_value else {}
        told = {"logs": self.logs.text, "files": self.files, "error": self.error, "calls": self.calls}
        parts = [f", {name}={SHORT.repr(each)}" for name, each in (given | told).items() if each or name in given]
        head = f"ExecutionResult({self.run_id!r}, {str(self.outcome)!r}{''.join(parts)}"
        return f"{head}, isolation={self.isolation.backend!r})"

    def __str__(self) -> str:
        usage = self.usage
        lines = [f"{self.outcome} in {usage.wall_s:.3g} s, {counted(len(self.calls), 'tool call')}, run {self.run_id}"]
        if self.has_value:
            is_table = isinstance(self.value, Array | Table)
            lines.append(f"value: {self.value if is_table else SHORT.repr(self.value)}")
        if self.logs.entries:
            lines.append(f"logs:  {SHORT.repr(self.logs.text)}")
        lines += [
            f"file:  {each.name} ({each.media_type}, {each.problem or f'{each.size} bytes'})" for each in self.files
        ]
        if self.error is not None:
            where = f"line {self.error.line}: " if self.error.line else ""
            lines.append(f"error: {where}{self.error.type}: {self.error.message}".replace("\n", "\n       "))
        lines += [f"warning: {each}" for each in self.warnings]
        if self.type_findings and self.outcome is not Outcome.DENIED:
            lines.append(f"types: {SHORT.repr(shown_findings(self.type_findings))}")
        if self.draft_id:
            lines.append(shown_effects(self.effects, is_whole=self.ok))
        return "\n".join(map(clean, lines))

    def _repr_html_(self) -> str:
        """What a notebook shows. All of it is escaped; nothing that a script printed is HTML."""
        from toolcell.results.html import result_html  # what only notebooks need

        return result_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields as dicts and lists. Bytes, arrays and tables stay what they are; `to_json` writes them as text."""
        plain = _fields_of(self)
        plain["outcome"] = str(self.outcome)
        plain["logs"] = {"stdout": self.logs.stdout, "stderr": self.logs.stderr, "truncated": self.logs.truncated}
        for name in _RECORDS:
            plain[name] = None if plain[name] is None else _fields_of(plain[name])
        if self.suspension is not None:
            plain["suspension"].pop("preflight")  # the same as that of the result
        for name, parts in _PARTS.items():
            for part in parts if plain[name] is not None else ():
                plain[name][part] = tuple(map(_fields_of, plain[name][part]))
        for name in ("files", "calls", "abandoned", "effects"):
            plain[name] = tuple(map(_fields_of, plain[name]))
        for entry in plain["files"]:
            entry.pop("data")
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as strict JSON text; a value that JSON does not have, NaN included, is written as its `str`.

        The run is over, so this is the work of whoever calls it: for a value of `result_bytes` some tenths of a second,
        in which an event loop waits. A server calls it in a thread.
        """
        return json_text(self.to_dict(), indent=indent)


_RECORDS = ("error", "usage", "isolation", "suspension", "divergence", "repair", "session", "preflight")
_PARTS = {
    "error": ("frames",),
    "suspension": ("calls",),
    "repair": ("reused", "new", "orphaned"),
    "preflight": ("calls",),
}


def _fields_of(record: Any) -> dict[str, Any]:
    """Return a record as a dict. What a guest sent is not copied: that takes as long as the guest likes."""
    return {each.name: getattr(record, each.name) for each in fields(record)}
