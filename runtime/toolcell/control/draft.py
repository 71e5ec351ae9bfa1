"""`Draft`: the writes of a dry run. Tools that only read run as always; calls of the others are collected, not made."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

from toolcell.calls.arguments import ArgumentError, parse_arguments
from toolcell.calls.call import Call, decided
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.placeholders import DryRun, effects_in, placeholder
from toolcell.calls.result import ErrorCode, ToolResult, to_json
from toolcell.calls.run_state import RunLink
from toolcell.calls.schema import OF_RESULTS
from toolcell.calls.values import BadValue, copy_arguments
from toolcell.errors import UnknownId, UsageError
from toolcell.results import Effect, ExecutionResult, effects_digest, shown_effects
from toolcell.support.checks import brief
from toolcell.support.host_work import KEPT_BYTES, about_bytes
from toolcell.support.lru import Lru
from toolcell.support.packing import value_digest
from toolcell.support.text import as_one_line
from toolcell.tools.pipeline import validate
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.stubs import mapping
from toolcell_bridge.guest.placeholder import ENDS_DRAFT, RESULT_OF, member_of

DRAFT_S: Final = 86_400.0
"""Seconds after which a draft cannot be committed any more."""

DRAFTS: Final = 64
"""Drafts of scripts that a Runtime keeps, the latest."""

Approved = str | Iterable[str]
"""\"all\", the digest of a draft, or ids of its effects."""

COLLECTED: Final = "collected in a dry run; the tool did not run"

COMMITTED: Final = "was committed already"
COMMITTING: Final = "is being committed"


@dataclasses.dataclass(slots=True)
class Collected:
    """One call of a tool that writes."""

    id: str
    call: Call
    labels: frozenset[str]
    """Labels of what its run had read when it was collected."""
    line: int | None = None
    depends_on: tuple[str, ...] = ()
    """Effects whose results its arguments refer to."""


def _bytes_of_arguments(call: Call) -> int:
    """Return what they take as they were sent and as they were checked, about."""
    count = about_bytes(call.args)
    try:
        is_same = bool(call.raw_args == call.args)  # much quicker than another walk
    except Exception:  # of what the host sent, such as arrays
        is_same = False
    return count + (count if is_same else about_bytes(call.raw_args))


class Draft(DryRun):
    """The writes of one dry run: of a script, a plan, a batch or an agent. Used in one event loop.

    `Runtime.execute_code(..., dry_run=True)` makes one by itself. For everything else there is
    `RunContext().having(draft)`; then `Runtime.commit(draft)`.
    """

    def __init__(self, *, keep_s: float = DRAFT_S, clock: Callable[[], float] = time.time) -> None:
        self.id = self.key = os.urandom(8).hex()
        self._clock = clock
        self.expires = clock() + keep_s
        """In seconds since the epoch."""
        self.ended = ""
        """Why the dry run could not go on; it has the writes until there."""
        self.state = ""
        """Why it cannot be committed: it was, or it is being committed."""
        self.collected: list[Collected] = []
        """In order."""
        self.scripts: list[str] = []
        """That ran as dry runs of it: whoever decides about the effects reads where they come from."""
        self.kept_in: str | None = None
        """Place of the record that has it. Whoever commits it notes so there, and nobody commits it without that."""
        self.count = 0
        """Effects in all, those included whose preview failed."""
        self._ids: set[str] = set()
        self._refers: dict[Call, tuple[str, ...]] = {}
        """Effects that the arguments of a call refer to, until it is collected or refused."""
        self.size = 0
        """Bytes that are kept of its calls, about."""
        self.reads: list[tuple[Call, str]] = []
        """Calls of tools that read, and digests of what they returned."""

    # What the pipeline asks

    def take(self, call: Call, tool: RegisteredTool, /) -> Awaitable[ToolResult | None] | None:
        """Take the arguments of a call that refer to results which are not known yet. Nobody is asked about them."""
        if not (depends_on := effects_in(arguments_of(call), self.key)):  # before anything else looks at them
            return None
        self._refers[call], call.is_settled = depends_on, True
        return _take_around(call, tool, self.key)

    def approves(self, call: Call, /) -> bool:
        """Return true for a call that is collected: whoever commits it approves it."""
        return not (call.options.read_only or call.options.orchestrates)

    collects = approves

    def replace(self, call: Call, tool: RegisteredTool, /) -> RegisteredTool | ToolResult:
        """Collect a call of a tool that writes, and return a stand-in for its result; let the others run."""
        if self.state:
            message = f"the draft of this dry run {self.state}; make another dry run"
            return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=False)
        if self.ended:
            return ToolResult.fail(self.ended, code=ENDS_DRAFT)
        depends_on = self._refers.get(call, ())
        if not self.approves(call):
            return self._end(call, depends_on) if depends_on else tool
        if unknown := [each for each in depends_on if each not in self._ids]:
            message = f"the arguments refer to the result of {', '.join(unknown)}, and this draft has no such effect"
            return ToolResult.fail(message, code=ErrorCode.INVALID_ARGUMENTS)
        self.count += 1
        self._ids.add(f"effect-{self.count}")
        self.size += _bytes_of_arguments(call)
        self.collected.append(
            Collected(f"effect-{self.count}", call, call.run.state.labels.names, depends_on=depends_on)
        )
        call.warnings = (*call.warnings, COLLECTED)
        if tool.options.preview is not None and not depends_on:
            return tool.preview()
        return self._stand_in(self.collected[-1].id)

    def _stand_in(self, effect: str) -> ToolResult:
        value = placeholder(effect, self.key)
        text = (
            f"collected as {effect} of a dry run, and not made. Its result is known after the commit; an argument of a "
            f"later call can refer to it as {to_json(value)}, and to a member of it, such as its id, as "
            f"{to_json({RESULT_OF: member_of(value[RESULT_OF], '.id')})}"
        )
        return ToolResult.ok(text, value=value)

    def _end(self, call: Call, depends_on: Iterable[str]) -> ToolResult:
        self.ended = (
            f"{call.name} has to run in a dry run, and its arguments need the result of {', '.join(depends_on)}, "
            "which is not known before the commit. The draft ends here, and has the writes until here"
        )
        return ToolResult.fail(self.ended, code=ENDS_DRAFT)

    def concluded(self, call: Call, result: ToolResult, /) -> None:
        """Remember what a tool that reads has returned, so that a commit can look whether it is still so.

        A call whose preview failed is not an effect: the script was told that it fails.
        """
        self._refers.pop(call, None)
        if call.is_executed and result.is_error and self.approves(call):
            failed = [each for each in self.collected if each.call is call]
            self.collected = [each for each in self.collected if each.call is not call]
            self._ids.difference_update(each.id for each in failed)
        if call.is_executed and call.options.read_only and not call.options.orchestrates:
            again = Call(
                call.registry, call.name, raw_args=call.raw_args, call_id=call.call_id, origin=call.origin, run=call.run
            )
            self.size += about_bytes(call.raw_args)
            self.reads.append((again, answer_digest(result)))  # not the call itself, which keeps its result

    # What it has

    def add_script(self, source: str) -> None:
        """Keep the text of a script that runs as a dry run of it."""
        self.scripts.append(source)
        self.size += len(source)

    @property
    def users(self) -> tuple[str, ...]:
        """Whom the collected calls are for, as their runs say; they are made for the same."""
        return tuple(dict.fromkeys(each.call.run.user_id for each in self.collected if each.call.run.user_id))

    def link_of_commit(self, chosen: Container[str], by: str) -> RunLink:
        """Return how the record names its commit, and the run that collected the calls."""
        links = [each.call.run.scope.link for each in self.collected]
        decisions = tuple(
            {
                "call": each.id,
                "tool": each.call.name,
                "line": each.line,
                **decided("approve" if each.id in chosen else "deny", by),
                "at_ns": time.time_ns(),
            }
            for each in self.collected
        )
        return RunLink("", "commits", next((each.id for each in links if each is not None), ""), by, decisions)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The collected calls, in order; secrets of the run are taken out of their arguments."""
        return tuple(_effect(each, self.key) for each in self.collected)

    @property
    def digest(self) -> str:
        """Sha256 of the effects. `Runtime.commit(draft, approve=draft.digest)` makes exactly these."""
        return effects_digest(self.effects)

    def __str__(self) -> str:
        return shown_effects(self.effects, is_whole=not self.ended) + (
            f"\n{as_one_line(self.ended)}" if self.ended else ""
        )

    # Runs of scripts

    def finish(self, result: ExecutionResult, first: int, is_own: Callable[[Call], bool]) -> ExecutionResult:
        """Return the result of a script's dry run. `first`: the `count` of the draft when the script began."""
        before = {f"effect-{number}" for number in range(1, first + 1)}
        new = [each for each in self.collected if each.id not in before]
        records = {each.id: each for each in result.calls}
        own = {each.call.call_id: each for each in new if is_own(each.call)}
        for call_id, each in own.items():
            each.line = records[call_id].line if call_id in records else None
        calls = tuple(
            dataclasses.replace(each, status="collected") if call_id in own else each
            for call_id, each in records.items()
        )
        effects = tuple(_effect(each, self.key) for each in new)
        return dataclasses.replace(
            result, calls=calls, effects=effects, draft_id=self.id, draft_digest=effects_digest(effects)
        )

    # Before a commit

    def check(self) -> None:
        """Check that the draft can be committed.

        Raises:
            UsageError: it was committed, or it has expired.
        """
        if self.state:
            raise UsageError(f"this draft {self.state}: a draft is committed once; make another dry run")
        if self._clock() > self.expires:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.expires))
            raise UsageError(f"this draft expired at {when}; make another dry run")


class Drafts:
    """The drafts of one runtime's scripts, by id."""

    def __init__(self) -> None:
        self._drafts: Lru[str, Draft] = Lru(DRAFTS, KEPT_BYTES)

    def make(self) -> Draft:
        """Return a new draft."""
        draft = Draft()
        self._drafts.measure(lambda each: each.size)
        self._drafts.put(draft.id, draft)
        return draft

    def __iter__(self) -> Iterator[Draft]:
        """Yield the drafts, the oldest first."""
        return iter([*self._drafts.values()])

    def in_memory(self, given: ExecutionResult | Draft) -> Draft | None:
        """Return the draft, if it is in memory here."""
        return given if isinstance(given, Draft) else self._drafts.get(given.draft_id)

    def find(self, given: ExecutionResult | Draft) -> Draft:
        """Return the draft of a dry run, for one commit.

        Raises:
            UnknownId: it is not of this runtime.
            UsageError: it is none, was committed, or has expired.
        """
        draft = given if isinstance(given, Draft) else None
        if isinstance(given, ExecutionResult):
            if not given.draft_id:
                raise UsageError(f"run {given.run_id} was not a dry run: what it wrote is written; write dry_run=True")
            if (draft := self._drafts.get(given.draft_id)) is None:
                raise UnknownId(
                    f"this Runtime has no draft of run {given.run_id}: it was made in another one, or is not among its "
                    f"last {DRAFTS} with at most {KEPT_BYTES} bytes together; make another dry run here"
                )
        if draft is None:
            raise UsageError(f"commit takes the result of a dry run, or a Draft, not {brief(given)}")
        draft.check()
        return draft


def _effect(collected: Collected, draft_id: str) -> Effect:
    call = collected.call
    return Effect(
        collected.id,
        call.name,
        args=call.run.secrets.shown(dict(call.args)) if call.run.secrets else call.args,
        line=collected.line,
        depends_on=collected.depends_on,
        reason=call.approval_reason,
        draft_id=draft_id,
    )


def known_arguments(call: Call, key: str) -> Mapping[str, Any]:
    """Return the arguments of a collected call that are known already, as its tool would receive them."""
    return {name: value for name, value in call.args.items() if not effects_in(value, key)}


def answer_digest(result: ToolResult) -> str:
    """Return the sha256 of what a call returned: two that read the same have the same."""
    if result.error is not None:
        return value_digest(["failed", str(result.error.code), result.message])
    return value_digest(["ok", result.guest_value()])


# Arguments that refer to results which are not known yet

_CHECKED_AROUND = frozenset({
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema",
    OF_RESULTS,
})  # fmt: skip
"""Keywords of a schema that says something about each argument by itself."""


def arguments_of(call: Call) -> Any:
    """Return the arguments as they were received, or what their JSON text says."""
    if not isinstance(call.raw_args, str):
        return call.raw_args
    try:
        return parse_arguments(call.raw_args)
    except ArgumentError:
        return {}  # the call is refused for that


async def _take_around(call: Call, tool: RegisteredTool, key: str) -> ToolResult | None:
    """Check the arguments that hold no placeholders: set `call.args`, or return what is wrong with them."""
    received = arguments_of(call)
    try:
        args = copy_arguments(received, tool.checker.tables).args
    except BadValue as exc:
        return ToolResult.fail(f"invalid tool arguments: {exc}", code=ErrorCode.INVALID_ARGUMENTS)
    schema = tool.definition.checked_parameters
    later = {
        name: value
        for name, value in args.items()
        if name in mapping(schema.get("properties")) and effects_in(value, key)
    }
    if schema.keys() <= _CHECKED_AROUND:
        others = {name: value for name, value in received.items() if name not in later}
        if (refusal := await validate(call, _without(tool, schema, later), others)) is not None:
            return refusal
        args = {**call.args, **later}
    call.args, call.decoded = {name: args[name] for name in dict.fromkeys([*received, *args]) if name in args}, None
    return None


def _without(tool: RegisteredTool, schema: dict[str, Any], names: Mapping[str, Any]) -> RegisteredTool:
    schema["properties"] = {name: part for name, part in mapping(schema.get("properties")).items() if name not in names}
    schema["required"] = [name for name in schema.get("required", ()) if name not in names]
    definition = ToolDefinition(tool.name, tool.definition.description, schema)
    return dataclasses.replace(tool.spec, definition=definition, decode=None, prepare=None).compile()
