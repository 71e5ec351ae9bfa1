"""Settings of a record: what it keeps of values, redaction, retention, key, and how soon it is on disk.

Loadable from TOML: `--record-config FILE`, and the table `record` of a tenant of the service.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from toolcell.config import GIB, KIB
from toolcell.settings import SettingsModel, setting

Keep = Literal["full", "digest", "omit"]
"""`full` records the value, `digest` its size and sha256, `omit` only that there was a value."""

SENSITIVE_NAMES: tuple[str, ...] = (
    "password", "passwd", "passwords", "passphrase", "secret", "secrets", "token", "apikey", "accesskey", "privatekey",
    "authorization", "credential", "credentials", "cookie", "cookies",
)  # fmt: skip
"""A value is hidden when the letters of its key end with one of these: db_password, apiKey, x-auth-token."""


def _compile(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ValueError(f"{pattern!r} is not a regular expression: {exc}") from exc
    return patterns


class ToolContent(SettingsModel):
    """What is recorded of one tool's calls."""

    args: Keep = "full"
    """Arguments, as the caller gave them and as the tool received them."""

    results: Keep = "full"
    """The tool's result, or why and where it failed. A replay stops at a result that was not kept in full."""


class RecordConfig(SettingsModel):
    """Settings of a record."""

    fsync: Literal["never", "checkpoint", "always"] = "checkpoint"
    """When records must have reached the disk. When the machine loses power, `checkpoint` loses the records after the
    last checkpoint, `always` loses none, `never` leaves it to the kernel. A killed process loses at most ends of calls
    of its last 50 ms; with `always` it loses none. A PostgreSQL server decides by itself (`synchronous_commit`)."""

    checkpoint_s: float = setting(default=1.0, gt=0, le=365 * 86400)
    """A record is signed at most this many seconds after it was written."""

    checkpoint_records: int = setting(default=5000, gt=0)
    """An event is signed after at most this many further events."""

    keep_bytes: int | None = setting(default=None, ge=0)
    """Remove the oldest runs while events have more bytes than this; None keeps all. Runs under way stay."""

    keep_s: float | None = setting(default=None, gt=0)
    """Remove runs whose last event is older than this; None keeps all."""

    token_s: float = setting(default=7 * 86_400.0, gt=0, le=366 * 86_400)
    """Seconds until the token of a suspended run expires."""

    continue_s: float = setting(default=14 * 86_400.0, gt=0, le=3660 * 86_400)
    """Remove what a run, session, draft or map needs to go on when it is not under way and was not written for so long.
    Looked for when a Runtime opens."""

    continue_bytes: int | None = setting(default=GIB, ge=0)
    """Bytes of what runs, sessions, drafts and maps need to go on, and of answers to idempotency keys. A run that would
    need more is refused. None: any number. 0: nothing of it is written, and what waits ends with its Runtime; a service
    writes idempotency keys without answers."""

    key: Path | None = None
    """File of the key that signs. None: your own, which is made when there is none."""

    tools: dict[str, ToolContent] = setting(default_factory=lambda _: {})
    """By tool name or glob; the first match decides. Tools not named here are recorded in full."""

    value_bytes: int = setting(default=64 * KIB, ge=64)
    """Larger arguments or results are recorded as size, sha256 and their beginning."""

    source_bytes: int = setting(default=256 * KIB, ge=64)
    """The same for a script."""

    logs_bytes: int = setting(default=128 * KIB, ge=64)
    """The same for a script's output, both streams together."""

    file_bytes: int = setting(default=64 * KIB, ge=0)
    """The same for each input file. Of returned files, only size and sha256 are recorded."""

    redact_names: tuple[str, ...] = SENSITIVE_NAMES
    """The values of these keys are never recorded; see `SENSITIVE_NAMES`."""

    redact_patterns: Annotated[tuple[str, ...], AfterValidator(_compile)] = ()
    """Regular expressions to redact in every text, in addition to the built-in ones for well-known credentials. If an
    expression has a group, only the group is redacted."""

    repeatable: bool = True
    """Record the seed, hash seed and clock of each run, so that a replay can repeat it. Everybody who reads the record
    can then compute every random number that a script drew."""

    def content_of(self, tool: str) -> ToolContent:
        """Return what is recorded of calls of `tool`."""
        return next((kept for glob, kept in self.tools.items() if fnmatch.fnmatchcase(tool, glob)), FULL)


FULL = ToolContent()
