"""What answers look like, for the OpenAPI document. Answers are made elsewhere; a test compares each with its model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from toolcell.results import (
    AbandonedThread,
    Divergence,
    Effect,
    EffectResult,
    ErrorInfo,
    Isolation,
    Outcome,
    PendingCall,
    Preflight,
    Repair,
    RevertedCall,
    SessionReport,
    ToolCallRecord,
    Usage,
)


class AnswerModel(BaseModel):
    """An answer has exactly these members."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ProblemAnswer(BaseModel):
    """What is wrong. Source: RFC 9457."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    title: str
    status: int
    code: str
    """Stable across releases."""
    detail: str = ""
    errors: list[dict[str, Any]] = []
    """Mistakes of a request that is wrong: `field`, `message` and `value` of each mistake."""


class RunLogs(AnswerModel):
    """What the script printed."""

    stdout: str
    stderr: str
    truncated: bool


class ReturnedFile(AnswerModel):
    """A file that the script returned."""

    name: str
    media_type: str
    size: int
    data: str | None
    """Base64; null when it was not sent, and `problem` says why."""
    sha256: str | None
    problem: str | None


class WaitsFor(AnswerModel):
    """What a suspended run waits for."""

    run_id: str
    """For `/v1/suspended/{run_id}`."""
    calls: list[PendingCall]
    expires: float
    """Seconds since the epoch."""
    token: str
    """For `Runtime.resume` of a client."""


class RunResult(AnswerModel):
    """Everything that one run left behind. A script that fails is an ordinary result: `outcome` says how it ended."""

    run_id: str
    outcome: Outcome
    value: Any
    """{"$bytes": base64} and {"$float": "nan"} in it stand for what JSON does not have."""
    has_value: bool
    logs: RunLogs
    files: list[ReturnedFile]
    error: ErrorInfo | None
    warnings: list[str]
    calls: list[ToolCallRecord]
    abandoned: list[AbandonedThread]
    usage: Usage
    isolation: Isolation
    suspension: WaitsFor | None
    divergence: Divergence | None
    repair: Repair | None
    preflight: Preflight | None
    type_findings: list[dict[str, Any]]
    effects: list[Effect]
    draft_id: str
    draft_digest: str
    session: SessionReport | None
    journal_id: str


class PlanResult(AnswerModel):
    """What came of each step."""

    run_id: str
    journal_id: str
    rows: list[dict[str, Any]]
    files: list[ReturnedFile]
    suspension: WaitsFor | None


class SessionInfo(AnswerModel):
    """A session."""

    name: str
    state: Literal["open", "kept"]
    """`kept`: it is restored from its journal when it is used next."""
    is_live: bool
    """It has a sandbox now."""
    waiting: str
    """Id of the run that waits for a decision; empty when none waits."""
    used_cpu_s: float
    used_calls: int


class SessionList(AnswerModel):
    """The sessions of the tenant."""

    sessions: list[SessionInfo]


class SessionFileInfo(AnswerModel):
    """A file in the workspace, as the guest says."""

    name: str
    size: int


class SessionFiles(AnswerModel):
    """The files in the workspace of a session."""

    files: list[SessionFileInfo]


class InterruptAnswer(AnswerModel):
    """Whether something was interrupted."""

    interrupted: bool


class SuspendedRun(AnswerModel):
    """A run that waits."""

    run_id: str
    calls: list[PendingCall]
    expires: float
    """Seconds since the epoch."""
    preflight: Preflight | None


class SuspendedRuns(AnswerModel):
    """The runs that wait for a decision, and those that were interrupted."""

    suspended: list[SuspendedRun]
    interrupted: list[str]
    """Ids of runs whose host ended in their middle. A decision without `decisions` carries one on."""


class CommitAnswer(AnswerModel):
    """What a commit made of a draft."""

    run_id: str
    ok: bool
    effects: list[EffectResult]
    value: Any
    has_value: bool
    journal_id: str
    """For `/v1/runs/{journal_id}/revert`."""


class RevertAnswer(AnswerModel):
    """What was undone."""

    ok: bool
    calls: list[RevertedCall]


class RunList(AnswerModel):
    """Runs, the newest first."""

    runs: list[RunSummaryAnswer]
    next: str | None
    """`cursor` of the next page; null on the last one."""


class RunSummaryAnswer(AnswerModel):
    """One run in a list."""

    id: str
    chain: str
    seq: int
    sort: str
    started_ns: int
    ended_ns: int | None
    outcome: str
    sha256: str | None
    user: str
    session: str
    title: str
    calls: int
    failed: int
    wall_s: float | None
    cpu_s: float | None
    peak_memory_bytes: int | None
    relation: str | None
    """How it goes on from another run: resumes, repairs, commits, reverts or repeats."""
    parent: str | None
    """Id of that run."""
    decided_by: str | None
    """Who had it go on."""
    trust: str


class RecordedRunAnswer(BaseModel):
    """Everything recorded of a run: script, settings, calls, outcome. docs/audit.md describes the members."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    outcome: str
    trust: str
    """verified, unsigned, unverified or broken."""
    runs: list[dict[str, Any]]
    """Runs that it goes on from, and that go on from it, itself among them; empty if there are none."""


class ReplayAnswer(AnswerModel):
    """Whether a recorded run did the same again. No tool was called."""

    run: str
    ok: bool
    divergence: Divergence | None
    answered: int
    recorded: int
    stopped: str
    notes: list[str]
    not_compared: list[str]
    outcome: Outcome | None


class ToolAnswer(AnswerModel):
    """A tool as a script sees it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of its arguments."""
    returns: dict[str, Any] | None
    """JSON Schema of its result, if it is known."""
    read_only: bool
    requires_approval: bool


class ToolList(AnswerModel):
    """The tools that scripts may call."""

    tools: list[ToolAnswer]


class Health(AnswerModel):
    """How the service is."""

    status: str
