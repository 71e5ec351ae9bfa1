"""Forgetting: whole segments from a chain's beginning, with a signed stub in their place so that the rest verifies."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from toolcell.audit import frames, layout, records
from toolcell.audit.chain import Chain
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import PruneRecord
from toolcell.errors import AuditError


@dataclass(frozen=True, slots=True)
class Kept:
    """One segment that might be removed."""

    number: int
    bytes: int
    newest_ns: int


def expired(kept: list[Kept], newest_bytes: int, config: AuditConfig, now_ns: int) -> int:
    """How many of the oldest closed segments have to go. `newest_bytes` is the open segment, which stays."""
    total = newest_bytes + sum(each.bytes for each in kept)
    for count, segment in enumerate(kept):
        too_large = config.keep_bytes is not None and total > config.keep_bytes
        too_old = config.keep_s is not None and now_ns - segment.newest_ns > config.keep_s * 1e9
        if not (too_large or too_old):
            return count
        total -= segment.bytes
    return len(kept)


def prune(chain: Chain, config: AuditConfig, signer: Signer, lock: AbstractContextManager[object]) -> int:
    """Remove what may be forgotten; returns the number of segments. Takes `lock` to write the record of it.

    The stub is written first, then the record of it, and only then are files removed: cut short, it leaves files that
    the next pruning removes.
    """
    if config.keep_bytes is None and config.keep_s is None:
        return 0
    found = layout.segments(chain.path)
    before = read_stub(chain.path)
    _remove(found, 0 if before is None else before.last_segment)
    closed = [number for number in found if number < chain.number and (before is None or number > before.last_segment)]
    kept = [Kept(number, found[number].stat().st_size, found[number].stat().st_mtime_ns) for number in closed]
    count = expired(kept, chain.size, config, time.time_ns())
    if count == 0:
        return 0
    stub = _make_stub(chain, [found[each.number] for each in kept[:count]], kept[count - 1].number, before, signer)
    layout.write_whole(chain.path / layout.STUB_FILE, stub.to_dict())
    reason = "size" if config.keep_bytes is not None else "age"
    with lock:
        chain.append(records.RETIRED, 0, (kept[0].number, stub.last_segment, stub.seq, stub.link, reason, {}))
    _remove(found, stub.last_segment)
    return count


def read_stub(path: Path) -> PruneRecord | None:
    """The stub of a chain; None when nothing was ever removed.

    Raises:
        AuditError: it is damaged.
    """
    try:
        return PruneRecord.from_dict(json.loads((path / layout.STUB_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise AuditError(f"{path / layout.STUB_FILE} is damaged: {exc}") from exc


def _make_stub(
    chain: Chain, files: list[Path], last_segment: int, before: PruneRecord | None, signer: Signer
) -> PruneRecord:
    digest = "" if before is None else before.files_sha256
    data = b""
    for file in files:
        data = file.read_bytes()
        digest = hashlib.sha256(digest.encode() + hashlib.sha256(data).digest()).hexdigest()
    last = [piece for piece in frames.pieces(data) if isinstance(piece, frames.Frame)][-1]
    record = records.parse(last.body)
    values = (
        chain.log, chain.name, last_segment, record.seq, last.link, record.at_ns, digest, time.time_ns(), signer.key_id,
    )  # fmt: skip
    return PruneRecord(*values, signer.sign(PruneRecord.statement(*values[:-1])))


def _remove(found: dict[int, Path], last: int) -> None:
    for number, path in found.items():
        if number <= last:
            path.unlink(missing_ok=True)
