"""What a run returns, as frozen data: result, calls, files, usage, effects, reports. Everything else may import it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from typing import Any, ClassVar, Final, Literal

from toolcell.support.call_text import MAX_ARG_CHARS, arguments_text, call_text
from toolcell.support.exact_json import json_text
from toolcell.support.packing import value_digest
from toolcell.support.text import SHORT, as_one_line, clean, counted, shown_findings
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import Array, Table

__all__ = [
    "LIMIT_OUTCOMES", "AbandonedThread", "Array", "CommitResult", "Divergence",
    "Effect", "EffectResult", "ErrorFrame", "ErrorInfo", "ExecutionResult", "Isolation", "LogEntry", "Logs", "Outcome",
    "OutputFile", "PendingCall", "PlannedCall", "Preflight", "Repair", "RepairedCall", "RevertResult",
    "RevertedCall", "SessionFile", "SessionReport", "Suspension", "Table", "ToolCallRecord", "Usage",
]  # fmt: skip

MAX_LISTED: Final = 50
"""Effects that a text lists."""


@frozen
class Effect:
    """One call of a tool that writes, collected by a dry run. It was not made."""

    id: str
    """`effect-1` and so on, in the order in which they are made."""
    tool: str
    args: Mapping[str, Any]
    """What the tool will receive. {"$result_of": "effect-1...."} stands for the result of another effect."""
    line: int | None = None
    """Line of the script, as the guest claims."""
    depends_on: tuple[str, ...] = ()
    """Effects whose results are among the arguments."""
    reason: str = ""
    """Why a person has to approve it: `needs approval: it sends to "public", and this run has read "private"`."""
    draft_id: str = field(default="", repr=False)
    """Ends the references to results of this draft: {"$result_of": "effect-1.<draft_id>"}. Other dicts are data."""

    @property
    def is_listed_whole(self) -> bool:
        """False when its text is cut: not all of `args` can be read in it."""
        return arguments_text(self.args, results=self._results()).is_whole

    def _results(self) -> dict[str, str]:
        return {f"{each}.{self.draft_id}": each for each in self.depends_on}

    def __str__(self) -> str:
        line = f"  (line {self.line})" if self.line is not None else ""
        reason = f"  {as_one_line(self.reason)}" if self.reason else ""
        return f"{as_one_line(self.id)}: {call_text(self.tool, self.args, self._results())}{line}{reason}"


EffectStatus = Literal["made", "failed", "refused", "not made", "not approved"]


@frozen
class EffectResult:
    """The outcome of one effect of a draft."""

    id: str
    tool: str
    args: Mapping[str, Any]
    """With results in place of what stood for them."""
    status: EffectStatus
    """`failed`: the tool ran, and may have done a part of its work. `refused`: it did not run. `not made`: an effect
    before it failed or was refused."""
    value: Any = None
    """What the tool returned."""
    error: str = ""

    def __str__(self) -> str:
        said = f": {as_one_line(self.error)}" if self.error else ""
        return f"{self.status}  {as_one_line(self.id)}: {call_text(self.tool, self.args)}{said}"


@frozen
class CommitResult:
    """The result of `Runtime.commit`."""

    run_id: str
    """Id of the calls of the commit, in events and in the audit log."""
    effects: tuple[EffectResult, ...]
    """Every effect of the draft, in order."""
    value: Any = None
    """The script's result, with the results of what was made."""
    has_value: bool = False
    journal_id: str = field(default="", repr=False)
    """Name of what `Runtime.revert` knows of the commit."""

    @property
    def ok(self) -> bool:
        """True when every approved effect was made."""
        return all(each.status in ("made", "not approved") for each in self.effects)

    @property
    def made(self) -> tuple[EffectResult, ...]:
        """The effects that were made."""
        return tuple(each for each in self.effects if each.status == "made")

    @property
    def failed(self) -> EffectResult | None:
        """The effect at which the commit stopped."""
        return next((each for each in self.effects if each.status in ("failed", "refused")), None)

    def __str__(self) -> str:
        head = f"{len(self.made)} of {len(self.effects)} effects made, run {self.run_id}"
        return "\n".join([head, *map(str, self.effects)])


@frozen
class RevertedCall:
    """One call that was made, and whether it was undone."""

    tool: str
    args: Mapping[str, Any]
    """What the tool had received; empty when the call cannot be reverted."""
    status: Literal["reverted", "failed", "not reverted", "cannot be reverted"]
    """`not reverted`: one that was made later could not be undone. `cannot be reverted`: the tool has no `revert=`, or
    the call had failed."""
    error: str = ""

    def __str__(self) -> str:
        said = f": {as_one_line(self.error)}" if self.error else ""
        call = as_one_line(self.tool) if self.status == "cannot be reverted" else call_text(self.tool, self.args)
        return f"{self.status}  {call}{said}"


@frozen
class RevertResult:
    """What `Runtime.revert` undid, the last call first."""

    run_id: str
    calls: tuple[RevertedCall, ...]

    @property
    def ok(self) -> bool:
        """True when every call was undone."""
        return all(each.status == "reverted" for each in self.calls)

    def __str__(self) -> str:
        return "\n".join([f"run {self.run_id}", *map(str, self.calls)])


@frozen
class PlannedCall:
    """A call that is written in a script, whether or not it is made."""

    tool: str
    line: int
    writes: bool = False
    needs_approval: bool = False
    problem: str = ""
    """Why it cannot succeed: there is no such tool, or arguments are missing."""

    def __str__(self) -> str:
        said = [*(["writes"] if self.writes else []), *(["needs approval"] if self.needs_approval else [])]
        parts = [self.tool, *said, *([self.problem] if self.problem else [])]
        return f"line {self.line}: {', '.join(map(as_one_line, parts))}"


@frozen
class Preflight:
    """The calls that a script can make, as far as their names are written out. No security decision rests on it."""

    calls: tuple[PlannedCall, ...] = ()
    """In the order of the text."""
    dynamic: tuple[int, ...] = ()
    """Lines of calls whose tool is not written out."""
    note: str = ""
    """Why this is not all."""
    error_line: int | None = None
    """Line of a syntax error, because of which the script cannot run."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any] | None) -> Preflight | None:
        """Return what `to_plain` was made of."""
        if plain is None:
            return None
        calls = tuple(PlannedCall(**each) for each in plain["calls"])
        return cls(calls, tuple(plain["dynamic"]), plain["note"], plain.get("error_line"))

    @property
    def problems(self) -> tuple[PlannedCall, ...]:
        """The calls that cannot succeed."""
        return tuple(each for each in self.calls if each.problem)

    def __str__(self) -> str:
        rows = [*map(str, self.calls), *(f"line {line}: a tool that is not written out" for line in self.dynamic)]
        where = f"line {self.error_line}: " if self.error_line is not None else ""
        return "\n".join([*rows, *([where + as_one_line(self.note)] if self.note else [])])


NOT_WHOLE = "; this may not be all, because the script ended before it was done"


def shown_effects(effects: Sequence[Effect], *, is_whole: bool = True) -> str:
    """Return a draft as text for a person or a model. What is not listed whole says so, and how to approve it.

    `is_whole`: the script came to its end.
    """
    if not effects:
        return "dry run: nothing was to be written" + ("" if is_whole else NOT_WHOLE)
    head = f"dry run: these {len(effects)} calls were collected in this order, and none was made"
    if len(effects) == 1:
        head = "dry run: this call was collected, and it was not made"
    head += "" if is_whole else NOT_WHOLE
    more = [f"... and {len(effects) - MAX_LISTED} more"] if len(effects) > MAX_LISTED else []
    if problem := cut_in_listing(effects):
        more.append(f"{problem}: read .effects, then commit with approve={effects_digest(effects)!r}, or with ids")
    return "\n".join([head, *map(str, effects[:MAX_LISTED]), *more])


def cut_in_listing(effects: Sequence[Effect]) -> str:
    """Say what of a draft its text does not show; empty when it shows everything."""
    if len(effects) > MAX_LISTED:
        return f"{len(effects) - MAX_LISTED} of these {len(effects)} calls are not listed (at most {MAX_LISTED} are)"
    cut = [each.id for each in effects if not each.is_listed_whole]
    if not cut:
        return ""
    return f"{', '.join(cut)}: listed in part (at most {MAX_ARG_CHARS} characters of an argument are)"


def effects_digest(effects: Sequence[Effect]) -> str:
    """Return the sha256 of everything that a commit of these effects would make."""
    rows = [[each.id, each.tool, dict(each.args), list(each.depends_on), each.reason] for each in effects]
    return value_digest(rows)


class Outcome(enum.StrEnum):
    """How a run ended. Each value means exactly one thing. What the host observed comes before what the guest says."""

    OK = "ok"
    """The script reached its end."""
    ERROR = "error"
    """The script raised an exception, called `sys.exit(n)` with n != 0, or did not compile."""
    TIMEOUT = "timeout"
    """`wall_s` passed. The sandbox was killed; a script of a session is interrupted first."""
    CPU_LIMIT = "cpu_limit"
    """The process tree used `cpu_s`. The sandbox was killed; a script of a session is interrupted first."""
    MEMORY_LIMIT = "memory_limit"
    """The process tree reached `memory_bytes`, or an allocation past it was refused and ended the script."""
    OUTPUT_LIMIT = "output_limit"
    """The script printed more than `output_flood_bytes`. It ended as with `TIMEOUT`."""
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


UNFINISHED: Final = "unfinished"
"""In a record, what has not ended has this in place of an outcome or a status."""

Standing = Literal["good", "open", "bad"]
_STANDINGS: Final[Mapping[str, Standing]] = {
    "ok": "good", "pending": "good", "collected": "good", UNFINISHED: "open", "suspended": "open"
}  # fmt: skip


def standing_of(status: str) -> Standing:
    """Return whether the outcome of a run or the status of a call is a failure: `bad`. `open`: it is not over."""
    return _STANDINGS.get(status, "bad")


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
        from toolcell.result_html import result_html  # what only notebooks need

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
