"""The record of one call, the run it belongs to, and those who watch it and answer it: features and hooks.

Knows no registered tool. The pipeline alone writes a `Call`; hooks and observers read it, and a tool gets a
`ToolContext`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, TypeVar, get_args

from toolcell.calls.concurrency import OF_THIS_PROCESS, AbandonedThreads, ToolIdentity, ToolThread, Workers
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.events import EventBus
from toolcell.calls.options import DEFAULT_TOOL_OPTIONS, CallPolicy, Origin, ToolOptions
from toolcell.calls.result import ErrorCode, Part, Status, Text, ToolFailure, ToolResult
from toolcell.calls.run_state import NO_SECRETS, OUTERMOST, Lineage, RunLink, RunState, Secrets, new_id
from toolcell.calls.values import Change
from toolcell.config import CheckTypes
from toolcell.errors import UsageError
from toolcell.support.checks import brief, check_fields, check_kind, check_one_of, check_seconds
from toolcell.support.host_work import HostWork
from toolcell.support.log import logger_of
from toolcell_bridge.wire.frozen import frozen, replaced

if TYPE_CHECKING:
    from toolcell.calls.uploads import OpenRequests

LOGGER = logger_of("toolcell.tools")

OnUser = Callable[[str, ToolResult], Awaitable[None] | None]
"""Receives a tool's text for the user, with the result; sync or async."""
CompletionCallback = Callable[["RunContext", ToolResult], Awaitable[None] | None]


class Feature:
    """What a feature does in a run and its calls: a dry run, a record, quotas, approvals, or one of your own.

    A method that a class does not have costs nothing. They are asked in their order, a tool's before a run's.
    """

    moments: tuple[str, ...] = ()
    """The methods below that the class has."""

    replaces: type[Feature] | tuple[()] = ()
    """A run has one of this kind at most."""

    def __init_subclass__(cls, *, is_one_of_its_kind: bool = False) -> None:
        if is_one_of_its_kind:
            cls.replaces = cls
        cls.moments = tuple([name for name in _MOMENTS if getattr(cls, name) is not getattr(Feature, name)])

    def begin_run(self, run: RunContext, /) -> None:
        """A run, or a part of one, is about to begin; or raise why it must not."""

    def send(self, message: Any, /) -> Any:
        """Return the message that the sandbox of a script is sent."""
        return message

    def end_run(self, run: RunContext, cpu_s: float, /) -> None:
        """A run has ended, and has used so much CPU time."""

    def finished(self, run: RunContext, ident: str, /) -> None:
        """A run, or a part of one, has a result, with this id."""

    def permit(self, call: Call, /) -> ToolResult | None:
        """Return why a call must not be made, before anything looks at its arguments."""

    def count_call(self, call: Call, /) -> ToolResult | None:
        """Count a call that is permitted. Return why it must not be made, or None."""

    def take(self, call: Call, tool: Any, /) -> Awaitable[ToolResult | None] | None:
        """Set `call.args`, where the usual checks cannot, or return why it is refused. None: they can."""

    def approves(self, call: Call, /) -> bool:
        """Return true for a call that needs no approval now."""
        return False

    async def decide(self, call: Call, /) -> Any:
        """Return `Approve`, `Edit` or `Deny` for a checked call that no hook approved.

        Raises:
            ToolAbort: the run ends here, for the decision to come later.
        """

    def waited(self, call: Call, /) -> bool:
        """Return true for a call that was admitted and counted before, and has waited since."""
        return False

    def replace(self, call: Call, tool: Any, /) -> Any:
        """Return the tool that runs for an admitted call, or a result in its place."""
        return tool

    def collects(self, call: Call, /) -> bool:
        """Return true for a call that is collected, and made later."""
        return False

    def admitted(self, call: Call, /) -> None:
        """A call is about to run, or was just refused (`call.refusal` says why)."""

    def call_started(self, call: Call, /) -> Awaitable[None] | None:
        """Record what `admitted` is told. The tool has no effect before that, and none if it cannot be recorded."""

    def unrecorded(self, call: Call, /) -> None:
        """The start of a call could not be recorded after all: its tool does not run."""

    def made(self, call: Call, result: ToolResult, /) -> None:
        """The tool of a call has run."""

    def concluded(self, call: Call, result: ToolResult, /) -> None:
        """A call has the result that its caller gets."""

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """Record the final `call.result` of a call whose start was recorded."""

    def of_run(self, link: RunLink | None, user_id: str) -> Feature:
        """Return this as one run of a `Runtime` has it, which the record names by `link`."""
        return self


_MOMENTS: Final = tuple(
    [name for name, each in vars(Feature).items() if name[0] != "_" and name != "of_run" and callable(each)]
)

K = TypeVar("K", bound=Feature)


class Approvals(Feature, is_one_of_its_kind=True):
    """Decides about calls that no hook approved; approval hooks are not asked then."""


class Denial(Approvals):
    """Of a run in which nobody can be asked."""

    def __init__(self, why: str = "this run cannot ask for approval (on_approval='deny')") -> None:
        self._why = why

    async def decide(self, call: Call, /) -> Any:
        """Refuse."""
        return Block(f'tool "{call.name}" was refused: {self._why}')


class Meter(Feature):
    """Counts runs and calls for whoever they are for, and may refuse them."""


def decided(kind: str, by: str = "", reason: str = "") -> dict[str, Any]:
    """Return what the record has of a decision. `kind`: approve, edit, deny, or made: the call was made already."""
    named = {"decision": kind, "by": by, "reason": reason}
    return {name: value for name, value in named.items() if value}


class Features(tuple[Feature, ...]):
    """The features of a run. `features.made`, as an example, are the methods of those that have `Feature.made`."""

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        for feature in self:
            for moment in feature.moments:
                setattr(self, moment, (*getattr(self, moment), getattr(feature, moment)))

    def after(self, first: Features) -> Features:
        """Return these after those of a tool."""
        known: dict[Features, Features] = self.__dict__.setdefault("joined", {})
        if (joined := known.get(first)) is None:
            joined = known[first] = Features((*first, *self))
        return joined

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]: ...


for _moment in _MOMENTS:
    setattr(Features, _moment, ())

NO_FEATURES: Final = Features()


# What a hook may answer, and what a person decides about a call


@frozen
class _Answer:
    def __post_init__(self) -> None:
        names: tuple[str, ...] = self.__match_args__
        for name in names:
            kinds, cure = _KINDS.get(name, (object,)), _CURES.get(name, "")
            check_kind(f"{type(self).__name__}({name})", getattr(self, name), *kinds, cure=cure)


@frozen
class Block(_Answer):
    """Do not run the call; the model reads `reason`."""

    reason: str = ""
    code: str = ErrorCode.BLOCKED


@frozen
class Rewrite(_Answer):
    """Run the call with other arguments, which are validated again."""

    args: Mapping[str, Any]


@frozen
class Substitute(_Answer):
    """Do not run the call; this is its result: a cached or made-up one."""

    result: ToolResult


@frozen
class Override(_Answer):
    """What an after hook changes about a result; None leaves a field as it is."""

    content: str | None = None
    """Replaces everything the tool answered with: text, data, files and an error's facts, for whoever reads it."""
    details: Any = None
    is_error: bool | None = None
    terminate: bool | None = None

    def apply(self, result: ToolResult) -> ToolResult:
        """The result with the set fields replaced."""
        changed = result
        if self.content is not None:
            for_user = self.content if result.for_user is not None else None
            changed = replace(
                changed, parts=(Text(self.content),), value=None, has_value=False, files=(), for_user=for_user, exc=None
            )
            if changed.error is not None:
                changed = replace(changed, parts=(), error=replace(changed.error, message=self.content, details={}))
        if self.details is not None:
            changed = replace(changed, details=self.details)
        if self.terminate is not None:
            changed = replace(changed, terminate=self.terminate)
        return changed if self.is_error in (None, changed.is_error) else _flipped(changed)


def _flipped(result: ToolResult) -> ToolResult:
    if result.is_error:
        return replace(result, status=Status.OK, error=None, parts=result.parts or (Text(result.text),))
    failure = ToolFailure(ErrorCode.TOOL_ERROR, result.output)
    return replace(result, status=Status.ERROR, error=failure, parts=(), value=None, has_value=False)


@frozen
class _Decided(_Answer):
    reason: str = ""
    """Why, for the record."""
    by: str = ""
    """Who decided, for the record. Empty: whoever the context of a `resume` is for, or the hook."""


@frozen
class Approve(_Decided):
    """Let the call run."""


@frozen
class Deny(_Decided):
    """Refuse the call; the model reads the reason."""


@frozen
class Edit(_Answer):
    """Let the call run with other arguments."""

    args: Mapping[str, Any]
    reason: str = ""
    by: str = ""


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("reason", "code", "by"), (str,)),
    "args": (Mapping,),
    "content": (str, type(None)),
    **dict.fromkeys(("is_error", "terminate"), (bool, type(None))),
    "result": (ToolResult,),
}
"""Of the fields of answers and decisions."""
_CURES: Final = {"result": "wrap it: ToolResult.ok(text) or .of(data)"}


@frozen
class AlreadyMade:
    """The call in doubt was made, and this is its result. It is not repeated."""

    value: Any = None


Decision = Approve | Deny | Edit
ResumeDecision = Decision | AlreadyMade
Approver = Callable[["Call"], Decision | Awaitable[Decision]]
OnHookError = Literal["block", "abort", "keep"]
HookAnswer = Block | Rewrite | Substitute | Decision | None
BeforeHook = Callable[["Call"], HookAnswer | Awaitable[HookAnswer]]
AfterHook = Callable[["Call", ToolResult], Override | ToolResult | Awaitable[Override | ToolResult | None] | None]


@frozen
class Hook:
    """A pair of functions around calls. Outer hooks were added first: they see a call first and its result last."""

    before: BeforeHook | None = None
    after: AfterHook | None = None
    timeout_s: float | None = None
    on_error: OnHookError = "block"
    """What a hook does that raises, is too slow or answers with something else. `block`: a before hook blocks its call,
    and an after hook withholds the result, which is an error then. `abort`: the whole run ends. `keep`: an after hook
    leaves the result as it was; a before hook still blocks."""
    name: str = ""

    def __post_init__(self) -> None:
        for moment, function in (("before", self.before), ("after", self.after)):
            if function is not None and not callable(function):
                raise UsageError(f"Hook({moment}) must be a function, not {brief(function)}")
        check_seconds("Hook(timeout_s)", self.timeout_s, optional=True)
        check_one_of("Hook(on_error)", self.on_error, get_args(OnHookError))
        check_kind("Hook(name)", self.name, str)


class CallableTools(Protocol):
    """What a run needs of a registry: `ToolRegistry`, or another object that answers from a record."""

    def snapshot(self) -> CallableTools:
        """Return these tools as they are now, unchanging: what a run works with."""

    def names(self, origin: Origin = ...) -> list[str]:
        """Return the names a caller from `origin` may use."""

    def names_text(self, origin: Origin = ...) -> str:
        """Return the same names as one text, with a space between two: a run takes no longer with many tools."""

    def definitions(self, origin: Origin = ...) -> list[ToolDefinition]:
        """Return the definitions that a caller from `origin` sees."""

    def returns(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of what a tool returns; None where it says nothing."""

    def registered_name(self, name: str) -> str:
        """Return the registered name behind one that a provider was given in its place; else `name` itself."""

    @property
    def makes_requests(self) -> bool:
        """True when the libraries of a script may send HTTP requests."""

    def new_call(self, name: str, args: Mapping[str, Any] | str, **fields: Any) -> Call:
        """Return the record of a call about to be made. `fields`: further ones of a `Call`."""

    def make(self, call: Call) -> Awaitable[ToolResult]:
        """Make a call that `new_call` returned, or answer it."""


class CallingRegistry(CallableTools, Protocol):
    """What a tool that runs other tools needs of the registry it was called in."""

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Its hooks, for calls further down."""

    @property
    def policies(self) -> tuple[CallPolicy, ...]:
        """Its rules, for calls further down."""

    @property
    def code_runtime(self) -> Any:
        """Where its `execute_code` runs; None when it has none."""

    async def run_plan(self, args: Mapping[str, Any], run: RunContext) -> ToolResult:
        """Run the steps of a plan."""

    async def check_arguments(self, definition: ToolDefinition, received: Any) -> None:
        """Check what a tool may be called with later."""


class ScriptRuntime(Protocol):
    """Runs a script with more options than `CodeRuntime` names: `Runtime`, `SyncRuntime` or a `Client`."""

    @property
    def execute_code(self) -> Callable[..., Any]:
        """Run a script in a fresh sandbox."""


@frozen(kw_only=True)
class RunScope:
    """Internal: what stands above and around the calls of one part of a run. A tool never sets it."""

    session_id: str = ""
    """Id of the session whose script makes the calls."""
    item: str = ""
    """The input of `Runtime.map`: its name and the number of the input, as in `scores-17`."""
    hooks: tuple[Hook, ...] = ()
    """Hooks of the agents above; they see calls before the registry's own."""
    policies: tuple[CallPolicy, ...] = ()
    """Policies of the agents above: a child may never call more than its parent."""
    parent_call_id: str | None = None
    """The call this part of the run belongs to."""
    depth: int = 0
    """Agents above this one."""
    agents: tuple[int, ...] = ()
    """Which, by identity, outermost first."""
    runtime: Any = None
    """Runtime of the script or plan that makes the calls: saved scripts run there."""
    link: RunLink | None = None
    """How the record names the run that the calls belong to. None: nobody gave it a name yet."""
    scripts: tuple[str, ...] = ()
    """Saved scripts above this part of the run, outermost first."""
    requests: OpenRequests | None = None
    """What the libraries of the script keep open. None: they may send no requests."""
    work: HostWork | None = None
    """Where the work of checking arguments is counted; None where no guest is behind the calls."""
    lineage: Lineage = OUTERMOST
    """Internal: what scheduling and rules need to know of the calls above."""
    abandoned: AbandonedThreads = OF_THIS_PROCESS
    """Where threads are listed that run on after their calls were given up."""
    on_user: OnUser | None = None
    """Receiver of the agent above: receives what tools show to the user, also those of plans, scripts and background
    work."""
    models: tuple[tuple[type, str], ...] = ()
    """The model of the agent above, by the kind of its provider: that of a sub-agent without one of its own."""
    streams: bool = False
    """Models are asked to stream, and their messages are reported as they come."""
    sequential: bool | None = None
    """Whether calls run one at a time, also those of plans and scripts. None: as the registry is set."""
    is_shared: bool = False
    """Stands in where no run was given: unrelated calls share it, so it bounds and orders nothing."""


OUTERMOST_SCOPE = RunScope()


_WRITTEN_BY_HAND: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("secrets", Secrets, "Secrets({...})"),
    ("deadline", (int, float), "a number, such as anyio.current_time() + 30"),
    ("events", EventBus, "an EventBus()"),
    ("features", Features, "RunContext().having(Draft())"),
)
"""What a program may write wrongly, and would notice only in the middle of a call."""


@frozen(kw_only=True)
class RunContext:
    """What all calls of a run share: user, secrets, deadline, events, budget. A guest can neither read nor forge it."""

    run_id: str = field(default_factory=new_id)
    user_id: str = ""
    thread_id: str = ""
    channel: str = ""
    chat_id: str = ""
    custom: Mapping[str, Any] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=lambda: NO_SECRETS)
    deadline: float = math.inf
    """On the event loop's clock (`anyio.current_time()`); no call outlasts it."""
    limits: Any = None
    """What the run's sandboxes may use; passed through, not looked at."""
    events: EventBus = field(default_factory=EventBus)
    features: Features = NO_FEATURES
    """What is done with its calls besides making them; see `having`."""
    on_complete: CompletionCallback | None = None
    """Receives the final results of background work."""
    logger: logging.Logger = LOGGER
    attachments: tuple[Part, ...] = ()
    """What the user gave with the task, handed down to sub-agents."""
    check_types: CheckTypes | None = None
    """How types of its scripts are checked where neither a call nor a policy says so, if this machine can. An `Agent`
    makes it `warn`."""
    state: RunState = field(default_factory=RunState)
    scope: RunScope = OUTERMOST_SCOPE
    """Internal: what stands above and around the calls."""

    def __post_init__(self) -> None:
        # Every run makes some of these: what is right costs no call.
        kinds: tuple[type, ...] = (self.secrets.__class__, self.deadline.__class__, self.events.__class__)
        if (*kinds, self.features.__class__) != (Secrets, float, EventBus, Features):
            check_fields(self, _WRITTEN_BY_HAND)

    def child(self, **changes: Any) -> Self:
        """Return the same run with some fields replaced; state, events and budget stay shared."""
        return replaced(self, **changes)

    def within(self, **changes: Any) -> Self:
        """Internal: return the same run with some fields of its scope replaced."""
        return replaced(self, scope=replaced(self.scope, **changes))

    def feature(self, kind: type[K]) -> K | None:
        """Return the feature of a kind that was added last; None if there is none."""
        for each in self.features:
            if isinstance(each, kind):
                return each
        return None

    def having(self, *features: Feature) -> Self:
        """Return the same run with more features, before its own: `RunContext().having(Draft())`.

        Raises:
            UsageError: one is no `Feature`.
        """
        kept: Iterable[Feature] = self.features
        for each in features:
            check_kind("having(feature)", each, Feature, cure="such as Draft(), Quotas(...) or a class of yours")
            if replaced := each.replaces:
                kept = [known for known in kept if not isinstance(known, replaced)]
        return self.child(features=Features((*features, *kept)))

    def cancel(self, reason: str = "run cancelled") -> None:
        """Cancel the run's tool calls; see `RunState.cancel`.

        Raises:
            UsageError: this stands for no run, so nothing in it belongs together.
        """
        if self.scope.is_shared:
            raise UsageError("calls made without a run of their own cannot be cancelled together")
        self.state.cancel(reason)


NO_FACTS: Final[Mapping[str, Any]] = MappingProxyType({})


class Call:
    """The record of one call: the request, its arguments after checks and hooks, and its result."""

    # Most of these keep their default in most calls, so they are set once, on the class.

    args: Mapping[str, Any] = MappingProxyType({})
    """Validated: what the tool receives. Empty until validation."""
    decoded: Any = None
    """The same as the Python types the tool declares, where these are more than JSON."""
    options: ToolOptions = DEFAULT_TOOL_OPTIONS
    """Options of the tool; the defaults when there is none by that name."""
    identity: ToolIdentity | None = None
    """Identity of the tool, whatever name it was called by."""
    changes: tuple[Change, ...] = ()
    """What coercion changed."""
    warnings: tuple[str, ...] = ()
    NEEDS_APPROVAL: ClassVar = "needs approval"
    approval_reason = ""
    """Why a person has to approve it; empty when nobody has to. `NEEDS_APPROVAL`, and no more, of a tool with
    `requires_approval`."""
    approved = False
    facts: Mapping[str, Any] = NO_FACTS
    """What else the record has of it: who decided, which hooks changed it, where its answer is from."""
    is_settled = False
    """Its arguments are those that it is made with, and nobody is asked about them now."""
    refusal: ToolResult | None = None
    """Set when the tool was not run: unknown, invalid, blocked, substituted."""
    result: ToolResult | None = None
    is_started = False
    """An observer knows of it."""
    last_step: Callable[[], Awaitable[ToolResult]] | None = None
    """Background work that no run keeps: the call ends with it."""
    is_executed = False
    is_shown = False
    """The after hooks have seen its result: it is that of a job."""
    is_concluded = False
    holds_worker = False
    """Whether a call takes a place of those that work; tools that wait for others hold none."""
    threads: tuple[ToolThread, ...] = ()
    """Threads of this call and the calls below: given up, and perhaps still running. The call's places are taken until
    then."""
    started_at = 0.0
    """Seconds since the epoch."""
    started_s = 0.0
    """Monotonic."""
    duration_s = 0.0
    _nested: RunContext | None = None
    _lendable: Workers | None = None

    def __init__(
        self, registry: CallingRegistry, name: str, raw_args: Any, call_id: str, origin: Origin, run: RunContext,
        parent: Call | None = None, step: int | None = None, message: Any = None, timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.registry = registry
        self.name = name
        self.raw_args = raw_args
        """As received; never changed."""
        self.call_id = call_id
        self.origin = origin
        self.run = run
        self.features = run.features
        """Those of its tool's options first, once the tool is known."""
        self.parent = parent
        self.parent_call_id = run.scope.parent_call_id if parent is None else parent.call_id
        self.step = step
        """Number of the step of a plan."""
        self.message = message
        """The assistant message that asked for it, where there is one."""
        self.timeout_s = timeout_s
        """Time limit of this call alone; None is the tool's own or the registry's."""

    @property
    def origin_label(self) -> str:
        """Shape: model, plan[2], code, subagent."""
        return str(self.origin) if self.step is None else f"{self.origin}[{self.step}]"

    @property
    def given(self) -> Any:
        """What the tool is given."""
        return self.args if self.decoded is None else self.decoded

    @property
    def named(self) -> Mapping[str, Any]:
        """The same by name."""
        return self.decoded if type(self.decoded) is dict else self.args

    @property
    def is_approved_later(self) -> bool:
        """True in a dry run, for a call that is not made now: who commits it approves it."""
        return any(approves(self) for approves in self.features.approves)

    @property
    def is_collected(self) -> bool:
        """True for a call that a dry run collects: its tool does not run now, or shows what it would do."""
        return any(collects(self) for collects in self.features.collects)

    def note(self, **facts: Any) -> None:
        """Add what the record has of it."""
        self.facts = {**self.facts, **facts}

    @property
    def agents(self) -> tuple[int, ...]:
        """The agent that makes it and those above, by identity."""
        return self.run.scope.agents

    @property
    def coerced(self) -> list[dict[str, Any]]:
        """Shape: [{"path", "from", "to"}]."""
        return [change.to_dict() for change in self.changes]

    @property
    def is_error(self) -> bool:
        """True when there is a result and it is a failure."""
        return self.result is not None and self.result.is_error

    # Calls below this one

    def nested_run(self) -> RunContext:
        """Return the run as calls made by this call's tool see it."""
        if self._nested is None:
            self._nested = self._make_nested_run() if self.options.orchestrates else self.run
        return self._nested

    def _make_nested_run(self) -> RunContext:
        run, above = self.run, self.run.scope.lineage
        # Not MODEL: what a model may not call directly, its code may well be meant to call.
        origins = above.origins if self.origin is Origin.MODEL else above.origins | {self.origin}
        lineage = Lineage(origins, above.level + 1, self.borrowed_worker, self.held_groups)
        run = run.within(parent_call_id=self.call_id, lineage=lineage)
        if run.scope.is_shared:  # what this tool starts is a run of its own, with bounds of its own
            return run.within(is_shared=False).child(run_id=new_id(), state=RunState())
        return run

    @property
    def callers(self) -> Iterator[Call]:
        """The calls above, innermost first, as far as they were made in this task or its children."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def borrowed_worker(self) -> Workers | None:
        """The worker of the nearest call above that holds one: it waits for this call, so its worker is free for it.

        Waiting for another would be a deadlock when all are held by calls that wait; taking none would break the cap.
        """
        for above in self.callers:
            if above.holds_worker:
                if above._lendable is None:
                    above._lendable = Workers(1)
                return above._lendable
        return self.run.scope.lineage.borrowed_worker

    @property
    def held_groups(self) -> frozenset[str]:
        """Exclusive groups that calls above hold, and so this one need not wait for."""
        groups = {above.options.exclusive_group for above in self.callers}
        return self.run.scope.lineage.held_groups | frozenset(group for group in groups if group is not None)

    def give_up(self, thread: ToolThread) -> None:
        """Take note that a thread of this call runs on although nobody waits for it any more."""
        for call in (self, *self.callers):
            call.threads = (*call.threads, thread)
        self.run.scope.abandoned.add(thread, self.identity, self.name, self.call_id, self.run.run_id)

    # Events, jobs and records

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event of this call, without the run's secrets. A result has lost them already."""
        secrets = self.run.secrets
        if secrets and self.run.events.active:
            fields = {key: value if key == "result" else secrets.shown(value) for key, value in fields.items()}
        self.run.events.emit(
            type=kind,
            run_id=self.run.run_id,
            origin=self.origin_label,
            call_id=self.call_id,
            parent_call_id=self.parent_call_id,
            tool=self.name,
            **fields,
        )

    def deliver(self, result: ToolResult) -> Awaitable[None] | None:
        """Give the run's `on_complete` the final result of background work."""
        return self.run.on_complete(self.run, result) if self.run.on_complete is not None else None
