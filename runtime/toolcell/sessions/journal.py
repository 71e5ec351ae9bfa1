"""The journal of a session: its scripts with their answers, in memory and on disk, and how they are run again.

Each script has a journal of its own, as every run has: it stays as long as the session needs it. Another process
rebuilds the session from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from json import dumps, loads
from typing import Any, Final

from toolcell.calls.call import CallableTools, Meter, RunContext
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.options import Origin
from toolcell.config import OnApproval
from toolcell.control.journaled_calls import RESUMABLE, JournaledCalls
from toolcell.control.script_header import WHO, header_of, script_of
from toolcell.errors import ResumeError, SessionError, UsageError
from toolcell.journal.database import RUN, SESSION, STATE, Damaged, OpenJournal, RecordKind, Table, UnderWay
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import RecordedTools
from toolcell.journal.store import JournalStore, NoSuchRun
from toolcell.results import ExecutionResult, Outcome, Suspension
from toolcell.run.run import Run, Script
from toolcell.sessions.kept_state import KeptState, StateFile
from toolcell.sessions.settings import Restores, is_name
from toolcell.support.log import logger_of
from toolcell.support.packing import pack
from toolcell_bridge.wire.messages import RunScript

logger = logger_of("toolcell.sessions")

REPEATED_BYTES = 64 << 20
"""Sources, inputs, files and answers that a session keeps. With more it cannot be rebuilt."""


@dataclass(frozen=True, slots=True)
class SessionScript:
    """One script that has left its state in the session."""

    script: Script
    tools: CallableTools
    journal: Journal
    outcome: Outcome
    context: RunContext | None
    """For whom it ran; None when another process ran it."""

    def size(self) -> int:
        """Return about how many bytes it keeps."""
        script = self.script
        files = sum(len(file.data) for file in script.files)
        return len(script.source) + len(pack(dict(script.inputs or {}))) + files + self.journal.size

    def journal_again(self) -> Journal:
        """Return the journal for another run of the script. Sessions that were forked share the entries."""
        journal = Journal(self.journal.id, entries=dict(self.journal.entries), run=self.journal.run)
        journal.begin_again()
        return journal


@dataclass(frozen=True, slots=True)
class History:
    """From what the state of a session can be rebuilt."""

    base: KeptState | None
    """The state by value from which `steps` go on; None: they begin with the first script."""
    kept_state: KeptState | None
    """The latest state by value: steps before it need not be run again."""
    steps: tuple[SessionScript, ...]
    context: RunContext | None = None
    """For whom the last script ran; None when another process ran it."""

    @property
    def position(self) -> int:
        """How many scripts have led to it."""
        return (self.base.position if self.base is not None else 0) + len(self.steps)


NO_HISTORY: Final = History(None, None, ())


def context_again(before: RunContext | None) -> RunContext:
    """Return the context for a run that repeats or checks something: for the same user, and a run of its own."""
    if before is None:
        return RunContext()
    again = RunContext(secrets=before.secrets, custom=before.custom, **{name: getattr(before, name) for name in WHO})
    return again.having(*(each for each in before.features if isinstance(each, Meter)))


def let_rebuild(run: Run, store: JournalStore, step: SessionScript | None = None) -> None:
    """Have a run only rebuild a state: it makes no call, and nothing of it is kept.

    Calls are answered from the journal of `step`, if it runs that again.
    """
    run.join(
        JournaledCalls(
            run,
            store=store,
            journal=step.journal_again() if step is not None else Journal(os.urandom(16).hex()),
            on_approval="deny",
            is_rebuilding=True,
            ends_journal=False,
        )
    )


def difference(step: SessionScript, again: ExecutionResult) -> str:
    """Return how the second run of a step differs from the first one, as text; empty when it does not."""
    if again.divergence is not None:
        return again.divergence.message
    if again.outcome is not step.outcome:
        said = again.error.message if again.error is not None else ""
        return f"its outcome was {step.outcome}, and is now {again.outcome} {said}".rstrip()
    return ""


# On disk

OPENED, BEGUN, TOOLS, STEP, USED = "opened", "begun", "tools", "step", "used"
UNREPEATABLE, KEPT = "unrepeatable", "state"


KnownTool = tuple[ToolDefinition, Mapping[str, Any] | None]
"""What a script is told of a tool: its definition, and the schema of what it returns."""


@dataclass(slots=True)
class RecordedState:
    """What a session's journal says."""

    store: JournalStore
    """In which states by value and the journals of scripts are."""
    key: str = ""
    """Key of this life of the session: a token of a script of an earlier one is of no use in it."""
    tools: dict[str, KnownTool] = field(default_factory=dict)
    """What scripts were told of each tool last."""
    steps: list[SessionScript] = field(default_factory=list)
    base: KeptState | None = None
    kept_state: KeptState | None = None
    base_name: str = ""
    """Name of the state by value from which the scripts go on."""
    position: int = 0
    begun: str = ""
    """Journal of the script that was under way, or waits."""
    last: str = ""
    """Journal of the last script that is recorded."""
    not_repeatable: str = ""
    labels: frozenset[str] = frozenset()
    cpu_s: float = 0.0
    calls: int = 0


def opened(store: JournalStore, name: str) -> OpenJournal:
    """Open or make the journal of a session. Only one process has it open at a time.

    Raises:
        SessionError: another process has it open, or it cannot be opened.
    """
    try:
        store.database.settle()
        return OpenJournal(store.database, SESSION, name)
    except ResumeError as exc:
        raise SessionError(f"session {name!r} is open in another process or Runtime; close it there") from exc
    except OSError as exc:
        raise SessionError(f"the journal of session {name!r} cannot be opened: {exc}") from exc


def forget(file: OpenJournal) -> None:
    """Close a journal, and remove what is recorded."""
    try:
        file.remove()
        file.database.remove_scripts(file, even_waiting=True)
        file.database.remove_states(file)
    finally:
        file.close()


def recorded_names(store: JournalStore) -> list[str]:
    """Return the names of the sessions that have a journal, sorted."""
    return [*store.database.last_of_each(SESSION)] if store.is_durable else []


def is_recorded(store: JournalStore, name: str) -> bool:
    """Return whether a session of this name has a journal. No list of them is made for it."""
    return store.is_durable and is_name(name) and store.database.last(SESSION, name) > 0


def _state_kept(
    state: RecordedState,
    name: str,
    digest: str,
    position: int,
    lost: list[str],
    is_base: bool,
) -> None:
    try:
        database = state.store.database
        kept = KeptState(position, tuple(lost), StateFile.of(database.folder, database.records(STATE, name), digest))
    except OSError as exc:  # replaced by a later one, or lost
        if is_base:
            state.base, state.kept_state, state.steps = None, None, []
            state.not_repeatable = f"its state cannot be read: {exc}"
        return
    state.kept_state = kept
    if is_base:
        state.base, state.position, state.steps, state.not_repeatable = kept, position, [], ""
        state.base_name = name


def _tools(state: RecordedState, rows: list[Any]) -> None:
    for name, description, parameters, returned in rows:
        state.tools[name] = ToolDefinition(name, description, loads(parameters)), loads(returned)


def _used(state: RecordedState, used: list[Any], labels: list[str]) -> None:
    cpu_s, calls = used
    state.cpu_s, state.calls = float(cpu_s), int(calls)
    state.labels |= frozenset(labels)


def _unrepeatable(state: RecordedState, why: str) -> None:
    state.not_repeatable, state.steps = why, []


def _step(state: RecordedState, run: str, outcome: str, used: list[Any], labels: list[str]) -> None:
    state.position += 1
    state.begun, state.last = "", run
    _used(state, used, labels)
    if not state.not_repeatable:
        try:
            journal = state.store.read(run)
            known = {name: state.tools[name] for name in journal.header["tools"]}
        except NoSuchRun as exc:  # it is needed no more, or was not written
            _unrepeatable(state, f"script {state.position} cannot be run again: {exc}")
            return
        tools = RecordedTools(
            [definition for definition, _ in known.values()],
            {name: returned for name, (_, returned) in known.items()},
            [each.tool for each in journal.entries.values()],
        )
        script = script_of(journal.header, state.position)
        journal.id, journal.header = run, {}
        state.steps.append(SessionScript(script, tools, journal, Outcome(outcome), None))


SESSION_RECORDS: Final[Table] = {
    OPENED: RecordKind((str,), "key"),
    USED: RecordKind((list, list), _used),
    BEGUN: RecordKind((str,), "begun"),
    TOOLS: RecordKind((list,), _tools),
    UNREPEATABLE: RecordKind((str,), _unrepeatable),
    STEP: RecordKind((str, str, list, list), _step),
    KEPT: RecordKind((str, str, int, list, bool), _state_kept),
}


# While the session is open

MAX_SHOWN: Final = 10
"""Names of sessions in an error."""


class SessionJournal:
    """The journal of one session: the script that waits, and where journals are durable everything else."""

    def __init__(self, ident: str, store: JournalStore) -> None:
        self._id, self._store = ident, store
        self._key = os.urandom(8).hex()
        self._file: OpenJournal | None = None
        self._base = ""
        """Name of the state by value from which the scripts go on."""
        self._tools: dict[str, KnownTool] = {}
        """What the journal says of each tool."""
        self.waiting: Suspension | str = ""
        """What the last script waits for; the id of its run if its host was killed; empty when none waits."""
        self._broken = ""

    # Opening and closing

    def open(self, restores: Restores) -> RecordedState | None:
        """Open the journal of the session; return what it says, if it is to be restored and there is something.

        Raises:
            SessionError: it is open elsewhere, damaged, or cannot be written.
            UsageError: there is none, and it is to be restored.
        """
        if restores == "always" and self._id not in (names := recorded_names(self._store)):
            raise UsageError(_nothing_kept(self._id, names))
        self._file = file = opened(self._store, self._id)
        try:
            state = self._read(file) if restores != "never" else None
            if state is not None and state.key:
                self._key = state.key
                if state.last and not state.steps:
                    self._store.remove(state.last)
                elif state.last and not (journal := state.steps[-1].journal).ended:  # its host was killed before that
                    journal.file = OpenJournal(self._store.database, RUN, journal.id)
                    self._store.end(journal, str(state.steps[-1].outcome), is_in_session=True)
                if state.begun:
                    self.waiting = self._store.waiting(state.begun) or ""
            elif restores == "always":
                raise UsageError(_nothing_kept(self._id, recorded_names(self._store)))
            else:
                self._begin(file)
                state = None
        except BaseException as exc:
            self._file = None
            file.close()
            if isinstance(exc, (OSError, ResumeError)):
                raise SessionError(f"the journal of session {self._id!r} cannot be written: {exc}") from exc
            raise
        return state

    def _read(self, file: OpenJournal) -> RecordedState:
        try:
            state = file.database.load(SESSION, self._id, SESSION_RECORDS, RecordedState(self._store))
        except (Damaged, ResumeError) as exc:
            raise SessionError(
                f"the journal of session {self._id!r} is damaged ({exc}); open it without restore=True to begin again"
            ) from exc
        self._base, self._tools = state.base_name, state.tools
        return state

    def _begin(self, file: OpenJournal) -> None:
        """Forget what was recorded: the session begins anew."""
        file.write_anew(OPENED, self._key)
        self._tools = {}
        file.database.remove_scripts(file, even_waiting=True)
        file.database.remove_states(file)

    def close(self, *, is_named: bool) -> None:
        """Close it. That of a session without a name is kept only while a script waits."""
        file, self._file = self._file, None
        if file is None:
            self.abandon()
        elif is_named or self.waiting:
            file.close()
        else:
            forget(file)

    def begin_anew(self) -> None:
        """Forget everything."""
        self.abandon()
        self._key, self._broken = os.urandom(8).hex(), ""
        self._write(self._begin)

    # Scripts

    def check_free(self) -> None:
        """Check that a script may begin.

        Raises:
            SessionError: another one waits, or the journal of the session cannot be written.
        """
        if self._broken:
            raise SessionError(f"{self._broken}; reset() begins again")
        if isinstance(self.waiting, Suspension):
            named = ", ".join(each.tool for each in self.waiting.calls)
            raise SessionError(
                f"a script of session {self._id!r} waits for a decision about {named}: carry it on with resume(...), "
                "or give it up with abandon()"
            )
        if self.waiting:
            raise SessionError(
                f"a script of session {self._id!r} was under way when its host ended: carry it on with "
                f"resume({self.waiting!r}), or give it up with abandon()"
            )

    def journal(
        self, message: RunScript, script: Script, tools: CallableTools, on_approval: OnApproval, context: RunContext
    ) -> Journal:
        """Return the journal of a script that begins: one that can be carried on, if it may wait or is on disk.

        Raises:
            UsageError: it cannot be written.
        """
        journal = Journal(self._new_run())
        if self._file is not None or on_approval == "suspend":
            header = header_of(
                source=message.source,
                inputs=message.inputs,
                script=script,
                tools=tools,
                on_approval=on_approval,
                context=context,
            )
            journal.header = header | {"session": self._id, "session_key": self._key, "number": script.number}
        if self._file is not None:
            self._store.write(journal, is_unknown=True)
            self._note(BEGUN, journal.id)
        return journal

    def _new_run(self) -> str:
        return f"{self._id}.{os.urandom(8).hex()}"

    def conclude(self, journal: Journal, result: ExecutionResult | None, *, is_step: bool = False) -> None:
        """End the journal of a script that does not wait: nobody carries it on. `is_step`: it has left its state."""
        is_over = result is not None and not (result.outcome in RESUMABLE and journal.header and not journal.lost)
        if result is not None and is_over and not result.draft_id:
            self._store.finish(journal, result.run_id, str(result.outcome), 0, is_in_session=is_step)
        else:
            self._store.end(journal, "interrupted", is_in_session=is_step)

    def check_belongs(self, journal: Journal, position: int) -> None:
        """Check that a journal is that of the next script of this session.

        Raises:
            ResumeError: it is not.
        """
        header = journal.header
        if header.get("session") != self._id:
            raise ResumeError(f"run {journal.id} is not a script of session {self._id!r}; resume it where it began")
        if header["session_key"] != self._key or header["number"] != position + 1:
            raise ResumeError(
                f"run {journal.id} was script {header['number']} of session {self._id!r}, which was begun again or has "
                f"gone on since: it has run {position} scripts"
            )

    def note_step(self, step: SessionScript, used: tuple[float, int], labels: Iterable[str]) -> None:
        """Record a script that has left its state."""
        if self._file is not None:
            self._note_tools(step.tools)
            self._note(STEP, step.journal.id, str(step.outcome), list(used), sorted(labels))

    def note_copy(self, step: SessionScript, labels: Iterable[str]) -> SessionScript:
        """Record a script of the session that this one was forked from, and return it.

        Raises:
            SessionError: what it was answered cannot be recorded.
        """
        copy = replace(step, journal=replace(step.journal, id=self._new_run()))
        try:
            if self._file is not None:
                self._file.database.copy(RUN, step.journal.id, copy.journal.id)
        except OSError as exc:
            raise SessionError(f"the journal of session {self._id!r} cannot be written: {exc}") from exc
        self.note_step(copy, (0.0, 0), labels)
        return copy

    def _note_tools(self, tools: CallableTools) -> None:
        """Record what scripts are told of these tools, as far as the journal does not say it."""
        known = {each.name: (each, tools.returns(each.name)) for each in tools.definitions(Origin.CODE)}
        if new := {name: tool for name, tool in known.items() if self._tools.get(name) != tool}:
            rows = [
                [name, each.description, dumps(each.parameters), dumps(given)] for name, (each, given) in new.items()
            ]
            self._note(TOOLS, rows)
            self._tools |= new

    def note_used(self, used: tuple[float, int], labels: Iterable[str]) -> None:
        """Record what the session has used and read, without a script that has left its state."""
        self._note(USED, list(used), sorted(labels))

    def waiting_used(self) -> tuple[frozenset[str], int]:
        """Return the labels of the script that waits, and how many calls it has made.

        Raises:
            SessionError: its journal is open elsewhere just now.
        """
        if not self.waiting:
            return frozenset(), 0
        try:
            journal = self._store.look(self._waiting_id)
        except UnderWay as exc:
            raise SessionError(f"the script of session {self._id!r} that waits cannot be given up now: {exc}") from exc
        except ResumeError:  # nothing is known of a damaged one
            return frozenset(), 0
        return journal.labels, len(journal.entries)

    @property
    def _waiting_id(self) -> str:
        return self.waiting.run_id if isinstance(self.waiting, Suspension) else self.waiting

    def note_state(self, kept: KeptState, *, is_base: bool) -> None:
        """Keep a state by value on disk, if the session is there. Earlier ones are removed."""
        if self._file is None:
            return
        database = self._file.database
        try:
            with kept.file.content() as content:
                name = database.write_state(self._id, content)
            self._file.write(KEPT, name, kept.file.digest, kept.position, list(kept.lost), is_base)
            if is_base:
                self._base = name
                database.remove_scripts(self._file)
            database.remove_states(self._file, (name, self._base))
        except (OSError, ValueError) as exc:  # this process still has it
            logger.warning("session %s: its state is not kept on disk: %s", self._id, exc)

    def note_unrepeatable(self, why: str) -> None:
        """Record that the state cannot be rebuilt."""
        self._note(UNREPEATABLE, why)
        if not self._broken:
            self._write(lambda file: file.database.remove_scripts(file))

    def abandon(self) -> None:
        """Give up the script that waits. What it has made stays made."""
        if self.waiting:
            self._store.remove(self._waiting_id)
            self.waiting = ""

    def _note(self, *record: Any) -> None:
        self._write(lambda file: file.write(*record))

    def _write(self, write: Callable[[OpenJournal], None]) -> None:
        """Write to the journal, if there is one. The result of a script that ran is returned also if that fails."""
        if self._file is None:
            return
        try:
            write(self._file)
        except OSError as exc:  # it does not have what the session has done since
            self._broken = f"the journal of session {self._id!r} could not be written: {exc}"


def _nothing_kept(name: str, names: list[str]) -> str:
    """Say that there is no journal of this session, and of which sessions there is one."""
    shown = ", ".join(map(repr, names[:MAX_SHOWN])) + (f" and {len(names) - MAX_SHOWN} more" * (len(names) > MAX_SHOWN))
    return (
        f"restore=True: there is no journal of a session named {name!r}; there are those of {shown or 'none'}; "
        'restore="if_kept" begins anew when there is none'
    )
