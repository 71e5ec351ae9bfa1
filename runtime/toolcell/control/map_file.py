"""`MapFile`: which items of a `Runtime.map` have ended, in one journal.

While an item is under way, its run has a journal of its own. The order of writes keeps every effect from being made
twice: the run's journal has each call before it is made; then that of the map has the item's end; then the former goes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from toolcell.control.map_stream import MapItem
from toolcell.errors import ResumeError, UsageError
from toolcell.journal.database import MAP, RUN, Damaged, OpenJournal, RecordKind, Table
from toolcell.journal.store import JournalStore
from toolcell.results import ErrorInfo, Outcome
from toolcell.support.about_tables import tables_text
from toolcell.support.packing import bytes_digest, pack, unpack, value_digest
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue

BEGUN, END = "map", "end"

KEPT_BYTES: Final = 1 << 20
"""Most bytes of one value, as msgpack. A larger one is not kept."""

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,48}")

_ERROR_FIELDS: Final = tuple(each.name for each in fields(ErrorInfo) if each.name not in ("findings", "frames"))


@dataclass(slots=True)
class _Places:
    """What the journal of a map says."""

    places: array[int]
    source_sha256: str | None = None
    place: int = 0
    """Number of the record that is read."""


def item_run(name: str, index: int) -> str:
    """Return the id of the run of an item of a map. It begins with the map's: see `journal.database.OF`."""
    return f"{name}-{index}"


def _map(found: _Places, name: str, source_sha256: str) -> None:
    found.source_sha256 = source_sha256


def _end(found: _Places, index: int, *_kept: Any) -> None:
    missing = index + 1 - len(found.places)
    if missing > 0:
        found.places.extend([-1] * missing)
    found.places[index] = found.place


MAP_RECORDS: Final[Table] = {
    BEGUN: RecordKind((str, str), _map),
    END: RecordKind((int, str, str, bool, object, object), _end),
}


class OtherInputs(UsageError):
    """An item has other inputs than when it began. The message names the item."""


class MapFile:
    """The open journal of a map. Only one process has it open at a time."""

    def __init__(self, store: JournalStore, name: str) -> None:
        self.name = name
        self._database = store.database
        self._file: OpenJournal | None = None
        self._places = array("q")
        """Number of the record with the end of each item, or -1."""

    @property
    def ended(self) -> int:
        """Items that had ended before this process."""
        return sum(place >= 0 for place in self._places)

    def open(self, source_sha256: str, resume: bool) -> None:
        """Open or make the journal.

        Raises:
            UsageError: there is a map of that name already, it is under way, damaged, or that of another script.
        """
        try:
            self._database.settle()
            self._file = OpenJournal(self._database, MAP, self.name)
        except (ResumeError, OSError) as exc:
            why = "it is open already, in this or another process" if isinstance(exc, ResumeError) else str(exc)
            raise UsageError(f"map {self.name!r} cannot be opened: {why}") from exc
        try:
            if not (self._file.is_new or resume):
                raise UsageError(
                    f"there is a map {self.name!r} in {self._database.path} already: carry it on with resume=True, "
                    "or take another map_id"
                )
            self._load(source_sha256)
        except BaseException:
            self.close()
            raise

    def _load(self, source_sha256: str) -> None:
        assert self._file is not None
        found = _Places(self._places)
        try:
            for place in self._database.load_each(MAP, self.name, MAP_RECORDS, found):
                found.place = place
        except Damaged as exc:
            raise UsageError(f"map {self.name!r} is damaged ({exc}); take another map_id") from exc
        if found.source_sha256 is None:
            self._write(BEGUN, self.name, source_sha256)
        elif found.source_sha256 != source_sha256:
            raise UsageError(
                f"map {self.name!r} began with another script: carry it on with that one, or take another map_id"
            )

    def _write(self, *record: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(*record)
        except OSError as exc:
            raise UsageError(f"map {self.name!r} cannot be written: {exc}; carry it on later") from exc

    def close(self) -> None:
        """Close it, so that others may open it. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Items

    def recorded(self, index: int, inputs: Mapping[str, Any]) -> MapItem | None:
        """Return an item that has ended, as far as it was kept; None if it has not.

        Raises:
            UsageError: the item had other inputs, or its end cannot be read.
        """
        place = self._places[index] if index < len(self._places) else -1
        if place < 0:
            return None
        assert self._file is not None
        try:
            _, _, digest, outcome, has_value, packed, error = self._database.record(MAP, self.name, place)
            found = Outcome(outcome)
        except (OSError, ValueError) as exc:
            raise UsageError(f"item {index} of map {self.name!r} cannot be read: {exc}") from exc
        self.check_inputs(index, inputs, digest)
        self.remove_run(index)  # its host may have been killed before this
        value = unpack(packed) if isinstance(packed, bytes) else None
        unkept = f"its value has {packed}, and {KEPT_BYTES} are kept" if isinstance(packed, str) else ""
        return MapItem(
            index,
            inputs,
            run_id=item_run(self.name, index),
            outcome=found,
            value=value,
            has_value=has_value,
            error=ErrorInfo(**error) if error else None,
            attempts=0,
            is_recorded=True,
            unkept=unkept,
        )

    def check_inputs(self, index: int, inputs: Mapping[str, Any], digest: str) -> None:
        """Check that an item has the inputs that it began with.

        Raises:
            OtherInputs: it has not.
        """
        if input_digest(inputs) != digest:
            raise OtherInputs(
                f"input {index} of map {self.name!r} is another than before: carry a map on with the same inputs in "
                "the same order, or take another map_id"
            )

    def check_count(self, count: int) -> None:
        """Check that the inputs, which are over, were not fewer than before.

        Raises:
            UsageError: an item that had ended got no input.
        """
        if count < len(self._places):
            raise UsageError(
                f"the inputs of map {self.name!r} ended after {count}, and item {len(self._places) - 1} had ended "
                "before: carry a map on with the same inputs in the same order"
            )

    def write_end(self, item: MapItem) -> None:
        """Record that an item has ended, and remove the journal of its run.

        Raises:
            UsageError: it cannot be written.
        """
        packed: bytes | str | None = pack(item.value) if item.has_value else None
        if isinstance(packed, bytes) and len(packed) > KEPT_BYTES:
            tables = tables_text(item.value)
            packed = f"{len(packed)} bytes, sha256 {bytes_digest(packed)}{f', {tables}' if tables else ''}"
        error = {name: getattr(item.error, name) for name in _ERROR_FIELDS} if item.error is not None else None
        digest = input_digest(item.inputs)
        self._write(END, item.index, digest, str(item.outcome), item.has_value, packed, error)
        self.remove_run(item.index)

    def has_run(self, index: int) -> bool:
        """Return whether the run of an item has a journal: it has begun, and its end is not recorded."""
        return self._database.last(RUN, item_run(self.name, index)) > 0

    def remove_run(self, index: int) -> None:
        """Remove the journal of a run, which nobody is to carry on."""
        self._database.remove(RUN, item_run(self.name, index))


def input_digest(inputs: Mapping[str, Any]) -> str:
    """Return a short digest of an item's inputs, as they are sent.

    Raises:
        UsageError: they cannot be sent.
    """
    try:
        return value_digest(to_plain(dict(inputs), "inputs"))[:16]
    except (UnsendableValue, ValueError, TypeError) as exc:
        raise UsageError(str(exc)) from exc
