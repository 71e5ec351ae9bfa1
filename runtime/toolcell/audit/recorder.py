"""Record the start of a run: its script, inputs, settings, tools and user.

A `Recorder` hands plain data to the log, and knows neither files nor keys.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, Any

import anyio

from toolcell.audit import cutting
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.audit.run_record import RunRecord, records_of_calls
from toolcell.calls.options import Origin
from toolcell.calls.placeholders import DryRun
from toolcell.calls.run_state import RunLink
from toolcell.errors import AuditError, SandboxUnavailable, ToolAbort
from toolcell.run.run import Run, RunPart
from toolcell.sandbox.backend import profile_of
from toolcell.support import daemon_threads
from toolcell.support.lru import Lru
from toolcell.support.packing import bytes_digest, pack, text_digest, unpack, value_digest

if TYPE_CHECKING:
    from toolcell.calls.call import CallableTools, RunContext
    from toolcell.calls.definition import ToolDefinition
    from toolcell.config import Limits, Policy
    from toolcell.results import ExecutionResult
    from toolcell.sandbox.backend import GuestFile, Sandbox
    from toolcell_bridge.wire.messages import CallTool, RunScript

CODE, CALLS = "code", "calls"
"""Kinds of runs: a script in a sandbox; tool calls without a sandbox, made by a model, a plan or a program."""

MAX_FILES_BYTES = 1 << 20
"""Input files kept in one record, all together."""

SMALL_FILES_BYTES = 128 * 1024
"""So much is looked through at once; more in a thread, so that other runs go on."""

MAX_REMEMBERED_IDS = 4096
MAX_SHARED = 64


class Recorder:
    """Begins the records of runs in one log. One per runtime."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log
        self._last_redactor: tuple[Mapping[str, str] | None, Redactor] = (None, log.redactor)
        self._shared: Lru[Any, _Shared] = Lru(MAX_SHARED)
        self._ids: Lru[str, None] = Lru(MAX_REMEMBERED_IDS)
        self._content_of = functools.lru_cache(maxsize=1024)(log.config.content_of)

    # Before a run

    async def file_entries(self, files: Sequence[GuestFile], context: RunContext) -> list[Any]:
        """Return what `beginning` records of input files. To look through large ones takes time.

        Shape: [[name, size, sha256, content or None]].
        """
        redactor = self._redactor_of(context.secrets)
        if sum(len(file.data) for file in files) <= SMALL_FILES_BYTES:
            return _input_files(files, self.log, redactor)
        return await daemon_threads.run_large(_input_files, files, self.log, redactor)

    # Runs

    def beginning(
        self,
        message: RunScript,
        *,
        limits: Limits,
        policy: Policy,
        registry: CallableTools,
        context: RunContext,
        files: Sequence[Any] = (),
        sandbox: Sandbox | None = None,
        environment: Mapping[str, Any] | None = None,
        egress: Sequence[Mapping[str, Any]] = (),
    ) -> RunRecord:
        """Return the record of a script that is about to run. `files` are its `file_entries`.

        `egress`: the rules about its requests.
        """
        tools = self._tools(registry, frozenset(message.tools.split())) if message.tools else None
        settings = self._settings(limits, policy, sandbox, environment or {}, egress)
        sandbox_id = sandbox.id if sandbox is not None else None
        return self._beginning(context, CODE, message, files, tools, settings, sandbox_id)

    async def recording(
        self, run: Run, *, policy: Policy, environment: Mapping[str, Any], egress: Sequence[Mapping[str, Any]]
    ) -> ScriptRecording:
        """Return what records a script's run, from the moment on at which the script was sent."""
        script, context, message, tools = run.script, run.context, run.message, run.tools
        entries = await self.file_entries(script.files, context) if script.files else []

        def make(sandbox: Sandbox | None) -> RunRecord:
            record = self.beginning(
                message,
                limits=script.limits,
                policy=policy,
                registry=tools,
                context=context,
                files=entries,
                sandbox=sandbox,
                environment=environment,
                egress=egress,
            )
            record.writes_ends_later = self.log.config.fsync != "always"
            return record

        return ScriptRecording(make, run.is_large)

    @asynccontextmanager
    async def observe(
        self, context: RunContext, kind: str = CALLS, link: RunLink | None = None
    ) -> AsyncIterator[RunContext]:
        """Record every call made with the yielded context, for agents, plans and programs without a sandbox.

        `link`: names the run that it goes on from.
        """
        context = context.within(link=link or RunLink())
        record = self._beginning(context, kind)
        if not record.begin():
            await daemon_threads.run_sync(record.begin, True)
        try:
            yield record.context
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                await daemon_threads.run_sync(record.failed, exc)
            raise
        if not record.end_calls():
            with anyio.CancelScope(shield=True):
                await daemon_threads.run_sync(record.end_calls, True)

    def _beginning(
        self,
        context: RunContext,
        kind: str,
        message: RunScript | None = None,
        files: Sequence[Any] = (),
        tools: _Shared | None = None,
        settings: _Shared | None = None,
        sandbox_id: str | None = None,
    ) -> RunRecord:
        redactor = self._redactor_of(context.secrets)
        script: tuple[Any, ...] = (None, None, None, None)
        own: tuple[Any, ...] = (None, None, None)
        if message is not None:
            inputs = message.inputs
            script = (message.source, text_digest(message.source), inputs, value_digest(inputs) if inputs else None)
            own = (
                (message.lint, message.seed, message.clock)
                if self.log.config.repeatable
                else (message.lint, None, None)
            )
        id = self._new_id(context)
        if (link := context.scope.link) is not None:
            link.id = id
        fields: tuple[Any, ...] = (
            id,
            kind,
            *script,
            [*files],
            tools and tools.digest,
            settings and settings.digest,
            *own,
            sandbox_id,
            _who(context),
            records_of_calls("decisions", link.decisions, self._content_of, self.log, redactor) if link else {},
        )
        shared = {each.digest: each.packed for each in (tools, settings) if each is not None}
        return RunRecord(self.log, self._content_of, context, redactor, fields, shared)

    def _redactor_of(self, secrets: Mapping[str, str]) -> Redactor:
        if not secrets:
            return self.log.redactor
        if self._last_redactor[0] is not secrets:
            self._last_redactor = (secrets, self.log.redactor.with_secrets(secrets.values()))
        return self._last_redactor[1]

    def _new_id(self, context: RunContext) -> str:
        """Return the run's id. Several scripts of one agent or session share an id, so each gets a suffix."""
        wanted = context.run_id
        if context.scope.parent_call_id is not None or wanted in self._ids:
            return f"{wanted}.{os.urandom(4).hex()}"
        self._ids.put(wanted, None)
        return wanted

    def _settings(
        self,
        limits: Limits,
        policy: Policy,
        sandbox: Sandbox | None,
        environment: Mapping[str, Any],
        egress: Sequence[Mapping[str, Any]],
    ) -> _Shared:
        """Return the record of the limits, policy, isolation and rules about requests that a script runs with."""
        layers = (sandbox.backend, *sandbox.layers.items()) if sandbox is not None else ()
        key = (id(limits), id(policy), layers, bool(egress))  # a runtime has one set of rules
        if (known := self._shared.get(key)) is None:
            policy_fields: dict[str, Any] = {
                "hash_seed": policy.hash_seed if self.log.config.repeatable else None,
                "require": sorted(policy.require),
            }
            policy_fields["profile"] = policy.profile
            isolation: dict[str, Any] = {"environment": environment}
            if sandbox is not None:
                isolation |= {"backend": sandbox.backend, "layers": dict(sandbox.layers), **profile_of(sandbox)}
            known = self._remember(key, (limits.model_dump(), policy_fields, isolation, [*egress]), (limits, policy))
        return known

    def _tools(self, registry: CallableTools, names: frozenset[str]) -> _Shared:
        """Return the record of the tools that a script may call."""
        offered = [each for each in registry.definitions(Origin.CODE) if each.name in names]
        key = tuple(map(id, offered))
        if (known := self._shared.get(key)) is None:
            known = self._remember(key, ([_defined(registry, each) for each in offered],), offered)
        return known

    def _remember(self, key: Any, content: tuple[Any, ...], alive: object) -> _Shared:
        redactor, packed = self.log.redactor, pack(content)
        if (rules := redactor.scan(packed)) is not None:  # an argument called `token` is not a token
            cleaned, count = redactor.clean(unpack(packed), rules, with_names=False)
            packed = pack(cleaned) if count else packed
        known = _Shared(bytes_digest(packed), packed, alive)
        self._shared.put(key, known)
        return known


def _defined(registry: CallableTools, tool: ToolDefinition) -> list[Any]:
    """Shape: [name, description, parameters], and what it returns where it says so."""
    returns = registry.returns(tool.name)
    return [tool.name, tool.description, tool.parameters] + ([dict(returns)] if returns is not None else [])


@dataclass(frozen=True, slots=True)
class _Shared:
    """Tools or settings of many runs. They are recorded once, and runs name their digest."""

    digest: str
    packed: bytes
    alive: object
    """The objects whose ids are in the key; kept alive so that no other object gets the same id."""


def _input_files(files: Iterable[GuestFile], log: AuditLog, redactor: Redactor) -> list[Any]:
    """Shape: [[name, size, sha256, content or None]]."""
    left = MAX_FILES_BYTES
    listed: list[Any] = []
    for file in files:
        if isinstance(file.data, mmap):  # the state of a session: what led to it is recorded
            listed.append([file.name, len(file.data), "", None])
            continue
        entry = cutting.file_entry(file.name, file.data, min(log.config.file_bytes, left), redactor)
        left -= len(entry[-1] or b"")
        listed.append(entry)
    return listed


def _who(context: RunContext) -> dict[str, Any]:
    named = {
        "run": context.run_id,
        "parent_call": context.scope.parent_call_id,
        "user": context.user_id,
        "thread": context.thread_id,
        "channel": context.channel,
        "chat": context.chat_id,
        "session": context.scope.session_id,
        "item": context.scope.item,
        "depth": context.scope.depth,
        "dry_run": dry_run.key if (dry_run := context.feature(DryRun)) is not None else "",
    }
    if (link := context.scope.link) is not None:
        named |= {link.relation: link.after, "decided_by": link.decided_by}
    return {name: value for name, value in named.items() if value}


class ScriptRecording(RunPart):
    """Writes a run's records while the guest is busy, so that its script does not wait.

    Invariant: every effect has its record first. The start of a run is written after its script was sent and before any
    call of it is made. The end of a call is written after its answer was sent, with the next event or in a moment. A
    host that is killed in between leaves a start without an end, never an effect without a record.
    """

    __slots__ = ("_is_large", "_make", "_record", "_sandbox")

    def __init__(self, make: Callable[[Sandbox | None], RunRecord], is_large: bool) -> None:
        """`make` returns the record, which begins here. `is_large`: a thread writes the start of the run."""
        self._make, self._is_large = make, is_large
        self._sandbox: Sandbox | None = None
        self._record: RunRecord | None = None

    def sandbox_found(self, sandbox: Sandbox) -> None:
        """Remember the sandbox: its isolation belongs to the record."""
        self._sandbox = sandbox

    def script_sent(self) -> Awaitable[None] | None:
        """Record the start of the run."""
        if self._is_large:
            return self._begin_large()
        record = self._make(self._sandbox)
        if not record.begin():
            return self._begin_later(record)
        self._record = record
        return None

    async def _begin_later(self, record: RunRecord) -> None:
        await daemon_threads.run_sync(record.begin, True)
        self._record = record

    async def _begin_large(self) -> None:
        def begin() -> RunRecord:
            record = self._make(self._sandbox)
            record.begin(wait=True)
            return record

        self._record = await daemon_threads.run_large(begin)

    def context_of(self, call: CallTool, call_id: str, context: RunContext) -> RunContext:
        """Return a context whose calls are recorded."""
        record = self._record
        assert record is not None
        record.lines[call_id] = call.line
        return record.context

    def unrecorded(self, error: AuditError) -> None:
        """Keep the error, for the end of the run."""
        assert self._record is not None
        self._record.problem = error

    def answers_sent(self) -> None:
        """Record the ends of the calls that were answered."""
        if self._record is not None:
            try:
                self._record.write_ends()
            except AuditError as exc:
                self._record.problem = exc
                raise ToolAbort("a tool call could not be recorded") from exc

    def ended(self, result: ExecutionResult) -> Awaitable[None] | None:
        """Record the end of the run."""
        record = self._record
        return None if record is None or record.end(result, wait=False) else self._end_later(record, result)

    async def _end_later(self, record: RunRecord, result: ExecutionResult) -> None:
        await daemon_threads.run_large(record.end, result)

    async def failed(self, error: BaseException) -> None:
        """Record that the run has no result."""
        if self._record is None and isinstance(error, SandboxUnavailable):
            await self._begin_later(self._make(self._sandbox))
        if self._record is not None:
            await daemon_threads.run_sync(self._record.failed, error)
