"""Make what a dry run collected: the approved effects in their order, each on the path of every call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from toolcell.calls.call import Approvals, Call, Features, Meter, RunContext
from toolcell.calls.placeholders import DryRun, effects_in, with_results
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.run_state import Lineage
from toolcell.control.draft import Approved, Collected, Draft, answer_digest, arguments_of, known_arguments
from toolcell.control.suspension import recorded_answer
from toolcell.errors import AuditError, ToolAbort, UsageError
from toolcell.journal.identity import digest_of_call, options_of
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import JournalEntry
from toolcell.results import EffectResult, EffectStatus, cut_in_listing
from toolcell.support.checks import brief
from toolcell.tools.spec import RegisteredTool
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import HTTP_READ, ToolFail, ToolReturn


def approved_ids(draft: Draft, approve: Approved, digest: str = "") -> set[str]:
    """Return the effects that are to be made. `digest`: of those that the caller was given, where it is known.

    Raises:
        UsageError: there is no such effect, one depends on another that is not approved, or "all" would approve what
            nobody can have read.
    """
    effects = draft.effects
    known = [effect.id for effect in effects]
    if approve == "all":
        if digest and digest != draft.digest:
            raise UsageError(
                f"this draft has {len(effects)} effects, and they are not those of this result: read them, then commit "
                "with their ids"
            )
        if problem := cut_in_listing(effects):
            raise UsageError(
                f'approve="all" is for a draft whose text shows it whole, and of this one {problem}. Read its '
                ".effects, then approve their digest (Draft.digest, ExecutionResult.draft_digest) or their ids"
            )
        return set(known)
    if isinstance(approve, str) and _DIGEST.fullmatch(approve):
        if approve != draft.digest:
            raise UsageError(f"approve: the effects of this draft have sha256 {draft.digest}, not {approve}")
        return set(known)
    if isinstance(approve, str) or not isinstance(approve, Iterable):
        raise UsageError(f"approve must be \"all\", a draft's digest or a list of effects' ids, not {brief(approve)}")
    given: list[Any] = list(approve)
    if others := [each for each in given if not isinstance(each, str)]:
        raise UsageError(f"approve takes ids of effects, such as [effect.id for effect in ...], not {brief(others[0])}")
    chosen = set(given)
    if unknown := [each for each in chosen if each not in known]:
        raise UsageError(f"this draft has no {', '.join(sorted(unknown))}; it has: {', '.join(known) or 'no effects'}")
    for effect in effects:
        if effect.id in chosen and (missing := [each for each in effect.depends_on if each not in chosen]):
            needs = ", ".join(missing)
            raise UsageError(f"{effect.id} needs the result of {needs}, which is not approved; approve both or neither")
    return chosen


_DIGEST: Final = re.compile("[0-9a-f]{64}")


class Commit(DryRun):
    """Makes the effects of one draft. For each it is the `DryRun` of its call: it lets the approved call run."""

    def __init__(self, draft: Draft, context: RunContext, journal: Journal) -> None:
        """`journal`: has the effects that are to be made. What it answers is not made again."""
        self._draft, self._run, self._journal = draft, context, journal
        self._making: Collected | None = None
        self.results: dict[str, Any] = {}
        """What the effects returned that were made."""

    # What the pipeline asks

    def approves(self, call: Call, /) -> bool:
        """Return true for the call of the effect itself, which was approved, and false for calls below it."""
        return call.parent is None and self._making is not None and call.name == self._making.call.name

    waited = approves
    """The call was counted when it was collected."""

    def replace(self, call: Call, tool: RegisteredTool, /) -> RegisteredTool | ToolResult:
        """Let the tool run, if its arguments are those that were shown."""
        planned = self._making
        if planned is None or not self.approves(call):
            return tool
        if call.approval_reason and call.approval_reason != planned.call.approval_reason:
            message = f'tool "{call.name}" {call.approval_reason}; the draft did not show that, so it was not made'
            return ToolResult.fail(message, code=ErrorCode.NOT_PERMITTED, status=Status.BLOCKED)
        if not _are_planned(call, planned, tool, self._draft.key):
            message = "its arguments would not be those of the draft: a hook, or the tool's preparation, changed them"
            return ToolResult.fail(f"{message}; it was not made", code=ErrorCode.BLOCKED, status=Status.BLOCKED)
        self._journal.start(self._journal.current[call.call_id])  # before it has an effect
        return tool

    # Making

    async def make(self) -> list[EffectResult]:
        """Make the approved effects in order, until one fails."""
        rows, is_stopped = list[EffectResult](), False
        for number, each in enumerate(self._draft.collected, 1):
            ident, call, error = each.id, each.call, ""
            args = self._run.secrets.shown(with_results(dict(call.args), self._draft.key, self.results))
            entry = self._journal.entries.get(number)
            status: EffectStatus = "not approved" if entry is None else "not made"
            if entry is not None and not is_stopped:
                status, error = await self._one(each, entry)
                is_stopped = status != "made"
            rows.append(
                EffectResult(ident, call.name, args=args, status=status, value=self.results.get(ident), error=error)
            )
        return rows

    async def _one(self, effect: Collected, entry: JournalEntry) -> tuple[EffectStatus, str]:
        """Make one effect, unless a commit that was cut short has made it."""
        result = await recorded_answer(entry, options_of(effect.call.registry, entry.tool), None)
        if result is None:
            self._journal.ask(effect.id, entry.tool, None, entry)
            result = await self._make_effect(effect)
            if entry.is_started and self._journal.file is not None:
                self._journal.keep_answer(entry, _frame(entry.number, result))
                if self._journal.lost:
                    raise OSError(self._journal.lost)
        if result.is_error:
            return ("failed" if entry.is_started else "refused"), result.message
        self.results[effect.id] = result.guest_value()
        return "made", ""

    async def _make_effect(self, effect: Collected) -> ToolResult:
        call, self._making = effect.call, effect
        self._run.state.labels.add(effect.labels)
        args = call.raw_args
        if effects_in(arguments_of(call), self._draft.key):
            args = with_results(arguments_of(call), self._draft.key, self.results)
            if missing := effects_in(args, self._draft.key):
                message = f"the result of {missing[0]} does not have what {call.name} was to be given of it"
                return ToolResult.fail(f"{message}; it was not made", code=ErrorCode.BLOCKED, status=Status.BLOCKED)
        try:
            return await again(call, args, effect.id, self._run, self)
        except (ToolAbort, AuditError) as exc:
            return ToolResult.fail(f"the call ended the commit: {exc}", code=ErrorCode.UNAVAILABLE)


def _frame(number: int, result: ToolResult) -> bytes:
    error = result.error
    if error is None or not result.is_error:
        return encode(ToolReturn(number, to_plain(result.guest_value(), "result")), LONGEST)
    return encode(ToolFail(number, str(error.code), result.message, error.retryable, {}), LONGEST)


LONGEST: Final = 1 << 31
"""Bytes of a frame that is not sent."""


def _are_planned(call: Call, effect: Collected, tool: RegisteredTool, key: str) -> bool:
    """True when the arguments of a call are those that were shown, and results in the place of placeholders."""
    planned, expected = effect.call, known_arguments(effect.call, key)
    if {name: call.args.get(name) for name in expected} != expected or planned.args.keys() - call.args.keys():
        return False
    added = call.args.keys() - planned.args.keys()
    if not (added and effect.depends_on):
        return not added
    defaults = tool.definition.parameters.get("properties", {})  # filled in now, where the schema was too odd before
    return all(name in defaults and call.args[name] == defaults[name].get("default") for name in added)


async def again(call: Call, args: Any, call_id: str, run: RunContext, dry_run: DryRun) -> ToolResult:
    """Make a call of a dry run again, for the same user and under the same rules, with `args` and in another run."""
    rules = [each for each in call.run.features if isinstance(each, _RULES)]
    rest = [each for each in run.features if not isinstance(each, (*_RULES, DryRun))]
    context = call.run.within(
        requests=None,
        work=None,
        parent_call_id=None,
        lineage=Lineage(call.run.scope.lineage.origins),
        link=run.scope.link,
    ).child(
        run_id=run.run_id,
        features=Features([dry_run, *rest, *rules]),
        events=run.events,
        state=run.state,
        deadline=math.inf,
    )
    tools = call.registry
    return await tools.make(tools.new_call(call.name, args, call_id=call_id, origin=call.origin, context=context))


_RULES: Final = (Approvals, Meter)
"""Features that a call of a dry run keeps when it is made."""


async def changed_read(draft: Draft, run: RunContext) -> str:
    """Make the reads of a draft again, and return which one has another result now; empty when none has.

    What a tool that reads calls below it may write, so these calls are collected again, and dropped. Parts of an answer
    are not asked for again: an answer that has some counts as changed, unless its name says what they are.
    """
    last = dict[str, tuple[Call, str]]()
    for call, answer in draft.reads:
        if call.name == HTTP_READ:
            continue
        last[await digest_of_call(call.name, arguments_of(call))] = call, answer
    for number, (call, answer) in enumerate(last.values(), 1):
        if answer_digest(await again(call, call.raw_args, f"recheck-{number}", run, Draft())) != answer:
            return call.name
    return ""


def settled(value: Any, draft: Draft, results: Mapping[str, Any]) -> Any:
    """Return a script's result with the results of the effects that were made."""
    return with_results(value, draft.key, results)
