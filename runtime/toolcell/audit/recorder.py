"""From runs and calls to records: what is noted of each, and when.

A start is recorded before its effect: that of a run before its script is sent, that of a call before its tool runs.
Knows neither files nor keys; it hands plain data to the log.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolcell.audit import content, records
from toolcell.audit.config import FULL, ToolContent
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.errors import AuditError
from toolcell.results import ErrorInfo, ExecutionResult, Usage

if TYPE_CHECKING:
    from toolcell.config import Limits, Policy
    from toolcell.sandbox.backend import GuestFile, Sandbox
    from toolcell.tools.call import Call
    from toolcell.tools.context import RunContext
    from toolcell.tools.registry import ToolRegistry
    from toolcell.tools.result import ToolResult
    from toolcell_bridge.messages import Run

CODE, CALLS = "code", "calls"
"""Sorts of runs: a script in a sandbox; calls made without one, by a model, a plan or a program."""

MAX_FILES_BYTES = 1 << 20
"""Contents of workspace files kept in one record, together."""

MAX_REMEMBERED = 4096
MAX_COMMON = 64

ABORTED = "aborted"
HOST_OUTCOMES = {"CancelledError": "cancelled", "Cancelled": "cancelled", "SandboxUnavailable": "unavailable"}
"""How a run ended that ended with an exception of the host, by the exception's class; others are `aborted`."""

_random = random.SystemRandom()
logger = logging.getLogger("toolcell.audit")


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
        return policy.model_copy(update={"hash_seed": _random.getrandbits(32)})

    def message(self, message: Run) -> Run:
        """The run with a seed and a clock, so that a replay can repeat what it draws and reads."""
        if not self.log.config.repeatable or (message.seed is not None and message.clock is not None):
            return message
        seed = message.seed if message.seed is not None else _random.getrandbits(48)
        return replace(message, seed=seed, clock=message.clock or round(time.time(), 6))

    # Runs

    def begin(
        self,
        message: Run,
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
        message: Run | None = None,
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
            script = _script(message, redactor)
            settings = (message.lint, message.seed, message.clock)
        fields: tuple[Any, ...] = (
            self._new_id(context), sort, *script, _input_files(files, self.log), tools and tools.digest,
            terms and terms.digest, *settings, sandbox, _who(context), {},
        )  # fmt: skip
        run = self.log.append(records.RUN_STARTED, 0, fields, redactor)
        for common in (tools, terms):
            self._note(common)  # again, should this record have begun a new segment
        return RunRecord(self, run, context, redactor)

    def _note(self, common: _Common | None) -> None:
        """Write what runs have in common where it is not written yet."""
        if common is not None and common.digest not in self.log.noted:
            self.log.noted.add(common.digest)
            self.log.append(common.kind, 0, (common.digest, *common.content, {}))

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
        entries = tuple(registry.table.entries[name] for name in names)
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


def _script(message: Run, redactor: Redactor) -> tuple[str, str, dict[str, Any], str | None]:
    """Source and inputs with their digests. A digest of a text that held a secret would confirm every right guess of
    it, so digests are of what is recorded."""
    source, inputs = message.source, message.inputs
    sha256 = content.text_digest(source)
    if redactor.scan(source.encode("utf-8", "surrogatepass")) is not None:
        sha256 = content.text_digest(redactor.clean_all(source))
    if not inputs:
        return source, sha256, inputs, None
    packed = records.pack(inputs)
    if redactor.scan(packed) is None:
        return source, sha256, inputs, content.bytes_digest(packed)
    return source, sha256, inputs, content.digest_of(redactor.clean_all(records.unpack(packed)))


class RunRecord:
    """The records of one run under way; sees its calls as their `CallObserver`."""

    __slots__ = (
        "_calls", "_content_of", "_failed_calls", "_log", "_numbers", "_others", "_redactor", "_run", "context",
        "lines", "problem",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, run: int, context: RunContext, redactor: Redactor) -> None:
        self._log = recorder.log
        self._content_of = recorder._content_of
        self._run = run
        self._redactor = redactor
        self._others = context.observer if not isinstance(context.observer, RunRecord) else None
        self._numbers: dict[int, int] = {}
        self._calls = 0
        self._failed_calls = 0
        self.lines: dict[str, int | None] = {}
        """Line of the script that made a call, by call id; filled in by who knows it."""
        self.problem: AuditError | None = None
        self.context = context.child(observer=self)
        """The run as its calls are made with."""

    # Calls

    def call_started(self, call: Call) -> Any:
        """A call is about to have its effect, or was refused."""
        self._calls += 1
        self._numbers[id(call)] = number = self._calls
        parent = self._numbers.get(id(call.parent)) if call.parent is not None else None
        line = self.lines.pop(call.call_id, None) if parent is None else None
        more = self._extras(call) if self._has_extras(call) else {}
        args = call.raw_args
        if (keep := self._content_of(call.name)) is not FULL:
            args = self._reduced(keep, args, more)
        self._log.append(
            records.CALL_STARTED,
            self._run,
            (number, call.call_id, parent, call.name, call.origin_label, line, args, more),
            self._redactor,
        )
        return self._others.call_started(call) if self._others is not None else None

    def call_ended(self, call: Call) -> Any:
        """A call has its result."""
        result = call.result
        assert result is not None
        number = self._numbers.pop(id(call), 0)
        keep = self._content_of(call.name)
        more: dict[str, Any] = {}
        value = code = None
        if result.is_error:
            self._failed_calls += 1
            code = _failure(result, more)
        else:
            value = result.guest_value()
        if result.parts or result.files or result.job_id or result.meta.truncated:
            _extra_results(result, more)
        if keep is not FULL:
            value = self._reduced_result(keep, value, more)
        duration_us = round(result.meta.duration_ms * 1000)
        self._log.append(
            records.CALL_ENDED, self._run, (number, str(result.status), duration_us, value, code, more), self._redactor
        )
        return self._others.call_ended(call) if self._others is not None else None

    @staticmethod
    def _has_extras(call: Call) -> bool:
        return bool(
            call.changes
            or call.refusal is not None
            or call.approved
            or call.warnings
            or call.run.depth
            or (call.args is not call.raw_args and call.args != call.raw_args)
        )

    @staticmethod
    def _extras(call: Call) -> dict[str, Any]:
        refusal = call.refusal
        more: dict[str, Any] = {}
        if call.changes:
            more["coerced"] = call.coerced
        if call.warnings:
            more["warnings"] = list(call.warnings)
        if refusal is not None:
            more["verdict"] = str(refusal.status)
            more["why"] = refusal.text
        elif call.args != call.raw_args:
            more["effective_args"] = call.args
        if call.approved:
            more["approved"] = True
        if call.run.depth:
            more["depth"] = call.run.depth
        return more

    def _reduced(self, keep: ToolContent, args: Any, more: dict[str, Any]) -> Any:
        if keep.args == "full":
            return args
        more.pop("effective_args", None)
        more.pop("warnings", None)
        more.pop("why", None)
        if "coerced" in more:
            more["coerced"] = [{"path": change["path"]} for change in more["coerced"]]
        return content.kept(args, keep.args, more, "args", self._clean)

    def _reduced_result(self, keep: ToolContent, value: Any, more: dict[str, Any]) -> Any:
        if keep.results == "full":
            return value
        said = [more.pop(name, None) for name in ("message", "details", "text", "trace")]
        whole = value if said == [None] * 4 else [value, *said]
        return content.kept(whole, keep.results, more, "value", self._clean)

    def _clean(self, value: Any) -> Any:
        return self._redactor.clean_all(records.unpack(records.pack(value)))

    # The end

    def end(self, result: ExecutionResult) -> None:
        """Record what the run left behind.

        Raises:
            AuditError: this, or an earlier record of the run, could not be written.
        """
        value_digest = None
        if result.has_value:
            value_digest = content.digest_of(result.value)
            if self._redactor.scan(records.pack(result.value)) is not None:
                value_digest = content.digest_of(self._clean(result.value))
        logs = result.logs
        self._end(
            str(result.outcome),
            result.value,
            result.has_value,
            value_digest,
            [[entry.stream, entry.text] for entry in logs.entries],
            [logs.stdout_bytes, logs.stderr_bytes, logs.truncated],
            [[file.name, file.media_type, file.size, file.sha256, file.problem] for file in result.files],
            _error_fields(result.error) if result.error is not None else None,
            _usage_fields(result.usage),
            [len(result.calls), sum(call.status != "ok" for call in result.calls)],
            {"lint": result.isolation.lint} if result.isolation.lint != "off" else {},
        )
        if self.problem is not None:
            raise self.problem

    def end_calls(self, outcome: str = "ok", error: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run that had no sandbox, or of one that was cut short."""
        self._end(outcome, None, False, None, [], [0, 0, False], [], error, {}, [self._calls, self._failed_calls], {})

    def failed(self, exc: BaseException) -> None:
        """Record that the host gave up. Never raises: there is an exception under way already."""
        outcome = HOST_OUTCOMES.get(type(exc).__name__, ABORTED)
        error = {"type": type(exc).__name__, "message": str(exc), "trace": _trace(exc) if outcome == ABORTED else None}
        try:
            self.end_calls(outcome, {name: value for name, value in error.items() if value})
        except AuditError:
            logger.exception("the end of run %s could not be recorded", self.context.run_id)

    def _end(self, *fields: Any) -> None:
        self._log.append(records.RUN_ENDED, self._run, fields, self._redactor)


def _failure(result: ToolResult, more: dict[str, Any]) -> str | None:
    more["message"] = result.text
    if result.error is None:
        return None
    if result.error.details:
        more["details"] = dict(result.error.details)
    if result.error.retryable:
        more["retryable"] = True
    if result.exc is not None:
        more["exc"] = type(result.exc).__name__
        more["trace"] = _trace(result.exc)
    return str(result.error.code)


def _extra_results(result: ToolResult, more: dict[str, Any]) -> None:
    if result.has_value and result.parts and not result.is_error:
        more["text"] = result.output
    if result.files:
        more["files"] = [[file.name, file.media_type, len(file.data)] for file in result.files]
    if result.job_id is not None:
        more["job"] = result.job_id
    if result.meta.truncated:
        more["truncated"] = True


def _trace(exc: BaseException) -> str:
    return "".join(traceback.format_exception(exc))


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


def _error_fields(error: ErrorInfo) -> dict[str, Any]:
    named = {
        "type": error.type,
        "message": error.message,
        "line": error.line,
        "column": error.column,
        "trace": error.traceback or None,
        "limit": error.limit,
        "limit_value": error.limit_value,
        "used": error.used,
        "signal": error.signal,
        "exit_code": error.exit_code,
        "findings": [dict(each) for each in error.findings] or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "wall_s": usage.wall_s,
        "cpu_s": usage.cpu_s,
        "start_s": usage.start_s,
        "peak_memory_bytes": usage.peak_memory_bytes,
        "peak_processes": usage.peak_processes,
        "sent_bytes": usage.sent_bytes,
        "received_bytes": usage.received_bytes,
    }
