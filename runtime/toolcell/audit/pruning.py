"""Remove old segments from a chain's beginning. A signed prune record takes their place, so the rest still verifies.

What is old or large is read from signed records, never from a file's time or size, and a segment that does not verify
is not removed: nobody without the key can make the log forget.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolcell.audit import records
from toolcell.audit.chain_check import ChainCheck
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import PRUNE_FILE, chain_directories, json_bytes, read_segment_file, segment_files
from toolcell.audit.keys import Signer, Verifier, by_id
from toolcell.audit.signatures import PruneRecord, read_prune_record
from toolcell.audit.tail import end_of_segment
from toolcell.audit.verification import check_chain, signed_redactions
from toolcell.errors import AuditError
from toolcell.support.atomic import write_file
from toolcell.support.log import logger_of

logger = logger_of("toolcell.audit")


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """One verified segment that might be removed."""

    number: int
    size: int
    newest_ns: int
    """When its last record was written."""
    seq: int
    """Number of its last record."""
    record_hash: bytes
    """Hash of its last record."""
    sha256: bytes
    """SHA-256 of the file."""


def count_expired(closed: list[ClosedSegment], newest_bytes: int, config: AuditConfig, now_ns: int) -> int:
    """Return how many of the oldest closed segments to remove. `newest_bytes` is the open segment, which stays."""
    total = newest_bytes + sum(each.size for each in closed)
    for count, segment in enumerate(closed):
        too_large = config.keep_bytes is not None and total > config.keep_bytes
        too_old = config.keep_s is not None and now_ns - segment.newest_ns > config.keep_s * 1e9
        if not (too_large or too_old):
            return count
        total -= segment.size
    return len(closed)


class PrunableChain(Protocol):
    """A chain of which segments may be removed: the one that this process writes, or one that nobody writes."""

    path: Path
    log: str
    name: str
    segment: int
    """Number of the segment that stays in any case; all before it are closed."""
    segment_bytes: int
    """Size of that segment."""

    def append(self, kind: str, run: int, fields: tuple[Any, ...]) -> int:
        """Record the removal."""
        ...


class Pruner:
    """Removes expired segments of a chain. Each segment is read and verified once."""

    def __init__(
        self,
        chain: PrunableChain,
        config: AuditConfig,
        signer: Signer | None,
        keys: Iterable[Verifier] = (),
    ) -> None:
        """`signer` is None where nothing is to be removed; `keys` are those that the log may be signed with, too."""
        self._chain = chain
        self._config = config
        self._signer = signer
        self._keys = by_id((*keys, *((signer,) if signer is not None else ())))
        self._check: ChainCheck | None = None
        """The check of everything up to the last segment of `_closed`."""
        self._closed: list[ClosedSegment] = []

    def prune(self, lock: AbstractContextManager[object]) -> int:
        """Remove the segments that have expired; return how many. Takes `lock` to write the record of it.

        The prune record comes first, then the log's own record of it, and only then are files removed. If this is cut
        short, the next pruning removes the files that are left.

        Raises:
            AuditError: the prune record is damaged or forged, or a segment cannot be read.
        """
        signer, chain = self._signer, self._chain
        assert signer is not None
        before, files = self._read_prune_record(), segment_files(chain.path)
        if self._config.keep_bytes is None and self._config.keep_s is None:
            return 0
        if before is not None:
            _remove(files, before.last_segment)
        removed = self.expired()
        if not removed:
            return 0
        count = len(removed)
        made = self._make_record(removed, before, signer)
        self._closed = self._closed[count:]
        write_file(chain.path / PRUNE_FILE, json_bytes(made.to_dict()))
        reason = "size" if self._config.keep_bytes is not None else "age"
        with lock:
            found: tuple[object, ...] = (removed[0].number, made.last_segment, made.seq, made.record_hash, reason, {})
            chain.append(records.PRUNED, 0, found)
        _remove(files, made.last_segment)
        return count

    def expired(self) -> list[ClosedSegment]:
        """Return the segments that would be removed now; removes nothing.

        Raises:
            AuditError: the prune record is damaged or forged, or a segment cannot be read.
        """
        chain = self._chain
        self._verify(segment_files(chain.path), self._read_prune_record())
        count = count_expired(self._closed, chain.segment_bytes, self._config, time.time_ns())
        return self._closed[:count]

    def _read_prune_record(self) -> PruneRecord | None:
        before = read_prune_record(self._chain.path)
        if before is None:
            return None
        verifier = self._keys.get(before.key)
        is_ours = (before.log, before.chain) == (self._chain.log, self._chain.name)
        if not is_ours or verifier is None or not before.is_signed_by(verifier):
            raise AuditError(f"{self._chain.path / PRUNE_FILE} was not signed with this log's key: nothing is removed")
        return before

    def _verify(self, files: dict[int, Path], before: PruneRecord | None) -> None:
        """Check closed segments that were not checked yet. Stop at the first that is not what was signed."""
        if self._check is None:
            self._check = ChainCheck(self._chain.log, self._chain.name, self._keys)
            if before is not None:
                self._check.start_after(before)
        for number in [number for number in files if self._check.segment < number < self._chain.segment]:
            data = read_segment_file(files[number])
            check = self._check.copy()
            check.check_segment(number, data)
            end = end_of_segment(number, io.BytesIO(data))
            why = check.findings[0].message if check.findings else self._why_kept(check)
            if why or end is None or end.last is None or not check.ends_signed:
                why = why or "its end is not signed"
                logger.warning("segments of the audit log from %s on are kept: %s", files[number], why)
                return
            at_ns = records.parse(end.last.body).at_ns
            digest = hashlib.sha256(data).digest()
            self._closed.append(
                ClosedSegment(
                    number, len(data), newest_ns=at_ns, seq=end.seq, record_hash=end.record_hash, sha256=digest
                )
            )
            self._check = check

    def _why_kept(self, check: ChainCheck) -> str:
        """Say why a segment that verifies stays for now: for what it says, or does not say, of redactions."""
        assert self._check is not None
        for _, _, fields in check.redactions[len(self._check.redactions) :]:
            if self._is_there(fields["chain"], fields["seq"]):
                return f"it says who redacted record {fields['seq']} of chain {fields['chain']}, which is still there"
        fresh = check.redacted.keys() - self._check.redacted.keys()
        if not fresh:
            return ""
        keys, log = self._keys, self._chain.path.parent
        signed = signed_redactions(check_chain(path, self._chain.log, keys) for path in chain_directories(log))
        for seq in fresh:
            fields = signed.get((self._chain.name, seq), {})
            if check.redacted[seq] != (fields.get("original"), fields.get("left")):
                return f"content of record {seq} was removed, and no signed record says so"
        return ""

    def _is_there(self, chain: str, seq: int) -> bool:
        path = self._chain.path.parent / chain
        if path not in chain_directories(self._chain.path.parent):
            return False
        pruned = read_prune_record(path)
        return pruned is None or seq > pruned.seq

    def _make_record(self, removed: list[ClosedSegment], before: PruneRecord | None, signer: Signer) -> PruneRecord:
        digest = "" if before is None else before.files_sha256
        for each in removed:
            digest = hashlib.sha256(digest.encode() + each.sha256).hexdigest()
        last = removed[-1]
        values = (
            self._chain.log,
            self._chain.name,
            last.number,
            last.seq,
            last.record_hash,
            last.newest_ns,
            digest,
            time.time_ns(),
            signer.key_id,
        )
        return PruneRecord(*values, signer.sign(PruneRecord.statement(*values[:-1])))


def _remove(files: dict[int, Path], last: int) -> None:
    for number, path in files.items():
        if number <= last:
            path.unlink(missing_ok=True)
