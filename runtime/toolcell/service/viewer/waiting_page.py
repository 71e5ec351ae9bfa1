"""What waits for a person: calls of suspended runs, and the writes that dry runs have collected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from toolcell.calls.call import ResumeDecision
from toolcell.calls.result import without_bytes
from toolcell.errors import UsageError
from toolcell.results import PendingCall, Suspension
from toolcell.service.run_arguments import context_of
from toolcell.service.running import under_way
from toolcell.service.viewer.rendering import MAX_TEXT_CHARS
from toolcell.service.viewer.service_host import host_of
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import APPROVE, READ
from toolcell.support import daemon_threads
from toolcell.support.call_text import arguments_text, table_text
from toolcell.support.data_text import shown_text
from toolcell.tools import Approve, Deny, Edit

CHANGED = "what waits is no longer what this page showed; look at it again"

TOO_LONG = (
    f"its arguments have more than {MAX_TEXT_CHARS} characters, too many to be read and approved on this page; decide "
    "in a program, with Runtime.resume or Runtime.commit"
)


async def waiting(visit: Visit) -> Response:
    host = host_of(visit)
    await host.service.admission.wait_until_free(visit.visitor.tenant)
    found = (await host.tenant_of(visit.visitor)).journals
    suspended, drafts = await found.suspended(), await found.drafts()

    def shown() -> tuple[list[Any], list[Any]]:
        calls = [(each, [(call, *_arguments_shown(call.args)) for call in each.calls]) for each in suspended]
        return calls, [(each, [(one, *_arguments_shown(one.args)) for one in each.effects]) for each in drafts]

    calls, effects = await daemon_threads.run_large(shown)  # arguments may be long
    return visit.page(
        "waiting",
        suspended=calls,
        headers={each.run_id: await found.header_of(each.run_id) for each in suspended},
        interrupted=await found.interrupted(),
        drafts=effects,
        may_decide=visit.visitor.can(APPROVE),
        too_long=TOO_LONG,
    )


def _arguments_shown(args: Mapping[str, Any]) -> tuple[str, bool]:
    """Return arguments as text, with every cell of tables, and whether that is all of them.

    Too long to be read here: each is cut by itself.
    """
    text = shown_text(args, lambda table: table_text(table, MAX_TEXT_CHARS))
    return (text, True) if len(text) <= MAX_TEXT_CHARS else ("\n".join(arguments_text(args).parts), False)


async def decide(visit: Visit) -> Response:
    """Carry a suspended run on with what the person decided about its calls."""
    ident = visit.request.path_params["ident"]
    api = await host_of(visit).api_request(visit.request, visit.visitor)
    found = next((each for each in await api.tenant.journals.suspended() if each.run_id == ident), None)
    if found is None:
        raise PageMissing("no such run waits: it was decided about already, or has ended")
    decisions = {call.id: _decision(call, number, visit) for number, call in enumerate(found.calls)}
    return await _carried_on(visit, found, decisions)


async def carry_on(visit: Visit) -> Response:
    """Carry an interrupted run on."""
    ident = visit.request.path_params["ident"]
    api = await host_of(visit).api_request(visit.request, visit.visitor)
    if ident not in await api.tenant.journals.interrupted():
        raise PageMissing("no such run was interrupted, or it was carried on already")
    return await _carried_on(visit, ident, {})


async def _carried_on(visit: Visit, token: Suspension | str, decisions: dict[str, ResumeDecision]) -> Response:
    api = await host_of(visit).api_request(visit.request, visit.visitor)
    runtime = api.tenant.runtime
    await api.tenant.reopen_session(token if isinstance(token, str) else token.run_id)
    async with under_way(api) as run:
        options: dict[str, Any] = {"context": context_of(api), "cancel": run.cancel}
        result = await runtime.resume(token, decisions, **options)
    value = shown_text(result.value) if result.has_value else ""
    return visit.page("decided", result=result, value=value, printed=result.logs.text)


def _decision(call: PendingCall, number: int, visit: Visit) -> ResumeDecision:
    """Return what the form says of a call.

    Raises:
        UsageError: it says nothing, or is about another call.
    """
    fields = {name: visit.fields.get(f"{name}-{number}", "") for name in ("digest", "decision", "reason", "args")}
    if fields["digest"] != call.digest:
        raise UsageError(CHANGED)
    if fields["decision"] != "deny" and not _arguments_shown(call.args)[1]:
        raise UsageError(f"call {number + 1} ({call.tool}): {TOO_LONG}")
    reason = fields["reason"].strip()
    match fields["decision"]:
        case "approve":
            return Approve(reason)
        case "deny":
            return Deny(reason or "a person refused it")
        case "edit":
            return Edit(_arguments(fields["args"], call), reason)
    raise UsageError(f"call {number + 1} ({call.tool}): choose approve, deny or edit")


def _arguments(text: str, call: PendingCall) -> dict[str, Any]:
    """Return what the form has in place of the arguments. Those that were not changed stay what they are: JSON has
    no tables, bytes and infinities.

    Raises:
        UsageError: it is not JSON, or changes what stands there for bytes or a table.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the arguments of {call.tool} are not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise UsageError(f"the arguments of {call.tool} must be an object, such as {{}}")
    before = json.loads(_arguments_shown(call.args)[0])
    for name in found.keys() & before.keys():
        given = call.args[name]
        if json.dumps(found[name]) == json.dumps(before[name]):
            found[name] = given
        elif without_bytes(given) is not given:
            raise UsageError(
                f"{name} of {call.tool} holds bytes, an array or a table, which cannot be changed here: leave it as it "
                "is, or decide in a program, with Runtime.resume"
            )
    return found


async def commit(visit: Visit) -> Response:
    """Make the writes of a draft that the person chose."""
    ident = visit.request.path_params["ident"]
    api = await host_of(visit).api_request(visit.request, visit.visitor)
    runtime = api.tenant.runtime
    draft = next((each for each in await api.tenant.journals.drafts() if each.id == ident), None)
    if draft is None:
        raise PageMissing("there is no such draft: it was committed already, or has expired")
    effects = [each.id for each in draft.effects]
    if visit.fields.get("digest") != draft.digest:
        raise UsageError(CHANGED)
    chosen = [each for each in effects if visit.fields.get(f"approve-{each}") == "on"]
    if hidden := [each.id for each in draft.effects if each.id in chosen and not _arguments_shown(each.args)[1]]:
        raise UsageError(f"{', '.join(hidden)}: {TOO_LONG}")
    given = ident if draft.kept_in is not None else draft
    async with under_way(api):
        done = await runtime.commit(given, chosen, context=context_of(api))
    return visit.page("committed", done=done, rows=[(each, _arguments_shown(each.args)[0]) for each in done.effects])


ROUTES = (
    page("/waiting", waiting, READ),
    form("/waiting/runs/{ident}", decide, APPROVE),
    form("/waiting/interrupted/{ident}", carry_on, APPROVE),
    form("/waiting/drafts/{ident}", commit, APPROVE),
)
