"""Compare a log with what its witnesses kept."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from toolcell.audit.chain_check import BAD_HEAD, BROKEN_LINK, ChainCheck, Finding
from toolcell.audit.keys import Verifier
from toolcell.audit.signatures import Head

UNWITNESSED = "unwitnessed"
WITNESS_BEHIND = "witness_behind"


NEW_CHECKPOINTS: Final = 2
"""A chain that is not closed and has no more may have been begun so late that its first head is on its way."""
MAX_CONTRADICTIONS: Final = 100
"""Reported of one witness: one is enough."""


def check_witness(
    name: str, heads: Iterable[Head], log: str, checks: Mapping[str, ChainCheck], keys: Mapping[str, Verifier]
) -> Iterator[Finding]:
    """Compare all heads that a witness has now with a log that was checked just before.

    Every head counts, not only the longest: who has the key can write history anew and show a witness its new end.
    """
    longest: dict[str, int] = {}
    removals = _Removals(checks, keys)
    contradictions = _contradictions(_noted(heads, longest, removals), checks, keys)
    yield from itertools.islice(contradictions, MAX_CONTRADICTIONS)
    for _ in contradictions:
        pass  # the longest heads may come last
    yield from _find_forgotten(name, longest, log, checks.values(), removals.known)
    yield from removals.find(name)


def _noted(heads: Iterable[Head], longest: dict[str, int], removals: _Removals) -> Iterator[Head]:
    """Yield the heads, and note the longest of each chain."""
    for head in heads:
        longest[head.chain] = max(longest.get(head.chain, 0), head.seq)
        removals.note(head)
        yield head


class _Removals:
    """Finds prune records that a witness was not told of, although it was shown some of what is gone.

    A writer shows its witnesses the head of what it removes, with the time of the prune record, before it removes it.
    """

    def __init__(self, checks: Mapping[str, ChainCheck], keys: Mapping[str, Verifier]) -> None:
        self._pruned = {name: check.pruned for name, check in checks.items() if check.pruned is not None}
        self._keys = keys
        self._latest_heads: dict[str, int] = {}
        """Chain to the seq of a head that the witness was shown and whose record is gone."""
        self._told: set[str] = set()
        self.known: set[str] = set()
        """Chains that the witness was shown, and not only to be told of a removal."""

    def note(self, head: Head) -> None:
        """Take note of a head of the witness."""
        pruned = self._pruned.get(head.chain)
        place = (head.seq, head.record_hash, head.at_ns)
        if pruned is not None and place == (pruned.seq, pruned.record_hash, pruned.at_ns):
            self._told.add(head.chain)
            return
        self.known.add(head.chain)
        if pruned is not None and head.seq <= pruned.seq and head.chain not in self._latest_heads:
            verifier = self._keys.get(head.key)
            if verifier is not None and head.is_signed_by(verifier):
                self._latest_heads[head.chain] = head.seq

    def find(self, name: str) -> Iterator[Finding]:
        """Yield the findings. Call it after the last head."""
        for chain, seq in self._latest_heads.items():
            if chain not in self._told:
                upto = self._pruned[chain].seq
                message = (
                    f"witness {name} was shown record {seq}, and was not told that records up to {upto} were removed"
                )
                yield Finding(UNWITNESSED, chain, None, upto, None, message)


def _contradictions(
    heads: Iterable[Head], checks: Mapping[str, ChainCheck], keys: Mapping[str, Verifier]
) -> Iterator[Finding]:
    seen: set[tuple[str, int, bytes]] = set()
    for head in heads:
        check = checks.get(head.chain)
        if check is None or not check.first_seq <= head.seq <= check.seq:
            continue  # the longest heads tell of these
        place = (head.chain, head.seq, head.record_hash)
        if check.checkpoint_hashes.get(head.seq) == head.record_hash or place in seen:
            continue
        seen.add(place)
        verifier = keys.get(head.key)
        if verifier is not None and head.is_signed_by(verifier):
            message = f"record {head.seq} is not the one that a witness was shown: the chain was written anew"
            yield Finding(BROKEN_LINK, head.chain, None, head.seq, None, message)
        else:
            message = f"a head at record {head.seq} that a witness has was not signed with key {head.key}"
            yield Finding(BAD_HEAD, head.chain, None, head.seq, None, message)


def _find_forgotten(
    name: str, longest: Mapping[str, int], log: str, checks: Iterable[ChainCheck], known: Container[str]
) -> Iterator[Finding]:
    """Find a witness that does not know the log or a chain of it, or that no longer has a head that it was shown.

    A chain without a valid signature need not be known: its writer may have been killed before it had a head. Nor need
    one that was only just begun.
    """
    if not longest:
        message = f"witness {name} has no head of log {log}: the log was replaced, or it was never shown it"
        yield Finding(UNWITNESSED, "", None, None, None, message)
        return
    checked = list(checks)
    for check in checked:
        is_new = check.checkpoints <= NEW_CHECKPOINTS and check.last_reason != "closed"
        if check.chain not in known and check.signed_seq and not is_new:
            message = f"witness {name} has no head of it: it was added, or this witness was not shown it"
            yield Finding(UNWITNESSED, check.chain, None, None, None, message)
    for chain, seq, said_in in _latest_heads(name, checked):
        if longest.get(chain, 0) < seq:
            message = f"witness {name} was shown record {seq} (so says chain {said_in}) and has it no longer"
            yield Finding(WITNESS_BEHIND, chain, None, seq, None, message)


def _latest_heads(name: str, checks: Iterable[ChainCheck]) -> Iterator[tuple[str, int, str]]:
    """Yield chain and seq of the last head of each chain that signed records say a witness kept."""
    last: dict[str, tuple[int, str]] = {}
    for check in checks:
        for at, witness, chain, seq in check.witnessed:
            if witness == name and at <= check.signed_seq:
                last[chain] = max(last.get(chain, (0, "")), (seq, check.chain))
    yield from ((chain, seq, said_in) for chain, (seq, said_in) in last.items())
