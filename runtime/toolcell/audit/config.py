"""What an audit log keeps, how it is cut into files and how soon it is on disk: frozen models, loadable from TOML.

Values only: nothing here writes.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from toolcell.config import KIB, MIB, SettingsModel

Keep = Literal["full", "digest", "omit"]
"""`full` records the value, `digest` its size and sha256, `omit` only that there was one."""

SENSITIVE_NAMES: tuple[str, ...] = (
    "password", "passwd", "passwords", "passphrase", "secret", "secrets", "token", "apikey", "accesskey", "privatekey",
    "authorization", "credential", "credentials", "cookie", "cookies",
)  # fmt: skip
"""A key whose letters end with one of these hides its value: password, db_password, apiKey, x-auth-token."""


class ToolContent(SettingsModel):
    """What is recorded of one tool's calls."""

    args: Keep = "full"
    """Arguments, as asked and as the tool received them."""

    results: Keep = "full"
    """What it answered, or why and where it failed. A run with an answer that is not there in full
    cannot be replayed past it."""


class AuditConfig(SettingsModel):
    """How runs are recorded."""

    fsync: Literal["never", "checkpoint", "always"] = "checkpoint"
    """When records must have reached the disk. All of them survive a killed process; `checkpoint` loses what came after
    the last checkpoint when the machine loses power, `always` nothing, `never` leaves it to the kernel."""

    checkpoint_s: float = Field(default=1.0, gt=0, le=365 * 86400)
    """A record is signed for at most so many seconds after it was written."""

    checkpoint_records: PositiveInt = 5000
    """Or after so many records."""

    segment_bytes: int = Field(default=16 * MIB, ge=4 * KIB, le=1024 * MIB)
    """A file larger than this is closed and the next one begun."""

    keep_bytes: int | None = Field(default=None, ge=0)
    """Remove a chain's oldest segments until it is no larger than this, its newest segment apart; None keeps all."""

    keep_s: PositiveFloat | None = None
    """Remove segments whose newest record is older than this; None keeps all."""

    tools: dict[str, ToolContent] = Field(default_factory=dict)
    """By tool name or glob; the first that fits decides. Tools not named here are recorded in full."""

    value_bytes: int = Field(default=64 * KIB, ge=64)
    """Arguments or a result larger than this are recorded as size, sha256 and their beginning."""

    source_bytes: int = Field(default=256 * KIB, ge=64)
    """The same for a script."""

    logs_bytes: int = Field(default=128 * KIB, ge=64)
    """The same for what a script printed, both streams together."""

    file_bytes: int = Field(default=64 * KIB, ge=0)
    """The same for each file put into a workspace. Of files a script returned only size and sha256 are recorded."""

    redact_names: tuple[str, ...] = SENSITIVE_NAMES
    """Keys whose values are never recorded; see `SENSITIVE_NAMES`."""

    redact_patterns: tuple[str, ...] = ()
    """Regular expressions to redact in every text, beside the built-in ones for well-known credentials. Of one with a
    group, only the group."""

    repeatable: bool = True
    """Give each run a seed, a hash seed and a clock of its own where the policy sets none, so that a replay can repeat
    them. Whoever reads the log can then compute every random number a script drew."""

    @field_validator("redact_patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as exc:
                raise ValueError(f"{pattern!r} is no regular expression: {exc}") from exc
        return patterns

    def content_of(self, tool: str) -> ToolContent:
        """What is recorded of calls of `tool`."""
        return next((kept for glob, kept in self.tools.items() if fnmatch.fnmatchcase(tool, glob)), FULL)


FULL = ToolContent()
