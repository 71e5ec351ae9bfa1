"""Drafts on disk: any process with the record commits one, once, also after a host was killed in the commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolcell.calls.call import AlreadyMade, Approve, Call, CallableTools, RunContext
from toolcell.calls.options import Origin
from toolcell.calls.run_state import Lineage, RunLink
from toolcell.calls.values import list_names
from toolcell.control.draft import COMMITTED, Collected, Draft
from toolcell.control.script_header import WHO
from toolcell.control.suspension import IN_DOUBT, check_ids, recorded
from toolcell.errors import ResumeError, UnknownId, UsageError
from toolcell.journal.database import DRAFT, Damaged, OpenJournal
from toolcell.journal.identity import options_of, tool_digests
from toolcell.journal.ledger import RUN, RUN_RECORDS, Journal
from toolcell.journal.replay import RecordedDecision
from toolcell.journal.store import JournalStore
from toolcell.results import ExecutionResult, PendingCall, Preflight
from toolcell.support.checks import brief
from toolcell.support.log import logger_of
from toolcell.support.packing import bytes_digest, pack
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue

logger = logger_of("toolcell.control")

_NAME = re.compile(r"[0-9a-f]{16}")


EffectDecision = Approve | AlreadyMade


def _opened(store: JournalStore, ident: str) -> Journal:
    """Return the journal of a draft, open: one that is not read yet. Only one process has it open at a time.

    Raises:
        UsageError: another process commits it just now, or it cannot be opened.
    """
    try:
        store.database.settle()
        return Journal(ident, file=OpenJournal(store.database, DRAFT, ident))
    except ResumeError as exc:
        raise UsageError(f"draft {ident} is being committed") from exc
    except OSError as exc:
        raise UsageError(f"draft {ident} cannot be opened: {exc}") from exc


def _load(store: JournalStore, journal: Journal) -> Journal:
    """Read what is recorded.

    Raises:
        UsageError: it is damaged.
    """
    try:
        store.database.load(DRAFT, journal.id, RUN_RECORDS, journal)
        if not journal.header:
            raise Damaged("it is empty")
    except Damaged as exc:
        raise UsageError(f"draft {journal.id} is damaged ({exc}); make another one") from exc
    return journal


def is_begun(journal: Journal) -> bool:
    """Return whether somebody has begun to commit a draft."""
    return bool(journal.entries or journal.ended)


def keep_draft(store: JournalStore, draft: Draft, result: ExecutionResult | None = None) -> None:
    """Write a draft to disk, as far as it has got. One that cannot be written is in memory all the same.

    One that another process has begun to commit meanwhile stays as it is: what was made is noted in it.
    """
    try:
        check_place(store, draft)
        journal = _opened(store, draft.id)
        file = journal.file
        assert file is not None
    except UsageError as exc:
        logger.warning("draft %s was not written to disk: %s", draft.id, exc)
        return
    try:
        if draft.kept_in is not None and is_begun(_load(store, journal)):
            draft.state = COMMITTED
            return
        file.write_anew(RUN, draft.id, _content(draft, result))
        store.database.settle()
        draft.kept_in = store.database.place
    except (OSError, UsageError, ValueError, TypeError, UnsendableValue) as exc:
        logger.warning("draft %s is not on disk, so only this process can commit it: %s", draft.id, exc)
        with suppress(OSError):
            file.remove()
        draft.kept_in = None
    finally:
        journal.close()


def _content(draft: Draft, result: ExecutionResult | None) -> dict[str, Any]:
    return {
        "expires": draft.expires,
        "ended": draft.ended,
        "preflight": draft.preflight.to_plain() if draft.preflight is not None else None,
        "effects": [{**_call(each.call), **_effect(each)} for each in draft.collected],
        "reads": [{**_call(call), "answer": answer} for call, answer in draft.reads],
        "value": to_plain(result.value, "value") if result is not None else None,
        "has_value": result is not None and result.has_value,
    }


def _effect(each: Collected) -> dict[str, Any]:
    labels, depends_on = sorted(each.labels), list(each.depends_on)
    return {"id": each.id, "labels": labels, "line": each.line, "depends_on": depends_on}


def _call(call: Call) -> dict[str, Any]:
    return {
        "tool": call.name,
        "raw": call.raw_args if isinstance(call.raw_args, str) else to_plain(dict(call.raw_args), "args"),
        "args": to_plain(dict(call.args), "args"),
        "reason": call.approval_reason,
        "origin": str(call.origin),
        "user": {name: getattr(call.run, name) for name in WHO},
        "run": call.run.scope.link.id if call.run.scope.link is not None else "",
        "above": sorted(map(str, call.run.scope.lineage.origins)),
        "digest": _digest(call.registry, call.name, call.origin),
    }


def _digest(tools: CallableTools, name: str, origin: Origin) -> str:
    """Return the digest of one tool as callers from `origin` see it; of nothing if there is none."""
    return tool_digests(tools, origin).get(name, bytes_digest(pack(name)))


def is_kept(store: JournalStore, ident: str) -> bool:
    """Return whether a draft is on disk."""
    return store.is_durable and store.database.last(DRAFT, ident) > 0


def check_place(store: JournalStore, draft: Draft) -> None:
    """Check that a draft that is on disk can be committed here: elsewhere it might be committed a second time.

    Raises:
        UsageError: this Runtime has another record, or it is gone.
    """
    path = draft.kept_in
    if path is not None and (not store.is_durable or store.database.place != path):
        raise UsageError(f"draft {draft.id} is kept in {path}: use Runtime(record=...) with that record")
    if path is not None and not is_kept(store, draft.id):
        raise UsageError(
            f"draft {draft.id} is not in {path} any more, so nobody knows whether it was committed; make another one"
        )


def check_uncommitted(store: JournalStore, draft: Draft) -> None:
    """Check that nobody has begun to commit what is on disk of a draft. Then more can be collected in it.

    Raises:
        UsageError: somebody has, or it cannot be read.
    """
    if draft.kept_in is None:
        return
    check_place(store, draft)
    journal = find_draft(store, draft.id)
    journal.close()
    if is_begun(journal):
        draft.state = COMMITTED
    draft.check()


def find_draft(store: JournalStore, ident: object) -> Journal:
    """Return the journal of a draft, open.

    Raises:
        UnknownId: there is none.
        UsageError: it cannot be used.
    """
    if not isinstance(ident, str):
        raise UsageError(f"commit takes the result of a dry run, its draft_id, or a Draft, not {brief(ident)}")
    if not _NAME.fullmatch(ident):
        raise UnknownId(
            f"there is no draft {ident!r:.80}: commit takes the result of a dry run, its draft_id, or a Draft"
        )
    if not is_kept(store, ident):
        place = f"in {store.database.place}" if store.is_durable else "in this Runtime"
        raise UnknownId(f"there is no draft {ident} {place}; a draft outlives its process with Runtime(record=FILE)")
    journal = _opened(store, ident)
    try:
        return _load(store, journal)
    except BaseException:
        journal.close()
        raise


def rebuilt(journal: Journal, tools: CallableTools, context: RunContext) -> Draft:
    """Return the draft of a journal, for the tools of this process and under the rules of `context`.

    Raises:
        UsageError: a tool of it is another one now.
    """
    content, draft = journal.header, Draft()
    draft.id = draft.key = journal.id
    draft.expires, draft.ended = content["expires"], content["ended"]
    draft.preflight = Preflight.of_plain(content["preflight"])
    base = context.having(draft)
    for row in content["effects"]:
        call = _rebuilt_call(row, tools, base)
        draft.collected.append(
            Collected(row["id"], call, frozenset(row["labels"]), row["line"], tuple(row["depends_on"]))
        )
    draft.reads = [(_rebuilt_call(row, tools, base), row["answer"]) for row in content["reads"]]
    return draft


def _rebuilt_call(row: dict[str, Any], tools: CallableTools, base: RunContext) -> Call:
    origin = Origin(row["origin"])
    if _digest(tools, row["tool"], origin) != row["digest"]:
        raise UsageError(f"tool {row['tool']!r} is another one than in the dry run; make another dry run")
    registry: Any = tools
    lineage = Lineage(frozenset(map(Origin, row["above"])))
    run = base.within(lineage=lineage, link=RunLink(row["run"])).child(**row["user"])
    call = Call(registry, row["tool"], raw_args=row["raw"], call_id=row.get("id", ""), origin=origin, run=run)
    call.args, call.approval_reason = row["args"], row["reason"]
    return call


def settle_doubt(
    journal: Journal, draft: Draft, decisions: Mapping[str, EffectDecision] | None, tools: CallableTools
) -> None:
    """Take decisions about effects in doubt. One of a tool that reads or is idempotent needs none: it is made again.

    Raises:
        UsageError: an effect in doubt has no decision, or a decision is about another effect, or is none.
        OSError: it could not be written.
    """
    given, decided = decisions or {}, dict[int, RecordedDecision]()
    doubtful = {
        draft.collected[number - 1].id: entry
        for number, entry in journal.entries.items()
        if entry.is_in_doubt and entry.decision is None and not options_of(tools, entry.tool).is_repeatable
    }
    check_ids(given, doubtful)
    if undecided := [each for each in doubtful if each not in given]:
        named = list_names(f"{each} ({doubtful[each].tool})" for each in undecided)
        raise UsageError(
            f"{named}: in doubt. The call had started when its host ended, and its result is not known. Find out, and "
            f"pass decisions={{{undecided[0]!r}: AlreadyMade(result)}}, or Approve() to make it again"
        )
    for ident, decision in given.items():
        if not isinstance(decision, AlreadyMade | Approve):
            raise UsageError(f"the decision about {ident} is AlreadyMade(...) or Approve(), not {brief(decision)}")
        about = PendingCall(ident, doubtful[ident].tool, args={}, line=None, digest="", reason=IN_DOUBT)
        decided[doubtful[ident].number] = recorded(decision, about, is_in_doubt=True)
    if decided:
        journal.use_token(decided)
