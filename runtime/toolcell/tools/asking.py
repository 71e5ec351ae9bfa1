"""Ask hooks about a call, and those who approve calls: they may refuse it, answer it, or give it other arguments."""

from __future__ import annotations

import json

import msgpack

from toolcell.calls.call import Call, CallHook, decided
from toolcell.calls.hooks import (
    Approve,
    Block,
    Decision,
    Deny,
    Edit,
    Rewrite,
    ask_before,
    hook_turn,
    name_of,
    not_approved,
    refused_by_person,
)
from toolcell.calls.result import ToolResult
from toolcell.tools.spec import RegisteredTool
from toolcell.tools.validation import validate


async def ask(hooks: tuple[CallHook, ...], call: Call, tool: RegisteredTool) -> ToolResult | None:
    """Ask outer to inner. The first that answers ends it; a rewrite is seen by the hooks further in."""
    approved: bytes | None = None
    async with hook_turn(call.run):
        for hook in hooks:
            refusal: ToolResult | None = None
            asked_about = _fingerprint(call)
            match await ask_before(hook, call):
                case Approve() | Edit() | Deny() as given:
                    refusal = await _decided(call, tool, given, name_of(hook, hook.before))
                    if not isinstance(given, Deny):
                        approved = asked_about if isinstance(given, Approve) else _fingerprint(call)
                case Rewrite(args):
                    call.note(rewritten_by=[*call.facts.get("rewritten_by", ()), name_of(hook, hook.before)])
                    refusal = await validate(call, tool, args)
                case ToolResult() as answer:
                    refusal = answer
            if refusal is not None:
                return refusal
    call.approved = approved is not None and approved == _fingerprint(call)
    if call.approved or not call.approval_reason or call.is_approved_later:
        return None
    # Not in the turn of the hooks: an answer may take as long as the run.
    for decide in call.features.decide:
        match await decide(call):
            case Approve() | Edit() | Deny() as given:
                refusal = await _decided(call, tool, given)
            case Block(reason):  # nobody was asked
                refusal = refused_by_person(call, reason)
            case _:
                refusal = not_approved(call, False)
        call.approved = refusal is None
        return refusal
    return not_approved(call, approved is not None)


async def _decided(call: Call, tool: RegisteredTool, given: Decision, by: str = "") -> ToolResult | None:
    """Note a decision. Return the refusal of a call that was denied, or that cannot have other arguments."""
    if call.approval_reason or not isinstance(given, Approve):
        call.note(decided=decided(type(given).__name__.lower(), given.by or by, given.reason))
    match given:
        case Edit(args):
            return await validate(call, tool, args)
        case Deny(reason):
            return refused_by_person(call, reason)
    return None


def _fingerprint(call: Call) -> bytes:
    """Identify the arguments that somebody was asked about: an approval counts for these only."""
    try:
        packed: bytes = msgpack.packb(call.args)  # ten times as fast as JSON, for arguments of any size
        return packed
    except (TypeError, ValueError, OverflowError):  # a hook has put something else into them
        return json.dumps(call.args, sort_keys=True, default=repr).encode()
