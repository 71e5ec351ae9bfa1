"""What answers look like, for the OpenAPI document. Answers are made elsewhere; a test compares each with its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from toolcell.audit import Replay, RunSummary
from toolcell.results import (
    CommitResult,
    ExecutionResult,
    Outcome,
    OutputFile,
    RevertResult,
    SessionFile,
    Suspension,
)

Model = TypeVar("Model", bound=BaseModel)


class AnswerModel(BaseModel):
    """An answer has exactly these members."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def with_fields_of(record: type, *left_out: str) -> Callable[[type[Model]], type[Model]]:
    """Give an answer the fields of a dataclass that it does not declare itself."""
    types = get_type_hints(record)
    names = [each.name for each in fields(record) if each.name not in left_out]

    def complete(model: type[Model]) -> type[Model]:
        members: dict[str, Any] = {name: (types[name], ...) for name in names if name not in model.model_fields}
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **members)

    return complete


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


@with_fields_of(OutputFile)
class ReturnedFile(AnswerModel):
    """A file that the script returned."""

    data: str | None
    """Base64; null when it was not sent, and `problem` says why."""
    sha256: str | None


@with_fields_of(Suspension, "preflight")
class WaitsFor(AnswerModel):
    """What a suspended run waits for."""

    run_id: str
    """For `/v1/suspended/{run_id}`."""
    expires: float
    """Seconds since the epoch."""
    token: str
    """For `Runtime.resume` of a client."""


@with_fields_of(ExecutionResult)
class RunResult(AnswerModel):
    """Everything that one run left behind. A script that fails is an ordinary result: `outcome` says how it ended."""

    value: Any
    """{"$bytes": base64} and {"$float": "nan"} in it stand for what JSON does not have."""
    logs: RunLogs
    files: list[ReturnedFile]
    suspension: WaitsFor | None


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


@with_fields_of(SessionFile)
class SessionFileInfo(AnswerModel):
    """A file in the workspace, as the guest says."""


class SessionFiles(AnswerModel):
    """The files in the workspace of a session."""

    files: list[SessionFileInfo]


class InterruptAnswer(AnswerModel):
    """Whether something was interrupted."""

    interrupted: bool


@with_fields_of(Suspension, "token")
class SuspendedRun(AnswerModel):
    """A run that waits."""

    expires: float
    """Seconds since the epoch."""


class SuspendedRuns(AnswerModel):
    """The runs that wait for a decision, and those that were interrupted."""

    suspended: list[SuspendedRun]
    interrupted: list[str]
    """Ids of runs whose host ended in their middle. A decision without `decisions` carries one on."""


@with_fields_of(CommitResult)
class CommitAnswer(AnswerModel):
    """What a commit made of a draft."""

    ok: bool
    journal_id: str
    """For `/v1/runs/{journal_id}/revert`."""


@with_fields_of(RevertResult, "run_id")
class RevertAnswer(AnswerModel):
    """What was undone."""

    ok: bool


@with_fields_of(RunSummary, "kind")
class RunSummaryAnswer(AnswerModel):
    """One run in a list."""

    sort: str
    relation: str | None
    """How it goes on from another run: resumes, repairs, commits, reverts or repeats."""
    parent: str | None
    """Id of that run."""
    decided_by: str | None
    """Who had it go on."""


class RunList(AnswerModel):
    """Runs, the newest first."""

    runs: list[RunSummaryAnswer]
    next: str | None
    """`cursor` of the next page; null on the last one."""


class RecordedRunAnswer(BaseModel):
    """Everything recorded of a run: script, settings, calls, outcome. docs/audit.md describes the members."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    outcome: str
    trust: str
    """verified, unsigned, unverified or broken."""
    runs: list[dict[str, Any]]
    """Runs that it goes on from, and that go on from it, itself among them; empty if there are none."""


@with_fields_of(Replay, "run_id", "result")
class ReplayAnswer(AnswerModel):
    """Whether a recorded run did the same again. No tool was called."""

    run: str
    ok: bool
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
