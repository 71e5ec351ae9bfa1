"""A session on disk: the scripts that have left their state, each with its answers. Another process rebuilds it.

The script under way has a journal of its own, as every run has. It is removed once the script is recorded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toolcell.control.scripts import script_of
from toolcell.errors import ResumeError, SessionError
from toolcell.journal.file import Damaged, JournalFile, OlderCopy, RecordKind, Table
from toolcell.journal.ledger import Journal, JournalEntry
from toolcell.journal.store import JournalStore
from toolcell.results import Outcome
from toolcell.sessions.settings import SESSION_PREFIX, SESSION_SUFFIX
from toolcell.sessions.steps import KeptScript
from toolcell.tools.registry import ToolRegistry

OPENED, BEGUN, STEP, USED, UNREPEATABLE = "opened", "begun", "step", "used", "unrepeatable"


@dataclass(slots=True)
class KeptState:
    """What a session's file says."""

    name: str = ""
    key: str = ""
    """Of this life of the session: a token of a script of an earlier one is of no use in it."""
    steps: list[KeptScript] = field(default_factory=list)
    position: int = 0
    begun: str = ""
    """Journal of the script that was under way, or waits."""
    last: str = ""
    """Journal of the last script that is recorded."""
    not_repeatable: str = ""
    labels: frozenset[str] = frozenset()
    cpu_s: float = 0.0
    calls: int = 0


class SessionJournal:
    """The open file of a session. Only one process has it open at a time."""

    def __init__(self, store: JournalStore, name: str) -> None:
        """Open or make the file.

        Raises:
            SessionError: another process has it open, or it cannot be opened.
        """
        assert store.config is not None
        self.name = name
        path = store.config.directory / f"{SESSION_PREFIX}{name}{SESSION_SUFFIX}"
        try:
            self._file = JournalFile(path, store.marks, store.key)
        except ResumeError as exc:
            raise SessionError(f"session {name!r} is open in another process or Runtime; close it there") from exc
        except OSError as exc:
            raise SessionError(f"the journal of session {name!r} cannot be opened: {exc}") from exc

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    def read(self) -> KeptState:
        """Return the state of the session when its file was written last.

        Raises:
            SessionError: the file is damaged, or an older copy of it was put back.
        """
        state = KeptState()
        try:
            self._file.load(SESSION_RECORDS, state)
            if state.name != self.name and state.key:
                raise Damaged(f"it is a copy of that of session {state.name!r}")
        except OlderCopy as exc:
            raise SessionError(f"session {self.name!r}: {exc}") from exc
        except Damaged as exc:
            raise SessionError(
                f"the journal of session {self.name!r} is damaged ({exc}); remove {self.path}, or open it without "
                "restore=True, to begin again"
            ) from exc
        return state

    def begin(self, key: str) -> None:
        """Forget what was recorded: the session begins anew."""
        self._file.clear()
        self._file.write(OPENED, key, self.name)

    def write_begun(self, journal_id: str) -> None:
        """Record that a script is about to begin."""
        self._file.write(BEGUN, journal_id)

    def write_step(
        self, step: KeptScript, header: dict[str, Any], used: tuple[float, int], labels: Iterable[str]
    ) -> None:
        """Record a script that has left its state. `used`: CPU seconds and calls of the session so far."""
        rows = [
            [each.number, each.tool, each.args, each.began, each.began_ns, each.ended, each.ended_ns, each.answer]
            for each in step.journal.entries
        ]
        self._file.write(STEP, header, step.journal.id, str(step.outcome), rows, list(used), sorted(labels))

    def write_used(self, used: tuple[float, int], labels: Iterable[str]) -> None:
        """Record what the session has used and read: also by scripts that have left no state."""
        self._file.write(USED, list(used), sorted(labels))

    def write_unrepeatable(self, why: str) -> None:
        """Record that the state cannot be rebuilt."""
        self._file.write(UNREPEATABLE, why)

    def close(self, *, is_kept: bool) -> None:
        """Close the file, and remove it if nobody can open the session again."""
        if not is_kept:
            self.path.unlink(missing_ok=True)
        self._file.close()


def kept_names(store: JournalStore) -> list[str]:
    """Return the names of the sessions that have a file, sorted."""
    files = store.config.directory.glob(f"{SESSION_PREFIX}*{SESSION_SUFFIX}") if store.config is not None else ()
    return sorted(path.name.removeprefix(SESSION_PREFIX).removesuffix(SESSION_SUFFIX) for path in files)


def _opened(state: KeptState, key: str, name: str) -> None:
    state.key, state.name = key, name


def _used(state: KeptState, used: list[Any], labels: list[str]) -> None:
    cpu_s, calls = used
    state.cpu_s, state.calls = float(cpu_s), int(calls)
    state.labels |= frozenset(labels)


def _begun(state: KeptState, journal_id: str) -> None:
    state.begun = journal_id


def _unrepeatable(state: KeptState, why: str) -> None:
    state.not_repeatable, state.steps = why, []


def _step_recorded(
    state: KeptState,
    header: dict[str, Any],
    journal_id: str,
    outcome: str,
    rows: list[list[Any]],
    used: list[Any],
    labels: list[str],
) -> None:
    state.position += 1
    state.begun, state.last = "", journal_id
    _used(state, used, labels)
    if not state.not_repeatable:
        state.steps.append(_step(header, journal_id, outcome, rows, state.position))


SESSION_RECORDS: Final[Table] = {
    OPENED: RecordKind((str, str), _opened),
    USED: RecordKind((list, list), _used),
    BEGUN: RecordKind((str,), _begun),
    UNREPEATABLE: RecordKind((str,), _unrepeatable),
    STEP: RecordKind((dict, str, str, list, list, list), _step_recorded),
}


def _step(header: dict[str, Any], journal_id: str, outcome: str, rows: list[list[Any]], number: int) -> KeptScript:
    journal = Journal(journal_id)
    for entry_number, tool, args, began, began_ns, ended, ended_ns, answer in rows:
        entry = JournalEntry(entry_number, tool, args, began)
        entry.began_ns, entry.ended, entry.ended_ns, entry.answer = began_ns, ended, ended_ns, answer
        journal.entries.append(entry)
        journal.size += len(answer or b"")
    tools = ToolRegistry()
    for name in header["tools"]:  # scripts see these names, and none of them is called
        tools.register(name, "Answered from the journal of the session.", None, _never)
    return KeptScript(script_of(header, number), tools.freeze(), journal, Outcome(outcome), None)


def _never(_args: Any) -> Any:
    raise SessionError("no tool is called while a state is rebuilt")


class ScriptStore(JournalStore):
    """The store as one script of a session sees it: its journal ends when the session has recorded the script."""

    def __init__(self, store: JournalStore) -> None:
        super().__init__(None)
        self._store = store
        self._end: tuple[str, str] | None = None

    def finish(self, journal: Journal, run_id: str, outcome: str, calls_bytes: int) -> None:
        """Take note of the end. Arguments count from now on: the session keeps them."""
        journal.size += calls_bytes
        self._end = run_id, outcome

    def put_down(self, journal: Journal) -> None:
        """The script ended without a result; its session goes on, so nobody carries it on."""
        self._end = "", ""

    def suspend(self, journal: Journal) -> Any:
        """Keep the journal until the script is carried on; return the token."""
        return self._store.suspend(journal)

    def conclude(self, journal: Journal) -> None:
        """End the journal, unless the script waits."""
        if self._end is None:
            return
        run_id, outcome = self._end
        if outcome:
            self._store.finish(journal, run_id, outcome, 0)
        else:
            self._store.end(journal, "interrupted")
        self._store.remove(journal.id)
