"""What a session remembers beyond its sandbox: the script that waits, and with a journal directory everything else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from toolcell.control.scripts import Script, header_of
from toolcell.control.suspension import OnApproval
from toolcell.errors import ResumeError, SessionError, UsageError
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore
from toolcell.results import Suspension
from toolcell.sessions.settings import Restores
from toolcell.sessions.steps import KeptScript
from toolcell.tools.call import CallableTools
from toolcell_bridge.wire.messages import RunScript

if TYPE_CHECKING:
    from toolcell.sessions.kept import KeptState, SessionJournal


MAX_SHOWN: Final = 10
"""Names of sessions in an error."""


class SessionRecord:
    """The record of one session."""

    def __init__(self, ident: str, store: JournalStore) -> None:
        self._id, self._store = ident, store
        self._key = os.urandom(8).hex()
        self._file: SessionJournal | None = None
        self.waiting: Suspension | str = ""
        """What the last script waits for; the id of its run if its host was killed; empty when none waits."""
        self._broken = ""

    @property
    def is_on_disk(self) -> bool:
        """It has a file."""
        return self._file is not None

    # Opening and closing

    def open(self, restores: Restores, steps: Iterable[KeptScript] = ()) -> KeptState | None:
        """Open the file of the session. Return what it says, if the session is to be restored and there is something.

        Raises:
            SessionError: it is open elsewhere, damaged, or cannot be written.
            UsageError: there is none, and it is to be restored.
        """
        from toolcell.sessions.kept import SessionJournal, kept_names

        if restores == "always" and self._id not in (names := kept_names(self._store)):
            raise UsageError(_nothing_kept(self._id, names))
        file = SessionJournal(self._store, self._id)
        try:
            state = file.read() if restores != "never" else None
            if state is not None and state.key:
                self._key = state.key
                if state.last:
                    self._store.remove(state.last)
                if state.begun:
                    self.waiting = self._store.waiting(state.begun) or ""
            elif restores == "always":
                file.close(is_kept=False)  # a host was killed when it had just made the file
                raise UsageError(_nothing_kept(self._id, kept_names(self._store)))
            else:
                file.begin(self._key)
                state = None
            self._file = file
        except BaseException as exc:
            file.close(is_kept=True)
            if isinstance(exc, OSError):
                raise SessionError(f"the journal of session {self._id!r} cannot be written: {exc}") from exc
            raise
        return state

    def close(self, *, is_named: bool) -> None:
        """Close the file. That of a session without a name is kept only while a script waits."""
        if self._file is not None:
            self._file.close(is_kept=is_named or bool(self.waiting))
            self._file = None
        elif self.waiting:
            self.abandon()

    def begin_anew(self) -> None:
        """Forget everything."""
        self.abandon()
        self._key, self._broken = os.urandom(8).hex(), ""
        if self._file is not None:
            with self._writing():
                self._file.begin(self._key)

    # Scripts

    def check_free(self) -> None:
        """Check that a script may begin.

        Raises:
            SessionError: another one waits, or the file of the session cannot be written.
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

    def journal(self, message: RunScript, script: Script, tools: CallableTools, on_approval: OnApproval) -> Journal:
        """Return the journal of a script that begins: one that can be carried on, if it may wait or is on disk.

        Raises:
            UsageError: it cannot be written.
        """
        is_kept = self._file is not None
        if not (is_kept or on_approval == "suspend") or script.is_fed:  # the text of a fed one is known at its end
            return Journal(os.urandom(16).hex())
        journal = self._store.make(os.urandom(16).hex())
        journal.header = self._header_of(message.source, message.inputs, script, tools, on_approval)
        if self._file is not None:
            self._store.write(journal)
            with self._writing():
                self._file.write_begun(journal.id)
        return journal

    def _header_of(
        self, source: str, inputs: dict[str, Any], script: Script, tools: CallableTools, on_approval: OnApproval
    ) -> dict[str, Any]:
        header = header_of(source, inputs, script, tools, on_approval, "", None)
        return header | {"session": self._id, "session_key": self._key, "number": script.number}

    def check_belongs(self, journal: Journal, position: int) -> None:
        """Check that a journal is that of the next script of this session.

        Raises:
            ResumeError: it is not.
        """
        header = journal.header
        if header.get("session") != self._id:
            raise ResumeError(f"run {journal.id} is no script of session {self._id!r}; resume it where it began")
        if header["session_key"] != self._key or header["number"] != position + 1:
            raise ResumeError(
                f"run {journal.id} was script {header['number']} of session {self._id!r}, which was begun again or has "
                f"gone on since: it has run {position} scripts"
            )

    def note_step(self, step: KeptScript, used: tuple[float, int], labels: Iterable[str]) -> None:
        """Record a script that has left its state."""
        if self._file is not None:
            with self._writing():
                script = step.script
                header = step.journal.header or self._header_of(
                    script.source, dict(script.inputs or {}), script, step.tools, "ask"
                )
                self._file.write_step(step, header, used, labels)

    def note_used(self, used: tuple[float, int], labels: Iterable[str]) -> None:
        """Record what the session has used and read, without a script that has left its state."""
        if self._file is not None:
            with self._writing():
                self._file.write_used(used, labels)

    def waiting_used(self) -> tuple[frozenset[str], int]:
        """Return the labels of the script that waits, and how many calls it has made.

        Raises:
            SessionError: its journal is open elsewhere just now.
        """
        if not self.waiting:
            return frozenset(), 0
        try:
            return self._store.used_by(self._waiting_id)
        except ResumeError as exc:
            raise SessionError(f"the script of session {self._id!r} that waits cannot be given up now: {exc}") from exc

    @property
    def _waiting_id(self) -> str:
        return self.waiting.run_id if isinstance(self.waiting, Suspension) else self.waiting

    def note_unrepeatable(self, why: str) -> None:
        """Record that the state cannot be rebuilt."""
        if self._file is not None:
            with self._writing():
                self._file.write_unrepeatable(why)

    def abandon(self) -> None:
        """Give up the script that waits. What it has made stays made."""
        if self.waiting:
            self._store.remove(self._waiting_id)
            self.waiting = ""

    def _writing(self) -> _Writing:
        return _Writing(self)

    def failed(self, exc: OSError) -> None:
        """The file could not be written: it does not have what the session has done since."""
        self._broken = f"the journal of session {self._id!r} could not be written: {exc}"


def _nothing_kept(name: str, names: list[str]) -> str:
    """Say that there is no journal of this session, and of which sessions there is one."""
    shown = ", ".join(map(repr, names[:MAX_SHOWN])) + (f" and {len(names) - MAX_SHOWN} more" * (len(names) > MAX_SHOWN))
    return (
        f"restore=True: there is no journal of a session named {name!r}; there are those of {shown or 'none'}; "
        'restore="if_kept" begins anew when there is none'
    )


class _Writing:
    """Takes note when the file cannot be written. The result of a script that ran is returned all the same."""

    def __init__(self, record: SessionRecord) -> None:
        self._record = record

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> bool:
        if isinstance(exc, OSError):
            self._record.failed(exc)
            return True
        return False
