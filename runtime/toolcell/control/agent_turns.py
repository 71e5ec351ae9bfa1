"""Suspend an agent: calls of one model response wait for decisions, and the conversation goes on from its transcript.

The calls that wait stay open in the transcript. A script that waits is suspended by its runtime, with its own journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Self

from toolcell.calls.call import Approvals, Approve, Block, Call, CallableTools, Decision, ResumeDecision
from toolcell.calls.options import Origin
from toolcell.control.suspension import IN_DOUBT, answer_of, check_ids, recorded
from toolcell.errors import ResumeError
from toolcell.journal.approval_tokens import OF_AGENT, foreign_text, make_token, read_token
from toolcell.journal.identity import digest_of_call, registry_digest, tool_digests
from toolcell.journal.replay import RecordedDecision
from toolcell.journal.store import JournalStore
from toolcell.results import ExecutionResult, PendingCall, Suspension
from toolcell.tools.code import ExecuteCode

BELOW_TURN: Final = (
    "it needs approval, and a call below one of the model's own cannot wait for it: let the tool that the model calls "
    "require approval, or answer with an approval hook"
)


IN_PLAN: Final = "it needs approval, and a step of a plan cannot wait for it: call the tool by itself, not in a plan"


class TurnApprovals(Approvals):
    """The `Approvals` of an agent with `on_approval="suspend"`, for one run of its loop."""

    WAITS: ClassVar = "it waits for a decision"

    def __init__(
        self,
        store: JournalStore,
        messages: Sequence[Mapping[str, Any]],
        tools: CallableTools | None,
        decided: Mapping[str, RecordedDecision] | None = None,
        scripts: Mapping[str, tuple[str, dict[str, ResumeDecision]]] | None = None,
        run_id: str = "",
    ) -> None:
        """`messages`: the conversation, to which the run appends. `decided`: by the id of the model's call. `scripts`:
        tokens of scripts, and what was decided about them."""
        self._store, self._messages, self._tools = store, messages, tools
        self.is_resumed = decided is not None
        self.run_id = run_id
        """Id of the run that was suspended first; empty when this is a new one."""
        self._decided = dict(decided or {})
        self._scripts = dict(scripts or {})
        self.pending: dict[str, tuple[PendingCall, ...]] = {}
        """What waits, by the id of the model's call."""
        self.tokens: dict[str, str] = {}
        """Tokens of the scripts that wait, by the id of the call of `execute_code`."""

    def waits(self, call: Call) -> bool:
        """Return whether a call of the model got no answer, because it waits."""
        return call.parent is None and call.call_id in self.pending

    async def decide(self, call: Call, /) -> Decision | Block:
        """Return what was decided about a call of the model; without a decision, let it wait."""
        if call.parent is not None:
            why = IN_PLAN if call.origin is Origin.PLAN else BELOW_TURN
            return Block(f'tool "{call.name}" was refused: {why}')
        if call.call_id in self._scripts:
            return Approve()  # its script has begun, and only goes on
        digest = await digest_of_call(call.name, call.args)
        decision = self._decided.pop(call.call_id, None)
        if decision is None or decision.reason != call.approval_reason:
            pending = PendingCall(
                call.call_id, call.name, args=dict(call.args), line=None, digest=digest, reason=call.approval_reason
            )
            self.pending[call.call_id] = (pending,)
            return Block(self.WAITS)
        if decision.digest != digest:
            return Block("its arguments are not those that were decided about; it was not made")
        return answer_of(decision)

    def waited(self, call: Call, /) -> bool:
        """Return true for a call of the model that was decided about, or whose script waited."""
        return call.parent is None and (call.call_id in self._decided or call.call_id in self._scripts)

    async def run_script(
        self, execute: ExecuteCode, resume: ExecuteCode, source: str, call: Call, options: dict[str, Any]
    ) -> ExecutionResult:
        """Run a script that may wait, or carry it on."""
        token, decisions = self._scripts.pop(call.call_id, ("", {}))
        if token:
            known = {name: options[name] for name in ("tools", "context", "on_log", "on_progress") if name in options}
            result = await resume(token, decisions, **known)
        else:
            result = await execute(source, on_approval="suspend", **options)
        if (waiting := result.suspension) is not None:
            self.tokens[call.call_id] = waiting.to_json()
            self.pending[call.call_id] = tuple(replace(each, id=f"{call.call_id}/{each.id}") for each in waiting.calls)
        return result

    def suspend(self, run_id: str) -> Suspension:
        """Return the suspension of the calls that wait, with its token."""
        order = [call["id"] for message in self._messages for call in message.get("tool_calls") or ()]
        waiting = sorted(self.pending.items(), key=lambda item: order.index(item[0]))
        calls = tuple(each for _, pending in waiting for each in pending)
        expires = time.time() + self._store.token_s
        token = make_token(
            self._store.key,
            token_id=os.urandom(12).hex(),
            run=run_id,
            source=_digest([self._messages, self.tokens]),
            tools=_tools_digest(self._tools),
            expires=expires,
            calls=calls,
        )
        return Suspension(run_id, calls, expires, f'{{"{OF_AGENT}": {token}, "scripts": {json.dumps(self.tokens)}}}')

    @classmethod
    def resumed(
        cls,
        store: JournalStore,
        messages: Sequence[Mapping[str, Any]],
        tools: CallableTools | None,
        given: str | Suspension,
        decisions: Mapping[str, ResumeDecision],
    ) -> Self:
        """Return the approvals with which the conversation goes on. The token is used up by that.

        Raises:
            ResumeError: the token is none, was changed, is from elsewhere, has expired or was used; or conversation or
                tools are others. Nothing was made.
            UsageError: a decision is about a call that does not wait for one, or does not fit such a call.
        """
        text = given.to_json() if isinstance(given, Suspension) else given
        try:
            outer = json.loads(text)
            inner, scripts = json.dumps(outer[OF_AGENT]), dict(outer["scripts"])
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise ResumeError(foreign_text(text, is_for_agent=True)) from exc
        token = read_token(inner, store.key)
        if token["source"] != _digest([messages, scripts]):
            raise ResumeError("the agent's conversation is not the one that was suspended; set agent.messages to it")
        if token["tools"] != _tools_digest(tools):
            raise ResumeError("the agent has other tools than when it was suspended; resume it with those")
        known = {row["id"]: PendingCall(**row) for row in token["calls"]}
        check_ids(decisions, known)
        of_scripts: dict[str, tuple[str, dict[str, ResumeDecision]]] = {}
        for ident, script in scripts.items():
            start = f"{ident}/"
            mine = {name.removeprefix(start): each for name, each in decisions.items() if name.startswith(start)}
            of_scripts[ident] = script, mine
        waiting = {name: known[name] for name in decisions}
        decided = {name: recorded(decisions[name], each, each.reason == IN_DOUBT) for name, each in waiting.items()}
        _use_once(store, str(token["token"]), str(token["run"]))
        return cls(store, messages, tools, decided, of_scripts, str(token["run"]))


def _tools_digest(tools: CallableTools | None) -> str:
    return registry_digest(tool_digests(tools, Origin.MODEL) if tools is not None else {})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")).hexdigest()


def _use_once(store: JournalStore, token: str, run: str) -> None:
    """Note that a token is used: in the journal directory, so that every process knows, or in memory.

    Raises:
        ResumeError: it was used before, or this cannot be noted.
    """
    used = ResumeError(f"this token of the suspended agent (run {run}) was used already; a token resumes it once")
    if token in store.used:
        raise used
    store.used.add(token)
    try:
        if store.is_durable and not store.database.use_once(token):
            raise used
    except OSError as exc:
        raise ResumeError(f"the token cannot be noted as used: {exc}; nothing was made") from exc
