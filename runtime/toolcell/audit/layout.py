"""Where a log keeps what: names of directories and files, and finding them again.

    LOG/log.json                  the log's id
    LOG/<chain>/00000001.log      segments of one chain, in order
    LOG/<chain>/stub.json         what retention removed from its beginning, signed
    LOG/<chain>/lock              held by the process that writes the chain
    LOG/index.sqlite              for queries; can be removed at any time

Reads and makes directories; writes no record.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from toolcell.errors import AuditError, UsageError

FORMAT: Final = 1
LOG_FILE, STUB_FILE, LOCK_FILE, INDEX_FILE = "log.json", "stub.json", "lock", "index.sqlite"

_CHAIN = re.compile(r"[0-9a-f]{12}")
_SEGMENT = re.compile(r"(\d{8})\.log")


class BadInput(UsageError, AuditError):
    """What was named is not there, cannot be read or written, or is something else: nothing was found changed."""


def new_chain_name() -> str:
    """A name no other chain has."""
    return os.urandom(6).hex()


def segment_path(chain: Path, number: int) -> Path:
    """The file of a segment."""
    return chain / f"{number:08d}.log"


def chains(directory: Path) -> list[Path]:
    """Directories of a log's chains, by name."""
    try:
        return sorted(entry for entry in directory.iterdir() if _CHAIN.fullmatch(entry.name) and entry.is_dir())
    except OSError as exc:
        raise BadInput(f"cannot read the audit log {directory}: {exc.strerror}") from exc


def segments(chain: Path) -> dict[int, Path]:
    """Number to file, in order."""
    found = {int(match[1]): entry for entry in chain.iterdir() if (match := _SEGMENT.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def log_id(directory: Path) -> str:
    """The id a log was given when it was begun.

    Raises:
        BadInput: there is no log there, or none that we may read.
        AuditError: what says its id is damaged.
    """
    try:
        described = json.loads((directory / LOG_FILE).read_text(encoding="utf-8"))
        return str(described["log"])
    except FileNotFoundError as exc:
        raise BadInput(f"there is no audit log in {directory}") from exc
    except NotADirectoryError as exc:
        why = "is a file, and a log is a directory; a receipt is read by `toolcell audit verify` alone"
        raise BadInput(f"{directory} {why}") from exc
    except OSError as exc:
        why = f"{exc.strerror}; a log is read by the user who writes it"
        raise BadInput(f"cannot read {directory / LOG_FILE}: {why}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise AuditError(f"{directory / LOG_FILE} is damaged: {exc}") from exc


def make_log(directory: Path) -> str:
    """The id of the log in `directory`, which is made if need be. Safe in several processes at once.

    Raises:
        AuditError: it cannot be made there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = directory / LOG_FILE
        if not place.exists():
            with suppress(FileExistsError):
                write_new(place, {"format": FORMAT, "log": os.urandom(16).hex()})
    except OSError as exc:
        raise AuditError(f"cannot make an audit log in {directory}: {exc.strerror}") from exc
    return log_id(directory)


def write_new(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all, and replaces nothing.

    Raises:
        FileExistsError: it is there already.
    """
    draft = _draft(path, content)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that replaces the old one in one step."""
    os.replace(_draft(path, content), path)


def _draft(path: Path, content: Mapping[str, Any]) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
    return draft
