"""What the `toolcell audit` commands are given: the log, the run, keys, filters and times."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from toolcell.audit import keys
from toolcell.audit.filters import Filter
from toolcell.audit.format import LOG_FILE, BadInput, read_log_id
from toolcell.audit.key_ranges import retired_keys
from toolcell.audit.query import TRUSTS
from toolcell.audit.reader import UNFINISHED
from toolcell.audit.run_record import ABORTED
from toolcell.errors import AuditError, UsageError
from toolcell.results import Outcome

DEFAULT_DIR = "runs"
OUTCOMES = (*map(str, Outcome), ABORTED, UNFINISHED)
"""The values of `--outcome`."""

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

Dir = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="The log.", show_default=False)]
DirAndRun = Annotated[list[str], typer.Argument(metavar="[DIR] RUN", help="The log and the run.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document.")]
ReadOnly = Annotated[
    bool, typer.Option("--read-only", help="Write nothing anywhere: read the whole log, and keep no index of it.")
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option("--key", "-k", metavar="FILE", help="A key to check signatures with; repeatable. Default: ours."),
]


def parse_time(text: str) -> int:
    """Read a date, a date and time, or a time ago such as 90m or 2d; return nanoseconds since the epoch.

    Raises:
        UsageError: the text is none of these.
    """
    if match := _AGO.fullmatch(text.strip()):
        return time.time_ns() - int(float(match[1]) * _SECONDS[match[2]] * 1e9)
    try:
        return int(datetime.fromisoformat(text.strip()).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError) as exc:
        raise UsageError(f"{text!r} is no time such as 2026-11-21, 2026-11-21T14:30, 90m or 2d") from exc


def default_directory() -> Path:
    """Return $TOOLCELL_AUDIT, or ./runs.

    Raises:
        UsageError: there is no log in it.
    """
    directory = Path(os.environ.get("TOOLCELL_AUDIT") or DEFAULT_DIR)
    try:
        read_log_id(directory)
    except BadInput as exc:
        raise UsageError(f"{exc}; name the log's directory (to `verify`, or a receipt) or set $TOOLCELL_AUDIT") from exc
    return directory


def load_keys(files: list[Path] | None) -> list[keys.Verifier]:
    """Load the keys to check signatures with: those named, or our own.

    Raises:
        UsageError: a file cannot be read, or is not a key.
    """
    try:
        if files:
            return [keys.load_verifier(path) for path in files]
        path = keys.default_key_path()
        return [keys.load_verifier(path), *retired_keys(path)]
    except AuditError as exc:
        hint = "" if files else "; name the key to check signatures with: --key FILE"
        raise UsageError(f"{exc}{hint}") from exc


def known_keys(files: list[Path] | None) -> list[keys.Verifier]:
    """Load the keys named, or our own if there is one. Without a key, runs are shown as unverified.

    Raises:
        UsageError: a key that was named cannot be read.
    """
    if files:
        return load_keys(files)
    path = keys.default_key_path()
    found = retired_keys(path)
    with suppress(AuditError):
        found.insert(0, keys.load_verifier(path))
    return found


def split_target(target: list[str]) -> tuple[Path, str]:
    """Split `DIR RUN`, or `RUN` alone, into directory and run.

    Raises:
        UsageError: there are more than two arguments, or the only one is a log or a file.
    """
    if len(target) > 2:
        raise UsageError(f"expected a log and a run, not {' '.join(target)}")
    if len(target) == 1 and (target[0].endswith("/") or os.path.exists(os.path.join(target[0], LOG_FILE))):
        why = f"`toolcell audit list {target[0]}` shows its runs, and `last` is the newest"
        raise UsageError(f"RUN is missing: {target[0]} is taken for the log, which comes before RUN; {why}")
    if len(target) == 1 and target[0].endswith(".json") and os.path.isfile(target[0]):
        raise UsageError(f"{target[0]} is a file and no RUN; `toolcell audit verify {target[0]}` checks a receipt")
    return (Path(target[0]) if len(target) == 2 else default_directory()), target[-1]


@dataclass(frozen=True, slots=True)
class FilterFlags:
    """Flags that say which runs are meant."""

    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="2026-11-21, 2026-11-21T14:30, 90m, 2d.")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="The same; runs before it.")] = None
    outcome: Annotated[str | None, typer.Option("--outcome", metavar="NAME", help="ok, error, unfinished, ...")] = None
    tool: Annotated[
        str | None, typer.Option("--tool", "-t", metavar="NAME", help="Runs that called it; may be a glob.")
    ] = None
    sha256: Annotated[
        str | None, typer.Option("--sha256", metavar="HEX", help="The script's digest, or its beginning.")
    ] = None
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Thread, chat or channel, or the run above.")
    ] = None
    user: Annotated[str | None, typer.Option("--user", metavar="ID", help="For whom it ran.")] = None
    trust: Annotated[
        str | None, typer.Option("--trust", metavar="NAME", help="verified, unsigned, unverified or broken.")
    ] = None

    def filter(self, limit: int = 0) -> Filter:
        """Make the filter that the flags describe. `limit`: the newest so many runs; 0 is all.

        Raises:
            UsageError: the value of a flag is wrong.
        """
        if self.outcome is not None and self.outcome not in OUTCOMES:
            raise UsageError(f"--outcome {self.outcome!r}: want one of {', '.join(OUTCOMES)}")
        if self.trust is not None and self.trust not in TRUSTS:
            raise UsageError(f"--trust {self.trust!r}: want one of {', '.join(TRUSTS)}")
        return Filter(
            trust=self.trust,
            since_ns=parse_time(self.since) if self.since else None,
            until_ns=parse_time(self.until) if self.until else None,
            outcome=self.outcome,
            tool=self.tool,
            sha256=self.sha256,
            session=self.session,
            user=self.user,
            limit=limit or None,
        )
