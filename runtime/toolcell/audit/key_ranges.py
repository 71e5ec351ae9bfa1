"""Which key signed which events of a record, and how one key is replaced by the next."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
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
    default_key_path,
    load_signer,
    retired_key_path,
)
from toolcell.audit.log import AuditLog
from toolcell.audit.signatures import CHECKPOINT_COLUMNS, head_of
from toolcell.errors import UsageError

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


def rotate(path: Path | None, logs: Iterable[Place], algorithm: str = "") -> tuple[Path, Signer, Signer]:
    """Replace a key by a new one; return the file and both. The old key is kept beside it, to verify with.

    `path`: None is our own key.

    Each record gets an event, signed with the old key, that names the new one. Open writers go on with the old key.

    Raises:
        AuditError: the key or a record cannot be used. The key at `path` is still the old one.
        UsageError: there is no such algorithm, or a file is in the way.
    """
    path = path or default_key_path()
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
    new.save(path, replace=True)
    return path, old, new


def _generate(algorithm: str) -> HmacKey | Ed25519Signer:
    if algorithm == HMAC:
        return HmacKey.generate()
    if algorithm == ED25519:
        return Ed25519Signer.generate()
    raise UsageError(f"no key is of kind {algorithm!r}: want {HMAC} or {ED25519}")
