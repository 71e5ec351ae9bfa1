"""What is noted when a run starts, before its script is sent: script, inputs, terms, tools, for whom.

Also what a run is given so that it can be repeated. Knows neither files nor keys; it hands plain data to the log.
"""

from __future__ import annotations

import functools
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolcell.audit import content, records
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.audit.run_record import RunRecord

if TYPE_CHECKING:
    from toolcell.config import Limits, Policy
    from toolcell.sandbox.backend import GuestFile, Sandbox
    from toolcell.tools.call import RunContext
    from toolcell.tools.registry import ToolRegistry
    from toolcell_bridge.wire.messages import RunScript

CODE, CALLS = "code", "calls"
"""Sorts of runs: a script in a sandbox; calls made without one, by a model, a plan or a program."""

MAX_FILES_BYTES = 1 << 20
"""Contents of workspace files kept in one record, together."""

MAX_REMEMBERED = 4096
MAX_COMMON = 64


class Recorder:
    """Makes the records of one log's runs. One per runtime."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log
        self._strict: tuple[Mapping[str, str] | None, Redactor] = (None, log.redactor)
        self._common: OrderedDict[Any, _Common] = OrderedDict()
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._content_of = functools.lru_cache(maxsize=1024)(log.config.content_of)

    # Made before a run

    def policy(self, policy: Policy) -> Policy:
        """The policy with a hash seed, so that replays can order sets as this runtime does."""
        if not self.log.config.repeatable or policy.hash_seed is not None:
            return policy
        return policy.model_copy(update={"hash_seed": int.from_bytes(os.urandom(4), "big")})

    def beginnings(self, seed: int | None, clock: float | None) -> tuple[int | None, float | None]:
        """A run's seed and clock: those it is given, or else of its own, so that a replay can repeat what it draws."""
        if not self.log.config.repeatable:
            return seed, clock
        if seed is None:
            seed = int.from_bytes(os.urandom(6), "big")
        return seed, round(time.time(), 6) if clock is None else clock

    # Runs

    def begin(
        self,
        message: RunScript,
        *,
        limits: Limits,
        policy: Policy,
        registry: ToolRegistry,
        context: RunContext,
        files: Iterable[GuestFile] = (),
        sandbox: Sandbox | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        """Record that a script is about to run."""
        tools = self._tools(registry, message.tools) if message.tools else None
        terms = self._terms(limits, policy, sandbox, environment or {})
        ident = sandbox.id if sandbox is not None else None
        return self._begin(context, CODE, message, files, tools, terms, ident)

    @contextmanager
    def observe(self, context: RunContext, sort: str = CALLS) -> Iterator[RunContext]:
        """Record every call made with the context given; for agents, plans and programs that need no sandbox."""
        record = self._begin(context, sort)
        try:
            yield record.context
        except BaseException as exc:
            record.failed(exc)
            raise
        record.end_calls()

    def _begin(
        self,
        context: RunContext,
        sort: str,
        message: RunScript | None = None,
        files: Iterable[GuestFile] = (),
        tools: _Common | None = None,
        terms: _Common | None = None,
        sandbox: str | None = None,
    ) -> RunRecord:
        redactor = self._redactor_of(context.secrets)
        for common in (tools, terms):
            self._note(common)
        script: tuple[Any, ...] = (None, None, None, None)
        settings: tuple[Any, ...] = (None, None, None)
        if message is not None:
            inputs = message.inputs
            inputs_digest = content.digest_of(inputs) if inputs else None
            script = (message.source, content.text_digest(message.source), inputs, inputs_digest)
            settings = (message.lint, message.seed, message.clock)
        fields: tuple[Any, ...] = (
            self._new_id(context), sort, *script, _input_files(files, self.log), tools and tools.digest,
            terms and terms.digest, *settings, sandbox, _who(context), {},
        )  # fmt: skip
        run = self.log.append(records.RUN_STARTED, 0, fields, redactor)
        for common in (tools, terms):
            self._note(common)  # again, should this record have begun a new segment
        return RunRecord(self.log, self._content_of, run, context, redactor)

    def _note(self, common: _Common | None) -> None:
        """Write what runs have in common where it is not written yet."""
        if common is None or common.digest in self.log.noted:
            return
        self.log.noted.add(common.digest)  # before it is written: writing it may begin a segment that lacks it again
        try:
            self.log.append(common.kind, 0, (common.digest, *common.content, {}))
        except BaseException:
            self.log.noted.discard(common.digest)
            raise

    def _redactor_of(self, secrets: Mapping[str, str]) -> Redactor:
        if not secrets:
            return self.log.redactor
        if self._strict[0] is not secrets:
            self._strict = (secrets, self.log.redactor.with_secrets(secrets.values()))
        return self._strict[1]

    def _new_id(self, context: RunContext) -> str:
        """The run's own id, made longer where several scripts share it: an agent's, a session's."""
        wanted = context.run_id
        if context.parent_call_id is not None or wanted in self._ids:
            return f"{wanted}.{os.urandom(4).hex()}"
        self._ids[wanted] = None
        if len(self._ids) > MAX_REMEMBERED:
            self._ids.popitem(last=False)
        return wanted

    def _terms(
        self, limits: Limits, policy: Policy, sandbox: Sandbox | None, environment: Mapping[str, Any]
    ) -> _Common:
        """Under what terms a script runs."""
        walls = (sandbox.backend, *sandbox.layers.items()) if sandbox is not None else ()
        key = (id(limits), id(policy), walls)
        if (known := self._common.get(key)) is None:
            held = {"hash_seed": policy.hash_seed, "require": sorted(policy.require)}
            isolation: dict[str, Any] = {"environment": environment}
            if sandbox is not None:
                isolation |= {"backend": sandbox.backend, "layers": dict(sandbox.layers)}
            content_of_it = (limits.model_dump(), held, isolation)
            known = self._keep(key, records.TERMS, content_of_it, (limits, policy))
        return known

    def _tools(self, registry: ToolRegistry, names: list[str]) -> _Common:
        """What a run may call."""
        entries = tuple(registry.state.tools[name] for name in names)
        key = tuple(map(id, entries))
        if (known := self._common.get(key)) is None:
            defined = [[entry.name, entry.definition.description, entry.definition.parameters] for entry in entries]
            known = self._keep(key, records.TOOLS, (defined,), entries)
        return known

    def _keep(self, key: Any, kind: str, content_of_it: tuple[Any, ...], alive: object) -> _Common:
        known = self._common[key] = _Common(kind, content.digest_of(content_of_it), content_of_it, alive)
        if len(self._common) > MAX_COMMON:
            self._common.popitem(last=False)
        return known


@dataclass(frozen=True, slots=True)
class _Common:
    """What many runs have in common, recorded once and named by its digest."""

    kind: str
    digest: str
    content: tuple[Any, ...]
    alive: object
    """What the key it is found by names by identity; held so that no other object takes its place."""


def _input_files(files: Iterable[GuestFile], log: AuditLog) -> list[Any]:
    """Shape: [[name, size, sha256, content or None]]."""
    left = MAX_FILES_BYTES
    listed: list[Any] = []
    for file in files:
        size = len(file.data)
        fits = size <= min(log.config.file_bytes, left)
        left -= size if fits else 0
        listed.append([file.name, size, content.bytes_digest(file.data), file.data if fits else None])
    return listed


def _who(context: RunContext) -> dict[str, Any]:
    named = {
        "run": context.run_id,
        "parent_call": context.parent_call_id,
        "user": context.user_id,
        "thread": context.thread_id,
        "channel": context.channel,
        "chat": context.chat_id,
        "depth": context.depth,
    }
    return {name: value for name, value in named.items() if value}
