"""Witnesses: places outside the log that are told how far each chain has got, and can be asked later.

Whoever can change the log and its heads on this host can put back an older copy, and nothing here would tell. A witness
on another machine, or on a file system that can only be appended to, tells. Witnesses get signed heads, and no content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from toolcell.audit.signatures import Head
from toolcell.errors import AuditError, UsageError

MAX_LINE_BYTES: Final = 4096
"""A head is a tenth of it. Longer lines are not read."""
MAX_CHAINS: Final = 100_000
"""Most chains of one log, that a witness may name. A log has one chain for each writer that was alive at the same
time."""


class Witness(Protocol):
    """An append-only place for heads. Used in one thread at a time."""

    @property
    def name(self) -> str:
        """Names the place in the log, such as `file:/mnt/worm/heads.jsonl`; no credentials."""
        ...

    def push(self, head: Head) -> None:
        """Keep a head.

        Raises:
            WitnessFailed: it was not kept, or nobody knows.
        """
        ...

    def heads(self, log: str) -> Iterable[Head]:
        """Return the heads of a log as kept, in any order: whether they are genuine is for the caller to check.

        Raises:
            WitnessFailed: they cannot be read.
        """
        ...


class WitnessFailed(UsageError, AuditError):
    """A witness could not be reached, or did not keep a head."""


def longest_heads(heads: Iterable[Head], log: str) -> list[Head]:
    """Return the longest head of each chain of a log and key.

    Raises:
        WitnessFailed: there are too many.
    """
    longest: dict[tuple[str, str], Head] = {}
    for head in heads:
        place = (head.chain, head.key)
        if head.log == log and (place not in longest or head.seq > longest[place].seq):
            longest[place] = head
            if len(longest) > MAX_CHAINS:
                raise WitnessFailed(f"the witness names more than {MAX_CHAINS} chains of the log: somebody fills it")
    return list(longest.values())


def to_line(head: Head) -> str:
    """Return a head as one line of JSON."""
    return json.dumps(head.to_dict(), sort_keys=True)


def from_lines(lines: Iterable[bytes]) -> Iterator[Head]:
    """Yield the heads in lines of JSON. Other lines are passed over: anybody may add some."""
    for line in lines:
        if len(line) <= MAX_LINE_BYTES:
            with suppress(ValueError, RecursionError, AuditError):
                if isinstance(plain := json.loads(line), dict):
                    yield Head.from_dict(plain)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file.

    Raises:
        WitnessFailed: it cannot be read.
    """
    try:
        if not path.is_file():
            raise WitnessFailed(f"cannot read heads from {path}: it is not a file")
        with open(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                yield line
    except OSError as exc:
        raise WitnessFailed(f"cannot read heads from {path}: {exc.strerror}") from exc


class FileWitness:
    """A file to which a line is appended for each head: on another machine's mount, or append-only (`chattr +a`)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self.name = f"file:{self._path}"

    def push(self, head: Head) -> None:
        """Append a line and wait until it is on disk.

        Raises:
            WitnessFailed: it could not be written.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags, 0o600)
            with open(descriptor, "ab", buffering=0) as file:
                data = f"{to_line(head)}\n".encode()
                if file.write(data) != len(data):
                    raise WitnessFailed(f"{self.name}: the disk is full")
                os.fsync(descriptor)
        except OSError as exc:
            raise WitnessFailed(f"{self.name}: {exc.strerror}") from exc

    def heads(self, log: str) -> Iterator[Head]:
        """Yield the heads in the file.

        Raises:
            WitnessFailed: the file cannot be read.
        """
        yield from (head for head in from_lines(read_lines(self._path)) if head.log == log)
