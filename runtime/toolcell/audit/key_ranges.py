"""Which key signed which records of a log, and how one key is replaced by the next."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.format import chain_directories, read_log_id
from toolcell.audit.keys import (
    ED25519,
    HMAC,
    Ed25519Signer,
    HmacKey,
    Signer,
    Verifier,
    algorithm_of,
    by_id,
    load_signer,
    load_verifier,
)
from toolcell.audit.log import AuditLog
from toolcell.audit.reader import StoredRecord, read_chain
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError, UsageError
from toolcell.support.atomic import write_file

VALID: Final = "valid"
UNKNOWN: Final = "unknown"
"""The key was not given, so the signatures were not checked."""
FORGED: Final = "forged"
"""The key did not sign this, or the records are not those that it signed."""
UNSIGNED: Final = "unsigned"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Records of a chain, one after another, that were signed with one key."""

    chain: str
    first: int
    """Seq of the first record."""
    last: int
    """Seq of the last signature; without one, of the last record."""
    key: str
    """Empty: no signature follows these records."""
    algorithm: str
    signatures: int
    first_ns: int
    """When the first of the records was written, as it says."""
    last_ns: int
    state: str
    """valid, unknown, forged or unsigned."""
    successor: str = ""
    """The key that a record of this range names as the next one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def key_ranges(directory: Path, verifiers: Iterable[Verifier]) -> list[KeyRange]:
    """Return who signed what in each chain, in order. Whether records are missing is for `verify` to say.

    Raises:
        AuditError: there is no log in `directory`, or it cannot be read.
    """
    log, keys = read_log_id(directory), by_id(verifiers)
    return [each for path in chain_directories(directory) for each in _merged(_ranges_of(path, log, keys))]


def _ranges_of(path: Path, log: str, keys: Mapping[str, Verifier]) -> Iterator[KeyRange]:
    """Yield the range of each signature."""
    first: StoredRecord | None = None
    last: StoredRecord | None = None
    is_linked, successor = True, ""
    for stored in read_chain(path):
        first = first or stored
        if last is not None:
            place = (last.frame.record_hash, last.record.seq + 1)
            is_linked = is_linked and place == (stored.frame.previous_hash, stored.record.seq)
        last = stored
        if stored.record.kind == records.KEY_CHANGED:
            successor = stored.record.fields["new"]
        elif stored.record.kind == records.CHECKPOINT:
            state = _state_of(stored, log, path.name, keys)
            state = FORGED if not is_linked and state == VALID else state
            fields = stored.record.fields
            algorithm = algorithm_of(fields["signature"])
            yield _range(path.name, first, stored, fields["key"], algorithm, state, successor)
            first, is_linked, successor = None, True, ""
    if first is not None and last is not None:
        yield _range(path.name, first, last, "", "", UNSIGNED, "")


def _range(
    chain: str, first: StoredRecord, last: StoredRecord, key: str, algorithm: str, state: str, successor: str
) -> KeyRange:
    start, end = first.record, last.record
    own = (chain, start.seq, end.seq, key, algorithm, int(bool(key)), start.at_ns, end.at_ns)
    return KeyRange(*own, state, successor)


def _state_of(stored: StoredRecord, log: str, chain: str, keys: Mapping[str, Verifier]) -> str:
    record = stored.record
    verifier = keys.get(record.fields["key"])
    if verifier is None:
        return UNKNOWN
    reason, previous_hash = record.fields["reason"], stored.frame.previous_hash
    statement = checkpoint_statement(log, chain, record.seq, record.at_ns, previous_hash, reason)
    return VALID if verifier.is_valid(statement, record.fields["signature"]) else FORGED


def _merged(ranges: Iterable[KeyRange]) -> Iterator[KeyRange]:
    open_range: KeyRange | None = None
    for each in ranges:
        if open_range is not None and (open_range.key, open_range.state) == (each.key, each.state):
            open_range = replace(
                open_range,
                last=each.last,
                last_ns=each.last_ns,
                signatures=open_range.signatures + each.signatures,
                successor=each.successor or open_range.successor,
            )
            continue
        if open_range is not None:
            yield open_range
        open_range = each
    if open_range is not None:
        yield open_range


# Rotation


def retired_key_path(path: Path, key_id: str) -> Path:
    """Return where a key is kept after another took its place."""
    return path.with_name(f"{path.name}.{key_id}")


def retired_keys(path: Path) -> list[Verifier]:
    """Load the keys that were once at `path`, to check with. A file counts if its name ends in the id of its key."""
    found = []
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
        with suppress(AuditError):
            verifier = load_verifier(file)
            if file.name == retired_key_path(path, verifier.key_id).name:
                found.append(verifier)
    return found


def rotate(path: Path, logs: Iterable[Path], algorithm: str = "") -> tuple[Signer, Signer]:
    """Replace the key at `path` by a new one and return both. The old key is kept beside it, to verify with.

    Each log gets a record, signed with the old key, that names the new one. Open writers go on with the old key.

    Raises:
        AuditError: the key or a log cannot be used. The key at `path` is still the old one.
        UsageError: there is no such algorithm, or a file is in the way.
    """
    old = load_signer(path)
    new = _generate(algorithm or old.algorithm)
    public = "" if isinstance(new, HmacKey) else new.to_text()
    kept = retired_key_path(path, old.key_id)
    if kept.exists():
        raise UsageError(f"{kept} exists: the key {old.key_id} was replaced before, and is at {path} again")
    for directory in logs:
        with AuditLog(directory, key=old) as log:
            log.append(records.KEY_CHANGED, 0, (old.key_id, new.key_id, new.algorithm, public, {}))
    os.link(path, kept)
    write_file(path, (new.to_text() if isinstance(new, HmacKey) else new.private_text()).encode("ascii"))
    if public:
        write_file(path.with_name(f"{path.name}.pub"), public.encode("ascii"), mode=0o644)
    return old, new


def _generate(algorithm: str) -> HmacKey | Ed25519Signer:
    if algorithm == HMAC:
        return HmacKey.generate()
    if algorithm == ED25519:
        return Ed25519Signer.generate()
    raise UsageError(f"no key is of kind {algorithm!r}: want {HMAC} or {ED25519}")
