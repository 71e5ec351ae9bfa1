"""Which key signed which events of a record, and how one key is replaced by the next."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records, store
from toolcell.audit.databases import Place, database_of
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
from toolcell.audit.signatures import CHECKPOINT_COLUMNS, head_of
from toolcell.errors import AuditError, UsageError
from toolcell.support.files import write_file

VALID: Final = "valid"
UNKNOWN: Final = "unknown"
"""The key was not given, so the signatures were not checked."""
FORGED: Final = "forged"
"""The key did not sign this. Whether the events are those that it signed is for `verify` to say."""
UNSIGNED: Final = "unsigned"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Signatures of a chain that were made with one key."""

    chain: str
    last: int
    """Seq of the last event that is signed; without a signature, of the last event."""
    key: str
    """Empty: no signature follows these events."""
    algorithm: str
    signatures: int
    first_ns: int
    last_ns: int
    state: str
    """valid, unknown, forged or unsigned."""
    successor: str = ""
    """The key that an event of the chain names as the next one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def key_ranges(path: Place, verifiers: Iterable[Verifier]) -> list[KeyRange]:
    """Return who signed what in each chain, in the order in which the chains were begun.

    Raises:
        AuditError: there is no record in `path`, or it cannot be read.
    """
    keys = by_id(verifiers)
    found: list[KeyRange] = []
    database = database_of(path)
    with closing(database.open_read_only()) as db, database.translated():
        log = store.record_id(db)
        chains = db.execute("SELECT writer, max(n), min(at), max(at) FROM event GROUP BY writer ORDER BY min(id)")
        for chain, last, first_ns, last_ns in chains.fetchall():
            changed = store.events(db, "writer = ? AND kind = ?", chain, records.KEY_CHANGED)
            successor = "".join(str(event.fields["new"]) for event in changed)
            rows = db.execute(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoint WHERE writer = ? ORDER BY n", (chain,))
            by_key: dict[tuple[str, str], list[Any]] = {}
            for head in (head_of(log, row) for row in rows):
                if head is not None:
                    verifier = keys.get(head.key)
                    state = UNKNOWN if verifier is None else VALID if head.is_signed_by(verifier) else FORGED
                    by_key.setdefault((head.key, state), []).append(head)
            for (key, state), heads in by_key.items():
                found.append(
                    KeyRange(
                        chain,
                        heads[-1].seq,
                        key,
                        algorithm_of(heads[0].signature),
                        len(heads),
                        heads[0].at_ns,
                        heads[-1].at_ns,
                        state,
                        successor,
                    )
                )
            signed = max((heads[-1].seq for heads in by_key.values()), default=0)
            if signed < last:
                found.append(KeyRange(chain, last, "", "", 0, first_ns, last_ns, UNSIGNED))
    return found


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


def rotate(path: Path, logs: Iterable[Place], algorithm: str = "") -> tuple[Signer, Signer]:
    """Replace the key at `path` by a new one and return both. The old key is kept beside it, to verify with.

    Each record gets an event, signed with the old key, that names the new one. Open writers go on with the old key.

    Raises:
        AuditError: the key or a record cannot be used. The key at `path` is still the old one.
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
