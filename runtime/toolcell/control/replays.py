"""Run a recorded script again with the recorded answers, and name the first difference. No tool is called.

The script runs in an ordinary sandbox of any backend; its calls are answered from the record. docs/audit.md lists what
repeats in a replay and what does not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.audit.redact import Redactor
from toolcell.audit.replay_diff import Comparison, clean_value
from toolcell.calls.call import Call, RunContext, ScriptRuntime
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.placeholders import RecordedDryRun
from toolcell.calls.result import Status, ToolFailure, ToolResult
from toolcell.errors import ToolAbort, UsageError
from toolcell.journal.replay import CallReplay, JournalEntry, RecordedTools
from toolcell.results import SCRIPT_OUTCOMES, Divergence, ExecutionResult, Outcome
from toolcell.support.packing import text_digest
from toolcell.support.text import one_line, with_line
from toolcell.tools.pipeline import answer_call

NO_END: Final = (
    "no end is recorded to compare (it is under way, or its host was killed); the calls agree as far as recorded"
)


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    run_id: str
    divergence: Divergence | None
    answered: int
    """Calls answered from the record."""
    recorded: int
    """Calls that the recorded script made."""
    stopped: str = ""
    """Why the rest was not compared: the replay was stopped, or no end is recorded."""
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    """What the record does not hold, or does not hold in full."""
    result: ExecutionResult | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """True when nothing differed."""
        return self.divergence is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "run": self.run_id,
            "ok": self.ok,
            "divergence": self.divergence.to_dict() if self.divergence is not None else None,
            "answered": self.answered,
            "recorded": self.recorded,
            "stopped": self.stopped,
            "notes": list(self.notes),
            "not_compared": list(self.not_compared),
            "outcome": str(self.result.outcome) if self.result is not None else None,
        }


async def replay(
    runtime: ScriptRuntime,
    run: RecordedRun,
    *,
    source: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    files: Iterable[tuple[str, bytes]] = (),
    answers: Mapping[int, ToolResult] | None = None,
    until: int | None = None,
    on_log: Callable[[str, str], object] | None = None,
    secrets: Iterable[str] = (),
    context: RunContext | None = None,
) -> Replay:
    """Run a recorded script again in `runtime`, opened with `run.runtime_options()`, and compare.

    `source`, `inputs` and `files` stand in for what the record does not hold, or for what is to be tried instead;
    `answers` replaces recorded answers by call; `until` stops before the answer of a call. No difference that is shown
    holds one of `secrets`; where something was taken out of the record, anything may stand. `context`: whom it is for.

    Raises:
        UsageError: the record does not hold what is needed, and it was not given; or it is of no script.
        SandboxUnavailable: as from `execute_code`.
    """
    script, notes = _script(run, source)
    comparison = Comparison(run, Redactor(secrets))
    tools = AnsweringTools(run, answers or {}, until, comparison)
    limits, key = run.runtime_options()["limits"], str(run.who.get("dry_run") or "")
    result: ExecutionResult = await runtime.execute_code(
        script,
        inputs=_inputs(run, inputs),
        files=_files(run, files),
        tools=tools,
        limits=limits,
        lint=run.start["lint"] or "off",
        seed=run.start["seed"],
        clock=run.start["clock"],
        check_types=False,
        on_log=on_log,
        context=(context or RunContext()).having(RecordedDryRun(key)) if key else context,
    )
    calls = tools.replay
    found = calls.divergence
    if found is None and not calls.stopped:
        found = _missing_call(run, tools, result) or comparison.end(result)
        if found is not None and found.index is None and len(answers or {}) == 1:
            found = dataclasses.replace(found, index=next(iter(answers or {})))  # it cannot come from another call
    notes += tuple(f"the answer of call {index} was replaced" for index in sorted(answers or {}))
    if found is not None:
        found = _placed(found, result, tools, (run.source or "") if found.kind == Divergence.MISSING_CALL else script)
    stopped = calls.stopped or ("" if run.end or found is not None else NO_END)
    notes += tuple(unrepeatable(script))
    return Replay(
        run.id,
        found,
        answered=calls.answered,
        recorded=len(tools.expected),
        stopped=stopped,
        notes=notes,
        not_compared=tuple(comparison.not_compared),
        result=result,
    )


class AnsweringTools(RecordedTools):
    """The tools of a recorded run, which answer as they did then.

    A log sees the calls all the same, each with a note that its answer comes from a record.
    """

    def __init__(
        self,
        run: RecordedRun,
        answers: Mapping[int, ToolResult],
        until: int | None,
        comparison: Comparison,
    ) -> None:
        self._comparison = comparison
        self.expected = run.script_calls()
        super().__init__(
            [ToolDefinition(*each[:3]) for each in run.definitions],
            {each[0]: each[3] for each in run.definitions if len(each) > 3 and isinstance(each[3], dict)},
            [call.tool for call in self.expected.values()],
        )
        turns = (
            JournalEntry(
                ident,
                call.tool,
                call.args,
                call.started_seq,
                ended=call.ended_seq if is_answered(call) else None,
                began_ns=call.started_ns,
                ended_ns=call.ended_ns or 0,
            )
            for ident, call in self.expected.items()
        )
        self.replay = CallReplay(turns, _missing, lambda _: ToolAbort("the replay differs from the record"))
        self._has_end = bool(run.end) and run.outcome != str(Outcome.SUSPENDED)
        self._why_it_ends = "the run was suspended" if run.end else "its host was killed"
        self._run_id = run.id
        self._answers = answers
        self._until = until

    async def make(self, call: Call) -> ToolResult:
        """Return the recorded answer of the recorded call.

        Raises:
            ToolAbort: the call is not the recorded one, or there is nothing more to answer.
        """
        return await answer_call(call, self._recorded_answer(call.name, call.raw_args, call.call_id), self._run_id)

    async def _recorded_answer(self, name: str, args: Any, call_id: str) -> ToolResult:
        ident = int(call_id.removeprefix("call_"))
        index = self.replay.place(ident)
        self.replay.note(ident)
        call = self.expected.get(ident)
        if self._until is not None and index >= self._until:
            self._stop(f"stopped at call {index}, as asked")
        if call is None and not self._has_end:
            self._stop(f"the record ends here: call {index} was not made before {self._why_it_ends}")
        if call is None:
            got = clean_value({"tool": name, "args": args}, self._comparison.redactor)
            self._diverge("extra_call", f"the script makes a call that it did not make before: {name}", index, got=got)
        elif (found := self._comparison.call(call, name, args)) is not None:
            self._diverge("call", found.message, index, found.expected, found.got)
        return await self._answer(ident, index, call, JournalEntry(ident, name, args, 0))

    async def _answer(self, ident: int, index: int, call: RecordedCall, new: JournalEntry) -> ToolResult:
        given = self._answers.get(index)
        if given is None and not call.is_finished and self._has_end:
            why = f"how call {index} ended is not in the record, though the run's end is: the log was damaged"
            self._diverge("no_answer", why, index)
        if given is None and not call.is_finished:
            self._stop(f"the record ends here: call {index} was under way when its host was killed")
        if given is None and is_answered(call):
            if (missing := call.end_extra.get("value_cut")) is not None:
                why = f"the answer of call {index}, {call.tool}, was not recorded ({missing['why']})"
                if missing["why"] == "size":
                    cut = [each.end_extra.get("value_cut", {}) for each in self.expected.values()]
                    enough = 1 << max(each["bytes"] for each in cut if each.get("why") == "size").bit_length()
                    config = f"RecordConfig(value_bytes={enough}), or --record-config,"
                    why += f": it has {missing['bytes']} bytes; {config} records such answers"
                self._diverge("no_answer", why, index, expected=missing)
            given = recorded_result(call)
        return await self.replay.answer(ident, new, given)

    def _diverge(self, kind: str, message: str, index: int, expected: Any = None, got: Any = None) -> NoReturn:
        self.replay.diverge(Divergence(kind, message, index, expected=expected, got=got))

    def _stop(self, why: str) -> NoReturn:
        self.replay.stop(why)
        raise ToolAbort("the replay was stopped")


def _missing(place: int, missing: JournalEntry, _: JournalEntry | None) -> Divergence:
    """Describe that the script does not make a call again."""
    return Divergence(Divergence.MISSING_CALL, f"it does not call {missing.tool}", place)


def is_answered(call: RecordedCall) -> bool:
    """True when the script received an answer."""
    return call.is_finished and not call.end_extra.get("unanswered")


def recorded_result(call: RecordedCall) -> ToolResult:
    """Rebuild the tool's result from a recorded answer."""
    if call.code is None:
        return ToolResult.of(call.value)
    more = call.end_extra
    failure = ToolFailure(call.code, call.message, bool(more.get("retryable")), more.get("details") or {})
    exc = type(more["exc"], (Exception,), {})() if "exc" in more else None
    return ToolResult(status=Status(call.status), error=failure, exc=exc)


# What a script needs


def _script(run: RecordedRun, source: str | None) -> tuple[str, tuple[str, ...]]:
    if run.kind != "code":
        raise UsageError(f"run {run.id} ran no script ({run.kind}); there is nothing to replay")
    notes = []
    if run.start["seed"] is None or run.start["clock"] is None or run.policy.get("hash_seed") is None:
        notes.append("not all of seed, clock and hash seed were recorded; what depends on them may differ")
    if source is None:
        if run.source is None:
            raise UsageError(f"the script of run {run.id} {_why_missing(run, 'source_cut')}; give it with --source")
        if (run.start["more"] or {}).get("redacted"):
            notes.append("the recorded script, or its inputs, had secrets taken out")
        return run.source, tuple(notes)
    if run.sha256 not in (
        text_digest(source),
        text_digest(clean_value(source)),
    ):
        notes.append("this is not the script that was recorded")
    return source, tuple(notes)


def _why_missing(run: RecordedRun, note: str) -> str:
    more = run.start["more"] or {}
    why = more.get(note, {}).get("why")
    return "was redacted" if why == "redacted" else "was too large to be recorded"


def _inputs(run: RecordedRun, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None:
        return given
    recorded = run.start["inputs"]
    if recorded is None and (run.start["inputs_sha256"] is not None or "inputs_cut" in (run.start["more"] or {})):
        raise UsageError(f"what run {run.id} got as inputs {_why_missing(run, 'inputs_cut')}; give it with --input")
    return recorded or {}


def _files(run: RecordedRun, given: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    files = dict(given)
    for name, size, sha256, data in run.start["files"] or ():
        if name in files:
            continue
        if data is None:
            raise UsageError(f"the file {name!r} ({size} bytes, sha256 {sha256}) was not recorded; give it with --file")
        files[name] = data
    return list(files.items())


def _missing_call(run: RecordedRun, tools: AnsweringTools, result: ExecutionResult) -> Divergence | None:
    """Return the first recorded call that the replay did not make; `got` is the replay's error."""
    if (run.outcome if run.end else str(result.outcome)) not in SCRIPT_OUTCOMES:
        return None
    error = result.error
    why, got = "", None
    if error is not None:
        why = f", it fails with {error.type}: {with_line(one_line(error.message), error.line)}"
        got = {"type": error.type, "message": error.message, "line": error.line}
    for ident, call in tools.expected.items():
        if ident not in tools.replay.made:
            return Divergence(
                Divergence.MISSING_CALL,
                f"it does not call {call.tool}{why}",
                index=tools.replay.place(ident),
                line=call.line,
                source_line="",
                expected={"tool": call.tool, "args": call.args},
                got=got,
            )
    return None


def _placed(found: Divergence, result: ExecutionResult, tools: AnsweringTools, script: str) -> Divergence:
    idents = {tools.replay.place(ident): ident for ident in tools.expected}
    ident = idents.get(found.index or 0)
    lines = {call.id: call.line for call in result.calls}
    line = lines.get(f"call_{ident}") if ident is not None else None
    if found.kind == "extra_call":
        line = result.calls[-1].line if result.calls else None
    line = line if line is not None else found.line
    return Divergence(
        found.kind,
        found.message,
        index=found.index,
        line=line,
        source_line=script.split("\n")[line - 1].strip() if line and line <= script.count("\n") + 1 else "",
        expected=found.expected,
        got=found.got,
    )


_UNREPEATABLE: Final = {
    "/dev/urandom or /dev/random": (r"/dev/u?random",),
    "ssl.RAND_bytes or cryptography": (r"\bRAND_(?:bytes|pseudo_bytes)\b|\bcryptography\b",),
    "random() or randomblob() of SQLite": (r"\bsqlite3\b", r"(?i)(?<![.\w])random(?:blob)?\s{0,9}\("),
    "what other programs draw": (r"\bsubprocess\b|\bos\.(?:exec|spawn|posix_spawn|system|popen)",),
    "random numbers of C code": (r"\bctypes\b|\bcffi\b",),
    "hashes by address": (r"(?<![.\w])id\(",),
}
"""What no replay repeats, and patterns that all occur in scripts that use it."""


def unrepeatable(script: str) -> list[str]:
    """Return a note for each thing that a script seems to use and that does not repeat. Its text is only searched."""
    return [
        f"the script seems to use {name}, which does not repeat"
        for name, patterns in _UNREPEATABLE.items()
        if all(re.search(pattern, script) is not None for pattern in patterns)
    ]
