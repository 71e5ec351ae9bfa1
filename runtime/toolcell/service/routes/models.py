"""What requests and answers look like. These models check requests, and the OpenAPI document is made of them.

Answers are made elsewhere; a test compares each with its model.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    create_model,
    model_validator,
)

from toolcell.audit import RunSummary
from toolcell.config import MAX_DECISIONS, MAX_PLAN_STEPS, CheckTypes, Limits, LintProfile, check_decisions
from toolcell.control import Replay
from toolcell.results import (
    CommitResult,
    ExecutionResult,
    Outcome,
    OutputFile,
    RevertResult,
    SessionFile,
    Suspension,
)
from toolcell.support.exact_json import from_exact

MAX_FILES = 256
"""Most files of one request."""
MAX_NAME_CHARS = 200
MAX_UNKNOWN = 5
"""Unknown members of an object that an error names."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Name of a session, a run, a draft or a journal."""

Exact = Annotated[Any, BeforeValidator(from_exact)]
"""Plain data; {"$bytes": base64} and {"$float": "nan"} in it stand for what JSON does not have."""


def _inputs(given: Any) -> dict[str, Any]:
    inputs = from_exact(given)
    if not isinstance(inputs, dict):
        raise ValueError("Input should be an object")
    return inputs  # as they are: pydantic would copy them


ToolNames = Annotated[list[Annotated[str, Field(max_length=MAX_NAME_CHARS)]], Field(max_length=10_000)]


class RequestModel(BaseModel):
    """A body or a query. A member that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        """Leave out all but the first unknown members: pydantic makes an error of each, however many there are."""
        known = cls.model_fields
        if not isinstance(given, dict) or len(given) <= len(known):
            return given
        unknown = itertools.islice((name for name in given if name not in known), MAX_UNKNOWN)
        return {name: given[name] for name in [*known, *unknown] if name in given}


class BodyModel(RequestModel):
    """A body: its types are exactly those of JSON."""

    model_config = ConfigDict(strict=True)


class NoQuery(RequestModel):
    """Nothing is asked in the query."""


class InputFile(BodyModel):
    """A file for the workspace, with its content as text or as base64."""

    name: str = Field(max_length=4096)
    """Path relative to the workspace, with forward slashes."""
    text: str | None = None
    data: str | None = None
    """Base64."""

    @model_validator(mode="after")
    def _one_content(self) -> InputFile:
        if (self.text is None) == (self.data is None):
            raise ValueError("a file has either text or data")
        self.content()
        return self

    def content(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            ValueError: `data` is not base64, or `text` is not Unicode.
        """
        if self.data is None:
            return (self.text or "").encode()
        try:
            return base64.b64decode(self.data, validate=True)
        except binascii.Error as exc:
            raise ValueError(f"data is not base64: {exc}") from exc


class ScriptRequest(BodyModel):
    """A script, and what it gets."""

    code: str
    """Python source."""
    inputs: Annotated[dict[str, Any], PlainValidator(_inputs, json_schema_input_type=dict[str, Any])] = Field(
        default_factory=dict
    )
    """Names that the script finds, and their values. {"$bytes": base64} stands for bytes."""
    files: list[InputFile] = Field(default_factory=list, max_length=MAX_FILES)
    """For the workspace."""
    tools: ToolNames | None = None
    """Names of the tools that it may call. Left out: all of the tenant."""
    limits: Limits | None = None
    """What it may use, at most what the tenant may. What is left out is as for the tenant."""
    lint: LintProfile | None = None
    """RestrictedPython profile that checks it first."""
    check_types: CheckTypes | None = None
    """What becomes of it if it has wrong types."""
    on_approval: Literal["ask", "deny", "suspend"] = "suspend"
    """What becomes of a call that needs approval: the run is suspended until somebody decides (`/v1/suspended`), or the
    call is refused, or hooks of the server are asked."""
    dry_run: bool = False
    """Collect the calls that write as `effects`, and make none. `/v1/drafts/{draft_id}/commit` makes them."""


class ExecuteRequest(ScriptRequest):
    """A script for a sandbox of its own."""

    seed: int | None = None
    """Seed of its randomness."""
    clock: float | None = None
    """Where its clock starts, in seconds since the epoch."""
    repairs: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}(\.[0-9a-f]{16})?$")] | None = None
    """Id of a run whose script it mends: calls that were made are answered from its journal."""
    refresh: Literal["", "reads"] = ""
    """Setting of a repair: make reads again."""
    preflight: bool = False
    """List the calls that are written in it, before it runs."""


class PlanRequest(BodyModel):
    """Tool calls that need no script."""

    steps: Annotated[list[dict[str, Any]], Field(max_length=MAX_PLAN_STEPS), AfterValidator(from_exact)]
    """Each with `tool` and `args`; docs/plans.md has the further keys."""
    tools: ToolNames | None = None
    """Names of the tools that it may call. Left out: all of the tenant."""
    on_approval: Literal["ask", "deny", "suspend"] = "suspend"
    """What becomes of a step that needs approval."""


class SessionRequest(BodyModel):
    """A session, and what it may use."""

    name: Name | None = None
    """Left out: a random one."""
    limits: Limits | None = None
    """Limits of each script, at most what the tenant may."""
    idle_s: float | None = Field(default=None, gt=0, le=7 * 86_400)
    """Seconds without a script after which the sandbox is destroyed."""
    cpu_s: float | None = Field(default=None, gt=0, le=7 * 86_400)
    """CPU seconds of all scripts together."""
    tool_calls: int | None = Field(default=None, ge=0)
    """Most calls of all scripts together."""
    restore: Literal["journal", "empty", "if_kept"] | bool | None = None
    """True: go on from the journal of the session of this name. "if_kept": begin anew if there is none."""


class ForkRequest(BodyModel):
    """The copy of a session."""

    name: Name | None = None
    """Left out: a random one."""


class FilesRequest(BodyModel):
    """Files for the workspace of a session."""

    files: list[InputFile] = Field(max_length=MAX_FILES)


class ApproveCall(BodyModel):
    """Make the call."""

    decision: Literal["approve"]
    reason: str = Field(default="", max_length=2000)
    """For the record."""


class DenyCall(BodyModel):
    """Do not make the call: the script gets an error with the reason."""

    decision: Literal["deny"]
    reason: str = Field(default="", max_length=2000)


class EditCall(BodyModel):
    """Make the call with these arguments instead."""

    decision: Literal["edit"]
    args: Annotated[dict[str, Any], BeforeValidator(from_exact)]
    reason: str = Field(default="", max_length=2000)
    """For the record."""


class CallWasMade(BodyModel):
    """The call, which is in doubt, was made, and this is its result."""

    decision: Literal["made"]
    value: Exact = None


CallDecision = Annotated[ApproveCall | DenyCall | EditCall | CallWasMade, Field(discriminator="decision")]


def _counted(decisions: Any) -> Any:
    """pydantic counts them when it has checked each."""
    check_decisions(decisions)
    return decisions


class DecideRequest(BodyModel):
    """Decisions about the calls that a run waits for."""

    decisions: Annotated[dict[str, CallDecision], BeforeValidator(_counted)] = Field(
        default_factory=dict, json_schema_extra={"maxProperties": MAX_DECISIONS}
    )
    """By the id of the call. A call without one suspends the run again."""


class CommitRequest(BodyModel):
    """Which effects of a draft to make."""

    approve: Annotated[
        str | Annotated[list[str], Field(json_schema_extra={"maxItems": MAX_DECISIONS})], BeforeValidator(_counted)
    ] = "all"
    """"all", `draft_digest` of the dry run, or the ids of those to make. "all" is refused of a draft of more than 50
    effects, or with an argument of more than 200 characters: read `effects`, then give the digest."""
    recheck: bool = False
    """Make the reads of the dry run again first, and make nothing if one has another result now."""


class ReplayRequest(BodyModel):
    """How a recorded run is repeated."""

    code: str | None = None
    """A script to run in place of the recorded one."""
    until: int | None = Field(default=None, ge=1)
    """Stop before the answer of this call."""


class RunsQuery(RequestModel):
    """Selects runs."""

    since: float | None = Field(default=None, ge=0, le=9e9)
    """Seconds since the epoch."""
    until: float | None = Field(default=None, ge=0, le=9e9)
    """Seconds since the epoch."""
    outcome: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    tool: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    """Name of a tool that the run called; `*` and `?` in it stand for any text and any letter."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-fA-F]{1,64}$")
    """Beginning of the script's digest."""
    session: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    user: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    decided_by: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    """Who decided about the run, or about one of its calls."""
    host: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    """Name of a host that a request of the run went to; `*` and `?` in it stand for any text and any letter."""
    secret: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    """Name of a secret that went into a request of the run."""
    trust: Literal["verified", "unsigned", "unverified", "broken"] | None = None
    limit: int = Field(default=50, ge=1, le=500)
    cursor: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    """`next` of the answer before."""


class ToolsQuery(RequestModel):
    """Selects tools."""

    q: str | None = Field(default=None, min_length=1, max_length=1000)
    """What the tools should do; the best fit comes first."""
    limit: int = Field(default=100, ge=1, le=10_000)


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
