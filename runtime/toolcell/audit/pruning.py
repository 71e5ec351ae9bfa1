"""Remove old segments from a chain's beginning. A signed prune record takes their place, so the rest still verifies."""

from __future__ import annotations

import hashlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from toolcell.audit import records
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import PRUNE_FILE, Frame, json_text, replace_file, segment_files, split_segment
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import PruneRecord, read_prune_record
from toolcell.audit.writer import ChainWriter


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """One segment that might be removed."""

    number: int
    bytes: int
    newest_ns: int


def count_expired(closed: list[ClosedSegment], newest_bytes: int, config: AuditConfig, now_ns: int) -> int:
    """Return how many of the oldest closed segments to remove. `newest_bytes` is the open segment, which stays."""
    total = newest_bytes + sum(each.bytes for each in closed)
    for count, segment in enumerate(closed):
        too_large = config.keep_bytes is not None and total > config.keep_bytes
        too_old = config.keep_s is not None and now_ns - segment.newest_ns > config.keep_s * 1e9
        if not (too_large or too_old):
            return count
        total -= segment.bytes
    return len(closed)


def prune(chain: ChainWriter, config: AuditConfig, signer: Signer, lock: AbstractContextManager[object]) -> int:
    """Remove the segments that have expired; return how many. Takes `lock` to write the record of it.

    The prune record is written first, then the log's own record of it, and only then are files removed. If this is cut
    short, the next pruning removes the files that are left.
    """
    if config.keep_bytes is None and config.keep_s is None:
        return 0
    files = segment_files(chain.path)
    before = read_prune_record(chain.path)
    removed = 0 if before is None else before.last_segment
    _remove(files, removed)
    numbers = [number for number in files if removed < number < chain.segment]
    closed = [ClosedSegment(each, files[each].stat().st_size, files[each].stat().st_mtime_ns) for each in numbers]
    count = count_expired(closed, chain.segment_bytes, config, time.time_ns())
    if count == 0:
        return 0
    made = _make_record(chain, [files[each] for each in numbers[:count]], numbers[count - 1], before, signer)
    replace_file(chain.path / PRUNE_FILE, json_text(made.to_dict()))
    reason = "size" if config.keep_bytes is not None else "age"
    with lock:
        chain.append(records.PRUNED, 0, (numbers[0], made.last_segment, made.seq, made.record_hash, reason, {}))
    _remove(files, made.last_segment)
    return count


def _make_record(
    chain: ChainWriter, files: list[Path], last_segment: int, before: PruneRecord | None, signer: Signer
) -> PruneRecord:
    digest = "" if before is None else before.files_sha256
    data = b""
    for file in files:
        data = file.read_bytes()
        digest = hashlib.sha256(digest.encode() + hashlib.sha256(data).digest()).hexdigest()
    last = [piece for piece in split_segment(data) if isinstance(piece, Frame)][-1]
    record = records.parse(last.body)
    values = (
        chain.log, chain.name, last_segment, record.seq, last.record_hash, record.at_ns, digest, time.time_ns(),
        signer.key_id,
    )  # fmt: skip
    return PruneRecord(*values, signer.sign(PruneRecord.statement(*values[:-1])))


def _remove(files: dict[int, Path], last: int) -> None:
    for number, path in files.items():
        if number <= last:
            path.unlink(missing_ok=True)
