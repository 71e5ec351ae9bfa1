"""Retention beyond the chain that is being written: of chains that nobody writes any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolcell.audit.config import AuditConfig
from toolcell.audit.format import LOCK_FILE, chain_directories, read_log_id, segment_files
from toolcell.audit.keys import Signer, Verifier
from toolcell.audit.pruning import ClosedSegment, Pruner
from toolcell.errors import AuditError
from toolcell.support.file_lock import take_lock
from toolcell.support.log import logger_of

logger = logger_of("toolcell.audit")

IDLE_PRUNE_S = 3600.0
"""How often a writer looks for expired segments of chains that nobody writes."""


@dataclass(slots=True)
class IdleChain:
    """A chain that no process writes. Its newest segment stays."""

    path: Path
    log: str
    name: str
    segment: int
    segment_bytes: int
    record: Callable[[str, int, tuple[Any, ...]], int]
    """Writes the record of a removal, into the chain of the process that removes."""

    def append(self, kind: str, run: int, fields: tuple[Any, ...]) -> int:
        """Record the removal, with the name of the chain."""
        return self.record(kind, run, (*fields[:-1], {"chain": self.name}))


def _idle_chain(path: Path, log: str, record: Callable[[str, int, tuple[Any, ...]], int]) -> IdleChain | None:
    found = segment_files(path)
    if len(found) < 2:
        return None
    newest = max(found)
    return IdleChain(
        path, log, name=path.name, segment=newest, segment_bytes=found[newest].lstat().st_size, record=record
    )


def prune_idle(
    directory: Path,
    log: str,
    own: str,
    config: AuditConfig,
    signer: Signer,
    record: Callable[[str, int, tuple[Any, ...]], int],
    lock: AbstractContextManager[object],
) -> int:
    """Remove expired segments of every chain but our `own` that no process writes; return how many.

    A chain that does not verify, or is signed with another key, is left as it is.
    """
    if config.keep_bytes is None and config.keep_s is None:
        return 0
    removed = 0
    for path in chain_directories(directory):
        if path.name == own:
            continue
        held = None
        try:
            if (held := take_lock(path / LOCK_FILE)) is None:
                continue
            chain = _idle_chain(path, log, record)
            removed += Pruner(chain, config, signer).prune(lock) if chain is not None else 0
        except (AuditError, OSError) as exc:
            logger.warning("old segments of chain %s of the audit log could not be removed: %s", path.name, exc)
        finally:
            if held is not None:
                os.close(held)
    return removed


@dataclass(frozen=True, slots=True)
class ExpiredSegment:
    """A segment that retention would remove."""

    chain: str
    segment: ClosedSegment

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        each = self.segment
        return {
            "chain": self.chain,
            "segment": each.number,
            "bytes": each.size,
            "last_seq": each.seq,
            "newest_ns": each.newest_ns,
        }


def expired_segments(directory: Path, config: AuditConfig, keys: Iterable[Verifier]) -> Iterator[ExpiredSegment]:
    """Yield what pruning with these settings would remove, of each chain; writes and removes nothing.

    Raises:
        AuditError: there is no log, or a prune record or a segment cannot be read.
    """
    log, known = read_log_id(directory), [*keys]
    for path in chain_directories(directory):
        chain = _idle_chain(path, log, _refuse)
        if chain is not None:
            for each in Pruner(chain, config, None, known).expired():
                yield ExpiredSegment(path.name, each)


def _refuse(kind: str, run: int, fields: tuple[Any, ...]) -> int:
    raise AssertionError("nothing is recorded where nothing is removed")
