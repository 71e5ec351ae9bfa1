"""Where journals are: those of finished runs in memory, for repairs; those that may be carried on, also in a record."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from toolcell.calls.call import CallableTools
from toolcell.calls.options import Origin
from toolcell.errors import QuotaExceeded, ResumeError, UsageError
from toolcell.flows import Labels
from toolcell.journal.approval_tokens import make_token, read_token
from toolcell.journal.database import ENDED, RUN, Damaged, JournalDatabase, OpenJournal, UnderWay
from toolcell.journal.identity import registry_digest, tool_digests
from toolcell.journal.ledger import BEFORE_CALLS, RUN_RECORDS, Journal, pending_of
from toolcell.journal.replay import RecordedDecision
from toolcell.results import ExecutionResult, Preflight, Suspension
from toolcell.run.calls import FINISHED_BYTES, FINISHED_RUNS, CallList, FinishedRuns, finished_runs
from toolcell.support import daemon_threads
from toolcell.support.checks import brief
from toolcell.support.exact_json import is_small

if TYPE_CHECKING:
    from toolcell.audit.log import AuditLog

CALLS_BYTES: Final = 4096
"""Room that a run needs for its calls, besides its source, to begin."""

Returned = TypeVar("Returned")

REMEMBERED: Final = 16_384
"""Characters and elements of the arguments that a run waits with. One with more is read again by whoever lists it."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_SESSION = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{16}}")
"""Ids of runs; and of scripts of a session, whose name is in it: see `journal.database.OF`."""


TOKEN_S: Final = 7 * 86_400.0
"""Without a record."""


class NoSuchRun(ResumeError):
    """There is no such run, or none of its calls was made."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a journal on disk had to say when nobody had it open."""

    signature: tuple[int, int]
    """Number and time of its last record then. Whoever takes it up writes to it."""
    has_ended: bool
    suspension: Suspension | None
    """What it waits for; None when it was interrupted, or has ended."""

    @property
    def is_small(self) -> bool:
        """True when it may stay in memory."""
        waits = self.suspension
        return waits is None or is_small([call.args for call in waits.calls], REMEMBERED)


class JournalStore:
    """The journals of one runtime."""

    def __init__(self, record: AuditLog | None, finished: FinishedRuns | None = None) -> None:
        """`finished`: the latest finished runs, also those that had no journal."""
        self.is_durable = record is not None
        """Journals are in the record."""
        self.key = os.urandom(32)
        self.token_s = record.config.token_s if record is not None else TOKEN_S
        """Seconds until a token expires."""
        self._database = JournalDatabase(record) if record is not None else None
        self.hash_seed: int | None = None
        """PYTHONHASHSEED of every script of this record: sets have one order in all processes."""
        self._finished = finished_runs() if finished is None else finished
        self._begun: set[str] = set()
        """Ids of runs that began here and have not ended."""
        self._waiting: dict[str, Journal] = {}
        """In memory: journals of runs that may be carried on."""
        self.used: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        """State of journals on disk, by id, as they were when they were read last."""

    @property
    def database(self) -> JournalDatabase:
        """Where durable journals are."""
        assert self._database is not None
        return self._database

    def open(self) -> None:
        """Remove old journals, and read the key of the tokens. The record is open.

        Raises:
            UsageError: the record cannot be used.
        """
        if not self.is_durable:
            return
        try:
            self.key = self.database.open()
        except OSError as exc:
            raise UsageError(str(exc)) from exc
        self.hash_seed = int.from_bytes(hashlib.sha256(b"hash seed" + self.key).digest()[:4], "big")

    def close(self) -> None:
        """Let go of the database. A later use opens it again."""
        if self.is_durable:
            self.database.close()

    async def call(self, work: Callable[..., Returned], *args: Any) -> Returned:
        """Do what may wait for the record, which a server has or another process may have locked: in a thread."""
        return await daemon_threads.run_sync(work, *args) if self.is_durable else work(*args)

    async def settle(self) -> None:
        """Wait until everything is written. A thread waits for another process.

        Raises:
            OSError: it could not be written; it will be, with what is written later.
        """
        is_much = self.is_durable and (self.database.is_remote or self.database.log.has_much_to_write())
        if is_much or (self.is_durable and not self.database.settle(wait=False)):
            await daemon_threads.run_sync(self.database.settle)

    # A run begins

    def make(self, wanted: str) -> Journal:
        """Return an empty journal; `wanted`: its id, if it is a short name and free here; `write` looks elsewhere."""
        is_free = _NAME.fullmatch(wanted) is not None and wanted not in self._waiting and wanted not in self._begun
        ident = wanted if is_free else os.urandom(16).hex()
        self._begun.add(ident)
        return Journal(ident)

    async def begin(self, journal: Journal, *, is_large: bool, is_unknown: bool = False) -> None:
        """Write the header of a journal as `write` does, and a large one in a thread. Whoever cancels it puts it down.

        Raises:
            UsageError: the file cannot be written.
        """
        turn, is_written, is_given_up = threading.Lock(), False, False

        def write() -> None:
            nonlocal is_written
            self.write(journal, is_unknown)
            with turn:
                is_written, is_late = True, is_given_up
            if is_late:
                self.put_down(journal)

        try:
            await (daemon_threads.run_large(write) if is_large else self.call(write))
        except asyncio.CancelledError:  # asyncio's own: a thread that writes goes on
            with turn:
                is_given_up, is_ours = True, is_written
            if is_ours:
                self.put_down(journal)
            raise

    def write(self, journal: Journal, is_unknown: bool = False) -> None:
        """Write the header of a journal to the record, and each later entry. `is_unknown`: as for `OpenJournal`.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            self.database.check_room(len(str(journal.header.get("source", ""))) + CALLS_BYTES)
            try:
                journal.file = self._new_file(journal.id, is_unknown)
            except ResumeError:  # there is, or was, a run of the same id
                self._begun.discard(journal.id)
                journal.id = os.urandom(16).hex()
                journal.file = self._new_file(journal.id)
            journal.write_header()
        except OSError as exc:
            journal.close()
            if exc.errno == errno.EDQUOT:
                self._begun.discard(journal.id)
                raise QuotaExceeded(f"the run cannot begin: {exc.strerror}", math.inf) from exc
            raise UsageError(f"the journal of run {journal.id} cannot be written: {exc}") from exc

    def _new_file(self, ident: str, is_unknown: bool = False) -> OpenJournal:
        file = OpenJournal(self.database, RUN, ident, late_after=BEFORE_CALLS, is_unknown=is_unknown)
        if not file.is_new:
            file.close()
            raise ResumeError(f"there is a run {ident} already")
        return file

    # A run ends

    def suspend(self, journal: Journal) -> Suspension:
        """Keep the journal of a suspended run until its token is used; return the token.

        Raises:
            UsageError: the file cannot be written.
        """
        journal.token, journal.expires = os.urandom(12).hex(), time.time() + self.token_s
        try:
            journal.write_waiting()
        except OSError as exc:
            message = f"the journal of run {journal.id} cannot be written: {exc}; resume the run with this id"
            raise UsageError(message) from exc
        self.put_down(journal)
        return self._suspension(journal)

    def _suspension(self, journal: Journal) -> Suspension:
        calls, header = tuple(pending_of(journal.entries.values())), journal.header
        token = make_token(
            self.key,
            token_id=journal.token,
            run=journal.id,
            source=header["source_sha256"],
            tools=registry_digest(header["tools"]),
            expires=journal.expires,
            calls=calls,
        )
        return Suspension(journal.id, calls, journal.expires, token, Preflight.of_plain(header.get("preflight")))

    def put_down(self, journal: Journal) -> None:
        """Let a journal be taken up again, here or in another process."""
        self._begun.discard(journal.id)
        journal.close()
        if journal.header and not self.is_durable and not journal.lost:
            now, known = time.time(), self._waiting
            valid = {ident: each for ident, each in known.items() if not each.token or each.expires >= now}
            self._waiting = valid | {journal.id: journal}

    def finish(
        self, journal: Journal, run_id: str, outcome: str, calls_bytes: int, *, is_in_session: bool = False
    ) -> None:
        """Keep the journal of a finished run in memory, as long as there is room.

        `calls_bytes`: what the arguments of its calls take in memory, about. `is_in_session`: as for `end`.
        """
        self.end(journal, outcome, is_in_session=is_in_session)
        journal.current, journal.replay, journal.header, journal.run_labels = {}, None, {}, Labels()
        if journal.lost:
            return
        journal.size += calls_bytes
        self._finished.put(journal.id, (run_id, journal), journal.size)

    def end(self, journal: Journal, outcome: str, *, is_in_session: bool = False) -> None:
        """Record that a run is over. `is_in_session`: a session needs its calls to run the script again."""
        self._begun.discard(journal.id)
        if journal.file is not None:
            with suppress(OSError):  # then it is one that can be resumed, and has no call left to make
                if is_in_session or journal.header.get("is_item"):  # its map has not recorded its end
                    journal.write(ENDED, outcome, needs_room=False)
                else:
                    journal.file.remove()
            journal.close()

    def remove(self, ident: str) -> None:
        """Remove the journal of a run that nobody is to carry on."""
        self._waiting.pop(ident, None)
        if self.is_durable:
            self.database.remove(RUN, ident)

    # Repair and resumption

    def keeps(self, result: ExecutionResult | None) -> bool:
        """Return whether the journal of this run is there for a repair."""
        return result is not None and result.journal_id in self._finished

    def repaired(self, given: ExecutionResult | str) -> Journal:
        """Return the journal of a finished run, by its result or id.

        Raises:
            UsageError: there is none.
        """
        if isinstance(given, ExecutionResult):
            found = self._finished.get(given.journal_id)
            name = given.run_id
        elif not isinstance(given, str):
            raise UsageError(f"repairs= takes the result of a run, or its id, not {brief(given)}")
        else:
            name = given
            same = [each for ident, each in self._finished.items() if given in (ident, each[0])]
            found = same[-1] if same else None
        if found is None:
            raise UsageError(
                f"repairs={name!r}: this Runtime has no journal of that run. It keeps those of its last "
                f"{FINISHED_RUNS} finished runs, with at most {FINISHED_BYTES} bytes of arguments and answers "
                "together; a suspended run is resumed, and a dry run has no journal: run it again"
            )
        calls = found[1]
        if isinstance(calls, CallList):
            return Journal.of_calls(calls)
        assert isinstance(calls, Journal)
        return calls

    def interrupted(self) -> list[str]:
        """Return the ids of runs that were interrupted and have no token: `resume` takes these ids."""
        return [ident for ident, waits in self._idle().items() if waits is None]

    def suspensions(self) -> list[Suspension]:
        """Return what each suspended run waits for.

        Raises:
            UsageError: the key of the tokens was not read yet.
        """
        if self.is_durable and self.hash_seed is None:
            raise UsageError("open the Runtime first: the tokens of suspended runs are signed with the record's key")
        return [waits for waits in self._idle().values() if waits is not None]

    def _idle(self) -> dict[str, Suspension | None]:
        """Return the runs that have not ended and are not under way, and what each waits for; None: for nothing, it was
        interrupted. Only journals that have changed are read.

        May be called in a thread.
        """
        if not self.is_durable:
            return {journal.id: self._waits(journal) for journal in list(self._waiting.values())}
        found, seen = dict[str, Suspension | None](), dict[str, _Seen]()
        try:
            known_runs = self.database.last_of_each(RUN)
        except OSError as exc:
            raise UsageError(f"the journals cannot be read: {exc}") from exc
        for ident, signature in known_runs.items():
            known = self._seen.get(ident)
            if known is None or known.signature != signature:
                try:
                    has_ended = self.database.record(RUN, ident, signature[0])[:1] == [ENDED]
                    journal = None if has_ended else self.look(ident)
                except (ResumeError, OSError, ValueError, TypeError):  # removed, under way, or damaged
                    continue
                has_ended = journal is None or bool(journal.ended)
                known = _Seen(signature, has_ended, None if journal is None else self._waits(journal))
            if known.is_small:
                seen[ident] = known
            if not known.has_ended:
                found[ident] = known.suspension
        self._seen = seen
        return found

    def _waits(self, journal: Journal) -> Suspension | None:
        return self._suspension(journal) if journal.token else None

    def look(self, ident: str) -> Journal:
        """Return the journal of a run that is not under way, without taking it up.

        Raises:
            UnderWay: it is.
            NoSuchRun, ResumeError: it is not there, or cannot be read.
        """
        try:
            if self.is_durable and self.database.is_open(RUN, ident):
                raise UnderWay(f"run {ident} is under way; it can be resumed when it has ended")
        except OSError as exc:
            raise ResumeError(f"the journal of run {ident} cannot be read: {exc}") from exc
        return self.read(ident)

    def waiting(self, ident: str) -> Suspension | str | None:
        """Return what a run waits for; its own id if it was interrupted or cannot be read now; None if it is over."""
        try:
            journal = self.look(ident)
        except NoSuchRun:
            return None
        except ResumeError:  # damaged, or under way: `take` says so
            return ident
        if journal.ended:
            return None
        return self._waits(journal) or ident

    def header_of(self, ident: str) -> Mapping[str, Any]:
        """Return the `source` and `session` of a run, and for whom it is; empty if its journal cannot be read now.

        Inputs and files, which may be large, are left out.
        """
        with suppress(ResumeError):
            header = self.look(ident).header
            return {**{name: header.get(name) for name in ("source", "session")}, **(header.get("who") or {})}
        return {}

    def take(self, given: str | Suspension, tools: CallableTools, *, even_ended: bool = False) -> Journal:
        """Return the journal of a suspended or interrupted run (`even_ended`: of any), for one run of its script.

        Raises:
            ResumeError: the token is foreign, changed, expired or used, its run unknown, or the tools are others.
        """
        token = read_token(given.to_json(), self.key) if isinstance(given, Suspension) else None
        if isinstance(given, str) and given.lstrip().startswith("{"):
            token = read_token(given, self.key)
        ident = str(token["run"]) if token is not None else str(given)
        if not (_NAME.fullmatch(ident) or _OF_SESSION.fullmatch(ident)):
            raise ResumeError(
                f"resume takes result.suspension, its to_json(), or the id of an interrupted run, not {brief(given)}"
            )
        token_id = str(token["token"]) if token is not None else ""
        if token_id and token_id in self.used:
            raise ResumeError(used_text(ident))
        try:
            if self.is_durable:
                self.database.settle()
            file = OpenJournal(self.database, RUN, ident) if self.is_durable else None
        except OSError as exc:
            raise ResumeError(f"the journal of run {ident} cannot be opened: {exc}") from exc
        try:
            journal = self.read(ident)
            if token_id and token_id in journal.used_tokens:  # a run that was interrupted has no token
                raise ResumeError(used_text(ident))
            if journal.ended and not even_ended:
                raise ResumeError(f"run {ident} has ended; there is nothing to resume")
            if journal.token and not token_id:
                message = f"run {ident} is suspended: resume it with the token of its suspension, not with its id"
                raise ResumeError(message)
            if token_id != journal.token:
                raise ResumeError(used_text(ident))
            check_tools(journal, tool_digests(tools, Origin(journal.header.get("origin", Origin.CODE))))
        except ResumeError:
            if file is not None:
                file.close()
            raise
        journal.file = file
        self._waiting.pop(ident, None)
        return journal

    def read(self, ident: str) -> Journal:
        """Return the journal of a run, whoever has it open. Raises as `look`."""
        try:
            if (journal := self._waiting.get(ident)) is not None:
                return journal
            if not (self.is_durable and self.database.last(RUN, ident)):
                place = self.database.place if self.is_durable else "this Runtime"
                raise NoSuchRun(
                    f"there is no run {ident} to resume in {place}: it has ended, it began elsewhere, or its "
                    "session was begun again. A run outlives its process with Runtime(record=FILE)"
                )
            journal = self.database.load(RUN, ident, RUN_RECORDS, Journal(""))
            if not journal.header:
                raise Damaged("it does not begin with its run")
            journal.entries = dict(sorted(journal.entries.items()))
            return journal
        except Damaged as exc:
            raise ResumeError(f"the journal of run {ident} is damaged ({exc}); run the script again") from exc
        except OSError as exc:
            raise ResumeError(f"the journal of run {ident} cannot be read: {exc}") from exc

    def use(self, journal: Journal, decided: dict[int, RecordedDecision]) -> None:
        """Mark the token of a journal as used, and record what was decided. From here on it is refused."""
        token = journal.token
        journal.use_token(decided)
        self.used.add(token)


def check_tools(journal: Journal, digests: dict[str, str]) -> None:
    """Check that the tools are those of the run.

    Raises:
        ResumeError: names those that are not.
    """
    before: dict[str, Any] = journal.header["tools"]
    if registry_digest(before) == registry_digest(digests):
        return
    changed = sorted(name for name in before.keys() & digests.keys() if before[name] != digests[name])
    parts = {"missing": sorted(before.keys() - digests.keys()), "new": sorted(digests.keys() - before.keys())}
    parts["changed"] = changed
    said = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
    raise ResumeError(f"run {journal.id} began with other tools ({said}); resume it with the tools that it began with")


def used_text(ident: str) -> str:
    """Say that a token was used."""
    return f"this token of run {ident} was used already; a token resumes a run once"
