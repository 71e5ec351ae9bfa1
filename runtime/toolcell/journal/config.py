"""Settings of the directory of journals."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from toolcell.config import SettingsModel


class JournalConfig(SettingsModel):
    """Where the journals of runs are kept, and for how long."""

    directory: Path
    """Belongs to the host alone: it holds scripts, arguments and answers as they are, and the key of the tokens."""

    token_s: PositiveFloat = Field(default=7 * 86_400.0, le=366 * 86_400)
    """Seconds until the token of a suspended run expires."""

    keep_s: PositiveFloat = Field(default=14 * 86_400.0, le=3660 * 86_400)
    """Seconds after which the journal of a run that is not under way is removed, when a Runtime opens."""

    most_bytes: PositiveInt | None = None
    """Bytes of all files in the directory. A run that would need more is refused. None: any number."""

    most_files: PositiveInt | None = None
    """Files in the directory. None: any number."""

    keep_ended: bool = True
    """False, for hosts with many runs: the journal of a run is written from its first call on, and removed when the run
    ends. A run that was interrupted before that is not carried on: it is run again."""
